"""Offers of completion: words of the language, policies and files; module paths, operators and names of a graph."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from attrs import frozen
from lsprotocol import types

from policylang.editor.state import Count, GraphIndex, ModuleBranch, TextState, counted_once
from policylang.language.cursor import Cursor, Reading, reading
from policylang.language.devices.reading import SUFFIX as DEVICE_SUFFIX
from policylang.language.devices.reading import bundled_devices
from policylang.language.files import SUFFIX, bundled_policies, description_of
from policylang.language.globs import is_magic, split_outside_braces
from policylang.language.lexer import terminal_texts, word_kind
from policylang.language.operators import PLAIN_FUNCTIONS, group_names
from policylang.language.predicates import FLAGS, MEASURES, PROPERTIES, dimensions_of
from policylang.language.resources import devices_folder, manifest
from policylang.language.shown import ALIASES, DTYPES, UNITS, Dimension, counted, shortened, write_quantity
from policylang.language.statements import ACTIONS, FIGURES, MODIFIERS, OPENERS
from policylang.language.syntax import Let

MOST = 200
"""Items of one answer: nobody reads more, and typing on asks anew."""
Kind = types.CompletionItemKind
_BREAK = re.compile(r"[._\s{,\"</]")


@frozen
class WordOffer:
    """A text for the place of the word at the cursor."""

    text: str
    kind: types.CompletionItemKind = Kind.Keyword
    detail: str = ""
    about: str = ""
    """The key of its documentation, ``bundled:fsdp``; empty for words of the language."""
    elsewhere: bool = False
    """True if the snapshot does not contain it."""


def fitting_offers(offers: Iterable[WordOffer], cursor: Cursor) -> tuple[list[WordOffer], bool]:
    """The offers that fit what is typed, in order: names that the snapshot has before others, and of each
    what begins with it first; and whether these are all of them."""
    typed = cursor.typed.lower()
    ranked: list[dict[str, WordOffer]] = [{}, {}, {}, {}]
    for offer in offers:
        fit = _fit(offer.text.lower(), typed)
        if fit is not None:
            ranked[fit + 2 * offer.elsewhere].setdefault(offer.text, offer)
    found: dict[str, WordOffer] = {}
    for rank in ranked:
        for text, offer in rank.items():
            found.setdefault(text, offer)
    return [*found.values()][:MOST], len(found) <= MOST


def _fit(text: str, typed: str) -> int | None:
    """0 where a text begins with what is typed, 1 where one of its parts does, None where none does."""
    bare = typed.lstrip('"')
    if text.startswith(typed) or text.lstrip('"').startswith(bare):
        return 0
    return 1 if len(bare) > 1 and any(text.startswith(bare, at.end()) for at in _BREAK.finditer(text)) else None


def protocol_items(
    offers: Iterable[WordOffer], range: types.Range, data: dict[str, Any]
) -> Iterator[types.CompletionItem]:
    """The offers as the protocol has them, in their order. ``data``: what every item carries to be explained by."""
    for number, offer in enumerate(offers):
        yield types.CompletionItem(
            label=offer.text,
            kind=offer.kind,
            detail=offer.detail or None,
            sort_text=f"{number:03}",
            filter_text=offer.text,
            text_edit=types.TextEdit(range, offer.text),
            data={**data, "about": offer.about},
        )


MARKS = frozenset(("LPAR", "RPAR", "COMMA", "EQUAL"))
"""Signs that are typed faster than chosen."""
_USER_WORDS = frozenset(("NAME", "PATH", "STRING", "BUNDLED"))
_FIRST = ("recompute", "save", "offload", "expect", "let", *MODIFIERS[:1], "include")
_STATEMENTS = (*_FIRST, *OPENERS, *MODIFIERS, *ACTIONS)
_BEFORE = ("everything", "first", "last", "every", "users", "inputs", "chain")
_BEHIND = (
    "->", "in", "where", "outside", "except", "or", "and", "per block", "per module", "per chain", "per graph", "chain",
    "feeding", "fed", "from", "per",
)  # fmt: skip
_OTHERS = (
    "saved", "recomputed", "offloaded", "every", "no", "exactly", "at", "lossless", "as",
    "block", "blocks", "module", "chain", "graph",
    "==", "!=", ">", ">=", "<", "<=",
)  # fmt: skip
"""Words in the order in which they are wanted; others follow."""
_COUNTING = frozenset(("FIRST", "LAST", "ORDINAL", "EVERY_NTH", "BUCKET", "EXACTLY", "LEAST", "MOST"))
_SELDOM: dict[str, frozenset[str]] = {"per": _COUNTING, "from": frozenset(("EVERY_NTH",)), "up": frozenset()}
"""Words that mean nothing without one of these before them; they are last otherwise."""
_ENDS = {"BUCKET": ("per block", "up to"), "OVERLAP": ("up to", "within")}  # the last words of a statement
_HEAD = ("policy", "requires", "include", "device", "blocks")  # the words that a file begins with


def opener(cursor: Cursor) -> str:
    """The terminal that identifies the statement; empty at the start of one."""
    kinds = [kind for kind in cursor.kinds[:3] if kind not in ("OPTIONAL", "OVERRIDE")]
    return kinds[0] if kinds else ""


def keyword_offers(cursor: Cursor) -> Iterator[WordOffer]:
    """Every word and sign of the language that may follow here, words that belong together as one."""
    texts = terminal_texts()
    ahead = {"PREFETCH": " ahead", "DELAY": ""}.get(opener(cursor))
    if ahead is not None and "INT" in cursor.accepted and "BLOCK" in reading((*cursor.kinds, "INT")).accepted:
        yield WordOffer(f"1 block{ahead}", Kind.Value)
    found: dict[str, None] = {}
    for terminal in sorted(cursor.accepted):
        if terminal in MARKS or terminal not in texts:
            continue
        after = reading((*cursor.kinds, terminal))
        for text in texts[terminal]:
            if text != "→":
                found.update(dict.fromkeys(_joined(text, after, cursor.accepted)))
    for second in cursor.seconds:
        found.update(dict.fromkeys(texts.get(second, () if second.isupper() else (second,))))
    for text in sorted(found, key=lambda text: (*_rank(text, cursor), text)):
        kind = Kind.Keyword if text[0].isalpha() else Kind.Operator
        yield WordOffer(text, kind, about="position:from" if text == "from" else "")
    if "EVERY_NTH" in cursor.accepted:
        yield WordOffer("every 2nd")
    if "ORDINAL" in cursor.accepted or "ORDINAL" in cursor.seconds:
        yield from (WordOffer(text, Kind.Value) for text in ("1st", "2nd", "3rd", "4th"))
    if opener(cursor) == "BUCKET" and cursor.kinds[-1:] == ("PER",):
        yield WordOffer("2 blocks", Kind.Value)


def _joined(text: str, after: Reading, before: frozenset[str]) -> Iterator[str]:
    """A word, with the words that have to follow it: ``per block``, ``fed by``; and those that may, where nothing else
    begins with them: ``chain after``."""
    texts = terminal_texts()
    following = {
        terminal: texts[terminal]
        for terminal in sorted(after.accepted)
        if terminal in texts and all(each[0].isalpha() for each in texts[terminal])
    }
    ends = bool(after.accepted & {"$END", "OR", "RPAR"})
    if not text[0].isalpha() or (not ends and (after.accepted & (_USER_WORDS | {"COMPARISON"}) or not following)):
        yield text
        return
    if ends:
        yield text
        following = {each: words for each, words in following.items() if each not in before and "OR" in before}
    for words in following.values():
        yield from (f"{text} {word}" for word in words)


def _rank(text: str, cursor: Cursor) -> tuple[int, int, int]:
    first, kinds = text.split()[0], cursor.kinds
    if not kinds and (text in _HEAD[:2] or (cursor.is_first and text in _HEAD)):
        return 0 if cursor.is_first else 3, 0, _HEAD.index(text)
    is_behind = "OR" in cursor.accepted
    if is_behind and text in _ENDS.get(opener(cursor), ()):
        return 1, 0, _ENDS[opener(cursor)].index(text)
    if is_behind and first in _SELDOM and _SELDOM[first].isdisjoint(kinds):
        offloads = first == "up" and any(str(word).endswith("offload") for word in cursor.words[:3])
        return (1 if offloads else 3), 0, 0
    orders: tuple[tuple[str, ...], ...] = (_STATEMENTS, _BEFORE, _OTHERS)
    if is_behind:
        orders = (_BEHIND,)
    elif "EXPECT" in kinds:
        orders = (_STATEMENTS, _OTHERS, _BEFORE)
    for place, order in enumerate(orders):
        found = next((order.index(name) for name in (text, first) if name in order), None)
        if found is not None:
            return 2, place, found
    return 2, len(orders), 0


_MOST_ENTRIES = 2000


def include_offers(path: Path | None, cursor: Cursor) -> Iterator[WordOffer]:
    """Bundled policies, and policy files beside this one; the prelude is always there."""
    for each in bundled_policies() if not cursor.typed.startswith('"') else ():
        yield WordOffer(f"<{each.name}>", Kind.File, each.description, about=f"bundled:{each.name}")
    if not cursor.typed.startswith("<"):
        yield from _beside(path, cursor, SUFFIX)


def device_offers(path: Path | None, cursor: Cursor) -> Iterator[WordOffer]:
    """Bundled profiles, and files beside this policy."""
    for name in bundled_devices() if not cursor.typed.startswith('"') else ():
        detail = description_of((devices_folder() / f"{name}{DEVICE_SUFFIX}").read_text(encoding="utf-8"))
        yield WordOffer(name, Kind.File, detail, about=f"device:{name}")
    if cursor.typed.startswith('"') or not cursor.typed:
        yield from _beside(path, cursor, DEVICE_SUFFIX)


@cache
def comment_of(file: Path) -> str:
    """The comment that a bundled file starts with, without its marks."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    return "\n".join(line.removeprefix("#").strip() for line in lines)


