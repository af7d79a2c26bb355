"""Writes and reads snapshots: the facts of a graph in a file, a few bytes a node, without weights and code.

The format is described in ``docs/snapshots.md``. Every field of :class:`~policylang.graph.facts.Facts` is stored under
its name, and a file with other fields is refused rather than read in part.
"""

from __future__ import annotations

import json
import os
import stat
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from policylang.errors import PolicyGraphError
from policylang.graph.facts import (
    COLUMNS,
    LATER_COLUMNS,
    OF_GRAPH,
    Facts,
    GraphKind,
    Group,
    LostMarker,
    Mesh,
    Ref,
    Stored,
    users_of,
)
from policylang.language.diagnostics import diagnose
from policylang.language.files import reason_of, write_whole
from policylang.language.shown import one_line

SUFFIX = ".graph"
FORMAT = 2
MAGIC = b"\xfd7zXZ\x00"
"""Every file that xz packs begins so, and no text does."""
_FIRST_FORMAT = b"\x8aAPLG\r\n\x1a"
FOREIGN, OTHER_FORMAT, DAMAGED, TOO_LARGE, UNREADABLE = "APL351", "APL352", "APL353", "APL354", "APL355"

MOST_NODES = 1 << 21
MOST_BYTES = 1 << 27
"""The limit of the file, and of what it is decompressed to."""
_UNPACKED, _ANY_BYTES = 256, 1 << 23
"""The most bytes per byte of a file, beside the allowance of every graph: opening a small file costs no more than a
small graph. Equal blocks of a model need a fifth of that."""
_MOST_MEMORY = 1 << 26  # the decompressor's limit
_EDGES, _CHARACTERS, _SLACK = 16, 128, 1 << 20
"""The most reads of a node and characters of a name, on average; and how much more any graph may have of either."""
_LONGEST_NUMBER = 9  # digits of the number at the end of a name; a longer one is part of the name
_UPDATE = "update policylang, or write the snapshot again"
_MAKE_AGAIN = (
    "make it again with this policylang: `policylang snapshot MODULE:FUNCTION -o FILE`, or `policylang import` of a "
    "recorded graph"
)
_NUMBERS = "name_numbers"  # the second of the two columns that hold the names
_BACK = "back"  # the key under which an argument that is a node has the distance to its row


class DamagedError(Exception):
    """The content is not as written. The message is a phrase that describes the damage."""


def write(facts: Facts, path: str | os.PathLike[str]) -> None:
    """Write a snapshot. Raises ``PolicyGraphError`` if it cannot be written there, or the graph is too large."""
    data = dump(facts)
    try:
        write_whole(Path(path), data)
    except OSError as error:
        raise graph_error(UNREADABLE, f"`{os.fsdecode(path)}` cannot be written: {reason_of(error)}") from None


def load(path: str | os.PathLike[str]) -> Facts:
    """Read a snapshot. Needs no torch; takes bounded time and memory whatever the file holds. Raises
    ``PolicyGraphError`` for a file that cannot be read, is no snapshot, has another format, is damaged or too large."""
    return parse(_content(path), os.fsdecode(path))


def dump(facts: Facts) -> bytes:
    """The content of a snapshot. Equal facts give equal bytes."""
    edges = sum(map(len, facts.inputs))
    if len(facts) > MOST_NODES or edges > _EDGES * len(facts) + _SLACK:
        raise _too_large("the graph", f"it has {len(facts):,} nodes and {edges:,} edges")
    document = {
        "format": FORMAT,
        "graph": {name: _plain(getattr(facts, name)) for name in OF_GRAPH},
        "columns": {name: _table(values) for name, values in _stored(facts)},
    }
    body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    packed: bytes = _lzma().compress(body, preset=6)
    if len(body) > _most(len(packed)):
        raise _too_large("the graph", f"it has {len(facts):,} nodes, {len(body):,} bytes that pack to {len(packed):,}")
    return packed


def parse(data: bytes, name: str = "<snapshot>") -> Facts:
    """The facts of a snapshot's content; ``name`` is what complaints call it."""
    if data.startswith(_FIRST_FORMAT):
        raise _other_format(name, 1)
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            raise _damaged(name, "it ends too early" if data else "it is empty")
        help = "`policylang snapshot` writes one, `policylang import` makes one of a recorded graph in JSON"
        raise graph_error(FOREIGN, f"`{name}` is not a snapshot of a graph", help)
    try:
        return _facts(_document(data, name), name)
    except DamagedError as error:
        raise _damaged(name, str(error)) from None
    except RecursionError:
        raise _damaged(name, "its values are nested too deep") from None


