"""Offers of completion, and those that need no graph: words of the language, bundled policies and files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
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
from policylang.language.statements import ACTIONS

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
    """The key of its documentation, ``bundled:fsdp``; empty for words of the language."""
    elsewhere: bool = False
    """True if the snapshot does not contain it."""
    typed: str | None = None
    """The typed glob that it replaces, if any."""

    @property
    def example(self) -> str:
        """The snippet with its placeholders as given."""
        return _PLACEHOLDER.sub(lambda found: found[1] or "", self.snippet or self.text).rstrip()


def fitting_offers(offers: Iterable[WordOffer], cursor: Cursor) -> tuple[list[WordOffer], bool]:
    """The offers that fit what is typed, in order: names that the snapshot has before others, and of each
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
    """Escapes text for a snippet."""
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


MARKS = frozenset(("LPAR", "RPAR", "COMMA", "EQUAL"))
"""Signs that are typed faster than chosen."""
_USER_WORDS = frozenset(("NAME", "PATH", "STRING", "BUNDLED"))
_STATEMENTS = (
    "recompute", "save", "offload", "expect", "let", "optional", "include", "bucket", "prefetch", "delay", "overlap",
    "keep order", "blocks", "undecided", "device", "fuse", "collapse", "override", *ACTIONS,
)  # fmt: skip
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
"""Words that mean nothing without one of these before them, and come last then."""
_ENDS = {"BUCKET": ("per block", "up to"), "OVERLAP": ("up to", "within")}
"""The last words of a statement."""
_HEAD = ("policy", "requires", "include", "device", "blocks")
"""The words that a file begins with."""
_EXAMPLES = {
    "policy": "policy ${1:name}",
    "requires": "requires policylang >= ${1:0.2}",
    "let": "let ${1:name} = $0",
    "undecided": "undecided -> ${1:save}",
    "fuse": "fuse ${1:all_gather} chains",
    "collapse": "collapse round_trips",
    "bucket": "bucket ${1:all_gather} per block",
    "prefetch": "prefetch ${1:all_gather} ${2:1} block ahead",
    "delay": "delay ${1:reduce_scatter} ${2:1} block",
    "overlap": "overlap ${1:collective}",
    "keep order of": "keep order of ${1:all_to_all}",
    "every": "every ${1:2nd}",
    "exactly": "exactly ${1:1} $0",
    "at least": "at least ${1:1} $0",
    "at most": "at most ${1:1} $0",
    "cut per": "cut per ${1:2 GiB}",
    "from": "from ${1:1st}",
}
"""The usual continuations of a word, with placeholders."""
_LIMITS = {
    "BUCKET": "up to ${1:256 MiB}",
    "OVERLAP": "up to ${1:2 GiB} in flight",
    "": "up to ${1:8 GiB} per rank",
}
_WHOLES = {"EXPECT": "of ${1:forward}", "OVERLAP": "of peak"}


def opener(cursor: Cursor) -> str:
    """The terminal that says which statement it is; empty at the start of one."""
    kinds = [kind for kind in cursor.kinds[:3] if kind not in ("OPTIONAL", "OVERRIDE")]
    return kinds[0] if kinds else ""


def keyword_offers(cursor: Cursor) -> Iterator[WordOffer]:
    """Every word and sign of the language that may stand here, words that belong together as one."""
    texts = terminal_texts()
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
    yield from _distances(cursor)
    for text in sorted(found, key=lambda text: (*_rank(text, cursor), text)):
        kind = Kind.Keyword if text[0].isalpha() else Kind.Operator
        about = "position:from" if text == "from" else ""
        yield WordOffer(text, kind, snippet=_snippet(text, cursor), about=about)
    yield from _numbers(cursor)


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


def _snippet(text: str, cursor: Cursor) -> str:
    statement = opener(cursor)
    if text == "up to":
        return _LIMITS.get(statement, _LIMITS[""])
    if text == "of" and statement in _WHOLES:
        return _WHOLES[statement]
    if text == "within":
        return "within ${1:1 GiB} of peak"
    if text in ("exactly", "at least", "at most", "cut per", "from") or not cursor.kinds or text == "every":
        return _EXAMPLES.get(text, "")
    return _EXAMPLES.get(text, "") if cursor.kinds in (("OPTIONAL",), ("OVERRIDE",)) else ""


def _numbers(cursor: Cursor) -> Iterator[WordOffer]:
    """Examples of numbered words."""
    accepted = cursor.accepted
    if "EVERY_NTH" in accepted:
        yield WordOffer("every 2nd", snippet="every ${1:2nd}")
    if "ORDINAL" in accepted or "ORDINAL" in cursor.seconds:
        yield from (WordOffer(text, Kind.Value) for text in ("1st", "2nd", "3rd", "4th"))
    if opener(cursor) == "BUCKET" and cursor.kinds[-1:] == ("PER",):
        yield WordOffer("2 blocks", Kind.Value, snippet="${1:2} blocks")


def _distances(cursor: Cursor) -> Iterator[WordOffer]:
    """The ends of a ``prefetch`` or a ``delay``."""
    ahead = {"PREFETCH": " ahead", "DELAY": ""}.get(opener(cursor))
    if ahead is not None and "BLOCK" in reading((*cursor.kinds, "INT")).accepted and "INT" in cursor.accepted:
        yield WordOffer(f"1 block{ahead}", Kind.Value, snippet=f"${{1:1}} block{ahead}")


_MOST_ENTRIES = 2000


def include_offers(path: Path | None, cursor: Cursor) -> Iterator[WordOffer]:
    """Bundled policies, and policy files beside this one."""
    if not cursor.typed.startswith('"'):
        for name in bundled_names():
            if name != PRELUDE:  # it is always there
                detail = first_sentence(comment_of(policies_folder() / f"{name}{SUFFIX}"))
                yield WordOffer(f"<{name}>", Kind.File, detail, about=f"bundled:{name}")
    if not cursor.typed.startswith("<"):
        yield from _beside(path, cursor, SUFFIX)


def device_offers(path: Path | None, cursor: Cursor) -> Iterator[WordOffer]:
    """Bundled profiles, and files beside this policy."""
    if not cursor.typed.startswith('"'):
        for name in bundled_devices():
            detail = first_sentence(comment_of(devices_folder() / f"{name}{DEVICE_SUFFIX}"))
            yield WordOffer(name, Kind.File, detail, about=f"device:{name}")
    if cursor.typed.startswith('"') or not cursor.typed:
        yield from _beside(path, cursor, DEVICE_SUFFIX)


@cache
def comment_of(file: Path) -> str:
    """The comment that a bundled file starts with, without its marks; empty where there is none."""
    lines: list[str] = []
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            lines.append(line.removeprefix("#").strip())
    except (OSError, UnicodeDecodeError):
        return ""
    return "\n".join(lines)


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
    for name, is_folder in found:
        if name.startswith(".") or '"' in name:
            continue
        if not is_folder and name.endswith(suffix) and (path.parent / before / name).resolve() != mine:
            yield WordOffer(f'"{before}{name}"', Kind.File)
    for name, is_folder in found:
        if is_folder and not name.startswith(".") and '"' not in name:
            yield WordOffer(f'"{before}{name}/', Kind.Folder)  # the quote comes with the file
