"""The order of a step as text: totals before and after, what each line did, and how each collective fares."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from math import fsum

from policylang.language.shown import counted, file_name, folded_names, format_quantity, listed, shortened
from policylang.planning.inspection.communication import CollectiveEntry, Communication, LineInOrder
from policylang.planning.inspection.worth import same_time
from policylang.report.layout import bytes_text, exposed_text, seconds_text, table
from policylang.report.report_text import barriers_text
from policylang.simulation.streams import CollectiveRun, ExposedBy

BOUNDED_BY = {
    ExposedBy.DATA: "data",
    ExposedBy.LIMIT: "the limit",
    ExposedBy.GROUP: "its group",
    ExposedBy.ORDER: "the traced order",
}
"""Why a collective is exposed, as people read it."""
_LONGEST_LINE = 72
_MOST_EXPOSED = 20
_MOST_NAMES = 2
_NUMBER = re.compile(r"_\d+\b")
"""At the end of a node's name."""
_MOST_REASONS = 4
_WIDEST = 160
"""The columns of a table in a pipe or a file."""
_HEAD = ("exposed", "", "each", "takes", "collective", "kind", "bytes", "group", "block", "bounded by", "line")


def order_totals(found: Communication | None) -> str:
    """The totals of an order. No line end at the end; empty where the policy schedules nothing."""
    if found is None:
        return ""
    text = table([("order", "as traced", "as planned"), *total_rows(found)], right=range(1, 3))
    return "\n\n".join(filter(None, (text, "\n".join(order_notes(found)))))


def order_details(found: Communication | None) -> str:
    """The effect of each scheduling line, and the exposed collectives; empty where the policy schedules nothing."""
    if found is None:
        return ""
    lines = ""
    if found.lines:
        head, *rows = line_rows(found.lines)
        rows = [(file_name(line), shortened(text, _LONGEST_LINE), *rest) for line, text, *rest in rows]
        lines = "\n".join((table([head, *rows], right=range(2, len(head)), ends=(0,)), *line_notes(found.lines)))
    if found.planned.lanes is None:
        return lines
    collectives = ""
    if rows := exposed_rows(found):
        spare = [rows[0].index(name) for name in ("bytes", "group", "takes", "kind")]
        right, ends = range(rows[0].index("collective")), (len(rows[0]) - 1,)
        collectives = table(rows, right=right, ends=ends, spare=spare, unless_told=_WIDEST)
    return "\n\n".join(filter(None, (lines, collectives, hidden_text(found))))


def total_rows(found: Communication) -> list[tuple[str, ...]]:
    """The number of collectives by kind, and the figures of the step, as traced and as planned."""
    before, after = found.traced, found.planned
    old, new = before.kinds(), after.kinds()
    rows: list[tuple[str, ...]] = [
        (kind, f"{old.get(kind, 0):,}", f"{new.get(kind, 0):,}") for kind in dict.fromkeys((*old, *new))
    ]
    if before.lanes is not None and after.lanes is not None:
        lanes = before.lanes, after.lanes
        rows.append(("exposed", exposed_text(lanes[0]), exposed_text(lanes[1])))
        rows.append(("step time", *(format_quantity(each.step, "seconds") for each in lanes)))
    return [
        *rows,
        ("peak", bytes_text(before.peak.bytes), bytes_text(after.peak.bytes)),
        ("in flight at most", bytes_text(before.in_flight), bytes_text(after.in_flight)),
    ]


def order_notes(found: Communication) -> list[str]:
    """The lower bound, the barriers, and what is unknown without a device."""
    said = []
    if seconds_text(found.bound):
        said.append(f"no order of these collectives exposes less than {format_quantity(found.bound or 0.0, 'seconds')}")
    if found.barriers:
        said.append(barriers_text(found.barriers))
    if found.planned.lanes is None:
        said.append("without a device's times, exposed communication is not known")
    return said


# --- lines -----------------------------------------------------------------------------------------------------------


def line_rows(lines: Sequence[LineInOrder]) -> list[tuple[str, ...]]:
    """The rows of a table, head first: the collectives that a ``bucket`` line makes, and, if computed, the exposed time
    without a line."""
    joins = any(line.buckets for line in lines)
    weighed = any(line.exposed_without is not None for line in lines)
    rows: list[tuple[str, ...]] = []
    for line in lines:
        into = f"{sum(len(bucket.names) for bucket in line.buckets):,}" if line.buckets else ""
        without = "" if line.exposed_without is None else format_quantity(line.exposed_without, "seconds")
        counts = f"{len(line.matched):,}", f"{len(line.moved):,}"
        rows.append((line.source, line.text, *counts, *(into,)[:joins], *(without,)[:weighed]))
    more = (*("into",)[:joins], *("exposed without it",)[:weighed])
    return [("line", "scheduling line", "matched", "moved", *more), *rows]


def said_of(line: LineInOrder) -> str:
    """``matches 291 collectives, moves 289 into 64``."""
    into = f" into {sum(len(each.names) for each in line.buckets):,}" if line.buckets else ""
    return f"matches {counted(len(line.matched), 'collective')}, moves {len(line.moved):,}{into}"


def line_notes(lines: Sequence[LineInOrder]) -> list[str]:
    """On how many ranks buckets were proven, and what was left where it is."""
    proofs: dict[str, list[str]] = {}
    for line in lines:
        for said in proof_texts(line):
            proofs.setdefault(said, []).append(line.source)
    told = [f"{_lines_named(sources)}: {said}" for said, sources in proofs.items()]
    return [*told, *(text for line in lines for text in left_texts(line))]


