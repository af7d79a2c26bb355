"""Selectors: what the tree becomes, their canonical text, and walks over a syntax tree without recursion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache, partial
from typing import Any, Literal, assert_never

from attrs import evolve, fields, frozen

from policylang.language import syntax
from policylang.language.diagnostics import Span
from policylang.language.lexer import Lexeme
from policylang.language.predicates import (
    PredicateRules,
    format_glob,
    format_predicate,
    integer,
    position,
    quoted,
    share_of,
    spanned,
)
from policylang.language.shown import decimal_percent


def selector_of(statement: syntax.Statement) -> syntax.Selector | None:
    return statement.selector if isinstance(statement, syntax.Selecting) else None


def selectors_of(statements: Iterable[syntax.Statement]) -> Iterator[syntax.Selector]:
    return filter(None, map(selector_of, statements))


def parts(selector: syntax.Selector) -> tuple[syntax.Selector, ...]:
    """The selectors directly inside a selector, in the order in which they are written."""
    return tuple(_inside(selector, "Selector"))


def walk(selector: syntax.Selector) -> Iterator[syntax.Selector]:
    """The selector and every selector inside it, each before its parts, in the order of the text."""
    return _walk(selector, "Selector")


def predicates(predicate: syntax.Predicate) -> Iterator[syntax.Test]:
    """The tests inside a predicate, in the order of the text."""
    return (each for each in _walk(predicate, "Predicate") if not isinstance(each, syntax.Not | syntax.And | syntax.Or))


def replaced(predicate: syntax.Predicate, test: syntax.Predicate, other: syntax.Predicate) -> syntax.Predicate:
    """A predicate with ``other`` in place of one of its tests, which is told by its identity."""
    match predicate:
        case syntax.Not():
            return evolve(predicate, predicate=replaced(predicate.predicate, test, other))
        case syntax.And() | syntax.Or():
            return evolve(predicate, parts=tuple(replaced(part, test, other) for part in predicate.parts))
    return other if predicate is test else predicate


def with_lets(policy: syntax.Policy, *selectors: syntax.Selector) -> Iterator[syntax.Selector]:
    """The parts of selectors, and those of every ``let`` that they use, each once."""
    pending, seen = [*reversed(selectors)], set()
    while pending:
        for part in walk(pending.pop()):
            yield part
            if isinstance(part, syntax.Reference) and part.name not in seen:
                seen.add(part.name)
                pending.append(policy.lets[part.name].selector)


def names_in(policy: syntax.Policy, statements: Iterable[syntax.Statement]) -> frozenset[str]:
    """The names of every ``let`` that statements use."""
    parts = with_lets(policy, *selectors_of(statements))
    return frozenset(part.name for part in parts if isinstance(part, syntax.Reference))


def tests_of(policy: syntax.Policy, *statements: syntax.Statement) -> Iterator[syntax.Test]:
    """The tests in the ``where`` clauses of statements' selectors, and of every ``let`` that they use."""
    for part in with_lets(policy, *selectors_of(statements)):
        if isinstance(part, syntax.Where):
            yield from predicates(part.predicate)


def depth(selector: syntax.Selector) -> int:
    """The depth of the deepest nesting, predicates included."""
    deepest = 0
    pending: list[tuple[syntax.Selector | syntax.Predicate, int]] = [(selector, 1)]
    while pending:
        current, level = pending.pop()
        deepest = max(deepest, level)
        pending.extend((part, level + 1) for kind in ("Selector", "Predicate") for part in _inside(current, kind))
    return deepest


def rebuild(selector: syntax.Selector, change: Callable[[syntax.Selector], syntax.Selector]) -> syntax.Selector:
    """The selector with ``change`` applied to every selector inside it, innermost first; spans stay."""
    done: list[syntax.Selector] = []
    for current in reversed(list(walk(selector))):  # parts follow their whole in the walk, so they precede it here
        inner = [done.pop() for _ in _inside(current, "Selector")]
        new: Any = current
        if isinstance(current, syntax.Union):
            new = evolve(current, parts=tuple(inner))
        elif inner:
            held = (name for name in _fields_of(new.__class__, "Selector") if getattr(new, name) is not None)
            new = evolve(new, **dict(zip(held, inner, strict=True)))
        done.append(change(new))
    return done[0]


