"""A tuned policy beside its neighbours, the whole trade-off as rows, and both as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from attrs import asdict

from policylang.language.shown import format_quantity, shortened
from policylang.report.diagnostics import render_json
from policylang.report.layout import table
from policylang.tuning.evaluation import Candidate, Tuned
from policylang.tuning.tuned_policy import TunedPolicy, besides_words, bound_words, budget_words, memory_of, step_words


def account_text(found: TunedPolicy) -> str:
    """No line end at the end."""
    tuned, subject = found.tuned, found.subject
    path = f", path {subject.path}" if subject.path else ""
    heading = f"tuned for {subject.called} on {subject.device}{path}: {budget_words(tuned.budget)}"
    sides = [("this policy", tuned.chosen), ("less memory", tuned.less), ("more memory", tuned.more)]
    shown = [(name, each) for name, each in sides if each is not None]
    rows: list[tuple[str, ...]] = [("", *(name for name, _ in shown))]
    for name, words in figure_rows(tuned):
        cells = [words(each) for _, each in shown]
        if any(cell not in ("", "0 B", "0 s") for cell in cells) or name in ("peak", "saved", "recomputed"):
            rows.append((name, *cells))
    below = []
    if tuned.budget.figure != "recompute time":
        left = int(tuned.budget.limit) - memory_of(tuned.chosen, tuned)
        room = f"{format_quantity(left, 'bytes')} of the budget are left"
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
        ("peak", lambda each: format_quantity(besides.on(each.peak), "bytes"))
    ]
    if besides.on(0) or besides.reserve:
        rows.append(("of the graph", lambda each: format_quantity(each.peak, "bytes")))
    return [
        *rows,
        ("saved", lambda each: format_quantity(each.saved, "bytes")),
        ("offloaded", lambda each: format_quantity(each.offloaded, "bytes")),
        (
            "recomputed",
            lambda each: f"{format_quantity(each.recompute, 'seconds')} ({share_text(each.recompute, tuned)})",
        ),
        ("copies", lambda each: format_quantity(each.copies, "seconds")),
        ("exposed", lambda each: format_quantity(each.exposed, "seconds")),
        ("step", step_words),
    ]


def share_text(seconds: float, tuned: Tuned) -> str:
    """A share of the forward's time: ``3.1%``."""
    return format_quantity(seconds / tuned.forward, "fraction") if tuned.forward else "-"


_LONGEST = 96


def trade_off_text(found: TunedPolicy, *, chosen: bool) -> str:
    """One row per policy, by rising memory; ``chosen`` marks the tuned one. No line end at the end."""
    tuned = found.tuned
    moved = any(each.offloaded for each in tuned.table)
    waits = any(each.exposed for each in tuned.table)
    figures = dict(figure_rows(tuned))
    names = [
        "peak",
        "saved",
        *("offloaded",)[:moved],
        "recomputed",
        *("copies",)[:moved],
        *("exposed",)[:waits],
        "step",
    ]
    at = names.index("recomputed") + 1
    head = ["", *names[:at], "of the forward", *names[at:], "rules that the row above lacks"]
    rows = [head]
    for each, phrase in zip(tuned.table, distinctions(tuned.table), strict=True):
        cells = [figures[name](each) for name in names]
        cells[at - 1 : at] = format_quantity(each.recompute, "seconds"), share_text(each.recompute, tuned)
        rows.append(["->" if chosen and each == tuned.chosen else "", *cells, shortened(phrase, _LONGEST)])
    subject = found.subject
    heading = (
        f"{len(tuned.table)} policies for {subject.called} on {subject.device}, none better in both memory and time"
    )
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


VERSION = 1


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
        "policy": found.text if chosen else None,
        "diagnostics": json.loads(render_json(found.notes))["diagnostics"],
    }
    return json.dumps(document, indent=2, allow_nan=False)


def candidate_data(each: Candidate | None, tuned: Tuned) -> dict[str, Any] | None:
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
