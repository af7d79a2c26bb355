"""What a test behind ``where`` means, and of how many of the selector's nodes it holds."""

from __future__ import annotations

from policylang.editor.explaining.article import Article, code
from policylang.editor.explaining.on_snapshot import part_lines, rows_of, selections_of
from policylang.editor.state import State
from policylang.language.figures import counted
from policylang.language.syntax import TIMES, Compare, Selector, Test, Where
from policylang.language.units import UNITS, Dimension, read
from policylang.planning.selection.no_match import part_counts
from policylang.planning.selection.selectors import compile_predicate

_BASE: dict[Dimension, str] = {
    "bytes": "bytes",
    "flops": "operations",
    "seconds": "s",
    "fraction": "of the whole",
    "number": "",
}


def of_test(state: State, test: Test, where: Where) -> Article:
    """How many of the nodes before ``where`` pass the test by itself."""
    selections = selections_of(state)
    rows = None if selections is None else rows_of(selections, where.selector)
    if selections is None or rows is None:
        return Article()
    if isinstance(test, Compare) and test.quantity in TIMES and selections.prices is None:
        return Article().say("Without a device nothing is known of times.")
    count = sum(map(compile_predicate(test, selections), rows))
    article = Article().say(
        f"{code(test.span.one_line)} holds of {count:,} of the {counted(len(rows), 'forward node')} of "
        f"{code(where.selector.span.one_line)}."
    )
    if not count and test == where.predicate:
        article.items(part_lines(part_counts(where, selections)[-1:]))
    return article


def of_part(state: State, part: Selector) -> Article:
    """How many nodes a part of a selector denotes."""
    selections = selections_of(state)
    rows = None if selections is None else rows_of(selections, part)
    if rows is None:
        return Article()
    return Article().say(f"{code(part.span.one_line)}: {counted(len(rows), 'forward node')} here.")


def of_unit(unit: str, number: str) -> Article:
    """``1 GiB = 1,073,741,824 bytes``, and the figure that is written with it."""
    scale, dimension = UNITS[unit]
    base = _BASE[dimension]
    lines = [f"{code(f'1 {unit}' if unit != '%' else '1%')} = {_plain(scale)} {base}"]
    if number and number != "1":
        try:
            value, _ = read(number, unit)
        except ValueError:
            return Article().say(*lines)
        lines.append(f"{code(f'{number}{unit}' if unit == '%' else f'{number} {unit}')} = {_plain(value)} {base}")
    return Article().say(*lines)


def _plain(value: float) -> str:
    """Whole numbers with thousands, small ones without an exponent."""
    if value == int(value):
        return f"{int(value):,}"
    text = f"{value:.12f}".rstrip("0")
    return text if float(text) else f"{value:g}"