def _walk(node: Any, kind: str) -> Iterator[Any]:
    pending = [node]
    while pending:
        yield (current := pending.pop())
        pending.extend(reversed(_inside(current, kind)))


def _inside(node: Any, kind: str) -> list[Any]:
    found: list[Any] = []
    for name in _fields_of(node.__class__, kind):
        value = getattr(node, name)
        if isinstance(value, tuple):
            found.extend(value)
        elif value is not None:
            found.append(value)
    return found


@cache
def _fields_of(node: type, kind: str) -> tuple[str, ...]:
    """The fields of a class of the tree that hold one or several parts of a kind."""
    return tuple(each.name for each in fields(node) if kind in str(each.type))


_OPEN = syntax.Everything()  # placeholder for the operand of a prefix or filter until its phrase is complete


@frozen
class SpannedSelector:
    """A selector and the span it takes in the text, parentheses included."""

    selector: syntax.Selector
    span: Span


@frozen
class _Tail:
    """``per block`` or ``from 2nd``, which go to a prefix of their phrase."""

    value: Any
    word: Lexeme
    span: Span
    is_start: bool = False


def union_of(parts: Sequence[syntax.Selector], span: Span) -> syntax.Selector:
    """The union of selectors, flat: no union is directly inside another."""
    flat: list[syntax.Selector] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, syntax.Union) else (part,))
    return flat[0] if len(flat) == 1 else syntax.Union(tuple(flat), span=span)


_JOINED_BY: Mapping[str, Callable[..., syntax.Selector]] = {
    "and": syntax.Intersection,
    "except": syntax.Difference,
    "feeding": syntax.Feeding,
    "fed": partial(syntax.Feeding, reverse=True),
}


