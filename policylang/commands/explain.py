"""Explain a diagnostic code, a word of the language, or what a policy decides on a graph.

With a code such as APL101: its long form; with nothing: all codes. With a word such as save or 'crosses block': what it
means, and an example. With a policy and --graph, --node NAME says of each
rule in turn whether it matches the node, which part of it leaves the node out, and who won; --rule LINE what each part
of a rule matches, and which rules take its nodes over. A node is named by its name, by a glob over names, or by the
path of its module as a policy writes it behind `in`; of several nodes there is a line each.

Of a collective, --node also says which scheduling lines joined or moved it, from where to where, and what of it is
exposed; of a scheduling line, --rule says what it picks and moves, and what would be exposed without it.

examples:

  policylang explain APL301
  policylang explain recompute
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
from typing import TYPE_CHECKING, Any

from policylang.commands.inputs import (
    STDIN,
    STDIN_NAME,
    add_form,
    add_planning,
    planned,
    read_graph,
    read_policy,
    read_profile,
    take_settings,
    tell_settings,
    warn_of_devices,
)
from policylang.commands.output import Exit, UsageError, say
from policylang.language.diagnostics import CODES
from policylang.report.layout import columns

if TYPE_CHECKING:
    from policylang.language.diagnostics import Code, Span
    from policylang.planning.plan import Plan
    from policylang.report.explain import Explained


_CODE_LIKE = re.compile(r"APL\d*$", re.IGNORECASE)
_WIDEST = 100
_VERSION = 1
NAME = "explain"
SUMMARY = "explain a diagnostic code, a word, a node or a rule"
_MOST_LINES = 12


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        nargs="?",
        metavar="CODE|POLICY",
        help="such as APL101; with --node or --rule, a policy; with nothing, all codes",
    )
    add_planning(parser)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--node",
        metavar="NAME",
        help="what each rule has to say of this node of the graph; a glob over names and a module path name several",
    )
    asked.add_argument("--rule", metavar="LINE", help="what the rule in this line does; FILE:LINE in an included file")
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
        return Exit.CLEAN
    text, data = _explained(options.subject)
    if options.output_format == "json":
        say(json.dumps({"version": _VERSION, **data}, indent=2), "json")
    else:
        say(text)
    return Exit.CLEAN


def _on_graph(options: argparse.Namespace) -> None:
    facts = read_graph(options.graph)
    device = read_profile(options.device)
    plan = planned(read_policy(options.subject, facts), facts, options.path, device)
    warn_of_devices(facts, plan)
    found: Sequence[Explained]
    if options.node is not None:
        found = _of_node(plan, options.node)
    else:
        found = [_of_line(plan, options.subject, options.rule, options.path)]
    if options.output_format == "json":
        data = {key: value for each in found for key, value in each.to_dict().items()}
        say(json.dumps(data, indent=2), "json")
    else:
        say("\n\n".join(map(str, found)))


def _of_node(plan: Plan, asked: str) -> Sequence[Explained]:
    from policylang.report.explain import NothingToExplain, explain_named

    try:
        return explain_named(plan, asked)
    except NothingToExplain as error:
        raise UsageError(*error.args) from None


def _of_line(plan: Plan, policy: str, text: str, path: str | None) -> Explained:
    from policylang.planning.capabilities import capabilities_for
    from policylang.report.explain import explain_statement, explained_statements

    rules, lines = explained_statements(plan)
    spans = [*lines, *rules]
    at = _line_asked(policy, text, spans)
    if at is None:
        raise _no_rule(policy, text, [*rules, *lines])
    return explain_statement(plan, spans[at], capabilities_for(plan.facts.kind, path))


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


def _no_rule(policy: str, text: str, spans: Sequence[Span]) -> UsageError:
    """``spans``: the statements that could have been named."""
    own = _own(policy)
    lines = [span.location if span.source.name != own else str(span.line) for span in spans]
    shown = ", ".join(lines if len(lines) <= _MOST_LINES else [*lines[:_MOST_LINES], "…"])
    return UsageError(
        f"no rule of the policy begins in line `{text}`", f"its rules begin in {shown or 'no line: it has none'}"
    )


def _explained(subject: str | None) -> tuple[str, dict[str, Any]]:
    """As text and as data: a word of the language, a code, or, without a subject, all codes."""
    from policylang.language.words import senses
    from policylang.report.explain import meanings_data, meanings_text, of_group

    if subject is None:
        codes = sorted(CODES.items())
        data = [{"code": code, "title": e.title, "severity": e.severity.value} for code, e in codes]
        return "\n".join(f"{code}  {entry.title}" for code, entry in codes), {"codes": data}
    word = " ".join(subject.split())
    if found := (*senses(word), *of_group(word)):
        return meanings_text(word, found), meanings_data(word, found)
    entry = _entry(subject)
    said = {"title": entry.title, "severity": entry.severity.value, "text": entry.text}
    return _long_form(entry), {"code": entry.code, **said, "wrong": entry.wrong, "right": entry.mended}


def _long_form(entry: Code) -> str:
    from textwrap import fill, indent

    examples = (("Wrong", entry.wrong), ("Right", entry.mended))
    shown = (f"{label}:\n\n{indent(text, '    ')}" for label, text in examples if text)
    text = fill(entry.text, width=columns(_WIDEST) or _WIDEST)
    return "\n\n".join((f"{entry.code}: {entry.title} ({entry.severity.value})", text, *shown))


def _entry(code: str) -> Code:
    from difflib import get_close_matches

    from policylang.language.diagnostics import CODES
    from policylang.language.operators import group_names
    from policylang.language.shown import did_you_mean, nearest
    from policylang.language.words import meanings

    entry = CODES.get(code.upper())
    if entry is not None:
        return entry
    if not _CODE_LIKE.match(code) and (code == STDIN or _is_policy(code)):
        raise UsageError(f"`{code}` is a policy, and what a policy decides is explained on a graph", _how(code))
    near = get_close_matches(code.upper(), CODES, n=1)
    fix = f"did you mean `{near[0]}`?" if near else "`policylang explain` lists all codes"
    if not near and not _CODE_LIKE.match(code):
        known = (*(word for each in meanings() for word in each.words), *group_names())
        fix = did_you_mean(nearest(code, known)) or fix
        said = f"`{code}` is neither a diagnostic code nor a word of the language nor a policy that is here"
        raise UsageError(said, f"{fix}; {_HOW}")
    raise UsageError(f"no diagnostic has the code `{code}`", fix)


def _is_policy(name: str) -> bool:
    from policylang.language.files import SUFFIX, find_policy

    return find_policy(name)[0].is_file() or name.endswith(SUFFIX)


def _how(policy: str) -> str:
    return _HOW.replace("POLICY", policy)
