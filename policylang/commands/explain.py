"""Explain a diagnostic code, or what a policy decides on a graph.

With a code such as APL101: its long form; with nothing: all codes. With a policy and --graph, --node NAME says of each
rule in turn whether it matches the node, which part of it leaves the node out, and who won; --rule LINE what each part
of a rule matches, and which rules take its nodes over.

exit codes: 0 explained, 1 a policy with errors, 2 no such code, node, rule or file
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from policylang.commands.shared.exit import Exit, UsageError
from policylang.commands.shared.inputs import add_form, add_graph, add_path, planned, read_graph, read_policy

if TYPE_CHECKING:
    from policylang.planning.plan import Plan

NAME = "explain"
SUMMARY = "explain a diagnostic code, a node or a rule"
_MOST_LINES = 12


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        nargs="?",
        metavar="CODE|POLICY",
        help="such as APL101; with --graph, a policy; without it, all codes",
    )
    add_graph(parser, required=False)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--node", metavar="NAME", help="what each rule has to say of this node of the graph")
    asked.add_argument("--rule", metavar="LINE", help="what the rule in this line does; FILE:LINE in an included file")
    add_path(parser)
    add_form(parser, "json", help="default: text")


def run(options: argparse.Namespace) -> Exit:
    about_graph = [f"--{name}" for name in ("graph", "node", "rule") if getattr(options, name) is not None]
    if about_graph:
        if options.subject is None or options.graph is None or len(about_graph) < 2:
            raise UsageError(
                "a node or a rule is explained of a policy on a graph",
                "policylang explain POLICY --graph SNAPSHOT --node NAME (or --rule LINE)",
            )
        _on_graph(options)
    else:
        print(_codes() if options.subject is None else _code(options.subject))
    return Exit.CLEAN


def _on_graph(options: argparse.Namespace) -> None:
    from policylang.report.explanation import explain_node, explain_rule

    plan = planned(read_policy(options.subject), read_graph(options.graph), options.path)
    found = (
        explain_node(plan, _row(plan, options.node))
        if options.node is not None
        else explain_rule(plan, _rule(plan, options.subject, options.rule))
    )
    print(json.dumps(found.to_dict(), indent=2) if options.output_format == "json" else found)


def _row(plan: Plan, name: str) -> int:
    """The row of a node that rules range over."""
    from policylang.graph.facts import Phase
    from policylang.language.nearest import did_you_mean, nearest

    facts = plan.facts
    row = facts.index.get(name)
    if row is None:
        near = did_you_mean(nearest(name, (facts.names[each] for each in facts.forward)))
        raise UsageError(f"the graph has no node `{name}`", near or "node names are those of the graph, such as mm_3")
    if plan.decisions[row] is None:
        kinds = {Phase.INPUT: "a graph input", Phase.BACKWARD: "a backward node", Phase.OUTPUT: "the output"}
        what = kinds.get(Phase(facts.phases[row]), "not a call")
        raise UsageError(
            f"no rule ranges over `{name}`, which is {what}", "rules decide about the forward's operators alone"
        )
    return row


def _rule(plan: Plan, policy: str, text: str) -> int:
    """The rule that a line names: of the policy's own file, unless it says which."""
    from policylang.language.files import find_policy

    file, _, line = text.rpartition(":")
    own = find_policy(policy)[1]
    for index, rule in enumerate(plan.policy.rules):
        if str(rule.span.line) == line and rule.span.source.name == (file or own):
            return index
    lines = [rule.source if rule.span.source.name != own else str(rule.span.line) for rule in plan.policy.rules]
    shown = ", ".join(lines if len(lines) <= _MOST_LINES else [*lines[:_MOST_LINES], "…"])
    raise UsageError(
        f"no rule of the policy begins in line `{text}`", f"its rules begin in {shown or 'no line: it has none'}"
    )


def _codes() -> str:
    from policylang.language.codes import CODES

    return "\n".join(f"{code}  {entry.title}" for code, entry in sorted(CODES.items()))


def _code(code: str) -> str:
    from difflib import get_close_matches
    from textwrap import fill, indent

    from policylang.language.codes import CODES

    entry = CODES.get(code.upper())
    if entry is None:
        near = get_close_matches(code.upper(), CODES, n=1)
        mend = f"did you mean `{near[0]}`?" if near else "`policylang explain` lists all codes"
        raise UsageError(f"no diagnostic has the code `{code}`", mend)
    examples = (("Wrong", entry.wrong), ("Right", entry.mended))
    shown = (f"{label}:\n\n{indent(text, '    ')}" for label, text in examples if text)
    return "\n\n".join((f"{entry.code}: {entry.title} ({entry.severity.value})", fill(entry.text, width=100), *shown))
