"""Show what a policy does to a graph, before anything is compiled: what is saved and recomputed in each block and by
which line, the memory over the step, and what each rule is worth.

The graph is a snapshot (see `policylang snapshot`), a recorded graph or a graph as text; no model, no GPU and, unless
--import is given, no torch are needed. --summary prints the totals and the expectations alone, --values every value as
well. --html writes one page that needs nothing else: memory over time, the blocks, every value beside the policy.
--device adds times: of recomputation on a device, and of the step; --trace then writes the step over time, for
https://ui.perfetto.dev.

For a policy that orders collectives (bucket, prefetch, delay, overlap, keep order), also what each line moves, and how
much communication stays exposed. The JSON has the full order.

examples:

  policylang plan llama3_sac --graph llama3_8b.graph --summary
  policylang plan mine.apl --graph llama3_8b.graph --values
  policylang plan mine.apl --graph llama3_8b.graph --html plan.html
  policylang plan mine.apl --graph llama3_8b.graph --device h100-sxm --trace step.json
  policylang plan mine.apl --graph llama3_8b.graph --path eager --output-format json
  echo 'save attention in block' | policylang plan - --graph llama3_8b.graph

exit codes: 0 planned, 1 errors between the policy and the graph (the plan is shown all the same), 2 a file that cannot
be read or written
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from attrs import evolve

from policylang.commands.inputs import (
    PLANNING,
    add_form,
    add_options,
    check_policies,
    print_findings,
    take_graph,
    write_output,
)
from policylang.commands.output import Exit, UsageError, say, status_line
from policylang.language.diagnostics import diagnose, is_error
from policylang.planning.capabilities import capabilities_for
from policylang.report.diagnostics import render_text


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "policy", metavar="POLICY", help="a policy file, a bundled policy by its bare name, or - for standard input"
    )
    add_options(parser, *PLANNING)
    add_form(parser, "json")
    much = parser.add_mutually_exclusive_group()
    much.add_argument("--summary", action="store_true", help="print the totals and the expectations, and no more")
    much.add_argument(
        "--values",
        action="store_true",
        help="print the largest values at the peak and those of each block too",
    )
    parser.add_argument("--html", metavar="OUT.html", help="write the plan as a page as well")
    parser.add_argument(
        "--trace",
        metavar="OUT.json",
        help="write the step over time as well, as a Chrome trace: what computes, communicates and is alive",
    )


def run(options: argparse.Namespace) -> Exit:
    from policylang.planning.inspection.breakdown import breakdown
    from policylang.planning.inspection.worth import weighed, worth_of_edits, worth_of_rules
    from policylang.report.plan_json import chrome_trace, plan_json
    from policylang.report.plan_page import plan_page
    from policylang.report.plan_text import plan_text

    device = take_graph(options)
    result = check_policies([options.policy], graph=options.graph, path=options.path, device=device)
    result = evolve(result, diagnostics=options.taken.placed(result.diagnostics))
    if len(result.plans) != 1:
        if not result.diagnostics:
            problem = diagnose("APL104", "a plan is made of one policy", help="name one .apl file")
            result = evolve(result, diagnostics=(problem,))
        return print_findings(result, options.output_format, failed=True)
    (made,) = result.plans
    capabilities = capabilities_for(made.facts.kind, options.path)
    found = breakdown(made)
    whole = options.html or not options.summary
    with status_line() as line:
        worth = worth_of_rules(made, capabilities, _weighing(line, "rule")) if whole else ()
        edits = worth_of_edits(made, capabilities) if whole else ()
        if whole and found.communication is not None:
            order = weighed(found.communication, made, capabilities, progress=_weighing(line, "scheduling line"))
            found = evolve(found, communication=order)
    if options.output_format == "json":
        say(plan_json(found, worth, result.diagnostics, edits=edits, summary=options.summary), "json")
    else:
        if result.diagnostics:
            say(render_text(result.diagnostics) + "\n")
        say(plan_text(found, worth, edits, summary=options.summary, values=options.values))
    if options.html:
        write_output(plan_page(found, worth, Path(options.graph).name), options.html)
    if options.trace:
        if made.shown_times is None:
            raise UsageError("a trace has times, and no device is given", "name one with `--device`, such as h100-sxm")
        if made.checkpoints is not None:
            message = "a model in eager does not run in the order of its graph"
            raise UsageError(message, "trace it for another `--path`")
        write_output(chrome_trace(found), options.trace)
    return Exit.DIAGNOSTICS if any(map(is_error, result.diagnostics)) else Exit.CLEAN


def _weighing(line: Callable[[str], None], what: str) -> Callable[[int, int], None]:
    return lambda done, of: line(f"weighing {what} {done} of {of}")
