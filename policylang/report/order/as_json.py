"""The order of a step as plain data, for the JSON document of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import asdict

from policylang.graph.schedule import StepKind
from policylang.operators.names import WAITS
from policylang.planning.inspection.communication import CollectiveEntry, Communication, LineInOrder, StepInOrder
from policylang.simulation.streams import streams_of

_KINDS = {kind: kind.name.lower() for kind in StepKind}
_RUNS = (StepKind.FIRST_RUN, StepKind.SECOND_RUN)


def order_data(found: Communication | None, *, summary: bool = False) -> dict[str, Any] | None:
    """Null for a policy that schedules nothing. Seconds are those of the document's ``device``, and null without one. A
    summary has no ``steps`` and no ``collectives``."""
    if found is None:
        return None
    return {
        "as_traced": _step(found.traced),
        "as_planned": _step(found.planned),
        "bound_seconds": found.bound,
        "barriers": dict(found.barriers),
        "lines": [_line(line) for line in found.lines],
        **({} if summary else {"collectives": [_collective(found, each) for each in found.collectives]}),
        **({} if summary else {"steps": [{"name": name, "kind": kind} for name, kind in steps(found.planned)]}),
    }


def steps(step: StepInOrder) -> Iterator[tuple[str, str]]:
    """The steps in the order in which they run: the node, and what happens. Collectives ``start`` and are awaited
    (``wait``), copies to the host and back too; all else is ``compute``."""
    facts, started = step.facts, streams_of(step.facts).started
    for kind, row, _ in step.schedule:
        if kind not in _RUNS:
            said = _KINDS[StepKind(kind)]
        elif row in started:
            said = "start"
        else:
            said = "wait" if facts.targets[row] in WAITS else "compute"
        yield facts.names[row], said


def _step(step: StepInOrder) -> dict[str, Any]:
    return {
        "collectives": step.kinds(),
        "exposed_seconds": None if step.lanes is None else step.lanes.exposed,
        "step_seconds": None if step.lanes is None else step.lanes.step,
        "peak": asdict(step.peak),
        "in_flight_bytes": step.in_flight,
    }


def _line(line: LineInOrder) -> dict[str, Any]:
    return {
        "source": line.source,
        "text": line.text,
        "matched": line.matched,
        "moved": line.moved,
        "exposed_seconds_without": line.exposed_without,
        "left": [{"reason": reason, "collectives": names} for reason, names in line.left.items()],
        "buckets": [
            {"collectives": bucket.names, "members": bucket.members, "proof": asdict(bucket.proof)}
            for bucket in line.buckets
        ],
    }


def _collective(found: Communication, each: CollectiveEntry) -> dict[str, Any]:
    run = each.run
    return {
        "name": each.name,
        "operator": each.operator,
        "group": each.group,
        "block": each.block or None,
        "bytes": each.bytes,
        "members": each.members,
        "lines": [found.lines[index].source for index in each.lines],
        "issued_seconds": None if run is None else run.issued,
        "start_seconds": None if run is None else run.start,
        "end_seconds": None if run is None else run.end,
        "awaited_seconds": None if run is None else run.awaited,
        "exposed_seconds": None if run is None else run.exposed,
        "exposed_by": None if run is None or run.exposed_by is None else run.exposed_by.value,
    }
