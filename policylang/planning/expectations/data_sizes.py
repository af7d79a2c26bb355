"""Figures that count values whose sizes come from data, as rows that an expert is chosen for: by which number they are
counted, and what they may come to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from policylang.graph.facts import Facts
from policylang.graph.storage import storage_roots
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.syntax import Expectation, ExpectTotal
from policylang.language.wording import counted, figure, first_lines
from policylang.planning.liveness import Needs

BY_DATA = "APL350"
_MOST_NAMES = 8


def counted_by_data(facts: Facts, rows: Iterable[int], *, added_up: bool = True) -> str:
    """What a figure of some rows counts by a hint, as the end of a sentence; empty where their sizes are known.
    ``added_up``: whether it is the sum of their bytes."""
    found = _sized(facts, rows)
    if not found:
        return ""
    hints = sorted({facts.data_sizes[row][0] for row in found})
    rows_each = f"{hints[0]:,}" if len(hints) == 1 else f"{hints[0]:,} to {hints[-1]:,}"
    text = f"{counted(len(found), 'value')} by a hint of {rows_each} rows, since their sizes come from data"
    if not added_up:
        return text
    counts = figure(sum(facts.bytes[row] for row in found), "bytes")
    least = figure(sum(facts.data_sizes[row][1] for row in found), "bytes")
    upper = [facts.data_sizes[row][2] for row in found]
    most = f"to {figure(sum(upper), 'bytes')}" if min(upper) >= 0 else "without a known limit"
    return f"{text}: {counts}, which may be from {least} {most}"


def by_data_in(expectations: Sequence[Expectation], facts: Facts, needs: Needs) -> Iterator[Diagnostic]:
    """A warning for each expectation about a figure that counts such values, unless it limits from above what is
    counted by the most that it can be."""
    for each in expectations if facts.data_sizes else ():
        rows = _compared(each, facts, needs)
        at_most = all(facts.bytes[row] == facts.data_sizes[row][2] for row in rows)
        if isinstance(each, ExpectTotal) and rows and not (at_most and each.op in ("<", "<=")):
            counts = figure_by_data(each, facts, needs)
            message = f"`{each.span.one_line}` is compared with a figure that counts {counts}"
            where = ((row, facts.modules[row] or "no module") for row in rows)
            places = (f"{facts.names[row]} ({facts.targets[row]}) in {module}" for row, module in where)
            help = "another load has another figure: expect of values what becomes of them, `expect every … saved`"
            yield diagnose(BY_DATA, message, each.span, help=help, details=first_lines(tuple(places), _MOST_NAMES))


def figure_by_data(expectation: Expectation, facts: Facts, needs: Needs) -> str:
    """What the figure of an expectation counts by a hint, as the end of a sentence; empty where that is nothing."""
    added_up = isinstance(expectation, ExpectTotal) and expectation.figure in ("saved", "recomputed")
    return counted_by_data(facts, _compared(expectation, facts, needs), added_up=added_up)


def _compared(expectation: Expectation, facts: Facts, needs: Needs) -> list[int]:
    """The rows that the figure of an expectation counts by a hint."""
    if not isinstance(expectation, ExpectTotal) or expectation.figure == "recomputed operators":
        return []
    again = expectation.figure.startswith("recomputed")
    rows = needs.saved if expectation.figure == "saved" else needs.recomputed if again else range(len(facts))
    return _sized(facts, rows)


def _sized(facts: Facts, rows: Iterable[int]) -> list[int]:
    """Those that allocate memory whose size comes from data, each once."""
    if not facts.data_sizes:
        return []
    roots = storage_roots(facts)
    return [root for root in dict.fromkeys(roots[row] for row in rows) if facts.data_sizes[root] and facts.bytes[root]]
