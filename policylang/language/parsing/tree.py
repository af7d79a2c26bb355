"""Parser callbacks that build selectors: called as the parser reduces, so without recursion, whatever the depth.

Each method is named for a rule (or its alias) of ``grammar/apl.lark`` and takes what the rule holds, tokens included.
The builder has no state: what is found wrong goes to the origin that the tokens carry. Predicates are built in
``predicate_tree.py``, statements in ``statement_tree.py``.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from attrs import evolve, frozen
from lark import v_args

from policylang.language import syntax
from policylang.language.diagnostics import Span
from policylang.language.lexer import Lexeme
from policylang.language.parsing.predicate_tree import PredicateRules, integer, position, quoted, share_of
from policylang.language.syntax import BlockSet, InBlock, InModule, Ordinal, Predicate, Scope, Selector

_OPEN = syntax.Everything()
"""Stands in a prefix or a filter for the selector that it is applied to, until its phrase is complete."""


@frozen
class SpannedSelector:
    """A selector and the span it takes in the text, parentheses included."""

    selector: Selector
    span: Span


@frozen
class _Tail:
    """``per block`` or ``from 2nd``, which go to a prefix of their phrase."""

    value: Any
    word: Lexeme
    span: Span

    is_start: bool = False


def union_of(parts: tuple[Selector, ...], span: Span) -> Selector:
    """The union of selectors, flat: no union is directly inside another."""
    flat: list[Selector] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, syntax.Union) else (part,))
    return flat[0] if len(flat) == 1 else syntax.Union(tuple(flat), span)


@v_args(inline=True)
class SelectorRules(PredicateRules):
    """The rules of the grammar from ``selector`` down to the predicates."""

    def selector(self, first: SpannedSelector, *rest: Any) -> SpannedSelector:
        parts = (first, *rest[1::2])
        span = first.span.to(parts[-1].span)
        return SpannedSelector(union_of(tuple(part.selector for part in parts), span), span)

    def joined(self, first: SpannedSelector, *rest: Any) -> SpannedSelector:
        alternatives, span = [first.selector], first.span
        for joiner, right in zip(rest[::2], rest[1::2], strict=True):
            span = first.span.to(right.span)
            if joiner == "or":
                alternatives.append(right.selector)
            else:
                alternatives = [_join(joiner, union_of(tuple(alternatives), span), right.selector, span)]
        return SpannedSelector(union_of(tuple(alternatives), span), span)

    def joiner(self, word: Lexeme, *_by: Lexeme) -> str:
        return str(word)

    def phrase(self, *parts: Any) -> SpannedSelector:
        at = next(index for index, part in enumerate(parts) if isinstance(part, SpannedSelector))
        atom: SpannedSelector = parts[at]
        end = parts[-1].span
        selector = atom.selector
        tails = [part for part in parts if isinstance(part, _Tail)]
        scopes = [tail for tail in tails if not tail.is_start]
        starts = [tail for tail in tails if tail.is_start]
        for postfix in parts[at + 1 :]:
            if not isinstance(postfix, _Tail):
                selector = evolve(postfix, selector=selector, span=atom.span.to(postfix.span))
        for prefix in reversed(parts[:at]):
            if isinstance(prefix, Ordinal):
                scope = scopes.pop(0).value if scopes and isinstance(scopes[0].value, Scope) else None
                start = starts.pop(0).value if prefix.kind == "every" and starts else None
                prefix = evolve(prefix, scope=scope, start=start)
            selector = evolve(prefix, selector=selector, span=prefix.span.to(end))
        for per in scopes:
            per.word.origin.loose.append((per.value, per.span))
        for unused in starts:
            unused.word.report("APL014", f"`{unused.span.text}` has no `every 2nd` of its own before it", unused.span)
        return SpannedSelector(selector, parts[0].span.to(end))

    # --- prefixes ---

    def first_last(self, word: Any, count: Lexeme | None = None) -> Ordinal:
        n = 1 if count is None else position(count)
        return Ordinal(word.value, n, _OPEN, span=word.span.to((count or word).span))

    def nth(self, word: Lexeme) -> Ordinal:
        return Ordinal("nth", position(word), _OPEN, span=word.span)

    def every(self, word: Lexeme) -> Ordinal:
        return Ordinal("every", position(word), _OPEN, span=word.span)

    def step(self, word: Any, of: Lexeme) -> syntax.Step:
        return syntax.Step(word.value, _OPEN, word.span.to(of.span))

    def chain(self, word: Lexeme, where: Any) -> syntax.Chain:
        return syntax.Chain(where.value, _OPEN, word.span.to(where.span))

    def atom(self, *words: Any) -> SpannedSelector:
        if len(words) == 3:
            return SpannedSelector(words[1].selector, words[0].span.to(words[2].span))
        word: Lexeme = words[0]
        span = word.span
        everything = word.type == "EVERYTHING"
        return SpannedSelector(syntax.Everything(span) if everything else syntax.Word(str(word), span), span)

    # --- postfixes ---

    def within(self, word: Lexeme, place: InModule | InBlock) -> Selector:
        return evolve(place, outside=word == "outside", span=word.span.to(place.span))

    def where(self, word: Lexeme, predicate: Predicate) -> Selector:
        return syntax.Where(_OPEN, predicate, word.span.to(predicate.span))

    def chain_of(self, word: Lexeme, cut: Any = None, marker: SpannedSelector | None = None) -> Selector:
        if marker is None:
            return syntax.ChainOf(_OPEN, span=word.span)
        return syntax.ChainOf(_OPEN, cut.value, marker.selector, word.span.to(marker.span))

    def per(self, word: Lexeme, scope: Lexeme) -> _Tail:
        return _Tail(Scope(str(scope)), word, word.span.to(scope.span))

    def per_blocks(self, word: Lexeme, number: Lexeme, blocks: Lexeme) -> _Tail:
        return _Tail(position(number), word, word.span.to(blocks.span))

    def start_at(self, word: Lexeme, ordinal: Lexeme) -> _Tail:
        return _Tail(position(ordinal), word, word.span.to(ordinal.span), is_start=True)

    # --- places ---

    def in_module(self, glob: Lexeme) -> InModule:
        return InModule(_OPEN, quoted(glob), False, glob.span)

    def in_block(self, word: Lexeme, number: Lexeme | None = None) -> InBlock:
        if number is None:
            return _in_blocks(BlockSet("any"), word)
        low = integer(number)
        return _in_blocks(BlockSet("range", low=low, high=low), number)

    def in_blocks(self, word: Lexeme, numbers: Lexeme | None = None) -> InBlock:
        if numbers is None:
            return _in_blocks(BlockSet("any"), word)
        low, high = (integer(numbers, text) for text in str(numbers).split(".."))
        if low > high:
            numbers.report("APL205", f"the range `{numbers}` runs backwards", write=[f"{high}..{low}"])
        return _in_blocks(BlockSet("range", low=low, high=high), numbers)

    def in_first_last(self, word: Any, *rest: Lexeme) -> InBlock:
        return _in_blocks(BlockSet(word.value, n=position(rest[0]) if len(rest) == 2 else 1), rest[-1])

    def in_share(self, word: Any, *rest: Lexeme) -> InBlock:
        share = Fraction(1, 2) if rest[0].type == "HALF_OF" else share_of(rest[0], rest[0].span.to(rest[1].span))
        return _in_blocks(BlockSet(word.value, share=share), rest[-1])

    def in_every(self, word: Lexeme, *rest: Lexeme) -> InBlock:
        n = position(word)
        return _in_blocks(BlockSet("every", n=n, start=position(rest[2]) if len(rest) == 3 else n), rest[-1])

    def in_nth(self, word: Lexeme, block: Lexeme) -> InBlock:
        at = position(word) - 1
        return _in_blocks(BlockSet("range", low=at, high=at), block)


def _in_blocks(which: BlockSet, end: Lexeme) -> InBlock:
    return InBlock(_OPEN, which, False, end.span)


def _join(joiner: str, left: Selector, right: Selector, span: Span) -> Selector:
    if joiner == "and":
        return syntax.Intersection(left, right, span)
    if joiner == "except":
        return syntax.Difference(left, right, span)
    return syntax.Feeding(left, right, joiner == "fed", span)
