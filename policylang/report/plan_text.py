"""A plan as text: totals, what each rewrite and rule is worth, what is alive at the peak, then block by block."""

from __future__ import annotations

from collections.abc import Sequence

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
from policylang.planning.inspection.peak_values import AliveShare, AliveValue, Moment, PeakValues, values_at_peak
from policylang.planning.inspection.worth import EditWorth, Worth
from policylang.planning.plan import RuleOutcome
from policylang.report.diagnostics import expectation_table
from policylang.report.layout import exposed_text, plan_times_text, recomputed_text, seconds_text, table
from policylang.report.order_text import order_details, order_totals
from policylang.report.report_text import bytes_text

_LONGEST_RULE_AT_PEAK = 72
_WIDEST = 120
"""The columns of a table in a pipe or a file."""

VALUES_HEAD = ("bytes", "share", "value", "operator", "module", "", "line", "made in step", "last needed in step")
_TEXT_HEAD = (*VALUES_HEAD[:7], "in steps")
SHARES_HEAD = ("bytes", "share", "values", "", "line", "rule")


def at_peak_text(found: PeakValues) -> str:
    """No line end at the end; empty where nothing takes memory."""
    if not found.values:
        return ""
    values = [_TEXT_HEAD, *(_text_row(each, found) for each in found.values)]
    if found.rest:
        words = (f"{found.rest:,} smaller", *[""] * (len(_TEXT_HEAD) - 3))
        values.append((bytes_text(found.rest_bytes), _share(found.rest_bytes, found), *words))
    shares = [SHARES_HEAD, *(share_row(each, found) for each in found.shares)]
    parts = (
        highest_moment_text(found),
        table(values, right=range(2), ends=(2, 4), spare=(7, 3), unless_told=_WIDEST),
        "by line",
        table(shares, right=range(3), unless_told=_WIDEST),
    )
    return "\n\n".join(parts)


def highest_moment_text(found: PeakValues) -> str:
    """``alive at the peak, 412 B: at dc, step 5 of 7, in the backward``."""
    head = f"alive at the peak, {bytes_text(found.bytes)}"
    if found.at is None:
        return f"{head}: what is there before the first step"
    again = ", computed again" if found.at.again else ""
    return f"{head}: at {found.at.node}{again}, step {found.at.step:,} of {found.steps:,}, in the {found.at.half}"


def value_row(value: AliveValue, found: PeakValues) -> tuple[str, ...]:
    """As :data:`VALUES_HEAD` has it."""
    return (
        bytes_text(value.bytes),
        _share(value.bytes, found),
        value.name,
        value.operator,
        value.module,
        value.what,
        file_name(value.source) if value.source else "",
        _made(value),
        "after the step" if value.last is None else _step(value.last),
    )


def _text_row(value: AliveValue, found: PeakValues) -> tuple[str, ...]:
    """As :data:`_TEXT_HEAD` has it: the steps are numbers alone, so that a line can be read."""
    made = "start" if value.made is None else f"{value.made.step:,}"
    last = "end" if value.last is None else f"{value.last.step:,}"
    return (*value_row(value, found)[:7], f"{made}–{last}")


def share_row(share: AliveShare, found: PeakValues) -> tuple[str, ...]:
    """As :data:`SHARES_HEAD` has it."""
    line = file_name(share.source) if share.source else ""
    rule = shortened(share.rule, _LONGEST_RULE_AT_PEAK)
    return bytes_text(share.bytes), _share(share.bytes, found), f"{share.count:,}", share.what, line, rule


def _made(value: AliveValue) -> str:
    if value.made is None:
        return "before the step"
    return f"{value.made.half}, {value.made.step:,}"


def _step(moment: Moment) -> str:
    again = " again" if moment.again else ""
    return f"{moment.half}, {moment.step:,}: {moment.node}{again}"


def _share(amount: int, found: PeakValues) -> str:
    return format_quantity(amount / found.bytes, "fraction") if found.bytes else ""


_LONGEST_RULE = 64
_LONGEST_SHAPE = 24
_MARGINS = "saved, recomputed and peak"
_MARGINS_TIMED = "saved, recomputed, its time, and peak"
_COMPARED = "with the rule, compared with the same policy without it"


