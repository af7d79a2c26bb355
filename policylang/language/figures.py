"""Figures as reports print them: rounded for people, where the language's own units round-trip."""

from __future__ import annotations

from typing import Literal

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_FLOPS = ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")


def figure(value: float, dimension: Literal["bytes", "flops", "fraction"]) -> str:
    """``219.5 MiB``, ``1.2 TFLOP``, ``21.3%``: one decimal, none where it would be a zero."""
    if dimension == "fraction":
        return f"{_short(value * 100)}%"
    base, units = (1024.0, _BYTES) if dimension == "bytes" else (1000.0, _FLOPS)
    index = 0
    while index + 1 < len(units) and round(value, 1) >= base:
        value /= base
        index += 1
    return f"{_short(value)} {units[index]}"


def beside(value: float, limit: float, dimension: Literal["bytes", "flops", "fraction"]) -> str:
    """A figure that is printed beside a limit: exact where rounding would hide which of the two is larger."""
    text = figure(value, dimension)
    if value == limit or text != figure(limit, dimension):
        return text
    if dimension == "fraction":
        return f"{value * 100:.6g}%"
    return f"{text} ({int(value):,} {'bytes' if dimension == 'bytes' else 'FLOP'})"


def _short(value: float) -> str:
    text = f"{value:.1f}"
    return text.removesuffix(".0")