def _beside(path: Path | None, cursor: Cursor, suffix: str) -> Iterator[WordOffer]:
    """Files and folders, as they are named from the policy's own; none of a text that is in no file."""
    if path is None:
        return
    typed = cursor.typed.removeprefix('"')
    folder, slash, _ = typed.rpartition("/")
    before = f"{folder}{slash}"
    mine = path.resolve()
    try:
        with os.scandir(path.parent / before) as entries:
            found = sorted((each.name, each.is_dir()) for each, _ in zip(entries, range(_MOST_ENTRIES), strict=False))
    except (OSError, ValueError):
        return
    named = [each for each in found if not each[0].startswith(".") and '"' not in each[0]]
    for name, is_folder in named:
        if not is_folder and name.endswith(suffix) and (path.parent / before / name).resolve() != mine:
            yield WordOffer(f'"{before}{name}"', Kind.File)
    yield from (WordOffer(f'"{before}{name}/', Kind.Folder) for name, is_folder in named if is_folder)
    # the file's offer has the quote


def module_offers(index: GraphIndex | None, cursor: Cursor, *, lists_first: bool = False) -> Iterator[WordOffer]:
    """The continuations of a typed module path. ``lists_first``: numbered modules are wanted."""
    if index is None:
        return
    in_quotes = cursor.typed.startswith('"')
    for path, branches in _paths(index, cursor.typed.removeprefix('"'), lists_first):
        text = path if _is_plain(path, cursor) and not in_quotes else f'"{path}"'
        nodes, forward = counted_once(branches)
        yield WordOffer(text, Kind.Module, str(Count(nodes, forward)), about=f"module:{path}")


