"""x"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

from policylang.api.load import device_of
from policylang.api.settings import KEYS
from policylang.commands.inputs import (
    PLANNING,
    STDIN,
    STDIN_NAME,
    add_options,
    planned,
    read_graph,
    read_policy,
    take_settings,
    tell_settings,
    warn_of_devices,
)
from policylang.commands.output import Exit, UsageError, add_form, say
from policylang.language.diagnostics import CODES, Code
from policylang.language.files import SUFFIX, find_policy
from policylang.language.operators import group_names
from policylang.language.shown import did_you_mean, nearest
from policylang.language.words import meanings, senses
from policylang.planning.capabilities import capabilities_for
from policylang.planning.plan import Plan
from policylang.report.layout import columns

if TYPE_CHECKING:
    from policylang.report.explain import Explained

_CODE_LIKE = re.compile(r"APL\d*$", re.IGNORECASE)
_WIDEST = 100
_MOST_LINES = 12
_HOW = "policylang explain POLICY --graph GRAPH --node NAME (or --rule LINE)"


def explain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "subject",
        nargs="?",
        metavar="CODE|POLICY",
        help="such as APL101; with --node or --rule, a policy; with nothing, all codes",
    )
    add_options(parser, *PLANNING)
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--node",
        metavar="NAME",
        help="what each rule does to this node of the graph; a glob over names and a module path name several",
    )
    asked.add_argument("--rule", metavar="LINE", help="what the rule in this line does; FILE:LINE in an included file")
    add_form(parser, "json")


def explain(options: argparse.Namespace) -> Exit:
    """Explain a diagnostic code, a word of the language, or what a policy decides on a graph.

    With a code such as APL101: its page; with nothing: all codes. With a word such as save or 'crosses block': its
    meaning, and an example. With a policy and --graph, --node NAME shows for each rule whether it matches the node,
    which part of it excludes the node, and which rule decides; --rule LINE what each part of a rule matches, and which
    rules override it. Name a node by its name, by a glob over names, or by its module path as a policy writes it after
    `in`; several nodes get a line each.

    For a collective, --node also shows which scheduling lines joined or moved it, from where to where, and how much of
    it is exposed; for a scheduling line, --rule shows what it picks and moves, and what would be exposed without it.

    examples:

      policylang explain APL301
      policylang explain recompute
      policylang explain mine.apl --graph llama3_8b.graph --node mm_3
      policylang explain mine.apl --graph llama3_8b.graph --node 'layers.0.attention.*'
      policylang explain mine.apl --graph llama3_8b.graph --rule 12 --device h100-sxm

    exit codes: 0 explained, 1 a policy with errors, 2 no such code, node, rule or file
    """
    given = {name for name in ("graph", "node", "rule", "device") if getattr(options, name) is not None}
    if given:
        text, data = _on_graph(options, given)
    else:
        text, data = _explained(options.subject)
        data = {"version": 1, **data}
    if options.output_format == "json":
        say(json.dumps(data, indent=2), "json")
    else:
        say(text)
    return Exit.CLEAN


def _on_graph(options: argparse.Namespace, given: set[str]) -> tuple[str, dict[str, Any]]:
    """A node, or a statement of a policy, as text and as data."""
    from policylang.report.explain import NothingToExplain, explain_named

    if options.subject is not None and not {"node", "rule"} & given:
        fix = _HOW.replace("POLICY", options.subject)
        raise UsageError(f"what is to be explained of `{options.subject}`? a node, or a rule", fix)
    take_settings(options, *KEYS)
    if options.subject is None or options.graph is None:
        raise UsageError("a node or a rule is explained of a policy on a graph", _HOW)
    tell_settings(options)
    device = device_of(options.device)
    facts = read_graph(options.graph)
    plan = planned(read_policy(options.subject, facts), facts, options.path, device)
    warn_of_devices(facts, plan)
    if options.node is None:
        found: Sequence[Explained] = [_of_line(plan, options.subject, options.rule, options.path)]
    else:
        try:
            found = explain_named(plan, options.node)
        except NothingToExplain as error:
            raise UsageError(*error.args) from None
    return "\n\n".join(map(str, found)), {key: value for each in found for key, value in each.to_dict().items()}


def _of_line(plan: Plan, policy: str, text: str, path: str | None) -> Explained:
    """The statement that begins in a line: of the policy's file, unless the text names another."""
    from policylang.report.explain import explain_statement, explained_statements

    rules, lines = explained_statements(plan)
    own = STDIN_NAME if policy == STDIN else find_policy(policy)[1]
    file, _, line = text.rpartition(":")
    for span in (*lines, *rules):
        if str(span.line) == line and span.source.name == (file or own):
            return explain_statement(plan, span, capabilities_for(plan.facts.kind, path))
    known = [span.location if span.source.name != own else str(span.line) for span in (*rules, *lines)]
    shown = ", ".join(known if len(known) <= _MOST_LINES else [*known[:_MOST_LINES], "…"])
    fix = f"its rules begin in {shown or 'no line: it has none'}"
    raise UsageError(f"no rule of the policy begins in line `{text}`", fix)


def _explained(subject: str | None) -> tuple[str, dict[str, Any]]:
    """As text and as data: a word of the language, a code, or, without a subject, all codes."""
    from policylang.report.explain import meanings_data, meanings_text, of_group

    if subject is None:
        codes = sorted(CODES.items())
        data = [{"code": code, "title": e.title, "severity": e.severity.value} for code, e in codes]
        return "\n".join(f"{code}  {entry.title}" for code, entry in codes), {"codes": data}
    word = " ".join(subject.split())
    if found := (*senses(word), *of_group(word)):
        return meanings_text(word, found), meanings_data(word, found)
    entry = _entry(subject)
    examples = (("Wrong", entry.wrong), ("Right", entry.mended))
    shown = (f"{label}:\n\n{indent(text, '    ')}" for label, text in examples if text)
    text = fill(entry.text, width=columns(_WIDEST) or _WIDEST)
    said = {"title": entry.title, "severity": entry.severity.value, "text": entry.text}
    return (
        "\n\n".join((f"{entry.code}: {entry.title} ({entry.severity.value})", text, *shown)),
        {"code": entry.code, **said, "wrong": entry.wrong, "right": entry.mended},
    )


def _entry(code: str) -> Code:
    if (entry := CODES.get(code.upper())) is not None:
        return entry
    near = get_close_matches(code.upper(), CODES, n=1)
    fix = f"did you mean `{near[0]}`?" if near else "`policylang explain` lists all codes"
    if _CODE_LIKE.match(code):
        raise UsageError(f"no diagnostic has the code `{code}`", fix)
    if code == STDIN or find_policy(code)[0].is_file() or code.endswith(SUFFIX):
        fix = _HOW.replace("POLICY", code)
        raise UsageError(f"`{code}` is a policy, and what a policy decides is explained on a graph", fix)
    if near:
        raise UsageError(f"no diagnostic has the code `{code}`", fix)
    known = (*(word for each in meanings() for word in each.words), *group_names())
    fix = did_you_mean(nearest(code, known)) or fix
    raise UsageError(
        f"`{code}` is neither a diagnostic code nor a word of the language nor a policy that is here", f"{fix}; {_HOW}"
    )
