"""The memory of a step as a chart that fits every width: curves that stretch, and words beside them that do not.

The curves are an SVG that is stretched to its place, with lines of one thickness; every word is HTML at a share of the
width or height, so that its size is that of the page and no two overlap. A script adds a cursor; without one the chart
is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from attrs import frozen

from policylang.language.wording import figure
from policylang.report.markup import Markup, element, joined

_WIDTH, _HEIGHT = 1000, 1000
_MOST_POINTS = 1000
_MOST_PARTS = 6
_TICKS = 4


@frozen
class Curve:
    """The memory alive at each moment of the axis, in bytes."""

    name: str
    moments: Sequence[int]
    peak: int
    at: str
    """The node of the highest moment."""


@frozen
class MemoryAxis:
    """The moments that curves share."""

    backward: Sequence[int]
    """1 for each that belongs to the backward."""
    resident: int
    """Bytes that are there before the first."""


def memory_chart(axis: MemoryAxis, first: Curve, second: Curve) -> Markup:
    """Two curves over one axis; the ``second`` is dashed."""
    length = len(axis.backward)
    if not length:
        return element("p", "Nothing runs in this graph.")
    most = max(1, axis.resident, *first.moments, *second.moments)
    tick = _tick(most / _TICKS)
    ceiling = -(-most // tick) * tick
    ticks = range(0, ceiling + 1, tick)
    svg = element(
        "svg",
        element("title", "Memory over the step", id="chart-title"),
        element("desc", _description(axis, first, second), id="chart-desc"),
        *(_level(value / ceiling, "grid") for value in ticks),
        element("path", class_="second area", d=_outline(second.moments, ceiling, closed=True)),
        element("path", class_="first area", d=_outline(first.moments, ceiling, closed=True)),
        element("path", class_="first edge", d=_outline(first.moments, ceiling)),
        element("path", class_="second edge", d=_outline(second.moments, ceiling)),
        _level(axis.resident / ceiling, "resident"),
        *_partings(axis),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        tabindex="0",
        aria_labelledby="chart-title chart-desc",
    )
    top = max(range(length), key=first.moments.__getitem__)
    place = f"left:{_percent(_x(top, length))};top:{_percent(_y(first.moments[top], ceiling))}"
    peak = element("i", class_="peak", style=place)
    labels = (element("span", figure(value, "bytes"), style=f"top:{_percent(1 - value / ceiling)}") for value in ticks)
    plot = joined(
        element("div", *labels, class_="ticks", aria_hidden="true"),
        element("div", svg, peak, class_="area"),
        element("div", *_parts(axis), class_="parts", aria_hidden="true"),
    )
    legend = joined(
        element("span", element("i", class_="key first"), f"{first.name}: ", _bold(first.peak)),
        element("span", element("i", class_="key second"), f"{second.name}: ", _bold(second.peak)),
        element("span", element("i", class_="key resident"), "parameters, buffers, inputs: ", _bold(axis.resident)),
        element("span", class_="told", role="status"),
    )
    return joined(element("div", plot, class_="plot"), element("div", legend, class_="legend"))


def _description(axis: MemoryAxis, first: Curve, second: Curve) -> str:
    said = [f"{each.name}: {figure(each.peak, 'bytes')} at {each.at or 'the beginning'}." for each in (first, second)]
    there = figure(axis.resident, "bytes")
    return " ".join((*said, f"{there} are there before the first operator."))


def _bold(amount: int) -> Markup:
    return element("b", figure(amount, "bytes"))


def _tick(value: float) -> int:
    """A power of two: what labels in KiB, MiB and GiB are whole numbers of."""
    step = 1
    while step * 2 <= value:
        step *= 2
    return step


def _x(at: float, length: int) -> float:
    return (at + 0.5) / length


def _y(value: int, ceiling: int) -> float:
    return 1 - value / ceiling


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _level(share: float, kind: str) -> Markup:
    y = f"{_HEIGHT * (1 - share):.1f}"
    return element("line", class_=kind, x1=0, x2=_WIDTH, y1=y, y2=y)


def _outline(moments: Sequence[int], ceiling: int, *, closed: bool = False) -> str:
    """At most so many points, each the most that is alive among the operators it stands for."""
    length = len(moments)
    width = -(-length // _MOST_POINTS)
    points = []
    for start in range(0, length, width):
        at = max(range(start, min(length, start + width)), key=moments.__getitem__)
        points.append((_x(at, length), _y(moments[at], ceiling)))
    points = [(0.0, points[0][1]), *points, (1.0, points[-1][1])]
    if closed:
        points = [(0.0, 1.0), *points, (1.0, 1.0)]
    return "M" + "L".join(f"{_WIDTH * x:.1f},{_HEIGHT * y:.1f}" for x, y in points) + ("Z" if closed else "")


def _runs(axis: MemoryAxis) -> list[tuple[int, int]]:
    """Stretches of one half: which, and how long. Of a graph with very many: the first, and all others as one."""
    runs = [(half, sum(1 for _ in each)) for half, each in groupby(axis.backward)]
    if len(runs) <= _MOST_PARTS:
        return runs
    return [runs[0], (1, sum(length for _, length in runs[1:]))]


def _partings(axis: MemoryAxis) -> list[Markup]:
    found, at = [], 0
    for _, length in _runs(axis)[:-1]:
        at += length
        x = f"{_WIDTH * at / len(axis.backward):.1f}"
        found.append(element("line", class_="parting", x1=x, x2=x, y1=0, y2=_HEIGHT))
    return found


def _parts(axis: MemoryAxis) -> list[Markup]:
    return [
        element("span", "backward" if half else "forward", style=f"flex:{length} 1 0") for half, length in _runs(axis)
    ]
