"""Another name for a ``let``, in every file that uses it; or why it cannot have it.

After a renaming every policy means what it did: the names that could capture one another are looked for in each policy
that holds a changed file, and each changed text is read again and compared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import evolve, frozen
from lsprotocol import types

from policylang.api.load import operators_at_hand, operators_in
from policylang.editor.features.references import lets_around, occurrence_at
from policylang.editor.names.occurrences import Occurrence
from policylang.editor.names.policy_files import PolicyFiles, PolicyText
from policylang.editor.positions import Positions
from policylang.editor.state import State
from policylang.language.diagnostics import Source
from policylang.language.grammar import keywords
from policylang.language.operators import prelude_group
from policylang.language.parser import parse_file
from policylang.language.statements import ACTIONS
from policylang.language.syntax import Let, Selector, Statement, Word
from policylang.language.walk import rebuild, selector_of

_WORD = re.compile(r"\w+")


class RenameRefused(Exception):
    """Why a name stays as it is, as one lowercase sentence."""


@frozen
class _Renaming:
    """A name, another one, and the policies that hold either."""

    around: PolicyFiles
    old: str
    new: str
    roots: tuple[str, ...]
    texts: tuple[PolicyText, ...]
    """Those that hold the name, as these policies mean it."""


def renameable(state: State, around: PolicyFiles, offset: int) -> types.Range | None:
    """The range of the name at an offset; None where there is no word.

    Raises :class:`RenameRefused` where there is one that cannot have another name.
    """
    name = occurrence_at(state, offset)
    if name is None:
        _refuse_keyword(state, offset)
        return None
    _texts_to_change(state, around, name)
    return state.document.positions.range(name.span)


def renamed(state: State, around: PolicyFiles, offset: int, name: str, *, versions: bool = True) -> types.WorkspaceEdit:
    """The edit that gives the name at an offset another. ``versions``: whether the client takes edits of versions.

    Raises :class:`RenameRefused` where that would change what a policy means, or cannot be.
    """
    found = occurrence_at(state, offset)
    if found is None:
        _refuse_keyword(state, offset)
        raise RenameRefused("nothing here has a name that can be changed")
    roots, texts = _texts_to_change(state, around, found)
    if name == found.name:
        return types.WorkspaceEdit(changes={})
    renaming = _Renaming(around, found.name, name, roots, texts)
    _refuse_what_is_no_name(name)
    _refuse_what_is_taken(renaming)
    _refuse_what_is_also_an_operator(state, renaming)
    for text in texts:
        _refuse_what_reads_differently(renaming, text)
    return _edit(state, renaming, versions)


def _texts_to_change(
    state: State, around: PolicyFiles, name: Occurrence
) -> tuple[tuple[str, ...], tuple[PolicyText, ...]]:
    """The policies that hold a name, and their texts that say it: those of all that one definition or use belongs to,
    so that no policy is left with one half of them."""
    word = name.name
    defining = lets_around(state, around, word)
    if not defining:
        what = "a group of the prelude, which every policy knows by this name"
        raise RenameRefused(f"`{word}` is {what if prelude_group(word) else 'not a name that a `let` defines'}")
    while True:
        texts = tuple(text for text in around.texts_of(defining) if text.has(word))
        holding = around.policies_with(text.key for text in texts)
        more = tuple(root for root in holding if around.defines(root, word))
        if len(more) == len(defining):
            break
        defining = more
    bundled = next((text for text in texts if text.bundled), None)
    if bundled is not None:
        stem = "" if bundled.path is None else bundled.path.stem
        raise RenameRefused(f"`{word}` is a name of the bundled policy <{stem}>, which stays as it is")
    return holding, texts


def _refuse_keyword(state: State, offset: int) -> None:
    text = state.document.source.text
    line = text.rfind("\n", 0, offset) + 1
    said = (each.group() for each in _WORD.finditer(text, line) if each.start() <= offset <= each.end())
    word = next(said, "")
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


def _refuse_what_is_taken(renaming: _Renaming) -> None:
    """A name that is defined or used in one of the policies would then mean something else."""
    new = renaming.new
    texts = [text for text in renaming.around.texts_of(renaming.roots) if text.has(new)]
    found = [each for text in texts for each in text.said.of(new)]
    first = next((each for each in found if each.defines), found[0] if found else None)
    if first is None:
        return
    if first.defines:
        raise RenameRefused(f"`{new}` is defined already, in {first.span.location}")
    what = "a group" if prelude_group(new) else "a word"
    raise RenameRefused(f"`{new}` is {what} that {first.span.location} uses, and would mean something else there")


def _refuse_what_is_also_an_operator(state: State, renaming: _Renaming) -> None:
    """Where a file is also part of a policy without the ``let``, its word may mean a group or an operator."""
    bare = [root for root in renaming.roots if not renaming.around.defines(root, renaming.old)]
    if not bare:
        return
    known = operators_at_hand(met=() if state.facts is None else operators_in(state.facts))
    for word in (renaming.old, renaming.new):
        what = "group" if prelude_group(word) else "operator"
        if prelude_group(word) is not None or known.matches(None, word, None):
            name = renaming.around.texts[bare[0]].source.name
            raise RenameRefused(f"`{word}` is a known {what} where {name} is loaded by itself, without this `let`")


def _refuse_what_reads_differently(renaming: _Renaming, text: PolicyText) -> None:
    """A few names are words of the language beside some others."""
    found = text.said.of(renaming.old)
    starts, ends = [each.span.start for each in found], [each.span.end for each in found]
    between = zip([0, *ends], [*starts, len(text.source.text)], strict=True)
    made = renaming.new.join(text.source.text[start:end] for start, end in between)
    before = parse_file(text.source)[0].statements
    wanted = tuple(_with_name(statement, renaming.old, renaming.new) for statement in before)
    if parse_file(Source(text.source.name, made))[0].statements != wanted:
        raise RenameRefused(f"{text.source.name} would not read the same with `{renaming.new}` in it")


def _with_name(statement: Statement, old: str, new: str) -> Statement:
    def change(part: Selector) -> Selector:
        return evolve(part, text=new) if isinstance(part, Word) and part.text == old else part

    selector = selector_of(statement)
    changed: Statement = statement
    if selector is not None:
        changed = evolve(statement, selector=rebuild(selector, change))  # type: ignore[arg-type]
    return evolve(changed, name=new) if isinstance(changed, Let) and changed.name == old else changed


def _edit(state: State, renaming: _Renaming, versions: bool) -> types.WorkspaceEdit:
    edits: dict[PolicyText, list[types.TextEdit]] = {}
    for text in renaming.texts:
        positions = Positions(text.source.text, state.document.encoding)
        edits[text] = [types.TextEdit(positions.range(it.span), renaming.new) for it in text.said.of(renaming.old)]
    return workspace_edit(edits, versions)


def workspace_edit(edits: dict[PolicyText, list[types.TextEdit]], versions: bool) -> types.WorkspaceEdit:
    """Edits of several texts, as a client takes them."""
    if not versions:
        return types.WorkspaceEdit(changes={text.uri: found for text, found in edits.items()})
    changes: Sequence[types.TextDocumentEdit] = [
        types.TextDocumentEdit(types.OptionalVersionedTextDocumentIdentifier(text.uri, text.version), list(found))
        for text, found in edits.items()
    ]
    return types.WorkspaceEdit(document_changes=changes)
