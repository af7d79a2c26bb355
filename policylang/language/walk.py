"""Walking a syntax tree without recursion, and rebuilding it. The fields' types say where its parts are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from attrs import evolve, fields

from policylang.language import syntax
from policylang.language.syntax import Policy, Predicate, Reference, Selecting, Selector, Statement


def selector_of(statement: Statement) -> Selector | None:
    """The selector of a statement that has one."""
    return statement.selector if isinstance(statement, Selecting) else None


def selectors_of(statements: Iterable[Statement]) -> Iterator[Selector]:
    """The selectors of statements, such as ``Policy.statements``."""
    return filter(None, map(selector_of, statements))


def parts(selector: Selector) -> tuple[Selector, ...]:
    """The selectors directly inside a selector, in the order in which they are written."""
    return tuple(_inside(selector, "Selector"))


def walk(selector: Selector) -> Iterator[Selector]:
    """The selector and every selector inside it, each before its parts, in the order of the text."""
    return _walk(selector, "Selector")


def predicates(predicate: Predicate) -> Iterator[syntax.Test]:
    """The tests inside a predicate, in the order of the text."""
    return (each for each in _walk(predicate, "Predicate") if not isinstance(each, syntax.Not | syntax.And | syntax.Or))


def with_lets(policy: Policy, *selectors: Selector) -> Iterator[Selector]:
    """The parts of selectors, and those of every ``let`` that they come to, each once."""
    pending, seen = [*reversed(selectors)], set()
    while pending:
        for part in walk(pending.pop()):
            yield part
            if isinstance(part, Reference) and part.name not in seen:
                seen.add(part.name)
                pending.append(policy.lets[part.name].selector)


def names_in(policy: Policy, statements: Iterable[Statement]) -> frozenset[str]:
    """The names of every ``let`` that statements use."""
    parts = with_lets(policy, *selectors_of(statements))
    return frozenset(part.name for part in parts if isinstance(part, Reference))


def tests_of(policy: Policy, *statements: Statement) -> Iterator[syntax.Test]:
    """The tests in the ``where`` clauses of statements' selectors, and of every ``let`` that they use."""
    for part in with_lets(policy, *selectors_of(statements)):
        if isinstance(part, syntax.Where):
            yield from predicates(part.predicate)


def depth(selector: Selector) -> int:
    """The depth of the deepest nesting, predicates included."""
    deepest = 0
    pending: list[tuple[Selector | Predicate, int]] = [(selector, 1)]
    while pending:
        current, level = pending.pop()
        deepest = max(deepest, level)
        pending.extend((part, level + 1) for kind in ("Selector", "Predicate") for part in _inside(current, kind))
    return deepest


def rebuild(selector: Selector, change: Callable[[Selector], Selector]) -> Selector:
    """The selector with ``change`` applied to every selector inside it, innermost first; spans stay."""
    done: list[Selector] = []
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
