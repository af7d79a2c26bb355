"""The trade-off as a picture: memory against the time of second runs, a point a policy.

One SVG that needs nothing else, in a page and as a file: colours follow the page's where there is one. Between two
points stands a staircase, since a budget between them is met by the one below. Hovering over a point shows its figures
and its rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from policylang.language.figures import figure
from policylang.report.markup import Markup, element, joined
from policylang.report.tuning.account import share_text
from policylang.report.tuning.rows import statements
from policylang.tuning.evaluation import Candidate, Tuned
from policylang.tuning.tuned_policy import memory_of

_WIDTH, _HEIGHT = 960, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 20, 56
_TICKS = 5
_LETTER, _LINE = 6.8, 13
_STYLE = """
text { font: 12px system-ui, "Segoe UI", Roboto, sans-serif; fill: var(--soft, #5c656e); }
.known text, .chosen text { paint-order: stroke; stroke: var(--card, #fff); stroke-width: 3px; }
.ground { fill: var(--card, #fff); } .grid { stroke: var(--line, #dfe3e6); }
.stairs { fill: none; stroke: var(--saved, #2364aa); stroke-width: 1.5; stroke-opacity: .45; }
.policy circle { fill: var(--saved, #2364aa); stroke: var(--card, #fff); }
.known circle { fill: var(--card, #fff); stroke: var(--recomputed, #a64b08); stroke-width: 1.75; }
.known text { fill: var(--recomputed, #a64b08); }
.chosen circle { fill: var(--card, #fff); stroke: var(--saved, #2364aa); stroke-width: 3; }
.chosen text { fill: var(--ink, #1d2125); font-weight: 600; }
.bound { stroke: var(--ink, #1d2125); stroke-dasharray: 2 3; }
.budget { stroke: var(--soft, #5c656e); stroke-dasharray: 6 4; }
g:hover circle, a:focus-visible circle { stroke: var(--ink, #1d2125); stroke-width: 3; }
"""


@frozen
class _Scale:
    most_seconds: float
    most_bytes: float

    def x(self, seconds: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / self.most_seconds

    def y(self, size: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - size / self.most_bytes)


def trade_off_svg(
    tuned: Tuned, known: Sequence[tuple[str, Candidate]] = (), *, budget: bool = True, linked: bool = False
) -> Markup:
    """The picture. ``known`` are policies to compare with, by name; without a ``budget`` none is marked as chosen. With
    ``linked`` each point leads to ``#policy-N`` of the page around it."""
    every = [*tuned.table, *(each for _, each in known)]
    x_tick = _decimal_tick(max((each.price for each in every), default=0.0) / (tuned.forward or 1) / _TICKS)
    y_tick = _binary_tick(max((memory_of(each, tuned) for each in every), default=1) / _TICKS)
    most_share = _ceiling(max((each.price for each in every), default=0.0) / (tuned.forward or 1), x_tick)
    scale = _Scale(
        most_share * (tuned.forward or 1), _ceiling(max((memory_of(each, tuned) for each in every), default=1), y_tick)
    )
    taken: list[tuple[float, float, float, float]] = [_dot(scale, each, tuned) for each in every]
    chosen = [_point(scale, tuned.chosen, tuned, "chosen", "this policy", taken)] if budget else []
    points = [
        _linked(_point(scale, each, tuned, "policy", "", taken), at, linked)
        for at, each in enumerate(tuned.table)
        if not (budget and each == tuned.chosen)
    ]
    others = [_point(scale, each, tuned, "known", name, taken) for name, each in known]
    return element(
        "svg",
        element("title", "Memory against the time of second runs"),
        element("style", Markup(_STYLE)),
        element("rect", class_="ground", width=_WIDTH, height=_HEIGHT),
        *_axes(scale, tuned, x_tick, y_tick),
        *(_limits(scale, tuned) if budget else ()),
        element("path", class_="stairs", d=_stairs(scale, tuned)),
        *others,
        *points,
        *(_linked(each, _place(tuned), linked and tuned.chosen in tuned.table) for each in chosen),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
    )


def _axes(scale: _Scale, tuned: Tuned, x_tick: float, y_tick: float) -> list[Markup]:
    found = []
    for at in range(round(scale.most_bytes / y_tick) + 1):
        y = scale.y(at * y_tick)
        found += [
            element("line", class_="grid", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=_number(y), y2=_number(y)),
            _text(figure(at * y_tick, "bytes"), _LEFT - 8, y + 4, "end"),
        ]
    shares = round(scale.most_seconds / (tuned.forward or 1) / x_tick)
    for at in range(shares + 1):
        x = scale.x(at * x_tick * (tuned.forward or 1))
        found += [
            element("line", class_="grid", x1=_number(x), x2=_number(x), y1=_TOP, y2=_HEIGHT - _BOTTOM),
            _text(figure(at * x_tick, "fraction"), x, _HEIGHT - _BOTTOM + 18, "middle"),
        ]
    copies = " and of waits for copies" if any(each.copies for each in tuned.table) else ""
    what = "saved for the backward" if tuned.budget.figure == "saved" else "peak"
    return [
        *found,
        _text(f"time of second runs{copies}, of the forward's", _WIDTH - _RIGHT, _HEIGHT - 10, "end"),
        _text(what, _LEFT + 6, _TOP + 12, "start"),
    ]


def _limits(scale: _Scale, tuned: Tuned) -> list[Markup]:
    """The budget and the bound, where they lie in the picture."""
    found, bottom = [], _HEIGHT - _BOTTOM
    if tuned.budget.figure == "recompute time":
        limit = tuned.budget.limit * tuned.forward
        if limit <= scale.most_seconds:
            found.append(_line("budget", scale.x(limit), scale.x(limit), _TOP, bottom, "the budget"))
    elif tuned.budget.limit <= scale.most_bytes:
        y = scale.y(tuned.budget.limit)
        found.append(_line("budget", _LEFT, _WIDTH - _RIGHT, y, y, "the budget"))
    if tuned.bound is not None and tuned.bound <= scale.most_seconds:
        x, y = scale.x(tuned.bound), scale.y(memory_of(tuned.chosen, tuned))
        keeps = "saves or offloads" if tuned.chosen.offloaded else "saves"
        said = f"no choice of values that {keeps} as much recomputes for less: {figure(tuned.bound, 'seconds')}"
        found.append(_line("bound", x, x, min(y - 24, bottom), min(y + 24, bottom), said))
    return found


def _line(kind: str, x1: float, x2: float, y1: float, y2: float, said: str) -> Markup:
    line = element("line", class_=kind, x1=_number(x1), x2=_number(x2), y1=_number(y1), y2=_number(y2))
    return element("g", element("title", said), line)


def _stairs(scale: _Scale, tuned: Tuned) -> str:
    parts: list[str] = []
    for each in tuned.table:
        x, y = _number(scale.x(each.price)), _number(scale.y(memory_of(each, tuned)))
        parts.append(f"V{y}H{x}" if parts else f"M{x},{y}")
    return "".join(parts) + f"V{_TOP}"


def _point(
    scale: _Scale,
    each: Candidate,
    tuned: Tuned,
    kind: str,
    name: str,
    taken: list[tuple[float, float, float, float]],
) -> Markup:
    x, y = scale.x(each.price), scale.y(memory_of(each, tuned))
    size = figure(memory_of(each, tuned), "bytes")
    figures = f"{size}, {figure(each.price, 'seconds')} ({share_text(each.price, tuned)})"
    said = "\n".join([f"{name}: {figures}" if name else figures, *statements(each)])
    dot = element("circle", cx=_number(x), cy=_number(y), r=6 if kind == "chosen" else 4.5)
    label = _label(name, x, y, taken) if name else joined()
    return element("g", element("title", said), dot, label, class_=kind)


def _label(name: str, x: float, y: float, taken: list[tuple[float, float, float, float]]) -> Markup:
    """A name beside a point where nothing else stands; nowhere if all places are taken: the point says it then."""
    width = _LETTER * len(name)
    places = (
        (x + 10, y + 4, "start", x + 9),
        (x + 10, y - 8, "start", x + 9),
        (x + 10, y + 16, "start", x + 9),
        (x - 10, y + 4, "end", x - 9 - width),
        (x - 10, y - 8, "end", x - 9 - width),
        (x - 10, y + 16, "end", x - 9 - width),
    )
    for at, base, anchor, left in places:
        box = (left, base - _LINE + 3, left + width, base + 3)
        inside = box[0] >= _LEFT and box[2] <= _WIDTH - _RIGHT and box[1] >= _TOP and box[3] <= _HEIGHT - _BOTTOM
        if inside and not any(_meet(box, other) for other in taken):
            taken.append(box)
            return _text(name, at, base, anchor)
    return joined()


def _dot(scale: _Scale, each: Candidate, tuned: Tuned) -> tuple[float, float, float, float]:
    x, y = scale.x(each.price), scale.y(memory_of(each, tuned))
    return x - 5, y - 5, x + 5, y + 5


def _meet(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _place(tuned: Tuned) -> int:
    return tuned.table.index(tuned.chosen) if tuned.chosen in tuned.table else 0


def _linked(point: Markup, at: int, linked: bool) -> Markup:
    return element("a", point, href=f"#policy-{at + 1}") if linked else point


def _text(said: str, x: float, y: float, anchor: str) -> Markup:
    return element("text", said, x=_number(x), y=_number(y), text_anchor=anchor)


def _number(value: float) -> str:
    return f"{value:.1f}"


def _ceiling(most: float, tick: float) -> float:
    """The whole ticks that hold it; at least one."""
    return tick * max(1, -int(-most // tick))


def _binary_tick(value: float) -> int:
    """A power of two: what labels in KiB, MiB and GiB are whole numbers of."""
    step = 1
    while step < value:
        step *= 2
    return step


def _decimal_tick(value: float) -> float:
    """1, 2 or 5 times a power of ten, of a per cent at least."""
    step = 0.001
    for factor in (2, 2.5, 2) * 6:
        if step >= value:
            break
        step *= factor
    return step
