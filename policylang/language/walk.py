"""Walking a syntax tree without recursion, and rebuilding it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attrs import evolve

from policylang.language.syntax import (
    And,
    Annotated,
    Chain,
    ChainOf,
    Compare,
    CrossesCut,
    Difference,
    Everything,
    ExpectCount,
    ExpectFate,
    Feeding,
    InBlock,
    InModule,
    Intersection,
    Is,
    Let,
    Match,
    Not,
    Operator,
    Or,
    Ordinal,
    Policy,
    Predicate,
    Reference,
    Rule,
    Selector,
    Statement,
    Step,
    Union,
    Where,
    Word,
)

_SELECTOR_FIELDS: dict[type, tuple[str, ...]] = {
    Everything: (),
    Word: (),
    Operator: (),
    Reference: (),
    InModule: ("selector",),
    InBlock: ("selector",),
    Ordinal: ("selector",),
    Where: ("selector",),
    Union: ("parts",),
    Intersection: ("left", "right"),
    Difference: ("left", "right"),
    Feeding: ("left", "right"),
    Step: ("selector",),
    Chain: ("selector",),
    ChainOf: ("selector", "marker"),
}


def selector_of(statement: Statement) -> Selector | None:
    """The selector of a statement that has one."""
    if isinstance(statement, Rule | Let | ExpectCount | ExpectFate):
        return statement.selector
    return None


def parts(selector: Selector) -> tuple[Selector, ...]:
    """The selectors directly inside a selector, in the order in which they are written."""
    found: list[Selector] = []
    for name in _SELECTOR_FIELDS[type(selector)]:
        value = getattr(selector, name)
        if isinstance(value, tuple):
            found.extend(value)
        elif value is not None:
            found.append(value)
    return tuple(found)


def walk(selector: Selector) -> Iterator[Selector]:
    """The selector and every selector inside it, each before its parts, in the order of the text."""
    pending = [selector]
    while pending:
        current = pending.pop()
        yield current
        pending.extend(reversed(parts(current)))


def with_lets(selector: Selector, policy: Policy) -> Iterator[Selector]:
    """A selector's parts, and those of every ``let`` that it comes to, each once."""
    pending, seen = [selector], set()
    while pending:
        for part in walk(pending.pop()):
            yield part
            if isinstance(part, Reference) and part.name not in seen:
                seen.add(part.name)
                pending.append(policy.lets[part.name].selector)


def predicates(predicate: Predicate) -> Iterator[Compare | Match | Is | CrossesCut | Annotated]:
    """The tests inside a predicate, in the order of the text."""
    pending = [predicate]
    while pending:
        current = pending.pop()
        if isinstance(current, And | Or):
            pending.extend(reversed(current.parts))
        elif isinstance(current, Not):
            pending.append(current.predicate)
        else:
            yield current


def depth(selector: Selector) -> int:
    """How many parts are nested in one another at the deepest place, predicates included."""
    deepest = 0
    pending: list[tuple[Selector | Predicate, int]] = [(selector, 1)]
    while pending:
        current, level = pending.pop()
        deepest = max(deepest, level)
        inner: tuple[Selector | Predicate, ...]
        if isinstance(current, And | Or):
            inner = current.parts
        elif isinstance(current, Not):
            inner = (current.predicate,)
        elif isinstance(current, Compare | Match | Is | CrossesCut | Annotated):
            inner = ()
        else:
            inner = parts(current)
            if isinstance(current, Where):
                inner = (*inner, current.predicate)
        pending.extend((part, level + 1) for part in inner)
    return deepest


def rebuild(selector: Selector, change: Callable[[Selector], Selector]) -> Selector:
    """The selector with ``change`` applied to every selector inside it, innermost first; spans stay."""
    order = list(walk(selector))
    done: list[Selector] = []
    for current in reversed(order):  # parts come after their whole in the walk, so before it here
        inner = [done.pop() for _ in parts(current)]
        done.append(change(_with_parts(current, inner)))
    return done[0]


def _with_parts(selector: Selector, inner: list[Selector]) -> Selector:
    if not inner:
        return selector
    if isinstance(selector, Union):
        return evolve(selector, parts=tuple(inner))
    present = [name for name in _SELECTOR_FIELDS[type(selector)] if getattr(selector, name) is not None]
    changes: dict[str, Any] = dict(zip(present, inner, strict=True))
    changed: Selector = evolve(selector, **changes)
    return changed
