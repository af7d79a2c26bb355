"""What is alive at the peak as rows of words, for the text of a plan and for its page."""

from __future__ import annotations

from policylang.language.wording import figure, file_name, shortened
from policylang.planning.inspection.peak_values import AliveShare, AliveValue, Moment, PeakValues
from policylang.report.report_text import bytes_text
from policylang.report.width import table

_LONGEST_RULE = 72
_WIDEST = 120
"""Of a table in a pipe or a file."""

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
    rule = shortened(share.rule, _LONGEST_RULE)
    return bytes_text(share.bytes), _share(share.bytes, found), f"{share.count:,}", share.what, line, rule


def _made(value: AliveValue) -> str:
    if value.made is None:
        return "before the step"
    return f"{value.made.half}, {value.made.step:,}"


def _step(moment: Moment) -> str:
    again = " again" if moment.again else ""
    return f"{moment.half}, {moment.step:,}: {moment.node}{again}"


def _share(amount: int, found: PeakValues) -> str:
    return figure(amount / found.bytes, "fraction") if found.bytes else ""
