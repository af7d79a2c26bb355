"""Two policies over one another on one page: their memory, and the decisions that differ by line, module and block.

Like the page of a plan it needs nothing else, and no script but for the cursor in the chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from policylang.language.wording import Measured, counted, figure, file_name, folded_names, listed, uncounted_text
from policylang.planning.inspection.breakdown import Breakdown, operator_of, within_block
from policylang.planning.inspection.compare import OUTSIDE, Change, Decider, PlanComparison, compare
from policylang.planning.inspection.peak_values import values_at_peak
from policylang.planning.inspection.time_prices import same_time
from policylang.planning.plan import Plan
from policylang.report.markup import Markup, element, joined, rows_table
from policylang.report.plan.html import filled, subtitle
from policylang.report.plan.page_data import memory_data
from policylang.report.plan.sections import at_peak_section, memory_section, tile
from policylang.report.plan_comparison import device_of, order_change_lines
from policylang.report.report_text import bytes_text

_SCRIPTS = ("figures.js", "memory.js")
_MOST_NAMES = 8
_PLACES_HEAD = ("decisions", "bytes", "operator", "module", "blocks", "values")
_BLOCKS_HEAD = ("block", "decisions", "bytes")


def comparison_page(old: Breakdown, new: Breakdown, graph: str) -> str:
    """The whole page. ``graph`` is what it calls the graph."""
    found = compare(old.plan, new.plan)
    words = [f"before: {old.plan.policy.name}", f"after: {new.plan.policy.name}"]
    memory = memory_data([(words[1], new.plan, new.under), (words[0], old.plan, old.under)])
    values = {
        "title": escape(f"{old.plan.policy.name} → {new.plan.policy.name} on {graph}"),
        "subtitle": escape(subtitle(new.plan)),
        "tiles": _tiles(old, new, found),
        "memory": memory_section(memory, [new.under.peak, old.under.peak]),
        "changes": _changes(found, old.plan, new.plan),
        "before": at_peak_section(values_at_peak(old)),
        "after": at_peak_section(values_at_peak(new)),
    }
    return filled("comparison.html", values, {"memory": memory}, _SCRIPTS)


def _tiles(old: Breakdown, new: Breakdown, found: PlanComparison) -> Markup:
    was, now = old.under, new.under
    kept = (was.amounts.saved_bytes, now.amounts.saved_bytes)
    moved = (was.amounts.offloaded_bytes, now.amounts.offloaded_bytes)
    return joined(
        tile("decisions that differ", f"{found.changed:,}", f"of {found.decisions:,}"),
        _moved("kept for the backward", *kept, "bytes"),
        _moved("computed twice", was.amounts.recomputed_flops, now.amounts.recomputed_flops, "flops"),
        *_times(found),
        _moved("simulated peak", was.peak.bytes, now.peak.bytes, "bytes"),
        *([_moved("offloaded", *moved, "bytes")] if any(moved) else []),
        *_uncounted(found),
    )


def _times(found: PlanComparison) -> list[Markup]:
    old, new = found.old, found.new
    if old.recomputed_seconds is None or new.recomputed_seconds is None:
        return []
    where = device_of(found)
    steps = old.step_seconds or 0.0, new.step_seconds or 0.0
    return [
        _moved("recomputed time", old.recomputed_seconds, new.recomputed_seconds, "seconds"),
        _moved("step time", *steps, "seconds", "; ".join(where.split("\n"))),
    ]


def _uncounted(found: PlanComparison) -> list[Markup]:
    sides = (("before", found.old.uncounted), ("after", found.new.uncounted))
    said = [f"{word} {uncounted_text(calls)}" for word, calls in sides if calls]
    return [tile("computed twice without FLOPs", "", "; ".join(said))] if said else []


def _moved(name: str, before: float, after: float, unit: Measured, more: str = "") -> Markup:
    same = same_time(before, after) if unit == "seconds" else before == after
    sign = "+" if after > before else "−"
    change = f"{sign}{figure(abs(after - before), unit)}, from {figure(before, unit)}"
    return tile(name, figure(after, unit), "; ".join(filter(None, ("as before" if same else change, more))))


def _changes(found: PlanComparison, old: Plan, new: Plan) -> Markup:
    order = joined(*(element("p", line) for line in order_change_lines(found.order)))
    if not found.changes:
        return joined(element("p", f"None: {found.decisions:,} decisions are the same.", class_="hint"), order)
    by_line = (_change(change, old, new) for change in found.changes)
    hint = "Each line that decides otherwise now, and what it decides. Open a line to see where."
    return joined(order, element("p", hint, class_="hint"), *by_line, _by_block(found, old, new))


def _change(change: Change, old: Plan, new: Plan) -> Markup:
    amount = sum(_value(name, old, new)[0] for name in change.names)
    decisions = counted(len(change.names), "decision")
    summary = element(
        "summary",
        element("span", f"{_action(change.old)} → {_action(change.new)}", class_="label"),
        element("span", element("b", decisions), f", {bytes_text(amount)}", class_="amount"),
        element("span", _side("before", change.old), _side("after", change.new), class_="amount sides"),
    )
    places = rows_table(_PLACES_HEAD, _places(change, old, new), (0, 1), "by operator and module")
    return element("details", summary, places, class_="group change")


def _action(side: Decider) -> str:
    return side.action or "no such node"


def _side(when: str, side: Decider) -> Markup:
    source = f"{file_name(side.source)}: " if side.source is not None else ""
    return element("span", element("i", when), f" {source}{side.text}")


def _places(change: Change, old: Plan, new: Plan) -> list[tuple[str, ...]]:
    """The nodes of a change by operator and by module within the block."""
    groups: dict[tuple[str, str], list[tuple[str, int, str]]] = {}
    for name in change.names:
        size, operator, module, block = _value(name, old, new)
        groups.setdefault((operator, module), []).append((name, size, block))
    return [
        (
            f"{len(values):,}",
            bytes_text(sum(size for _, size, _ in values)),
            operator,
            module,
            _blocks([block for _, _, block in values]),
            listed([name for name, _, _ in values], _MOST_NAMES),
        )
        for (operator, module), values in groups.items()
    ]


def _value(name: str, old: Plan, new: Plan) -> tuple[int, str, str, str]:
    """Bytes, operator, module within its block, and block, of the plan that has it."""
    plan = new if name in new.facts.index else old
    facts, row = plan.facts, plan.facts.index[name]
    block = plan.block_of[row] if plan.block_names else -1
    place = plan.block_names[block] if block >= 0 else ""
    rows = (row, *facts.followers.get(row, ()))
    size = max(facts.bytes[each] for each in rows)
    return size, operator_of(facts, row), within_block(facts.modules[row], place), place or OUTSIDE


def _blocks(blocks: Sequence[str]) -> str:
    inside = [block for block in dict.fromkeys(blocks) if block != OUTSIDE]
    parts = ([folded_names(inside)] if inside else []) + ([OUTSIDE] if OUTSIDE in blocks else [])
    return "; ".join(parts)


def _by_block(found: PlanComparison, old: Plan, new: Plan) -> Markup:
    """How much changes in each block, those alike on one line."""
    amounts: dict[str, list[int]] = {}
    for change in found.changes:
        for name in change.names:
            size, _, _, block = _value(name, old, new)
            amounts.setdefault(block, []).append(size)
    alike: dict[tuple[int, int], list[str]] = {}
    for block, sizes in amounts.items():
        alike.setdefault((len(sizes), sum(sizes)), []).append(block)
    rows = [
        (_blocks(blocks) + (f" ×{len(blocks)}" if len(blocks) > 1 else ""), f"{count:,}", bytes_text(size))
        for (count, size), blocks in alike.items()
    ]
    return rows_table(_BLOCKS_HEAD, rows, (1, 2), "by block, each")