def plan_text(
    found: Breakdown, worth: Sequence[Worth], edits: Sequence[EditWorth] = (), *, summary: bool = False
) -> str:
    """Plain text, no colours, no line end at the end. A summary stops at the totals and the expectations."""
    order = found.communication
    parts = [_heading(found), _totals(found), order_totals(order), expectation_table(found.plan.expectations)]
    if not summary:
        at_peak = at_peak_text(values_at_peak(found))
        parts += [
            _rewrites(found, edits),
            order_details(order),
            _rules(found, worth),
            at_peak,
            *(_group(group) for group in found.groups),
        ]
    return "\n\n".join(part for part in parts if part)


def _heading(found: Breakdown) -> str:
    plan = found.plan
    values = sum(decision is not None for decision in plan.decisions)
    blocks = f", {counted(len(plan.block_names), 'block')}" if plan.block_names else ", no blocks"
    return f"policy {plan.policy.name}: {counted(values, 'forward value')}{blocks}"


def _totals(found: Breakdown) -> str:
    under, without = found.under, found.without
    rows = [
        ("", "with the policy", "nothing recomputed"),
        ("saved", bytes_text(under.amounts.saved_bytes), bytes_text(without.amounts.saved_bytes)),
        *([("offloaded", bytes_text(under.amounts.offloaded_bytes), "-")] if under.amounts.offloaded else []),
        ("recomputed", _again(under, found.forward_flops), _again(without, found.forward_flops)),
        *_times(under, without),
        ("peak, forward", bytes_text(under.peak.forward), bytes_text(without.peak.forward)),
        ("peak, backward", bytes_text(under.peak.backward), bytes_text(without.peak.backward)),
        ("worst moment", under.peak.at, without.peak.at),
    ]
    text = table(rows, right=range(1, 3))
    if under.amounts.open_bytes:
        open_bytes = bytes_text(under.amounts.open_bytes)
        text += (
            f"\n\n{open_bytes} of what is saved is left to PyTorch's partitioner and counted as saved; "
            "it may recompute some of it"
        )
    times = plan_times_text(found.plan)
    return text + _uncounted(found) + (times and f"\n\n{times}") + "".join(f"\n\n{note}" for note in found.notes)


def _times(under: Scenario, without: Scenario) -> list[tuple[str, str, str]]:
    """Empty without a device; exposed time has a row where there is any."""
    if under.time is None or without.time is None:
        return []
    rows = [
        ("recomputed time", recomputed_text(under.time), recomputed_text(without.time)),
        ("step time", format_quantity(under.time.step, "seconds"), format_quantity(without.time.step, "seconds")),
    ]
    exposed = under.time.exposed or without.time.exposed
    return [*rows, *([("exposed", exposed_text(under.time), exposed_text(without.time))] if exposed else [])]


def _uncounted(found: Breakdown) -> str:
    """The operators that the FLOPs leave out."""
    if found.uncounted is None:
        return f"\n\n{UNCOUNTED_UNKNOWN}"
    if not found.uncounted:
        return ""
    again = f"; recomputed of them: {uncounted_text(found.uncounted_again)}" if found.uncounted_again else ""
    return f"\n\nuncounted in the forward: {uncounted_text(found.uncounted)}{again}"


def _again(scenario: Scenario, forward_flops: int) -> str:
    flops = scenario.amounts.recomputed_flops
    if not scenario.amounts.recomputed:
        return "-"
    share = f" ({format_quantity(flops / forward_flops, 'fraction')})" if forward_flops else ""
    return f"{format_quantity(flops, 'flops')}{share}"


def _rewrites(found: Breakdown, edits: Sequence[EditWorth]) -> str:
    if not edits:
        return ""
    timed = found.plan.shown_times is not None
    rows = [("line", "rewrite", "rewritten", "collectives", "saved", "peak", *("step", "exposed")[: 2 * timed])]
    for each in edits:
        statement = found.plan.policy.rewrites[each.statement]
        rows.append(
            (
                file_name(statement.span.location),
                shortened(statement.span.one_line, _LONGEST_RULE),
                f"{len(found.plan.edits.of(each.statement).done):,}",
                f"{-each.fewer_collectives:+,}",
                _signed(each.saved_bytes, "bytes"),
                _signed(each.peak_bytes, "bytes"),
                *(
                    _signed(seconds or 0.0, "seconds")
                    for seconds in (each.step_seconds, each.exposed_seconds)[: 2 * timed]
                ),
            )
        )
    compared = "from `collectives` on: with the rewrite, compared with the same policy without it"
    return "\n".join((table(rows, right=range(2, len(rows[0])), ends=(0,)), compared))