def _is_plain(path: str, cursor: Cursor) -> bool:
    """False for a path that is a word of the language or no single word."""
    kind = word_kind(path)
    return kind in ("NAME", "PATH", "INT", "NUMBER") and kind in cursor.accepted


def _paths(index: GraphIndex, typed: str, lists_first: bool) -> Iterator[tuple[str, list[ModuleBranch]]]:
    """Yield each glob to offer, and the modules that it leads to."""
    anchored = typed.startswith("/")
    *head, tail = split_outside_braces(typed.removeprefix("/"))
    if is_magic(tail):
        return
    if not head and not anchored:
        yield from _anywhere(index, lists_first)
        return
    before = "/" * anchored + "".join(f"{part}." for part in head)
    below: dict[str, list[ModuleBranch]] = {}
    for parent in index.modules.reached(head, anchored=anchored):
        for name, child in parent.children.items():
            below.setdefault(name, []).append(child)
    yield from ((f"{before}{name}", branches) for name, branches in _with_globs(below).items())


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
    if typed.startswith('"') or is_magic(typed):
        return
    called: Tree = {} if index is None else index.operators
    if "." in typed:
        yield from _qualified(typed, called)
        return
    taken = {*names, *group_names()}
    for text, count in sorted(_bare(called, taken).items(), key=lambda each: each[1].rank):
        yield WordOffer(text, Kind.Function, str(count), about=f"op:{text}")
    for namespace, of_namespace in called.items():
        count = sum(map(_all, of_namespace.values()), Count())
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
            written = _written(namespace, name, taken)
            counts[written] = counts.get(written, Count()) + _all(overloads)
    return counts