@spanned
class SelectorRules(PredicateRules):
    """The rules of the grammar from ``selector`` down to the predicates."""

    def selector(self, span: Span, *parts: Any) -> SpannedSelector:
        return SpannedSelector(union_of([part.selector for part in parts[::2]], span), span)

    def joined(self, whole: Span, first: SpannedSelector, *rest: Any) -> SpannedSelector:
        alternatives, span = [first.selector], first.span
        for joiner, right in zip(rest[::2], rest[1::2], strict=True):
            span = first.span.to(right.span)
            if joiner == "or":
                alternatives.append(right.selector)
            else:
                alternatives = [_JOINED_BY[joiner](union_of(alternatives, span), right.selector, span=span)]
        return SpannedSelector(union_of(alternatives, span), whole)

    def joiner(self, _span: Span, word: Lexeme, *_by: Lexeme) -> str:
        return str(word)

    def everything_in(self, span: Span, _word: Lexeme, place: syntax.InModule | syntax.InBlock) -> SpannedSelector:
        """The selector of all that a place holds, for an ``except`` that only names the place."""
        return SpannedSelector(evolve(place, selector=syntax.Everything(span=span), span=span), span)

    def phrase(self, whole: Span, *parts: Any) -> SpannedSelector:
        at = next(index for index, part in enumerate(parts) if isinstance(part, SpannedSelector))
        atom: SpannedSelector = parts[at]
        selector = atom.selector
        tails = [part for part in parts if isinstance(part, _Tail)]
        scopes = [tail for tail in tails if not tail.is_start]
        starts = [tail for tail in tails if tail.is_start]
        for postfix in parts[at + 1 :]:
            if not isinstance(postfix, _Tail):
                selector = evolve(postfix, selector=selector, span=atom.span.to(postfix.span))
        for prefix in reversed(parts[:at]):
            if isinstance(prefix, syntax.Ordinal):
                scope = scopes.pop(0).value if scopes and isinstance(scopes[0].value, syntax.Scope) else None
                start = starts.pop(0).value if prefix.kind == "every" and starts else None
                prefix = evolve(prefix, scope=scope, start=start)
            selector = evolve(prefix, selector=selector, span=prefix.span.to(whole))
        for per in scopes:
            per.word.origin.loose.append((per.value, per.span))
        for unused in starts:
            unused.word.report("APL014", f"`{unused.span.text}` has no `every 2nd` before it", unused.span)
        return SpannedSelector(selector, whole)

    # --- prefixes ---

    def first_last(self, span: Span, word: Any, count: Lexeme | None = None) -> syntax.Ordinal:
        return syntax.Ordinal(word.value, 1 if count is None else position(count), _OPEN, span=span)

    def nth(self, span: Span, word: Lexeme) -> syntax.Ordinal:
        return syntax.Ordinal("nth", position(word), _OPEN, span=span)

    def every(self, span: Span, word: Lexeme) -> syntax.Ordinal:
        return syntax.Ordinal("every", position(word), _OPEN, span=span)

    def step(self, span: Span, word: Any, _of: Lexeme) -> syntax.Step:
        return syntax.Step(word.value, _OPEN, span=span)

    def chain(self, span: Span, _word: Lexeme, where: Any) -> syntax.Chain:
        return syntax.Chain(where.value, _OPEN, span=span)

    def atom(self, span: Span, word: Lexeme, inside: Any = None, _closed: Lexeme | None = None) -> SpannedSelector:
        if inside is not None:
            return SpannedSelector(inside.selector, span)
        if word.type == "EVERYTHING":
            return SpannedSelector(syntax.Everything(span=span), span)
        return SpannedSelector(syntax.Word(str(word), span=span), span)

    # --- postfixes ---

    def within(self, span: Span, word: Lexeme, place: syntax.InModule | syntax.InBlock) -> syntax.Selector:
        return evolve(place, outside=word == "outside", span=span)

    def where(self, span: Span, _word: Lexeme, predicate: syntax.Predicate) -> syntax.Selector:
        return syntax.Where(_OPEN, predicate, span=span)

    def chain_of(self, span: Span, _word: Lexeme, *cut: Any) -> syntax.Selector:
        side, marker = (cut[0].value, cut[1].selector) if cut else (None, None)
        return syntax.ChainOf(_OPEN, side, marker, span=span)

    def per(self, span: Span, word: Lexeme, scope: Lexeme) -> _Tail:
        return _Tail(syntax.Scope(str(scope)), word, span)

    def per_blocks(self, span: Span, word: Lexeme, number: Lexeme, _blocks: Lexeme) -> _Tail:
        return _Tail(position(number), word, span)

    def start_at(self, span: Span, word: Lexeme, ordinal: Lexeme) -> _Tail:
        return _Tail(position(ordinal), word, span, is_start=True)

    # --- places ---

    def in_module(self, span: Span, glob: Lexeme) -> syntax.InModule:
        return syntax.InModule(_OPEN, quoted(glob), False, span=span)

    def in_block(self, span: Span, word: Lexeme, number: Lexeme | None = None) -> syntax.InBlock:
        at = None if number is None else integer(number)
        blocks = syntax.BlockSet("any") if at is None else syntax.BlockSet("range", low=at, high=at, of=_of(word))
        return syntax.InBlock(_OPEN, blocks, False, span=span)

    def in_blocks(self, span: Span, word: Lexeme, numbers: Lexeme | None = None) -> syntax.InBlock:
        if numbers is None:
            return syntax.InBlock(_OPEN, syntax.BlockSet("any"), False, span=span)
        low, high = (integer(numbers, text) for text in str(numbers).split(".."))
        if low > high:
            numbers.report("APL205", f"the range `{numbers}` runs backwards", write=[f"{high}..{low}"])
        return syntax.InBlock(_OPEN, syntax.BlockSet("range", low=low, high=high, of=_of(word)), False, span=span)

    def in_first_last(self, span: Span, word: Any, *rest: Lexeme) -> syntax.InBlock:
        blocks = syntax.BlockSet(word.value, n=position(rest[0]) if len(rest) == 2 else 1, of=_of(rest[-1]))
        return syntax.InBlock(_OPEN, blocks, False, span=span)

    def in_share(self, span: Span, word: Any, *rest: Lexeme) -> syntax.InBlock:
        share = Fraction(1, 2) if rest[0].type == "HALF_OF" else share_of(rest[0], rest[0].span.to(rest[1].span))
        return syntax.InBlock(_OPEN, syntax.BlockSet(word.value, share=share, of=_of(rest[-1])), False, span=span)

    def in_every(self, span: Span, word: Lexeme, blocks_word: Lexeme, *start: Lexeme) -> syntax.InBlock:
        n = position(word)
        blocks = syntax.BlockSet("every", n=n, start=position(start[1]) if start else n, of=_of(blocks_word))
        return syntax.InBlock(_OPEN, blocks, False, span=span)

    def in_nth(self, span: Span, word: Lexeme, block: Lexeme) -> syntax.InBlock:
        at = position(word) - 1
        return syntax.InBlock(_OPEN, syntax.BlockSet("range", low=at, high=at, of=_of(block)), False, span=span)