def check_facts(facts: Facts) -> None:
    """Check facts from elsewhere as those of a snapshot are checked. Raises :class:`DamagedError`."""
    for name in COLUMNS:
        _check_values(name, set(getattr(facts, name)))
    _check_whole(facts)


def _stored(facts: Facts) -> Iterator[tuple[str, Iterable[Any]]]:
    """Rows are relative to the row that names them, and the number at the end of a name (``mm_12``) to the last one
    after the same beginning: so equal blocks of a model are equal text, which compresses well."""
    for name, said in COLUMNS.items():
        values: Sequence[Any] = getattr(facts, name)
        if said.later and len(values) != len(facts):
            continue
        match said.stored:
            case Stored.NAMES:
                bases, numbers = parted(values)
                yield name, bases
                yield _NUMBERS, numbers
            case Stored.ROW:
                yield name, (row - value for row, value in enumerate(values))
            case Stored.READS:
                yield name, (tuple([row - read for read in reads]) for row, reads in enumerate(values))
            case Stored.ARGUMENTS:
                yield name, (_relative(given, row) if given else () for row, given in enumerate(values))
            case Stored.VALUES:
                yield name, values
            case Stored.NOT:
                pass


def _table(column: Iterable[Any]) -> list[list[Any]]:
    """The distinct values of a column, and for each node the number of its value. ``1`` and ``True`` are two values."""
    numbers: dict[str, int] = {}
    values: list[Any] = []
    rows: list[int] = []
    for value in column:
        number = numbers.setdefault(repr(value), len(values))
        if number == len(values):
            values.append(_plain(value))
        rows.append(number)
    return [values, rows]


def _plain(value: Any) -> Any:
    """The value as JSON. Raises ``TypeError`` for a value that has no such form."""
    if value is None or type(value) in (bool, int, float):
        return value
    if type(value) is str:
        return one_line(value)
    if type(value) in (tuple, list):
        return [_plain(part) for part in value]
    if type(value) is dict:
        return {one_line(key): _plain(part) for key, part in value.items()}
    if isinstance(value, GraphKind):
        return value.value
    if isinstance(value, (Group, LostMarker, Mesh)):
        return _plain(attrs.asdict(value, recurse=False))
    raise TypeError(f"a snapshot cannot hold a {type(value).__name__}: {value!r}")


def _relative(value: Any, row: int) -> Any:
    """With each node replaced by its distance to ``row``."""
    if type(value) is Ref:
        if not 0 <= value.row < row:
            raise TypeError(f"a snapshot cannot hold a node that reads a later one: {value!r} in row {row}")
        return {_BACK: row - value.row}
    return tuple([_relative(part, row) for part in value]) if type(value) in (tuple, list) else value


def parted(names: Sequence[str]) -> tuple[list[str], list[int | None]]:
    """Each name without the number at its end, and the difference of that number from the last one behind the same
    beginning; None for a name without a number."""
    bases: list[str] = []
    steps: list[int | None] = []
    last: dict[str, int] = {}
    for name in names:
        base, mark, digits = name.rpartition("_")
        numbered = mark and digits.isdecimal() and len(digits) <= _LONGEST_NUMBER and str(int(digits)) == digits
        bases.append(base if numbered else name)
        steps.append(int(digits) - last.get(base, 0) if numbered else None)
        if numbered:
            last[base] = int(digits)
    return bases, steps


def _document(data: bytes, name: str) -> Mapping[str, Any]:
    """The JSON of a file, of which never more is unpacked than :func:`_most` and one byte."""
    most = _most(len(data))
    lzma = _lzma()
    stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, _MOST_MEMORY)
    try:
        body = stream.decompress(data, most + 1)
    except lzma.LZMAError:
        raise DamagedError("its content cannot be unpacked") from None
    if len(body) > most:
        raise _too_large(name, f"its {len(data):,} bytes unpack to more than {most:,}")
    if not stream.eof:
        raise DamagedError("it ends too early")
    if stream.unused_data:
        raise DamagedError("something follows its end")
    try:
        found = json.loads(body)
    except ValueError:
        raise DamagedError("its content is not JSON") from None
    if not isinstance(found, dict) or type(found.get("format")) is not int:
        raise DamagedError("it does not name its format")
    if found["format"] != FORMAT:
        raise _other_format(name, found["format"])
    if not all(isinstance(found.get(part), dict) for part in ("graph", "columns")):
        raise DamagedError("it has no `graph` and `columns`")
    return found


