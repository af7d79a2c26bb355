"""What stands at an offset of a text: the statement, its words, and the parts of its tree that hold the offset."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from attrs import fields, frozen, has

from policylang.editor.state import State
from policylang.language.diagnostics import Source, Span
from policylang.language.grammar import words_of
from policylang.language.lexer import Lexeme, comments, split
from policylang.language.syntax import Policy, Statement


@frozen
class Pointed:
    """A place inside a statement."""

    words: Sequence[Lexeme]
    """Of the whole statement, as far as it can be read."""
    at: int | None
    """Which of them holds the place; None between two of them."""
    statement: Statement | None
    """With its names looked up where the policy has no errors, else as written; None where it cannot be read."""
    parts: tuple[Any, ...]
    """The selectors, predicates and figures of its tree that hold the place, outermost first."""

    @property
    def word(self) -> Lexeme | None:
        return None if self.at is None else self.words[self.at]

    @property
    def start(self) -> int:
        """Of the statement."""
        return self.words[0].span.start

    @property
    def end(self) -> int:
        """Of its last word: comments behind it belong to nobody."""
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
    statement = _statement(state, here[0], words[-1].span.end)
    return Pointed(words, at, statement, () if statement is None else tuple(_holding(statement, offset)))


Ranges = Sequence[tuple[int, int]]
"""Of characters, in order, none of which overlap."""


@lru_cache(maxsize=4)
def _cut(source: Source) -> tuple[Ranges, Ranges]:
    """The statements and the comments of a text. A pointer asks again and again."""
    return split(source).ranges, tuple(comments(source))


@lru_cache(maxsize=16)
def _words(source: Source, start: int, end: int) -> Sequence[Lexeme]:
    return words_of(source, start, end)


def _around(ranges: Ranges, offset: int) -> tuple[int, int] | None:
    at = bisect_right(ranges, offset, key=lambda each: each[0]) - 1
    return ranges[at] if at >= 0 and offset < ranges[at][1] else None


def own_statements(policy: Policy, source: Source) -> list[Statement]:
    """The statements of a policy that stand in a source, in the order of its text."""
    found = {each.span.start: each for each in _all(policy) if each.span.source == source}
    return [found[start] for start in sorted(found)]


def _all(policy: Policy) -> Iterator[Statement]:
    yield from policy.lets.values()
    yield from policy.statements
    yield from filter(None, (policy.blocks, policy.undecided))


def _statement(state: State, start: int, end: int) -> Statement | None:
    source, policy = state.document.source, state.text.loaded.policy
    if policy is not None:
        for each in _all(policy):
            if each.span.source == source and each.span.start == start:
                return each
    return next((each for each in state.text.file.statements if start <= each.span.start < end), None)


def _holding(node: Any, offset: int) -> Iterator[Any]:
    """The parts of a tree that hold an offset, below the node itself."""
    while True:
        inside = next((part for part in _parts(node) if part.span.start <= offset < part.span.end), None)
        if inside is None:
            return
        yield inside
        node = inside


def _parts(node: Any) -> Iterator[Any]:
    """The parts of a node of the tree that have a place of their own."""
    for each in fields(type(node)):
        value = getattr(node, each.name)
        for part in value if isinstance(value, tuple) else (value,):
            if has(type(part)) and isinstance(getattr(part, "span", None), Span):
                yield part
