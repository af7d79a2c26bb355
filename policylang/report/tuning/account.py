"""What a tuned policy comes to, beside its neighbours on the trade-off, as text."""

from __future__ import annotations

from collections.abc import Callable

from policylang.language.figures import figure
from policylang.report.width import table
from policylang.tuning.evaluation import Candidate, Tuned
from policylang.tuning.tuned_policy import TunedPolicy, besides_words, bound_words, budget_words, memory_of, step_words


def account_text(found: TunedPolicy) -> str:
    """No line end at the end."""
    tuned, subject = found.tuned, found.subject
    path = f", path {subject.path}" if subject.path else ""
    heading = f"tuned for {subject.called} on {subject.device}{path}: {budget_words(tuned.budget)}"
    bound = bound_words(tuned)
    said = [_room(tuned), _beside(found), f"bound: {bound}" if bound else ""]
    below = "\n".join(line for line in said if line)
    return "\n\n".join(filter(None, (heading, _figures(tuned), below)))


def _figures(tuned: Tuned) -> str:
    sides = [("this policy", tuned.chosen), ("less memory", tuned.less), ("more memory", tuned.more)]
    shown = [(name, each) for name, each in sides if each is not None]
    rows: list[tuple[str, ...]] = [("", *(name for name, _ in shown))]
    for name, words in figure_rows(tuned):
        cells = [words(each) for _, each in shown]
        if any(cell not in ("", "0 B", "0 s") for cell in cells) or name in ("peak", "saved", "recomputed"):
            rows.append((name, *cells))
    return table(rows, right=range(1, len(rows[0])))


def figure_rows(tuned: Tuned) -> list[tuple[str, Callable[[Candidate], str]]]:
    """The figures of a candidate by name, each as text."""
    besides = tuned.besides
    rows: list[tuple[str, Callable[[Candidate], str]]] = [("peak", lambda each: figure(besides.on(each.peak), "bytes"))]
    if besides.on(0) or besides.reserve:
        rows.append(("of the graph", lambda each: figure(each.peak, "bytes")))
    return [
        *rows,
        ("saved", lambda each: figure(each.saved, "bytes")),
        ("offloaded", lambda each: figure(each.offloaded, "bytes")),
        ("recomputed", lambda each: f"{figure(each.recompute, 'seconds')} ({share_text(each.recompute, tuned)})"),
        ("copies", lambda each: figure(each.copies, "seconds")),
        ("exposed", lambda each: figure(each.exposed, "seconds")),
        ("step", lambda each: step_words(each)),
    ]


def share_text(seconds: float, tuned: Tuned) -> str:
    """Of the forward's time: ``3.1%``."""
    return figure(seconds / tuned.forward, "fraction") if tuned.forward else "-"


def _room(tuned: Tuned) -> str:
    if tuned.budget.figure == "recompute time":
        return ""
    left = int(tuned.budget.limit) - memory_of(tuned.chosen, tuned)
    return f"{figure(left, 'bytes')} of the budget are left" if left else "the budget is used to the byte"


def _beside(found: TunedPolicy) -> str:
    said = besides_words(found.tuned.besides, found.subject)
    return f"in the peak beside the graph: {said}" if said else ""
