"""Symbols of a policy and of a workspace, and formatting as edits of the places that differ."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from attrs import define, field, frozen
from lsprotocol import types

from policylang.editor.names import PolicyFiles
from policylang.editor.state import Positions, State
from policylang.language import syntax
from policylang.language.diagnostics import Source, Span
from policylang.language.grammar import words_of
from policylang.language.layout import LayoutChange, layout_changes, layout_changes_between
from policylang.language.lexer import comments, split
from policylang.language.shown import shortened
from policylang.language.syntax import Let, Statement

_LONGEST = 80
_LONGEST_HEADING = 60
_BANNER = re.compile(r"#\s*([-=*#~])\1\1+\s*(?P<title>.*?\w.*?)\s*(?:\1\1\1+)?\s*#?")
_LONGEST_BANNER = 200
_SENTENCE = re.compile(r"(.*?[^.])[.:](?=\s)", re.DOTALL)
_KIND = types.SymbolKind
_KINDS: dict[type, types.SymbolKind] = {
    syntax.PolicyName: _KIND.Module,
    syntax.Include: _KIND.File,
    syntax.Let: _KIND.Variable,
    syntax.Rule: _KIND.Function,
    syntax.Undecided: _KIND.Function,
    syntax.ExpectTotal: _KIND.Boolean,
    syntax.ExpectCount: _KIND.Boolean,
    syntax.ExpectFate: _KIND.Boolean,
    syntax.Requires: _KIND.Property,
    syntax.Device: _KIND.Property,
    syntax.Blocks: _KIND.Property,
}
"""Rewrites and scheduling lines, which are not here, are events."""


@define
class Comment:
    """Comment lines that follow each other, with no statement on them."""

    source: Source
    start: int
    end: int

    @property
    def banner(self) -> str | None:
        """The title of a comment such as ``# --- the work ----``."""
        if self.end - self.start > _LONGEST_BANNER:
            return None
        found = _BANNER.fullmatch(self.source.text[self.start : self.end].rstrip())
        return found["title"] if found else None

    @property
    def title(self) -> str:
        """Its first sentence."""
        lines = self.source.text[self.start : self.end].splitlines()
        text = " ".join(" ".join(line.strip().lstrip("#") for line in lines).split())
        sentence = _SENTENCE.match(f"{text} ")
        return shortened(sentence[1] if sentence else text.rstrip("."), _LONGEST_HEADING)


@frozen
class StatementExtent:
    """A statement with all of its words, as they stand in the text."""

    statement: Statement
    start: int
    end: int


@define
class Paragraph:
    """Statements on lines that follow each other, and the comment right above them, where there is one."""

    heading: Comment | None
    statements: list[StatementExtent] = field(factory=list)

    @property
    def is_headed(self) -> bool:
        """True if the comment is about several statements; one about a single statement belongs to it."""
        return self.heading is not None and len(self.statements) > 1

    @property
    def end(self) -> int:
        return self.statements[-1].end


def _layout(state: State) -> list[Comment | Paragraph]:
    """The banners of a document, and the paragraphs of its statements that can be read, in the order of the text."""
    source = state.document.source
    found: list[Comment | Paragraph] = []
    above: Comment | None = None
    last = -1
    for item in _items(state):
        line = _line(source, item.start)
        if isinstance(item, Comment):
            if above is not None and line == last + 1 and item.banner is None and above.banner is None:
                above.end = item.end
            else:
                above = item
                if item.banner is not None:
                    found.append(item)
        elif above is None and line <= last + 1 and found and isinstance(paragraph := found[-1], Paragraph):
            paragraph.statements.append(item)
        else:
            heads = above is not None and line == last + 1 and above.banner is None
            found.append(Paragraph(above if heads else None, [item]))
            above = None
        last = _line(source, item.end)
    return found


def symbols(state: State) -> list[types.DocumentSymbol]:
    """The statements of a document, under the comment lines that head them."""
    positions = state.document.positions
    top: list[types.DocumentSymbol] = []
    section: types.DocumentSymbol | None = None
    for each in _layout(state):
        if isinstance(each, Comment):
            section = _heading(positions, each.banner or "", each.start, each.end, each.end, [])
            top.append(section)
            continue
        into = top if section is None else list(section.children or ())
        inner = [_symbol(positions, statement) for statement in each.statements]
        if each.heading is not None and each.is_headed:
            inner = [_heading(positions, each.heading.title, each.heading.start, each.heading.end, each.end, inner)]
        into += inner
        if section is not None:
            section.children = into
            section.range = types.Range(section.range.start, positions.position(each.end))
    return top


