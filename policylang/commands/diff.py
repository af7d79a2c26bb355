"""Compare two policies on a graph: the nodes whose decision changes, with the costs and savings.

For policies that schedule, also the collectives that start or are awaited elsewhere, or join others.

Exit code 0 means that the two decide alike, whatever their text: "this refactor of the policy changes nothing". One of
the two may be `-`, the standard input.

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

from policylang.commands.inputs import (
    PLANNING,
    add_form,
    add_options,
    once_at_most,
    planned,
    read_graph,
    read_policy,
    take_graph,
    warn_of_devices,
)
from policylang.commands.output import Exit, say, tell
from policylang.language.diagnostics import is_error
from policylang.language.shown import counted


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", help="the policy before the change")
    parser.add_argument("new", metavar="NEW", help="the policy after it")
    add_options(parser, *PLANNING)
    add_form(parser, "markdown", "json", help="markdown is meant for a comment on a review (default: text)")


def run(options: argparse.Namespace) -> Exit:
    from policylang.planning.inspection.compare import compare
    from policylang.report.plan_comparison import comparison_json, comparison_markdown, comparison_text

    once_at_most(options.old, options.new)
    device = take_graph(options)
    facts = read_graph(options.graph)
    policies = [read_policy(name, facts) for name in (options.old, options.new)]
    plans = [planned(policy, facts, options.path, device) for policy in policies]
    known = [made.times.device for made in plans if made.times is not None]
    if len(known) == 1:  # where one of them names a device, the other is timed on it too
        plans = [planned(policy, facts, options.path, known[0]) for policy in policies]
    warn_of_devices(facts, *plans)
    for name, plan in zip((options.old, options.new), plans, strict=True):
        # A policy that does not fit the graph would not be applied; its decisions can still be compared.
        if errors := sum(map(is_error, plan.diagnostics)):
            what = "an error" if errors == 1 else counted(errors, "error")
            tell(f"warning: `{name}` has {what} on this graph; `policylang check` lists them")
    found = compare(*plans)
    renderers = {"text": comparison_text, "markdown": comparison_markdown, "json": comparison_json}
    say(renderers[options.output_format](found), options.output_format)
    return Exit.CLEAN if found.same else Exit.DIAGNOSTICS
