"""A step drawn over time: the memory alive, what computes, and each process group on a lane of its own.

An SVG that is stretched to the width of the page, with every word as HTML beside it. A lane has a path for what is
hidden and one for what is exposed; a script adds a cursor, and without one the picture is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import frozen

from policylang.language.wording import counted, figure
from policylang.report.markup import Markup, element, joined
from policylang.report.order.lane_data import DrawnStep, StreamLane

_WIDTH = 1000
_MEMORY, _GAP, _LANE, _BAR = 120, 14, 30, 20
"""Heights in pixels: of the memory curve, below it, of a lane, and of the bars in one."""
_SLIM = 0.1
"""What lies closer together than this is one bar."""


@frozen
class LaneScale:
    """What the pictures of two orders share, so that they can be compared."""

    seconds: float
    bytes: int

    @classmethod
    def of(cls, steps: Sequence[DrawnStep]) -> LaneScale:
        return cls(
            max((each.step for each in steps), default=0.0) or 1.0,
            max((size for each in steps for _, size in each.memory), default=0) or 1,
        )

    def x(self, seconds: float) -> float:
        return _WIDTH * seconds / self.seconds

    def y(self, size: int) -> float:
        return _MEMORY * (1 - size / self.bytes)


def lane_chart(step: DrawnStep, scale: LaneScale, number: int) -> Markup:
    """``number`` tells it from others on the page."""
    height = chart_height(step)
    title, description = f"lanes-{number}-title", f"lanes-{number}-desc"
    svg = element(
        "svg",
        element("title", f"The step {step.name}, over time", id=title),
        element("desc", described(step), id=description),
        *drawn_parts(step, scale),
        viewBox=f"0 0 {_WIDTH} {height}",
        preserveAspectRatio="none",
        role="img",
        tabindex="0",
        style=f"height:{height}px",
        aria_labelledby=f"{title} {description}",
    )
    names = (
        element("span", name, style="top:0" if not top else f"top:{top}px") for name, top in lane_names(step, scale)
    )
    quarters = [0.0, 0.25, 0.5, 0.75, 1.0]
    axis = (
        element("span", figure(share * scale.seconds, "seconds"), style=f"left:{100 * share:g}%") for share in quarters
    )
    return joined(
        element(
            "div",
            element("div", *names, class_="names", aria_hidden="true"),
            element("div", svg, class_="drawn"),
            element("div", *axis, class_="axis", aria_hidden="true"),
            class_="lanes",
        ),
        element("p", described(step), class_="hint"),
    )


def chart_height(step: DrawnStep) -> int:
    """Pixels."""
    return _MEMORY + _GAP + _LANE * len(step.lanes)


def lane_names(step: DrawnStep, scale: LaneScale) -> list[tuple[str, int]]:
    """What stands at the left of a picture, and how far down in pixels its middle is; the first at the top."""
    lanes = [(lane.name, _top(at) + _BAR // 2) for at, lane in enumerate(step.lanes)]
    return [(figure(scale.bytes, "bytes"), 0), ("memory", _MEMORY // 2), *lanes]


def drawn_parts(step: DrawnStep, scale: LaneScale) -> list[Markup]:
    """All lines and areas, on a ground of 1,000 units by :func:`chart_height`."""
    end, height = f"{scale.x(step.step):.1f}", chart_height(step)
    waits = element("path", class_="wait", d=_bars(step.waits, scale, 0, height))
    return [
        *([waits] if step.waits else []),
        element("path", class_="memory area", d=_memory(step, scale, closed=True)),
        element("path", class_="memory edge", d=_memory(step, scale)),
        *(part for at, lane in enumerate(step.lanes) for part in _lane(lane, scale, at)),
        element("line", class_="parting", x1=end, x2=end, y1=0, y2=height),
    ]


def described(step: DrawnStep) -> str:
    """The picture in a sentence."""
    share = f" ({figure(step.exposed / step.step, 'fraction')})" if step.step else ""
    exposed = f"{figure(step.exposed, 'seconds')} of it exposed{share}" if step.exposed else "nothing of it exposed"
    sent = [counted(len(lane.stretches), "collective") + f" in {lane.name}" for lane in step.lanes[1:]]
    return f"{step.name}: a step of {figure(step.step, 'seconds')}, {exposed}{'; ' if sent else ''}{', '.join(sent)}."


def lane_columns(steps: Sequence[DrawnStep], scale: LaneScale) -> dict[str, Any]:
    """What the script tells of a place in the pictures; times in whole nanoseconds."""
    return {
        "seconds": scale.seconds,
        "top": _MEMORY + _GAP,
        "lane": _LANE,
        "steps": [
            {
                "name": step.name,
                "seconds": step.step,
                "memory": [[_nanoseconds(at) for at, _ in step.memory], [size for _, size in step.memory]],
                "lanes": [
                    {
                        "name": lane.name,
                        "start": [_nanoseconds(each.start) for each in lane.stretches],
                        "end": [_nanoseconds(each.end) for each in lane.stretches],
                        "exposed": [_nanoseconds(each.exposed) for each in lane.stretches],
                        "words": [each.words for each in lane.stretches],
                    }
                    for lane in step.lanes
                ],
            }
            for step in steps
        ],
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _top(lane: int) -> int:
    return _MEMORY + _GAP + _LANE * lane


def _lane(lane: StreamLane, scale: LaneScale, at: int) -> list[Markup]:
    """A bar for each stretch; its end, as far as computation waits for it, marked."""
    kind = "sent" if at else "compute"
    hidden = [(each.start, each.end - each.exposed) for each in lane.stretches if each.exposed < each.end - each.start]
    exposed = [(max(each.start, each.end - each.exposed), each.end) for each in lane.stretches if each.exposed > 0]
    parts = ((kind, hidden), ("exposed", exposed))
    return [
        element("path", class_=f"bar {name}", d=_bars(found, scale, _top(at), _BAR)) for name, found in parts if found
    ]


def _bars(stretches: Iterable[tuple[float, float]], scale: LaneScale, top: float, height: float) -> str:
    """Rectangles as one path; neighbours that touch are one."""
    joined_up: list[list[float]] = []
    for start, end in stretches:
        left, right = scale.x(start), scale.x(end)
        if joined_up and left - joined_up[-1][1] < _SLIM:
            joined_up[-1][1] = max(joined_up[-1][1], right)
        else:
            joined_up.append([left, max(right, left + _SLIM)])
    return "".join(f"M{left:.1f},{top}h{right - left:.1f}v{height}h{left - right:.1f}z" for left, right in joined_up)


def _memory(step: DrawnStep, scale: LaneScale, *, closed: bool = False) -> str:
    """Stairs: what is alive from a moment on."""
    if not step.memory:
        return f"M0,{_MEMORY}"
    first, *others = step.memory
    parts = [f"M0,{scale.y(first[1]):.1f}", *(f"H{scale.x(at):.1f}V{scale.y(size):.1f}" for at, size in others)]
    parts.append(f"H{scale.x(step.step):.1f}")
    return "".join(parts) + (f"V{_MEMORY}H0z" if closed else "")
