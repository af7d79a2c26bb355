"""Halves whose order was changed by hand: collectives start two products early, and waits stand before what reads them.

What a policy's scheduling lines do to halves is tested elsewhere; this is any order that is not the one of the trace.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from policylang.backends.joint import JointPartitioner
from policylang.backends.torch_compile.backend import PolicyBackend
from policylang.operators.work import is_communication, is_product, is_wait
from tests.support.hand_orders import drawn_places

AHEAD = 2
"""Products."""


Reorder = Callable[[fx.Graph], None]


class HandOrdered(JointPartitioner):
    reorder: Reorder

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        halves = super().__call__(gm, joint_inputs, **options)
        for half in halves:
            type(self).reorder(half.graph)
            half.recompile()
        return halves


def in_hand_order(backend: PolicyBackend, reorder: Reorder | None = None) -> PolicyBackend:
    """A backend whose halves are reordered by hand, whatever its policy."""
    made = backend._partitioner
    kind = type("HandOrdered", (HandOrdered,), {"reorder": staticmethod(reorder or in_other_order)})
    backend._partitioner = kind(made.policy, made.deferred, made.root, made.aside)
    return backend


def at_random(seed: int) -> Reorder:
    """Any order in which what is read stands before what reads it, drawn for each half anew."""
    draw = random.Random(seed)

    def reorder(graph: fx.Graph) -> None:
        inner = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        at = {node: place for place, node in enumerate(inner)}
        before = [{at[source] for source in node.all_input_nodes if source in at} for node in inner]
        _lay_out(graph, [inner[place] for place in drawn_places(before, draw)])

    return reorder


def in_other_order(graph: fx.Graph) -> None:
    """Waits as late and collectives as early as readers, :data:`AHEAD` and the order of starts allow."""
    order = list(graph.nodes)
    for node in [each for each in order if is_communication(each) and is_wait(str(each.target))]:
        readers = [order.index(user) for user in node.users]
        order.remove(node)
        order.insert(min(readers) - 1, node)
    for node in [each for each in order if is_communication(each) and not is_wait(str(each.target))]:
        place = order.index(node)
        before = [at for at in range(place) if order[at].op in ("placeholder", "get_attr") or _holds(order[at], node)]
        products = [at for at in range(place) if is_product(order[at])]
        early = products[-AHEAD] if len(products) >= AHEAD else 0
        order.remove(node)
        order.insert(max(early, *(at + 1 for at in before), 0), node)
    _lay_out(graph, [node for node in order if node.op not in ("placeholder", "output")])


def _lay_out(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    last = graph.find_nodes(op="placeholder")[-1]
    for node in order:
        last.append(node)
        last = node
    graph.lint()


def _holds(other: fx.Node, node: fx.Node) -> bool:
    """Whether a node stays behind another: what it reads, and what starts before it."""
    return other in node.all_input_nodes or (is_communication(other) and not is_wait(str(other.target)))
