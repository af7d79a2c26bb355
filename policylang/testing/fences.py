"""The fenced blocks of a Markdown file, with the words behind the opening fence."""

from __future__ import annotations

import re

from attrs import evolve, frozen

from policylang.language.diagnostics import Diagnostic, Source, Span

_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<marks>`{3,}|~{3,})(?P<info>.*)")
_HEADING = re.compile(r"#{1,6}[ \t]")
_WORD = re.compile(r"\S+")


@frozen
class Fence:
    """A fenced block. ``section`` counts the headings above it."""

    words: tuple[Span, ...]
    """Behind the opening fence: its language first."""
    start: int
    """Where its content starts in the file."""
    text: str
    section: int
    opening: Span

    @property
    def language(self) -> str:
        return self.words[0].text if self.words else ""


def fences(source: Source) -> list[Fence]:
    """The fenced blocks of a file from top to bottom; one that is never closed goes to its end."""
    found: list[Fence] = []
    opened: tuple[str, Span, int] | None = None
    section = position = 0
    for line in source.text.split("\n"):
        matched = _FENCE.fullmatch(line.rstrip("\r"))
        if opened is not None:
            marks, opening, start = opened
            if matched is not None and matched["marks"].startswith(marks) and not matched["info"].strip():
                found.append(_fence(source, opening, start, position, section))
                opened = None
        elif matched is not None and not (matched["marks"][0] == "`" and "`" in matched["info"]):
            span = Span(source, position + len(matched["indent"]), position + len(line.rstrip()))
            opened = matched["marks"], span, position + len(line) + 1
        elif _HEADING.match(line):
            section += 1
        position += len(line) + 1
    if opened is not None:
        found.append(_fence(source, opened[1], opened[2], len(source.text), section))
    return found


def _fence(source: Source, opening: Span, start: int, end: int, section: int) -> Fence:
    marks = len(opening.text) - len(opening.text.lstrip("`~"))
    words = tuple(
        Span(source, opening.start + marks + word.start(), opening.start + marks + word.end())
        for word in _WORD.finditer(opening.text[marks:])
    )
    return Fence(words, start, source.text[start:end], section, opening)


def lifted(fence: Fence) -> Source:
    """The content of a block as a source of its own, whose lines have the numbers that they have in the file."""
    source = fence.opening.source
    return Source(source.name, "\n" * fence.opening.line + fence.text)


def lowered_diagnostic(diagnostic: Diagnostic, fence: Fence, source: Source) -> Diagnostic:
    """A diagnostic of a lifted block as one of the file; what points nowhere points at the fence."""
    related = tuple(evolve(each, span=lowered(each.span, fence, source)) for each in diagnostic.related)
    return evolve(diagnostic, span=lowered(diagnostic.span, fence, source) or fence.opening, related=related)


def lowered(span: Span | None, fence: Fence, source: Source) -> Span | None:
    """A span of a lifted block as a span of the file; one of another source as it is."""
    if span is None or span.source != source:
        return span
    shift = fence.start - fence.opening.line
    return Span(fence.opening.source, span.start + shift, span.end + shift)
