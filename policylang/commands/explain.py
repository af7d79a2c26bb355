"""Explain a diagnostic code, or what a policy decides on a graph.

With a code such as APL101: its long form; with nothing: all codes. With a policy and --graph, --node NAME says of each
rule in turn whether it matches the node, which part of it leaves the node out, and who won; --rule LINE what each part
of a rule matches, and which rules take its nodes over. A node is named by its name, by a glob over names, or by the
path of its module as a policy writes it behind `in`; of several nodes there is a line each.

Of a collective, --node also says which scheduling lines joined or moved it, from where to where, and what of it is
exposed; of a scheduling line, --rule says what it picks and moves, and what would be exposed without it.

examples:

  policylang explain APL301
  policylang explain mine.apl --graph llama3_8b.graph --node mm_3
  policylang explain mine.apl --graph llama3_8b.graph --node 'layers.0.attention.*'
  policylang explain mine.apl --graph llama3_8b.graph --rule 12 --device h100-sxm

exit codes: 0 explained, 1 a policy with errors, 2 no such code, node, rule or file
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from policylang.commands.shared.exit import Exit, UsageError
from policylang.commands.shared.inputs import (
    STDIN,
    STDIN_NAME,
    add_device,
    add_form,
    add_graph,
    add_import,
    add_path,
    planned,
    read_graph,
    read_policy,
    read_profile,
    warn_of_devices,
)
from policylang.commands.shared.output import say
from policylang.commands.shared.project import add_project, take_settings, tell_settings

if TYPE_CHECKING:
    from policylang.graph.facts import Facts
    from policylang.language.codes import Code
    from policylang.language.source import Span
    from policylang.planning.plan import Plan

    class _Explanation(Protocol):
        def to_dict(self) -> dict[str, Any]: ...


_CODE_LIKE = re.compile(r"APL\d*$", re.IGNORECASE)
_WIDEST = 100
_VERSION = 1
NAME = "explain"
SUMMARY = "explain a diagnostic code, a node or a rule"
_MOST_LINES = 12


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        nargs="?",
        metavar="CODE|POLICY",
        help="such as APL101; with --node or --rule, a policy; with nothing, all codes",
    )
    add_graph(parser)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--node",
        metavar="NAME",
        help="what each rule has to say of this node of the graph; a glob over names and a module path name several",
    )
    asked.add_argument("--rule", metavar="LINE", help="what the rule in this line does; FILE:LINE in an included file")
    add_path(parser)
    add_device(parser)
    add_project(parser)
    add_import(parser)
    add_form(parser, "json", help="default: text")


_HOW = "policylang explain POLICY --graph GRAPH --node NAME (or --rule LINE)"


def run(options: argparse.Namespace) -> Exit:
    about_graph = [f"--{name}" for name in ("graph", "node", "rule", "device") if getattr(options, name) is not None]
    if about_graph:
        if options.subject is not None and not {"--node", "--rule"} & {*about_graph}:
            raise UsageError(
                f"what is to be explained of `{options.subject}`? a node, or a rule", _how(options.subject)
            )
        take_settings(options, "graph", "path", "device")
        if options.subject is None or options.graph is None:
            raise UsageError("a node or a rule is explained of a policy on a graph", _HOW)
        tell_settings(options)
        _on_graph(options)
    elif options.output_format == "json":
        print(json.dumps(_codes_data() if options.subject is None else _code_data(options.subject), indent=2))
    else:
        say(_codes() if options.subject is None else _code(options.subject))
    return Exit.CLEAN


def _on_graph(options: argparse.Namespace) -> None:
    facts = read_graph(options.graph)
    device = read_profile(options.device)
    plan = planned(read_policy(options.subject, facts), facts, options.path, device)
    warn_of_devices(facts, plan)
    found: Sequence[_Explanation]
    if options.node is not None:
        found = _of_node(plan, options.node)
    else:
        found = [_of_line(plan, options.subject, options.rule, options.path)]
    if options.output_format == "json":
        print(json.dumps({key: value for each in found for key, value in each.to_dict().items()}, indent=2))
    else:
        say("\n\n".join(map(str, found)))


def _of_node(plan: Plan, asked: str) -> Sequence[_Explanation]:
    """What rules decide of it, and, of a collective under scheduling lines, what these do."""
    from policylang.planning.inspection.collective_places import collective_asked, placed
    from policylang.planning.inspection.communication import communication
    from policylang.report.explanation import explain_node, explain_nodes
    from policylang.report.order.explained import CollectiveExplanation

    ordered = communication(plan)
    collective = None if ordered is None else collective_asked(ordered, asked)
    if ordered is not None and collective is not None:
        row = plan.facts.index.get(asked)
        decided = [explain_node(plan, row)] if row is not None and plan.decisions[row] is not None else []
        return [*decided, CollectiveExplanation(placed(ordered, collective))]
    rows = _rows(plan, asked)
    return [explain_node(plan, *rows) if asked in plan.facts.index else explain_nodes(plan, asked, rows)]


def _of_line(plan: Plan, policy: str, text: str, path: str | None) -> _Explanation:
    """Of a rule, or of a line that schedules."""
    from policylang.planning.capabilities import capabilities_for
    from policylang.planning.inspection.communication import bucket_statements, communication
    from policylang.planning.inspection.line_worth import weighed
    from policylang.report.explanation import explain_rule
    from policylang.report.order.explained import explain_line

    lines = [plan.policy.rewrites[at].span for at in bucket_statements(plan.policy)]
    lines += [each.span for each in plan.policy.scheduling]
    ordered = communication(plan)
    at = _line_asked(policy, text, [] if ordered is None else lines)
    if ordered is not None and at is not None:
        return explain_line(weighed(ordered, plan, capabilities_for(plan.facts.kind, path), at), at)
    return explain_rule(plan, _rule(plan, policy, text, [] if ordered is None else lines))


def _rows(plan: Plan, asked: str) -> list[int]:
    """The rows that rules range over of the node of a name, else of those whose names a glob matches, else of those in
    a module."""
    from policylang.language.globs import NameGlob, PathGlob, is_magic, path_glob_problem

    facts = plan.facts
    if asked in facts.index:
        return [_row(plan, asked)]
    found: list[int] = []
    if is_magic(asked) and "." not in asked:
        matches = NameGlob(asked).matches
        found = [row for row, name in enumerate(facts.names) if matches(name)]
    if not found and path_glob_problem(asked) is None:
        covers = cache(PathGlob(asked).covers)
        found = [row for row in range(len(facts)) if covers(facts.modules[row] or facts.modules[facts.owners[row]])]
    decided = [row for row in found if plan.decisions[row] is not None]
    if not decided:
        raise _no_node(facts, asked, found)
    return decided


def _no_node(facts: Facts, asked: str, found: Sequence[int]) -> UsageError:
    from policylang.language.nearest import did_you_mean, nearest
    from policylang.planning.selection.empty_matches import nearest_paths

    if found:
        return UsageError(f"no rule ranges over what `{asked}` names: {_listed(facts, found)}", _FORWARD)
    near = nearest(asked, (facts.names[each] for each in facts.forward))
    if "." in asked or not near:
        near = (*near, *nearest_paths(asked, facts, count=2))[:3]
    mend = did_you_mean(near) or "node names are those of the graph, such as mm_3: `policylang show GRAPH --module …`"
    return UsageError(f"the graph has no node `{asked}`", mend)


_MOST_NAMES = 4
_FORWARD = "rules decide about the forward's operators alone"


def _listed(facts: Facts, rows: Sequence[int]) -> str:
    from policylang.language.figures import listed

    return listed([facts.names[row] for row in rows], _MOST_NAMES)


def _row(plan: Plan, name: str) -> int:
    """The row of a node that rules range over."""
    from policylang.graph.facts import Phase

    facts = plan.facts
    row = facts.index[name]
    if plan.decisions[row] is None:
        kinds = {Phase.INPUT: "a graph input", Phase.BACKWARD: "a backward node", Phase.OUTPUT: "the output"}
        what = kinds.get(Phase(facts.phases[row]), "not a call")
        raise UsageError(f"no rule ranges over `{name}`, which is {what}", _FORWARD)
    return row


def _line_asked(policy: str, text: str, spans: Sequence[Span]) -> int | None:
    """Which of some statements begins in a line: of the policy's own file, unless it says which."""
    file, _, line = text.rpartition(":")
    named = file or _own(policy)
    found = (at for at, span in enumerate(spans) if str(span.line) == line and span.source.name == named)
    return next(found, None)


