"""A plan as one HTML page that needs nothing else: no server, no network, no fonts or scripts from elsewhere."""

from __future__ import annotations

import json
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from policylang.graph.facts import GraphKind
from policylang.language.diagnostics import Source
from policylang.language.shown import counted, format_quantity, printable, uncounted_text
from policylang.language.syntax import Policy
from policylang.planning.inspection import breakdown
from policylang.planning.inspection.communication import Communication, as_decided, bucket_statements
from policylang.planning.inspection.worth import Worth
from policylang.planning.plan import Plan
from policylang.planning.schedule import host_memory
from policylang.planning.value_outcome import Why
from policylang.report import plan_text, rendering
from policylang.report.plan_json import worth_data
from policylang.report.rendering import Markup, element, fragment, rows_table
from policylang.simulation.memory import Peak


def _page_data(found: breakdown.Breakdown, worth: Sequence[Worth], graph: str) -> dict[str, Any]:
    """``graph`` is what the page calls the graph. Lines count from 1, all else from 0."""
    plan = found.plan
    policy = plan.policy
    rows = [row for row in plan.facts.forward if plan.decisions[row] is not None]
    sources = _sources(policy)
    of_file = {source: at for at, source in enumerate(sources)}
    place = {row: at for at, row in enumerate(rows)}
    margins = {each.rule: each for each in worth}
    scheduling = (*(policy.rewrites[at] for at in bucket_statements(policy)), *policy.scheduling)
    order = () if found.communication is None else zip(scheduling, found.communication.lines, strict=True)
    return {
        "graph": graph,
        "device": None if plan.shown_times is None else plan.shown_times.device.name,
        "memory": _memory_data(found),
        "sources": [{"name": each.name, "lines": each.text.replace("\r\n", "\n").split("\n")} for each in sources],
        "rules": [
            {
                "text": outcome.rule.text,
                "source": outcome.rule.source,
                "file": of_file.get(outcome.rule.span.source, -1),
                "line": outcome.rule.span.line,
                "end": outcome.rule.span.end_line,
                "matched": [place[row] for row in outcome.matched if row in place],
                "decided": len(outcome.decided),
                "worth": worth_data(margins.get(index)),
            }
            for index, outcome in enumerate(plan.rules)
        ],
        "notes": [
            {
                "file": of_file.get(statement.span.source, -1),
                "line": statement.span.line,
                "note": f"{len(line.moved):,} of {len(line.matched):,}" if line.matched else "no match",
                "title": plan_text.said_of(line),
            }
            for statement, line in order
        ],
        "nodes": _nodes(found, place),
    }


def _sources(policy: Policy) -> list[Source]:
    """The files of the policy's statements, the user's before those of the bundled library."""
    spans = [rule.span for rule in policy.rules]
    spans += [each.span for each in (policy.blocks, policy.undecided, *policy.statements) if each is not None]
    found = dict.fromkeys(span.source for span in spans if span.source.text)
    return sorted(found, key=lambda source: source.name.startswith("<") and source.name != "<policy>")


def _nodes(found: breakdown.Breakdown, place: Mapping[int, int]) -> dict[str, Any]:
    """The columns of the decided nodes, which ``place`` numbers."""
    plan, facts, rows = found.plan, found.plan.facts, list(place)
    decisions = [decision for row in rows if (decision := plan.decisions[row]) is not None]
    return {
        "name": [facts.names[row] for row in rows],
        "operator": _coded(breakdown.operator_of(facts, row) for row in rows),
        "module": _coded(facts.modules[row] or facts.modules[facts.owners[row]] for row in rows),
        "shape": _coded("×".join(map(str, facts.shapes[row] or ())) for row in rows),
        "dtype": _coded(facts.dtypes[row] for row in rows),
        "bytes": [facts.bytes[row] for row in rows],
        "flops": [facts.flops[row] for row in rows],
        "seconds": [] if plan.shown_times is None else [plan.shown_times.seconds[row] for row in rows],
        "uncounted": _coded(facts.uncounted[row] if facts.uncounted else "" for row in rows),
        "owner": [place.get(facts.owners[row], at) for at, row in enumerate(rows)],
        "fate": _coded("" if (outcome := found.outcomes[row]) is None else outcome.word for row in rows),
        "action": _coded(decision.word for decision in decisions),
        "rule": [-1 if decision.rule is None else decision.rule for decision in decisions],
        "always": [int(decision.why is Why.ALWAYS) for decision in decisions],
        "reason": _coded(decision.reason for decision in decisions),
    }


