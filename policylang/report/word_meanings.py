"""What a word of the language means, as text and as data: for ``policylang explain WORD``."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from policylang.language.meanings.dictionary import Meaning
from policylang.report.width import columns

_WIDEST = 100


def meanings_text(word: str, found: Sequence[Meaning]) -> str:
    """A paragraph, an example and where there is more, of each sense."""
    width = columns(_WIDEST) or _WIDEST
    parts = [
        (fill(f"{word} ({each.sense}): {each.text}", width=width), f"    {each.example}", f"More in {_page(each)}.")
        for each in found
    ]
    return "\n\n".join(line for part in parts for line in part)


def meanings_data(word: str, found: Sequence[Meaning]) -> dict[str, Any]:
    said = [{"sense": e.sense, "text": e.text, "example": e.example, "section": e.section} for e in found]
    return {"word": word, "meanings": said}


def _page(meaning: Meaning) -> str:
    return f"docs/language.md, {meaning.section}"
