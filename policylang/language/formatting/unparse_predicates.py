"""Canonical text of predicates, figures and globs."""

from __future__ import annotations

from typing import assert_never

from policylang.language.grammar import word_kind
from policylang.language.syntax import And, Annotated, Compare, CrossesCut, Is, Match, Not, Or, Predicate, Quantity
from policylang.language.units import write

_GLOB_KINDS = frozenset({"NAME", "PATH", "INT", "NUMBER"})
_VALUE_KINDS = frozenset({"NAME", "PATH"})


def format_glob(glob: str) -> str:
    """A module path as it can be read back: in quotes where it is a word of the language."""
    return glob if word_kind(glob) in _GLOB_KINDS else f'"{glob}"'


def format_quantity(quantity: Quantity) -> str:
    return write(quantity.value, quantity.dimension)


def format_predicate(predicate: Predicate) -> str:
    """The canonical text of a predicate."""
    match predicate:
        case Or():
            return " or ".join(_grouped(part, Or) for part in predicate.parts)
        case And():
            return " and ".join(_grouped(part, Or, And) for part in predicate.parts)
        case Not():
            return f"not {_grouped(predicate.predicate, Or, And)}"
        case Is():
            return predicate.name
        case CrossesCut():
            return f"crosses cut per {'auto' if predicate.size is None else format_quantity(predicate.size)}"
        case Annotated():
            return f"annotated {_word(predicate.name)}"
        case Match():
            return f"{predicate.property} {predicate.op} {_word(predicate.pattern)}"
        case Compare():
            index = "" if predicate.index is None else f"[{predicate.index}]"
            return f"{predicate.quantity}{index} {predicate.op} {format_quantity(predicate.value)}"
        case _:
            assert_never(predicate)


def _word(text: str) -> str:
    return text if word_kind(text) in _VALUE_KINDS else f'"{text}"'


def _grouped(predicate: Predicate, *looser: type) -> str:
    text = format_predicate(predicate)
    return f"({text})" if isinstance(predicate, looser) else text
