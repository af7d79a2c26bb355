"""Compare two policies on a graph: the nodes whose decision changes, and what that costs and saves.

Of policies that schedule, also the collectives that start or are awaited elsewhere, or travel with others.

Exit code 0 says that the two decide alike, whatever their text is: "this refactor of the policy changes nothing". One
of the two may be `-`, the standard input.

examples:

  policylang diff main.apl mine.apl --graph llama3_8b.graph
  git show main:mine.apl | policylang diff - mine.apl --graph llama3_8b.graph --output-format markdown
  policylang diff main.apl mine.apl --graph llama3_8b.graph --device h100-sxm
  policylang diff llama3_sac mine.apl --graph llama3_8b.graph --path eager

exit codes: 0 nothing changes, 1 a decision or the order of collectives does, or a policy has errors, 2 a file that
cannot be read
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from policylang.commands.inputs import (
    add_form,
    add_gone_page,
    add_planning,
    need_graph,
    once_at_most,
    planned,
    read_graph,
    read_policy,
    read_profile,
    take_settings,
    tell_settings,
    warn_of_devices,
)
from policylang.commands.output import Exit, say, tell
from policylang.language.diagnostics import is_error
from policylang.language.shown import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policylang.graph.facts import Facts
    from policylang.language.syntax import Policy
    from policylang.planning.plan import Plan

NAME = "diff"
SUMMARY = "compare two policies on a graph"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", help="the policy before the change")
    parser.add_argument("new", metavar="NEW", help="the policy after it")
    add_planning(parser)
    add_form(parser, "markdown", "json", help="markdown is meant for a comment on a review (default: text)")
    add_gone_page(parser, "`policylang plan --html` writes a page of each policy")


def run(options: argparse.Namespace) -> Exit:
    from policylang.planning.inspection.compare import compare
    from policylang.report.plan_comparison import comparison_json, comparison_markdown, comparison_text

    once_at_most(options.old, options.new)
    take_settings(options, "graph", "path", "device")
    need_graph(options)
    tell_settings(options)
    facts = read_graph(options.graph)
    plans = _plans([read_policy(name, facts) for name in (options.old, options.new)], facts, options)
    warn_of_devices(facts, *plans)
    for name, plan in zip((options.old, options.new), plans, strict=True):
        _warn(name, sum(map(is_error, plan.diagnostics)))
    found = compare(*plans)
    renderers = {"text": comparison_text, "markdown": comparison_markdown, "json": comparison_json}
    say(renderers[options.output_format](found), options.output_format)
    return Exit.CLEAN if found.same else Exit.DIAGNOSTICS


def _plans(policies: Sequence[Policy], facts: Facts, options: argparse.Namespace) -> list[Plan]:
    """Plan both; where one of them names a device, the other is timed on it too."""
    device = read_profile(options.device)
    plans = [planned(policy, facts, options.path, device) for policy in policies]
    known = [made.times.device for made in plans if made.times is not None]
    if len(known) == 1:
        plans = [
            made if made.times is not None else planned(policy, facts, options.path, known[0])
            for made, policy in zip(plans, policies, strict=True)
        ]
    return plans


def _warn(name: str, errors: int) -> None:
    """A policy that does not fit the graph would not be carried out; what it decides can still be compared."""
    if errors:
        what = "an error" if errors == 1 else counted(errors, "error")
        tell(f"warning: `{name}` has {what} on this graph; `policylang check` says which")
