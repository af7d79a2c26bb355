"""Where a name is defined and used, another name for it, and the file that a line names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from attrs import evolve, frozen
from lsprotocol import types

from policylang.editor.names import Occurrence, PolicyFiles, PolicyText, is_bundled, occurrences
from policylang.editor.state import Positions, State, location, positions_of, uri_of_path
from policylang.language.devices.reading import find_device
from policylang.language.diagnostics import Source, Span
from policylang.language.files import bundled_file
from policylang.language.grammar import keywords
from policylang.language.operators import prelude_group
from policylang.language.parser import parse_file
from policylang.language.statements import ACTIONS
from policylang.language.syntax import Device, Include, Let, Selector, Statement, Word
from policylang.language.walk import rebuild, selector_of

_START = types.Range(types.Position(0, 0), types.Position(0, 0))
_WORD = re.compile(r"\w+")
Around = Callable[[], PolicyFiles]


# --- definitions ---


def definition(state: State, offset: int, around: Around) -> list[types.LocationLink]:
    """Finds the ``let``, the group or the file at a character offset. A name that its own policy does not define is
    looked for in the policies ``around`` that include it."""
    part = occurrences(state.document.source).at(offset)
    if isinstance(part, Include | Device):
        path = _file_of(state, part)
        return [] if path is None else [_link(state, _target_of(part), types.Location(uri_of_path(path), _START))]
    return [] if part is None else [_link(state, part.span, *each) for each in _definitions_of(state, part, around)]


def own_definition(state: State, name: str) -> Occurrence | None:
    """The ``let`` that counts in the document's own policy: the first, one that can be read before others."""
    for placed in state.text.expansion.statements:
        if isinstance(placed.statement, Let) and placed.statement.name == name:
            return _defined_by(placed.statement)
    here = occurrences(state.document.source).of(name)
    return next((each for each in here if each.defines), None)


def _definitions_of(state: State, used: Occurrence, around: Around) -> list[tuple[types.Location, types.Range]]:
    """The place of the name in each definition that counts, with the range of its ``let``."""
    let = own_definition(state, used.name) or _group(used.name)
    if let is None:
        near = around()
        texts = near.texts_of(near.policies_with([near.text_of(state.document).key]))
        return [_place(state, text, let) for text in texts if (let := text.definition(used.name)) is not None]
    where = location(state, let.span)
    return [] if where is None or let.statement is None else [(where, _range(state, let.span.source, let.statement))]


def _place(state: State, text: PolicyText, let: Occurrence) -> tuple[types.Location, types.Range]:
    place = types.Location(text.uri, _range(state, text.source, let.span))
    return place, _range(state, text.source, let.statement or let.span)


def _range(state: State, source: Source, span: Span) -> types.Range:
    return positions_of(state, source).range(span)


def _defined_by(let: Let) -> Occurrence:
    names = occurrences(let.span.source).names
    return next(each for each in names if each.statement is not None and each.statement.start == let.span.start)


def _group(name: str) -> Occurrence | None:
    let = prelude_group(name)
    return None if let is None else _defined_by(let)


def _file_of(state: State, statement: Include | Device) -> Path | None:
    """The file that a line of the document names; None where there is none such."""
    folder = Path() if state.document.path is None else state.document.path.parent
    path: Path | None
    if isinstance(statement, Device):
        found = find_device(statement.target, folder)
        path = found[0] if isinstance(found, tuple) else None
    else:
        path = bundled_file(statement.target) if statement.bundled else folder / statement.target
    try:
        return path if path is not None and os.path.isfile(path) else None
    except (OSError, ValueError):
        return None


def _target_of(statement: Include | Device) -> Span:
    """The name of the file in its statement, without what it is written in."""
    span = statement.span
    at = span.start + span.text.rindex(statement.target) - (not statement.target)
    return Span(span.source, at, at + len(statement.target))


def _link(state: State, origin: Span, place: types.Location, whole: types.Range | None = None) -> types.LocationLink:
    return types.LocationLink(
        target_uri=place.uri,
        target_range=whole or place.range,
        target_selection_range=place.range,
        origin_selection_range=state.document.positions.range(origin),
    )


# --- uses ---


@frozen
class Uses:
    """The places of a name in one text."""

    text: PolicyText
    found: tuple[Occurrence, ...]


def references(state: State, around: PolicyFiles, offset: int, *, declaration: bool) -> list[types.Location]:
    """Every use of the name at an offset: of a ``let`` wherever its definition is included, of a group where nothing
    hides it, of an operator where it is written so."""
    name = _name_at(state, offset)
    if name is None:
        return []
    return [
        types.Location(uses.text.uri, positions.range(each.span))
        for uses in _uses_of(state, around, name.name)
        for positions in [Positions(uses.text.source.text, state.document.encoding)]
        for each in uses.found
        if declaration or not each.defines
    ]


def highlights(state: State, offset: int) -> list[types.DocumentHighlight]:
    """The uses of the name at an offset within the document."""
    name = _name_at(state, offset)
    if name is None:
        return []
    write, read = types.DocumentHighlightKind.Write, types.DocumentHighlightKind.Read
    return [
        types.DocumentHighlight(state.document.positions.range(each.span), write if each.defines else read)
        for each in occurrences(state.document.source).of(name.name)
    ]


def _name_at(state: State, offset: int) -> Occurrence | None:
    part = occurrences(state.document.source).at(offset)
    return part if isinstance(part, Occurrence) else None


