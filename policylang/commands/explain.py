"""Explain a diagnostic code, or what a policy decides on a graph.

With a code such as APL101: its long form; with nothing: all codes. With a policy and --graph, --node NAME says of each
rule in turn whether it matches the node, which part of it leaves the node out, and who won; --rule LINE what each part
of a rule matches, and which rules take its nodes over.

exit codes: 0 explained, 1 a policy with errors, 2 no such code, node, rule or file
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from policylang.commands.shared.exit import Exit
from policylang.commands.shared.inputs import add_graph, add_path

if TYPE_CHECKING:
    from policylang.planning.plan import Plan

NAME = "explain"
SUMMARY = "explain a diagnostic code, a node or a rule"


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
    parser.add_argument("--output-format", choices=("text", "json"), default="text", help="default: text")


def run(options: argparse.Namespace) -> Exit:
    about_graph = [f"--{name}" for name in ("graph", "node", "rule") if getattr(options, name) is not None]
    if about_graph:
        if options.subject is None or options.graph is None or len(about_graph) < 2:
            return _refuse(
                "a node or a rule is explained of a policy on a graph",
                "policylang explain POLICY --graph SNAPSHOT --node NAME (or --rule LINE)",
            )
        return _on_graph(options)
    return _codes() if options.subject is None else _code(options.subject)


def _on_graph(options: argparse.Namespace) -> Exit:
    from policylang.commands.shared.inputs import planned, read_graph, read_policy, refuse
    from policylang.errors import PolicyError
    from policylang.report.explanation import explain_node, explain_rule

    try:
        plan = planned(read_policy(options.subject), read_graph(options.graph), options.path)
    except PolicyError as error:
        return refuse(error.diagnostics)
    if options.node is not None:
        row = _row(plan, options.node)
        if row is None:
            return Exit.USAGE
        return _print(explain_node(plan, row), options.output_format)
    index = _rule(plan, options.subject, options.rule)
    if index is None:
        return Exit.USAGE
    return _print(explain_rule(plan, index), options.output_format)


def _row(plan: Plan, name: str) -> int | None:
    """The row of a node that rules range over; None, with a message, where there is none."""
    from policylang.graph.facts import Phase
    from policylang.language.nearest import did_you_mean, nearest

    facts = plan.facts
    row = facts.index.get(name)
    if row is None:
        near = did_you_mean(nearest(name, (facts.names[each] for each in facts.forward)))
        _refuse(f"the graph has no node `{name}`", near or "node names are those of the graph, such as mm_3")
        return None
    if plan.decisions[row] is None:
        what = {Phase.INPUT: "a graph input", Phase.BACKWARD: "a backward node", Phase.OUTPUT: "the output"}
        _refuse(
            f"no rule ranges over `{name}`, which is {what.get(Phase(facts.phases[row]), 'not a call')}",
            "rules decide about the forward's operators alone",
        )
        return None
    return row


def _rule(plan: Plan, policy: str, text: str) -> int | None:
    """The rule that a line names: of the policy's own file, unless it says which."""
    from policylang.language.files import find_policy

    file, _, line = text.rpartition(":")
    own = find_policy(policy)[1]
    for index, rule in enumerate(plan.policy.rules):
        if str(rule.span.line) == line and rule.span.source.name == (file or own):
            return index
    lines = [rule.source if rule.span.source.name != own else str(rule.span.line) for rule in plan.policy.rules]
    _refuse(f"no rule of the policy begins in line `{text}`", f"its rules begin in {_listed(lines)}")
    return None


def _listed(lines: Sequence[str]) -> str:
    shown = ", ".join(lines[:12])
    return f"{shown}, …" if len(lines) > 12 else shown or "no line: it has none"


def _print(explanation: object, form: str) -> Exit:
    print(json.dumps(explanation.to_dict(), indent=2) if form == "json" else explanation)  # type: ignore[attr-defined]
    return Exit.CLEAN


def _codes() -> Exit:
    from policylang.language.codes import CODES

    print("\n".join(f"{code}  {entry.title}" for code, entry in sorted(CODES.items())))
    return Exit.CLEAN


def _code(code: str) -> Exit:
    from difflib import get_close_matches

    from policylang.language.codes import CODES

    entry = CODES.get(code.upper())
    if entry is None:
        near = get_close_matches(code.upper(), CODES, n=1)
        return _refuse(
            f"no diagnostic has the code `{code}`",
            f"did you mean `{near[0]}`?" if near else "`policylang explain` lists all codes",
        )
    print(_page(entry.code, entry.severity.value, entry.title, entry.text, entry.wrong, entry.mended))
    return Exit.CLEAN


def _page(code: str, severity: str, title: str, text: str, wrong: str, mended: str) -> str:
    from textwrap import fill, indent

    parts = [f"{code}: {title} ({severity})", fill(text, width=100)]
    if wrong:
        parts.append("Wrong:\n\n" + indent(wrong, "    "))
    if mended:
        parts.append("Right:\n\n" + indent(mended, "    "))
    return "\n\n".join(parts)


def _refuse(reason: str, help: str) -> Exit:
    print(f"policylang explain: {reason}\nhelp: {help}", file=sys.stderr)
    return Exit.USAGE
