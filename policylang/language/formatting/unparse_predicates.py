"""Canonical text of predicates, figures and globs."""

from __future__ import annotations

from policylang.language.parsing.parser import word_kind
from policylang.language.syntax import And, Annotated, CrossesCut, Is, Match, Not, Or, Predicate, Quantity
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
    if isinstance(predicate, Or):
        return " or ".join(_grouped(part, Or) for part in predicate.parts)
    if isinstance(predicate, And):
        return " and ".join(_grouped(part, Or, And) for part in predicate.parts)
    if isinstance(predicate, Not):
        return f"not {_grouped(predicate.predicate, Or, And)}"
    if isinstance(predicate, Is):
        return predicate.name
    if isinstance(predicate, CrossesCut):
        return f"crosses cut per {'auto' if predicate.size is None else format_quantity(predicate.size)}"
    if isinstance(predicate, Annotated):
        return f"annotated {_word(predicate.name)}"
    if isinstance(predicate, Match):
        return f"{predicate.property} {predicate.op} {_word(predicate.pattern)}"
    index = "" if predicate.index is None else f"[{predicate.index}]"
    return f"{predicate.quantity}{index} {predicate.op} {format_quantity(predicate.value)}"


def _word(text: str) -> str:
    return text if word_kind(text) in _VALUE_KINDS else f'"{text}"'


def _grouped(predicate: Predicate, *looser: type) -> str:
    text = format_predicate(predicate)
    return f"({text})" if isinstance(predicate, looser) else text
