"""Finds what a statement that cannot be read was meant to be: a common mistake whose mend is read further.

Nothing is guessed by likeness here. A row of ``common_mistakes.py`` is said where its pattern fits and the statement,
so mended, can be read, or is read on beyond the place that was mended.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from attrs import frozen

from policylang.language.parsing.common_mistakes import mistakes
from policylang.language.parsing.mistake_patterns import Mistake

_LONGEST = 600
"""Characters of a statement that is looked at: nobody misplaces a word in a longer one and wonders why."""
_COMMENT = re.compile(r'"[^"\n]*"|(?P<comment>#[^\n]*)')

Reads = Callable[[str], int | None]
"""Where a statement's text cannot be read any further; None where all of it can be read."""


@frozen
class FoundMistake:
    """What is wrong between two offsets of a statement, and what to write there."""

    start: int
    end: int
    message: str
    help: str | None
    code: str | None
    change: tuple[int, int, str] | None = None
    """The offsets between which another text mends it, and that text; None where no text does."""


def find_mend(text: str, stops: int, reads: Reads) -> FoundMistake | None:
    """``stops``: where the text as it is cannot be read any further."""
    body = _without_comment(text)
    if len(body) > _LONGEST or not body.strip():
        return None
    partial: FoundMistake | None = None
    for mistake in mistakes():
        match = mistake.pattern.search(body)
        if match is None:
            continue
        start, end = match.span("bad")
        replacements = mistake.replacements(match)
        if not replacements:
            return partial or _mend(mistake, match, None)
        for good in replacements:
            stopped = reads(body[:start] + good + body[end:])
            if stopped is None:
                return _mend(mistake, match, good)
            if partial is None and stopped > start + len(good) and stopped - len(good) + end - start > stops:
                partial = _mend(mistake, match, good)
    return partial


def _without_comment(text: str) -> str:
    for found in _COMMENT.finditer(text):
        if found["comment"] is not None:
            return text[: found.start()].rstrip() if not text[found.end() :].strip() else ""
    return text.rstrip()


def _mend(mistake: Mistake, match: re.Match[str], good: str | None) -> FoundMistake:
    start, end = match.span("bad")
    written = match["bad"]
    start += len(written) - len(written.lstrip())
    end -= len(written) - len(written.rstrip())
    groups = {name: " ".join((text or "").split()) for name, text in match.groupdict().items()}
    help = None if mistake.help is None else mistake.help.format(good=" ".join((good or "").split()))
    if good is not None:
        shown = " ".join(good.split())
        help = help or (f"write `{shown}`" if shown else f"leave `{groups['bad']}` out")
    change = None if good is None else _change(match, good)
    return FoundMistake(start, end, mistake.message.format(**groups), help, mistake.code, change)


def _change(match: re.Match[str], good: str) -> tuple[int, int, str]:
    """The replacement as it was read, with the spaces around it as they were; a word that goes takes one along."""
    start, end = match.span("bad")
    text = match.string
    if not good:
        end += text[start - 1 : start].isspace() and text[end : end + 1].isspace()
    elif match["bad"][-1].isspace() and not good[-1].isspace() and text[end : end + 1].strip():
        good += " "
    return start, end, good