def _facts(document: Mapping[str, Any], name: str) -> Facts:
    graph, columns = document["graph"], document["columns"]
    known = {_NUMBERS, *(each for each, said in COLUMNS.items() if said.stored is not Stored.NOT)}
    _check_names(graph, OF_GRAPH.keys(), OF_GRAPH.keys(), name)
    _check_names(columns, known.difference(LATER_COLUMNS), known, name)
    tables = {each: _Table(each, found) for each, found in columns.items()}
    if len({len(table.rows) for table in tables.values()}) != 1:
        raise DamagedError("its columns have different lengths")
    if len(tables["names"].rows) > MOST_NODES:
        raise _too_large(name, f"it has {len(tables['names'].rows):,} nodes")
    found: dict[str, Any] = {each: tables[each].column(said.stored) for each, said in COLUMNS.items() if each in tables}
    found["names"] = _joined(found["names"], tables[_NUMBERS])
    facts = Facts(**found, **_of_graph(graph), users=users_of(found["inputs"]))
    _check_whole(facts)
    return facts


def _check_names(found: Mapping[str, Any], needed: Iterable[str], known: Iterable[str], file: str) -> None:
    more, less = sorted(found.keys() - known), sorted(set(needed) - found.keys())
    if more:
        message = f"`{file}` has `{one_line(more[0][:40])}` of its graph, which this policylang does not know"
        raise graph_error(OTHER_FORMAT, message, _UPDATE)
    if less:
        raise DamagedError(f"it lacks `{less[0]}` of its graph")


class _Table:
    """A column as it was read: its distinct values, and for each node the number of its value."""

    def __init__(self, name: str, found: Any) -> None:
        self.name = name
        try:
            values, rows = found
            self.rows = array("I", rows)
        except (TypeError, ValueError, OverflowError):
            raise DamagedError(f"its column `{name}` is not values and their numbers") from None
        if not isinstance(values, list) or max(self.rows, default=-1) >= len(values):
            raise DamagedError(f"its column `{name}` has values that it does not list")
        self.values = [_tuples(value) for value in values]

    def column(self, stored: Stored) -> Sequence[Any]:
        _check_values(self.name, self.values)
        match stored:
            case Stored.ROW:
                found = [row - distance for row, distance in enumerate(self.of_rows())]
                if found and not 0 <= min(found) <= max(found) < len(found):
                    raise DamagedError(f"its column `{self.name}` points outside the graph")
                return array("i", found)
            case Stored.READS:
                if any(len({*value}) != len(value) for value in self.values):
                    raise DamagedError(f"its column `{self.name}` holds what cannot be there")
                self._check_distances(self.values, list(map(len, self.values)))
                return [tuple([row - back for back in value]) for row, value in enumerate(self.of_rows())]
            case Stored.ARGUMENTS:
                distances = [list(_distances(value)) for value in self.values]
                self._check_distances(distances, list(map(_size, self.values)))
                return [
                    _placed(value, row) if distances[number] else value
                    for row, (number, value) in enumerate(zip(self.rows, self.of_rows(), strict=True))
                ]
            case Stored.VALUES | Stored.NAMES | Stored.NOT:
                return self.of_rows()

    def of_rows(self) -> list[Any]:
        return list(map(self.values.__getitem__, self.rows))

    def _check_distances(self, distances: Sequence[Sequence[int]], sizes: Sequence[int]) -> None:
        """``distances`` and ``sizes``: by value, how far back its nodes are, and how much it holds."""
        if any(min(each, default=1) < 1 for each in distances):
            raise DamagedError(f"its column `{self.name}` has a node read a later one")
        if sum([sizes[number] for number in self.rows]) > _EDGES * len(self.rows) + _SLACK:
            raise DamagedError("it holds more than a graph of its size can")
        farthest = [max(each, default=0) for each in distances]
        if any(farthest[number] > row for row, number in enumerate(self.rows)):
            raise DamagedError(f"its column `{self.name}` points outside the graph")


def _tuples(value: Any) -> Any:
    return tuple([_tuples(part) for part in value]) if type(value) is list else value


def _distances(value: Any) -> Iterator[int]:
    """The distances of the nodes in an argument, otherwise plain."""
    if type(value) is tuple:
        for part in value:
            yield from _distances(part)
    elif type(value) is dict:
        if value.keys() != {_BACK} or type(value[_BACK]) is not int:
            raise DamagedError("an argument in it is no value")
        yield value[_BACK]
    elif type(value) is str and not value.isprintable():
        raise DamagedError("a text in it cannot be printed")


def _size(value: Any) -> int:
    return 1 + sum(map(_size, value)) if type(value) is tuple else 1


def _placed(value: Any, row: int) -> Any:
    """With each distance replaced by the node that far before ``row``."""
    if type(value) is dict:
        return Ref(row - value[_BACK])
    return tuple([_placed(part, row) for part in value]) if type(value) is tuple else value


