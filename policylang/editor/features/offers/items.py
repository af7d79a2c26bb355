"""What may be put at a place, and how the protocol has it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from attrs import frozen
from lsprotocol import types

from policylang.language.cursor import Cursor

MOST = 200
"""Items of one answer: nobody reads more, and who types on is asked again."""
Kind = types.CompletionItemKind
_PLACEHOLDER = re.compile(r"\$\{\d+:([^}]*)\}|\$0")
_BREAK = re.compile(r"[._\s{,\"</]")


@frozen
class WordOffer:
    """A text for the place of the word at the cursor."""

    text: str
    kind: types.CompletionItemKind = Kind.Keyword
    detail: str = ""
    snippet: str = ""
    """The text for clients that step through placeholders, ``saved <= ${1:4 GiB}``."""
    about: str = ""
    """What it is, ``bundled:fsdp``, for who asks what that means. Empty for a word that means what it says."""
    elsewhere: bool = False
    """Whether the snapshot has nothing of it."""
    typed: str | None = None
    """What stands for it in the text so far, where it does not begin so: a glob that it fits."""

    @property
    def example(self) -> str:
        """The snippet as it stands when nobody changes its placeholders."""
        return _PLACEHOLDER.sub(lambda found: found[1] or "", self.snippet or self.text).rstrip()


def listed(offers: Iterable[WordOffer], cursor: Cursor) -> tuple[list[WordOffer], bool]:
    """The offers that what is typed leaves, in their order: what the snapshot has before what it has not, and of each
    what begins with it first; and whether these are all of them."""
    typed = cursor.typed.lower()
    ranked: list[dict[str, WordOffer]] = [{}, {}, {}, {}]
    for offer in offers:
        fit = _fit(offer, typed)
        if fit is not None:
            ranked[fit + 2 * offer.elsewhere].setdefault(offer.text, offer)
    found: dict[str, WordOffer] = {}
    for rank in ranked:
        for text, offer in rank.items():
            found.setdefault(text, offer)
    return [*found.values()][:MOST], len(found) <= MOST


def _fit(offer: WordOffer, typed: str) -> int | None:
    """0 where it begins with what is typed, 1 where one of its parts does, None where none does."""
    text = offer.text.lower()
    if offer.typed is not None or text.startswith(typed):
        return 0
    bare = typed.lstrip('"')
    if text.lstrip('"').startswith(bare):
        return 0
    return 1 if len(bare) > 1 and any(text.startswith(bare, at.end()) for at in _BREAK.finditer(text)) else None


def _escaped(text: str) -> str:
    """As the text of a snippet."""
    return re.sub(r"([\\$}])", r"\\\1", text)


def protocol_items(
    offers: Iterable[WordOffer], range: types.Range, data: dict[str, Any], *, snippets: bool
) -> Iterator[types.CompletionItem]:
    """The offers as the protocol has them, in their order. ``data``: what every item carries to be explained by.

    Several words are a snippet where the client has them: of a plain text some insert the first word alone.
    """
    for number, offer in enumerate(islice(offers, MOST)):
        snippet = offer.snippet or (_escaped(offer.text) if " " in offer.text else "")
        is_snippet = snippets and bool(snippet)
        yield types.CompletionItem(
            label=offer.text,
            kind=offer.kind,
            detail=offer.detail or None,
            sort_text=f"{number:03}",
            filter_text=offer.text if offer.typed is None else offer.typed,
            insert_text_format=types.InsertTextFormat.Snippet if is_snippet else types.InsertTextFormat.PlainText,
            text_edit=types.TextEdit(range, snippet if is_snippet else offer.text),
            data={**data, "about": offer.about},
        )