def _coded(values: Iterable[Hashable]) -> dict[str, Any]:
    """A column with few distinct values: those, and for each row the number of its value."""
    known: dict[Hashable, int] = {}
    codes = [known.setdefault(value, len(known)) for value in values]
    return {"values": list(known), "codes": codes}


def _memory_data(found: breakdown.Breakdown) -> dict[str, Any]:
    """Two timelines over one axis, operators in the order of their first runs, each with the most alive until it runs.
    Nodes that only one of the two has, as buckets, keep their place in its order."""
    sides = (("peak under the policy", found.under), ("nothing recomputed", found.without))
    orders = [_first_runs(found.plan, scenario) for _, scenario in sides]
    host = host_memory(found.under.facts, found.under.schedule) or [0]
    axis = _merged(*([name for name, _, _ in order] for order in orders))
    known = {name: (half, block) for order in reversed(orders) for name, half, block in order}
    place = {name: at for at, name in enumerate(axis)}
    return {
        "names": axis,
        "backward": [known[name][0] for name in axis],
        "block": _coded(known[name][1] for name in axis),
        "resident": max(scenario.timeline.resident for _, scenario in sides),
        "curves": [{"name": name, "moments": _curve(each, place, each.timeline.live)} for name, each in sides],
        "host": _curve(found.under, place, [host[step] for step in found.under.timeline.steps]) if max(host) else [],
    }


def _first_runs(plan: Plan, scenario: breakdown.Scenario) -> list[tuple[str, int, str]]:
    """Name, phase and block of each operator that runs: in the order of the graph, forward before backward; under
    scheduling lines in their order."""
    facts, timeline = scenario.facts, scenario.timeline
    halves = {row: timeline.backward[step] for step, row in enumerate(timeline.rows) if not timeline.again[step]}
    flat = facts.kind is GraphKind.FLAT
    own = plan if plan.order is None or facts is plan.facts else plan.order
    rows = sorted(halves, key=lambda row: (0 if flat else halves[row], row)) if own is plan else list(halves)
    names = (*own.block_names, "")
    return [(facts.names[row], halves[row], names[own.block_of[row] if own.block_names else -1]) for row in rows]