def _written(namespace: str, name: str, taken: set[str]) -> str:
    """A name alone means any namespace's operator; a Python function only where no tensor operator has the name."""
    others = (names for space, names in manifest().namespaces.items() if space != PLAIN_FUNCTIONS)
    plain = namespace == PLAIN_FUNCTIONS and any(name in names for names in others)
    return f"{namespace}.{name}" if plain or name in taken or word_kind(name) != "NAME" else name


def _qualified(typed: str, called: Tree) -> Iterator[WordOffer]:
    """The offers behind a dot: the names of a namespace, or the overloads of an operator."""
    known = manifest().namespaces
    *path, _ = split_outside_braces(typed)
    stem, in_namespace = ".".join(path), path[0] in called or path[0] in known
    counts: dict[str, Count] = {}
    if in_namespace and len(path) == 1:
        here = {name: _all(overloads) for name, overloads in called.get(stem, {}).items()}
        counts = dict(sorted(here.items(), key=lambda each: each[1].rank))
        listed, kind = [*known.get(stem, ())], Kind.Function
    elif len(path) == 1 + in_namespace:
        spaces = path[:1] if in_namespace else [each for each in {**called, **known} if each != PLAIN_FUNCTIONS]
        for space in spaces:
            for overload, count in called.get(space, {}).get(path[-1], {}).items():
                counts[overload] = counts.get(overload, Count()) + count
        listed, kind = [each for space in spaces for each in known.get(space, {}).get(path[-1], ())], Kind.Method
    else:
        return
    for name, count in counts.items():
        if name:
            yield WordOffer(f"{stem}.{name}", kind, str(count), about=f"op:{stem}.{name}")
    for name in listed:
        if name not in counts:
            yield _other(f"{stem}.{name}", kind, called, f"op:{stem}.{name}")


def _all(overloads: Mapping[str, Count]) -> Count:
    return sum(overloads.values(), Count())


def _other(text: str, kind: Kind, called: Tree, about: str) -> WordOffer:
    """An operator of torch's that the graph does not call."""
    return WordOffer(text, kind, _ELSEWHERE if called else "", about=about, elsewhere=bool(called))


_MOST_VALUES = 12
_INDEXED = re.compile(r"(\w+)\[(-?\d{1,4})\]")
_NUMBER = re.compile(r"[0-9][0-9_]*(?:\.[0-9]+)?")
_EXAMPLES: dict[Dimension, tuple[str, ...]] = {
    "bytes": ("64 MiB", "1 GiB"),
    "flops": ("2 GFLOP", "1 TFLOP"),
    "seconds": ("400 us", "1 ms"),
    "fraction": ("20%",),
    "number": (),
}
_COMMON = ("GiB", "MiB", "KiB", "TFLOP", "GFLOP", "ms", "us", "s", "%")
_TESTS = ("==", "!=")


def predicate_offers(index: GraphIndex | None, cursor: Cursor) -> Iterator[WordOffer]:
    """The predicates, in full."""
    for measure in MEASURES:
        text = "shape[0]" if measure == "shape" else measure
        yield WordOffer(text, Kind.Property, about=f"measure:{measure}")
    for each in PROPERTIES:
        yield WordOffer(each, Kind.Property, about=f"property:{each}")
    for flag in FLAGS:
        yield WordOffer(flag, Kind.EnumMember, about=f"flag:{flag}")
    yield WordOffer("crosses cut per 2 GiB", Kind.EnumMember, about="flag:crosses cut")
    yield from _annotations(index, "annotated ")
    yield WordOffer("not")


def flag_offers(begun: str) -> Iterator[WordOffer]:
    """The second words of predicates whose first word is written."""
    for flag in FLAGS:
        first, _, second = flag.partition(" ")
        if first == begun:
            yield WordOffer(second, Kind.EnumMember, about=f"flag:{flag}")


def subject_offers(index: GraphIndex | None, begun: str) -> Iterator[WordOffer]:
    """The offers behind the first word of a predicate: the rest of it, or a comparison."""
    yield from flag_offers(begun)
    if begun == "crosses":
        yield WordOffer("cut per 2 GiB", Kind.EnumMember, about="flag:crosses cut")
    elif begun == "annotated":
        yield from _annotations(index, "")
    name = _subject(begun)[0]
    if name in MEASURES or not any(flag.startswith(f"{begun} ") for flag in (*FLAGS, "annotated ")):
        signs = _TESTS if name in PROPERTIES else (">", ">=", "<", "<=", *_TESTS)
        yield from (WordOffer(sign, Kind.Operator) for sign in signs)


