"""What may stand behind ``where``: properties, comparisons, and the values that the graph has; and the figures of
limits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from policylang.editor.features.offers.graph_index import GraphIndex
from policylang.editor.features.offers.items import Kind, WordOffer
from policylang.editor.features.offers.module_offers import module_offers
from policylang.language.cursor import Cursor
from policylang.language.grammar import word_kind
from policylang.language.predicates import FLAGS, MEASURES, PROPERTIES, dimensions_of
from policylang.language.statements import FIGURES
from policylang.language.units import ALIASES, DTYPES, UNITS, Dimension, write
from policylang.language.wording import counted

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
_LIMITS: dict[Dimension, str] = {
    "bytes": "4 GiB", "flops": "3 TFLOP", "seconds": "900 ms", "fraction": "20%", "number": "16",
}  # fmt: skip
_COMMON = ("GiB", "MiB", "KiB", "TFLOP", "GFLOP", "ms", "us", "s", "%")
_TESTS = ("==", "!=")


def predicate_offers(index: GraphIndex | None, cursor: Cursor) -> Iterator[WordOffer]:
    """Whatever a predicate can begin with, in full."""
    for measure in MEASURES:
        text, snippet = ("shape[0]", "shape[${1:0}]") if measure == "shape" else (measure, "")
        yield WordOffer(text, Kind.Property, "", snippet, about=f"measure:{measure}")
    for each in PROPERTIES:
        yield WordOffer(each, Kind.Property, about=f"property:{each}")
    for flag in FLAGS:
        yield WordOffer(flag, Kind.EnumMember, about=f"flag:{flag}")
    yield WordOffer(
        "crosses cut per 2 GiB", Kind.EnumMember, snippet="crosses cut per ${1:2 GiB}", about="flag:crosses cut"
    )
    yield from _annotations(index, "annotated ")
    yield WordOffer("not")


def flag_offers(begun: str) -> Iterator[WordOffer]:
    """What ends a predicate whose first word is written."""
    for flag in FLAGS:
        first, _, second = flag.partition(" ")
        if first == begun:
            yield WordOffer(second, Kind.EnumMember, about=f"flag:{flag}")


def subject_offers(index: GraphIndex | None, begun: str) -> Iterator[WordOffer]:
    """What follows the first word of a predicate: the rest of it, or a comparison."""
    yield from flag_offers(begun)
    if begun == "crosses":
        yield WordOffer("cut per 2 GiB", Kind.EnumMember, snippet="cut per ${1:2 GiB}", about="flag:crosses cut")
    elif begun == "annotated":
        yield from _annotations(index, "")
    name = _subject(begun)[0]
    if name in MEASURES or not any(flag.startswith(f"{begun} ") for flag in (*FLAGS, "annotated ")):
        signs = _TESTS if name in PROPERTIES else (">", ">=", "<", "<=", *_TESTS)
        yield from (WordOffer(sign, Kind.Operator) for sign in signs)


def value_offers(index: GraphIndex | None, cursor: Cursor, compared: str) -> Iterator[WordOffer]:
    """What a measure or property may be compared with: the values that it has in the graph."""
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
            yield WordOffer(write(value, dimension), Kind.Value, f"{counted(counts[value], 'node')} of the forward")


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
    """Behind a number."""
    for dimension in dimensions_of(measured):
        yield from (WordOffer(unit, Kind.Unit, about=f"unit:{unit}") for unit in units_of(dimension))


def units_of(dimension: Dimension) -> list[str]:
    """Those that people use first; of two ways to write one, the one that everybody can type."""
    fitting = [unit for unit, (_, of) in UNITS.items() if of == dimension and unit.isascii() and not unit.endswith("s")]
    fitting += [unit for unit, (_, of) in UNITS.items() if of == dimension == "seconds" and unit.isascii()]
    return sorted(fitting, key=lambda unit: _COMMON.index(unit) if unit in _COMMON else len(_COMMON))


def limit_offers() -> Iterator[WordOffer]:
    """What can be expected of a plan, with a limit to change."""
    for figure in FIGURES:
        dimensions = dimensions_of(figure)
        usual: Dimension = "fraction" if "fraction" in dimensions and dimensions[0] != "bytes" else dimensions[0]
        yield WordOffer(figure, Kind.Property, snippet=f"{figure} <= ${{1:{_LIMITS[usual]}}}", about=f"figure:{figure}")
        if figure == "saved":
            text = "saved per block"
            yield WordOffer(text, Kind.Property, snippet=f"{text} <= ${{1:220 MiB}}", about=f"figure:{figure}")


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