def _rules(found: Breakdown, worth: Sequence[Worth]) -> str:
    outcomes = found.plan.rules
    if not outcomes:
        return ""
    margins = {each.rule: each for each in worth}
    timed = found.plan.shown_times is not None
    head = ("line", "rule", "matched", "decided", "saved", "recomputed", *("time",)[:timed], "peak", "", "a GiB")
    rows: list[tuple[str, ...]] = [head]
    for index, outcome in enumerate(outcomes):
        margin = margins.get(index)
        rows.append((*_rule(outcome), *(("",) * (len(head) - 4) if margin is None else _margin(margin))))
    text = table(rows, right=range(2, len(head) - 2), ends=(0,), spare=(len(head) - 3, 2, len(head) - 1))
    notes = [f"{_MARGINS_TIMED if timed else _MARGINS}: {_COMPARED}"]
    left_out = sum(bool(outcome.decided) for outcome in outcomes) - len(worth)
    if left_out:
        notes.append(f"not worked out for the last {counted(left_out, 'rule')} that decide something")
    return "\n".join((text, *notes))


def _rule(outcome: RuleOutcome) -> tuple[str, ...]:
    rule = outcome.rule
    return (
        file_name(rule.source),
        shortened(rule.text, _LONGEST_RULE),
        f"{len(outcome.matched):,}",
        f"{len(outcome.decided):,}",
    )


def _margin(margin: Worth) -> tuple[str, ...]:
    """On a device its price is in time."""
    timed = margin.recomputed_seconds is not None
    price = margin.seconds_per_gib if timed else margin.flops_per_gib
    return (
        _signed(margin.saved_bytes, "bytes"),
        _signed(margin.recomputed_flops, "flops"),
        *([_signed(margin.recomputed_seconds or 0.0, "seconds")] if timed else []),
        _signed(margin.peak_bytes, "bytes"),
        margin.verdict,
        "" if price is None else format_quantity(price, "seconds" if timed else "flops"),
    )


def _signed(amount: float, dimension: Measured) -> str:
    return f"{'+' if amount > 0 else '-'}{format_quantity(abs(amount), dimension)}" if amount else "0"


def _group(group: BlockGroup) -> str:
    amounts = group.amounts
    title = group.label + (f" ×{group.times}" if group.times > 1 else "")
    moved = f" {bytes_text(amounts.offloaded_bytes)} offloaded," if amounts.offloaded else ""
    again = f" in {seconds_text(amounts.recomputed_seconds)}" if amounts.recomputed_seconds else ""
    head = (
        f"{title}: {bytes_text(amounts.saved_bytes)} saved,{moved} {bytes_text(amounts.recomputed_bytes)} and "
        f"{format_quantity(amounts.recomputed_flops, 'flops')} recomputed{again}"
        + (", each" if group.times > 1 else "")
    )
    shown = [each for each in group.entries if not each.is_free]
    views = sum(entry.count for entry in group.entries) - sum(entry.count for entry in shown)
    lines = [head]
    if shown:
        timed = amounts.recomputed_seconds is not None
        head_row = ("", "operator", "module", "shape", "bytes", "FLOPs", *("time",)[:timed], "line")
        rows = [head_row, *(_entry(each, timed=timed) for each in shown)]
        line = len(head_row) - 1
        lines.append(table(rows, right=range(4, line), indent=2, ends=(2, line), spare=(3,)))
    if views:
        lines.append(f"  and {counted(views, 'view')} and parts recomputed at no cost")
    return "\n".join(lines)


def _entry(entry: ValueEntry, *, timed: bool) -> tuple[str, ...]:
    shape = "×".join(map(str, entry.shape or ()))
    return (
        entry.outcome.word,
        entry.operator + (f" ×{entry.count}" if entry.count > 1 else ""),
        entry.module,
        f"{shortened(shape, _LONGEST_SHAPE)} {entry.dtype}".strip(),
        bytes_text(entry.bytes) if entry.bytes else "",
        format_quantity(entry.flops, "flops") if entry.flops else "not counted" if entry.uncounted else "",
        *([seconds_text(entry.seconds)] if timed else []),
        file_name(entry.source) if entry.source else entry.reason or "undecided",
    )
