"""Text for people and for pages: widths, tables, the times of a device in words, Markdown, HTML."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from textwrap import TextWrapper
from typing import TYPE_CHECKING

from policylang.language.shown import format_quantity, joined, one_line, priced_by_bytes_text, printable, shortened

if TYPE_CHECKING:
    from policylang.planning.plan import Plan
    from policylang.simulation.node_times import NodeTimes
    from policylang.simulation.streams import Lanes, StepTime


_COLUMNS: ContextVar[int | None] = ContextVar("columns", default=None)  # 0 for as many as needed; None if not set
_NARROWEST = 8  # the least width of a cell that is shortened
_READABLE = 18  # the width of a text cell below which columns that can be spared are dropped first
_LEAST = 20  # the least width of the whole text
_BETWEEN = 2
_EXCERPT = re.compile(r"\s*\d*\s*\|(\s|$)")
_HANGS = re.compile(r"\s*(?:= |[-*] )?")


@contextmanager
def fitted(columns: int | None) -> Iterator[None]:
    """Within it, text is at most so many columns wide; any width with None or 0, which overrides too."""
    token = _COLUMNS.set(max(columns, _LEAST) if columns else columns)
    try:
        yield
    finally:
        _COLUMNS.reset(token)


def columns(most: int | None = None) -> int | None:
    """The columns that text may have, at most ``most``; None for any number."""
    found = _COLUMNS.get() or None
    return most if found is None else found if most is None else min(found, most)


def table(
    rows: Sequence[Sequence[str]],
    right: range,
    indent: int = 0,
    *,
    ends: Collection[int] = (),
    spare: Sequence[int] = (),
    unless_told: int | None = None,
    readable: int = _READABLE,
    wraps: bool = False,
) -> str:
    """Aligned columns; those in ``right`` are aligned to the right. The first row is the head. ``unless_told`` is the
    greatest width if none is set.

    If text cells would have less than ``readable`` columns, the columns in ``spare`` are left out one after the other,
    with a note below, and then the widest of those aligned to the left are shortened: those in ``ends`` keep their end.
    If it ``wraps``, the last column continues below instead.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    found = unless_told if _COLUMNS.get() is None else columns()
    most = None if found is None else found - indent
    shown, left_out = list(range(len(widths))), list[str]()
    for column in spare:
        least = [widths[each] if each in right else min(widths[each], readable) for each in shown]
        if most is None or sum(least) + _BETWEEN * (len(shown) - 1) <= most:
            break
        shown.remove(column)
        left_out.append(f"`{rows[0][column]}`" if rows[0][column] else "a column")
    if most is not None:
        _narrow(widths, shown, right, most)
    lines = []
    wrapper = TextWrapper(widths[-1], break_on_hyphens=False)
    hang = " " * (sum(widths[each] + _BETWEEN for each in shown) - widths[shown[-1]] - _BETWEEN)
    for row in rows:
        last, *more = (wrapper.wrap(row[-1]) if wraps else None) or [row[-1]]
        said = [*row[:-1], last]
        cells = (_cell(said[each], widths[each], each in right, each in ends) for each in shown)
        line = "  ".join(cells).rstrip()
        lines.append(line if most is None else shortened(line, most))
        lines.extend(hang + each for each in more)
    if left_out:
        lines.append(f"(no room for {joined(left_out)}: --width 0)")
    return "\n".join(f"{' ' * indent}{line}" for line in lines)


def _cell(text: str, width: int, right: bool, end: bool) -> str:
    if len(text) > width:
        text = f"…{text[len(text) - width + 1 :]}" if end else shortened(text, width)
    return text.rjust(width) if right else text.ljust(width)


