"""Builds the syntax tree of one statement, by callbacks as the parser reduces: no recursion, whatever the depth.

Each method is named for a rule (or its alias) of ``grammar/apl.lark`` and takes what the rule holds, tokens included.
The builder has no state: what is found wrong goes to the origin that the tokens carry. Predicates are built in
``predicate_tree.py``, statements in ``statement_tree.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from attrs import frozen
from lark import v_args

from policylang.language.parsing.lexer import Lexeme
from policylang.language.parsing.predicate_tree import PredicateRules, integer, position, quoted
from policylang.language.source import Span
from policylang.language.syntax import (
    BlockSet,
    Chain,
    ChainOf,
    Difference,
    Everything,
    Feeding,
    InBlock,
    InModule,
    Intersection,
    Ordinal,
    Predicate,
    Scope,
    Selector,
    Step,
    Union,
    Where,
    Word,
)


@frozen
class Placed:
    """A selector and the span it takes in the text, parentheses included."""

    selector: Selector
    span: Span


@frozen
class _Prefix:
    apply: Callable[[Selector, Scope | None, int | None, Span], Selector]
    """Takes what stands behind it, the scope and the start that fell to it, and its span."""
    counts: bool
    repeats: bool
    span: Span


@frozen
class _Postfix:
    apply: Callable[[Selector, Span], Selector]
    span: Span


@frozen
class _Per:
    scope: Scope
    word: Lexeme
    span: Span


@frozen
class _From:
    start: int
    word: Lexeme
    span: Span


def union_of(parts: tuple[Selector, ...], span: Span) -> Selector:
    """The union of selectors, flat: no union is directly inside another."""
    flat: list[Selector] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Union) else (part,))
    return flat[0] if len(flat) == 1 else Union(tuple(flat), span)


@v_args(inline=True)
class SelectorRules(PredicateRules):
    """The rules of the grammar from ``selector`` down to the predicates."""

    def selector(self, first: Placed, *rest: Any) -> Placed:
        if not rest:
            return first
        parts = (first, *rest[1::2])
        span = first.span.to(parts[-1].span)
        return Placed(union_of(tuple(part.selector for part in parts), span), span)

    def joined(self, first: Placed, *rest: Any) -> Placed:
        whole, alternatives, span = first.selector, [first.selector], first.span
        for joiner, right in zip(rest[::2], rest[1::2], strict=True):
            span = first.span.to(right.span)
            if joiner == "or":
                alternatives.append(right.selector)
                continue
            whole = union_of(tuple(alternatives), first.span.to(span))
            alternatives = [_join(joiner, whole, right.selector, span)]
        return Placed(union_of(tuple(alternatives), span), span)

    def joiner(self, word: Lexeme, *_by: Lexeme) -> str:
        return str(word)

    def phrase(self, *parts: Any) -> Placed:
        at = next(index for index, part in enumerate(parts) if isinstance(part, Placed))
        atom: Placed = parts[at]
        end = parts[-1].span
        selector = atom.selector
        pers = [part for part in parts if isinstance(part, _Per)]
        starts = [part for part in parts if isinstance(part, _From)]
        for postfix in parts[at + 1 :]:
            if isinstance(postfix, _Postfix):
                selector = postfix.apply(selector, atom.span.to(postfix.span))
        for prefix in reversed(parts[:at]):
            scope = pers.pop(0).scope if prefix.counts and pers else None
            start = starts.pop(0).start if prefix.repeats and starts else None
            selector = prefix.apply(selector, scope, start, prefix.span.to(end))
        for per in pers:
            per.word.origin.loose.append((per.scope, per.span))
        for unused in starts:
            message = f"`{unused.span.text}` has no `every 2nd` of its own before it"
            unused.word.origin.report("APL014", message, unused.span)
        return Placed(selector, parts[0].span.to(end))

    # --- prefixes ---

    def first_last(self, word: Lexeme, count: Lexeme | None = None) -> _Prefix:
        n = 1 if count is None else position(count)
        span = word.span.to((count or word).span)
        return _counting("first" if word == "first" else "last", n, span)

    def nth(self, word: Lexeme) -> _Prefix:
        return _counting("nth", position(word), word.span)

    def every(self, word: Lexeme) -> _Prefix:
        return _counting("every", position(word), word.span)

    def step(self, word: Lexeme, of: Lexeme) -> _Prefix:
        direction: Literal["users", "inputs"] = "users" if word == "users" else "inputs"
        return _plain(lambda inner, span: Step(direction, inner, span), word.span.to(of.span))

    def chain(self, word: Lexeme, where: Lexeme) -> _Prefix:
        direction: Any = str(where)
        return _plain(lambda inner, span: Chain(direction, inner, span), word.span.to(where.span))

    def atom(self, *words: Any) -> Placed:
        if len(words) == 3:
            return Placed(words[1].selector, words[0].span.to(words[2].span))
        word: Lexeme = words[0]
        span = word.span
        return Placed(Everything(span) if word.type == "EVERYTHING" else Word(str(word), span), span)

    # --- postfixes ---

    def within(self, word: Lexeme, place: tuple[str | BlockSet, Span]) -> _Postfix:
        where, end = place
        outside = word == "outside"

        def apply(inner: Selector, span: Span) -> Selector:
            if isinstance(where, BlockSet):
                return InBlock(inner, where, outside, span)
            return InModule(inner, where, outside, span)

        return _Postfix(apply, word.span.to(end))

    def where(self, word: Lexeme, predicate: Predicate) -> _Postfix:
        return _Postfix(lambda inner, span: Where(inner, predicate, span), word.span.to(predicate.span))

    def chain_of(self, word: Lexeme, cut: Lexeme | None = None, marker: Placed | None = None) -> _Postfix:
        if cut is None or marker is None:
            return _Postfix(lambda inner, span: ChainOf(inner, None, None, span), word.span)
        side: Literal["after", "before"] = "after" if cut == "after" else "before"
        found = marker.selector
        return _Postfix(lambda inner, span: ChainOf(inner, side, found, span), word.span.to(marker.span))

    def per(self, word: Lexeme, scope: Lexeme) -> _Per:
        return _Per(Scope(str(scope)), word, word.span.to(scope.span))

    def start_at(self, word: Lexeme, ordinal: Lexeme) -> _From:
        return _From(position(ordinal), word, word.span.to(ordinal.span))

    # --- places ---

    def glob(self, word: Lexeme) -> Lexeme:
        return word

    def in_module(self, glob: Lexeme) -> tuple[str, Span]:
        return quoted(glob), glob.span

    def in_block(self, word: Lexeme, number: Lexeme | None = None) -> tuple[BlockSet, Span]:
        if number is None:
            return BlockSet("any"), word.span
        low = integer(number)
        return BlockSet("range", low=low, high=low), number.span

    def in_blocks(self, word: Lexeme, numbers: Lexeme | None = None) -> tuple[BlockSet, Span]:
        if numbers is None:
            return BlockSet("any"), word.span
        low, high = (integer(numbers, text) for text in str(numbers).split(".."))
        if low > high:
            numbers.origin.report("APL205", f"the range `{numbers}` runs backwards", numbers.span)
        return BlockSet("range", low=low, high=high), numbers.span

    def in_first_last(self, word: Lexeme, *rest: Lexeme) -> tuple[BlockSet, Span]:
        n = position(rest[0]) if len(rest) == 2 else 1
        return BlockSet("first" if word == "first" else "last", n=n), rest[-1].span

    def in_every(self, word: Lexeme, *rest: Lexeme) -> tuple[BlockSet, Span]:
        n = position(word)
        start = position(rest[2]) if len(rest) == 3 else n
        return BlockSet("every", n=n, start=start), rest[-1].span

    def in_nth(self, word: Lexeme, block: Lexeme) -> tuple[BlockSet, Span]:
        at = position(word) - 1
        return BlockSet("range", low=at, high=at), block.span


def _counting(kind: Literal["first", "last", "nth", "every"], n: int, span: Span) -> _Prefix:
    def apply(inner: Selector, scope: Scope | None, start: int | None, whole: Span) -> Selector:
        return Ordinal(kind, n, inner, start, scope, whole)

    return _Prefix(apply, True, kind == "every", span)


def _plain(apply: Callable[[Selector, Span], Selector], span: Span) -> _Prefix:
    return _Prefix(lambda inner, _scope, _start, whole: apply(inner, whole), False, False, span)


def _join(joiner: str, left: Selector, right: Selector, span: Span) -> Selector:
    if joiner == "and":
        return Intersection(left, right, span)
    if joiner == "except":
        return Difference(left, right, span)
    return Feeding(left, right, joiner == "fed", span)
