"""What a word of the language means, as text and as data: for ``policylang explain WORD``."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill, indent
from typing import Any

from policylang.language.lexer import comment_above
from policylang.language.operators import prelude_group
from policylang.language.words import Meaning
from policylang.report.width import columns

_WIDEST = 100


def meanings_text(word: str, found: Sequence[Meaning]) -> str:
    """A paragraph, an example and where there is more, of each sense."""
    width = columns(_WIDEST) or _WIDEST
    said = [(fill(f"{word} ({each.sense}): {each.text}", width=width), each) for each in found]
    parts = [(text, indent(each.example, "    "), f"More in {_page(each)}.") for text, each in said]
    return "\n\n".join(line for part in parts for line in part)


def meanings_data(word: str, found: Sequence[Meaning]) -> dict[str, Any]:
    said = [{"sense": e.sense, "text": e.text, "example": e.example, "section": e.section} for e in found]
    return {"word": word, "meanings": said}


def of_group(word: str) -> tuple[Meaning, ...]:
    """What a group that every policy knows stands for; empty where the word is none."""
    let = prelude_group(word)
    if let is None:
        return ()
    text = f"A group of operators that every policy knows. {comment_above(let.span)}".strip()
    return (Meaning((word,), "group", text, let.span.text, "Groups"),)


def _page(meaning: Meaning) -> str:
    return f"docs/language.md, {meaning.section}"
