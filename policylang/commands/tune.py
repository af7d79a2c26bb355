"""Write a policy from a budget: the one that loses the least time within so much memory, or takes the least memory for
so much time.

The graph is a snapshot (see `policylang snapshot`); no model and no GPU are needed. --peak limits the peak of the step,
parameters and gradients included; --optimizer adds the optimizer's state to it, --reserve what the allocator wastes.
--saved limits the bytes saved for the backward alone, --recompute-time the time of recomputation. The result is a
policy as a person writes it, with a comment on its origin and its neighbours, and an expectation of the budget.

Without -o the policy is printed, and its figures go to the standard error. --table prints the whole trade-off, one
policy per row, and needs no budget.

examples:

  policylang tune --graph my.graph --peak "70 GiB" --device h100-sxm -o 70g.apl
  policylang tune --graph my.graph --peak "70 GiB" --device b200 --reserve 5%
  policylang tune --graph my.graph --saved "6 GiB" --device a100-sxm-80gb
  policylang tune --graph my.graph --recompute-time 5% --device cluster.toml
  policylang tune --graph my.graph --device h100-sxm --table

exit codes: 0 tuned, 1 no policy meets the budget, or the graph or the profile cannot be used (no file is written then),
2 a malformed budget, or a file that cannot be read or written
"""

from __future__ import annotations

import argparse
from pathlib import Path

from policylang.commands.inputs import add_form, add_options, read_graph, refuse, take_graph, write_output
from policylang.commands.output import Exit, UsageError, say, status_line, tell
from policylang.errors import PolicyGraphError, PolicyMatchError, PolicyMeaningError
from policylang.language.devices.reading import bundled_devices
from policylang.report.diagnostics import render_json


def arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "--graph")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--peak", metavar="SIZE", help="what the step may take at its highest moment, such as '70 GiB'")
    budget.add_argument("--saved", metavar="SIZE", help="what may be kept for the backward, such as '6 GiB'")
    budget.add_argument(
        "--recompute-time", metavar="SHARE", help="how much of the forward's time recomputation may take, such as 5%%"
    )
    add_options(parser, "--device")
    parser.add_argument("-o", "--output", metavar="FILE", help="where the policy goes, such as llama3_8b_70g.apl")
    parser.add_argument(
        "--optimizer",
        metavar="NAME|SIZE",
        help="count its state in the peak: adamw, sgd and others by what they keep for each parameter in its own "
        "dtype, or a size, such as '24 GiB'",
    )
    parser.add_argument(
        "--reserve",
        metavar="SHARE",
        default="0%",
        help="set aside so much of the memory for the allocator, such as 5%%",
    )
    parser.add_argument("--offload", action="store_true", help="let values be copied to the host as well")
    parser.add_argument("--table", action="store_true", help="print the whole trade-off, one policy per row")
    add_options(parser, "--path", "--no-project", "--import")
    add_form(parser, "json")


def run(options: argparse.Namespace) -> Exit:
    from policylang.api.tune import no_budget, read_or_raise, tuned_policy
    from policylang.report.trade_off import account_text, trade_off_text, tuned_json
    from policylang.tuning.budgets import read_budget

    device = take_graph(options)
    if device is None:
        known = ", ".join(bundled_devices())
        raise UsageError("times need a device", f"name one with `--device`: {known}, or the path of a file")
    given = options.peak, options.saved, options.recompute_time
    if options.output and all(each is None for each in given):
        raise UsageError("a policy is tuned for a budget, and none is given", "add `--peak`, or leave `-o` out")
    facts = read_graph(options.graph)
    as_json = options.output_format == "json"
    try:
        budget = read_or_raise(read_budget(*given))
        if budget is None and not options.table:
            raise PolicyMeaningError([no_budget(device)])
        with status_line() as progress:
            found = tuned_policy(
                facts,
                Path(options.graph).name,
                device,
                budget,
                optimizer=options.optimizer,
                reserve=options.reserve,
                named=options.device,
                folder=Path(options.output).parent if options.output else Path(),
                offload=options.offload,
                path=options.path,
                table=options.table,
                progress=progress,
            )
    except (PolicyMeaningError, PolicyGraphError, PolicyMatchError) as error:
        if as_json:
            say(render_json(error.diagnostics), "json")
        else:
            refuse(error.diagnostics)
        return Exit.USAGE if isinstance(error, PolicyMeaningError) else Exit.DIAGNOSTICS
    if options.output:
        write_output(found.text, options.output)
    if as_json:
        say(tuned_json(found, chosen=budget is not None), "json")
        return Exit.CLEAN
    if found.notes:
        refuse(found.notes)
    if options.table:
        say(trade_off_text(found, chosen=budget is not None))
    if budget is not None and (options.output or options.table):
        say(("\n" if options.table else "") + account_text(found))
    elif budget is not None:
        tell(account_text(found))
        say(found.text.removesuffix("\n"), "policy")
    return Exit.CLEAN
