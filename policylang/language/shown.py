"""Units of figures (``64 MiB``, ``400 us``, ``20%``); figures, counts and names as people are shown them.

Figures are rounded, names cut short, with nothing that a terminal acts on. A name in a graph or a line of a policy may
hold anything: escape sequences, marks that turn the direction of text, line ends. Data knows no renderer:
``policylang.report`` registers its own for :func:`as_text` when it is imported, as the first public name does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import singledispatch
from itertools import chain, pairwise
from math import inf, nextafter
from typing import Literal

Dimension = Literal["bytes", "flops", "seconds", "fraction", "number"]

UNITS: dict[str, tuple[float, Dimension]] = {
    "B": (1, "bytes"),
    **{f"{prefix}B": (1000.0**power, "bytes") for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": (1024.0**power, "bytes") for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}FLOP": (1000.0**power, "flops") for power, prefix in enumerate(("", "K", "M", "G", "T", "P"))},
    **{f"{prefix}FLOPs": (1000.0**power, "flops") for power, prefix in enumerate(("", "K", "M", "G", "T", "P"))},
    "s": (1, "seconds"),
    "ms": (1e-3, "seconds"),
    "us": (1e-6, "seconds"),
    "ns": (1e-9, "seconds"),
    **dict.fromkeys(("\N{MICRO SIGN}s", "\N{GREEK SMALL LETTER MU}s"), (1e-6, "seconds")),
    "%": (0.01, "fraction"),
}

_STEPS: dict[Dimension, tuple[tuple[str, float], ...]] = {
    "bytes": (("TiB", 1024.0**4), ("GiB", 1024.0**3), ("MiB", 1024.0**2), ("KiB", 1024.0), ("B", 1.0)),
    "flops": (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("KFLOP", 1e3), ("FLOP", 1.0)),
    "seconds": (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)),
    "fraction": (("%", 0.01),),
    "number": (("", 1.0),),
}

DIMENSION_NAMES: dict[Dimension, str] = {
    "number": "plain numbers",
    "bytes": "bytes",
    "flops": "operations",
    "seconds": "seconds",
    "fraction": "per cent",
}


def read_quantity(number: str, unit: str) -> tuple[float, Dimension]:
    """The figure that a number with a unit is, and of what: ``read("64", "MiB") == (67108864.0, "bytes")``.

    Times are read in decimals, so that ``0.4 ms`` and ``400 us`` are one figure.

    Raises:
        KeyError: there is no such unit.
    """
    scale, dimension = UNITS[unit]
    if dimension == "seconds":
        return float(Decimal(number) * Decimal(repr(scale))), dimension
    return float(number) * scale, dimension


def write_quantity(value: float, dimension: Dimension) -> str:
    """The shortest text that reads back as exactly this figure: ``write(67108864, "bytes") == "64 MiB"``."""
    if dimension == "seconds":
        exact = Decimal(repr(value))
        scales = ((unit, Decimal(repr(scale))) for unit, scale in _STEPS["seconds"] if value >= scale)
        times = [f"{_plain(exact / scale)} {unit}" for unit, scale in scales]
        short = (text for text in times if len(text.split()[0]) <= 6)
        return next(chain(short, times), f"{_plain(exact * 10**9)} ns") if value else "0 s"
    for unit, scale in _STEPS[dimension]:
        text = _number(value / scale)
        if abs(value) >= scale and len(text) <= 6 and float(text) * scale == value:
            return f"{text}%" if unit == "%" else f"{text} {unit}".strip()
    unit, scale = _STEPS[dimension][-1]
    if dimension == "fraction":  # the per cent that, divided by a hundred again, are this very fraction
        guess = value * 100
        near = (*(round(guess, digits) for digits in range(16)), guess, nextafter(guess, inf), nextafter(guess, 0))
        return f"{_number(next((each for each in near if each * 0.01 == value), guess))}%"
    return f"{_number(value)} {unit}".strip()


def _number(value: float) -> str:
    """The shortest decimal that is this very number, without an exponent."""
    return _plain(Decimal(repr(value)))


def _plain(number: Decimal) -> str:
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def decimal_percent(share: Fraction) -> str:
    """Per cent of a share that was written in decimals: ``12.5`` for an eighth."""
    percent = share * 100
    return _plain(Decimal(percent.numerator) / Decimal(percent.denominator))


DTYPES: tuple[str, ...] = (
    *("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *(
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
    ),
    *("bool", "complex32", "complex64", "complex128", "qint8", "quint8", "qint32"),
)

ALIASES: dict[str, str] = {
    "bf16": "bfloat16",
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
    **dict(zip(("char", "short", "int", "long"), ("int8", "int16", "int32", "int64"), strict=True)),
}


_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_COMMAND = re.compile(r"(^\s*:(?=:))|(##)(?=\[|vso\[)", re.MULTILINE)
"""Commands of CI runners: GitHub's `::error …` at the start of a line, and `##[…` anywhere."""


@singledispatch
def as_text(value: object) -> str:
    """A value as a person reads it in a terminal, without a line end. Raises ``TypeError`` where nothing renders it."""
    raise TypeError(f"nothing renders a {type(value).__qualname__} as text")


