"""Canonical text: one form for all texts that mean the same, with no more parentheses than it takes to read it back.

``parse(format_selector(x)) == x`` for every selector, which the tests hold it to. Of a whole policy the canonical text
is what digests and cache keys are made of, so it holds everything that can change a decision and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, assert_never

from attrs import evolve, frozen

from policylang.language import syntax
from policylang.language.devices.profile import DeviceProfile
from policylang.language.formatting.unparse_predicates import format_glob, format_predicate, format_quantity
from policylang.language.grammar import is_policy_name
from policylang.language.syntax import (
    BlockSet,
    Expectation,
    Let,
    Ordinal,
    Policy,
    Rewriting,
    Rule,
    Scheduling,
    Selector,
)
from policylang.language.units import decimal_percent
from policylang.language.walk import names_in, parts, walk

_BARE = re.compile(r"\w[\w.+-]*")
_LOOSE, _JOINED, _PHRASE, _FILTERED, _ATOM = range(5)


@frozen
class _Wording:
    """A selector in words. ``level`` is the loosest binding in it; ``tail`` what its positions count over and from,
    which stands at the end of the phrase, innermost first; ``unscoped`` and ``unstarted`` say that a ``per`` or a
    ``from`` behind it would bind inside it; ``open`` that it ends in a predicate, which would take an ``or`` or ``and``
    that follows as its own."""

    words: str
    level: int
    tail: tuple[str, ...] = ()
    unscoped: bool = False
    unstarted: bool = False
    open: bool = False

    @property
    def text(self) -> str:
        return " ".join((self.words, *self.tail))

    @property
    def ends_open(self) -> bool:
        return self.open and not self.tail

    def at(self, level: int) -> _Wording:
        """Itself where it binds tightly enough, else in parentheses."""
        return self if self.level >= level else _Wording(f"({self.text})", _ATOM)


def format_selector(selector: Selector) -> str:
    """The canonical text of a selector."""
    return _format(selector).text


def format_rule(rule: Rule) -> str:
    """The canonical text of a rule: ``optional save mm``."""
    modifiers = [word for word, said in (("optional", rule.optional), ("override", rule.override)) if said]
    limit = [] if rule.budget is None else [f"up to {format_quantity(rule.budget)} per rank"]
    return " ".join((*modifiers, rule.action.word, format_selector(rule.selector), *limit))


def format_policy(policy: Policy) -> str:
    """The canonical text of a resolved policy: names that are used, includes in place, no comments."""
    lines = [f"policy {policy.name}"] if is_policy_name(policy.name) else []
    if policy.blocks is not None:
        lines.append(f"blocks {format_glob(policy.blocks.glob)}")
    if policy.device is not None:
        lines.extend(_device_lines(policy.device))
    if policy.undecided is not None:
        lines.append(f"undecided -> {policy.undecided.fate}")
    lines.extend(f"let {let.name} = {format_selector(let.selector)}" for let in _used_lets(policy))
    lines.extend(format_rule(rule) for rule in policy.rules)
    lines.extend(map(format_rewrite, policy.rewrites))
    lines.extend(map(format_scheduling, policy.scheduling))
    lines.extend(map(format_expectation, policy.expectations))
    return "\n".join(lines) + "\n"


def _device_lines(device: DeviceProfile) -> list[str]:
    """By the name that the profile has, wherever its file lies, and with its figures: those decide."""
    name = device.name if _BARE.fullmatch(device.name) else '"' + re.sub(r'["\n]', " ", device.name) + '"'
    figures = json.loads(device.canonical)
    return [f"device {name}", *(f"# {key}: {json.dumps(each)}" for key, each in figures.items())]


def format_expectation(expectation: Expectation) -> str:
    """The canonical text of an expectation."""
    match expectation:
        case syntax.ExpectTotal():
            per = " per block" if expectation.per_block else ""
            of = " of forward" if expectation.of_forward else ""
            return f"expect {expectation.figure}{per} {expectation.op} {format_quantity(expectation.limit)}{of}"
        case syntax.ExpectFate():
            return f"expect {expectation.quantifier} {_picked(expectation.selector)} {expectation.fate}"
        case syntax.ExpectCount():
            inner, scope = _format(expectation.selector), expectation.scope
            if scope is None:
                return f"expect {expectation.bound} {expectation.n} {inner.text}"
            counted = inner.at(_ATOM) if inner.level < _PHRASE or inner.unscoped else inner
            return f"expect {expectation.bound} {expectation.n} {counted.text} per {scope.value}"
        case _:
            assert_never(expectation)


def format_rewrite(statement: Rewriting) -> str:
    """The canonical text of a rewrite: ``fuse all_gather chains over dp, tp``."""
    optional = "optional " if statement.optional else ""
    match statement:
        case syntax.Collapse():
            return f"{optional}collapse round_trips"
        case syntax.Bucket():
            per = {None: "", 1: " per block"}.get(statement.blocks, f" per {statement.blocks} blocks")
            limit = "" if statement.size is None else f" up to {format_quantity(statement.size)}"
            return f"{optional}bucket {_picked(statement.selector)}{per}{limit}"
        case syntax.Fuse():
            over = f" over {', '.join(statement.dims)}" if statement.dims else ""
            return f"{optional}fuse {statement.collective} chains{over}"
        case _:
            assert_never(statement)


def format_scheduling(statement: Scheduling) -> str:
    """The canonical text of a scheduling statement: ``prefetch all_gather 1 block ahead``."""
    optional, picked = "optional " if statement.optional else "", _picked(statement.selector)
    match statement:
        case syntax.KeepOrder():
            return f"{optional}keep order of {picked}"
        case syntax.Overlap():
            in_flight, peak = statement.in_flight, statement.peak
            limits = "" if in_flight is None else f" up to {format_quantity(in_flight)} in flight"
            limits += "" if peak is None else f" within {format_quantity(peak)} of peak"
            return f"{optional}overlap {picked}{limits}"
        case syntax.Prefetch():
            return f"{optional}prefetch {picked} {_blocks(statement)} ahead"
        case syntax.Delay():
            return f"{optional}delay {picked} {_blocks(statement)}"
        case _:
            assert_never(statement)


def _blocks(statement: syntax.Prefetch | syntax.Delay) -> str:
    return "1 block" if statement.blocks == 1 else f"{statement.blocks} blocks"


def _picked(selector: Selector) -> str:
    """In parentheses unless it is one word: what follows is the statement's own."""
    return _format(selector).at(_ATOM).text


