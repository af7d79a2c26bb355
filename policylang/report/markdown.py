"""Markdown that shows words of a policy or a graph as they are: nothing of them becomes markup, a link or a mention."""

from __future__ import annotations

import re

from policylang.language.wording import one_line, printable

_MEANS_SOMETHING = re.compile(r"[^\w\s.,:;()/×→…%+\-=']|//|www\.")


def code(text: str) -> str:
    """Within a line, between more backticks than it has in a row itself."""
    text = one_line(text)
    fence = "`" * (_longest(text) + 1)
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text}{padding}{fence}" if text else ""


def words(text: str) -> str:
    """As it is, or as code where it has a sign that could mean something: nobody is mentioned in code."""
    return code(text) if _MEANS_SOMETHING.search(text) else text


def fenced(text: str, language: str) -> str:
    """A block of code."""
    fence = "`" * max(3, _longest(text) + 1)
    return f"{fence}{language}\n{printable(text)}\n{fence}"


def _longest(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
