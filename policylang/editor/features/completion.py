"""What may stand at a place of a policy, asked of the grammar and of the snapshot."""

from __future__ import annotations

from collections.abc import Container
from itertools import chain

import attrs
from lsprotocol import types

from policylang.editor.features.offers.cursor_place import WordPlace, offers_at
from policylang.editor.features.offers.documentation import documentation
from policylang.editor.features.offers.graph_index import index_of
from policylang.editor.features.offers.items import listed, protocol_items
from policylang.editor.state import State
from policylang.language.cursor import Cursor, cursors_at

TRIGGERS = [".", "<", '"', "/", "(", "{", " "]
"""Characters behind which an editor asks by itself, beside letters. They are answered where they begin something: a
blank only where a statement cannot end yet, for where it can, who goes on with Enter must not choose from a list."""
_MARKDOWN = (types.MarkupKind.Markdown,)
_NONE = types.CompletionList(is_incomplete=False, items=[])


def completion(
    state: State, offset: int, *, snippets: bool = False, trigger: str | None = None
) -> types.CompletionList:
    """At a character offset, what fits best first. ``snippets``: whether the client steps through placeholders.
    ``trigger``: the character behind which the client asked by itself."""
    cursors = cursors_at(state.document.source, offset)
    if not cursors or not _is_begun(cursors[0], trigger):
        return _NONE
    index, cursor = index_of(state.facts), cursors[0]
    offers = [offers_at(WordPlace(state, each, index)) for each in cursors]
    found, complete = listed(chain.from_iterable(each for each, _ in offers), cursor)
    grows = any(each for _, each in offers)
    range = state.document.positions.between(cursor.start, cursor.end)
    data = {"uri": state.document.uri, "at": cursor.start}
    items = list(protocol_items(found, range, data, snippets=snippets))
    return types.CompletionList(is_incomplete=grows or not complete, items=items)


def resolved(
    state: State | None, item: types.CompletionItem, formats: Container[str] = _MARKDOWN
) -> types.CompletionItem:
    """An item with what is said of it, in one of the formats of the client; without that where its document is closed
    by now."""
    data = item.data if isinstance(item.data, dict) else {}
    about, at = data.get("about"), data.get("at")
    if state is None or not isinstance(about, str) or not isinstance(at, int):
        return item
    said = documentation(state, cursors_at(state.document.source, at), item.label, about)
    if not said.blocks:
        return item
    is_markup = types.MarkupKind.Markdown in formats or types.MarkupKind.PlainText in formats
    shown = said.content(markdown=types.MarkupKind.Markdown in formats)
    return attrs.evolve(item, documentation=shown if is_markup else shown.value)


def uri_of(item: types.CompletionItem) -> str:
    """Of the document that an item is for; empty where it does not say."""
    uri = item.data.get("uri") if isinstance(item.data, dict) else None
    return uri if isinstance(uri, str) else ""


def _is_begun(cursor: Cursor, trigger: str | None) -> bool:
    """Whether the character that was typed last begins something, or somebody asked."""
    if trigger == " ":
        return bool(cursor.kinds) and not cursor.typed and not cursor.accepted & {"$END", "OR"}
    if trigger == '"':
        return cursor.typed.startswith('"')
    return trigger != "<" or "BUNDLED" in cursor.accepted
