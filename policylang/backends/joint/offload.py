"""Offloads values of a partition: the forward returns a copy on the host, which the backward fetches.

A value that is offloaded crosses from the forward to the backward like one that is saved, and goes by its name, until
the two halves stand. Then the copy takes its place: it is returned where the value was, and comes in where the value
came in, so the order that AOTAutograd goes by stays. When copies start and are awaited is in a schedule: the plan's, or
that of the halves where collectives were put in another order. What is returned lives on the host, and autograd holds
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen
from torch import fx

from policylang.backends.surgery import copy_insertion
from policylang.graph.facts import Facts
from policylang.graph.rowsets import mask_of
from policylang.graph.schedule import Schedule, ScheduleStep, StepKind
from policylang.planning.liveness import Needs
from policylang.planning.plan import Plan
from policylang.planning.schedule.host_copy_steps import with_host_copies


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


def move_across(
    facts: Facts, schedule: Schedule, crossing: Sequence[Crossing], forward: fx.Graph, backward: fx.Graph
) -> None:
    """Have the values that cross at these places wait on the host. Changes both graphs; one pass over each."""
    if not crossing:
        return
    hosts = _send(schedule, _nodes(facts, schedule, forward, backward=False), crossing, forward)
    _fetch(schedule, _nodes(facts, schedule, backward, backward=True), crossing, hosts, backward)


def schedule_of_halves(plan: Plan, needs: Needs, forward: fx.Graph, backward: fx.Graph) -> Schedule:
    """The steps of two halves in the order in which they stand, on the rows of the plan that they were cut by, with the
    copies to the host and back where that order has them. Nodes that the plan does not have are no steps of it."""
    facts = plan.facts
    kinds = {row: kind for kind, row, region in plan.schedule if region and kind <= StepKind.SECOND_RUN}
    steps: list[ScheduleStep] = []
    for region, half in enumerate((forward, backward)):
        for node in half.nodes:
            row = facts.index.get(node.name)
            if row is not None and node.op == "call_function":
                steps.append((kinds.get(row, StepKind.FIRST_RUN) if region else StepKind.FIRST_RUN, row, region))
    return Schedule.of(with_host_copies(facts, steps, mask_of(needs.offloaded, len(facts))))


def _send(
    schedule: Schedule, steps: copy_insertion.Nodes, crossing: Sequence[Crossing], graph: fx.Graph
) -> dict[int, fx.Node]:
    """Copy the values out in the forward; returns by row the nodes that hand the copies out, which it returns."""
    output = graph.output_node()
    returned = list(output.args[0])
    values = {place.row: returned[place.returned] for place in crossing}
    hosts = copy_insertion.copy_out(graph, schedule, steps, values)
    for place in crossing:
        returned[place.returned] = hosts[place.row]
    output.args = (type(output.args[0])(returned),)
    return hosts


def _fetch(
    schedule: Schedule,
    steps: copy_insertion.Nodes,
    crossing: Sequence[Crossing],
    sent: dict[int, fx.Node],
    graph: fx.Graph,
) -> None:
    """Take the copies in place of the values, and fetch them before what reads the values."""
    inputs = graph.find_nodes(op="placeholder")
    values = {place.row: inputs[place.taken] for place in crossing}
    hosts: dict[int, fx.Node] = {}
    for row, value in values.items():
        with graph.inserting_before(value):
            host = hosts[row] = graph.placeholder(sent[row].name)
        host.meta = {**copy_insertion.without_marks(value.meta), "val": sent[row].meta.get("val")}
    copy_insertion.copy_in(graph, schedule, steps, values, hosts, lambda reader: 1)
    for value in values.values():
        graph.erase_node(value)


def _nodes(facts: Facts, schedule: Schedule, graph: fx.Graph, *, backward: bool) -> list[fx.Node | None]:
    """By step of the schedule, the node that runs then in one of the halves."""
    names = {node.name: node for node in graph.nodes if node.op == "call_function"}
    return [
        names.get(facts.names[row]) if kind <= StepKind.SECOND_RUN and (region > 0) == backward else None
        for kind, row, region in schedule
    ]
