"""A comparison of two plans as text, as Markdown for a review, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from attrs import asdict

from policylang.language.shown import Measured, counted, format_quantity, joined, listed, shortened, uncounted_text
from policylang.planning.inspection.compare import Change, Decider, Figures, OrderChanges, PlanComparison, folded
from policylang.planning.inspection.worth import same_time
from policylang.report.diagnostics import compared_rows
from policylang.report.layout import code, device_text, table, words

_MOST_NAMES = 6
_LONGEST_RULE = 72
_HEAD = ("", "before", "after", "change")


def comparison_text(found: PlanComparison) -> str:
    """No line end at the end."""
    parts = [_heading(found)]
    parts += [
        f"{len(change.names):,}: {_action(change.old)} -> {_action(change.new)}, {_where(change)}\n"
        f"  before  {_decider(change.old)}\n"
        f"  after   {_decider(change.new)}\n"
        f"  nodes   {listed(change.names, _MOST_NAMES)}"
        for change in found.changes
    ]
    parts.append("\n".join(order_change_lines(found.order)))
    parts.append("\n".join((table([_HEAD, *_figures(found)], right=range(1, 4)), *_notes(found))))
    if expected := compared_rows(found.old.expectations, found.new.expectations):
        parts.append(table([("expectation", "before", "after"), *expected], right=range(0)))
    return "\n\n".join(filter(None, parts))


def comparison_markdown(found: PlanComparison) -> str:
    """A comment for a review."""
    rows = [_HEAD, *_figures(found)]
    lines = [f"**{_heading(found)}**", "", _markdown_row(rows[0]), "| --- | ---: | ---: | ---: |"]
    lines += [_markdown_row(row) for row in rows[1:]]
    for said in (*_notes(found), *order_change_lines(found.order)):
        lines += ["", words(said)]
    if expected := compared_rows(found.old.expectations, found.new.expectations):
        lines += ["", "| expectation | before | after |", "| --- | --- | --- |"]
        lines += [_markdown_row((code(text), words(before), words(after))) for text, before, after in expected]
    if found.changes:
        lines += ["", "| nodes | before | after | where |", "| ---: | --- | --- | --- |"]
        lines += [
            _markdown_row((f"{len(c.names):,}", _markdown_side(c.old), _markdown_side(c.new), words(_where(c))))
            for c in found.changes
        ]
    return "\n".join(lines)


def comparison_json(found: PlanComparison) -> str:
    data = asdict(found)
    for change in data["changes"]:
        change["blocks"] = dict(change["blocks"])
    return json.dumps({"version": 1, "same": found.same, "changed": found.changed, **data}, indent=2)


def _heading(found: PlanComparison) -> str:
    decisions = f"{found.decisions:,} decisions"
    if not found.changes:
        return f"no decision changes: {decisions} are the same"
    return f"{found.changed:,} of {decisions} change"


def _action(side: Decider) -> str:
    return side.action or "no such node"


def _decider(side: Decider) -> str:
    return (f"{side.source}: " if side.source is not None else "") + shortened(side.text, _LONGEST_RULE)


def _where(change: Change) -> str:
    """``2 each in layers.0 and the next 31 blocks; 1 outside every block``."""
    said = []
    for name, blocks, count in folded(change.blocks):
        if name == "outside every block":
            said.append(f"{count} {name}")
        elif blocks == 1:
            said.append(f"{count} in {name}")
        else:
            said.append(f"{count} each in {name} and {blocks - 1} more {'block' if blocks == 2 else 'blocks'}")
    return "; ".join(said)


def _figures(found: PlanComparison) -> list[tuple[str, ...]]:
    old, new = found.old, found.new
    return [
        _figure("saved", old.saved_bytes, new.saved_bytes, "bytes"),
        _figure("recomputed", old.recomputed_flops, new.recomputed_flops, "flops"),
        *_times(old, new),
        _figure("peak", old.peak_bytes, new.peak_bytes, "bytes"),
        *([] if (order := found.order) is None else _order(order)),
    ]


def _order(found: OrderChanges) -> list[tuple[str, ...]]:
    old, new = found.old, found.new
    return [
        _figure("collectives", old.collectives, new.collectives, "number"),
        _figure("buckets", old.buckets, new.buckets, "number"),
        _figure("in flight at most", old.in_flight_bytes, new.in_flight_bytes, "bytes"),
    ]


def order_change_lines(found: OrderChanges | None) -> list[str]:
    """``3 collectives start elsewhere: bucket1, …``; nothing where neither policy schedules."""
    if found is None:
        return []
    changes = (
        (found.joined, "joined into buckets"),
        (found.parted, "in a bucket no more"),
        (found.starts, "started elsewhere"),
        (found.awaited, "awaited elsewhere"),
    )
    said = [
        f"{counted(len(names), 'collective')} {what}: {listed(names, _MOST_NAMES)}" for names, what in changes if names
    ]
    return said or ["no collective runs elsewhere"]


def _times(old: Figures, new: Figures) -> list[tuple[str, ...]]:
    """Empty unless both have a device; exposed time has a row if there is any."""
    sides = old.recomputed_seconds, new.recomputed_seconds, old.step_seconds, new.step_seconds
    if any(each is None for each in sides):
        return []
    before, after, step_before, step_after = (each or 0.0 for each in sides)
    rows = [
        _figure("recomputed time", before, after, "seconds"),
        _figure("step time", step_before, step_after, "seconds"),
    ]
    if old.exposed_seconds or new.exposed_seconds:
        rows.append(_figure("exposed", old.exposed_seconds or 0.0, new.exposed_seconds or 0.0, "seconds"))
    return rows


def _figure(label: str, old: float, new: float, unit: Measured) -> tuple[str, ...]:
    same = same_time(old, new) if unit == "seconds" else old == new
    change = "=" if same else ("+" if new > old else "-") + format_quantity(abs(new - old), unit)
    return label, format_quantity(old, unit), format_quantity(new, unit), change


def _notes(found: PlanComparison) -> list[str]:
    """Notes on the figures: what they leave out, and of which device their times are."""
    sides = ("before", found.old), ("after", found.new)
    notes = []
    if unsettled := [word for word, side in sides if not side.settled]:
        notes.append(f"{joined(unsettled)}: without what is left to PyTorch's partitioner")
    if calls := [
        f"{word}: recomputed without {uncounted_text(side.uncounted)}" for word, side in sides if side.uncounted
    ]:
        notes.append("\n".join(calls))
    if _times(found.old, found.new):
        devices = [device_text(side.device or "", side.priced_by_bytes, f"times {word}") for word, side in sides]
        alike = (found.old.device, found.old.priced_by_bytes) == (found.new.device, found.new.priced_by_bytes)
        notes.append(devices[0].replace("times before", "times", 1) if alike else "\n".join(devices))
    return notes


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _markdown_side(side: Decider) -> str:
    place = f" {words(side.source)}" if side.source is not None else ""
    return f"**{_action(side)}**{place} {code(shortened(side.text, _LONGEST_RULE))}"