def _own(policy: str) -> str:
    """The name of the policy's own file."""
    from policylang.language.files import find_policy

    return STDIN_NAME if policy == STDIN else find_policy(policy)[1]


def _rule(plan: Plan, policy: str, text: str, others: Sequence[Span]) -> int:
    """The rule that a line names. ``others``: the other statements that could have been named."""
    spans = [rule.span for rule in plan.policy.rules]
    at = _line_asked(policy, text, spans)
    if at is not None:
        return at
    own = _own(policy)
    lines = [span.location if span.source.name != own else str(span.line) for span in (*spans, *others)]
    shown = ", ".join(lines if len(lines) <= _MOST_LINES else [*lines[:_MOST_LINES], "…"])
    raise UsageError(
        f"no rule of the policy begins in line `{text}`", f"its rules begin in {shown or 'no line: it has none'}"
    )


def _codes() -> str:
    from policylang.language.codes import CODES

    return "\n".join(f"{code}  {entry.title}" for code, entry in sorted(CODES.items()))


def _codes_data() -> dict[str, Any]:
    from policylang.language.codes import CODES

    codes = [{"code": code, "title": e.title, "severity": e.severity.value} for code, e in sorted(CODES.items())]
    return {"version": _VERSION, "codes": codes}


def _code_data(code: str) -> dict[str, Any]:
    entry = _entry(code)
    said = {"title": entry.title, "severity": entry.severity.value, "text": entry.text}
    return {"version": _VERSION, "code": entry.code, **said, "wrong": entry.wrong, "right": entry.mended}


