"""The step of a plan as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

Written after Google's "Trace Event Format". A process is the step in one order, a thread what runs one after the other:
computation, and the collectives of each process group. A counter has the bytes alive. Times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from policylang.planning.inspection.breakdown import Breakdown
from policylang.planning.inspection.communication import CollectiveEntry, StepInOrder, group_of, step_in_order
from policylang.simulation.collective_runs import CollectiveRun, Lanes
from policylang.simulation.collective_times import operator_name
from policylang.simulation.in_flight import size_in_flight

_COMPUTE = 0
_PLANNED = "as planned"


def chrome_trace(found: Breakdown) -> str:
    """The step as planned and, where scheduling lines change it, as traced. The plan needs the times of a device."""
    plan, order = found.plan, found.communication
    if order is None or plan.order is None:
        blocks = plan.block_names
        step = step_in_order(plan.facts, plan.schedule, plan.shown_times, plan.block_of if blocks else ())
        events = list(step_events(_PLANNED, step, blocks))
    else:
        blocks = plan.order.block_names
        lines = [line.source for line in order.lines]
        entries = {id(each.run): (each, [lines[at] for at in each.lines]) for each in order.collectives}
        events = list(step_events(_PLANNED, order.planned, blocks, entries))
        if order.traced is not order.planned:
            events += step_events("as traced", order.traced, blocks, process=1)
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"))
    return text.replace("##", "#\\u0023")  # `##[` is a command to a runner that prints the file


def step_events(
    name: str,
    step: StepInOrder,
    block_names: Sequence[str] = (),
    entries: Mapping[int, tuple[CollectiveEntry, Sequence[str]]] | None = None,
    process: int = 0,
) -> Iterator[dict[str, Any]]:
    """The events of a step that has times. ``entries``: by the ``id`` of its run, what is known of a collective beside
    the graph, and the lines that joined or moved it."""
    lanes, facts = step.lanes, step.facts
    assert lanes is not None, "a trace needs the times of a device"
    groups = {run.stream: group_of(facts, run.row) for run in lanes.collectives}
    threads = {stream: number for number, stream in enumerate(groups, _COMPUTE + 1)}
    yield _named("process_name", name, process, _COMPUTE)
    yield _named("thread_name", "compute", process, _COMPUTE)
    for stream, group in groups.items():
        yield _named("thread_name", f"group {group}", process, threads[stream])
    known = set[int]()
    for ran in lanes.compute:
        details = {"operator": facts.targets[ran.row], "module": facts.modules[ran.row], "bytes": facts.bytes[ran.row]}
        kind = "recomputed" if ran.row in known else "compute"
        known.add(ran.row)
        details |= _block(step, ran.row, block_names)
        yield _complete(facts.names[ran.row], kind, (ran.start, ran.end), process, _COMPUTE, details)
    for run in lanes.collectives:
        details = {"operator": operator_name(facts.targets[run.row]), "bytes": size_in_flight(facts, run.row)}
        details |= _block(step, run.row, block_names) | _times(run)
        if entries is not None and id(run) in entries:
            entry, lines = entries[id(run)]
            details |= {"collectives": entry.members, "lines": lines}
        span = (run.start, run.end)
        yield _complete(facts.names[run.row], "collective", span, process, threads[run.stream], details)
    for at, size in _memory(step, lanes):
        yield {"name": "memory", "ph": "C", "ts": _micro(at), "pid": process, "args": {"bytes": size}}


def _named(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": {"name": name}}


def _complete(
    name: str, kind: str, span: tuple[float, float], process: int, thread: int, details: dict[str, Any]
) -> dict[str, Any]:
    start, end = span
    place = {"ts": _micro(start), "dur": _micro(end - start), "pid": process, "tid": thread}
    return {"name": name, "cat": kind, "ph": "X", **place, "args": details}


def _micro(seconds: float) -> float:
    """Microseconds, to the picosecond."""
    return round(seconds * 1e6, 6)


def _block(step: StepInOrder, row: int, names: Sequence[str]) -> dict[str, Any]:
    block = step.block_of[row] if step.block_of else -1
    return {"block": names[block]} if block >= 0 else {}


def _times(run: CollectiveRun) -> dict[str, Any]:
    """When it is issued and awaited, and how long computation waits for it."""
    times = {"issued_us": _micro(run.issued), "awaited_us": _micro(run.awaited), "exposed_us": _micro(run.exposed)}
    return times if run.exposed_by is None else {**times, "exposed_by": run.exposed_by.value}


def _memory(step: StepInOrder, lanes: Lanes) -> Iterator[tuple[float, int]]:
    """The bytes alive from a moment on, where they change. At one moment the most counts: what takes no time runs in
    it."""
    starts: dict[int, list[float]] = {}
    for ran in lanes.compute:
        starts.setdefault(ran.row, []).append(ran.start)
    for sent in lanes.collectives:
        starts.setdefault(sent.row, []).append(sent.issued)
    waiting = {row: iter(each) for row, each in starts.items()}
    now, most, said = 0.0, step.timeline.resident, -1
    for row, live in zip(step.timeline.rows, step.timeline.live, strict=True):
        at = next(waiting[row], now) if row in waiting else now
        if at <= now:
            most = max(most, live)
            continue
        if most != said:
            yield now, most
        now, most, said = at, live, most
    if most != said:
        yield now, most