def _merged(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Each name once: those of the first order in it, others before the next name that both have."""
    known, there = set(first), set(second)
    ahead: dict[str, list[str]] = {}
    waiting: list[str] = []
    for name in second:
        if name in known:
            ahead[name], waiting = waiting, []
        else:
            waiting.append(name)
    return [each for name in first for each in (*(ahead[name] if name in there else ()), name)] + waiting


def _curve(scenario: breakdown.Scenario, place: dict[str, int], live: Sequence[int]) -> list[int]:
    """``live``: by entry of the timeline."""
    timeline, facts = scenario.timeline, scenario.facts
    moments = array("q", [-1]) * len(place)
    most = 0
    for step, row in enumerate(timeline.rows):
        most = max(most, live[step])
        if not timeline.again[step]:
            moments[place[facts.names[row]]] = most
            most = 0
    before = timeline.resident if live is timeline.live else 0
    for at, moment in enumerate(moments):
        if moment < 0:
            moments[at] = before
        before = moments[at]
    return list(moments)


_WIDTH, _HEIGHT = 1000, 1000
_MOST_POINTS = 1000
_MOST_PARTS = 6
_TICKS = 4


def memory_chart(memory: dict[str, Any], peaks: Sequence[Peak]) -> Markup:
    """The curves of :func:`_memory_data` over their axis, the second one dashed; ``peaks`` are theirs."""
    (first, second), host = (curve["moments"] for curve in memory["curves"]), memory["host"]
    length, resident = len(first), memory["resident"]
    if not length:
        return element("p", "Nothing runs in this graph.")
    most = max(1, resident, *first, *second, *host)
    tick = 1 << max(0, int(most / _TICKS).bit_length() - 1)  # a power of two: labels in KiB, MiB and GiB are whole
    ceiling = -(-most // tick) * tick
    ticks = range(0, ceiling + 1, tick)
    runs = _runs(memory["backward"])
    said = [
        f"{curve['name']}: {format_quantity(peak.bytes, 'bytes')} at {peak.at or 'the beginning'}."
        for curve, peak in zip(memory["curves"], peaks, strict=True)
    ]
    said.append(f"{format_quantity(resident, 'bytes')} are there before the first operator.")
    svg = element(
        "svg",
        element("title", "Memory over the step", id="chart-title"),
        element("desc", " ".join(said), id="chart-desc"),
        *(_level(value / ceiling, "grid") for value in ticks),
        element("path", class_="second area", d=_outline(second, ceiling, closed=True)),
        element("path", class_="first area", d=_outline(first, ceiling, closed=True)),
        element("path", class_="first edge", d=_outline(first, ceiling)),
        element("path", class_="second edge", d=_outline(second, ceiling)),
        *([element("path", class_="host edge", d=_outline(host, ceiling))] if host else []),
        _level(resident / ceiling, "resident"),
        *_partings(runs, length),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        tabindex="0",
        aria_labelledby="chart-title chart-desc",
    )
    top = max(range(length), key=first.__getitem__)
    place = f"left:{_percent((top + 0.5) / length)};top:{_percent(1 - first[top] / ceiling)}"
    places = ((format_quantity(value, "bytes"), f"top:{_percent(1 - value / ceiling)}") for value in ticks)
    labels = (element("span", text, style=style) for text, style in places)
    halves = (element("span", "backward" if half else "forward", style=f"flex:{many} 1 0") for half, many in runs)
    plot = fragment(
        element("div", *labels, class_="ticks", aria_hidden="true"),
        element("div", svg, element("i", class_="peak", style=place), class_="area"),
        element("div", *halves, class_="parts", aria_hidden="true"),
    )
    names = [curve["name"] for curve in memory["curves"]]
    keys = [("first", names[0], peaks[0].bytes), ("second", names[1], peaks[1].bytes)]
    keys += [("host", "on the host", max(host))] if host else []
    legend = (
        element("span", element("i", class_=f"key {key}"), f"{name}: ", element("b", format_quantity(amount, "bytes")))
        for key, name, amount in (*keys, ("resident", "parameters, buffers, inputs", resident))
    )
    told = element("span", class_="told", role="status")
    return fragment(element("div", plot, class_="plot"), element("div", *legend, told, class_="legend"))


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _level(share: float, kind: str) -> Markup:
    y = f"{_HEIGHT * (1 - share):.1f}"
    return element("line", class_=kind, x1=0, x2=_WIDTH, y1=y, y2=y)


def _outline(moments: Sequence[int], ceiling: int, *, closed: bool = False) -> str:
    """At most so many points, each the most that is alive among its operators."""
    length = len(moments)
    width = -(-length // _MOST_POINTS)
    points = []
    for start in range(0, length, width):
        at = max(range(start, min(length, start + width)), key=moments.__getitem__)
        points.append(((at + 0.5) / length, 1 - moments[at] / ceiling))
    points = [(0.0, points[0][1]), *points, (1.0, points[-1][1])]
    if closed:
        points = [(0.0, 1.0), *points, (1.0, 1.0)]
    return "M" + "L".join(f"{_WIDTH * x:.1f},{_HEIGHT * y:.1f}" for x, y in points) + ("Z" if closed else "")


def _runs(backward: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of forward and of backward with their lengths. If there are very many: the first, and the others as one."""
    runs = [(half, sum(1 for _ in each)) for half, each in groupby(backward)]
    return runs if len(runs) <= _MOST_PARTS else [runs[0], (1, sum(length for _, length in runs[1:]))]


def _partings(runs: Sequence[tuple[int, int]], length: int) -> list[Markup]:
    found, at = [], 0
    for _, many in runs[:-1]:
        at += many
        x = f"{_WIDTH * at / length:.1f}"
        found.append(element("line", class_="parting", x1=x, x2=x, y1=0, y2=_HEIGHT))
    return found


def _tile(name: str, amount: str, rest: str) -> Markup:
    """One figure at the head of a page."""
    parts = (element("dd", amount, class_="big"), element("dd", rest, class_="small"))
    return element("div", element("dt", name), *parts)


def _tiles(found: breakdown.Breakdown) -> Markup:
    under, without, plan = found.under, found.without, found.plan
    amounts, time = under.amounts, under.time
    kept, peak, flops = amounts.saved_bytes, under.peak.bytes, amounts.recomputed_flops
    of_kept = f"{_share(kept, without.amounts.saved_bytes)} of {rendering.bytes_text(without.amounts.saved_bytes)}"
    of_peak = f"{_share(peak, without.peak.bytes)} of {rendering.bytes_text(without.peak.bytes)}; at {under.peak.at}"
    of_flops = f"{_share(flops, found.forward_flops)} of the forward's {format_quantity(found.forward_flops, 'flops')}"
    made = [
        _tile("kept for the backward", rendering.bytes_text(kept), f"{of_kept} without recomputation"),
        _tile("computed twice", format_quantity(flops, "flops"), of_flops if found.forward_flops else ""),
    ]
    if time is not None and without.time is not None:
        share = ""
        if time.forward:
            part, forward = format_quantity(time.recomputed / time.forward, "fraction"), time.forward
            share = f"{part} of the forward's {format_quantity(forward, 'seconds')}"
        price = f", at a price of {price} of peak" if (price := rendering.price_text(found.seconds_per_gib)) else ""
        rest = [f"{format_quantity(without.time.step, 'seconds')} without recomputation"]
        rest += [f"exposed {rendering.exposed_text(time)}"] if time.exposed else []
        rest.append(rendering.plan_times_text(plan))
        made.append(_tile("recomputed time", format_quantity(time.recomputed, "seconds"), share + price))
        made.append(_tile("step time", format_quantity(time.step, "seconds"), "; ".join(rest)))
    made.append(_tile("simulated peak", rendering.bytes_text(peak), of_peak))
    if amounts.offloaded:
        where = "on the host between forward and backward, beside what is kept"
        told = f"{counted(amounts.offloaded, 'value')} {where}"
        made.append(_tile("offloaded", rendering.bytes_text(amounts.offloaded_bytes), told))
    if amounts.open_bytes:
        what = "counted as kept: its min-cut may recompute it"
        made.append(_tile("left to PyTorch", rendering.bytes_text(amounts.open_bytes), what))
    if found.uncounted:
        lost = counted(sum((found.uncounted_again or {}).values()), "call")
        told = f"{uncounted_text(found.uncounted)}; {lost} recomputed"
        made.append(_tile("without FLOPs", counted(len(found.uncounted), "operator"), told))
    if found.notes:
        made.append(_tile("about the figures", counted(len(found.notes), "note"), "; ".join(found.notes)))
    if plan.expectations:
        held = sum(each.status == "held" for each in plan.expectations)
        told = "; ".join(
            f"{each.text.removeprefix('expect ')}: "
            + ("open, PyTorch decides" if each.status == "deferred" else f"{each.status}, {each.found}")
            for each in plan.expectations
        )
        made.append(_tile("expectations held", f"{held} of {len(plan.expectations)}", told))
    return fragment(*made)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else ""


def _at_peak_section(found: breakdown.PeakValues) -> Markup:
    """All that is alive at the peak by line, and the largest values of it."""
    if not found.values:
        return element("p", "Nothing takes memory.", class_="hint")
    values = [plan_text.value_row(each, found) for each in found.values]
    if found.rest:
        rest = f"and {counted(found.rest, 'smaller value')}"
        share = format_quantity(found.rest_bytes / found.bytes, "fraction")
        values.append((rendering.bytes_text(found.rest_bytes), share, rest, *[""] * (len(plan_text.VALUES_HEAD) - 3)))
    largest = counted(len(found.values), "largest value")
    shares = (plan_text.share_row(each, found) for each in found.shares)
    by_line = rows_table(plan_text.SHARES_HEAD, shares, range(3), "by line")
    by_value = rows_table(plan_text.VALUES_HEAD, values, range(2), f"the {largest}")
    return fragment(element("p", plan_text.highest_moment_text(found), class_="hint"), by_line, by_value)


def _group(group: breakdown.BlockGroup, most_saved: int, most_flops: int) -> Markup:
    amounts = group.amounts
    times = element("span", f"×{group.times}", class_="times") if group.times > 1 else ""
    left = f", {rendering.bytes_text(amounts.open_bytes)} of it left to PyTorch" if amounts.open_bytes else ""
    moved = f", {rendering.bytes_text(amounts.offloaded_bytes)} offloaded" if amounts.offloaded else ""
    saved = f" saved in {counted(amounts.saved, 'value')}{left}{moved}"
    took = f" in {seconds}" if (seconds := rendering.seconds_text(amounts.recomputed_seconds)) else ""
    made = rendering.bytes_text(amounts.recomputed_bytes)
    again = f"{took} and {made} recomputed in {counted(amounts.recomputed, 'value')}"
    flops = format_quantity(amounts.recomputed_flops, "flops")
    bars = (
        _bar(amounts.saved_bytes / most_saved, "saved", rendering.bytes_text(amounts.saved_bytes), saved),
        _bar(amounts.recomputed_flops / most_flops, "recomputed", flops, again),
    )
    summary = element("summary", element("span", group.label, times, class_="label"), *bars)
    timed = amounts.recomputed_seconds is not None
    head = ("", "operator", "module", "shape", "bytes", "recomputed FLOPs", *("recompute time",)[:timed], "decided by")
    rows = []
    for each in group.entries:
        if not each.is_free:
            word, *cells, time, decided = plan_text.entry_row(each)
            fate = element("span", word, class_=f"fate fate-{word.replace(' ', '-')}")
            rows.append((fate, *cells, *(time,)[:timed], each.source or decided))
    values = rows_table(head, rows, range(4, len(head) - 1), f"the values of {group.label}")
    views = sum(each.count for each in group.entries if each.is_free)
    hidden = f"and {counted(views, 'view')} and parts that are recomputed at no cost"
    rest = element("p", hidden, class_="hint") if views else ""
    return element("details", summary, values, rest, class_="group")


def _bar(share: float, color: str, amount: str, rest: str) -> Markup:
    words = element("span", element("b", amount), rest, class_="amount")
    bar = element("span", element("i", style=f"width:{share:.1%};background:var(--{color})"), class_="bar")
    return element("span", words, bar, class_="measure")


def _order_section(found: Communication | None) -> Markup:
    """Empty for a plan without collectives that it orders or times."""
    if found is None:
        return Markup("")
    parts: list[Markup] = []

    def add(rows: Sequence[Sequence[str]], numbers: range, caption: str, notes: Iterable[str]) -> None:
        parts.extend([rows_table(rows[0], rows[1:], numbers, caption)] if rows else [])
        parts.extend(element("p", each, class_="hint") for each in notes)

    if found.orders:
        head = ("", "as traced", "as planned")
        add([head, *plan_text.total_rows(found)], range(1, 3), "before and after", plan_text.order_notes(found))
    if found.lines:
        rows = plan_text.line_rows(found.lines)
        add(rows, range(2, len(rows[0])), "what each scheduling line did", plan_text.line_notes(found.lines))
    rows = plan_text.exposed_rows(found)
    numbers = range(rows[0].index("collective")) if rows else range(0)
    add(rows, numbers, "the exposed collectives", filter(None, (plan_text.hidden_text(found),)))
    title = element("h2", "Compute and communication", id="order-title")
    return element("section", title, *parts, aria_labelledby="order-title")


_PIECES = Path(__file__).parent / "page"
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def plan_page(found: breakdown.Breakdown, worth: Sequence[Worth], graph: str) -> str:
    """The whole page. ``graph`` is the name of the graph on it.

    The figures, the chart and the blocks are written here and need no script; the values beside the policy are drawn in
    the browser from data that is embedded as JSON. Nothing of a policy or a graph is markup: text is escaped where it
    is written, and so is in the data every character that has a meaning in HTML or a script.
    """
    plan, facts = found.plan, found.plan.facts
    data, copies = _page_data(found, worth, graph), plan_text.copies_rows(found)
    subtitle = (
        f"{facts.kind.value} graph of {counted(len(facts), 'node')}",
        counted(sum(decision is not None for decision in plan.decisions), "forward value"),
        counted(len(plan.block_names), "block") if plan.block_names else "no blocks",
        f"torch {facts.torch_version}" if facts.torch_version else "",
        f"plan {plan.digest[:12]}",
    )
    saved = max((group.amounts.saved_bytes for group in found.groups), default=0) or 1
    recomputed = max((group.amounts.recomputed_flops for group in found.groups), default=0) or 1
    values = {
        "title": escape(f"{plan.policy.name} on {graph}"),
        "subtitle": escape(" · ".join(filter(None, subtitle))),
        "tiles": _tiles(found),
        "memory": fragment(
            memory_chart(data["memory"], [found.under.peak, found.without.peak]),
            *([rows_table(copies[0], copies[1:], range(1, 5), "copies to the host and back")] if copies else []),
        ),
        # without scheduling lines, the collectives of the graph as it is, where there is a device
        "order": _order_section(as_decided(plan) if plan.order is None else found.communication),
        "at_peak": _at_peak_section(breakdown.values_at_peak(found)),
        "blocks": fragment(*(_group(group, saved, recomputed) for group in found.groups)),
        "style": _piece("page.css"),
        "data": json.dumps(data, separators=(",", ":"), ensure_ascii=False).translate(_ESCAPES),
        "script": _piece("page.js"),
    }
    head, *rest = _piece("page.html").split("{{")
    parts = [head]
    for each in rest:
        name, _, after = each.partition("}}")
        parts += [values[name.strip()], after]
    return printable("".join(parts))


def _piece(name: str) -> str:
    return (_PIECES / name).read_text(encoding="utf-8")