def _narrow(widths: list[int], shown: Sequence[int], right: range, most: int) -> None:
    """Take from the widest until all fits, or until nothing is left to take."""
    excess = sum(widths[each] for each in shown) + _BETWEEN * (len(shown) - 1) - most
    left = [each for each in shown if each not in right]
    while excess > 0 and left:
        widest = max(left, key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            return
        widths[widest] -= 1
        excess -= 1


def fit(text: str) -> str:
    """The text with its long sentences wrapped between words. Source lines of a diagnostic are cut, not wrapped."""
    most = columns()
    if most is None:
        return text
    return "\n".join(line if len(line) <= most else _fit_line(line, most) for line in text.split("\n"))


def _fit_line(line: str, most: int) -> str:
    if _EXCERPT.match(line):
        return shortened(line, most)
    found = _HANGS.match(line)
    start = 0 if found is None else found.end()
    hang = " " * (start if found is not None and found[0].strip() else start + 2)
    wrapper = TextWrapper(most, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent = line[:start]
    return wrapper.fill(line[start:])


_MEANS_SOMETHING = re.compile(r"[^\w\s.,:;()/×→…%+\-=']|//|www\.")


def code(text: str) -> str:
    """Code in a line, between more backticks than it contains."""
    text = one_line(text)
    fence = "`" * (_longest(text) + 1)
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text}{padding}{fence}" if text else ""


def words(text: str) -> str:
    """The text, as code where a character in it could mean something: nobody is mentioned in code."""
    return code(text) if _MEANS_SOMETHING.search(text) else text


def fenced(text: str, language: str) -> str:
    fence = "`" * max(3, _longest(text) + 1)
    return f"{fence}{language}\n{printable(text)}\n{fence}"


def _longest(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def device_text(device: str, uncounted: Mapping[str, int], what: str = "times") -> str:
    """``times: h100-sxm; mylib.scan.default ×8 (no FLOP formula, so priced by bytes)``."""
    return f"{what}: {device}" + (f"; {priced_by_bytes_text(uncounted)}" if uncounted else "")


def times_text(times: NodeTimes | None) -> str:
    """:func:`device_text` for the times of a graph; empty without a device."""
    return "" if times is None else device_text(times.device.name, times.uncounted)


def plan_times_text(plan: Plan) -> str:
    """:func:`device_text` for a plan, or why its device gives no times."""
    return times_text(plan.shown_times) if plan.untold is None else f"no times: {plan.untold.message}"


def bytes_text(amount: int | None) -> str:
    return "" if amount is None else format_quantity(amount, "bytes")


def seconds_text(seconds: float | None) -> str:
    """Empty for a time that rounds to zero, and without a device."""
    text = format_quantity(seconds or 0.0, "seconds")
    return "" if text.startswith("0 ") else text


def recomputed_text(time: StepTime) -> str:
    """``55.2 ms (20.1%)``: the share is one of the forward's time."""
    if not time.recomputed:
        return "-"
    share = f" ({format_quantity(time.recomputed / time.forward, 'fraction')})" if time.forward else ""
    return format_quantity(time.recomputed, "seconds") + share


def price_text(seconds: float | None) -> str:
    """``1.9 ms a GiB``; empty where there is no price."""
    return "" if seconds is None else f"{format_quantity(seconds, 'seconds')} a GiB"


def exposed_text(time: StepTime | Lanes) -> str:
    """``12.1 ms (3%)``: the share is one of the step."""
    if not time.exposed:
        return "-"
    return f"{format_quantity(time.exposed, 'seconds')} ({format_quantity(time.exposed / time.step, 'fraction')})"


_VOID = frozenset({"br", "circle", "line", "meta", "path"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def element(tag: str, /, *children: str, **attributes: object) -> Markup:
    """``class_`` is ``class``, other underscores hyphens; True has no value, None and False are left out."""
    said = "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    return Markup(f"<{tag}{said}/>") if tag in _VOID else Markup(f"<{tag}{said}>{fragment(*children)}</{tag}>")


def fragment(*children: str) -> Markup:
    return Markup("".join(each if isinstance(each, Markup) else escape(each) for each in children))


def rows_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int], caption: str) -> Markup:
    """A table that scrolls by itself where the page is narrow."""
    kinds = ["number" if at in numbers else None for at in range(len(head))]
    heads = (element("th", name, scope="col", class_=kind) for name, kind in zip(head, kinds, strict=True))
    cells = ((element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)) for row in rows)
    body = (element("tr", *row) for row in cells)
    parts = (element("caption", caption), element("thead", element("tr", *heads)), element("tbody", *body))
    return element("div", element("table", *parts), class_="scroll", tabindex="0", role="region", aria_label=caption)


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
