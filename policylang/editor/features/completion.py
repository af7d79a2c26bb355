"""What may stand at a place of a policy, asked of the grammar and of the snapshot."""

from __future__ import annotations

import attrs
from lsprotocol import types

from policylang.editor.features.offers.documentation import documentation
from policylang.editor.features.offers.graph_index import index_of
from policylang.editor.features.offers.items import listed, protocol_items
from policylang.editor.features.offers.places import Place, offers_at
from policylang.editor.state import State
from policylang.language.parsing.cursor import cursor_at

TRIGGERS = [".", "<", '"', "/", " "]
"""Characters behind which an editor asks by itself, beside letters. A blank is one only where a statement cannot end
yet: where it can, who types on with Enter must not choose from a list instead."""
_NONE = types.CompletionList(is_incomplete=False, items=[])


def completion(
    state: State, offset: int, *, snippets: bool = False, trigger: str | None = None
) -> types.CompletionList:
    """At a character offset, what fits best first. ``snippets``: whether the client steps through placeholders.
    ``trigger``: the character behind which the client asked by itself."""
    cursor = cursor_at(state.document.source, offset)
    if cursor is None or (trigger == " " and not _wants_more(cursor.kinds, cursor.accepted)):
        return _NONE
    index = index_of(state.facts)
    offers, grows = offers_at(Place(state, cursor, index))
    found, complete = listed(offers, cursor)
    range = state.document.positions.between(cursor.start, cursor.end)
    data = {"uri": state.document.uri, "at": cursor.start}
    items = list(protocol_items(found, range, data, snippets=snippets))
    return types.CompletionList(is_incomplete=grows or not complete, items=items)


def resolved(state: State | None, item: types.CompletionItem, *, markdown: bool = True) -> types.CompletionItem:
    """An item with what is said of it; without that where its document is closed by now."""
    data = item.data if isinstance(item.data, dict) else {}
    about, at = data.get("about"), data.get("at")
    if state is None or not isinstance(about, str) or not isinstance(at, int):
        return item
    said = documentation(state, cursor_at(state.document.source, at), item.label, about)
    return attrs.evolve(item, documentation=said.content(markdown=markdown)) if said.blocks else item


def uri_of(item: types.CompletionItem) -> str:
    """Of the document that an item is for; empty where it does not say."""
    uri = item.data.get("uri") if isinstance(item.data, dict) else None
    return uri if isinstance(uri, str) else ""


def _wants_more(kinds: tuple[str, ...], accepted: frozenset[str]) -> bool:
    """Whether a statement has begun and cannot end here."""
    return bool(kinds) and not accepted & {"$END", "OR"}
