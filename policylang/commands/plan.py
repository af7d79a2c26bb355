"""Show what a policy does to a graph, before anything is compiled: what is saved and recomputed in each block and which
line said so, the memory over the step, and what each rule is worth.

The graph is a snapshot (see `policylang snapshot`); no model, no GPU and no torch are needed. --html writes one page
that needs nothing else: memory over time, the blocks, every value beside the text of the policy.

exit codes: 0 planned, 1 errors between the policy and the graph (the plan is shown all the same), 2 a file that cannot
be read or written
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from policylang.commands.shared.exit import Exit
from policylang.commands.shared.inputs import add_form, add_graph, add_path, write_page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policylang.planning.inspection.breakdown import Breakdown
    from policylang.planning.inspection.marginal_cost import Worth

NAME = "plan"
SUMMARY = "show what a policy saves and recomputes on a graph"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", metavar="POLICY", help="a policy file, or a bundled policy by its bare name")
    add_graph(parser)
    add_path(parser)
    add_form(parser, "json", help="how to print the plan (default: text)")
    parser.add_argument("--html", metavar="OUT.html", help="write the plan as a page as well")


def run(options: argparse.Namespace) -> Exit:
    from policylang.api.check import check
    from policylang.language.codes import is_error
    from policylang.planning.inspection.breakdown import breakdown
    from policylang.report.diagnostics import render_text
    from policylang.report.plan.as_json import plan_json
    from policylang.report.plan.as_text import plan_text

    result = check(options.policy, graph=options.graph, path=options.path)
    if len(result.plans) != 1:
        return _refused(result.diagnostics, options.output_format, unreadable=result.unreadable)
    (made,) = result.plans
    found = breakdown(made)
    worth = _worth(found, options.path)
    if options.output_format == "json":
        print(plan_json(found, worth, result.diagnostics))
    else:
        if result.diagnostics:
            print(render_text(result.diagnostics), end="\n\n")
        print(plan_text(found, worth))
    if options.html:
        _write_page(found, worth, options.graph, options.html)
    return Exit.DIAGNOSTICS if any(map(is_error, result.diagnostics)) else Exit.CLEAN


def _refused(diagnostics: Sequence[object], output_format: str, *, unreadable: bool) -> Exit:
    from policylang.language.codes import diagnose
    from policylang.report.diagnostics import RENDERERS

    found = diagnostics or (diagnose("APL104", "a plan is made of one policy", help="name one .apl file"),)
    print(RENDERERS[output_format](found))  # type: ignore[arg-type]
    return Exit.USAGE if unreadable or not diagnostics else Exit.DIAGNOSTICS


def _worth(found: Breakdown, path: str | None) -> tuple[Worth, ...]:
    from policylang.planning.capabilities import capabilities_for
    from policylang.planning.inspection.marginal_cost import worth_of_rules

    capabilities = capabilities_for(found.plan.facts.kind, path)
    shown = sys.stderr.isatty()

    def progress(done: int, of: int) -> None:
        if shown:
            end = "\r" if done < of else "\r\x1b[K"
            print(f"weighing rule {done} of {of}" if done < of else "", end=end, file=sys.stderr, flush=True)

    return worth_of_rules(found.plan, capabilities, progress)


def _write_page(found: Breakdown, worth: Sequence[Worth], graph: str, out: str) -> None:
    from policylang.report.plan.html import plan_page

    write_page(plan_page(found, worth, Path(graph).name), out)
