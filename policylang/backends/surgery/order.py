"""Where each node of a half stands: recomputations just before their first use, ``getitem`` right behind its operator.

The same order that PyTorch's ``reordering_to_mimic_autograd_engine`` and ``raise_getitems`` make, by moving the nodes
that are there rather than by copying the graph. O(nodes + edges), plus the sorting of what is moved together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch import fx


def recompute_late(graph: fx.Graph) -> None:
    """Move what a backward computes without any gradient to just before the first node that needs it.

    A backward comes out of a joint graph with all its recomputations up front, where every recomputed value would
    live from the start. Nodes that draw, write or have another effect stay in their order.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    waiting = _without_gradient(order)
    for node in order:
        if node.op == "placeholder" or node in waiting:
            continue
        needed = _collect(node, waiting)
        for earlier in sorted(needed, key=order.__getitem__):
            node.prepend(earlier)
        waiting.difference_update(needed)


def raise_getitems(graph: fx.Graph) -> None:
    """Move each ``getitem`` up to the operator it reads, so that what nobody takes of a tuple can be freed."""
    getitems = graph.find_nodes(op="call_function", target=operator.getitem)
    _raise(getitems, lambda source: source.op != "placeholder")


def raise_pieces(copies: Sequence[fx.Node]) -> None:
    """The same among some nodes that stand for others, given in graph order. What was there before stays in its order:
    a ``getitem`` of a node that is none of them stays where it is."""
    _raise([node for node in copies if node.target is operator.getitem], frozenset(copies).__contains__)


def _raise(getitems: Sequence[fx.Node], wanted: Callable[[fx.Node], bool]) -> None:
    """``getitems`` are in graph order, and stay in it behind their operator."""
    for node in reversed(getitems):
        source = node.args[0]
        if isinstance(source, fx.Node) and wanted(source):
            source.append(node)


def _without_gradient(order: dict[fx.Node, int]) -> set[fx.Node]:
    """The operators and constants that depend on no tangent and have no effect: what may wait until it is needed."""
    late: set[fx.Node] = set()
    waiting: set[fx.Node] = set()
    for node in order:
        if node.op == "placeholder":
            if "tangents" in node.name:
                late.add(node)
        elif any(source in late for source in node.all_input_nodes):
            late.add(node)
        elif node.op == "get_attr" or (node.op == "call_function" and node.users and not node.is_impure()):
            waiting.add(node)
    return waiting


def _collect(node: fx.Node, waiting: set[fx.Node]) -> set[fx.Node]:
    """Everything that waits and that ``node`` depends on."""
    needed: set[fx.Node] = set()
    pending = [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source in waiting and source not in needed:
                needed.add(source)
                pending.append(source)
    return needed