def _of(word: Lexeme) -> Literal["block", "stage"]:
    return "stage" if word.type == "STAGE" else "block"


_LOOSE, _JOINED, _PHRASE, _FILTERED, _ATOM = range(5)


@frozen
class _Wording:
    """A selector in words. ``level`` is the loosest binding in it; ``tail`` the ``per`` and ``from`` of its positions,
    at the end of the phrase, innermost first; ``unscoped`` and ``unstarted``: a ``per`` or a ``from`` after it would
    bind inside it; ``open``: it ends in a predicate, to which a following ``or`` or ``and`` would belong."""

    words: str
    level: int
    tail: tuple[str, ...] = ()
    unscoped: bool = False
    unstarted: bool = False
    open: bool = False

    @property
    def text(self) -> str:
        return " ".join((self.words, *self.tail))

    def at(self, level: int) -> _Wording:
        """Adds parentheses unless it binds tightly enough."""
        return self if self.level >= level else _Wording(f"({self.text})", _ATOM)


def format_selector(selector: syntax.Selector) -> str:
    """The canonical text of a selector."""
    return _format(selector).text


def format_picked(selector: syntax.Selector) -> str:
    """The canonical text, in parentheses unless it is one word, so that what follows belongs to the statement."""
    return _format(selector).at(_ATOM).text


def format_counted(selector: syntax.Selector, scope: syntax.Scope | None) -> str:
    """The canonical text with the scope in which its nodes are counted."""
    text = _format(selector)
    if scope is None:
        return text.text
    counted = text.at(_ATOM) if text.level < _PHRASE or text.unscoped else text
    return f"{counted.text} per {scope.value}"


def _format(selector: syntax.Selector) -> _Wording:
    """Innermost parts first, without recursion: a policy may nest deeply."""
    done: list[_Wording] = []
    for current in reversed(list(walk(selector))):
        inner = [done.pop() for _ in parts(current)]
        done.append(_one(current, inner))
    return done[0]


def _one(selector: syntax.Selector, inner: list[_Wording]) -> _Wording:
    words = own_words(selector)
    match selector:
        case syntax.Everything() | syntax.Word() | syntax.Operator() | syntax.Reference():
            return _Wording(words, _ATOM)
        case syntax.Union():
            return _Wording(", ".join(part.at(_JOINED).text for part in inner), _LOOSE)
        case syntax.Intersection() | syntax.Difference() | syntax.Feeding():
            first, last = inner[0].at(_JOINED), inner[1].at(_PHRASE)
            if first.open and not first.tail and words == "and":
                first = first.at(_ATOM)
            return _Wording(f"{first.text} {words} {last.text}", _JOINED, open=last.open and not last.tail)
        case syntax.Ordinal():
            return _ordinal(selector, words, inner[0])
        case syntax.Step() | syntax.Chain():
            within = inner[0].at(_PHRASE)
            return evolve(within, words=f"{words} {within.words}", level=_PHRASE)
        case syntax.InModule() | syntax.InBlock() | syntax.Where() | syntax.ChainOf():
            marker = [part.at(_ATOM).text for part in inner[1:]]
            text = " ".join((inner[0].at(_FILTERED).words, words, *marker))
            which = selector.which if isinstance(selector, syntax.InBlock) else None
            takes_start = which is not None and which.kind == "every" and which.start == which.n  # a `from` behind it
            return _Wording(text, _FILTERED, unstarted=takes_start, open=isinstance(selector, syntax.Where))
        case _:
            assert_never(selector)