def proof_texts(line: LineInOrder) -> list[str]:
    """``each bucket proven on 64 ranks``, its assumptions, and whether bits may differ; empty for a line that joins
    nothing."""
    if not line.buckets:
        return []
    proofs = [bucket.proof for bucket in line.buckets]
    assumed = dict.fromkeys(proof.assumed for proof in proofs if proof.assumed)
    how = "checked" if assumed else "proven"
    found = [f"each bucket {how} on {max(proof.ranks for proof in proofs)} ranks"]
    found += [f"assumed that {each}" for each in assumed]
    if not all(proof.exact for proof in proofs):
        found.append("sums are taken in another order: equal up to rounding")
    return found


def left_texts(line: LineInOrder) -> list[str]:
    """Collectives that were not moved, by reason, the most frequent first. Reasons that differ in a node's number are
    one."""
    alike: dict[str, tuple[str, list[str]]] = {}
    for reason, names in line.left.items():
        alike.setdefault(_NUMBER.sub("", reason), (reason, []))[1].extend(names)
    reasons = sorted(alike.values(), key=lambda each: -len(each[1]))
    place = file_name(line.source)
    found = [
        f"{place} left {listed(names, _MOST_NAMES)} where {'it was' if len(names) == 1 else 'they were'}: {reason}"
        + (", and the like" if len(line.left[reason]) < len(names) else "")
        for reason, names in islice(reasons, _MOST_REASONS)
    ]
    if rest := reasons[_MOST_REASONS:]:
        count = sum(len(names) for _, names in rest)
        found.append(f"{place} left {count:,} more, for {len(rest)} other reasons")
    return found


# --- collectives -----------------------------------------------------------------------------------------------------


def exposed_rows(found: Communication) -> list[tuple[str, ...]]:
    """The rows of a table, head first, without empty columns; none if all is hidden."""
    together: dict[object, list[CollectiveEntry]] = {}
    for each in filter(_is_exposed, found.collectives):
        run = _run(each)
        takes = format_quantity(run.end - run.start, "seconds")
        alike = takes, each.operator, each.bytes, each.group, run.exposed_by, each.lines, each.members
        together.setdefault(alike, []).append(each)
    groups = sorted(together.values(), key=lambda each: -_seconds(each))
    rows = [_row(found, each) for each in groups[:_MOST_EXPOSED]]
    if rest := [each for group in groups[_MOST_EXPOSED:] for each in group]:
        more = (format_quantity(_seconds(rest), "seconds"), f"×{len(rest):,}", "", "", "more")
        rows.append((*more, *[""] * (len(_HEAD) - len(more))))
    if not rows:
        return []
    kept = [at for at in range(len(_HEAD)) if any(row[at] for row in rows)]
    return [tuple(row[at] for at in kept) for row in (_HEAD, *rows)]


def _is_exposed(entry: CollectiveEntry) -> bool:
    """Computation waits for it, by more than rounding."""
    return entry.run is not None and not same_time(entry.run.exposed + entry.run.end, entry.run.end)


def _row(found: Communication, alike: Sequence[CollectiveEntry]) -> tuple[str, ...]:
    first, run = alike[0], _run(alike[0])
    blocks = list(dict.fromkeys(each.block for each in alike if each.block))
    several = len(alike) > 1
    exposed = sorted(_run(each).exposed for each in alike)
    least, most = (format_quantity(each, "seconds") for each in (exposed[0], exposed[-1]))
    return (
        format_quantity(_seconds(alike), "seconds"),
        f"×{len(alike):,}" if several else "",
        (most if least == most else f"≤ {most}") if several else "",
        format_quantity(run.end - run.start, "seconds"),
        listed([each.name for each in alike], 1),
        first.kind + (f" of {first.members}" if first.members > 1 else ""),
        format_quantity(first.bytes, "bytes"),
        first.group,
        folded_names(blocks) if blocks else "",
        BOUNDED_BY[run.exposed_by] if run.exposed_by is not None else "",
        _lines_named([found.lines[index].source for index in first.lines]),
    )


def _run(entry: CollectiveEntry) -> CollectiveRun:
    assert entry.run is not None, "a collective without a row of its own"
    return entry.run


def _lines_named(sources: Sequence[str]) -> str:
    """``mine.apl:3, 5``: lines of one file name it once."""
    found: dict[str, list[str]] = {}
    for source in sources:
        file, _, line = file_name(source).rpartition(":")
        found.setdefault(file, []).append(line)
    return ", ".join(f"{file}:{', '.join(lines)}" for file, lines in found.items())


def _seconds(entries: Iterable[CollectiveEntry]) -> float:
    return fsum(_run(each).exposed for each in entries)


def hidden_text(found: Communication) -> str:
    """The collectives without a row, summed up."""
    hidden = [each for each in found.collectives if each.run is not None and not _is_exposed(each)]
    said = []
    if hidden:
        counts = Counter(each.kind for each in hidden)
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
        takes = fsum(_run(each).end - _run(each).start for each in hidden)
        said.append(f"hidden: {kinds}; {format_quantity(takes, 'seconds')} in all")
    if beside := [each for each in found.collectives if each.run is None]:
        said.append(f"{counted(len(beside), 'collective')} computes as it sends, and runs among the computation")
    return "\n".join(said)
