"""The fenced blocks of a Markdown file, and what the comments of its policies claim: ``# matches: mm, mm_2``.

A comment is cut at ``;``. A piece that starts with one of the words and a colon is a claim, any other is prose. After a
statement, a claim is about that statement; on a separate line, about the whole policy.
"""

from __future__ import annotations

import re

from attrs import evolve, frozen

from policylang.language.diagnostics import CODES, Diagnostic, Fix, Source, Span, diagnose, written
from policylang.language.lexer import comments, split
from policylang.language.shown import did_you_mean, nearest

_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<marks>`{3,}|~{3,})(?P<info>.*)")
_HEADING = re.compile(r"#{1,6}[ \t]")
_WORD = re.compile(r"\S+")


@frozen
class Fence:
    """A fenced block. ``section`` counts the headings above it."""

    words: tuple[Span, ...]
    """The words behind the opening fence: its language first."""
    start: int
    """The offset of its content in the file."""
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
    """The content of a block as a separate source, whose lines have the numbers that they have in the file."""
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


CANNOT_BE_READ = "APL512"

OF_STATEMENTS = ("matches", "decides", "moves")
OF_POLICY = ("saved", "recomputed")
OF_DIAGNOSTICS = ("error", "warning")
WORDS = (*OF_STATEMENTS, *OF_POLICY, *OF_DIAGNOSTICS)
NOTHING = "nothing"

_CLAIM = re.compile(r"\s*(?P<word>[A-Za-z]+)\s*:(?P<value>.*)", re.DOTALL)
_WITHOUT_COLON = re.compile(r"\s*(error|warning)\s+APL\d+")
_CODE = re.compile(r"APL\d{3}")
_NAME = re.compile(r"\w+")
_COUNT = re.compile(r"\d{1,9}")


@frozen
class Claim:
    """``span`` is where it is written; ``lines`` are those of the statement that it is about, first and last, None for
    the whole policy."""

    word: str
    values: tuple[str, ...]
    """Node names or codes; empty for ``nothing``."""
    count: int | None
    """The number of nodes, where one is given in place of names."""
    span: Span
    lines: tuple[int, int] | None


def read_claims(source: Source) -> tuple[list[Claim], list[Diagnostic]]:
    """The claims of a policy's text, and what keeps others from being read."""
    claims: list[Claim] = []
    problems: list[Diagnostic] = []
    statements: dict[int, tuple[int, int]] = {}  # line to the first and last line of the statements that it holds
    for start, end in split(source).ranges:
        first, last = source.line_column(start)[0], source.line_column(end)[0]
        first = statements.get(first, (first, last))[0]
        statements |= dict.fromkeys(range(first, last + 1), (first, last))
    for start, end in comments(source):
        at = start + 1
        line = source.line_column(start)[0]
        alone = not source.text[source.text.rfind("\n", 0, start) + 1 : start].strip()
        lines = None if alone else statements.get(line, (line, line))
        for piece in source.text[start + 1 : end].split(";"):
            lead = len(piece) - len(piece.lstrip())
            span = Span(source, at + lead, at + len(piece.rstrip()))
            at += len(piece) + 1
            found = _read(piece, span, lines)
            if isinstance(found, Claim):
                claims.append(found)
            elif found is not None:
                problems.append(found)
    return claims, problems


def _read(piece: str, span: Span, lines: tuple[int, int] | None) -> Claim | Diagnostic | None:
    def wrong(message: str, help: str | None = None, fixes: tuple[Fix, ...] = ()) -> Diagnostic:
        return diagnose(CANNOT_BE_READ, message, span, help=help, fixes=fixes)

    found = _CLAIM.fullmatch(piece)
    if found is None:
        forgotten = _WITHOUT_COLON.match(piece)
        return wrong(f"a claim has a colon: `{forgotten[1]}: …`") if forgotten else None
    word, values = found["word"], [value.strip() for value in found["value"].split(",")]
    if word not in WORDS:
        near = nearest(word, WORDS)
        at = Span(span.source, span.start, span.start + len(word))
        fixes = written(at, near, near=True) if at.text == word else ()
        return wrong(f"there is no claim `{word}:`", did_you_mean(near), fixes) if near else None
    if word in OF_STATEMENTS and lines is None:
        return wrong(f"`{word}:` is about a statement", "write it after the rule or the `let` that it is about")
    if word in OF_POLICY and lines is not None:
        return wrong(f"`{word}:` is about the whole policy", "write it on a separate line")
    if word in OF_DIAGNOSTICS:
        for value in values:
            if not _CODE.fullmatch(value):
                return wrong(f"`{value}` is no code", "for example `# error: APL301`")
        unknown = [value for value in values if value not in CODES]
        return (
            wrong(f"no diagnostic has the code `{unknown[0]}`")
            if unknown
            else Claim(word, (*values,), None, span, lines)
        )
    if values == [NOTHING]:
        return Claim(word, (), None, span, lines)
    if len(values) == 1 and _COUNT.fullmatch(values[0]):
        return Claim(word, (), int(values[0]), span, lines)
    if others := [value for value in values if not _NAME.fullmatch(value)]:
        help = f"after `{word}:` come names of nodes, their number, or `{NOTHING}`"
        return wrong(f"`{others[0]}` is no name of a node", help)
    return Claim(word, tuple(values), None, span, lines)
