"""Write a policy from a budget: the one that loses the least time within so much memory, or takes the least memory for
so much time.

The graph is a snapshot (see `policylang snapshot`); no model and no GPU are needed. --peak is what the step may take at
its highest moment, parameters and gradients included; --optimizer adds the optimizer's state to it, --reserve what the
allocator wastes. --saved is a budget for what is kept for the backward alone, --recompute-time one for the time of
second runs. What comes out is a policy as a person writes it, with a comment that says where it is from and what lies
on either side of it, and an expectation that holds it to the budget.

Without -o the policy is printed, and what it comes to goes to the standard error. --table prints the whole trade-off, a
row a policy; a budget is not needed for it.

examples:

  policylang tune --graph llama3_8b.graph --peak "70 GiB" --device h100-sxm -o llama3_8b_70g.apl
  policylang tune --graph llama3_8b.graph --peak "70 GiB" --device h100-sxm --optimizer adamw --reserve 5%
  policylang tune --graph llama3_8b.graph --saved "6 GiB" --device a100-sxm-80gb
  policylang tune --graph llama3_8b.graph --recompute-time 5% --device cluster.toml
  policylang tune --graph llama3_8b.graph --device h100-sxm --table

exit codes: 0 tuned, 1 no policy meets the budget, or the graph or the profile does not do (no file is written then), 2
a budget that is none, or a file that cannot be read or written
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from policylang.commands.inputs import (
    add_device,
    add_form,
    add_gone_page,
    add_graph,
    add_import,
    add_path,
    add_project,
    need_graph,
    read_graph,
    read_profile,
    refuse,
    take_settings,
    tell_settings,
    write_output,
)
from policylang.commands.output import Exit, UsageError, say, tell
from policylang.language.diagnostics import Diagnostic
from policylang.report.diagnostics import render_json

if TYPE_CHECKING:
    from policylang.graph.facts import Facts
    from policylang.language.devices.profile import DeviceProfile
    from policylang.language.diagnostics import Diagnostic
    from policylang.tuning.evaluation import Besides, Budget
    from policylang.tuning.tuned_policy import TunedPolicy

NAME = "tune"
SUMMARY = "write a policy from a budget of memory or time"


def arguments(parser: argparse.ArgumentParser) -> None:
    add_graph(parser)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--peak", metavar="SIZE", help="what the step may take at its highest moment, such as '70 GiB'")
    budget.add_argument("--saved", metavar="SIZE", help="what may be kept for the backward, such as '6 GiB'")
    budget.add_argument(
        "--recompute-time", metavar="SHARE", help="what second runs may take of the forward's time, such as 5%%"
    )
    add_device(parser, of_policy=False)
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
    parser.add_argument("--table", action="store_true", help="print the whole trade-off, a row a policy")
    add_gone_page(parser, "`--table` prints the trade-off, and `--output-format json` has all figures")
    add_path(parser)
    add_project(parser)
    add_import(parser)
    add_form(parser, "json", help="how to print what was found (default: text)")


def run(options: argparse.Namespace) -> Exit:
    take_settings(options, "graph", "path", "device")
    need_graph(options)
    _check(options)
    tell_settings(options)
    device = read_profile(options.device)
    assert device is not None, "it is asked for above"
    facts = read_graph(options.graph)
    asked = _asked(options, facts, device)
    if not isinstance(asked, tuple):
        _print_refused(asked, options.output_format)
        return Exit.USAGE
    budget, besides = asked
    found = _tuned(options, facts, device, budget, besides)
    if found is None:
        return Exit.DIAGNOSTICS
    if options.output:
        write_output(found.text, options.output)
    _print(found, options, chosen=budget is not None)
    return Exit.CLEAN


def _check(options: argparse.Namespace) -> None:
    """Raise ``UsageError`` for what cannot be right whatever the graph is, before the work."""
    if options.device is None:
        from policylang.language.devices.reading import bundled_devices

        known = ", ".join(bundled_devices())
        raise UsageError("times need a device", f"name one with `--device`: {known}, or the path of a file")
    budget = any(each is not None for each in (options.peak, options.saved, options.recompute_time))
    if not budget and options.output:
        raise UsageError("a policy is tuned for a budget, and none is given", "add `--peak`, or leave `-o` out")


def _asked(
    options: argparse.Namespace, facts: Facts, device: DeviceProfile
) -> tuple[Budget | None, Besides] | Diagnostic:
    from policylang.api.tune import no_budget
    from policylang.language.diagnostics import Diagnostic
    from policylang.tuning.budgets import read_budget, read_optimizer, read_reserve
    from policylang.tuning.evaluation import Besides

    budget = read_budget(options.peak, options.saved, options.recompute_time)
    optimizer = read_optimizer(options.optimizer, facts)
    reserve = read_reserve(options.reserve)
    for each in (budget, optimizer, reserve):
        if isinstance(each, Diagnostic):
            return each
    if budget is None and not options.table:
        return no_budget(device)
    assert not isinstance(budget, Diagnostic)
    assert not isinstance(optimizer, Diagnostic)
    assert not isinstance(reserve, Diagnostic)
    return budget, Besides(optimizer=optimizer, reserve=reserve)


def _tuned(
    options: argparse.Namespace, facts: Facts, device: DeviceProfile, budget: Budget | None, besides: Besides
) -> TunedPolicy | None:
    """None where it was refused, which is said."""
    from policylang.api.tune import tuned_policy

    with _progress() as progress:
        found = tuned_policy(
            facts,
            Path(options.graph).name,
            device,
            budget,
            besides=besides,
            named=options.device,
            folder=Path(options.output).parent if options.output else Path(),
            optimizer=options.optimizer or "",
            offload=options.offload,
            path=options.path,
            table=options.table,
            progress=progress,
        )
    if isinstance(found, Diagnostic):
        _print_refused(found, options.output_format)
        return None
    return found


def _print_refused(diagnostic: Diagnostic, form: str) -> None:
    if form == "json":
        say(render_json((diagnostic,)), form)
    else:
        refuse((diagnostic,))


def _print(found: TunedPolicy, options: argparse.Namespace, *, chosen: bool) -> None:
    """The policy, or what stands in its place, on the standard output; the rest beside it."""
    from policylang.report.trade_off import account_text, trade_off_text, tuned_json

    if found.notes and options.output_format != "json":
        refuse(found.notes)
    if options.output_format == "json":
        say(tuned_json(found, chosen=chosen), "json")
        return
    if options.table:
        say(trade_off_text(found, chosen=chosen))
    if not chosen:
        return
    if options.output or options.table:
        say(("\n" if options.table else "") + account_text(found))
    else:
        tell(account_text(found))
        say(found.text.removesuffix("\n"), "policy")


@contextmanager
def _progress() -> Iterator[Callable[[str], None] | None]:
    """A line on the standard error that says what is done, where that is a terminal; gone at the end."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        yield lambda doing: print(f"\r\x1b[K{doing}", end="", file=sys.stderr, flush=True)
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
