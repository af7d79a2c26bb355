"""The statement at an offset of a text, its words with their senses, and the parts of its tree there."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from attrs import fields, frozen, has

from policylang.editor.state import State
from policylang.language.diagnostics import Source, Span
from policylang.language.grammar import terminal_texts, words_of
from policylang.language.lexer import Lexeme, comments, split
from policylang.language.predicates import FLAGS, MEASURES, PROPERTIES
from policylang.language.syntax import Statement
from policylang.language.units import UNITS
from policylang.language.words import Meaning, Sense, meaning, senses

_TERMINALS: dict[str, tuple[str, Sense]] = {
    "DEVICE": ("device", "statement"),
    "RANGE": ("blocks", "place"),
    "ORDINAL": ("3rd", "position"),
    "EVERY_NTH": ("every 2nd", "position"),
    "LEAST": ("at least", "bound"),
    "MOST": ("at most", "bound"),
    "CUT": ("crosses cut", "predicate"),
}
"""Terminals with one meaning, which their text alone does not identify."""
_NAMES = {
    "chains": "FUSE",
    "round_trips": "COLLAPSE",
    "ahead": "PREFETCH",
    "policylang": "REQUIRES",
    "auto": "UNDECIDED",
}
"""Names that mean something in one statement alone."""
_OF_PREDICATES = {"gathered", "crosses", "feeds", "user", "recorded", "annotated"}
_SUFFIX = re.compile(r"[0-9_.]+(?:[eE][0-9]+)?([A-Za-zµμ]+)")
_INDEXED = re.compile(r"(\w+)\[-?\d+\]")


def meaning_at(words: Sequence[Lexeme], at: int) -> Meaning | None:
    """The meaning of one of the words of a statement; None for names and numbers of the user's."""
    found = _sense(words, at)
    return None if found is None else meaning(*found)


def unit_at(words: Sequence[Lexeme], at: int) -> str | None:
    """The unit that a word is or ends in, or that follows a number."""
    word = words[at]
    following = _kind(words, at + 1), _text(words, at + 1)
    if word.type in ("INT", "NUMBER"):
        if following[0] == "PERCENT" or (following[0] == "NAME" and following[1] in UNITS):
            return following[1]
        suffix = _SUFFIX.fullmatch(str(word))
        return suffix[1] if suffix is not None and suffix[1] in UNITS else None
    if word.type == "PERCENT":
        return "%"
    is_behind = _kind(words, at - 1) in ("INT", "NUMBER")
    return str(word) if word.type == "NAME" and is_behind and word in UNITS else None


def _sense(words: Sequence[Lexeme], at: int) -> tuple[str, Sense] | None:
    word = words[at]
    before, after = _kind(words, at - 1), _kind(words, at + 1)
    if word.type == "ACTION":
        return str(word), "action"
    if word.type in _TERMINALS:
        return _TERMINALS[word.type]
    if (unit := unit_at(words, at)) is not None:
        return unit, "unit"
    if word.type in ("AND", "OR"):
        return str(word), "predicate" if _in_predicate(words, at) else "joining"
    if word.type == "AT":
        return (f"at {_text(words, at + 1)}", "bound") if after in ("LEAST", "MOST") else None
    if word.type in ("USERS", "INPUTS"):
        return str(word), "measure" if after == "COMPARISON" else "flow"
    if word.type == "MODULE":
        return "module", "property" if after == "COMPARISON" else "scope"
    if word.type == "CHAIN":
        return "chain", "scope" if before == "PER" else "flow"
    if word.type in ("BLOCK", "BLOCKS"):
        return _block(words, at)
    if word.type == "PER" and before == "CUT":
        return "crosses cut", "predicate"
    if word.type in ("SAVED", "RECOMPUTED"):
        return _saved(words, at)
    if word.type in ("FROM", "IS"):
        return ("from", "position") if after == "ORDINAL" else _flag(words, at)
    text = " ".join(word.split())
    if text in terminal_texts().get(word.type, ()) and len(found := senses(text)) == 1:
        return text, found[0].sense
    return _name(words, at)