def flat(state: State, found: Sequence[types.DocumentSymbol], inside: str = "") -> list[types.SymbolInformation]:
    """The symbols as a list, for a client that takes no tree."""
    made: list[types.SymbolInformation] = []
    for each in found:
        where = types.Location(state.document.uri, each.range)
        made.append(types.SymbolInformation(where, each.name, each.kind, container_name=inside or None))
        made += flat(state, each.children or (), each.name)
    return made


def workspace_symbols(
    around: PolicyFiles, query: str, encoding: types.PositionEncodingKind
) -> list[types.SymbolInformation]:
    """The ``let`` names of all policies whose letters hold those of a query, in its order."""
    made: list[types.SymbolInformation] = []
    for root in around.roots:
        text = around.texts[root]
        positions = Positions(text.source.text, encoding)
        for each in text.occurrences.names if "let" in text.source.text else ():
            if each.defines and _fits(query, each.name):
                where = types.Location(text.uri, positions.range(each.span))
                file = os.path.basename(text.source.name)
                made.append(types.SymbolInformation(where, each.name, _KIND.Variable, container_name=file))
    return made


def _one_line(span: Span) -> str:
    """A statement on one line, without the comments in it."""
    parts, done = [], span.start
    for start, end in comments(Source("", span.text)):
        parts.append(span.source.text[done : span.start + start])
        done = span.start + end
    return " ".join("".join((*parts, span.source.text[done : span.end])).split())


def _items(state: State) -> Iterator[StatementExtent | Comment]:
    """Statements and the comments on lines of their own, in the order of the text."""
    source = state.document.source
    ends = dict(split(source).ranges)
    pending: list[StatementExtent | Comment] = []
    for statement in state.text.file.statements:
        start = statement.span.start
        pending.append(StatementExtent(statement, start, words_of(source, start, ends[start])[-1].span.end))
    pending += [Comment(source, *each) for each in comments(source)]
    done = 0
    for item in sorted(pending, key=lambda each: each.start):
        if item.start < done:
            continue  # a comment within a statement
        if isinstance(item, StatementExtent):
            done = item.end
            yield item
        elif not source.text[source.text.rfind("\n", 0, item.start) + 1 : item.start].strip():
            yield item


def _symbol(positions: Positions, extent: StatementExtent) -> types.DocumentSymbol:
    span = Span(extent.statement.span.source, extent.start, extent.end)
    name, detail = _one_line(span), None
    selected = positions.between(span.start, span.start + len(span.text.partition("\n")[0].rstrip()))
    if isinstance(extent.statement, Let):
        detail = name.partition("=")[2]
        name = extent.statement.name
        at = span.start + span.text.index(name, len("let"))
        selected = positions.between(at, at + len(name))
    kind = _KINDS.get(type(extent.statement), _KIND.Event)
    told = None if detail is None else shortened(detail.strip(), _LONGEST)
    return types.DocumentSymbol(shortened(name, _LONGEST), kind, positions.range(span), selected, told)


def _heading(
    positions: Positions, title: str, start: int, comment: int, end: int, inner: list[types.DocumentSymbol]
) -> types.DocumentSymbol:
    whole, selected = positions.between(start, end), positions.between(start, comment)
    return types.DocumentSymbol(title or "#", _KIND.Namespace, whole, selected, children=inner)


def _line(source: Source, offset: int) -> int:
    return source.line_column(offset)[0] - 1


def _fits(query: str, name: str) -> bool:
    letters = iter(name.lower())
    return all(letter in letters for letter in query.lower())


def formatted(state: State) -> list[types.TextEdit] | None:
    """The edits that bring a document into canonical form; None where a mistake leaves it without one."""
    changes = layout_changes(state.document.source)
    return None if changes is None else [_edit(state, each) for each in changes]


def formatted_between(state: State, start: int, end: int) -> list[types.TextEdit]:
    """The edits of the lines between two offsets; none where a mistake leaves the document without canonical form."""
    return [_edit(state, each) for each in layout_changes_between(state.document.source, start, end)]


def _edit(state: State, change: LayoutChange) -> types.TextEdit:
    return types.TextEdit(state.document.positions.between(change.start, change.end), change.text)
