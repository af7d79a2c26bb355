"""Offloads values of a partition: the forward returns a copy on the host, which the backward fetches.

A value that is offloaded crosses from the forward to the backward like one that is saved, and goes by its name, until
the two halves stand. Then the copy takes its place: it is returned where the value was, and comes in where the value
came in, so the order that AOTAutograd goes by stays. When copies start and are awaited is in a schedule: the plan's, or
that of the halves where collectives were put in another order. What is returned lives on the host, and autograd holds
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen
from torch import fx

from policylang.backends.surgery import copy_insertion
from policylang.graph.facts import Facts, Flag, mask_of
from policylang.graph.schedule import Schedule, ScheduleStep, StepKind
from policylang.operators.calls import function, piece_of_draw
from policylang.operators.names import RUNS_WITH_RANDOM_STATE, SAVES_RANDOM_STATE
from policylang.planning.graph_edit import Edits
from policylang.planning.liveness import Needs
from policylang.planning.plan import Plan
from policylang.planning.schedule.host_copy_steps import with_host_copies

_WRAPPERS = (SAVES_RANDOM_STATE, *RUNS_WITH_RANDOM_STATE)


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


def rows_in(plan: Plan, half: fx.Graph, *, backward: bool) -> dict[str, int]:
    """The row that each operator of a half runs, by its name, as it was cut and before anything in it is moved. What
    torch has put into a wrapper that keeps or takes a random state is known by its place among its like."""
    facts, schedule = plan.facts, plan.schedule
    wanted = [row for kind, row, region in schedule if kind <= StepKind.SECOND_RUN and (region > 0) == backward]
    calls = {node.name: node for node in half.nodes if node.op == "call_function" and piece_of_draw(node) is None}
    found = {name: row for row in wanted if (name := facts.names[row]) in calls}
    wrappers = [name for name, node in calls.items() if function(node) in _WRAPPERS and name not in found]
    wrapped = [row for row in wanted if facts.names[row] not in found and facts.flags[row] & Flag.RANDOM]
    found.update(zip(wrappers, (row for row in wrapped if facts.owners[row] == row), strict=False))
    return found


def schedule_of_halves(
    plan: Plan,
    needs: Needs,
    halves: Sequence[fx.Graph],
    rows: Sequence[Mapping[str, int]],
    edits: Sequence[Edits],
) -> Schedule:
    """The steps of a forward and a backward in the order in which they stand, on the rows of the plan that they were
    cut by, with the copies to the host and back where that order has them. ``rows``: as :func:`rows_in` finds them in
    each; ``edits``: what was rewritten since. What went runs where what came in its place does."""
    again = frozenset(plan.schedule.rows_of(StepKind.SECOND_RUN))
    steps: list[ScheduleStep] = []
    for region, (half, row_of, rewritten) in enumerate(zip(halves, rows, edits, strict=True)):
        gone = {edit.nodes[0].name: edit.dead for edit in rewritten.done if edit.nodes}
        for node in half.nodes:
            for row in (row_of[name] for name in (*gone.get(node.name, ()), node.name) if name in row_of):
                kind = StepKind.SECOND_RUN if region and row in again else StepKind.FIRST_RUN
                steps.append((kind, row, region))
    return Schedule.of(with_host_copies(plan.facts, steps, mask_of(needs.offloaded, len(plan.facts))))


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