def _used_lets(policy: Policy) -> list[Let]:
    """The names that the statements reach, in the order of definition."""
    used = names_in(policy, policy.statements)
    return [let for name, let in policy.lets.items() if name in used]


def _format(selector: Selector) -> _Wording:
    """Innermost parts first, without recursion: a policy may nest deeply."""
    done: list[_Wording] = []
    for current in reversed(list(walk(selector))):
        inner = [done.pop() for _ in parts(current)]
        done.append(_one(current, inner))
    return done[0]


def _one(selector: Selector, inner: list[_Wording]) -> _Wording:
    words = own_words(selector)
    if not inner:
        return _Wording(words, _ATOM)
    if isinstance(selector, syntax.Union):
        return _Wording(", ".join(part.at(_JOINED).text for part in inner), _LOOSE)
    if isinstance(selector, syntax.Junction):
        return _join(inner[0], words, inner[1])
    if isinstance(selector, Ordinal):
        return _ordinal(selector, words, inner[0])
    if isinstance(selector, syntax.Step | syntax.Chain):
        within = inner[0].at(_PHRASE)
        return evolve(within, words=f"{words} {within.words}", level=_PHRASE)
    marker = [part.at(_ATOM).text for part in inner[1:]]
    text = " ".join((inner[0].at(_FILTERED).words, words, *marker))
    return _Wording(text, _FILTERED, unstarted=_takes_a_start(selector), open=isinstance(selector, syntax.Where))


def _takes_a_start(selector: Selector) -> bool:
    """``in every 2nd block`` takes a ``from`` that follows as its own."""
    return (
        isinstance(selector, syntax.InBlock)
        and selector.which.kind == "every"
        and selector.which.start == selector.which.n
    )


def _join(left: _Wording, word: str, right: _Wording) -> _Wording:
    first = left.at(_JOINED)
    if first.ends_open and word == "and":
        first = first.at(_ATOM)
    last = right.at(_PHRASE)
    return _Wording(f"{first.text} {word} {last.text}", _JOINED, open=last.ends_open)


def _ordinal(ordinal: Ordinal, words: str, inner: _Wording) -> _Wording:
    within = inner.at(_PHRASE)
    scope, start = ordinal.scope, ordinal.start
    if (scope is not None and within.unscoped) or (start is not None and within.unstarted):
        within = within.at(_ATOM)
    tail = list(within.tail)
    if start is not None:
        tail.append(f"from {nth(start)}")
    if scope is not None:
        tail.append(f"per {scope.value}")
    unstarted = within.unstarted or (ordinal.kind == "every" and start is None)
    return _Wording(
        f"{words} {within.words}", _PHRASE, tuple(tail), within.unscoped or scope is None, unstarted, within.open
    )


def own_words(selector: Selector) -> str:
    """What a selector adds to the words of its parts: ``in layers.*``, ``first 2``, ``chain after``, ``except``."""
    return _OWN_WORDS[type(selector)](selector)


def _position_words(ordinal: Ordinal) -> str:
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


def _block_set_words(which: BlockSet) -> str:
    """``block``, ``every 2nd block``, ``first 4 blocks``, ``blocks 0..3``."""
    match which.kind:
        case "any":
            return "block"
        case "range":
            return f"blocks {which.low}..{which.high}"
        case "every":
            start = "" if which.start in (0, which.n) else f" from {nth(which.start)}"
            return f"every {nth(which.n)} block{start}"
        case "first" | "last":
            if which.share is not None:
                return f"{which.kind} {_share_words(which.share)} of blocks"
            return f"{which.kind} block" if which.n == 1 else f"{which.kind} {which.n} blocks"
        case _:
            assert_never(which.kind)


def _share_words(share: Fraction) -> str:
    """``half``, ``25%``, ``12.5%``: a share is written in decimals, so it has an end."""
    return "half" if share == Fraction(1, 2) else f"{decimal_percent(share)}%"


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
