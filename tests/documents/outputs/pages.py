"""The blocks of the pages that show what a run prints."""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).resolve().parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(
    r"^<!-- output: (?P<name>[^\n]+?) -->\n(?:```[^\n]*\n(?P<fenced>.*?)^```$|(?P<plain>(?:[^\n]+\n)+))",
    flags=re.MULTILINE | re.DOTALL,
)
_TIMED = ("demo",)
_TIMES = re.compile(r" *\b\d[\d.,]* (?:ms|s)\b|\b\d+\.\d\d×")


@frozen
class Shown:
    """One block: where it stands, and what it shows now."""

    page: Path
    name: str
    start: int
    end: int
    text: str

    @property
    def words(self) -> list[str]:
        return self.name.split()

    @property
    def above(self) -> str:
        """The page up to the block."""
        return self.page.read_text(encoding="utf-8")[: self.start]

    def __str__(self) -> str:
        return f"{self.page.stem}:{self.name}"


def blocks(page: Path) -> list[Shown]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        which = "fenced" if match["fenced"] is not None else "plain"
        found.append(Shown(page, match["name"], match.start(which), match.end(which), match[which]))
    return found


def masked(shown: Shown, text: str) -> str:
    """Without times and ratios of them where a block shows some: no two runs agree about these."""
    return _TIMES.sub("(time)", text) if shown.words[0] in _TIMED else text


def rewritten(text: str, shown: Shown, by: str) -> str:
    return text[: shown.start] + by + text[shown.end :]
