"""Units of figures (``64 MiB``, ``2 GFLOP``, ``400 us``, ``20%``), and the names of tensor types."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from itertools import chain
from math import inf, nextafter

from policylang.language.shown import Measured

Dimension = Measured

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

NAMES: dict[Dimension, str] = {
    "number": "plain numbers",
    "bytes": "bytes",
    "flops": "operations",
    "seconds": "seconds",
    "fraction": "per cent",
}


def read(number: str, unit: str) -> tuple[float, Dimension]:
    """The figure that a number with a unit is, and of what: ``read("64", "MiB") == (67108864.0, "bytes")``.

    Times are read in decimals, so that ``0.4 ms`` and ``400 us`` are one figure.

    Raises:
        KeyError: there is no such unit.
    """
    scale, dimension = UNITS[unit]
    if dimension == "seconds":
        return float(Decimal(number) * Decimal(repr(scale))), dimension
    return float(number) * scale, dimension


def write(value: float, dimension: Dimension) -> str:
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
