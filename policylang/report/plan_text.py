"""A plan as text: totals, what each rewrite and rule is worth, what is alive at the peak, what each block keeps, the
order of the step; every value where that is asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import fsum

from policylang.language import shown
from policylang.language.syntax import Pipeline
from policylang.planning.inspection import breakdown
from policylang.planning.inspection.communication import CollectiveEntry, Communication, LineInOrder
from policylang.planning.inspection.worth import EditWorth, Worth, same_time
from policylang.planning.pipelines import PipelineFigures
from policylang.report.diagnostics import expectation_table
from policylang.report.rendering import bytes_text, exposed_text, plan_times_text, recomputed_text, seconds_text, table
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
_NUMBER = re.compile(r"_\d+\b")  # at the end of a node's name
_MOST_REASONS = 4
_WIDEST_ORDER = 160  # the columns of a table in a pipe or a file
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
        rows = [(shown.file_name(line), shown.shortened(text, _LONGEST_LINE), *rest) for line, text, *rest in rows]
        lines = "\n".join((table([head, *rows], right=range(2, len(head)), ends=(0,)), *line_notes(found.lines)))
    if found.planned.lanes is None:
        return lines
    collectives = ""
    if rows := exposed_rows(found):
        spare = [rows[0].index(name) for name in ("bytes", "group", "takes", "kind")]
        right, ends = range(rows[0].index("collective")), (len(rows[0]) - 1,)
        collectives = table(rows, right=right, ends=ends, spare=spare, unless_told=_WIDEST_ORDER)
    return "\n\n".join(filter(None, (lines, collectives, hidden_text(found))))


def total_rows(found: Communication) -> list[tuple[str, ...]]:
    """The number of collectives by kind, and the figures of the step, as traced and as planned."""
    before, after = found.traced, found.planned
    old, new = before.kinds(), after.kinds()
    kinds = dict.fromkeys((*old, *new))
    rows: list[tuple[str, ...]] = [(kind, f"{old.get(kind, 0):,}", f"{new.get(kind, 0):,}") for kind in kinds]
    if before.lanes is not None and after.lanes is not None:
        lanes = before.lanes, after.lanes
        rows.append(("exposed", exposed_text(lanes[0]), exposed_text(lanes[1])))
        rows.append(("step time", *(shown.format_quantity(each.step, "seconds") for each in lanes)))
    peak = ("peak", bytes_text(before.peak.bytes), bytes_text(after.peak.bytes))
    return [*rows, peak, ("in flight at most", bytes_text(before.in_flight), bytes_text(after.in_flight))]


def order_notes(found: Communication) -> list[str]:
    """The lower bound, the barriers, and what is unknown without a device."""
    said = []
    if seconds_text(found.bound):
        least = shown.format_quantity(found.bound or 0.0, "seconds")
        said.append(f"no order of these collectives exposes less than {least}")
    if found.barriers:
        said.append(barriers_text(found.barriers))
    if found.planned.lanes is None:
        said.append("without a device's times, exposed communication is not known")
    return said


# --- lines -----------------------------------------------------------------------------------------------------------


def line_rows(lines: Sequence[LineInOrder]) -> list[tuple[str, ...]]:
    """Rows of a table, head first: the collectives that a ``bucket`` line makes, the exposed time without a line."""
    joins = any(line.buckets for line in lines)
    weighed = any(line.exposed_without is not None for line in lines)
    rows: list[tuple[str, ...]] = []
    for line in lines:
        into = f"{sum(len(bucket.names) for bucket in line.buckets):,}" if line.buckets else ""
        without = "" if line.exposed_without is None else shown.format_quantity(line.exposed_without, "seconds")
        counts = f"{len(line.matched):,}", f"{len(line.moved):,}"
        rows.append((line.source, line.text, *counts, *(into,)[:joins], *(without,)[:weighed]))
    more = (*("into",)[:joins], *("exposed without it",)[:weighed])
    return [("line", "scheduling line", "matched", "moved", *more), *rows]


def said_of(line: LineInOrder) -> str:
    """``matches 291 collectives, moves 289 into 64``."""
    into = f" into {sum(len(each.names) for each in line.buckets):,}" if line.buckets else ""
    return f"matches {shown.counted(len(line.matched), 'collective')}, moves {len(line.moved):,}{into}"


def line_notes(lines: Sequence[LineInOrder]) -> list[str]:
    """On how many ranks buckets were proven, and what was left where it is."""
    proofs: dict[str, list[str]] = {}
    for line in lines:
        for said in proof_texts(line):
            proofs.setdefault(said, []).append(line.source)
    told = [f"{_lines_named(sources)}: {said}" for said, sources in proofs.items()]
    return [*told, *(text for line in lines for text in left_texts(line))]


def proof_texts(line: LineInOrder) -> list[str]:
    """``each bucket proven on 64 ranks``, its assumptions, whether bits may differ; empty where nothing is joined."""
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
    """Collectives that were not moved, by reason, most frequent first. Reasons differ in more than a node's number."""
    alike: dict[str, tuple[str, list[str]]] = {}
    for reason, names in line.left.items():
        alike.setdefault(_NUMBER.sub("", reason), (reason, []))[1].extend(names)
    reasons = sorted(alike.values(), key=lambda each: -len(each[1]))
    place = shown.file_name(line.source)
    found = [
        f"{place} left {shown.listed(names, _MOST_NAMES)} where {'they were' if names[1:] else 'it was'}: {reason}"
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
        takes = shown.format_quantity(run.end - run.start, "seconds")
        alike = takes, each.operator, each.bytes, each.group, run.exposed_by, each.lines, each.members
        together.setdefault(alike, []).append(each)
    groups = sorted(together.values(), key=lambda each: -_seconds(each))
    rows = [_row(found, each) for each in groups[:_MOST_EXPOSED]]
    if rest := [each for group in groups[_MOST_EXPOSED:] for each in group]:
        more = (shown.format_quantity(_seconds(rest), "seconds"), f"×{len(rest):,}", "", "", "more")
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
    least, most = (shown.format_quantity(each, "seconds") for each in (exposed[0], exposed[-1]))
    return (
        shown.format_quantity(_seconds(alike), "seconds"),
        f"×{len(alike):,}" if several else "",
        (most if least == most else f"≤ {most}") if several else "",
        shown.format_quantity(run.end - run.start, "seconds"),
        shown.listed([each.name for each in alike], 1),
        first.kind + (f" of {first.members}" if first.members > 1 else ""),
        shown.format_quantity(first.bytes, "bytes"),
        first.group,
        shown.folded_names(blocks) if blocks else "",
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
        file, _, line = shown.file_name(source).rpartition(":")
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
        said.append(f"hidden: {kinds}; {shown.format_quantity(takes, 'seconds')} in all")
    if beside := [each for each in found.collectives if each.run is None]:
        said.append(f"{shown.counted(len(beside), 'collective')} computes as it sends, and runs among the computation")
    return "\n".join(said)


_LONGEST_RULE = 64
_LONGEST_RULE_AT_PEAK = 72
_LONGEST_SHAPE = 24
_MOST_GROUPS = 8  # lines that groups of equal blocks get where their values are not listed
_READABLE_RULE = 28
_MOST_WAITS = 2
_REST = "every value: --values; as a page: --html plan.html"
_WIDEST = 120  # the columns of a table in a pipe or a file

VALUES_HEAD = ("bytes", "share", "value", "operator", "module", "", "line", "made in step", "last needed in step")
SHARES_HEAD = ("bytes", "share", "values", "", "line", "rule")


def plan_text(
    found: breakdown.Breakdown,
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
    blocks = shown.counted(len(plan.block_names), "block") if plan.block_names else "no blocks"
    heading = f"policy {plan.policy.name}: {shown.counted(decided, 'forward value')}, {blocks}"
    expected = expectation_table([("", each) for each in plan.expectations])
    parts = [heading, _totals(found), pipeline_text(plan.policy.pipeline, plan.pipeline), order_totals(order), expected]
    if not summary:
        at_peak = at_peak_text(breakdown.values_at_peak(found), values=values)
        parts += [_rewrites(found, edits), order_details(order), _rules(found, worth)]
        parts += [table(rows, right=range(1, 5), ends=(0,)) if (rows := copies_rows(found)) else "", at_peak]
        parts += [f"{_group(each)}\n{_entries(each)}" for each in found.groups] if values else [_groups(found), _REST]
    return "\n\n".join(filter(None, parts))


def pipeline_text(said: Pipeline | None, figures: PipelineFigures | None) -> str:
    """The table of a pipeline's stages; empty for a plan without one."""
    if said is None or figures is None:
        return ""
    timed = figures.step_seconds is not None
    rows = [("stage", "rank", "blocks", "in flight", "saved", "peak", *("recomputed time", "busy")[: 2 * timed])]
    for each in figures.stages:
        numbers = f"{each.stage}", f"{each.rank}", each.blocks_text("–"), f"{each.in_flight}"
        times = (each.recomputed_seconds, each.step_seconds) if timed else ()
        seconds = (shown.format_quantity(time or 0.0, "seconds") for time in times)
        rows.append((*numbers, bytes_text(each.saved), bytes_text(each.peak), *seconds))
    ranks = shown.counted(len(said.order), "rank")
    microbatches = shown.counted(said.microbatches, "microbatch", "microbatches")
    heading = f"pipeline {said.schedule}: {shown.counted(said.stages, 'stage')} on {ranks}, {microbatches}"
    if figures.step_seconds:
        busiest = max(
            sum(each.step_seconds or 0.0 for each in figures.stages if each.rank == rank)
            for rank in range(len(said.order))
        )
        idle = 1 - busiest / figures.step_seconds
        took = shown.format_quantity(figures.step_seconds, "seconds")
        heading += f"; step time {took}, of which the busiest rank waits {idle:.0%}"
    return f"{heading}\n{table(rows, right=range(8))}"


# --- what is alive at the peak ---------------------------------------------------------------------------------------


def at_peak_text(found: breakdown.PeakValues, *, values: bool) -> str:
    """By line, and with ``values`` by value. No line end at the end; empty where nothing takes memory."""
    if not found.values:
        return ""
    shares = [SHARES_HEAD, *(share_row(each, found) for each in found.shares)]
    by_line = f"{highest_moment_text(found)}\n\n{table(shares, right=range(3), ends=(4,), unless_told=_WIDEST)}"
    return f"{by_line}\n\nthe largest values\n\n{_by_value(found)}" if values else by_line


def _by_value(found: breakdown.PeakValues) -> str:
    values: list[tuple[str, ...]] = [(*VALUES_HEAD[:7], "in steps")]
    for each in found.values:
        made = "start" if each.made is None else f"{each.made.step:,}"
        last = "end" if each.last is None else f"{each.last.step:,}"
        values.append((*value_row(each, found)[:7], f"{made}–{last}"))
    if found.rest:
        share = _share(found.rest_bytes, found)
        values.append((bytes_text(found.rest_bytes), share, f"{found.rest:,} smaller", *[""] * 5))
    return table(values, right=range(2), ends=(2, 4), spare=(7, 3), unless_told=_WIDEST)


def highest_moment_text(found: breakdown.PeakValues) -> str:
    """``alive at the peak, 412 B: at dc, step 5 of 7, in the backward``."""
    head = f"alive at the peak, {bytes_text(found.bytes)}"
    if found.at is None:
        return f"{head}: what is there before the first step"
    again = ", recomputed" if found.at.again else ""
    return f"{head}: at {found.at.node}{again}, step {found.at.step:,} of {found.steps:,}, in the {found.at.half}"


def value_row(value: breakdown.AliveValue, found: breakdown.PeakValues) -> tuple[str, ...]:
    """A row under :data:`VALUES_HEAD`."""
    made, last = value.made, value.last
    again = " again" if last is not None and last.again else ""
    return (
        bytes_text(value.bytes),
        _share(value.bytes, found),
        value.name,
        value.operator,
        value.module,
        value.what,
        shown.file_name(value.source) if value.source else "",
        "before the step" if made is None else f"{made.half}, {made.step:,}",
        "after the step" if last is None else f"{last.half}, {last.step:,}: {last.node}{again}",
    )


def share_row(share: breakdown.AliveShare, found: breakdown.PeakValues) -> tuple[str, ...]:
    """A row under :data:`SHARES_HEAD`."""
    line = shown.file_name(share.source) if share.source else ""
    rule = shown.shortened(share.rule, _LONGEST_RULE_AT_PEAK)
    return bytes_text(share.bytes), _share(share.bytes, found), f"{share.count:,}", share.what, line, rule


def _share(amount: int, found: breakdown.PeakValues) -> str:
    return shown.format_quantity(amount / found.bytes, "fraction") if found.bytes else ""


# --- totals, rewrites, rules, blocks ---------------------------------------------------------------------------------


def _totals(found: breakdown.Breakdown) -> str:
    rows, notes = step_totals(found)
    return "\n\n".join((table(rows, right=range(1, 3)), *notes))


def step_totals(found: breakdown.Breakdown) -> tuple[list[tuple[str, ...]], list[str]]:
    """The rows of a table, head first: a name, the figure with the policy, and that of a step without recomputation;
    and what the figures leave out, a sentence each."""
    sides = under, without = found.under, found.without
    amounts = under.amounts
    rows: list[tuple[str, ...]] = [("", "with the policy", "nothing recomputed")]

    def row(name: str, said: Callable[[breakdown.Scenario], str]) -> None:
        rows.append((name, said(under), said(without)))

    row("saved", lambda each: bytes_text(each.amounts.saved_bytes))
    if amounts.offloaded:
        rows.append(("offloaded", bytes_text(amounts.offloaded_bytes), "-"))
        rows.append(("host memory", bytes_text(found.plan.host_memory), "-"))
    row("recomputed", lambda each: _again(each, found.forward_flops))
    times = [each.time for each in sides if each.time is not None]
    if len(times) == 2:
        rows.append(("recomputed time", *map(recomputed_text, times)))
        rows.append(("step time", *(shown.format_quantity(each.step, "seconds") for each in times)))
        if any(each.exposed for each in times):
            rows.append(("exposed", *map(exposed_text, times)))
    row("peak, forward", lambda each: bytes_text(each.peak.forward))
    row("peak, backward", lambda each: bytes_text(each.peak.backward))
    row("worst moment", lambda each: each.peak.at)
    notes = []
    if amounts.open_bytes:
        notes.append(
            f"{bytes_text(amounts.open_bytes)} of what is saved is left to PyTorch's partitioner and counted as saved; "
            "it may recompute some of it"
        )
    if found.uncounted is None:
        notes.append(shown.UNCOUNTED_UNKNOWN)
    elif found.uncounted:
        again = f"; recomputed of them: {shown.uncounted_text(found.uncounted_again)}" if found.uncounted_again else ""
        notes.append(f"uncounted in the forward: {shown.uncounted_text(found.uncounted)}{again}")
    return rows, [*filter(None, (*notes, plan_times_text(found.plan), *found.notes))]


def _again(scenario: breakdown.Scenario, forward_flops: int) -> str:
    flops = scenario.amounts.recomputed_flops
    if not scenario.amounts.recomputed:
        return "-"
    share = f" ({shown.format_quantity(flops / forward_flops, 'fraction')})" if forward_flops else ""
    return f"{shown.format_quantity(flops, 'flops')}{share}"


def _rewrites(found: breakdown.Breakdown, edits: Sequence[EditWorth]) -> str:
    if not edits:
        return ""
    timed = 2 if found.plan.shown_times is not None else 0
    rows = [("line", "rewrite", "rewritten", "collectives", "saved", "peak", *("step", "exposed")[:timed])]
    for each in edits:
        span = found.plan.policy.rewrites[each.statement].span
        times = (each.step_seconds, each.exposed_seconds)[:timed]
        line = (shown.file_name(span.location), shown.shortened(span.one_line, _LONGEST_RULE))
        counts = (f"{found.plan.edits.of(each.statement).count:,}", f"{-each.fewer_collectives:+,}")
        sizes = (_signed(each.saved_bytes, "bytes"), _signed(each.peak_bytes, "bytes"))
        rows.append((*line, *counts, *sizes, *(_signed(seconds or 0.0, "seconds") for seconds in times)))
    compared = "from `collectives` on: with the rewrite, compared with the policy without it"
    return "\n".join((table(rows, right=range(2, len(rows[0])), ends=(0,)), compared))


def _rules(found: breakdown.Breakdown, worth: Sequence[Worth]) -> str:
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
                "" if price is None else shown.format_quantity(price, "seconds" if timed else "flops"),
            ]
        counts = f"{len(outcome.matched):,}", f"{len(outcome.decided):,}"
        rows.append((shown.file_name(rule.source), shown.shortened(rule.text, _LONGEST_RULE), *counts, *cells))
    spare = 2, len(head) - 1, len(head) - 2, 3, *(5,)[:timed]
    text = table(rows, right=range(2, len(head) - 2), ends=(0,), spare=spare, readable=_READABLE_RULE)
    what = "saved, recomputed, its time, and peak" if timed else "saved, recomputed and peak"
    notes = [f"{what}: with the rule, compared with the policy without it"]
    if left_out := sum(bool(outcome.decided) for outcome in outcomes) - len(worth):
        notes.append(f"not worked out for the last {shown.counted(left_out, 'rule')} that decide something")
    return "\n".join((text, *notes))


def copies_rows(found: breakdown.Breakdown) -> list[tuple[str, ...]]:
    """The copies of each line to the host and back, below a head; empty where nothing is copied."""
    lines = breakdown.copies_of_rules(found.plan)
    timed = found.plan.shown_times is not None
    rows: list[tuple[str, ...]] = [("line", "copied out", "back", *("hidden", "exposed", "waits")[: 3 * timed])]
    for each in lines.values():
        waits = [f"{block} {seconds_text(wait)}" for block, wait in each.waits.items()]
        times = (seconds_text(each.hidden), seconds_text(each.exposed), shown.listed(waits, _MOST_WAITS))[: 3 * timed]
        source = shown.file_name(each.source) if each.source else "checkpoint"
        rows.append((source, bytes_text(each.out_bytes), bytes_text(each.back_bytes), *times))
    return rows if lines else []


def _signed(amount: float, dimension: shown.Dimension) -> str:
    return f"{'+' if amount > 0 else '-'}{shown.format_quantity(abs(amount), dimension)}" if amount else "0"


def _groups(found: breakdown.Breakdown) -> str:
    rest = max(0, len(found.groups) - _MOST_GROUPS)
    more = [f"and {shown.counted(rest, 'more group')} of blocks"] if rest else []
    return "\n".join((*map(_group, found.groups[:_MOST_GROUPS]), *more))


def _group(group: breakdown.BlockGroup) -> str:
    amounts = group.amounts
    times, each = (f" ×{group.times}", ", each") if group.times > 1 else ("", "")
    moved = f" {bytes_text(amounts.offloaded_bytes)} offloaded," if amounts.offloaded else ""
    again = f" in {seconds_text(amounts.recomputed_seconds)}" if amounts.recomputed_seconds else ""
    return (
        f"{group.label}{times}: {bytes_text(amounts.saved_bytes)} saved,{moved} {bytes_text(amounts.recomputed_bytes)} "
        f"and {shown.format_quantity(amounts.recomputed_flops, 'flops')} recomputed{again}{each}"
    )


def _entries(group: breakdown.BlockGroup) -> str:
    lines = list[str]()
    entries = [entry for entry in group.entries if not entry.is_free]
    views = sum(entry.count for entry in group.entries if entry.is_free)
    if entries:
        timed = group.amounts.recomputed_seconds is not None
        head = ("", "operator", "module", "shape", "bytes", "FLOPs", *("time",)[:timed], "line")
        line = len(head) - 1
        rows = [head, *((*row[:6], *row[6:7][:timed], row[7]) for row in map(entry_row, entries))]
        lines.append(table(rows, right=range(4, line), indent=2, ends=(2, line), spare=(3,)))
    if views:
        lines.append(f"  and {shown.counted(views, 'view')} and parts recomputed at no cost")
    return "\n".join(lines)


def entry_row(entry: breakdown.ValueEntry) -> tuple[str, ...]:
    """Outcome, operator, module, shape, bytes, FLOPs, time, and what decided."""
    shape = shown.shortened("×".join(map(str, entry.shape or ())), _LONGEST_SHAPE)
    return (
        entry.outcome.word,
        entry.operator + (f" ×{entry.count}" if entry.count > 1 else ""),
        entry.module,
        f"{shape} {entry.dtype}".strip(),
        bytes_text(entry.bytes) if entry.bytes else "",
        shown.format_quantity(entry.flops, "flops") if entry.flops else "not counted" if entry.uncounted else "",
        seconds_text(entry.seconds),
        shown.file_name(entry.source) if entry.source else entry.reason or "undecided",
    )
