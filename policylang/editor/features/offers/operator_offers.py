"""Operators, groups and names: what a selector begins with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from policylang.editor.features.offers.graph_index import Count, GraphIndex
from policylang.editor.features.offers.items import Kind, WordOffer
from policylang.editor.state import TextState
from policylang.language.cursor import Cursor
from policylang.language.globs import NameGlob, is_magic, name_glob_problem, split_outside_braces
from policylang.language.grammar import word_kind
from policylang.language.operators import PLAIN_FUNCTIONS, group_names
from policylang.language.resources import manifest
from policylang.language.syntax import Let
from policylang.language.wording import shortened

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


def group_offers(index: GraphIndex | None, names: Mapping[str, Let]) -> Iterator[WordOffer]:
    """The groups in the order of the prelude, those that denote something in the graph first."""
    sizes = {} if index is None else index.groups
    for name in sorted(group_names(), key=lambda name: name not in sizes):
        if name not in names:
            none = "group" if index is None else _ELSEWHERE
            detail = f"{sizes[name]:,} forward" if name in sizes else none
            yield WordOffer(name, Kind.Class, detail, about=f"group:{name}", elsewhere=detail == _ELSEWHERE)


def name_offers(names: Mapping[str, Let]) -> Iterator[WordOffer]:
    """The names of the policy, the last one first."""
    for name, let in reversed([*names.items()]):
        yield WordOffer(name, Kind.Variable, shortened(let.span.one_line, _LONGEST), about=f"let:{name}")


def operator_offers(index: GraphIndex | None, cursor: Cursor, names: Mapping[str, Let]) -> Iterator[WordOffer]:
    """The operators of the graph, those with the most bytes first; then others that begin as what is typed."""
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
    taken = {*names, *group_names()}
    for text, count in sorted(_bare(called, taken).items(), key=lambda each: each[1].rank):
        yield WordOffer(text, Kind.Function, str(count), about=f"op:{text}")
    for namespace, of_namespace in called.items():
        count = Count()
        for overloads in of_namespace.values():
            count.add(_all(overloads))
        yield WordOffer(f"{namespace}.", Kind.Module, str(count), about=f"namespace:{namespace}")
    if typed:
        in_graph = {name for of_namespace in called.values() for name in of_namespace}
        for namespace, listed in manifest().namespaces.items():
            if namespace not in called:
                yield _other(f"{namespace}.", Kind.Module, called, f"namespace:{namespace}")
            for name in listed:
                if name not in in_graph and typed.lower() in name.lower():
                    written = _written(namespace, name, taken)
                    yield _other(written, Kind.Function, called, f"op:{namespace}.{name}")


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


def _qualified(typed: str, called: Tree) -> Iterator[WordOffer]:
    """What may follow the dot: the names of a namespace, or the overloads of an operator."""
    known = manifest().namespaces
    first, *rest = split_outside_braces(typed)
    if first in called or first in known:
        if len(rest) == 1:
            yield from _names(first, called)
        elif len(rest) == 2:
            counts = called.get(first, {}).get(rest[0], {})
            listed = known.get(first, {}).get(rest[0], ())
            yield from _overloads(f"{first}.{rest[0]}", counts, listed, called)
    elif len(rest) == 1:
        together: dict[str, Count] = {}
        for namespace, of_namespace in called.items():
            if namespace != PLAIN_FUNCTIONS:
                for overload, count in of_namespace.get(first, {}).items():
                    together.setdefault(overload, Count()).add(count)
        tensors = (names for namespace, names in known.items() if namespace != PLAIN_FUNCTIONS)
        listed = tuple(overload for names in tensors for overload in names.get(first, ()))
        yield from _overloads(first, together, listed, called)


def _names(namespace: str, called: Tree) -> Iterator[WordOffer]:
    here = called.get(namespace, {})
    for name, overloads in sorted(here.items(), key=lambda each: _all(each[1]).rank):
        yield WordOffer(f"{namespace}.{name}", Kind.Function, str(_all(overloads)), about=f"op:{namespace}.{name}")
    for name in manifest().namespaces.get(namespace, ()):
        if name not in here:
            yield _other(f"{namespace}.{name}", Kind.Function, called, f"op:{namespace}.{name}")


def _overloads(stem: str, counts: Mapping[str, Count], listed: Sequence[str], called: Tree) -> Iterator[WordOffer]:
    for overload, count in counts.items():
        if overload:
            yield WordOffer(f"{stem}.{overload}", Kind.Method, str(count), about=f"op:{stem}.{overload}")
    for overload in listed:
        if overload not in counts:
            yield _other(f"{stem}.{overload}", Kind.Method, called, f"op:{stem}.{overload}")


def _other(text: str, kind: Kind, called: Tree, about: str) -> WordOffer:
    """An operator of torch's that the graph does not call."""
    return WordOffer(text, kind, _ELSEWHERE if called else "", about=about, elsewhere=bool(called))


def _fitting(typed: str, called: Tree) -> Iterator[WordOffer]:
    """The operators of the graph that a glob fits, as far as it is typed, and the glob itself."""
    *head, tail = split_outside_braces(typed)
    before = "".join(f"{part}." for part in head)
    names = _names_in(head, called)
    opened, brace, rest = tail.rpartition("{")
    if brace and "}" not in rest:
        *chosen, begun = (each.strip() for each in rest.split(","))
        for name, count in names.items():
            if name.startswith(begun) and name not in chosen:
                text = f"{before}{opened}{{{','.join((*chosen, name))}}}"
                yield WordOffer(text, Kind.Function, f"{name}: {count}", about=f"op:{name}", typed=typed)
    elif name_glob_problem(tail) is None:
        whole, begun_so = NameGlob(tail), NameGlob(f"{tail.rstrip('*')}*")
        total = Count()
        for name, count in names.items():
            if whole.matches(name):
                total.add(count)
        longer = not total.nodes and not tail.endswith("*")
        for name, count in names.items():
            if longer and begun_so.matches(name):
                total.add(count)
        if total.nodes:
            glob = f"{typed}*" if longer else typed
            yield WordOffer(glob, Kind.Value, str(total), about=f"op:{glob}", typed=typed)
        for name, count in names.items():
            if begun_so.matches(name):
                yield WordOffer(f"{before}{name}", Kind.Function, str(count), about=f"op:{before}{name}", typed=typed)


def _names_in(head: Sequence[str], called: Tree) -> dict[str, Count]:
    """The operators that a graph calls, of the namespaces that the first part of a name fits; those with the most bytes
    first."""
    counts: dict[str, Count] = {}
    if len(head) < 2 and name_glob_problem("".join(head)) is None:
        for namespace, names in called.items():
            if NameGlob(head[0]).matches(namespace) if head else namespace != PLAIN_FUNCTIONS:
                for name, overloads in names.items():
                    counts.setdefault(name, Count()).add(_all(overloads))
    return dict(sorted(counts.items(), key=lambda each: each[1].rank))


def _all(overloads: Mapping[str, Count]) -> Count:
    total = Count()
    for count in overloads.values():
        total.add(count)
    return total
