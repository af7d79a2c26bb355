"""``policylang explain`` of what scheduling lines have to do with: a collective, or one of the lines; data and text."""

from __future__ import annotations

from typing import Any

from attrs import asdict, frozen

from policylang.language.wording import figure, listed
from policylang.planning.inspection.collective_places import CollectivePlace, PlacedCollective
from policylang.planning.inspection.communication import Communication, LineInOrder
from policylang.report.order.as_text import BOUNDED_BY, proof_texts, said_of
from policylang.report.width import table

_MOST_NAMES = 8


@frozen
class CollectiveExplanation:
    """One collective: which lines joined or moved it, from where to where, and how it fares."""

    found: PlacedCollective

    def to_dict(self) -> dict[str, Any]:
        found = {**asdict(self.found), "traced": _data(self.found.traced), "planned": _data(self.found.planned)}
        return {"collective": found}

    def __str__(self) -> str:
        found = self.found
        lines = [f"{found.name}: {found.operator} in group {found.group}"]
        if found.members:
            joined = "" if found.planned is None else f" as {found.planned.name}"
            lines.append(f"  one with others{joined}: {listed(found.members, _MOST_NAMES)}")
        rows: list[tuple[str, ...]] = [("order", "starts", "awaited", "takes", "exposed", "bounded by")]
        for name, place in (("as traced", found.traced), ("as planned", found.planned)):
            if place is not None:
                rows.append((name, *_places(place), *_times(place)))
        if not any(row[3] for row in rows[1:]):
            rows = [row[:3] for row in rows]
        parts = ["\n".join(lines), table(rows, right=range(0))]
        if found.lines:
            said = [
                (each.source, each.text, f"{each.standing}: {each.why}" if each.why else each.standing)
                for each in found.lines
            ]
            parts.append(table([("line", "scheduling line", ""), *said], right=range(0), ends=(0,)))
        return "\n\n".join(parts)


def _places(place: CollectivePlace) -> tuple[str, str]:
    start = f"step {place.step:,}" + (f", before {place.before}" if place.before else "")
    if place.awaited_step is None:
        return start, "by nothing"
    return start, f"step {place.awaited_step:,}" + (f", before {place.awaited_before}" if place.awaited_before else "")


def _times(place: CollectivePlace) -> tuple[str, str, str]:
    run = place.run
    if run is None:
        return "", "", ""
    exposed = figure(run.exposed, "seconds") if run.exposed_by is not None else "hidden"
    return figure(run.end - run.start, "seconds"), exposed, BOUNDED_BY[run.exposed_by] if run.exposed_by else ""


def _data(place: CollectivePlace | None) -> dict[str, Any] | None:
    if place is None:
        return None
    run = place.run
    times = ("issued", "start", "end", "awaited", "exposed")
    data = asdict(place, filter=lambda each, _: each.name != "run")
    data |= {f"{name}_seconds": None if run is None else getattr(run, name) for name in times}
    return {**data, "exposed_by": None if run is None or run.exposed_by is None else run.exposed_by.value}


@frozen
class LineExplanation:
    """A scheduling line: what it picked and what it did."""

    line: LineInOrder
    exposed: float | None
    """Seconds of the step as planned in which computation waits; None without a device."""

    def to_dict(self) -> dict[str, Any]:
        line = self.line
        return {
            "source": line.source,
            "text": line.text,
            "matched": line.matched,
            "moved": line.moved,
            "buckets": [{"collectives": each.names, "members": each.members} for each in line.buckets],
            "left": [{"reason": reason, "collectives": names} for reason, names in line.left.items()],
            "exposed_seconds": self.exposed,
            "exposed_seconds_without": self.line.exposed_without,
        }

    def __str__(self) -> str:
        line = self.line
        lines = [f"{line.source}: {line.text}", f"  {said_of(line)}"]
        if self.exposed is not None and self.line.exposed_without is not None:
            with_it, without = (figure(each, "seconds") for each in (self.exposed, self.line.exposed_without))
            lines.append(f"  exposed: {with_it} with it, {without} without")
        lines += [f"  {said}" for said in proof_texts(line)]
        for reason, names in line.left.items():
            lines.append(f"  left {listed(names, _MOST_NAMES)}: {reason}")
        if line.buckets:
            lines += [
                "",
                "what it joins",
                *(f"  {listed(each.names, 1)} <- {listed(each.members, _MOST_NAMES)}" for each in line.buckets),
            ]
        elif line.moved:
            lines += ["", "what it moves", f"  {listed(line.moved, _MOST_NAMES)}"]
        told = {*line.moved, *(name for names in line.left.values() for name in names)}
        if kept := [name for name in line.matched if name not in told]:
            lines += ["", "what it leaves where it is", f"  {listed(kept, _MOST_NAMES)}"]
        return "\n".join(lines)


def explain_line(found: Communication, index: int) -> LineExplanation:
    """``index``: of :attr:`Communication.lines`."""
    lanes = found.planned.lanes
    return LineExplanation(found.lines[index], None if lanes is None else lanes.exposed)