def _block(words: Sequence[Lexeme], at: int) -> tuple[str, Sense]:
    if at == 0:
        return "blocks", "statement"
    if _text(words, at - 1) == "crosses":
        return "crosses block", "predicate"
    counts = _kind(words, at - 1) == "PER" and words[0].type != "BUCKET" and not _is_total(words)
    return ("block", "scope") if counts else (str(words[at]), "place")


def _saved(words: Sequence[Lexeme], at: int) -> tuple[str, Sense]:
    if _text(words, at - 1) == "recorded":
        return "recorded saved", "predicate"
    if at != 1:
        return str(words[at]), "fate"
    kind = _text(words, at + 1) if _kind(words, at + 1) == "NAME" else ""
    return f"{words[at]} {kind}".rstrip(), "figure"


def _is_total(words: Sequence[Lexeme]) -> bool:
    return words[0].type == "EXPECT" and any(word.type == "COMPARISON" for word in words[:5])


def _flag(words: Sequence[Lexeme], at: int) -> tuple[str, Sense] | None:
    """``is view`` of ``is not view``, from either of its words."""
    rest = words[at + 1 : at + 3]
    kind = next((str(word) for word in rest if word.type != "NOT"), "")
    text = f"{words[at]} {kind}"
    return (text, "predicate") if text in FLAGS else None


def _name(words: Sequence[Lexeme], at: int) -> tuple[str, Sense] | None:
    word, before, after = words[at], _kind(words, at - 1), _kind(words, at + 1)
    indexed = _INDEXED.fullmatch(word)
    text = str(word) if indexed is None else indexed[1]
    if after == "COMPARISON" and words[0].type != "EXPECT":
        if text in MEASURES:
            return text, "measure"
        if text in PROPERTIES:
            return text, "property"
    if word.type not in ("NAME", "PATH"):
        return None
    if word in _NAMES and any(each.type == _NAMES[word] for each in words[:2]):
        return str(word), senses(word)[0].sense
    if words[0].type == "EXPECT" and (found := _expected(words, at)) is not None:
        return found
    if word == "auto" and _text(words, at - 2) == "cut":
        return "crosses cut", "predicate"
    if before == "OF" and word == "peak" and any(each.type == "WITHIN" for each in words):
        return "peak", "limit"
    if not _in_predicate(words, at):
        return None
    if before in ("IS", "FROM") or (before == "NOT" and _kind(words, at - 2) == "IS"):
        return _flag(words, at - 1 if before != "NOT" else at - 2)
    if before == "NAME" and f"{_text(words, at - 1)} {word}" in FLAGS:
        return f"{_text(words, at - 1)} {word}", "predicate"
    if word in _OF_PREDICATES:
        pair = f"{word} {_text(words, at + 1)}"
        if pair in FLAGS or pair == "crosses cut":
            return pair, "predicate"
        return ("annotated", "predicate") if word == "annotated" else None
    return None


def _expected(words: Sequence[Lexeme], at: int) -> tuple[str, Sense] | None:
    """The figure that an expectation is about, and what a share is one of."""
    word = str(words[at])
    if at == 1 and _kind(words, 2) == "COMPARISON":
        return word, "figure"
    if at == 2 and words[1].type == "RECOMPUTED":
        return f"recomputed {word}", "figure"
    if _kind(words, at - 1) == "OF" and _is_total(words) and word in ("forward", "step"):
        return word, "limit"
    return None


_ENDS_PREDICATE = frozenset(
    ("IN", "OUTSIDE", "CHAIN", "ARROW", "COMMA", "EXCEPT", "FEEDING", "FED", "UP_TO", "SAVED", "OFFLOADED")
)


