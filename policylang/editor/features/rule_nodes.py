"""The nodes of a rule by name: what an editor offers where somebody asks to have one explained."""

from __future__ import annotations

from policylang.editor.state import State

NODES_OF_RULE = "policylang.nodesOfRule"


def nodes_of_rule(state: State, line: int) -> list[str]:
    """What the rules on a line match, in graph order; a line counts from 0, as in the protocol. Nothing where there is
    no rule, or no plan."""
    if state.graph is None:
        return []
    source, plan = state.document.source, state.graph.plan
    rows = {
        row
        for outcome in plan.rules
        if outcome.rule.span.source == source and outcome.rule.span.line - 1 <= line <= outcome.rule.span.end_line - 1
        for row in outcome.matched
    }
    return [plan.facts.names[row] for row in sorted(rows)]
