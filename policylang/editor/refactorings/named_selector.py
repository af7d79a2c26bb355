"""A selector that gets a name: a ``let`` above its statement, and the name in its place."""

from __future__ import annotations

from itertools import count
from typing import Any

from attrs import evolve

from policylang.editor.names.occurrences import occurrences
from policylang.editor.state import State
from policylang.language.diagnostics import Fix, Source, Span, TextChange, put_before
from policylang.language.grammar import keywords
from policylang.language.parser import parse_file
from policylang.language.syntax import Let, Selector, Statement, Word
from policylang.language.walk import rebuild, selector_of, walk

_NAME = "picked"


def named_selector(state: State, start: int, end: int) -> Fix | None:
    """What gives the selector between two offsets a name; None for what is no whole selector, or a name already."""
    source = state.document.source
    text = source.text[start:end]
    start, end = start + len(text) - len(text.lstrip()), end - len(text) + len(text.rstrip())
    for statement in state.text.file.statements if start < end else ():
        selector = selector_of(statement)
        if selector is None or not statement.span.start <= start <= end <= statement.span.end:
            continue
        part = next((each for each in walk(selector) if (each.span.start, each.span.end) == (start, end)), None)
        if part is not None and not isinstance(part, Word):
            return _named(state, statement, part)
    return None


def _named(state: State, statement: Statement, part: Selector) -> Fix | None:
    source, written = state.document.source, part.span.text
    taken = {each.name for each in occurrences(source).names} | keywords()
    taken |= {each.statement.name for each in state.text.expansion.statements if isinstance(each.statement, Let)}
    name = next(each for number in count(1) if (each := f"{_NAME}{'' if number == 1 else number}") not in taken)
    above = put_before(statement.span, f"let {name} = {f'({written})' if chr(10) in written else written}")
    place = Span(source, part.span.start, part.span.end)
    mend = Fix("give this selector a name", (*above.changes, TextChange(place, name)))
    return mend if _says_the_same(state, mend, statement, part, name) else None


def _says_the_same(state: State, mend: Fix, statement: Statement, part: Selector, name: str) -> bool:
    """Whether the text is read as before, but for the name, and the name stands for what it stands in place of."""
    before, found = state.text.file.statements, parse_file(state.document.source)[1]
    file, wrong = parse_file(Source("", mend.applied(state.document.source)))
    at = next(number for number, each in enumerate(before) if each is statement)
    if len(wrong) != len(found) or len(file.statements) != len(before) + 1:
        return False
    let = file.statements[at]
    if not isinstance(let, Let) or (let.name, let.selector) != (name, part):
        return False
    others = [*file.statements[:at], with_names_read(file.statements[at + 1], name, part), *file.statements[at + 2 :]]
    return others == list(before)


def with_names_read(statement: Statement, name: str, selector: Selector) -> Statement:
    """A statement with what a name stands for in place of the name."""
    own = selector_of(statement)
    if own is None:
        return statement
    read = rebuild(own, lambda each: selector if isinstance(each, Word) and each.text == name else each)
    whole: Any = statement
    changed: Statement = evolve(whole, selector=read)
    return changed
