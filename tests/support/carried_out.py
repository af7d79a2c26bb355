"""The order in which a changed graph runs, read off its nodes one by one, in the words of a schedule."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from policylang.backends import copies
from policylang.graph import marks
from policylang.graph.facts import Facts, Flag, Phase, Schedule, StepKind
from policylang.torch_compat.graphs import random_state_operators

Steps = list[tuple[StepKind, str, int]]
"""Kind, name and region; in a partition a random operator that runs twice goes by its operator."""


def flat_steps(graph: fx.Graph, facts: Facts) -> Steps:
    found: Steps = []
    region, inside = 0, False
    for kind, name, node in _read(graph):
        if name not in facts.index:
            continue
        phase = facts.phases[facts.index[name]]
        fetched = kind in (StepKind.COPY_FROM_HOST, StepKind.WAIT_FROM_HOST, StepKind.WIDEN)
        backward = phase == Phase.BACKWARD or kind == StepKind.SECOND_RUN or fetched
        del node
        region += backward and not inside
        inside = backward
        found.append((kind, name, region if backward else 0))
    return found


def half_steps(graph: fx.Graph, facts: Facts, *, backward: bool) -> Steps:
    found: Steps = []
    for kind, name, node in _read(graph):
        if node.target in random_state_operators():
            at = 0 if node.target is random_state_operators()[0] else 1
            found.append((StepKind(int(backward)), str(node.args[at]), int(backward)))
        elif name in facts.index and not _is_of_torch(node):
            again = backward and kind == StepKind.FIRST_RUN and facts.phases[facts.index[name]] == Phase.FORWARD
            found.append((StepKind.SECOND_RUN if again else kind, name, int(backward)))
    return found


def planned_half(schedule: Schedule, facts: Facts, *, backward: bool) -> Steps:
    again = set(schedule.rows_of(StepKind.SECOND_RUN))
    found: Steps = []
    for kind, row, region in schedule:
        if (region > 0) == backward:
            replayed = row in again and facts.flags[row] & Flag.RANDOM and facts.owners[row] == row
            name = facts.targets[row] if replayed and kind <= StepKind.SECOND_RUN else facts.names[row]
            found.append((StepKind(kind), name, region))
    return found


def _read(graph: fx.Graph) -> Iterator[tuple[StepKind, str, fx.Node]]:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        found = marks.custom(node.meta)
        if node.target is copies.OFFLOAD_OP:
            yield StepKind.COPY_TO_HOST, _moved(node), node
        elif node.target is copies.RELOAD_OP:
            yield StepKind.COPY_FROM_HOST, _moved(node), node
        elif node.target in _NARROWING:
            yield _NARROWING[node.target], _moved(node), node
        elif node.target is copies.WAIT_OP:
            ticket = node.args[0]
            assert isinstance(ticket, fx.Node)
            out = ticket.target is copies.OFFLOAD_OP
            yield StepKind.WAIT_TO_HOST if out else StepKind.WAIT_FROM_HOST, _moved(node), node
        elif marks.RECOMPUTED in found:
            yield StepKind.SECOND_RUN, str(found[marks.RECOMPUTED]), node
        else:
            yield StepKind.FIRST_RUN, node.name, node


_NARROWING = {
    copies.SCALES_OP: StepKind.SCALE,
    copies.NARROW_OP: StepKind.NARROW,
    copies.WIDEN_OP: StepKind.WIDEN,
}


def _moved(node: fx.Node) -> str:
    """The value that a copy moves; of a random operator that keeps its state, a node of its own has it."""
    return str(marks.custom(node.meta)[marks.MOVED]).removesuffix("_result")


def _is_of_torch(node: fx.Node) -> bool:
    """What torch takes of a random operator that keeps its state; it may be named like a node of the other half."""
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and source.target is random_state_operators()[0]
