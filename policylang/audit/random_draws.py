"""Which random operators of the backward draw what the forward drew, read off the two halves of a partition.

A replayed operator stands in the backward without its name, inside a wrapper that starts from a kept state of the
generator. States are handed over by position alone: two like dropouts whose states were exchanged would run, and draw
each other's numbers. So each wrapper, here and there, is also known by what it reads and by who reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attrs import frozen
from torch import fx

from policylang.graph.facts import Facts
from policylang.operators.names import RUNS_WITH_RANDOM_STATE, SAVES_RANDOM_STATE


@frozen(eq=False)
class _Draw:
    """A wrapped random operator in one half."""

    state: int
    """The number of the state it starts from, or leaves."""
    target: str
    wrapper: fx.Node
    result: fx.Node
    """The node that holds what it drew."""


def is_replay(node: fx.Node) -> bool:
    return _operator(node) in RUNS_WITH_RANDOM_STATE


def is_random_state(value: Any) -> bool:
    """Whether a value that the forward returns is the state that a random operator started from."""
    if not isinstance(value, fx.Node) or len(value.args) != 2:
        return False
    source, position = value.args
    return position == 0 and isinstance(source, fx.Node) and _operator(source) == SAVES_RANDOM_STATE


def replayed(
    facts: Facts, random: Sequence[int], kept: Iterable[Any], forward: fx.Graph, backward: fx.Graph
) -> list[int]:
    """Those of the ``random`` rows whose wrapper in the backward starts where their own in the forward did.

    ``random`` are in graph order, as states are numbered; ``kept`` is what the forward returns for the backward.
    """
    drawn = {draw.state: draw for draw in _drawn(kept, forward)}
    found: list[int] = []
    for again in map(_replay, filter(is_replay, backward.nodes)):
        row = random[again.state] if again.state < len(random) else None
        first = drawn.get(again.state)
        if row is not None and first is not None and _is(facts, row, first) and _is(facts, row, again):
            found.append(row)
    return found


def _is(facts: Facts, row: int, draw: _Draw) -> bool:
    """Whether a wrapper is this row's: the operator, and every neighbour that has kept its name."""
    index = facts.index
    read = {index[source.name] for source in draw.wrapper.all_input_nodes if source.name in index}
    readers = [index[user.name] for user in draw.result.users if user.name in index]
    return (
        draw.target == facts.targets[row]
        and read <= set(facts.inputs[row])
        and all(row in facts.inputs[reader] for reader in readers)
    )


def _drawn(kept: Iterable[Any], forward: fx.Graph) -> Iterator[_Draw]:
    """What the forward draws: each state that it keeps, in order, or the states that it is handed by number."""
    for number, state in enumerate(filter(is_random_state, kept)):
        wrapper = state.args[0]
        result = next((user for user in wrapper.users if user is not state), wrapper)
        yield _Draw(number, str(wrapper.args[0]), wrapper, result)
    yield from map(_replay, filter(is_replay, forward.nodes))


def _replay(node: fx.Node) -> _Draw:
    """A wrapper that is handed its state: an input of the graph, whose name ends with its number."""
    state = node.kwargs.get("rng_state", node.args[0])
    operator = node.args[0] if "rng_state" in node.kwargs else node.args[1]
    number = state.name.rpartition("_")[2] if isinstance(state, fx.Node) else ""
    return _Draw(int(number) if number.isdigit() else 0, str(operator), node, node)


def _operator(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""
