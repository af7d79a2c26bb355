"""The words of the language that may stand at a place: the grammar says which, this module in which order they are
wanted and what usually follows."""

from __future__ import annotations

from collections.abc import Iterator

from policylang.editor.features.offers.items import Kind, WordOffer
from policylang.language.cursor import Cursor, Reading, reading
from policylang.language.grammar import terminal_texts
from policylang.language.statements import ACTIONS

MARKS = frozenset(("LPAR", "RPAR", "COMMA", "EQUAL"))
"""What everybody types faster than he chooses it."""
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
"""What a statement ends with."""
_HEAD = ("policy", "requires", "include", "device", "blocks")
"""What a file begins with."""
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
"""What usually follows a word, for who steps through placeholders."""
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
    """Examples of what is numbered here."""
    accepted = cursor.accepted
    if "EVERY_NTH" in accepted:
        yield WordOffer("every 2nd", snippet="every ${1:2nd}")
    if "ORDINAL" in accepted or "ORDINAL" in cursor.seconds:
        yield from (WordOffer(text, Kind.Value) for text in ("1st", "2nd", "3rd", "4th"))
    if opener(cursor) == "BUCKET" and cursor.kinds[-1:] == ("PER",):
        yield WordOffer("2 blocks", Kind.Value, snippet="${1:2} blocks")


def _distances(cursor: Cursor) -> Iterator[WordOffer]:
    """What ends a ``prefetch`` or a ``delay``."""
    ahead = {"PREFETCH": " ahead", "DELAY": ""}.get(opener(cursor))
    if ahead is not None and "BLOCK" in reading((*cursor.kinds, "INT")).accepted and "INT" in cursor.accepted:
        yield WordOffer(f"1 block{ahead}", Kind.Value, snippet=f"${{1:1}} block{ahead}")
