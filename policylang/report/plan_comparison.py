"""Text of ``policylang show``, ``tune`` and ``diff``: a graph, a trade-off and the difference of two plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from attrs import asdict, evolve

from policylang.graph.blocks import BlockTable
from policylang.graph.facts import Facts
from policylang.language import shown
from policylang.planning.inspection import compare
from policylang.planning.inspection.breakdown import OUTSIDE as OUTSIDE_BLOCKS
from policylang.planning.inspection.worth import same_time
from policylang.report.diagnostics import compared_rows, render_json
from policylang.report.plan_json import pipeline_data
from policylang.report.plan_text import pipeline_text
from policylang.report.rendering import (
    bytes_text,
    code,
    device_text,
    exposed_text,
    seconds_text,
    table,
    times_text,
    words,
)
from policylang.tuning.evaluation import Candidate, Infeasible, Tuned
from policylang.tuning.tuned_policy import (
    TunedPolicy,
    besides_words,
    bound_words,
    budget_words,
    stages_words,
    step_words,
)

VERSION = 1
_COUNTS = ("forward", "backward", "bytes", "FLOPs")
_TIMES = ("time", "backward time")
_LONGEST_SHAPE = 24
_REGION = "region "
_READABLE = 27  # the width below which names of operators, modules and blocks make room for themselves
_NOTE = "bytes and FLOPs are those of the forward; a view has no bytes of its own"


def overview_text(name: str, facts: Facts, blocks: BlockTable, found: compare.GraphOverview) -> str:
    """The counts by block, by operator, and by module and operator."""
    timed = found.times is not None
    head = (*_COUNTS, *_TIMES) if timed else _COUNTS
    by_block = [(label, *_totals(each)) for label, each in _blocks(found)]
    by_operator = [(operator, *_totals(each)) for operator, each in found.operators]
    by_module: list[tuple[str, ...]] = [("module", "operator", "forward", "bytes", "FLOPs", *_TIMES[:timed])]
    before = None
    for module, operator, sums in found.modules:
        calls, _, size, flops, *seconds = _totals(sums)
        where = "" if module == before else module or "in no module"
        by_module.append((where, operator, calls, size, flops, *seconds[:1]))
        before = module
    times = [times_text(found.times)]
    if found.step is not None:
        exposed = exposed_text(found.step)
        step = shown.format_quantity(found.step.step, "seconds")
        times.append(f"as traced: a step of {step}, exposed {exposed if exposed != '-' else 'nothing'}")
    narrow = partial(table, ends=(0,), readable=_READABLE)
    totals = partial(narrow, right=range(1, len(head) + 1), spare=(2, 1))
    parts = [
        _graph_heading(name, facts, blocks, found),
        totals([("block", *head), *by_block]) if blocks.names else "",
        totals([("operator", *head), *by_operator]) if by_operator else "",
        narrow(by_module, range(2, len(by_module[0])), spare=(2,)) if found.modules else "",
        _uncounted(found),
        "\n".join(filter(None, times)),
        _NOTE if found.operators else "",
    ]
    return "\n\n".join(filter(None, parts))


def nodes_text(name: str, facts: Facts, blocks: BlockTable, found: compare.GraphOverview) -> str:
    """The nodes that were asked for, one a line."""
    total, times = found.total, found.times
    head = ("node", "operator", "module", "phase", "shape", "bytes", "FLOPs", *_TIMES[: times is not None])
    rows = [head]
    for row in found.rows:
        shape = shown.shortened("×".join(map(str, facts.shapes[row] or ())), _LONGEST_SHAPE)
        cells = (
            facts.names[row],
            facts.targets[row] or facts.ops[row],
            facts.modules[row] or facts.modules[facts.owners[row]],
            compare.PHASES[facts.phases[row]],  # type: ignore[index]
            f"{shape} {facts.dtypes[row]}".strip(),
            bytes_text(facts.bytes[row] or None),
            _flops(facts.flops[row], bool(facts.uncounted and facts.uncounted[row])),
        )
        rows.append((*cells, *([] if times is None else [seconds_text(times.seconds[row])])))
    flops = shown.format_quantity(total.flops, "flops")
    if total.uncounted_calls:
        flops = f"at least {flops}" if total.flops else "FLOPs not counted"
    times_of = (total.seconds, total.backward_seconds)
    took, backward = (f" in {shown.format_quantity(each, 'seconds')}" if each else "" for each in times_of)
    sums = (
        f"{shown.counted(total.forward, 'forward operator')} of {shown.format_quantity(total.bytes, 'bytes')} "
        f"and {flops}{took}, {total.backward:,} in the backward{backward}; {_NOTE}"
    )
    listing = table(rows, right=range(5, len(head)), ends=(2,), spare=(4, 3))
    parts = (_graph_heading(name, facts, blocks, found), listing, sums, _uncounted(found), times_text(times))
    return "\n\n".join(filter(None, parts))


def overview_json(name: str, facts: Facts, blocks: BlockTable, found: compare.GraphOverview) -> Iterator[str]:
    """One JSON document in pieces, a node a line."""
    head = {
        "version": VERSION,
        "graph": name,
        "kind": facts.kind.value,
        "torch": facts.torch_version,
        "device": None if found.times is None else found.times.device.name,
        "step_seconds": None if found.step is None else found.step.step,
        "exposed_seconds": None if found.step is None else found.step.exposed,
        "phases": dict(found.phases),
        "total": asdict(found.total),
        "uncounted_operators": found.uncounted,
        "blocks": [{"name": block, **asdict(sums)} for block, sums in found.blocks],
        "operators": [{"name": operator, **asdict(sums)} for operator, sums in found.operators],
        "modules": [{"module": module, "operator": target, **asdict(sums)} for module, target, sums in found.modules],
    }
    yield json.dumps(head, indent=2).removesuffix("\n}")
    yield ',\n  "nodes": ['
    before = "\n    "
    for entry in compare.entries(facts, blocks, found.rows, found.times):
        yield before + json.dumps(entry)
        before = ",\n    "
    yield "\n  ]\n}" if found.rows else "]\n}"


def _uncounted(found: compare.GraphOverview) -> str:
    """The operators that the FLOPs leave out."""
    if found.uncounted is None:
        return shown.UNCOUNTED_UNKNOWN
    return f"uncounted in the forward: {shown.uncounted_text(found.uncounted)}" if found.uncounted else ""


def _flops(flops: int, uncounted: bool) -> str:
    """A lower bound where something is left out."""
    if not flops:
        return "not counted" if uncounted else ""
    return f"≥ {shown.format_quantity(flops, 'flops')}" if uncounted else shown.format_quantity(flops, "flops")


def _graph_heading(name: str, facts: Facts, blocks: BlockTable, found: compare.GraphOverview) -> str:
    made_with = f", torch {facts.torch_version}" if facts.torch_version else ""
    phases = ", ".join(f"{count:,} {phase}" for phase, count in found.phases)
    chosen = "" if len(found.rows) == len(facts) else f"{shown.counted(len(found.rows), 'node')} asked for: "
    inside = shown.counted(len(blocks.names), "block") if blocks.names else "no blocks"
    if blocks.names and blocks.names[0].startswith(_REGION):
        inside += " (the model's own checkpoint regions)"
    return (
        f"{name}: {facts.kind.value} graph of {shown.counted(len(facts), 'node')}, {inside}{made_with}\n"
        f"{chosen}{phases or 'no nodes'}"
    )


def _blocks(found: compare.GraphOverview) -> Iterator[tuple[str, compare.Totals]]:
    """Neighbours of the same figures together."""

    def alike(block: tuple[str | None, compare.Totals]) -> object:
        """Sums of times differ by their rounding."""
        return block[0] is None, evolve(block[1], seconds=None, backward_seconds=None), _totals(block[1])

    for _, each in groupby(found.blocks, key=alike):
        names, (sums, *_) = zip(*each, strict=True)
        if names[0] is None:
            yield OUTSIDE_BLOCKS, sums
        else:
            yield shown.folded_names(names) + (f" ×{len(names)}, each" if len(names) > 1 else ""), sums


def _totals(sums: compare.Totals) -> tuple[str, ...]:
    return (
        f"{sums.forward:,}" if sums.forward else "",
        f"{sums.backward:,}" if sums.backward else "",
        bytes_text(sums.bytes or None),
        _flops(sums.flops, bool(sums.uncounted_calls)),
        *([] if sums.seconds is None else map(seconds_text, (sums.seconds, sums.backward_seconds))),
    )


def account_text(found: TunedPolicy) -> str:
    """No line end at the end."""
    tuned, subject = found.tuned, found.subject
    path = f", path {subject.path}" if subject.path else ""
    heading = f"tuned for {subject.called} on {subject.device}{path}: {budget_words(tuned.budget)}"
    if (staged := tuned.stages) is not None:
        return "\n\n".join((heading, pipeline_text(staged.pipeline, staged.figures), stages_words(staged)))
    sides = [("this policy", tuned.chosen), ("less memory", tuned.less), ("more memory", tuned.more)]
    present = [(name, each) for name, each in sides if each is not None]
    rows: list[tuple[str, ...]] = [("", *(name for name, _ in present))]
    for name, text_of in figure_rows(tuned):
        cells = [text_of(each) for _, each in present]
        if any(cell not in ("", "0 B", "0 s") for cell in cells) or name in ("peak", "saved", "recomputed"):
            rows.append((name, *cells))
    below = []
    if tuned.budget.figure != "recompute time":
        left = int(tuned.budget.limit) - tuned.besides.memory(tuned.chosen, tuned.budget)
        room = f"{shown.format_quantity(left, 'bytes')} of the budget are left"
        below.append(room if left else "the budget is used to the byte")
    if besides := besides_words(tuned.besides, subject.optimizer):
        below.append(f"in the peak beside the graph: {besides}")
    if bound := bound_words(tuned):
        below.append(f"bound: {bound}")
    return "\n\n".join(filter(None, (heading, table(rows, right=range(1, len(rows[0]))), "\n".join(below))))


def figure_rows(tuned: Tuned) -> list[tuple[str, Callable[[Candidate], str]]]:
    """The figures of a candidate by name, each as text."""
    besides = tuned.besides
    rows: list[tuple[str, Callable[[Candidate], str]]] = [
        ("peak", lambda each: shown.format_quantity(besides.on(each.peak), "bytes"))
    ]
    if besides.on(0) or besides.reserve:
        rows.append(("of the graph", lambda each: shown.format_quantity(each.peak, "bytes")))
    return [
        *rows,
        ("saved", lambda each: shown.format_quantity(each.saved, "bytes")),
        ("offloaded", lambda each: shown.format_quantity(each.offloaded, "bytes")),
        (
            "recomputed",
            lambda each: f"{shown.format_quantity(each.recompute, 'seconds')} ({share_text(each.recompute, tuned)})",
        ),
        ("copies", lambda each: shown.format_quantity(each.copies, "seconds")),
        ("exposed", lambda each: shown.format_quantity(each.exposed, "seconds")),
        ("step", step_words),
    ]


def share_text(seconds: float, tuned: Tuned) -> str:
    """A share of the forward's time: ``3.1%``."""
    return shown.format_quantity(seconds / tuned.forward, "fraction") if tuned.forward else "-"


