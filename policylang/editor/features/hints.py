"""Figures at the end of each rule, and the totals on the ``policy`` line."""

from __future__ import annotations

from lsprotocol import types

from policylang.editor.explaining.amounts import values
from policylang.editor.explaining.article import Article
from policylang.editor.explaining.on_snapshot import selections_of
from policylang.editor.explaining.pointed import own_statements
from policylang.editor.explaining.rules import rule_figures, rule_hint, rule_index
from policylang.editor.explaining.statements import (
    include_hint,
    picked,
    policy_article,
    policy_hint,
    statement_article,
    statement_hint,
    undecided,
)
from policylang.editor.state import GraphState, State
from policylang.language import syntax
from policylang.language.syntax import Statement
from policylang.language.wording import counted


def hints(state: State, start: int, end: int, *, markdown: bool = True) -> list[types.InlayHint]:
    """Of the statements that end between two character offsets; none where the text has no plan. What a rule is worth
    is left out until it is worked out."""
    graph = state.graph
    if graph is None or state.text.loaded.policy is None:
        return []
    found: list[types.InlayHint] = []
    for statement in statements_of(state):
        at = statement.span.end
        if start <= at <= end and (label := hint_text(state, graph, statement)):
            found.append(_hint(state, at, label, _tooltip(state, graph, statement), markdown=markdown))
    totals, first = policy_hint(graph), _titled(state)
    if totals and first is not None and start <= first.span.end <= end:
        found.append(_hint(state, first.span.end, totals, policy_article(graph), markdown=markdown))
    return sorted(found, key=lambda each: (each.position.line, each.position.character))


def statements_of(state: State) -> list[Statement]:
    """Those of the document, with their names looked up where they have any."""
    policy, source = state.text.loaded.policy, state.document.source
    planned = {} if policy is None else {each.span.start: each for each in own_statements(policy, source)}
    return [planned.get(each.span.start, each) for each in state.text.file.statements]


def hint_text(state: State, graph: GraphState, statement: Statement) -> str:
    """What stands behind a statement; empty where nothing does."""
    if isinstance(statement, syntax.Rule):
        index = rule_index(graph, statement)
        return "" if index is None else rule_hint(graph, index)
    if isinstance(statement, syntax.Let):
        return _named(state, graph, statement)
    if isinstance(statement, syntax.Blocks):
        return counted(len(graph.plan.block_names), "block")
    if isinstance(statement, syntax.Undecided):
        return values(undecided(graph))
    if isinstance(statement, syntax.Include):
        return include_hint(state, statement)
    return statement_hint(graph, statement)


def _named(state: State, graph: GraphState, let: syntax.Let) -> str:
    count = picked(graph, let)
    if count is not None:
        return counted(count, "collective")
    selections = selections_of(state)
    return "" if selections is None else counted(len(selections.rows(let.selector)), "node")


def _titled(state: State) -> Statement | None:
    """The statement that the totals stand behind: the ``policy`` line, else the first."""
    own = statements_of(state)
    return next((each for each in own if isinstance(each, syntax.PolicyName)), own[0] if own else None)


def _tooltip(state: State, graph: GraphState, statement: Statement) -> Article:
    """Without names of nodes, which the hover has."""
    if isinstance(statement, syntax.Rule) and (index := rule_index(graph, statement)) is not None:
        return rule_figures(graph, index)
    if isinstance(statement, syntax.Let) and picked(graph, statement) is None:
        return Article().say("So many nodes of the forward have this name here.")
    return statement_article(state, statement)


def _hint(state: State, at: int, label: str, tooltip: Article, *, markdown: bool) -> types.InlayHint:
    return types.InlayHint(
        position=state.document.positions.position(at),
        label=label,
        tooltip=tooltip.content(markdown=markdown) if tooltip.blocks else None,
        padding_left=True,
    )
