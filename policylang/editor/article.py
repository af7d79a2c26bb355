"""Texts of paragraphs, lists and lines of the language, as Markdown and as plain text, and the figures in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Literal

from attrs import define, field
from lsprotocol import types

from policylang.language.shown import Dimension, counted, format_quantity, printable
from policylang.planning.inspection.breakdown import Amounts, Breakdown
from policylang.planning.inspection.worth import Worth
from policylang.report import layout
from policylang.report.layout import bytes_text, seconds_text

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters that mark code in a line; no text has them."""
_CODE = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~])")
_MARKS = str.maketrans("", "", _OPEN + _CLOSE)


def code(text: str) -> str:
    """Marks text of the policy or the graph as code within a line."""
    return f"{_OPEN}{' '.join(text.translate(_MARKS).split())}{_CLOSE}"


def with_code(text: str) -> str:
    """Marks as code what a line has between backticks."""
    return re.sub(r"`([^`]*)`", lambda found: code(found[1]), text)


@define
class Article:
    """The text about one subject, in blocks."""

    blocks: list[tuple[Literal["text", "item", "policy"], str]] = field(factory=list)

    def say(self, *lines: str) -> Article:
        """A paragraph each; empty ones are left out."""
        self.blocks.extend(("text", line) for line in lines if line)
        return self

    def items(self, lines: Iterable[str]) -> Article:
        """A list; empty lines are left out."""
        self.blocks.extend(("item", line) for line in lines if line)
        return self

    def policy(self, text: str) -> Article:
        if stripped := text.translate(_MARKS).replace("\r", "").strip("\n"):
            self.blocks.append(("policy", stripped))
        return self

    def follow(self, other: Article) -> Article:
        self.blocks.extend(other.blocks)
        return self

    def markdown(self) -> str:
        return self._joined(_markdown, lambda text: layout.fenced(text, "apl"))

    def plain(self) -> str:
        return printable(self._joined(lambda line: line.translate(_MARKS), lambda text: text))

    def content(self, *, markdown: bool) -> types.MarkupContent:
        if markdown:
            return types.MarkupContent(types.MarkupKind.Markdown, self.markdown())
        return types.MarkupContent(types.MarkupKind.PlainText, self.plain())

    def _joined(self, line: Callable[[str], str], policy: Callable[[str], str]) -> str:
        shown: list[str] = []
        before = ""
        for kind, text in self.blocks:
            if shown:
                shown.append("\n" if kind == before == "item" else "\n\n")
            shown.append(policy(text) if kind == "policy" else f"{'- ' if kind == 'item' else ''}{line(text)}")
            before = kind
        return "".join(shown)


def _markdown(line: str) -> str:
    parts = _CODE.split(line)
    return "".join(
        layout.code(part) if at % 2 else _MARKUP.sub(r"\\\1", printable(part)) for at, part in enumerate(parts)
    )


MINUS = "\N{MINUS SIGN}"
BETWEEN = " · "


def signed(amount: float, dimension: Dimension) -> str:
    """``−1.9 GiB``, ``+8.2 TFLOP``; empty for what would be printed as nothing."""
    text = format_quantity(abs(amount), dimension)
    return "" if text.startswith("0 ") else f"{'+' if amount > 0 else MINUS}{text}"


def values(count: int) -> str:
    return counted(count, "value")


def in_short(parts: Iterable[str]) -> str:
    return BETWEEN.join(filter(None, parts))


def worth_parts(worth: Worth) -> list[str]:
    """The changes that a rule makes: bytes kept, FLOPs recomputed and, on a device, time."""
    found = [signed(worth.saved_bytes, "bytes"), signed(worth.recomputed_flops, "flops")]
    if worth.recomputed_seconds is not None:
        found.append(signed(worth.recomputed_seconds, "seconds"))
    return [each for each in found if each] or ["changes nothing"]


def totals(found: Breakdown) -> str:
    """``keeps 18.3 GiB · recomputes 24.2% · peak 41.1 GiB · 1.07 s``: the share is one of the forward's operations."""
    under, amounts = found.under, found.under.amounts
    return in_short(
        (
            f"keeps {bytes_text(amounts.saved_bytes)}",
            f"offloads {bytes_text(amounts.offloaded_bytes)}" if amounts.offloaded else "",
            recomputed_share(found),
            f"peak {bytes_text(under.peak.bytes)}",
            f"step {format_quantity(under.time.step, 'seconds')}" if under.time is not None else "",
        )
    )


def recomputed_share(found: Breakdown) -> str:
    """The recomputed share of the operations; in bytes where it has none. Empty where nothing is recomputed."""
    amounts = found.under.amounts
    if not amounts.recomputed:
        return ""
    if not found.forward_flops or not amounts.recomputed_flops:
        return f"recomputes {bytes_text(amounts.recomputed_bytes)}"
    return f"recomputes {format_quantity(amounts.recomputed_flops / found.forward_flops, 'fraction')}"


def amounts_text(amounts: Amounts) -> str:
    """``37 MiB saved, 260.3 MiB and 3.9 GFLOP recomputed, which takes 12 ms``."""
    said = []
    if amounts.saved:
        said.append(f"{bytes_text(amounts.saved_bytes)} saved")
    if amounts.offloaded:
        said.append(f"{bytes_text(amounts.offloaded_bytes)} offloaded")
    if amounts.recomputed:
        work = f" and {format_quantity(amounts.recomputed_flops, 'flops')}" if amounts.recomputed_flops else ""
        took = seconds_text(amounts.recomputed_seconds)
        said.append(f"{bytes_text(amounts.recomputed_bytes)}{work} recomputed{took and f', which takes {took}'}")
    return ", ".join(said)