_LONGEST = 96


def trade_off_text(found: TunedPolicy, *, chosen: bool) -> str:
    """One row per policy, by rising memory; ``chosen`` marks the tuned one. No line end at the end."""
    tuned = found.tuned
    moved = any(each.offloaded for each in tuned.table)
    waits = any(each.exposed for each in tuned.table)
    figures = dict(figure_rows(tuned))
    last = (*("copies",)[:moved], *("exposed",)[:waits], "step")
    names = ["peak", "saved", *("offloaded",)[:moved], "recomputed", *last]
    at = names.index("recomputed") + 1
    head = ["", *names[:at], "of the forward", *names[at:], "rules that the row above lacks"]
    rows = [head]
    for each, phrase in zip(tuned.table, distinctions(tuned.table), strict=True):
        cells = [figures[name](each) for name in names]
        cells[at - 1 : at] = shown.format_quantity(each.recompute, "seconds"), share_text(each.recompute, tuned)
        rows.append(["->" if chosen and each == tuned.chosen else "", *cells, shown.shortened(phrase, _LONGEST)])
    subject = found.subject
    policies = f"{len(tuned.table)} policies for {subject.called} on {subject.device}"
    heading = f"{policies}, none better in both memory and time"
    spare = at + 1, head.index("step"), head.index("saved")
    return f"{heading}\n\n{table(rows, right=range(1, len(head) - 1), spare=spare, readable=36)}"


