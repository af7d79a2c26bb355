"""A plan as text: totals, what each rewrite and rule is worth, what is alive at the peak, what each block keeps; every
value where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policylang.language.shown import (
    UNCOUNTED_UNKNOWN,
    Measured,
    counted,
    file_name,
    format_quantity,
    shortened,
    uncounted_text,
)
from policylang.planning.inspection.breakdown import BlockGroup, Breakdown, Scenario, ValueEntry
from policylang.planning.inspection.peak_values import AliveShare, AliveValue, PeakValues, values_at_peak
from policylang.planning.inspection.worth import EditWorth, Worth
from policylang.report.diagnostics import expectation_table
from policylang.report.layout import bytes_text, exposed_text, plan_times_text, recomputed_text, seconds_text, table
from policylang.report.order_text import order_details, order_totals

_LONGEST_RULE = 64
_LONGEST_RULE_AT_PEAK = 72
_LONGEST_SHAPE = 24
_MOST_GROUPS = 8
"""Lines that groups of equal blocks get where their values are not listed."""
_READABLE_RULE = 28
_REST = "every value: --values; as a page: --html plan.html"
_WIDEST = 120
"""The columns of a table in a pipe or a file."""

VALUES_HEAD = ("bytes", "share", "value", "operator", "module", "", "line", "made in step", "last needed in step")
SHARES_HEAD = ("bytes", "share", "values", "", "line", "rule")


def plan_text(
    found: Breakdown,
    worth: Sequence[Worth],
    edits: Sequence[EditWorth] = (),
    *,
    summary: bool = False,
    values: bool = False,
) -> str:
    """Plain text, no colours, no line end at the end. A summary stops at the totals and the expectations; ``values``
    adds the largest values at the peak and those of each block."""
    plan, order = found.plan, found.communication
    decided = sum(decision is not None for decision in plan.decisions)
    blocks = counted(len(plan.block_names), "block") if plan.block_names else "no blocks"
    heading = f"policy {plan.policy.name}: {counted(decided, 'forward value')}, {blocks}"
    parts = [
        heading,
        _totals(found),
        order_totals(order),
        expectation_table([("", each) for each in plan.expectations]),
    ]
    if not summary:
        at_peak = at_peak_text(values_at_peak(found), values=values)
        parts += [_rewrites(found, edits), order_details(order), _rules(found, worth), at_peak]
        parts += [f"{_group(each)}\n{_entries(each)}" for each in found.groups] if values else [_groups(found), _REST]
    return "\n\n".join(filter(None, parts))


# --- what is alive at the peak ---------------------------------------------------------------------------------------


def at_peak_text(found: PeakValues, *, values: bool) -> str:
    """By line, and with ``values`` by value. No line end at the end; empty where nothing takes memory."""
    if not found.values:
        return ""
    shares = [SHARES_HEAD, *(share_row(each, found) for each in found.shares)]
    by_line = f"{highest_moment_text(found)}\n\n{table(shares, right=range(3), ends=(4,), unless_told=_WIDEST)}"
    return f"{by_line}\n\nthe largest values\n\n{_by_value(found)}" if values else by_line


def _by_value(found: PeakValues) -> str:
    values: list[tuple[str, ...]] = [(*VALUES_HEAD[:7], "in steps")]
    for each in found.values:
        made = "start" if each.made is None else f"{each.made.step:,}"
        last = "end" if each.last is None else f"{each.last.step:,}"
        values.append((*value_row(each, found)[:7], f"{made}–{last}"))
    if found.rest:
        values.append(
            (bytes_text(found.rest_bytes), _share(found.rest_bytes, found), f"{found.rest:,} smaller", *[""] * 5)
        )
    return table(values, right=range(2), ends=(2, 4), spare=(7, 3), unless_told=_WIDEST)


def highest_moment_text(found: PeakValues) -> str:
    """``alive at the peak, 412 B: at dc, step 5 of 7, in the backward``."""
    head = f"alive at the peak, {bytes_text(found.bytes)}"
    if found.at is None:
        return f"{head}: what is there before the first step"
    again = ", recomputed" if found.at.again else ""
    return f"{head}: at {found.at.node}{again}, step {found.at.step:,} of {found.steps:,}, in the {found.at.half}"


def value_row(value: AliveValue, found: PeakValues) -> tuple[str, ...]:
    """As :data:`VALUES_HEAD` has it."""
    made, last = value.made, value.last
    again = " again" if last is not None and last.again else ""
    return (
        bytes_text(value.bytes),
        _share(value.bytes, found),
        value.name,
        value.operator,
        value.module,
        value.what,
        file_name(value.source) if value.source else "",
        "before the step" if made is None else f"{made.half}, {made.step:,}",
        "after the step" if last is None else f"{last.half}, {last.step:,}: {last.node}{again}",
    )


def share_row(share: AliveShare, found: PeakValues) -> tuple[str, ...]:
    """As :data:`SHARES_HEAD` has it."""
    line = file_name(share.source) if share.source else ""
    rule = shortened(share.rule, _LONGEST_RULE_AT_PEAK)
    return bytes_text(share.bytes), _share(share.bytes, found), f"{share.count:,}", share.what, line, rule


def _share(amount: int, found: PeakValues) -> str:
    return format_quantity(amount / found.bytes, "fraction") if found.bytes else ""


# --- totals, rewrites, rules, blocks ---------------------------------------------------------------------------------


def _totals(found: Breakdown) -> str:
    sides = under, without = found.under, found.without
    amounts = under.amounts
    rows: list[tuple[str, ...]] = [("", "with the policy", "nothing recomputed")]

    def row(name: str, said: Callable[[Scenario], str]) -> None:
        rows.append((name, said(under), said(without)))

    row("saved", lambda each: bytes_text(each.amounts.saved_bytes))
    if amounts.offloaded:
        rows.append(("offloaded", bytes_text(amounts.offloaded_bytes), "-"))
    row("recomputed", lambda each: _again(each, found.forward_flops))
    times = [each.time for each in sides if each.time is not None]
    if len(times) == 2:
        rows.append(("recomputed time", *map(recomputed_text, times)))
        rows.append(("step time", *(format_quantity(each.step, "seconds") for each in times)))
        if any(each.exposed for each in times):
            rows.append(("exposed", *map(exposed_text, times)))
    row("peak, forward", lambda each: bytes_text(each.peak.forward))
    row("peak, backward", lambda each: bytes_text(each.peak.backward))
    row("worst moment", lambda each: each.peak.at)
    parts = [table(rows, right=range(1, 3))]
    if amounts.open_bytes:
        parts.append(
            f"{bytes_text(amounts.open_bytes)} of what is saved is left to PyTorch's partitioner and counted as saved; "
            "it may recompute some of it"
        )
    if found.uncounted is None:
        parts.append(UNCOUNTED_UNKNOWN)
    elif found.uncounted:
        again = f"; recomputed of them: {uncounted_text(found.uncounted_again)}" if found.uncounted_again else ""
        parts.append(f"uncounted in the forward: {uncounted_text(found.uncounted)}{again}")
    return "\n\n".join(filter(None, (*parts, plan_times_text(found.plan), *found.notes)))


def _again(scenario: Scenario, forward_flops: int) -> str:
    flops = scenario.amounts.recomputed_flops
    if not scenario.amounts.recomputed:
        return "-"
    share = f" ({format_quantity(flops / forward_flops, 'fraction')})" if forward_flops else ""
    return f"{format_quantity(flops, 'flops')}{share}"


def _rewrites(found: Breakdown, edits: Sequence[EditWorth]) -> str:
    if not edits:
        return ""
    timed = 2 if found.plan.shown_times is not None else 0
    rows = [("line", "rewrite", "rewritten", "collectives", "saved", "peak", *("step", "exposed")[:timed])]
    for each in edits:
        span = found.plan.policy.rewrites[each.statement].span
        times = (each.step_seconds, each.exposed_seconds)[:timed]
        rows.append(
            (
                file_name(span.location),
                shortened(span.one_line, _LONGEST_RULE),
                f"{len(found.plan.edits.of(each.statement).done):,}",
                f"{-each.fewer_collectives:+,}",
                _signed(each.saved_bytes, "bytes"),
                _signed(each.peak_bytes, "bytes"),
                *(_signed(seconds or 0.0, "seconds") for seconds in times),
            )
        )
    compared = "from `collectives` on: with the rewrite, compared with the policy without it"
    return "\n".join((table(rows, right=range(2, len(rows[0])), ends=(0,)), compared))


def _rules(found: Breakdown, worth: Sequence[Worth]) -> str:
    """On a device a rule's price is in time."""
    outcomes = found.plan.rules
    if not outcomes:
        return ""
    margins = {each.rule: each for each in worth}
    timed = found.plan.shown_times is not None
    head = ("line", "rule", "matched", "decided", "saved", "recomputed", *("time",)[:timed], "peak", "worth", "a GiB")
    rows: list[tuple[str, ...]] = [head]
    for index, outcome in enumerate(outcomes):
        rule, margin, cells = outcome.rule, margins.get(index), [""] * (len(head) - 4)
        if margin is not None:
            price = margin.flops_per_gib if margin.recomputed_seconds is None else margin.seconds_per_gib
            cells = [
                _signed(margin.saved_bytes, "bytes"),
                _signed(margin.recomputed_flops, "flops"),
                *([] if margin.recomputed_seconds is None else [_signed(margin.recomputed_seconds, "seconds")]),
                _signed(margin.peak_bytes, "bytes"),
                margin.verdict,
                "" if price is None else format_quantity(price, "seconds" if timed else "flops"),
            ]
        counts = f"{len(outcome.matched):,}", f"{len(outcome.decided):,}"
        rows.append((file_name(rule.source), shortened(rule.text, _LONGEST_RULE), *counts, *cells))
    spare = 2, len(head) - 1, len(head) - 2, 3, *(5,)[:timed]
    text = table(rows, right=range(2, len(head) - 2), ends=(0,), spare=spare, readable=_READABLE_RULE)
    what = "saved, recomputed, its time, and peak" if timed else "saved, recomputed and peak"
    notes = [f"{what}: with the rule, compared with the policy without it"]
    if left_out := sum(bool(outcome.decided) for outcome in outcomes) - len(worth):
        notes.append(f"not worked out for the last {counted(left_out, 'rule')} that decide something")
    return "\n".join((text, *notes))


