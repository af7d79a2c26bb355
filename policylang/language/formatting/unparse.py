"""Canonical text: one form for all texts that mean the same, with no more parentheses than it takes to read it back.

``parse(format_selector(x)) == x`` for every selector, which the tests hold it to. Of a whole policy the canonical text
is what digests and cache keys are made of, so it holds everything that can change a decision and nothing else.
"""

from __future__ import annotations

from attrs import evolve, frozen

from policylang.language.formatting.unparse_predicates import format_glob, format_predicate
from policylang.language.parsing.parser import is_policy_name
from policylang.language.syntax import (
    Action,
    BlockSet,
    Chain,
    ChainOf,
    Collapse,
    Difference,
    Everything,
    Expectation,
    ExpectFate,
    ExpectTotal,
    Feeding,
    InBlock,
    InModule,
    Intersection,
    Let,
    Operator,
    Ordinal,
    Policy,
    Reference,
    Rewriting,
    Rule,
    Selector,
    Step,
    Union,
    Where,
    Word,
)
from policylang.language.units import write
from policylang.language.walk import parts, walk

ACTION_WORDS: dict[Action, str] = {
    Action.SAVE: "save",
    Action.PREFER_SAVE: "prefer_save",
    Action.RECOMPUTE: "recompute",
    Action.MUST_RECOMPUTE: "must_recompute",
    Action.OFFLOAD: "offload",
    Action.PREFER_OFFLOAD: "prefer_offload",
    Action.LEAVE: "leave",
}

_LOOSE, _JOINED, _PHRASE, _FILTERED, _ATOM = range(5)


@frozen
class _Text:
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

    def at(self, level: int) -> _Text:
        """Itself where it binds tightly enough, else in parentheses."""
        return self if self.level >= level else _Text(f"({self.text})", _ATOM)


def format_selector(selector: Selector) -> str:
    """The canonical text of a selector."""
    return _format(selector).text


def format_rule(rule: Rule) -> str:
    """The canonical text of a rule: ``optional save mm``."""
    modifiers = [word for word, said in (("optional", rule.optional), ("override", rule.override)) if said]
    limit = [] if rule.budget is None else [f"up to {write(rule.budget.value, rule.budget.dimension)} per rank"]
    return " ".join((*modifiers, ACTION_WORDS[rule.action], format_selector(rule.selector), *limit))


def format_policy(policy: Policy) -> str:
    """The canonical text of a resolved policy: names that are used, includes in place, no comments."""
    lines = [f"policy {policy.name}"] if is_policy_name(policy.name) else []
    if policy.blocks is not None:
        lines.append(f"blocks {format_glob(policy.blocks.glob)}")
    if policy.undecided is not None:
        lines.append(f"undecided -> {policy.undecided.fate}")
    lines.extend(f"let {let.name} = {format_selector(let.selector)}" for let in _used_lets(policy))
    lines.extend(format_rule(rule) for rule in policy.rules)
    lines.extend(map(format_rewrite, policy.rewrites))
    lines.extend(map(format_expectation, policy.expectations))
    return "\n".join(lines) + "\n"


def format_expectation(expectation: Expectation) -> str:
    """The canonical text of an expectation."""
    if isinstance(expectation, ExpectTotal):
        per = " per block" if expectation.per_block else ""
        limit = write(expectation.limit.value, expectation.limit.dimension)
        return f"expect {expectation.figure}{per} {expectation.op} {limit}"
    inner = _format(expectation.selector)
    if isinstance(expectation, ExpectFate):
        return f"expect {expectation.quantifier} {inner.at(_ATOM).text} {expectation.fate}"
    scope = expectation.scope
    if scope is None:
        return f"expect {expectation.bound} {expectation.n} {inner.text}"
    counted = inner.at(_ATOM) if inner.level < _PHRASE or inner.unscoped else inner
    return f"expect {expectation.bound} {expectation.n} {counted.text} per {scope.value}"


def format_rewrite(statement: Rewriting) -> str:
    """The canonical text of a rewrite: ``fuse all_gather chains over dp, tp``."""
    optional = "optional " if statement.optional else ""
    if isinstance(statement, Collapse):
        return f"{optional}collapse round_trips"
    over = f" over {', '.join(statement.dims)}" if statement.dims else ""
    return f"{optional}fuse {statement.collective} chains{over}"