def distinctions(candidates: Sequence[Candidate]) -> list[str]:
    """For the first its rules; for each other the rules that the one before does not have, or else those it lacks."""
    found, before = [], list[str]()
    for each in candidates:
        lines = statements(each)
        new = [line for line in lines if line not in before]
        gone = [line for line in before if line not in lines]
        if len(lines) == 1:
            new = lines
        otherwise = "without " + "; ".join(gone) if gone else "the same rules in another order"
        found.append("; ".join(new) or otherwise)
        before = lines
    return found


def statements(each: Candidate) -> list[str]:
    """The rules of a candidate, a line each, without comments."""
    return [line.strip() for line in each.rules.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def tuned_json(found: TunedPolicy, *, chosen: bool = True) -> str:
    """Bytes are whole numbers, times seconds. ``limit`` is in bytes, of ``recompute time`` a fraction. Without a budget
    ``policy``, ``chosen``, ``less`` and ``more`` are null, as a neighbour is where there is none."""
    tuned, subject = found.tuned, found.subject
    document = {
        "version": VERSION,
        "graph": {
            "name": subject.graph or None,
            "kind": subject.kind,
            "nodes": subject.nodes,
            "fingerprint": subject.fingerprint,
        },
        "device": subject.device,
        "budget": asdict(tuned.budget) if chosen else None,
        "besides": asdict(tuned.besides),
        "forward_seconds": tuned.forward,
        "bound_seconds": tuned.bound if chosen else None,
        "chosen": candidate_data(tuned.chosen, tuned) if chosen else None,
        "less": candidate_data(tuned.less, tuned) if chosen else None,
        "more": candidate_data(tuned.more, tuned) if chosen else None,
        "table": [candidate_data(each, tuned) for each in tuned.table],
        **_staged_data(tuned),
        "policy": found.text if chosen else None,
        "diagnostics": json.loads(render_json(found.notes))["diagnostics"],
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _staged_data(tuned: Tuned) -> dict[str, Any]:
    """The data that a pipeline's plan has as well; ``alike`` has the best policy with the same rules in all stages."""
    found = tuned.stages
    if found is None:
        return {**pipeline_data(None, None), "alike": None}
    alike = None if found.alike is None else {"rules": found.alike.rules.splitlines(), "step_seconds": found.alike.step}
    return {**pipeline_data(found.pipeline, found.figures), "alike": alike}


def candidate_data(each: Candidate | None, tuned: Tuned | Infeasible) -> dict[str, Any] | None:
    if each is None:
        return None
    return {
        "rules": each.rules.splitlines(),
        "peak_bytes": tuned.besides.on(each.peak),
        "graph_peak_bytes": each.peak,
        "peak_at": each.peak_at,
        "saved_bytes": each.saved,
        "offloaded_bytes": each.offloaded,
        "recomputed_seconds": each.recompute,
        "exposed_seconds": each.exposed,
        "copies_seconds": each.copies,
        "step_seconds": each.step,
    }


RUN_VERSION = 1
_RUN_HEAD = ("", "planned", "measured", "difference")


def run_rows(run: Mapping[str, Any]) -> list[list[tuple[str, ...]]]:
    """The tables of a run that ``policylang.watch`` recorded: its figures, its lines, its waits and its blocks."""
    planned, measured = run["planned"] or {}, run["measured"]

    def row(label: str, before: float | None, now: float | None, unit: shown.Dimension) -> tuple[str, ...]:
        sides = ["-" if each is None else shown.format_quantity(each, unit) for each in (before, now)]
        change = f"{now / before - 1:+.1%}" if before and now is not None else "-"
        return label, *sides, change

    figures = [
        _RUN_HEAD,
        row("peak, weights and batch included", planned.get("peak_bytes"), measured["graph_bytes"], "bytes"),
        *([row("state of the optimizer", None, measured["state_bytes"], "bytes")] if measured["state_bytes"] else []),
        row("the most in any step", None, measured["peak_bytes"], "bytes"),
        *([row("reserved", None, reserved, "bytes")] if (reserved := measured["reserved_bytes"]) is not None else []),
        *([row("allocator retries", None, again, "number")] if (again := measured["allocator_retries"]) else []),
        row("step", planned.get("step_seconds"), measured["step_seconds"], "seconds"),
        row("exposed", planned.get("exposed_seconds"), measured["exposed_seconds"], "seconds"),
    ]
    kept = measured["saved_bytes_by_line"]
    lines = [
        row(f"{each['source']}  {shown.shortened(each['text'], _LONGEST_RULE)}", each["saved_bytes"], now, "bytes")
        for each in planned.get("lines", ())
        if (now := kept.get(each["source"])) or each["saved_bytes"]
    ]
    seconds = partial(shown.format_quantity, dimension="seconds")
    waits = [(each["name"], str(each["calls"]), seconds(each["seconds"])) for each in measured["waits"]]
    blocks = [(each["name"], seconds(each["forward_seconds"])) for each in measured["blocks"]]
    tables: list[list[tuple[str, ...]]] = [
        figures,
        [("line", "planned to save", "saved", "difference"), *lines],
        [("wait", "calls", "a step"), *waits],
        [("block", "forward"), *blocks],
    ]
    return [rows for rows in tables if len(rows) > 1]


def run_text(run: Mapping[str, Any]) -> str:
    """No line end at the end."""
    tables = (table(rows, right=range(1, len(rows[0]))) for rows in run_rows(run))
    return "\n\n".join(("\n".join((_run_heading(run), *run.get("notes", ()))), *tables))


def run_markdown(run: Mapping[str, Any]) -> str:
    lines = [f"**{words(_run_heading(run))}**"]
    for note in run.get("notes", ()):
        lines += ["", words(note)]
    for head, *rows in run_rows(run):
        lines += ["", _markdown_row(head), f"| --- |{' ---: |' * (len(head) - 1)}"]
        lines += [_markdown_row((code(first), *rest)) for first, *rest in rows]
    return "\n".join(lines)


def _run_heading(run: Mapping[str, Any]) -> str:
    return f"{run['policy']}: {shown.counted(run['steps'], 'step')} on {run['device']}, torch {run['torch']}"


_MOST_NAMES = 6
_LONGEST_RULE = 72
_HEAD = ("", "before", "after", "change")


def comparison_text(found: compare.PlanComparison) -> str:
    """No line end at the end."""
    parts = [_heading(found)]
    parts += [
        f"{len(change.names):,}: {_action(change.old)} -> {_action(change.new)}, {_where(change)}\n"
        f"  before  {_decider(change.old)}\n"
        f"  after   {_decider(change.new)}\n"
        f"  nodes   {shown.listed(change.names, _MOST_NAMES)}"
        for change in found.changes
    ]
    parts.append("\n".join(order_change_lines(found.order)))
    parts.append("\n".join((table([_HEAD, *_figures(found)], right=range(1, 4)), *_notes(found))))
    if expected := compared_rows(found.old.expectations, found.new.expectations):
        parts.append(table([("expectation", "before", "after"), *expected], right=range(0)))
    return "\n\n".join(filter(None, parts))


def comparison_markdown(found: compare.PlanComparison) -> str:
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


def comparison_json(found: compare.PlanComparison) -> str:
    data = asdict(found)
    for change in data["changes"]:
        change["blocks"] = dict(change["blocks"])
    return json.dumps({"version": 1, "same": found.same, "changed": found.changed, **data}, indent=2)


def _heading(found: compare.PlanComparison) -> str:
    decisions = f"{found.decisions:,} decisions"
    if not found.changes:
        return f"no decision changes: {decisions} are the same"
    return f"{found.changed:,} of {decisions} change"


def _action(side: compare.Decider) -> str:
    return side.action or "no such node"


def _decider(side: compare.Decider) -> str:
    return (f"{side.source}: " if side.source is not None else "") + shown.shortened(side.text, _LONGEST_RULE)


def _where(change: compare.Change) -> str:
    """``2 each in layers.0 and the next 31 blocks; 1 outside every block``."""
    said = []
    for name, blocks, count in compare.folded(change.blocks):
        if name == "outside every block":
            said.append(f"{count} {name}")
        elif blocks == 1:
            said.append(f"{count} in {name}")
        else:
            said.append(f"{count} each in {name} and {blocks - 1} more {'block' if blocks == 2 else 'blocks'}")
    return "; ".join(said)


def _figures(found: compare.PlanComparison) -> list[tuple[str, ...]]:
    old, new = found.old, found.new
    return [
        _figure("saved", old.saved_bytes, new.saved_bytes, "bytes"),
        _figure("recomputed", old.recomputed_flops, new.recomputed_flops, "flops"),
        *_times(old, new),
        _figure("peak", old.peak_bytes, new.peak_bytes, "bytes"),
        *([] if (order := found.order) is None else _order(order)),
    ]


def _order(found: compare.OrderChanges) -> list[tuple[str, ...]]:
    old, new = found.old, found.new
    return [
        _figure("collectives", old.collectives, new.collectives, "number"),
        _figure("buckets", old.buckets, new.buckets, "number"),
        _figure("in flight at most", old.in_flight_bytes, new.in_flight_bytes, "bytes"),
    ]


def order_change_lines(found: compare.OrderChanges | None) -> list[str]:
    """``3 collectives start elsewhere: bucket1, …``; nothing where neither policy schedules."""
    if found is None:
        return []
    changes = (
        (found.joined, "joined into buckets"),
        (found.parted, "in a bucket no more"),
        (found.starts, "started elsewhere"),
        (found.awaited, "awaited elsewhere"),
    )
    named = ((shown.counted(len(names), "collective"), what, names) for names, what in changes if names)
    said = [f"{count} {what}: {shown.listed(names, _MOST_NAMES)}" for count, what, names in named]
    return said or ["no collective runs elsewhere"]


def _times(old: compare.Figures, new: compare.Figures) -> list[tuple[str, ...]]:
    """Empty unless both have a device; exposed time has a row if there is any."""
    sides = old.recomputed_seconds, new.recomputed_seconds, old.step_seconds, new.step_seconds
    if any(each is None for each in sides):
        return []
    before, after, step_before, step_after = (each or 0.0 for each in sides)
    step = _figure("step time", step_before, step_after, "seconds")
    rows = [_figure("recomputed time", before, after, "seconds"), step]
    if old.exposed_seconds or new.exposed_seconds:
        rows.append(_figure("exposed", old.exposed_seconds or 0.0, new.exposed_seconds or 0.0, "seconds"))
    return rows


def _figure(label: str, old: float, new: float, unit: shown.Dimension) -> tuple[str, ...]:
    same = same_time(old, new) if unit == "seconds" else old == new
    change = "=" if same else ("+" if new > old else "-") + shown.format_quantity(abs(new - old), unit)
    return label, shown.format_quantity(old, unit), shown.format_quantity(new, unit), change


def _notes(found: compare.PlanComparison) -> list[str]:
    """Notes on the figures: what they leave out, and of which device their times are."""
    sides = ("before", found.old), ("after", found.new)
    notes = []
    if unsettled := [word for word, side in sides if not side.settled]:
        notes.append(f"{shown.joined(unsettled)}: without what is left to PyTorch's partitioner")
    uncounted = ((word, shown.uncounted_text(side.uncounted)) for word, side in sides if side.uncounted)
    if calls := [f"{word}: recomputed without {text}" for word, text in uncounted]:
        notes.append("\n".join(calls))
    if _times(found.old, found.new):
        devices = [device_text(side.device or "", side.priced_by_bytes, f"times {word}") for word, side in sides]
        alike = (found.old.device, found.old.priced_by_bytes) == (found.new.device, found.new.priced_by_bytes)
        notes.append(devices[0].replace("times before", "times", 1) if alike else "\n".join(devices))
    return notes


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _markdown_side(side: compare.Decider) -> str:
    place = f" {words(side.source)}" if side.source is not None else ""
    return f"**{_action(side)}**{place} {code(shown.shortened(side.text, _LONGEST_RULE))}"