def _signed(amount: float, dimension: Measured) -> str:
    return f"{'+' if amount > 0 else '-'}{format_quantity(abs(amount), dimension)}" if amount else "0"


def _groups(found: Breakdown) -> str:
    rest = max(0, len(found.groups) - _MOST_GROUPS)
    more = [f"and {counted(rest, 'more group')} of blocks"] if rest else []
    return "\n".join((*map(_group, found.groups[:_MOST_GROUPS]), *more))


def _group(group: BlockGroup) -> str:
    amounts = group.amounts
    times, each = (f" ×{group.times}", ", each") if group.times > 1 else ("", "")
    moved = f" {bytes_text(amounts.offloaded_bytes)} offloaded," if amounts.offloaded else ""
    again = f" in {seconds_text(amounts.recomputed_seconds)}" if amounts.recomputed_seconds else ""
    return (
        f"{group.label}{times}: {bytes_text(amounts.saved_bytes)} saved,{moved} {bytes_text(amounts.recomputed_bytes)} "
        f"and {format_quantity(amounts.recomputed_flops, 'flops')} recomputed{again}{each}"
    )


def _entries(group: BlockGroup) -> str:
    lines = list[str]()
    shown = [entry for entry in group.entries if not entry.is_free]
    views = sum(entry.count for entry in group.entries if entry.is_free)
    if shown:
        timed = group.amounts.recomputed_seconds is not None
        head = ("", "operator", "module", "shape", "bytes", "FLOPs", *("time",)[:timed], "line")
        line = len(head) - 1
        rows = [head, *((*row[:6], *row[6:7][:timed], row[7]) for row in map(entry_row, shown))]
        lines.append(table(rows, right=range(4, line), indent=2, ends=(2, line), spare=(3,)))
    if views:
        lines.append(f"  and {counted(views, 'view')} and parts recomputed at no cost")
    return "\n".join(lines)


def entry_row(entry: ValueEntry) -> tuple[str, ...]:
    """Outcome, operator, module, shape, bytes, FLOPs, time, and what decided."""
    shape = shortened("×".join(map(str, entry.shape or ())), _LONGEST_SHAPE)
    return (
        entry.outcome.word,
        entry.operator + (f" ×{entry.count}" if entry.count > 1 else ""),
        entry.module,
        f"{shape} {entry.dtype}".strip(),
        bytes_text(entry.bytes) if entry.bytes else "",
        format_quantity(entry.flops, "flops") if entry.flops else "not counted" if entry.uncounted else "",
        seconds_text(entry.seconds),
        file_name(entry.source) if entry.source else entry.reason or "undecided",
    )
