"""Calls of layout operators and collectives, read from facts or about to be made: what a proof runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import Factory, field, frozen

from policylang.graph.facts import Facts, Ref
from policylang.operators.moves import Move, move_of
from policylang.planning.graph_edit import FusedGroup, NewNode, Node


@frozen
class ChainCall:
    name: str
    target: str
    arguments: tuple[Any, ...]
    """As in :class:`~policylang.planning.graph_edit.NewNode`; collectives have the name of their group or a
    :class:`FusedGroup`."""
    shape: tuple[int, ...] | None
    """Of what it returns; None of a tuple."""
    move: Move = field(default=Factory(lambda it: move_of(it.target, it.arguments, it.shape), True), repr=False)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of what it reads, one but where it joins several."""
        first = self.arguments[0]
        return (first.name,) if isinstance(first, Node) else tuple([part.name for part in first])


def old_calls(facts: Facts, rows: Iterable[int]) -> list[ChainCall]:
    """The calls in some rows, in graph order."""
    return [ChainCall(facts.names[row], facts.targets[row], _arguments(facts, row), facts.shapes[row]) for row in rows]


def new_call(node: NewNode) -> ChainCall:
    return ChainCall(node.name, node.target, node.arguments, node.shape)


def group_of(call: ChainCall) -> str | FusedGroup:
    """The group of a collective: the last argument, whatever the collective."""
    group = call.arguments[-1]
    assert isinstance(group, (str, FusedGroup))
    return group


def _arguments(facts: Facts, row: int) -> tuple[Any, ...]:
    found = tuple(_named(facts, value) for value in facts.arguments[row])
    # What a group is called in the graph and in the facts may differ.
    return (*found[:-1], facts.group_names[row]) if facts.group_names[row] else found


def _named(facts: Facts, value: Any) -> Any:
    if isinstance(value, Ref):
        return Node(facts.names[value.row])
    if isinstance(value, tuple):
        return tuple(_named(facts, part) for part in value)
    return value
