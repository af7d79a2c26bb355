"""Values that a partition moves to the host: the forward returns the copy on the host, the backward fetches it.

A value that is offloaded crosses from the forward to the backward like one that is saved, and goes by its name, until
the two halves stand. Then the copy takes its place: it is returned where the value was, and comes in where the value
came in, so the order that AOTAutograd goes by stays. Where copies start and are awaited is the rule of
:mod:`policylang.planning.decisions.offloading`. What is returned lives on the host, and autograd holds nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen
from torch import fx

from policylang.backends.surgery import copy_insertion
from policylang.graph.facts import Facts
from policylang.planning.storage import storage_roots


@frozen
class Crossing:
    """Where a value goes from the forward to the backward."""

    row: int
    returned: int
    """Its number among the outputs of the forward."""
    taken: int
    """Its number among the inputs of the backward."""


def crossings(
    facts: Facts, rows: Iterable[int], forward: fx.Graph, backward: fx.Graph, *, after: int
) -> list[Crossing]:
    """Where the values of some rows cross. Outputs of the forward before ``after`` are the caller's."""
    values = list(enumerate(forward.output_node().args[0]))[after:]
    sent = {value.name: at for at, value in values if isinstance(value, fx.Node)}
    taken = {node.name: at for at, node in enumerate(backward.find_nodes(op="placeholder"))}
    return [Crossing(row, sent[name], taken[name]) for row in rows if (name := facts.names[row]) in sent]


def move_across(facts: Facts, crossing: Sequence[Crossing], forward: fx.Graph, backward: fx.Graph) -> None:
    """Have the values that cross at these places wait on the host. Changes both graphs; one pass over each."""
    if not crossing:
        return
    hosts = _send(facts, crossing, forward)
    _fetch([(place.taken, hosts[place.row]) for place in crossing], backward)


def _send(facts: Facts, crossing: Sequence[Crossing], graph: fx.Graph) -> dict[int, fx.Node]:
    """Copy the values out in the forward; returns by row the nodes that hand the copies out, which it returns."""
    output = graph.output_node()
    returned = list(output.args[0])
    values = {place.row: returned[place.returned] for place in crossing}
    hosts = copy_insertion.copy_out(
        graph, list(copy_insertion.last_readers(graph, _held(facts, values, graph)).items()), output
    )
    for place in crossing:
        returned[place.returned] = hosts[values[place.row]]
    output.args = (type(output.args[0])(returned),)
    return {row: hosts[value] for row, value in values.items()}


def _held(facts: Facts, values: dict[int, fx.Node], graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Every node that lives in the memory of a value that leaves, to that value."""
    roots, index = storage_roots(facts), facts.index
    by_memory = {roots[row]: value for row, value in values.items()}
    held = {value: value for value in values.values()}
    for node in graph.nodes:
        row = index.get(node.name)
        if row is not None and roots[row] in by_memory:
            held.setdefault(node, by_memory[roots[row]])
    return held


def _fetch(arriving: Sequence[tuple[int, fx.Node]], graph: fx.Graph) -> None:
    """Take the copies in place of the values, and fetch them before what reads the values."""
    inputs = graph.find_nodes(op="placeholder")
    hosts: dict[fx.Node, fx.Node] = {}
    for taken, sent in arriving:
        value = inputs[taken]
        with graph.inserting_before(value):
            host = graph.placeholder(sent.name)
        host.meta = {**copy_insertion.without_marks(value.meta), "val": sent.meta.get("val")}
        hosts[value] = host
    readers: dict[fx.Node, list[fx.Node]] = {}
    begin = None
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        begin = node if begin is None else begin
        for read in node.all_input_nodes:
            if read in hosts:
                readers.setdefault(read, []).append(node)
    assert begin is not None  # a graph has an output
    copy_insertion.copy_in(graph, hosts, readers, begin)
    for value in hosts:
        graph.erase_node(value)
