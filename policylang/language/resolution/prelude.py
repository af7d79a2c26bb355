"""The groups that every policy knows: ``policies/prelude.apl``, read once.

A group is looked up when a policy uses it, and comes out self-contained: where it builds on another group, that one is
put in its place. So a policy may give a group's name a meaning of its own without changing the others. Operators are
not checked against any torch: the prelude covers several, and a test holds it against the one that is installed.
"""

from __future__ import annotations

from functools import cache

from attrs import evolve

from policylang.language.diagnostics import Source
from policylang.language.parsing.parser import parse_file
from policylang.language.parsing.tree import union_of
from policylang.language.resolution.operator_names import split_operator
from policylang.language.resources import policies_folder
from policylang.language.syntax import Let, Selector, Union, Word
from policylang.language.walk import rebuild

NAME = "<prelude>"


def group(name: str) -> Let | None:
    """The resolved definition of a group; None where the prelude has none of that name."""
    return _resolved(name) if name in _lets() else None


def group_names() -> tuple[str, ...]:
    """The groups in the order of the prelude."""
    return tuple(_lets())


def resolved(text: str) -> Selector:
    """The selector that a text of groups and operators writes."""
    file, diagnostics = parse_file(Source(NAME, f"let it = {text}"))
    (let,) = file.statements
    if diagnostics or not isinstance(let, Let):
        raise ValueError(f"`{text}` is no selector")
    return rebuild(let.selector, _look_up)


@cache
def _resolved(name: str) -> Let:
    let = _lets()[name]
    return evolve(let, selector=rebuild(let.selector, _look_up))


@cache
def _lets() -> dict[str, Let]:
    source = Source(NAME, (policies_folder() / "prelude.apl").read_text(encoding="utf-8"))
    file, diagnostics = parse_file(source)
    if diagnostics:
        first = diagnostics[0]
        raise RuntimeError(f"the prelude cannot be read: {first.span and first.span.location}: {first.message}")
    return {statement.name: statement for statement in file.statements if isinstance(statement, Let)}


def _look_up(selector: Selector) -> Selector:
    if isinstance(selector, Union):
        return union_of(selector.parts, selector.span)
    if not isinstance(selector, Word):
        return selector
    other = group(selector.text)
    if other is not None:
        return other.selector
    operator = split_operator(selector.text, lambda _: True)
    if operator is None:
        raise RuntimeError(f"the prelude names `{selector.text}`, which is no operator")
    return evolve(operator, span=selector.span)
