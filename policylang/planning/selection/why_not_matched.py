"""Explains why a selector does not match a node: the first part of it that leaves the node out, as a phrase."""

from __future__ import annotations

from policylang.language.operators import PRELUDE_NAME
from policylang.language.selectors import nth
from policylang.language.syntax import (
    TIMES,
    Compare,
    Difference,
    Everything,
    Feeding,
    InBlock,
    InModule,
    Intersection,
    Operator,
    Ordinal,
    Reference,
    Scope,
    Selector,
    Union,
    Where,
)
from policylang.language.walk import predicates
from policylang.language.wording import figure, joined
from policylang.planning.selection.empty_matches import part_label
from policylang.planning.selection.ordinals import effective_scope, group_keys
from policylang.planning.selection.selectors import Selections

_MOST_BRANCHES = 6


def why_not(selector: Selector, row: int, selections: Selections) -> str:
    """For a node that the selector does not denote. Costs no more than evaluating the selector."""
    node: Selector = selector
    while True:
        deeper = _left_out_before(node, row, selections)
        if deeper is None:
            return _own_reason(node, row, selections)
        node = deeper


def _left_out_before(node: Selector, row: int, selections: Selections) -> Selector | None:
    """The part that leaves the node out already, where there is just one such part; else the reason is this one's."""
    if isinstance(node, Reference):
        let = selections.lets[node.name]
        return None if let.span.source.name == PRELUDE_NAME else let.selector
    if isinstance(node, InModule | InBlock | Where | Ordinal):
        return None if _has(node.selector, row, selections) else node.selector
    if isinstance(node, Intersection):
        return node.right if _has(node.left, row, selections) else node.left
    if isinstance(node, Difference | Feeding):
        return None if _has(node.left, row, selections) else node.left
    return None


def _own_reason(node: Selector, row: int, selections: Selections) -> str:
    if isinstance(node, Everything):
        return "`everything` is every forward call, and it is none"
    if isinstance(node, Operator | Reference):
        return f"`{part_label(node)}`: it is {selections.facts.targets[row]}"
    if isinstance(node, InModule):
        return f"`{part_label(node)}`: it is in {selections.facts.modules[row] or 'no module'}"
    if isinstance(node, InBlock):
        return f"`{part_label(node)}`: it is {_block(row, selections)}"
    if isinstance(node, Where):
        return f"`{part_label(node)}` does not hold{_times(node, row, selections)}"
    if isinstance(node, Ordinal):
        return f"`{part_label(node)}`: it is {_position(node, row, selections)}"
    if isinstance(node, Union):
        reasons = dict.fromkeys(why_not(part, row, selections) for part in node.parts[:_MOST_BRANCHES])
        more = [f"and {len(node.parts) - _MOST_BRANCHES} more"] if len(node.parts) > _MOST_BRANCHES else []
        return "; ".join([*reasons, *more])
    if isinstance(node, Difference):
        return f"`except` takes it out of `{node.span.one_line}`"
    return f"it is not among `{node.span.one_line}`"


def _times(node: Where, row: int, selections: Selections) -> str:
    """What the node's time is, where the predicate asks for it."""
    measures = (test.quantity for test in predicates(node.predicate) if isinstance(test, Compare))
    asked = [each for each in dict.fromkeys(measures) if each in TIMES]
    if selections.prices is None or not asked:
        return ""
    found = ((each, selections.prices.of(each, row)) for each in asked)
    said = (
        f"its {each} is {figure(value, 'seconds')}" if value is not None else f"it has no {each}"
        for each, value in found
    )
    return f": {joined(list(said))}"


def _has(selector: Selector, row: int, selections: Selections) -> bool:
    return row in selections.rows(selector)


def _block(row: int, selections: Selections) -> str:
    block = selections.blocks.block_of[row]
    return "outside every block" if block < 0 else f"in block {block}, {selections.blocks.names[block]}"


def _position(node: Ordinal, row: int, selections: Selections) -> str:
    """``the 3rd of 7 in block 4``."""
    rows = selections.rows(node.selector)
    scope = effective_scope(node.scope, bool(selections.blocks.names))
    keys = group_keys(scope, rows, selections.facts, selections.blocks, selections.chains)
    key = keys[rows.index(row)]
    if key is None:
        return "outside every block"
    group = [each for each, other in zip(rows, keys, strict=True) if other == key]
    return f"the {nth(group.index(row) + 1)} of {len(group)} in {_group(scope, row, selections)}"


def _group(scope: Scope, row: int, selections: Selections) -> str:
    if scope is Scope.BLOCK:
        return f"block {selections.blocks.block_of[row]}"
    if scope is Scope.MODULE:
        return selections.facts.modules[row] or "the root module"
    return "the graph" if scope is Scope.GRAPH else f"its {scope.value}"