def _uses_of(state: State, around: PolicyFiles, name: str) -> list[Uses]:
    """The uses of a name as the document means it, the document's own first."""
    roots = _policies_that_define(state, around, name)
    texts = around.texts_of(roots or [root for root in around.roots if not around.defines(root, name)])
    if not roots and prelude_group(name) is not None and around.prelude is not None:
        texts = (*(each for each in texts if each.key != around.prelude.key), around.prelude)
    here = around.text_of(state.document).key
    return [Uses(text, found) for text in sorted(texts, key=lambda it: it.key != here) if (found := text.of(name))]


def _policies_that_define(state: State, around: PolicyFiles, name: str) -> tuple[str, ...]:
    """The policies that hold a ``let`` of a name as the document means it; none where it means a group or an operator.

    These are the ones that define it and include the document, and all others that include such a definition.
    """
    if own_definition(state, name) is None and prelude_group(name) is not None:
        return ()
    mine = [root for root in around.policies_with([around.text_of(state.document).key]) if around.defines(root, name)]
    return around.policies_with(text.key for text in around.texts_of(mine) if text.definition(name))


# --- another name ---


class RenameRefused(Exception):
    """The reason why a name cannot be changed, as one lowercase sentence."""


def renameable(state: State, around: PolicyFiles, offset: int) -> types.Range | None:
    """The range of the name at an offset; None where there is no word.

    Raises :class:`RenameRefused` where there is one that cannot have another name.
    """
    name = _name_at(state, offset)
    if name is None:
        _refuse_keyword(state, offset)
        return None
    _refuse_unless_in_one_file(state, around, name.name)
    return state.document.positions.range(name.span)


def renamed(state: State, around: PolicyFiles, offset: int, new: str) -> list[types.TextEdit]:
    """The edits of the document that give the name at an offset another.

    Raises :class:`RenameRefused` where that would change what a policy means, or another file says the name too.
    """
    name = _name_at(state, offset)
    if name is None:
        _refuse_keyword(state, offset)
        raise RenameRefused("nothing here has a name that can be changed")
    old = name.name
    _refuse_unless_in_one_file(state, around, old)
    if new == old:
        return []
    _refuse_what_is_no_name(new)
    _refuse_what_is_taken(around.texts_of(around.policies_with([around.text_of(state.document).key])), new)
    _refuse_what_reads_differently(state.document.source, old, new)
    found = occurrences(state.document.source).of(old)
    return [types.TextEdit(state.document.positions.range(each.span), new) for each in found]


def _refuse_unless_in_one_file(state: State, around: PolicyFiles, name: str) -> None:
    if not _policies_that_define(state, around, name):
        what = "a group of the prelude, which every policy knows by this name"
        raise RenameRefused(f"`{name}` is {what if prelude_group(name) else 'not a name that a `let` defines'}")
    here = around.text_of(state.document).key
    for uses in _uses_of(state, around, name):
        if uses.text.path is not None and is_bundled(uses.text.path):
            stem = uses.text.path.stem
            raise RenameRefused(f"`{name}` is a name of the bundled policy <{stem}>, which stays as it is")
        if uses.text.key != here:
            place = uses.found[0].span.location
            raise RenameRefused(f"`{name}` is used in {place} too, and one file is renamed: change each use by hand")


def _refuse_keyword(state: State, offset: int) -> None:
    text = state.document.source.text
    line = text.rfind("\n", 0, offset) + 1
    words = (each.group() for each in _WORD.finditer(text, line) if each.start() <= offset <= each.end())
    word = next(words, "")
    if _is_word_of_the_language(word):
        raise RenameRefused(f"`{word}` is a word of the language")


def _refuse_what_is_no_name(name: str) -> None:
    if _is_word_of_the_language(name):
        raise RenameRefused(f"`{name}` is a word of the language, which cannot be a name")
    statements = parse_file(Source("", f"let {name} = mm"))[0].statements
    if not (len(statements) == 1 and isinstance(statements[0], Let) and statements[0].name == name):
        raise RenameRefused(f"`{name}` is no name: one is made of letters, digits and `_`, and starts with no digit")


def _is_word_of_the_language(word: str) -> bool:
    return word in keywords() or word in ACTIONS


def _refuse_what_is_taken(texts: tuple[PolicyText, ...], new: str) -> None:
    """A name that is defined or used in one of the texts would then mean something else."""
    found = [each for text in texts for each in text.of(new)]
    if not found:
        return
    first = next((each for each in found if each.defines), found[0])
    if first.defines:
        raise RenameRefused(f"`{new}` is defined already, in {first.span.location}")
    what = "a group" if prelude_group(new) else "a word"
    raise RenameRefused(f"`{new}` is {what} that {first.span.location} uses, and would mean something else there")


def _refuse_what_reads_differently(source: Source, old: str, new: str) -> None:
    """A few names are words of the language beside some others."""
    found = occurrences(source).of(old)
    starts, ends = [each.span.start for each in found], [each.span.end for each in found]
    between = zip([0, *ends], [*starts, len(source.text)], strict=True)
    made = new.join(source.text[start:end] for start, end in between)
    wanted = tuple(_with_name(statement, old, new) for statement in parse_file(source)[0].statements)
    if parse_file(Source(source.name, made))[0].statements != wanted:
        raise RenameRefused(f"{source.name} would not read the same with `{new}` in it")


def _with_name(statement: Statement, old: str, new: str) -> Statement:
    def change(part: Selector) -> Selector:
        return evolve(part, text=new) if isinstance(part, Word) and part.text == old else part

    selector = selector_of(statement)
    changed: Statement = statement
    if selector is not None:
        changed = evolve(statement, selector=rebuild(selector, change))  # type: ignore[arg-type]
    return evolve(changed, name=new) if isinstance(changed, Let) and changed.name == old else changed
