"""A step as lanes over time: what computes, what is on the way in each process group, and the memory alive, as columns.

Neighbouring runs of one block are one stretch of computation, so that a picture of a graph of any size stays light.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from attrs import field, frozen

from policylang.language.wording import counted, figure
from policylang.planning.inspection.communication import CollectiveEntry, Communication, StepInOrder, group_of
from policylang.report.order.as_text import BOUNDED_BY, is_exposed, lines_named
from policylang.simulation.collective_runs import CollectiveRun, ComputeRun, Lanes

_STRETCHES = 400
"""A stretch of computation is at most this share of the step."""
_MOMENTS = 1000
"""Of the memory curve."""
_ROUNDING = 1e-9
"""Of the step: a shorter wait is none."""


@frozen
class Stretch:
    """Something that takes time, in seconds from the beginning of the step."""

    start: float
    end: float
    words: str
    """What it is, for people."""
    exposed: float = 0.0


@frozen
class StreamLane:
    """What runs one after the other: ``compute``, or the collectives of a process group."""

    name: str
    stretches: tuple[Stretch, ...]


@frozen
class DrawnStep:
    """All of a step that is drawn."""

    name: str
    """``as planned``."""
    step: float
    exposed: float
    lanes: tuple[StreamLane, ...]
    """Computation first, then the groups in the order in which they first send."""
    waits: tuple[tuple[float, float], ...]
    """When computation waits: from, to."""
    memory: tuple[tuple[float, int], ...] = field(repr=False)
    """The bytes alive from a second on; no two alike beside each other."""


def drawn_steps(found: Communication, block_names: Sequence[str]) -> tuple[DrawnStep, ...]:
    """The step as planned and, where that is another, as traced; empty without a device."""
    planned = _drawn(found, found.planned, "as planned" if found.orders else "as traced", block_names)
    if planned is None or found.traced is found.planned:
        return () if planned is None else (planned,)
    traced = _drawn(found, found.traced, "as traced", block_names)
    return (planned,) if traced is None else (planned, traced)


def _drawn(found: Communication, step: StepInOrder, name: str, block_names: Sequence[str]) -> DrawnStep | None:
    lanes = step.lanes
    if lanes is None:
        return None
    waits = tuple(_waits(lanes))
    named = {id(each.run): _words(found, each) for each in found.collectives} if step is found.planned else {}
    groups: dict[str, list[Stretch]] = {}
    for run in sorted(lanes.collectives, key=lambda run: run.start):
        words = named.get(id(run)) or _traced_words(step, run)
        group = groups.setdefault(_group(step, run), [])
        group.append(Stretch(run.start, run.end, words, run.exposed))
    compute = tuple(_compute(step, lanes, waits, block_names))
    return DrawnStep(
        name=name,
        step=lanes.step,
        exposed=lanes.exposed,
        lanes=(StreamLane("compute", compute), *(StreamLane(each, tuple(runs)) for each, runs in groups.items())),
        waits=waits,
        memory=tuple(_memory(step, lanes)),
    )


def _group(step: StepInOrder, run: CollectiveRun) -> str:
    return f"group {group_of(step.facts, run.row)}"


def _words(found: Communication, entry: CollectiveEntry) -> str:
    """``bucket0: all_gather_into_tensor of 2, 2 KiB, in layers.0, by mine.apl:2``."""
    of = f" of {entry.members}" if entry.members > 1 else ""
    inside = f", in {entry.block}" if entry.block else ""
    lines = lines_named([found.lines[index].source for index in entry.lines])
    bounded = ""
    if is_exposed(entry) and entry.run is not None and entry.run.exposed_by is not None:
        bounded = f", bounded by {BOUNDED_BY[entry.run.exposed_by]}"
    size = figure(entry.bytes, "bytes")
    return f"{entry.name}: {entry.operator}{of}, {size}{inside}{f', {lines}' if lines else ''}{bounded}"


def _traced_words(step: StepInOrder, run: CollectiveRun) -> str:
    facts = step.facts
    return f"{facts.names[run.row]}: {facts.targets[run.row].split('.')[1]}, {figure(facts.bytes[run.row], 'bytes')}"


# --- computation -----------------------------------------------------------------------------------------------------


def _waits(lanes: Lanes) -> Iterator[tuple[float, float]]:
    """Where nothing computes: between two runs, and at the end."""
    least, now = _ROUNDING * lanes.step, 0.0
    for run in lanes.compute:
        if run.start - now > least:
            yield now, run.start
        now = max(now, run.end)
    if lanes.step - now > least:
        yield now, lanes.step


def _compute(
    step: StepInOrder, lanes: Lanes, waits: Iterable[tuple[float, float]], block_names: Sequence[str]
) -> Iterator[Stretch]:
    ends, longest = {start for start, _ in waits}, lanes.step / _STRETCHES
    together: list[ComputeRun] = []
    for run in lanes.compute:
        if together and (
            together[-1].end in ends
            or _block(step, run) != _block(step, together[0])
            or run.end - together[0].start > longest
        ):
            yield _stretch(step, together, block_names)
            together = []
        together.append(run)
    if together:
        yield _stretch(step, together, block_names)


def _block(step: StepInOrder, run: ComputeRun) -> int:
    return step.block_of[run.row] if step.block_of else -1


def _stretch(step: StepInOrder, runs: Sequence[ComputeRun], block_names: Sequence[str]) -> Stretch:
    first, last, block = runs[0], runs[-1], _block(step, runs[0])
    names = step.facts.names
    words = names[first.row] if len(runs) == 1 else f"{names[first.row]} to {names[last.row]}"
    inside = f" in {block_names[block]}" if block >= 0 else ""
    count = f", {counted(len(runs), 'operator')}" if len(runs) > 1 else ""
    return Stretch(first.start, last.end, f"{words}{inside}{count}")


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory(step: StepInOrder, lanes: Lanes) -> Iterator[tuple[float, int]]:
    """Of each of so many moments the most that is alive in it. What takes no time counts when it runs."""
    when: dict[int, list[float]] = {}
    for run in lanes.compute:
        when.setdefault(run.row, []).append(run.start)
    for sent in lanes.collectives:
        when.setdefault(sent.row, []).append(sent.issued)
    taken: dict[int, int] = {}
    now, width = 0.0, lanes.step / _MOMENTS
    most, place, before = step.timeline.resident, 0, -1
    for row, live in zip(step.timeline.rows, step.timeline.live, strict=True):
        if row in when:
            at = taken[row] = taken.get(row, -1) + 1
            now = max(now, when[row][at] if at < len(when[row]) else now)
        here = min(_MOMENTS - 1, int(now / width)) if width else 0
        if here == place:
            most = max(most, live)
            continue
        if most != before:
            yield place * width, most
        most, place, before = live, here, most
    if most != before:
        yield place * width, most
