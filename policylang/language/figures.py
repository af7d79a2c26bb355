"""Figures, counts and lists as reports print them: rounded and cut short for people."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

_NUMBER = re.compile(r"(\d+)")
_MOST_UNCOUNTED = 6
_SCALES: Mapping[str, tuple[float, float, tuple[str, ...]]] = {
    "bytes": (1024.0, 1.0, ("B", "KiB", "MiB", "GiB", "TiB")),
    "flops": (1000.0, 1.0, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")),
    "seconds": (1000.0, 1e-9, ("ns", "us", "ms", "s")),
}
"""By what is measured: from one unit to the next, the least of them, and all."""

Measured = Literal["bytes", "flops", "seconds", "fraction", "number"]
"""What a figure is of."""


def figure(value: float, dimension: Measured) -> str:
    """``219.5 MiB``, ``1.2 TFLOP``, ``12.3 ms``, ``21.3%``: one decimal, none where it would be a zero. Numbers are
    whole."""
    if dimension == "number":
        return f"{int(value):,}"
    if dimension == "fraction":
        return f"{_short(value * 100)}%"
    if dimension == "seconds" and not value:
        return "0 s"
    base, least, units = _SCALES[dimension]
    value /= least
    index = 0
    while index + 1 < len(units) and round(value, 1) >= base:
        value /= base
        index += 1
    return f"{_short(value)} {units[index]}"


def beside(value: float, limit: float, dimension: Measured) -> str:
    """A figure that is printed beside a limit: exact where rounding would hide which of the two is larger."""
    text = figure(value, dimension)
    if value == limit or text != figure(limit, dimension):
        return text
    if dimension == "fraction":
        return f"{value * 100:.6g}%"
    if dimension == "number":
        return text
    if dimension == "seconds":
        return f"{text} ({value:.9g} s)"
    return f"{text} ({int(value):,} {'bytes' if dimension == 'bytes' else 'FLOP'})"


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 node``, ``1,024 nodes``."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def listed(names: Sequence[str], most: int, total: int | None = None) -> str:
    """``mm, mm_1, and 3 more``: the first names, of ``total`` where ``names`` are not all of them."""
    more = (len(names) if total is None else total) - most
    return ", ".join((*names[:most], *([f"and {more:,} more"] if more > 0 else ())))


def joined(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def folded_names(names: Sequence[str]) -> str:
    """``layers.0–31``, ``layers.0, 2, 4``: names that differ in one number alone are written once."""
    if len(names) == 1:
        return names[0]
    parts = [_NUMBER.split(name) for name in names]
    if len({len(each) for each in parts}) > 1:
        return ", ".join(names)
    differing = [at for at, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    if len(differing) != 1 or differing[0] % 2 == 0:
        return ", ".join(names)
    at = differing[0]
    before, after = "".join(parts[0][:at]), "".join(parts[0][at + 1 :])
    return f"{before}{_ranges(sorted(int(each[at]) for each in parts))}{after}"


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    step = numbers[1] - numbers[0]
    if step > 1 and len(numbers) > 3 and all(b - a == step for a, b in pairwise(numbers)):
        return f"{numbers[0]}, {numbers[1]}, …, {numbers[-1]}"
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def first_lines(lines: Sequence[str], most: int, noun: str = "more") -> tuple[str, ...]:
    """At most so many lines; the last says how many others there are."""
    if len(lines) <= most:
        return tuple(lines)
    return (*lines[: most - 1], f"… and {len(lines) - most + 1} {noun}")


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


UNCOUNTED_UNKNOWN = "which operators have no FLOP formula is not in this snapshot: an older policylang wrote it"


def uncounted_text(calls: Mapping[str, int]) -> str:
    """``mylib.fused_mlp.default ×8, triton.scan_kernel``: operators that no FLOP formula counts."""
    return f"{_calls(calls)} (no FLOP formula, so counted as 0)"


def priced_by_bytes_text(calls: Mapping[str, int]) -> str:
    """The same operators where their time is printed."""
    return f"{_calls(calls)} (no FLOP formula, so priced by bytes)"


def _calls(calls: Mapping[str, int]) -> str:
    return listed([f"{name} ×{count}" if count > 1 else name for name, count in calls.items()], _MOST_UNCOUNTED)


def file_name(path: str) -> str:
    """The last part of a path of this or another system."""
    return path.replace("\\", "/").rsplit("/", 1)[-1]


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