def _in_predicate(words: Sequence[Lexeme], at: int) -> bool:
    """True if a word belongs to a ``where``: ``and`` and ``or`` behind one do until the phrase ends."""
    depth = 0
    for index in range(at - 1, -1, -1):
        kind = words[index].type
        if kind == "RPAR":
            depth += 1
        elif kind == "LPAR":
            depth = max(depth - 1, 0)
        elif depth == 0 and kind == "WHERE":
            return True
        elif depth == 0 and kind in _ENDS_PREDICATE and _text(words, index - 1) != "recorded":
            return False
    return False


def _kind(words: Sequence[Lexeme], at: int) -> str:
    return words[at].type if 0 <= at < len(words) else ""


def _text(words: Sequence[Lexeme], at: int) -> str:
    return str(words[at]) if 0 <= at < len(words) else ""


@frozen
class Pointed:
    """A place inside a statement."""

    words: Sequence[Lexeme]
    """The words of the whole statement, as far as it can be read."""
    at: int | None
    """The index of the word at the place; None between two of them."""
    statement: Statement | None
    """Its names are resolved where the policy has no errors; None where it cannot be read."""
    parts: tuple[Any, ...]
    """The selectors, predicates and figures of its tree that hold the place, outermost first."""

    @property
    def word(self) -> Lexeme | None:
        return None if self.at is None else self.words[self.at]

    @property
    def start(self) -> int:
        """The start of the statement."""
        return self.words[0].span.start

    @property
    def end(self) -> int:
        """The end of its last word."""
        return self.words[-1].span.end


def pointed_at(state: State, offset: int) -> Pointed | None:
    """None outside statements, and in comments."""
    source = state.document.source
    ranges, remarks = _cut(source)
    here = _around(ranges, offset)
    if here is None or _around(remarks, offset) is not None:
        return None
    words = _words(source, *here)
    if not words or offset >= words[-1].span.end:
        return None
    at = next((index for index, word in enumerate(words) if word.span.start <= offset < word.span.end), None)
    end = words[-1].span.end
    statement = next((each for each in statements_of(state) if here[0] <= each.span.start < end), None)
    return Pointed(words, at, statement, () if statement is None else tuple(_holding(statement, offset)))


Ranges = Sequence[tuple[int, int]]
"""Ranges of characters, in order, without overlap."""


@lru_cache(maxsize=4)
def _cut(source: Source) -> tuple[Ranges, Ranges]:
    """The statements and the comments of a text, cached for repeated pointers."""
    return split(source).ranges, tuple(comments(source))


@lru_cache(maxsize=16)
def _words(source: Source, start: int, end: int) -> Sequence[Lexeme]:
    return words_of(source, start, end)


def _around(ranges: Ranges, offset: int) -> tuple[int, int] | None:
    at = bisect_right(ranges, offset, key=lambda each: each[0]) - 1
    return ranges[at] if at >= 0 and offset < ranges[at][1] else None


def statements_of(state: State) -> list[Statement]:
    """The statements of the document that can be read, with their names resolved where the policy has no errors."""
    policy, source = state.text.loaded.policy, state.document.source
    found: dict[int, Statement] = {}
    if policy is not None:
        resolved = (*policy.lets.values(), *policy.statements, policy.blocks, policy.undecided)
        found = {each.span.start: each for each in resolved if each is not None and each.span.source == source}
    return [found.get(each.span.start, each) for each in state.text.file.statements]


def _holding(node: Any, offset: int) -> Iterator[Any]:
    """The parts of a tree that hold an offset, below the node itself."""
    while True:
        inside = next((part for part in _parts(node) if part.span.start <= offset < part.span.end), None)
        if inside is None:
            return
        yield inside
        node = inside


def _parts(node: Any) -> Iterator[Any]:
    """The parts of a node of the tree that have a span."""
    for each in fields(type(node)):
        value = getattr(node, each.name)
        for part in value if isinstance(value, tuple) else (value,):
            if has(type(part)) and isinstance(getattr(part, "span", None), Span):
                yield part
