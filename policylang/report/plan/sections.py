"""The parts of a page that need no script: the figures at its head, what is alive at the peak, the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policylang.language.wording import counted, figure, uncounted_text
from policylang.planning.inspection.breakdown import BlockGroup, Breakdown, ValueEntry
from policylang.planning.inspection.peak_values import PeakValues
from policylang.report.device_times import exposed_text, plan_times_text, price_text, seconds_text
from policylang.report.markup import Markup, element, joined, rows_table
from policylang.report.plan.at_peak import SHARES_HEAD, VALUES_HEAD, highest_moment_text, share_row, value_row
from policylang.report.plan.chart import Curve, MemoryAxis, memory_chart
from policylang.report.report_text import bytes_text
from policylang.simulation.peak import Peak

_ENTRIES_HEAD = ("", "operator", "module", "shape", "bytes", "FLOPs again", "time again", "decided by")
_TIME_COLUMN = 6


def tile(name: str, amount: str, rest: str) -> Markup:
    """One figure at the head of a page."""
    parts = (element("dd", amount, class_="big"), element("dd", rest, class_="small"))
    return element("div", element("dt", name), *parts)


def tiles(found: Breakdown) -> Markup:
    """The totals of a plan."""
    under, without, plan = found.under, found.without, found.plan
    kept, peak, flops = under.amounts.saved_bytes, under.peak.bytes, under.amounts.recomputed_flops
    of_kept = f"{_share(kept, without.amounts.saved_bytes)} of {bytes_text(without.amounts.saved_bytes)}"
    of_peak = f"{_share(peak, without.peak.bytes)} of {bytes_text(without.peak.bytes)}; at {under.peak.at}"
    of_flops = f"{_share(flops, found.forward_flops)} of the forward's {figure(found.forward_flops, 'flops')}"
    made = [
        tile("kept for the backward", bytes_text(kept), f"{of_kept} without recomputation"),
        tile("computed twice", figure(flops, "flops"), of_flops if found.forward_flops else ""),
        *_time_tiles(found),
        tile("simulated peak", bytes_text(peak), of_peak),
    ]
    if under.amounts.offloaded:
        values = counted(under.amounts.offloaded, "value")
        where = f"{values} on the host between forward and backward, beside what is kept"
        made.append(tile("offloaded", bytes_text(under.amounts.offloaded_bytes), where))
    if under.amounts.open_bytes:
        what = "counted as kept: its min-cut may recompute it"
        made.append(tile("left to PyTorch", bytes_text(under.amounts.open_bytes), what))
    if found.uncounted:
        lost = counted(sum((found.uncounted_again or {}).values()), "call")
        rest = f"{uncounted_text(found.uncounted)}; {lost} recomputed"
        made.append(tile("without FLOPs", counted(len(found.uncounted), "operator"), rest))
    if found.notes:
        made.append(tile("about the figures", counted(len(found.notes), "note"), "; ".join(found.notes)))
    if plan.expectations:
        held = sum(each.status == "held" for each in plan.expectations)
        told = "; ".join(_expectation(each.text, each.status, each.found) for each in plan.expectations)
        made.append(tile("expectations held", f"{held} of {len(plan.expectations)}", told))
    return joined(*made)


def _time_tiles(found: Breakdown) -> list[Markup]:
    """What recomputation takes, its price, and what the step takes; nothing without a device."""
    time, without = found.under.time, found.without.time
    if time is None or without is None:
        return []
    forward = figure(time.forward, "seconds")
    share = f"{figure(time.recomputed / time.forward, 'fraction')} of the forward's {forward}" if time.forward else ""
    price = price_text(found.seconds_per_gib)
    priced = f", at a price of {price} of peak" if price else ""
    rest = [f"{figure(without.step, 'seconds')} without recomputation"]
    rest += [f"exposed {exposed_text(time)}"] if time.exposed else []
    rest.append(plan_times_text(found.plan))
    again = tile("recomputed time", figure(time.recomputed, "seconds"), share + priced)
    return [again, tile("step time", figure(time.step, "seconds"), "; ".join(rest))]


def _expectation(text: str, status: str, found: str) -> str:
    said = "open, PyTorch decides" if status == "deferred" else f"{status}, {found}"
    return f"{text.removeprefix('expect ')}: {said}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def memory_section(memory: dict[str, Any], peaks: Sequence[Peak]) -> Markup:
    """The chart of what :func:`policylang.report.plan.page_data.memory_data` made; the first curve is drawn on top."""
    curves = [
        Curve(curve["name"], curve["moments"], peak.bytes, peak.at)
        for curve, peak in zip(memory["curves"], peaks, strict=True)
    ]
    return memory_chart(MemoryAxis(memory["backward"], memory["resident"]), *curves)


def at_peak_section(found: PeakValues) -> Markup:
    """All that is alive at the peak by line, and the largest values of it."""
    if not found.values:
        return element("p", "Nothing takes memory.", class_="hint")
    values = [value_row(each, found) for each in found.values]
    if found.rest:
        rest = f"and {counted(found.rest, 'smaller value')}"
        share = figure(found.rest_bytes / found.bytes, "fraction")
        values.append((bytes_text(found.rest_bytes), share, rest, *[""] * (len(VALUES_HEAD) - 3)))
    largest = counted(len(found.values), "largest value")
    by_line = rows_table(SHARES_HEAD, (share_row(each, found) for each in found.shares), range(3), "by line")
    by_value = rows_table(VALUES_HEAD, values, range(2), f"the {largest}")
    return joined(element("p", highest_moment_text(found), class_="hint"), by_line, by_value)


def blocks_section(found: Breakdown) -> Markup:
    """The groups of alike blocks, each with its values."""
    most_saved = max((group.amounts.saved_bytes for group in found.groups), default=0) or 1
    most_flops = max((group.amounts.recomputed_flops for group in found.groups), default=0) or 1
    return joined(*(_group(group, most_saved, most_flops) for group in found.groups))


def _group(group: BlockGroup, most_saved: int, most_flops: int) -> Markup:
    amounts = group.amounts
    times = element("span", f"×{group.times}", class_="times") if group.times > 1 else ""
    left = f", {bytes_text(amounts.open_bytes)} of it left to PyTorch" if amounts.open_bytes else ""
    moved = f", {bytes_text(amounts.offloaded_bytes)} offloaded" if amounts.offloaded else ""
    saved = f" saved in {counted(amounts.saved, 'value')}{left}{moved}"
    time = f" in {seconds}" if (seconds := seconds_text(amounts.recomputed_seconds)) else ""
    again = f"{time} and {bytes_text(amounts.recomputed_bytes)} recomputed in {counted(amounts.recomputed, 'value')}"
    summary = element(
        "summary",
        element("span", group.label, times, class_="label"),
        _bar(amounts.saved_bytes / most_saved, "saved", bytes_text(amounts.saved_bytes), saved),
        _bar(amounts.recomputed_flops / most_flops, "recomputed", figure(amounts.recomputed_flops, "flops"), again),
    )
    shown = [each for each in group.entries if each.costs or each.fate != "recomputed"]
    views = sum(each.count for each in group.entries) - sum(each.count for each in shown)
    hidden = f"and {counted(views, 'view')} and parts that are recomputed at no cost"
    table = [_ENTRIES_HEAD, *map(_entry, shown)]
    if amounts.recomputed_seconds is None:
        table = [row[:_TIME_COLUMN] + row[_TIME_COLUMN + 1 :] for row in table]
    head, *rows = table
    values = rows_table(head, rows, range(4, len(head) - 1), f"the values of {group.label}")
    rest = element("p", hidden, class_="hint") if views else ""
    return element("details", summary, values, rest, class_="group")


def _bar(share: float, color: str, amount: str, rest: str) -> Markup:
    words = element("span", element("b", amount), rest, class_="amount")
    bar = element("span", element("i", style=f"width:{share:.1%};background:var(--{color})"), class_="bar")
    return element("span", words, bar, class_="measure")


def _entry(entry: ValueEntry) -> tuple[str, ...]:
    shape = "×".join(map(str, entry.shape or ()))
    return (
        element("span", entry.fate, class_=f"fate fate-{entry.fate.replace(' ', '-')}"),
        entry.operator + (f" ×{entry.count}" if entry.count > 1 else ""),
        entry.module,
        f"{shape} {entry.dtype}".strip(),
        bytes_text(entry.bytes) if entry.bytes else "",
        figure(entry.flops, "flops") if entry.flops else "not counted" if entry.uncounted else "",
        seconds_text(entry.seconds),
        entry.source or entry.reason or "undecided",
    )