def value_offers(index: GraphIndex | None, cursor: Cursor, compared: str) -> Iterator[WordOffer]:
    """The values of a measure or property in the graph."""
    name, number = _subject(compared)
    if name == "module":
        yield from module_offers(index, cursor)
    elif name in PROPERTIES:
        yield from _texts(index, name)
    else:
        dimension = dimensions_of(name)[0]
        if index is not None:
            yield from _largest(index, name, number, dimension)
        yield from figure_offers(cursor, name)


def _largest(index: GraphIndex, name: str, number: int | None, dimension: Dimension) -> Iterator[WordOffer]:
    """The largest values that there are, each with how many nodes have it."""
    counts = {float(value): count for value, count in index.values(name, number).items()}
    for value in sorted(counts, reverse=True)[:_MOST_VALUES]:
        if value > 0:
            of = f"{counted(counts[value], 'node')} of the forward"
            yield WordOffer(write_quantity(value, dimension), Kind.Value, of)


def figure_offers(cursor: Cursor, measured: str) -> Iterator[WordOffer]:
    """Figures with their units, of the number that is typed if one is."""
    dimensions = dimensions_of(measured)
    number = _NUMBER.match(cursor.typed)
    if number is not None:
        for unit in (unit for dimension in dimensions for unit in units_of(dimension)):
            yield WordOffer(f"{number.group()}{'' if unit == '%' else ' '}{unit}", Kind.Unit)
        return
    for dimension in dimensions:
        yield from (WordOffer(text, Kind.Value, "such as") for text in _EXAMPLES[dimension])


def unit_offers(measured: str) -> Iterator[WordOffer]:
    for dimension in dimensions_of(measured):
        yield from (WordOffer(unit, Kind.Unit, about=f"unit:{unit}") for unit in units_of(dimension))


def units_of(dimension: Dimension) -> list[str]:
    """The units of a dimension, common ones first; of two spellings of one, the ASCII one."""
    fitting = [unit for unit, (_, of) in UNITS.items() if of == dimension and unit.isascii() and not unit.endswith("s")]
    fitting += [unit for unit, (_, of) in UNITS.items() if of == dimension == "seconds" and unit.isascii()]
    return sorted(fitting, key=lambda unit: _COMMON.index(unit) if unit in _COMMON else len(_COMMON))


def limit_offers() -> Iterator[WordOffer]:
    """The figures that an expectation may be about."""
    for figure in FIGURES:
        yield WordOffer(figure, Kind.Property, about=f"figure:{figure}")
        if figure == "saved":
            yield WordOffer("saved per block", Kind.Property, about=f"figure:{figure}")


def _texts(index: GraphIndex | None, name: str) -> Iterator[WordOffer]:
    """The types, devices or overloads of the graph, by how often they occur; types by their short names as well."""
    counts = {} if index is None else {str(text): count for text, count in index.values(name).most_common()}
    short: dict[str, str] = {}
    for alias, full in ALIASES.items():
        if alias[-1].isdigit():
            short.setdefault(full, alias)
    if name == "device" and counts:
        kinds: dict[str, int] = {}
        for device, count in counts.items():
            kinds[device.partition(":")[0]] = kinds.get(device.partition(":")[0], 0) + count
        counts = {**kinds, **counts}
    for text, count in counts.items():
        detail = f"{counted(count, 'node')} of the forward"
        if name == "dtype" and text in short:
            yield WordOffer(short[text], Kind.EnumMember, detail)
        yield WordOffer(text if word_kind(text) in ("NAME", "PATH") else f'"{text}"', Kind.EnumMember, detail)
    if name == "dtype":
        for text in DTYPES:
            if text not in counts:
                yield from (WordOffer(each, Kind.EnumMember) for each in (short.get(text, text), text))


def _annotations(index: GraphIndex | None, before: str) -> Iterator[WordOffer]:
    for name, count in ({} if index is None else index.annotations).items():
        text = name if word_kind(name) in ("NAME", "PATH") else f'"{name}"'
        yield WordOffer(f"{before}{text}", Kind.EnumMember, counted(count, "node"), about="flag:annotated")


def _subject(compared: str) -> tuple[str, int | None]:
    found = _INDEXED.fullmatch(compared)
    return (found[1], int(found[2])) if found else (compared, None)
