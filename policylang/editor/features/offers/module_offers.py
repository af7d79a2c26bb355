"""Module paths, component by component."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from policylang.editor.features.offers.graph_index import Count, GraphIndex
from policylang.editor.features.offers.items import Kind, WordOffer
from policylang.editor.features.offers.module_tree import ModuleBranch, counted_once
from policylang.language.cursor import Cursor
from policylang.language.globs import NameGlob, is_magic, name_glob_problem, split_outside_braces
from policylang.language.grammar import word_kind

_OPEN_BRACE = re.compile(r"(?P<before>.*\{)(?P<chosen>(?:[^{},]*,\s*)*)(?P<begun>[^{},]*)$")


def module_offers(index: GraphIndex | None, cursor: Cursor, *, lists_first: bool = False) -> Iterator[WordOffer]:
    """What may go on where the path that is typed ends. ``lists_first``: whether numbered modules are wanted."""
    if index is None:
        return
    in_quotes = cursor.typed.startswith('"')
    typed = cursor.typed.removeprefix('"')
    for path, branches, shown_for in _paths(index, typed, lists_first):
        text = _quoted(path, cursor, in_quotes)
        nodes, forward = counted_once(branches)
        yield WordOffer(text, Kind.Module, str(Count(nodes, forward)), about=f"module:{path}", typed=shown_for)


def _paths(index: GraphIndex, typed: str, lists_first: bool) -> Iterator[tuple[str, list[ModuleBranch], str | None]]:
    """Each glob that is offered, the modules that it leads to, and what is typed for it where it is a glob itself."""
    tree, anchored = index.modules, typed.startswith("/")
    *head, tail = split_outside_braces(typed.removeprefix("/"))
    start = "/" if anchored else ""
    if not head and not anchored and not is_magic(tail):
        yield from ((path, branches, None) for path, branches in _anywhere(index, lists_first))
        return
    parents = tree.reached(head, anchored=anchored) if head or anchored else [tree.root, *_all_modules(index)]
    before = start + "".join(f"{part}." for part in head)
    below = _children(parents)
    brace = _OPEN_BRACE.match(tail)
    if brace is not None and "}" not in brace["begun"]:
        chosen = {name.strip() for name in brace["chosen"].split(",")}
        for name, branches in below.items():
            if name not in chosen and name.startswith(brace["begun"]):
                kept = [branch for each in chosen & below.keys() for branch in below[each]]
                yield f"{before}{brace['before']}{brace['chosen']}{name}}}", kept + branches, typed
        return
    if is_magic(tail):
        fitting = tree.reached([*head, tail], anchored=anchored)
        if fitting:
            yield f"{before}{tail}", fitting, typed
        for name, branches in _children_like(below, tail).items():
            yield f"{before}{name}", branches, typed
        return
    for name, branches in _with_globs(below).items():
        yield f"{before}{name}", branches, None


def _all_modules(index: GraphIndex) -> list[ModuleBranch]:
    return [branch for branches in index.modules.by_name.values() for branch in branches]


def _children(parents: Iterable[ModuleBranch]) -> dict[str, list[ModuleBranch]]:
    found: dict[str, list[ModuleBranch]] = {}
    for parent in parents:
        for name, child in parent.children.items():
            found.setdefault(name, []).append(child)
    return found


def _children_like(below: dict[str, list[ModuleBranch]], tail: str) -> dict[str, list[ModuleBranch]]:
    if name_glob_problem(f"{tail}*") is not None:
        return {}
    glob = NameGlob(f"{tail}*" if not tail.endswith("*") else tail)
    return {name: branches for name, branches in below.items() if glob.matches(name)}


def _with_globs(below: dict[str, list[ModuleBranch]]) -> dict[str, list[ModuleBranch]]:
    """The names, before numbers the globs for all and for some of them."""
    numbers = sorted((name for name in below if name.isdecimal()), key=int)
    found: dict[str, list[ModuleBranch]] = {}
    if numbers:
        found["*"] = [branch for name in numbers for branch in below[name]]
        if len(numbers) > 2:
            found[f"{{{numbers[0]},{numbers[-1]}}}"] = [*below[numbers[0]], *below[numbers[-1]]]
    found.update((name, branches) for name, branches in below.items() if not name.isdecimal())
    found.update((name, below[name]) for name in numbers)
    return found


def _anywhere(index: GraphIndex, lists_first: bool) -> Iterator[tuple[str, list[ModuleBranch]]]:
    """A glob is matched anywhere in a path: the names of all modules, the outer ones first, and the numbered lists with
    the ``*`` that stands for each of their modules."""
    named = {name: branches for name, branches in index.modules.by_name.items() if not name.isdecimal()}
    lists = {
        f"{name}.*": [child for branch in numbered for child in branch.children.values()]
        for name, branches in named.items()
        if (numbered := [branch for branch in branches if branch.is_numbered])
    }
    yield from lists.items()
    if not lists_first:
        yield from named.items()
    else:
        yield from sorted(named.items(), key=lambda each: f"{each[0]}.*" not in lists)


def _quoted(path: str, cursor: Cursor, in_quotes: bool) -> str:
    """The path, in quotes where it is a word of the language or no single word."""
    is_plain = (kind := word_kind(path)) in ("NAME", "PATH", "INT", "NUMBER") and kind in cursor.accepted
    return path if is_plain and not in_quotes else f'"{path}"'