def _joined(bases: Sequence[str], numbers: _Table) -> list[str]:
    if not all(value is None or type(value) is int for value in numbers.values):
        raise DamagedError("a name in it ends in no number")
    if sum(map(len, bases)) > _CHARACTERS * len(bases) + _SLACK:
        raise DamagedError("its names are longer than any graph's")
    return joined(bases, numbers.of_rows())


def joined(bases: Sequence[str], steps: Sequence[int | None]) -> list[str]:
    """The names that :func:`parted` took apart. Raises :class:`DamagedError` for numbers that no name ends in."""
    names: list[str] = []
    last: dict[str, int] = {}
    for base, step in zip(bases, steps, strict=True):
        if step is None:
            names.append(base)
            continue
        number = last[base] = last.get(base, 0) + step
        if not 0 <= number < 10**_LONGEST_NUMBER:
            raise DamagedError("a name in it ends in no number")
        names.append(f"{base}_{number}")
    return names


def _of_graph(found: Mapping[str, Any]) -> dict[str, Any]:
    said = {name: _tuples(value) for name, value in found.items()}
    try:
        said["kind"] = GraphKind(said["kind"])
        said["groups"] = {name: _record(Group, each) for name, each in said["groups"].items()}
        said["meshes"] = tuple(_record(Mesh, each) for each in said["meshes"])
        said["lost_records"] = tuple(_record(LostMarker, each) for each in said["lost_records"])
    except (AttributeError, TypeError, ValueError):
        raise DamagedError("its facts about the whole graph are not valid") from None
    return said


def _record(kind: type, found: Mapping[str, Any]) -> Any:
    return kind(**{name: _tuples(value) for name, value in found.items()})


def _check_values(name: str, values: Iterable[Any]) -> None:
    if not all(map(COLUMNS[name].check, values)):
        raise DamagedError(f"its column `{name}` holds what cannot be there")


def _check_whole(facts: Facts) -> None:
    """Checks the facts about the whole graph, and the relations between nodes."""
    for name, said in OF_GRAPH.items():
        if not said.check(getattr(facts, name)):
            raise DamagedError(f"its `{name}` is not valid")
    if len(set(facts.names)) != len(facts) or "" in facts.names:
        raise DamagedError("two of its nodes have one name")
    owners = facts.owners
    for row, owner in enumerate(owners):
        if owner > row or owners[owner] != owner:
            raise DamagedError("its column `owners` has a node that follows one with another producer")
    if {*facts.stages} - {-1} != {*range(facts.stage_count)}:
        raise DamagedError("its column `stages` lacks a stage")
    called = {target for op, target in zip(facts.ops, facts.targets, strict=True) if op == "call_function"}
    if not all(target.count(".") >= 1 for target in called):
        raise DamagedError("its column `targets` has an operator without a namespace")
    named = {*facts.groups, *(group.name for group in facts.groups.values())}
    if not named.issuperset(filter(None, facts.group_names)):
        raise DamagedError("its column `group_names` names a process group that it does not list")


def _lzma() -> Any:
    try:
        import lzma
    except ImportError:
        message = "snapshots are packed with xz, and this Python was built without `lzma`"
        raise graph_error(UNREADABLE, message, "install liblzma and build Python again, or use another one") from None
    return lzma


def _most(packed: int) -> int:
    return min(MOST_BYTES, _ANY_BYTES + _UNPACKED * packed)


def _content(path: str | os.PathLike[str]) -> bytes:
    name = os.fsdecode(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and size > MOST_BYTES:
                raise _too_large(name, f"it has {size:,} bytes")
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise graph_error(UNREADABLE, f"`{name}` cannot be read: {reason_of(error)}") from None
    if len(data) > MOST_BYTES:
        raise _too_large(name, f"it has more than {MOST_BYTES:,} bytes")
    return data


def _other_format(name: str, version: int) -> PolicyGraphError:
    message = f"`{name}` has format {version}, and this policylang reads format {FORMAT}"
    return graph_error(OTHER_FORMAT, message, _UPDATE if version > FORMAT else _MAKE_AGAIN)


def _damaged(name: str, reason: str) -> PolicyGraphError:
    return graph_error(DAMAGED, f"`{name}` is damaged: {reason}", "write the snapshot again")


def _too_large(name: str, reason: str) -> PolicyGraphError:
    what = name if name == "the graph" else f"`{name}`"
    return graph_error(TOO_LARGE, f"{what} is larger than a snapshot can be: {reason}")


def graph_error(code: str, message: str, help: str | None = None) -> PolicyGraphError:
    return PolicyGraphError([diagnose(code, message, help=help)])
