"""What an editor asks for by a command: a node, a rule or a code explained, as Markdown, and the page of a plan."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from policylang.editor.state import State
from policylang.language.diagnostics import CODES
from policylang.language.resources import codes_folder
from policylang.language.wording import one_line
from policylang.planning.capabilities import capabilities_for
from policylang.report.explain import (
    Explained,
    NothingToExplain,
    explain_named,
    explain_statement,
    explained_statements,
)
from policylang.report.layout import fenced
from policylang.report.plan_page import plan_page

EXPLAIN_NODE = "policylang.explainNode"
EXPLAIN_RULE = "policylang.explainRule"
EXPLAIN_CODE = "policylang.explainCode"
SHOW_PLAN = "policylang.showPlan"


def explained_node(state: State, node: str) -> str:
    """What ``policylang explain --node`` says, as Markdown: of a node, of several by a glob, or of a module's. Empty
    where the policy has no plan."""
    if state.graph is None:
        return ""
    try:
        return "\n\n".join(map(_markdown, explain_named(state.graph.plan, node)))
    except NothingToExplain as error:
        return "\n\n".join(error.args)


def explained_line(state: State, line: int) -> str:
    """What ``policylang explain --rule`` says of the rules and scheduling lines on a line, which counts from 0; empty
    where there are none, or the policy has no plan."""
    if state.graph is None:
        return ""
    plan, source = state.graph.plan, state.document.source
    spans = [span for found in explained_statements(plan) for span in found]
    here = [each for each in spans if each.source == source and each.line - 1 <= line <= each.end_line - 1]
    capabilities = capabilities_for(state.graph.facts.kind, state.graph.path)
    return "\n\n".join(_markdown(explain_statement(plan, each, capabilities)) for each in here)


def explained_code(code: str) -> str:
    """The page of a diagnostic's code; empty for what is no code."""
    return (codes_folder() / f"{code}.md").read_text(encoding="utf-8") if code in CODES else ""


def page_of(state: State) -> str | None:
    """The page of ``policylang plan --html``; None where the policy has no plan. Weighs each rule."""
    graph = state.graph
    if graph is None:
        return None
    found = graph.breakdown if graph.order is None else evolve(graph.breakdown, communication=graph.order)
    return plan_page(found, graph.worth, Path(graph.name).name)


def _markdown(explained: Explained) -> str:
    """A table of text keeps its columns in a block of code."""
    first, _, rest = str(explained).partition("\n")
    return f"## {_literal(first)}\n\n{fenced(rest.strip(chr(10)), 'text')}\n"


def _literal(text: str) -> str:
    """Text of a policy as Markdown that shows it as it is."""
    return "".join(f"\\{each}" if each in "\\`*_{}[]<>()#+!|~" else each for each in one_line(text))
