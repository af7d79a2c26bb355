"""Takes figures out of the tables of a TOML file, and says of each what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from attrs import define, field

from policylang.language.devices.positions import Path, place_of, positions
from policylang.language.devices.profile import Rate
from policylang.language.diagnostics import Diagnostic, Source, Span, diagnose
from policylang.language.units import UNITS
from policylang.language.wording import did_you_mean, nearest, shortened

LEAST_RATE, MOST_RATE = 1.0, 1e30
_MOST_SIZE = 1e30
_LONGEST = 60
_WITH_UNIT = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-zµ%]+)(/s)?\s*")
_PREFIXES = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_KINDS = {dict: "a table", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}


@define
class CheckedTables:
    """The figures of one text; what is wrong is gathered, and what asked for a figure goes on without it."""

    source: Source
    found: list[Diagnostic] = field(factory=list)
    _positions: Mapping[Path, Any] | None = None

    def key(self, path: Path) -> Span:
        return self._place(path, "key")

    def value(self, path: Path) -> Span:
        return self._place(path, "value")

    def wrong(self, code: str, message: str, span: Span, help: str | None = None) -> None:
        self.found.append(diagnose(code, message, span, help=help))

    def table(self, holder: Mapping[str, Any], path: Path, known: Iterable[str]) -> dict[str, Any] | None:
        """A table by its path, with each key that it should not have named; None where there is none."""
        name = str(path[-1])
        given = holder.get(name)
        if given is None:
            return None
        if not isinstance(given, dict):
            self.wrong(
                "APL157", f"`{name}` is {_kind(given)}, and should be a table", self.key(path), f"write `[{name}]`"
            )
            return None
        self.unknown(given, path, known)
        return given

    def unknown(self, given: Mapping[str, Any], path: Path, known: Iterable[str]) -> None:
        """Names each key that a table should not have."""
        known = tuple(known)
        where = f"in `[{path[0]}]`" if path else "in a device profile"
        for key in given:
            if key not in known:
                help = did_you_mean(nearest(key, known)) or f"there are {', '.join(f'`{each}`' for each in known)}"
                self.wrong("APL155", f"`{_short(key)}` means nothing {where}", self.key((*path, key)), help)

    def missing(self, name: str, path: Path, help: str) -> None:
        span = self._place(path, "key") if path else Span(self.source, 0, 0)
        self.wrong("APL156", f"`{name}` is missing", span, help)

    def number(
        self, value: Any, path: Path, least: float, most: float, what: str, *, above: bool = False
    ) -> float | None:
        """A figure between two others, itself above the least where ``above``; None where it is none."""
        name = _short(_name(path))
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.wrong("APL157", f"`{name}` is {_kind(value)}, and should be {what}", self.value(path), _plainly(value))
        elif not least <= value <= most or (above and value == least):
            self.wrong("APL157", f"`{name} = {_shown(value)}` cannot be: it is {what}", self.value(path))
        else:
            return float(value)
        return None

    def rate(self, value: Any, path: Path, what: str) -> Rate | None:
        """A number, or points ``[size, per second]`` of rising size."""
        if not isinstance(value, list):
            constant = self.number(value, path, LEAST_RATE, MOST_RATE, f"a number of {what} per second")
            return None if constant is None else Rate.constant(constant)
        points: list[tuple[float, float]] = []
        for at, point in enumerate(value):
            if not isinstance(point, list) or len(point) != 2:
                self._no_point(point, path, what)
                return None
            size = self.number(point[0], (*path, at), LEAST_RATE, _MOST_SIZE, f"a size, in {what}")
            rate = self.number(point[1], (*path, at), LEAST_RATE, MOST_RATE, f"a number of {what} per second")
            if size is None or rate is None:
                return None
            points.append((size, rate))
        if not points:
            self.wrong("APL157", f"`{_name(path)}` is an empty list", self.value(path), "write a number, or points")
            return None
        if any(low[0] >= high[0] for low, high in pairwise(points)):
            self.wrong("APL157", f"the sizes of `{_name(path)}` do not rise from point to point", self.value(path))
            return None
        return Rate(tuple(points))

    def _no_point(self, point: Any, path: Path, what: str) -> None:
        message = f"`{_short(_name(path))}` has {_kind(point)} that is not a size and a rate"
        help = f"a number, or points `[{what} of one, {what} per second]`: `[[1e9, 2e12], [1e12, 6e12]]`"
        self.wrong("APL157", message, self.value(path), help)

    def _place(self, path: Path, which: str) -> Span:
        if self._positions is None:
            self._positions = positions(self.source)
        place = place_of(path, self._positions)
        return Span(self.source, 0, 0) if place is None else getattr(place, which)


def _name(path: Path) -> str:
    """The last name of a path; the points of a list have none."""
    return next((each for each in reversed(path) if isinstance(each, str)), "")


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "a date or a time")


def _short(text: str) -> str:
    return shortened(text.replace("\n", " "), _LONGEST)


def _shown(value: float) -> str:
    try:
        return _short(str(value))
    except ValueError:  # Python writes no number of more than 4300 digits
        return "…"


def _plainly(value: Any) -> str | None:
    """The number that somebody means who wrote `2.6 TB/s`."""
    if not isinstance(value, str) or not (given := _WITH_UNIT.fullmatch(value)):
        return None
    number, unit, _ = given.groups()
    for name in ("FLOPS", "FLOP", "B"):
        if unit.upper().endswith(name) and unit[: -len(name)] in _PREFIXES:
            return _write(float(number) * _PREFIXES[unit[: -len(name)]])
    scale = _TIMES.get(unit) or UNITS.get(unit, (None,))[0]
    return None if scale is None else _write(float(number) * scale)


def _write(number: float) -> str:
    return f"write the plain number: `{number:g}`"
