"""Offers of completion, and those that need no graph: words of the language, bundled policies and files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from attrs import frozen
from lsprotocol import types

from policylang.language.cursor import Cursor, Reading, reading
from policylang.language.devices.reading import SUFFIX as DEVICE_SUFFIX
from policylang.language.devices.reading import bundled_devices
from policylang.language.files import SUFFIX, bundled_names
from policylang.language.grammar import terminal_texts
from policylang.language.loader import PRELUDE
from policylang.language.resources import devices_folder, policies_folder
from policylang.language.statements import ACTIONS, MODIFIERS, OPENERS

MOST = 200
"""Items of one answer: nobody reads more, and typing on asks anew."""
Kind = types.CompletionItemKind
_BREAK = re.compile(r"[._\s{,\"</]")


@frozen
class WordOffer:
    """A text for the place of the word at the cursor."""

    text: str
    kind: types.CompletionItemKind = Kind.Keyword
    detail: str = ""
    about: str = ""
    """The key of its documentation, ``bundled:fsdp``; empty for words of the language."""
    elsewhere: bool = False
    """True if the snapshot does not contain it."""


def fitting_offers(offers: Iterable[WordOffer], cursor: Cursor) -> tuple[list[WordOffer], bool]:
    """The offers that fit what is typed, in order: names that the snapshot has before others, and of each
    what begins with it first; and whether these are all of them."""
    typed = cursor.typed.lower()
    ranked: list[dict[str, WordOffer]] = [{}, {}, {}, {}]
    for offer in offers:
        fit = _fit(offer.text.lower(), typed)
        if fit is not None:
            ranked[fit + 2 * offer.elsewhere].setdefault(offer.text, offer)
    found: dict[str, WordOffer] = {}
    for rank in ranked:
        for text, offer in rank.items():
            found.setdefault(text, offer)
    return [*found.values()][:MOST], len(found) <= MOST


def _fit(text: str, typed: str) -> int | None:
    """0 where a text begins with what is typed, 1 where one of its parts does, None where none does."""
    bare = typed.lstrip('"')
    if text.startswith(typed) or text.lstrip('"').startswith(bare):
        return 0
    return 1 if len(bare) > 1 and any(text.startswith(bare, at.end()) for at in _BREAK.finditer(text)) else None


def protocol_items(
    offers: Iterable[WordOffer], range: types.Range, data: dict[str, Any]
) -> Iterator[types.CompletionItem]:
    """The offers as the protocol has them, in their order. ``data``: what every item carries to be explained by."""
    for number, offer in enumerate(offers):
        yield types.CompletionItem(
            label=offer.text,
            kind=offer.kind,
            detail=offer.detail or None,
            sort_text=f"{number:03}",
            filter_text=offer.text,
            text_edit=types.TextEdit(range, offer.text),
            data={**data, "about": offer.about},
        )


MARKS = frozenset(("LPAR", "RPAR", "COMMA", "EQUAL"))
"""Signs that are typed faster than chosen."""
_USER_WORDS = frozenset(("NAME", "PATH", "STRING", "BUNDLED"))
_STATEMENTS = (
    "recompute",
    "save",
    "offload",
    "expect",
    "let",
    *MODIFIERS[:1],
    "include",
    *OPENERS,
    *MODIFIERS,
    *ACTIONS,
)
_BEFORE = ("everything", "first", "last", "every", "users", "inputs", "chain")
_BEHIND = (
    "->", "in", "where", "outside", "except", "or", "and", "per block", "per module", "per chain", "per graph", "chain",
    "feeding", "fed", "from", "per",
)  # fmt: skip
_OTHERS = (
    "saved", "recomputed", "offloaded", "every", "no", "exactly", "at", "block", "blocks", "module", "chain", "graph",
    "==", "!=", ">", ">=", "<", "<=",
)  # fmt: skip
"""Words in the order in which they are wanted; others follow."""
_COUNTING = frozenset(("FIRST", "LAST", "ORDINAL", "EVERY_NTH", "BUCKET", "EXACTLY", "LEAST", "MOST"))
_SELDOM: dict[str, frozenset[str]] = {"per": _COUNTING, "from": frozenset(("EVERY_NTH",)), "up": frozenset()}
"""Words that mean nothing without one of these before them; they are last otherwise."""
_ENDS = {"BUCKET": ("per block", "up to"), "OVERLAP": ("up to", "within")}
"""The last words of a statement."""
_HEAD = ("policy", "requires", "include", "device", "blocks")
"""The words that a file begins with."""


def opener(cursor: Cursor) -> str:
    """The terminal that identifies the statement; empty at the start of one."""
    kinds = [kind for kind in cursor.kinds[:3] if kind not in ("OPTIONAL", "OVERRIDE")]
    return kinds[0] if kinds else ""


def keyword_offers(cursor: Cursor) -> Iterator[WordOffer]:
    """Every word and sign of the language that may follow here, words that belong together as one."""
    texts = terminal_texts()
    ahead = {"PREFETCH": " ahead", "DELAY": ""}.get(opener(cursor))
    if ahead is not None and "INT" in cursor.accepted and "BLOCK" in reading((*cursor.kinds, "INT")).accepted:
        yield WordOffer(f"1 block{ahead}", Kind.Value)
    found: dict[str, None] = {}
    for terminal in sorted(cursor.accepted):
        if terminal in MARKS or terminal not in texts:
            continue
        after = reading((*cursor.kinds, terminal))
        for text in texts[terminal]:
            if text != "→":
                found.update(dict.fromkeys(_joined(text, after, cursor.accepted)))
    for second in cursor.seconds:
        found.update(dict.fromkeys(texts.get(second, () if second.isupper() else (second,))))
    for text in sorted(found, key=lambda text: (*_rank(text, cursor), text)):
        kind = Kind.Keyword if text[0].isalpha() else Kind.Operator
        yield WordOffer(text, kind, about="position:from" if text == "from" else "")
    if "EVERY_NTH" in cursor.accepted:
        yield WordOffer("every 2nd")
    if "ORDINAL" in cursor.accepted or "ORDINAL" in cursor.seconds:
        yield from (WordOffer(text, Kind.Value) for text in ("1st", "2nd", "3rd", "4th"))
    if opener(cursor) == "BUCKET" and cursor.kinds[-1:] == ("PER",):
        yield WordOffer("2 blocks", Kind.Value)


def _joined(text: str, after: Reading, before: frozenset[str]) -> Iterator[str]:
    """A word, with the words that have to follow it: ``per block``, ``fed by``; and those that may, where nothing else
    begins with them: ``chain after``."""
    texts = terminal_texts()
    following = {
        terminal: texts[terminal]
        for terminal in sorted(after.accepted)
        if terminal in texts and all(each[0].isalpha() for each in texts[terminal])
    }
    ends = bool(after.accepted & {"$END", "OR", "RPAR"})
    if not text[0].isalpha() or (not ends and (after.accepted & (_USER_WORDS | {"COMPARISON"}) or not following)):
        yield text
        return
    if ends:
        yield text
        following = {each: words for each, words in following.items() if each not in before and "OR" in before}
    for words in following.values():
        yield from (f"{text} {word}" for word in words)


def _rank(text: str, cursor: Cursor) -> tuple[int, int, int]:
    first, kinds = text.split()[0], cursor.kinds
    if not kinds and (text in _HEAD[:2] or (cursor.is_first and text in _HEAD)):
        return 0 if cursor.is_first else 3, 0, _HEAD.index(text)
    is_behind = "OR" in cursor.accepted
    if is_behind and text in _ENDS.get(opener(cursor), ()):
        return 1, 0, _ENDS[opener(cursor)].index(text)
    if is_behind and first in _SELDOM and _SELDOM[first].isdisjoint(kinds):
        offloads = first == "up" and any(str(word).endswith("offload") for word in cursor.words[:3])
        return (1 if offloads else 3), 0, 0
    orders: tuple[tuple[str, ...], ...] = (_STATEMENTS, _BEFORE, _OTHERS)
    if is_behind:
        orders = (_BEHIND,)
    elif "EXPECT" in kinds:
        orders = (_STATEMENTS, _OTHERS, _BEFORE)
    for place, order in enumerate(orders):
        found = next((order.index(name) for name in (text, first) if name in order), None)
        if found is not None:
            return 2, place, found
    return 2, len(orders), 0


_MOST_ENTRIES = 2000


def include_offers(path: Path | None, cursor: Cursor) -> Iterator[WordOffer]:
    """Bundled policies, and policy files beside this one; the prelude is always there."""
    for name in bundled_names() if not cursor.typed.startswith('"') else ():
        if name != PRELUDE:
            detail = first_sentence(comment_of(policies_folder() / f"{name}{SUFFIX}"))
            yield WordOffer(f"<{name}>", Kind.File, detail, about=f"bundled:{name}")
    if not cursor.typed.startswith("<"):
        yield from _beside(path, cursor, SUFFIX)


def device_offers(path: Path | None, cursor: Cursor) -> Iterator[WordOffer]:
    """Bundled profiles, and files beside this policy."""
    for name in bundled_devices() if not cursor.typed.startswith('"') else ():
        detail = first_sentence(comment_of(devices_folder() / f"{name}{DEVICE_SUFFIX}"))
        yield WordOffer(name, Kind.File, detail, about=f"device:{name}")
    if cursor.typed.startswith('"') or not cursor.typed:
        yield from _beside(path, cursor, DEVICE_SUFFIX)


@cache
def comment_of(file: Path) -> str:
    """The comment that a bundled file starts with, without its marks."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    return "\n".join(line.removeprefix("#").strip() for line in lines)


def first_sentence(comment: str) -> str:
    """The first sentence of the first paragraph."""
    text = " ".join(comment.partition("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")


def _beside(path: Path | None, cursor: Cursor, suffix: str) -> Iterator[WordOffer]:
    """Files and folders, as they are named from the policy's own; none of a text that is in no file."""
    if path is None:
        return
    typed = cursor.typed.removeprefix('"')
    folder, slash, _ = typed.rpartition("/")
    before = f"{folder}{slash}"
    mine = path.resolve()
    try:
        with os.scandir(path.parent / before) as entries:
            found = sorted((each.name, each.is_dir()) for each, _ in zip(entries, range(_MOST_ENTRIES), strict=False))
    except (OSError, ValueError):
        return
    named = [each for each in found if not each[0].startswith(".") and '"' not in each[0]]
    for name, is_folder in named:
        if not is_folder and name.endswith(suffix) and (path.parent / before / name).resolve() != mine:
            yield WordOffer(f'"{before}{name}"', Kind.File)
    yield from (WordOffer(f'"{before}{name}/', Kind.Folder) for name, is_folder in named if is_folder)
    # the file's offer has the quote
