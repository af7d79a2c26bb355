"""Where a name is used: in the document, and in the policies around it that hold its definition."""

from __future__ import annotations

from attrs import frozen
from lsprotocol import types

from policylang.editor.features.definition import own_definition
from policylang.editor.names.occurrences import Occurrence, occurrences
from policylang.editor.names.policy_files import PolicyFiles, PolicyText
from policylang.editor.positions import Positions
from policylang.editor.state import State
from policylang.language.operators import prelude_group


@frozen
class Uses:
    """The places of a name in one text."""

    text: PolicyText
    found: tuple[Occurrence, ...]


def occurrence_at(state: State, offset: int) -> Occurrence | None:
    """The name at a character offset."""
    part = occurrences(state.document.source).at(offset)
    return part if isinstance(part, Occurrence) else None


def references(state: State, around: PolicyFiles, offset: int, *, declaration: bool) -> list[types.Location]:
    """Every use of the name at an offset: of a ``let`` wherever its definition is included, of a group where nothing
    hides it, of an operator where it is written so."""
    name = occurrence_at(state, offset)
    if name is None:
        return []
    return [
        types.Location(uses.text.uri, positions.range(each.span))
        for uses in uses_of(state, around, name.name)
        for positions in [Positions(uses.text.source.text, state.document.encoding)]
        for each in uses.found
        if declaration or not each.defines
    ]


def highlights(state: State, offset: int) -> list[types.DocumentHighlight]:
    """The same within the document."""
    name = occurrence_at(state, offset)
    if name is None:
        return []
    write, read = types.DocumentHighlightKind.Write, types.DocumentHighlightKind.Read
    return [
        types.DocumentHighlight(state.document.positions.range(each.span), write if each.defines else read)
        for each in occurrences(state.document.source).of(name.name)
    ]


def uses_of(state: State, around: PolicyFiles, name: str) -> list[Uses]:
    """Of a name as the document means it, the document's own first."""
    roots = lets_around(state, around, name)
    texts = around.texts_of(roots or [root for root in around.roots if not around.defines(root, name)])
    if not roots and prelude_group(name) is not None and around.prelude is not None:
        texts = (*(each for each in texts if each.key != around.prelude.key), around.prelude)
    here = around.of(state.document).key
    return [Uses(text, text.said.of(name)) for text in sorted(texts, key=lambda it: it.key != here) if text.has(name)]


def lets_around(state: State, around: PolicyFiles, name: str) -> tuple[str, ...]:
    """The policies that hold a ``let`` of a name as the document means it; none where it means a group or an operator.

    These are the ones that define it and include the document, and all others that include such a definition.
    """
    if own_definition(state, name) is None and prelude_group(name) is not None:
        return ()
    mine = [root for root in around.policies_with([around.of(state.document).key]) if around.defines(root, name)]
    return around.policies_with(text.key for text in around.texts_of(mine) if text.defines(name))
