"""Sorts the nodes of a graph into the order of a schedule, by moving them.

One rule for the nodes that a schedule does not know, constants and what torch adds: a ``getitem`` stands right behind
what it reads, a node with an effect or without readers right behind the one it stood behind, any other right before the
first node that reads it. And no node stands behind one that reads it, whatever the schedule says.

What comes out for a backward is the order that PyTorch's ``reordering_to_mimic_autograd_engine`` and ``raise_getitems``
make. O(nodes + edges), plus the sorting of what is pulled before a node together.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from torch import fx


def arrange(graph: fx.Graph, names: Iterable[str]) -> None:
    """Order the operators of a graph as ``names`` are, which may name more than it has."""
    by_name = {node.name: node for node in graph.nodes if node.op == "call_function"}
    arrange_nodes(graph, [by_name[name] for name in names if name in by_name])


def arrange_nodes(graph: fx.Graph, planned: Sequence[fx.Node]) -> None:
    """Order some operators of a graph as they are given, and all else by the rule for what no schedule knows."""
    position = {node: at for at, node in enumerate(graph.nodes)}
    beside = _followers(position, frozenset(planned))
    waiting = {node for node in position if node.op not in ("placeholder", "output")}
    order: list[fx.Node] = []

    def put(node: fx.Node) -> None:
        found = [node]
        waiting.discard(node)
        for each in found:
            for source in each.all_input_nodes:
                if source in waiting:
                    waiting.discard(source)
                    found.append(source)
        order.extend(sorted(found, key=position.__getitem__))

    for node in (*beside.get(None, ()), *planned):
        pending = [node]
        while pending:
            if (following := pending.pop()) in waiting:
                put(following)
            pending.extend(reversed(beside.get(following, ())))
    put(graph.output_node())
    _relink(graph, order)


def _followers(position: Iterable[fx.Node], planned: frozenset[fx.Node]) -> dict[fx.Node | None, list[fx.Node]]:
    """The nodes that stand right behind another, in order, by that one; None where that is the beginning."""
    found: dict[fx.Node | None, list[fx.Node]] = {}
    before: fx.Node | None = None
    for node in position:
        if node in planned:
            before = node
        elif node.op == "call_function" and node.target is operator.getitem and node.args[0] in position:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            found.setdefault(source if source.op == "call_function" else before, []).append(node)
        elif node.op == "call_function" and (not node.users or node.is_impure()):
            found.setdefault(before, []).append(node)
            before = node
    return found


def _relink(graph: fx.Graph, order: Iterable[fx.Node]) -> None:
    last = next((node for node in reversed(graph.nodes) if node.op == "placeholder"), None)
    for node in order:
        if last is None:
            next(iter(graph.nodes)).prepend(node)
        elif last.next is not node:
            last.append(node)
        last = node
