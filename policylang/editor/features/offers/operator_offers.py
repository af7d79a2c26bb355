"""Operators, groups and names: what a selector begins with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from policylang.editor.features.offers.graph_index import Count, GraphIndex
from policylang.editor.features.offers.items import Kind, Offer
from policylang.editor.state import TextState
from policylang.language.figures import shortened
from policylang.language.globs import NameGlob, is_magic, name_glob_problem, split_outside_braces
from policylang.language.manifest.names import manifest
from policylang.language.parsing.cursor import Cursor
from policylang.language.parsing.parser import word_kind
from policylang.language.resolution import prelude
from policylang.language.resolution.operator_names import PLAIN_FUNCTIONS
from policylang.language.syntax import Let

_LONGEST = 80
_ELSEWHERE = "not in the snapshot"
Tree = Mapping[str, Mapping[str, Mapping[str, Count]]]


def lets_above(text: TextState, cursor: Cursor) -> dict[str, Let]:
    """The names that the statement at the cursor knows, with those of the files that are included above it."""
    found: dict[str, Let] = {}
    for placed in text.expansion.statements:
        here = placed.include or placed.statement.span
        if isinstance(placed.statement, Let) and here.start < cursor.begin:
            found[placed.statement.name] = placed.statement
    return found


def group_offers(index: GraphIndex | None, names: Mapping[str, Let]) -> Iterator[Offer]:
    """The groups in the order of the prelude, those that denote something in the graph first."""
    sizes = {} if index is None else index.groups
    for name in sorted(prelude.group_names(), key=lambda name: name not in sizes):
        if name not in names:
            none = "group" if index is None else _ELSEWHERE
            detail = f"{sizes[name]:,} forward" if name in sizes else none
            yield Offer(name, Kind.Class, detail, about=f"group:{name}")


def name_offers(names: Mapping[str, Let]) -> Iterator[Offer]:
    """The names of the policy, the last one first."""
    for name, let in reversed(names.items()):
        yield Offer(name, Kind.Variable, shortened(let.span.one_line, _LONGEST), about=f"let:{name}")


def operator_offers(index: GraphIndex | None, cursor: Cursor, names: Mapping[str, Let]) -> Iterator[Offer]:
    """The operators of the graph, those with the most bytes first; then, of what somebody has begun to write, others."""
    typed = cursor.typed
    if typed.startswith('"'):
        return
    called: Tree = {} if index is None else index.operators
    if is_magic(typed):
        yield from _fitting(typed, called)
        return
    if "." in typed:
        yield from _qualified(typed, called)
        return
    taken = {*names, *prelude.group_names()}
    for text, count in sorted(_bare(called, taken).items(), key=lambda each: each[1].rank):
        yield Offer(text, Kind.Function, str(count), about=f"op:{text}")
    for namespace, of_namespace in called.items():
        count = Count()
        for overloads in of_namespace.values():
            count.add(_all(overloads))
        yield Offer(f"{namespace}.", Kind.Module, str(count), about=f"namespace:{namespace}")
    if typed:
        in_graph = {name for of_namespace in called.values() for name in of_namespace}
        detail = "operator" if index is None else _ELSEWHERE
        for namespace, listed in manifest().namespaces.items():
            if namespace not in called:
                yield Offer(f"{namespace}.", Kind.Module, detail, about=f"namespace:{namespace}")
            for name in listed:
                if name not in in_graph and typed.lower() in name.lower():
                    yield Offer(_written(namespace, name, taken), Kind.Function, detail, about=f"op:{namespace}.{name}")


def _bare(called: Tree, taken: set[str]) -> dict[str, Count]:
    """The operators that a graph calls, each by its name alone where that means no more and no less."""
    counts: dict[str, Count] = {}
    for namespace, of_namespace in called.items():
        for name, overloads in of_namespace.items():
            counts.setdefault(_written(namespace, name, taken), Count()).add(_all(overloads))
    return counts


def _written(namespace: str, name: str, taken: set[str]) -> str:
    """A name alone means an operator of any namespace, but for Python's own functions: those it means only where no
    tensor operator has it."""
    plain = namespace == PLAIN_FUNCTIONS and any(
        name in names for space, names in manifest().namespaces.items() if space != PLAIN_FUNCTIONS
    )
    return f"{namespace}.{name}" if plain or name in taken or word_kind(name) != "NAME" else name


def _qualified(typed: str, called: Tree) -> Iterator[Offer]:
    """What may follow the dot: the names of a namespace, or the overloads of an operator."""
    known = manifest().namespaces
    first, *rest = split_outside_braces(typed)
    if first in called or first in known:
        if len(rest) == 1:
            yield from _names(first, called)
        elif len(rest) == 2:
            yield from _overloads(f"{first}.{rest[0]}", called.get(first, {}).get(rest[0], {}), known, first, rest[0])
    elif len(rest) == 1:
        counts: dict[str, Count] = {}
        for namespace, of_namespace in called.items():
            if namespace != PLAIN_FUNCTIONS:
                for overload, count in of_namespace.get(first, {}).items():
                    counts.setdefault(overload, Count()).add(count)
        yield from _overloads(first, counts, known, None, first)


def _names(namespace: str, called: Tree) -> Iterator[Offer]:
    here = called.get(namespace, {})
    for name, overloads in sorted(here.items(), key=lambda each: _all(each[1]).rank):
        yield Offer(f"{namespace}.{name}", Kind.Function, str(_all(overloads)), about=f"op:{namespace}.{name}")
    for name in manifest().namespaces.get(namespace, ()):
        if name not in here:
            detail = _ELSEWHERE if called else "operator"
            yield Offer(f"{namespace}.{name}", Kind.Function, detail, about=f"op:{namespace}.{name}")


def _overloads(
    stem: str,
    counts: Mapping[str, Count],
    known: Mapping[str, Mapping[str, tuple[str, ...]]],
    space: str | None,
    name: str,
) -> Iterator[Offer]:
    for overload, count in counts.items():
        if overload:
            yield Offer(f"{stem}.{overload}", Kind.Method, str(count), about=f"op:{stem}.{overload}")
    for namespace, names in known.items():
        if space in (None, namespace) and namespace != PLAIN_FUNCTIONS:
            for overload in names.get(name, ()):
                if overload not in counts:
                    yield Offer(f"{stem}.{overload}", Kind.Method, _ELSEWHERE, about=f"op:{stem}.{overload}")


def _fitting(typed: str, called: Tree) -> Iterator[Offer]:
    """The operators of the graph that a glob fits, as far as it is typed, and the glob itself."""
    *head, tail = split_outside_braces(typed)
    opened = tail.rpartition("{")
    in_braces = bool(opened[1]) and "}" not in opened[2]
    *chosen, begun = opened[2].split(",") if in_braces else [""]
    pattern = f"{{{','.join([*(each.strip() for each in chosen), begun.strip() + '*'])}}}" if in_braces else f"{tail}*"
    if name_glob_problem(begun) is not None or len(head) > 1 or (not in_braces and name_glob_problem(pattern)):
        return
    whole, count = NameGlob(tail), Count()
    found: dict[str, Count] = {}
    spaces = NameGlob(head[0] if head else "*")
    for namespace, names in called.items():
        if not spaces.matches(namespace) or (not head and namespace == PLAIN_FUNCTIONS):
            continue
        for name, overloads in names.items():
            if not in_braces and whole.matches(name):
                count.add(_all(overloads))
            if name.startswith(begun.strip()) if in_braces else NameGlob(pattern).matches(name):
                found.setdefault(name, Count()).add(_all(overloads))
    before = "".join(f"{part}." for part in head)
    if count.nodes:
        yield Offer(typed, Kind.Value, str(count), about=f"op:{typed}", typed=typed)
    for name, number in sorted(found.items(), key=lambda each: each[1].rank):
        if in_braces and name not in [each.strip() for each in chosen]:
            text = f"{before}{opened[0]}{{{','.join([*chosen, name])}}}"
            yield Offer(text, Kind.Function, f"{name}: {number}", about=f"op:{name}", typed=typed)
        elif not in_braces:
            yield Offer(f"{before}{name}", Kind.Function, str(number), about=f"op:{before}{name}", typed=typed)


def _all(overloads: Mapping[str, Count]) -> Count:
    total = Count()
    for count in overloads.values():
        total.add(count)
    return total
