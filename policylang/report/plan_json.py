"""A plan for programs: one JSON document with a version, and the step over time as a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import asdict

from policylang.graph.facts import StepKind
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Pipeline
from policylang.operators.names import WAITS
from policylang.planning.inspection import communication
from policylang.planning.inspection.breakdown import BlockGroup, Breakdown, Scenario, copies_of_rules, values_at_peak
from policylang.planning.inspection.worth import EditWorth, Worth
from policylang.planning.pipelines import PipelineFigures
from policylang.planning.plan import Plan
from policylang.report.diagnostics import render_json
from policylang.simulation.node_times import operator_name
from policylang.simulation.streams import CollectiveRun, Lanes, size_in_flight, streams_of


def _order_data(found: communication.Communication | None, *, summary: bool = False) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "as_traced": _step(found.traced),
        "as_planned": _step(found.planned),
        "bound_seconds": found.bound,
        "barriers": dict(found.barriers),
        "lines": [line_data(line) for line in found.lines],
        **({} if summary else {"collectives": [_collective(found, each) for each in found.collectives]}),
        **({} if summary else {"steps": list(_steps(found.planned))}),
    }


def _steps(step: communication.StepInOrder) -> Iterator[dict[str, str]]:
    """The steps in the order in which they run: the node, and what happens. Collectives ``start`` and are awaited
    (``wait``), copies to the host and back too; all else is ``compute``."""
    facts, started = step.facts, streams_of(step.facts).started
    for kind, row, _ in step.schedule:
        said = StepKind(kind).name.lower()
        if kind in (StepKind.FIRST_RUN, StepKind.SECOND_RUN):
            said = "start" if row in started else "wait" if facts.targets[row] in WAITS else "compute"
        yield {"name": facts.names[row], "kind": said}


def _step(step: communication.StepInOrder) -> dict[str, Any]:
    return {
        "collectives": step.kinds(),
        "exposed_seconds": None if step.lanes is None else step.lanes.exposed,
        "step_seconds": None if step.lanes is None else step.lanes.step,
        "peak": asdict(step.peak),
        "in_flight_bytes": step.in_flight,
    }


def line_data(line: communication.LineInOrder) -> dict[str, Any]:
    """A scheduling line, as :func:`plan_json` has it."""
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


def _collective(found: communication.Communication, each: communication.CollectiveEntry) -> dict[str, Any]:
    return {
        "name": each.name,
        "operator": each.operator,
        "group": each.group,
        "block": each.block or None,
        "bytes": each.bytes,
        "members": each.members,
        "lines": [found.lines[index].source for index in each.lines],
        **run_data(each.run),
    }


def run_data(run: CollectiveRun | None) -> dict[str, Any]:
    """When a collective runs, and what bounds it; nulls without a device."""
    names = ("issued", "start", "end", "awaited", "exposed")
    times = {f"{name}_seconds": None if run is None else getattr(run, name) for name in names}
    return {**times, "exposed_by": None if run is None or run.exposed_by is None else run.exposed_by.value}


VERSION = 1


def plan_json(
    found: Breakdown,
    worth: Sequence[Worth],
    diagnostics: Sequence[Diagnostic],
    *,
    edits: Sequence[EditWorth] = (),
    summary: bool = False,
) -> str:
    """Bytes and FLOPs are whole numbers, lines count from 1, blocks from 0. A summary has no ``groups``, and null for
    the worth of its rules.

    ``uncounted_operators``: the forward's operators that could do matrix work and that no FLOP formula counts, with the
    number of their calls; those of ``with`` are recomputed. Null if an older snapshot lacks them. ``notes``: what the
    figures cannot know, for eager checkpoints planned on a graph with operators in another form.

    Seconds are those of ``device``, a profile by its name; without one, and where it lacks a figure, both are null.
    ``uncounted_operators`` are priced by the bytes that they move.

    ``rewrites``: the worth of each ``fuse`` and ``collapse`` line that rewrites something; empty in a summary.

    ``saved_range``: the least and the most bytes saved, where data decide how many; null where they do not, and for a
    most without a limit.

    ``host_memory``: the bytes of the pool of pinned memory; ``copies``: what each line copies to the host and back.

    ``stages``: what each stage of a ``pipeline`` takes, all microbatches of its schedule together; both null without.

    ``order``: under the scheduling lines, null without any; in a summary without ``steps`` and ``collectives``.
    """
    plan = found.plan
    margins = {each.rule: each for each in worth}
    document = {
        "version": VERSION,
        "policy": plan.policy.name,
        "digest": plan.digest,
        "device": None if plan.shown_times is None else plan.shown_times.device.name,
        "forward_flops": found.forward_flops,
        "forward_seconds": found.forward_seconds,
        "seconds_per_gib": found.seconds_per_gib,
        "uncounted_operators": found.uncounted,
        "notes": found.notes,
        "saved_range": found.saved_range,
        "with": {**_scenario(found.under), "uncounted_operators": found.uncounted_again},
        "without": _scenario(found.without),
        "rewrites": [_rewrite(plan, each) for each in edits],
        "rules": [
            {
                "source": outcome.rule.source,
                "text": outcome.rule.text,
                "matched": len(outcome.matched),
                "decided": len(outcome.decided),
                "worth": worth_data(margins.get(index)),
            }
            for index, outcome in enumerate(plan.rules)
        ],
        "host_memory": plan.host_memory,
        "copies": [asdict(each) for each in copies_of_rules(plan).values()],
        "expectations": [asdict(each) for each in plan.expectations],
        "order": _order_data(found.communication, summary=summary),
        **pipeline_data(plan.policy.pipeline, plan.pipeline),
        "at_peak": asdict(values_at_peak(found)),
        **({} if summary else {"groups": [_group(found, group) for group in found.groups]}),
        "diagnostics": json.loads(render_json(diagnostics))["diagnostics"],
    }
    return json.dumps(document, indent=2)


def pipeline_data(said: Pipeline | None, figures: PipelineFigures | None) -> dict[str, Any]:
    """Null for both of a plan that is no pipeline."""
    if said is None or figures is None:
        return {"pipeline": None, "stages": None}
    numbers = {name: getattr(said, name) for name in ("schedule", "stages", "microbatches")}
    pipeline = {**numbers, "ranks": len(said.order), "step_seconds": figures.step_seconds}
    return {"pipeline": pipeline, "stages": [asdict(each) for each in figures.stages]}


def _scenario(scenario: Scenario) -> dict[str, Any]:
    """Seconds that the step takes, and of these the ones in which computation waits; null without a device."""
    time = scenario.time
    return {
        **asdict(scenario.amounts),
        "step_seconds": None if time is None else time.step,
        "exposed_seconds": None if time is None else time.exposed,
        "peak": asdict(scenario.peak),
    }


def _rewrite(plan: Plan, worth: EditWorth) -> dict[str, Any]:
    span = plan.policy.rewrites[worth.statement].span
    names = ("saved_bytes", "peak_bytes", "step_seconds", "exposed_seconds")
    return {
        "source": span.location,
        "text": span.one_line,
        "rewritten": plan.edits.of(worth.statement).count,
        "fewer_collectives": worth.fewer_collectives,
        "worth": {name: getattr(worth, name) for name in names},
    }


def worth_data(margin: Worth | None) -> dict[str, Any] | None:
    if margin is None:
        return None
    amounts = asdict(margin, filter=lambda each, _: each.name != "rule")
    prices = {"flops_per_gib": margin.flops_per_gib, "seconds_per_gib": margin.seconds_per_gib}
    return {**amounts, "verdict": margin.verdict, **prices}


def _group(found: Breakdown, group: BlockGroup) -> dict[str, Any]:
    return {
        "label": group.label,
        "blocks": [found.plan.block_names[block] for block in group.blocks],
        **asdict(group.amounts),
        "values": [
            {"fate": entry.outcome.word, **asdict(entry, filter=lambda each, _: each.name != "outcome")}
            for entry in group.entries
        ],
    }


_COMPUTE = 0
_PLANNED = "as planned"


def chrome_trace(found: Breakdown) -> str:
    """The step as planned and, where scheduling lines change it, as traced. The plan needs the times of a device."""
    plan, order = found.plan, found.communication
    if order is None or plan.order is None:
        blocks = plan.block_names
        step = communication.step_in_order(plan.facts, plan.schedule, plan.shown_times, plan.block_of if blocks else ())
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
    step: communication.StepInOrder,
    block_names: Sequence[str] = (),
    entries: Mapping[int, tuple[communication.CollectiveEntry, Sequence[str]]] | None = None,
    process: int = 0,
) -> Iterator[dict[str, Any]]:
    """The events of a step that has times. ``entries``: by the ``id`` of its run, what is known of a collective beside
    the graph, and the lines that joined or moved it."""
    lanes, facts = step.lanes, step.facts
    assert lanes is not None, "a trace needs the times of a device"
    groups = {run.stream: communication.group_of(facts, run.row) for run in lanes.collectives}
    threads = {stream: number for number, stream in enumerate(groups, _COMPUTE + 1)}
    yield _named("process_name", name, process, _COMPUTE)
    yield _named("thread_name", "compute", process, _COMPUTE)
    for stream, group in groups.items():
        yield _named("thread_name", f"group {group}", process, threads[stream])
    known = set[int]()
    for ran in lanes.compute:
        details = {"operator": facts.targets[ran.row], "module": facts.modules[ran.row], "bytes": facts.bytes[ran.row]}
        kind = "recomputed" if ran.row in known else "compute"
        if ran.conversion is not None:
            kind = ran.conversion.name.lower()
            details |= {"operator": kind, "bytes": step.schedule.step_bytes(facts, ran.conversion, ran.row)}
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
    return round(seconds * 1e6, 6)


def _block(step: communication.StepInOrder, row: int, names: Sequence[str]) -> dict[str, Any]:
    block = step.block_of[row] if step.block_of else -1
    return {"block": names[block]} if block >= 0 else {}


def _times(run: CollectiveRun) -> dict[str, Any]:
    """When it is issued and awaited, and how long computation waits for it."""
    times = {f"{name}_us": _micro(getattr(run, name)) for name in ("issued", "awaited", "exposed")}
    return times if run.exposed_by is None else {**times, "exposed_by": run.exposed_by.value}


def _memory(step: communication.StepInOrder, lanes: Lanes) -> Iterator[tuple[float, int]]:
    """The bytes alive from a moment on, where they change; the most at one moment, where steps take no time."""
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