def _ordinal(ordinal: syntax.Ordinal, words: str, inner: _Wording) -> _Wording:
    within = inner.at(_PHRASE)
    scope, start = ordinal.scope, ordinal.start
    if (scope is not None and within.unscoped) or (start is not None and within.unstarted):
        within = within.at(_ATOM)
    own = (None if start is None else f"from {nth(start)}", None if scope is None else f"per {scope.value}")
    tail = (*within.tail, *(each for each in own if each is not None))
    unscoped = within.unscoped or scope is None
    unstarted = within.unstarted or (ordinal.kind == "every" and start is None)
    return _Wording(f"{words} {within.words}", _PHRASE, tail, unscoped, unstarted, within.open)


def own_words(selector: syntax.Selector) -> str:
    """The words that a selector adds to its parts: ``in layers.*``, ``first 2``, ``chain after``, ``except``."""
    return _OWN_WORDS[type(selector)](selector)


def _position_words(ordinal: syntax.Ordinal) -> str:
    """``3rd``, ``every 2nd``, ``first``, ``first 2``, without ``from`` and ``per``."""
    match ordinal.kind:
        case "nth":
            return nth(ordinal.n)
        case "every":
            return f"every {nth(ordinal.n)}"
        case "first" | "last":
            return ordinal.kind if ordinal.n == 1 else f"{ordinal.kind} {ordinal.n}"
        case _:
            assert_never(ordinal.kind)


def _block_set_words(which: syntax.BlockSet) -> str:
    """``block``, ``every 2nd block``, ``first 4 blocks``, ``blocks 0..3``, ``last stage``."""
    of = which.of
    match which.kind:
        case "any":
            return "block"
        case "range":
            return f"{of} {which.low}" if which.low == which.high else f"{of}s {which.low}..{which.high}"
        case "every":
            start = "" if which.start in (0, which.n) else f" from {nth(which.start)}"
            return f"every {nth(which.n)} {of}{start}"
        case "first" | "last":
            if which.share is not None:
                half = which.share == Fraction(1, 2)  # other shares are written in decimals, so they have an end
                return f"{which.kind} {'half' if half else f'{decimal_percent(which.share)}%'} of {of}s"
            return f"{which.kind} {of}" if which.n == 1 else f"{which.kind} {which.n} {of}s"
        case _:
            assert_never(which.kind)


def nth(number: int) -> str:
    """``1st``, ``2nd``, ``3rd``, ``4th``, ``11th``, ``21st``."""
    if 10 <= number % 100 <= 20:
        return f"{number}th"
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(number % 10, 'th')}"


_IN = {False: "in", True: "outside"}
_OWN_WORDS: Mapping[type, Callable[[Any], str]] = {
    syntax.Everything: lambda _: "everything",
    syntax.Word: lambda word: str(word.text),
    syntax.Operator: lambda operator: str(operator.text),
    syntax.Reference: lambda reference: str(reference.name),
    syntax.InModule: lambda part: f"{_IN[part.outside]} {format_glob(part.glob)}",
    syntax.InBlock: lambda part: f"{_IN[part.outside]} {_block_set_words(part.which)}",
    syntax.Ordinal: _position_words,
    syntax.Where: lambda part: f"where {format_predicate(part.predicate)}",
    syntax.Union: lambda _: "or",
    syntax.Intersection: lambda _: "and",
    syntax.Difference: lambda _: "except",
    syntax.Feeding: lambda part: "fed by" if part.reverse else "feeding",
    syntax.Step: lambda part: f"{part.direction} of",
    syntax.Chain: lambda part: f"chain {part.direction}",
    syntax.ChainOf: lambda part: "chain" if part.cut is None else f"chain {part.cut}",
}