def _used_lets(policy: Policy) -> list[Let]:
    """The names that the rules and expectations reach, in the order of definition."""
    statements = [*policy.rules, *(each for each in policy.expectations if not isinstance(each, ExpectTotal))]
    pending = [statement.selector for statement in statements]
    used: set[str] = set()
    while pending:
        for part in walk(pending.pop()):
            if isinstance(part, Reference) and part.name not in used:
                used.add(part.name)
                pending.append(policy.lets[part.name].selector)
    return [let for name, let in policy.lets.items() if name in used]


def _format(selector: Selector) -> _Text:
    """Innermost parts first, without recursion: a policy may nest deeply."""
    done: list[_Text] = []
    for current in reversed(list(walk(selector))):
        inner = [done.pop() for _ in parts(current)]
        done.append(_one(current, inner))
    return done[0]


def _one(selector: Selector, inner: list[_Text]) -> _Text:
    if isinstance(selector, Everything):
        return _Text("everything", _ATOM)
    if isinstance(selector, Word | Operator):
        return _Text(selector.text, _ATOM)
    if isinstance(selector, Reference):
        return _Text(selector.name, _ATOM)
    if isinstance(selector, Union):
        return _Text(", ".join(part.at(_JOINED).text for part in inner), _LOOSE)
    if isinstance(selector, Intersection | Difference | Feeding):
        return _join(selector, inner[0], inner[1])
    if isinstance(selector, Ordinal):
        return _ordinal(selector, inner[0])
    if isinstance(selector, Step | Chain):
        prefix = f"{selector.direction} of" if isinstance(selector, Step) else f"chain {selector.direction}"
        within = inner[0].at(_PHRASE)
        return evolve(within, words=f"{prefix} {within.words}", level=_PHRASE)
    filtered = inner[0].at(_FILTERED)
    words = f"{filtered.words} {_postfix(selector, inner)}"
    return _Text(words, _FILTERED, unstarted=_takes_a_start(selector), open=isinstance(selector, Where))


def _takes_a_start(selector: Selector) -> bool:
    """``in every 2nd block`` takes a ``from`` that follows as its own."""
    return isinstance(selector, InBlock) and selector.which.kind == "every" and selector.which.start == selector.which.n


def _join(selector: Intersection | Difference | Feeding, left: _Text, right: _Text) -> _Text:
    if isinstance(selector, Intersection):
        word = "and"
    elif isinstance(selector, Difference):
        word = "except"
    else:
        word = "fed by" if selector.reverse else "feeding"
    first = left.at(_JOINED)
    if first.ends_open and word == "and":
        first = first.at(_ATOM)
    last = right.at(_PHRASE)
    return _Text(f"{first.text} {word} {last.text}", _JOINED, open=last.ends_open)


def _ordinal(ordinal: Ordinal, inner: _Text) -> _Text:
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
    words = f"{position_words(ordinal)} {within.words}"
    return _Text(words, _PHRASE, tuple(tail), within.unscoped or scope is None, unstarted, within.open)


def position_words(ordinal: Ordinal) -> str:
    """``3rd``, ``every 2nd``, ``first``, ``first 2``, without ``from`` and ``per``."""
    if ordinal.kind == "nth":
        return nth(ordinal.n)
    if ordinal.kind == "every":
        return f"every {nth(ordinal.n)}"
    return ordinal.kind if ordinal.n == 1 else f"{ordinal.kind} {ordinal.n}"


def _postfix(selector: Selector, inner: list[_Text]) -> str:
    if isinstance(selector, InModule):
        return f"{'outside' if selector.outside else 'in'} {format_glob(selector.glob)}"
    if isinstance(selector, InBlock):
        return f"{'outside' if selector.outside else 'in'} {block_set_words(selector.which)}"
    if isinstance(selector, Where):
        return f"where {format_predicate(selector.predicate)}"
    if isinstance(selector, ChainOf):
        return "chain" if selector.cut is None else f"chain {selector.cut} {inner[1].at(_ATOM).text}"
    raise TypeError(f"not a filter: {selector}")


def block_set_words(which: BlockSet) -> str:
    """``block``, ``every 2nd block``, ``first 4 blocks``, ``blocks 0..3``."""
    if which.kind == "any":
        return "block"
    if which.kind == "range":
        return f"blocks {which.low}..{which.high}"
    if which.kind == "every":
        start = "" if which.start in (0, which.n) else f" from {nth(which.start)}"
        return f"every {nth(which.n)} block{start}"
    return f"{which.kind} block" if which.n == 1 else f"{which.kind} {which.n} blocks"


def nth(number: int) -> str:
    """``1st``, ``2nd``, ``3rd``, ``4th``, ``11th``, ``21st``."""
    if 10 <= number % 100 <= 20:
        return f"{number}th"
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(number % 10, 'th')}"