@singledispatch
def as_page(value: object) -> str:
    """A value as a separate HTML page. Raises ``TypeError`` if nothing renders it."""
    raise TypeError(f"nothing renders a {type(value).__qualname__} as a page")


def printable(text: str, kept: str = "\n\t") -> str:
    """The text with a mark in place of every character that is neither printable nor one of ``kept``."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in kept else _UNKNOWN for each in text)


def one_line(text: str) -> str:
    """The printable text on one line: each run of blanks becomes a space."""
    return text if text.isprintable() else printable(" ".join(text.split()), "")


def logged(text: str) -> str:
    """Text for people, line by line: printable, and no line that a build log reads as a command."""
    return _COMMAND.sub(r"\1\2 ", printable(text))


# Not difflib's get_close_matches: by its ratio the nearest to `mn` is `min` and not `mm`, and `rms_norm` is close to
# `layer_norm`. Edits name what was meant and little else.
_LONGEST = 80
_SHORTEST_PART = 6


def nearest(word: str, known: Iterable[str], *, limit: int = 3) -> tuple[str, ...]:
    """The known words closest to ``word``, best first; empty where none is close.

    A word that differs in capitals alone is the one that was meant. Close are words that hold the misspelt one as a
    part, the shortest first (``flash_attention`` for its full name), and words at most one edit (a character more,
    less, other, or two swapped) in three characters away.
    """
    wanted = word.lower()
    if not wanted or len(wanted) > _LONGEST:
        return ()
    known = tuple(dict.fromkeys(known))
    if same := [candidate for candidate in known if candidate.lower() == wanted]:
        return tuple(same[:limit])
    bound = max(1, len(wanted) // 3)
    edited: list[tuple[int, int, bool, str]] = []
    holding: list[tuple[int, str]] = []
    for candidate in known:
        folded = candidate.lower()
        if len(wanted) >= _SHORTEST_PART and wanted in folded:
            holding.append((len(folded), candidate))
            continue
        distance = _distance(wanted, folded, bound)
        if distance <= bound and distance < len(wanted):
            edited.append((distance, abs(len(folded) - len(wanted)), candidate != folded, candidate))
    best = min((distance for distance, *_ in edited), default=0)
    close = [candidate for distance, _, _, candidate in sorted(edited) if distance <= best + 1]
    return tuple(([candidate for _, candidate in sorted(holding)] + close)[:limit])


def did_you_mean(words: Iterable[str]) -> str | None:
    """The help line for some nearest words; None where there are none."""
    quoted = [f"`{word}`" for word in words]
    return f"did you mean {joined(quoted, 'or')}?" if quoted else None


def _distance(left: str, right: str, bound: int) -> int:
    """Edits from one word to the other, swaps of neighbours counted once; more than ``bound`` where it is more."""
    if abs(len(left) - len(right)) > bound:
        return bound + 1
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        following = [i]
        for j, b in enumerate(right, 1):
            cost = min(row[j] + 1, following[j - 1] + 1, row[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and b == left[i - 2]:
                cost = min(cost, before[j - 2] + 1)
            following.append(cost)
        if min(following) > bound:
            return bound + 1
        before, row = row, following
    return row[-1]


_NUMBER = re.compile(r"(\d+)")
_MOST_UNCOUNTED = 6
_SCALES: Mapping[str, tuple[float, float, tuple[str, ...]]] = {
    "bytes": (1024.0, 1.0, ("B", "KiB", "MiB", "GiB", "TiB")),
    "flops": (1000.0, 1.0, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")),
    "seconds": (1000.0, 1e-9, ("ns", "us", "ms", "s")),
}
"""By dimension: the factor between units, the smallest unit, and all units."""


def format_quantity(value: float, dimension: Dimension) -> str:
    """``219.5 MiB``, ``1.2 TFLOP``, ``12.3 ms``, ``21.3%``: one decimal unless it is zero. Numbers are whole."""
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


def beside(value: float, limit: float, dimension: Dimension) -> str:
    """A figure that is printed beside a limit: exact where rounding would hide which of the two is larger."""
    text = format_quantity(value, dimension)
    if value == limit or text != format_quantity(limit, dimension):
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


def joined(names: Sequence[str], word: str = "and") -> str:
    """``a, b and c``."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


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
    """At most so many lines; the last gives the number of the others."""
    return tuple(lines) if len(lines) <= most else (*lines[: most - 1], f"… and {len(lines) - most + 1} {noun}")


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


UNCOUNTED_UNKNOWN = "which operators have no FLOP formula is not in this snapshot: an older policylang wrote it"


def uncounted_text(calls: Mapping[str, int]) -> str:
    """``mylib.fused_mlp.default ×8, triton.scan_kernel``: operators that no FLOP formula counts."""
    return f"{_calls(calls)} (no FLOP formula, so counted as 0)"


def priced_by_bytes_text(calls: Mapping[str, int]) -> str:
    """The text for the same operators beside their time."""
    return f"{_calls(calls)} (no FLOP formula, so priced by bytes)"


def _calls(calls: Mapping[str, int]) -> str:
    return listed([f"{name} ×{count}" if count > 1 else name for name, count in calls.items()], _MOST_UNCOUNTED)


def file_name(path: str) -> str:
    """The last part of a path of this or another system."""
    return path.replace("\\", "/").rsplit("/", 1)[-1]


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
