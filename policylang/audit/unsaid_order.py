"""What of a graph's order its edges do not say, and a changed order has to keep: who draws, writes or acts before whom.

A second lock: planning keeps all of this by what its facts say (:mod:`policylang.planning.order.dependencies`); here
the operators of the graph that came out are asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import fx

from policylang.graph.facts import Facts, Flag
from policylang.operators.calls import effects, function, written_statistics
from policylang.operators.names import GETITEM, RUNS_WITH_RANDOM_STATE

Late = tuple[str, str]
"""A node, and one that runs before it and has to run after it."""


def turned_around(facts: Facts, nodes: Sequence[fx.Node]) -> Iterator[Late]:
    """Pairs of nodes that the facts have in one order and a graph in the other, though both draw, both act, or one
    writes memory that the other reads or writes. ``nodes``: those of the facts, in the order of the graph. Linear."""
    rows = [facts.index[node.name] for node in nodes]
    flags = facts.flags
    draws = [
        row
        for row, node in zip(rows, nodes, strict=True)
        if flags[row] & Flag.RANDOM and facts.targets[row] != GETITEM and function(node) not in RUNS_WITH_RANDOM_STATE
    ]
    for like in (draws, [row for row in rows if flags[row] & Flag.EFFECTFUL]):
        yield from ((facts.names[first], facts.names[second]) for first, second in _falling(like))
    yield from _of_memory(facts, dict(zip(rows, nodes, strict=True)))


def _falling(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    highest = -1
    for row in rows:
        if row < highest:
            yield row, highest
        highest = max(highest, row)


def _of_memory(facts: Facts, nodes: Mapping[int, fx.Node]) -> Iterator[Late]:
    """How often memory was written before a node that reads or writes it tells whether it comes in its turn. What only
    looks into memory may do so at any time."""
    roots = _roots(nodes)
    written = {row: found for row, node in nodes.items() if (found := _memory(roots, _written(node)))}
    contested = {root for found in written.values() for root in found}
    if not contested:
        return
    touched = {
        row: [root for root in _memory(roots, node.all_input_nodes) if root in contested]
        for row, node in nodes.items()
        if row in written or not (facts.flags[row] & Flag.VIEW or facts.targets[row] == GETITEM)
    }
    writers: dict[fx.Node, list[int]] = {}
    for row in sorted(written):
        for root in written[row]:
            writers.setdefault(root, []).append(row)
    as_traced = _turns(sorted(touched), touched, written)
    for (row, root), turn in _turns(touched, touched, written).items():
        planned = as_traced[row, root]
        other = writers[root][min(turn, planned)] if turn != planned else row
        if row != other:
            behind, ahead = (row, other) if turn > planned else (other, row)
            yield facts.names[behind], facts.names[ahead]


def _roots(nodes: Mapping[int, fx.Node]) -> dict[fx.Node, fx.Node]:
    """The nodes that look into memory of others, with the node that the memory is of."""
    found: dict[fx.Node, fx.Node] = {}
    for _, node in sorted(nodes.items()):
        aliased, _ = effects(node)
        if aliased:
            found[node] = _root(found, aliased[0])
    return found


def _root(roots: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return roots.get(node, node)


def _memory(roots: Mapping[fx.Node, fx.Node], nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The memory that some nodes look into, each once."""
    return list(dict.fromkeys(_root(roots, node) for node in nodes))


def _written(node: fx.Node) -> list[fx.Node]:
    _, targets = effects(node)
    statistics = (node.args[at] for at in written_statistics(node))
    return [*targets, *(each for each in statistics if isinstance(each, fx.Node))]


def _turns(
    order: Iterable[int], touched: Mapping[int, Iterable[fx.Node]], written: Mapping[int, Iterable[fx.Node]]
) -> dict[tuple[int, fx.Node], int]:
    """By row and memory, how many writes to it come before."""
    so_far: dict[fx.Node, int] = {}
    found = {}
    for row in order:
        for root in touched[row]:
            found[row, root] = so_far.get(root, 0)
        for root in written.get(row, ()):
            so_far[root] = so_far.get(root, 0) + 1
    return found