def _code(code: str) -> str:
    from textwrap import fill, indent

    from policylang.report.width import columns

    entry = _entry(code)
    examples = (("Wrong", entry.wrong), ("Right", entry.mended))
    shown = (f"{label}:\n\n{indent(text, '    ')}" for label, text in examples if text)
    text = fill(entry.text, width=columns(_WIDEST) or _WIDEST)
    return "\n\n".join((f"{entry.code}: {entry.title} ({entry.severity.value})", text, *shown))


def _entry(code: str) -> Code:
    from difflib import get_close_matches

    from policylang.language.codes import CODES

    entry = CODES.get(code.upper())
    if entry is not None:
        return entry
    if not _CODE_LIKE.match(code) and (code == STDIN or _is_policy(code)):
        raise UsageError(f"`{code}` is a policy, and what a policy decides is explained on a graph", _how(code))
    near = get_close_matches(code.upper(), CODES, n=1)
    mend = f"did you mean `{near[0]}`?" if near else "`policylang explain` lists all codes"
    if not near and not _CODE_LIKE.match(code):
        raise UsageError(f"`{code}` is neither a diagnostic code nor a policy that is here", f"{mend}; {_HOW}")
    raise UsageError(f"no diagnostic has the code `{code}`", mend)


def _is_policy(name: str) -> bool:
    from policylang.language.files import SUFFIX, find_policy

    return find_policy(name)[0].is_file() or name.endswith(SUFFIX)


def _how(policy: str) -> str:
    return _HOW.replace("POLICY", policy)
