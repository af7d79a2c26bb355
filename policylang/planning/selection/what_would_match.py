"""What to write in a selector that matches nothing, so that it matches something: another path, another operator,
another kind of input. Each is looked for in the graph before it is offered."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from policylang.graph.facts import Facts
from policylang.language.diagnostics import Fix, Span, written
from policylang.language.globs import is_magic
from policylang.language.public_names import as_one, forms_of
from policylang.language.syntax import (
    NOWHERE,
    And,
    InModule,
    Is,
    Match,
    Not,
    Operator,
    Or,
    Predicate,
    Reference,
    Selector,
    Where,
)
from policylang.language.walk import predicates, rebuild, walk
from policylang.planning.selection.empty_matches import nearest_paths, nearest_paths_hint, numberless, other_origin
from policylang.planning.selection.selectors import Selections

_MOST = 3


def would_match(selector: Selector, selections: Selections) -> tuple[Fix, ...]:
    """A mend for each other word of a selector, as it is written, with which it picks something."""
    found: dict[Fix, None] = {}
    for mend, other in _candidates(selector, selections):
        if selections.rows(other):
            found[mend] = None
        if len(found) == _MOST:
            break
    return tuple(found)


def near_globs(glob: str, facts: Facts) -> tuple[str, ...]:
    """The globs over module paths of the graph that are most like one; with `*` for numbers where it has wildcards."""
    near = nearest_paths(glob, facts)
    return tuple(dict.fromkeys(map(numberless, near))) if is_magic(glob) else near


def numbered_globs(glob: str, facts: Facts) -> tuple[str, ...]:
    """Those among the near ones that stand for modules with numbers, as blocks are."""
    return tuple(each for each in map(numberless, nearest_paths(glob, facts)) if "*" in each)


def block_globs(glob: str, facts: Facts) -> tuple[str, ...]:
    """What the blocks of a graph could be: modules with numbers, else those with the names most like a glob."""
    return numbered_globs(glob, facts) or nearest_paths(glob, facts)


def naming_blocks(facts: Facts, glob: str = "layers.*") -> str:
    """The help where nothing says what the blocks are."""
    found, near = block_globs(glob, facts), nearest_paths_hint(glob, facts)
    return f"name them, `blocks {found[0]}`; {near}" if found else near


def glob_span(glob: str, phrase: Span) -> Span:
    """Where a glob stands at the end of a phrase, its quotes included."""
    at = phrase.text.rfind(glob)
    start, end = phrase.start + at, phrase.start + at + len(glob)
    quoted = phrase.source.text[start - 1 : start] == '"' == phrase.source.text[end : end + 1]
    return Span(phrase.source, start - quoted, end + quoted)


def _candidates(selector: Selector, selections: Selections) -> Iterator[tuple[Fix, Selector]]:
    for part in walk(selector):
        if part.span is NOWHERE:
            continue
        if isinstance(part, InModule) and not part.outside and not selections.rows(part):
            for glob in near_globs(part.glob, selections.facts):
                (mend,) = written(glob_span(part.glob, part.span), [glob], near=True)
                yield mend, _with(selector, part, evolve(part, glob=glob))
        elif isinstance(part, Operator | Reference) and not selections.rows(part):
            for form in forms_of(part.name) if getattr(part, "namespace", None) in (None, "aten") else ():
                if form.is_whole and selections.rows(form.selector):
                    (mend,) = written(part.span, [as_one([form.text])])
                    yield mend, _with(selector, part, form.selector)
        elif isinstance(part, Where):
            for test in predicates(part.predicate):
                if isinstance(test, Match) and test.property == "module" and test.op == "==":
                    for glob in near_globs(test.pattern, selections.facts):
                        (mend,) = written(glob_span(test.pattern, test.span), [glob], near=True)
                        predicate = _replaced(part.predicate, test, evolve(test, pattern=glob))
                        yield mend, _with(selector, part, evolve(part, predicate=predicate))
                elif isinstance(test, Is) and (instead := other_origin(test, part, selections)) is not None:
                    (mend,) = written(test.span, [instead.name])
                    yield mend, _with(selector, part, evolve(part, predicate=_replaced(part.predicate, test, instead)))


def _with(selector: Selector, part: Selector, other: Selector) -> Selector:
    """A selector with another one in place of one of its parts, which has not been rebuilt from others."""

    def change(current: Selector) -> Selector:
        if type(current) is not type(part) or current.span != part.span:
            return current
        if isinstance(current, InModule) and isinstance(other, InModule):
            return evolve(current, glob=other.glob)
        if isinstance(current, Where) and isinstance(other, Where):
            return evolve(current, predicate=other.predicate)
        return other

    return rebuild(selector, change)


def _replaced(predicate: Predicate, test: Predicate, other: Predicate) -> Predicate:
    if predicate is test:
        return other
    if isinstance(predicate, Not):
        return evolve(predicate, predicate=_replaced(predicate.predicate, test, other))
    if isinstance(predicate, And | Or):
        return evolve(predicate, parts=tuple(_replaced(part, test, other) for part in predicate.parts))
    return predicate
