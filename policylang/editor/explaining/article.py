"""A text of paragraphs, lists and lines of the language, written once, as Markdown and as plain text.

Whatever comes from a policy or a graph is marked as code: no name of a module becomes markup.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Literal

from attrs import define, field
from lsprotocol import types

from policylang.language.wording import printable
from policylang.report import layout

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters that mark code in a line; no text has them."""
_CODE = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~])")
_MARKS = str.maketrans("", "", _OPEN + _CLOSE)


def code(text: str) -> str:
    """What the policy or the graph says, within a line."""
    return f"{_OPEN}{' '.join(text.translate(_MARKS).split())}{_CLOSE}"


def with_code(text: str) -> str:
    """A line in which code stands between backticks, as messages and meanings are written."""
    return re.sub(r"`([^`]*)`", lambda found: code(found[1]), text)


@define
class Article:
    """What is said of one thing, a block after the other."""

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
        """Lines of the language."""
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
