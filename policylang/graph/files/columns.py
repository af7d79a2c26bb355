"""Encodes the columns of facts as bytes: each distinct value once, and for every row the number of its value.

Rows are written relative to the row that names them, and the numbers at the end of names (``mm_12``) relative to the
last of their kind. So the equal blocks of a model are equal bytes, which a compressor folds. What is read is in range,
and is bounded by the number of rows before it is made.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from policylang.graph.facts import Ref
from policylang.graph.files.plain import DamagedError, Reader, write_number, write_value

_WIDTHS = {1: "B", 2: "H", 4: "I"}
_LONGEST_NUMBER = 9
"""Digits of the number at the end of a name; a longer one is part of the name."""
_CHARACTERS = 128
"""Of the names, on average."""
EDGES = 16
"""How many nodes a node reads at most, on average over a graph of a size that matters."""
SLACK = 1 << 20
"""What any graph may have beside: small graphs are not bound by averages."""


def write_plain(out: bytearray, values: Iterable[Any]) -> None:
    """Any plain values. ``1`` and ``True`` are two of them."""
    _write(out, _entries(values))


def _entries(values: Iterable[Any]) -> Iterator[bytes]:
    known: dict[tuple[type, Any], bytes] = {}  # spares the encoding of what is simple and frequent
    for value in values:
        simple = type(value) in (str, int, bool, type(None))
        entry = known.get((type(value), value)) if simple else None
        if entry is None:
            entry = _entry(value)
            if simple:
                known[type(value), value] = entry
        yield entry


def _entry(value: Any, row: int = 0) -> bytes:
    entry = bytearray()
    write_value(entry, value, row)
    return bytes(entry)


def read_plain(reader: Reader, rows: int, check: Callable[[Any], bool], what: str) -> list[Any]:
    """``check`` is asked about each distinct value; ``what`` names the column in complaints."""
    table, indices = _read(reader, rows, what)
    for value in table:
        if not check(value):
            raise DamagedError(f"its column `{what}` holds what cannot be there")
    return [table[index] for index in indices]


def write_rows(out: bytearray, values: Sequence[int]) -> None:
    """A row for every row."""
    write_plain(out, (row - value for row, value in enumerate(values)))


def read_rows(reader: Reader, rows: int, what: str) -> array[int]:
    back = read_plain(reader, rows, lambda value: type(value) is int, what)
    found = array("i", bytes(4 * rows))
    for row, distance in enumerate(back):
        if not 0 <= row - distance < rows:
            raise DamagedError(f"its column `{what}` points outside the graph")
        found[row] = row - distance
    return found


def write_reads(out: bytearray, values: Sequence[tuple[int, ...]]) -> None:
    """The earlier rows that each row reads."""
    write_plain(out, (tuple([row - read for read in reads]) for row, reads in enumerate(values)))


def read_reads(reader: Reader, rows: int, what: str) -> list[tuple[int, ...]]:
    table, indices = _read(reader, rows, what)
    farthest = []
    for entry in table:
        if type(entry) is not tuple or len(set(entry)) != len(entry):
            raise DamagedError(f"its column `{what}` holds what cannot be there")
        if any(type(back) is not int or back < 1 for back in entry):
            raise DamagedError(f"its column `{what}` has a node read a later one")
        farthest.append(max(entry, default=0))
    _check_reads(indices, farthest, [len(entry) for entry in table], what)
    return [tuple([row - back for back in table[index]]) for row, index in enumerate(indices)]


def write_arguments(out: bytearray, values: Sequence[tuple[Any, ...]]) -> None:
    """Plain values, and in them earlier rows as :class:`Ref`."""
    nothing = _entry(())
    _write(out, (_entry(value, row) if value else nothing for row, value in enumerate(values)))


def read_arguments(reader: Reader, rows: int, what: str) -> list[tuple[Any, ...]]:
    table, indices = _read(reader, rows, what)
    distances = []
    for entry in table:
        if type(entry) is not tuple:
            raise DamagedError(f"its column `{what}` holds what cannot be there")
        found = list(_distances(entry))
        if min(found, default=1) < 1:
            raise DamagedError(f"its column `{what}` has a node read a later one")
        distances.append(found)
    farthest = [max(found, default=0) for found in distances]
    sizes = [_size(entry) if found else 0 for entry, found in zip(table, distances, strict=True)]
    _check_reads(indices, farthest, sizes, what)
    return [_placed(table[index], row) if farthest[index] else table[index] for row, index in enumerate(indices)]


def _check_reads(indices: Sequence[int], farthest: Sequence[int], sizes: Sequence[int], what: str) -> None:
    """``farthest`` and ``sizes`` are by entry of the table: how far back it reads, and how much it holds."""
    if sum([sizes[index] for index in indices]) > EDGES * len(indices) + SLACK:
        raise DamagedError("it holds more than a graph of its size can")
    if any(farthest[index] > row for row, index in enumerate(indices)):
        raise DamagedError(f"its column `{what}` points outside the graph")


def _distances(value: Any) -> Iterator[int]:
    if type(value) is Ref:
        yield value.row
    elif type(value) is tuple or type(value) is list:
        for part in value:
            yield from _distances(part)


def _size(value: Any) -> int:
    return 1 + sum(map(_size, value)) if type(value) in (tuple, list) else 1


def _placed(value: Any, row: int) -> Any:
    """With the rows that stand at the distances from a row."""
    if type(value) is Ref:
        return Ref(row - value.row)
    if type(value) is tuple:
        return tuple([_placed(part, row) for part in value])
    return [_placed(part, row) for part in value] if type(value) is list else value


def write_names(out: bytearray, names: Sequence[str]) -> None:
    """Names in two columns: what comes before a number at the end, and how far the number is from the last there."""
    bases: list[str] = []
    steps: list[int | None] = []
    last: dict[str, int] = {}
    for name in names:
        base, number = _parted(name)
        bases.append(base)
        steps.append(None if number is None else number - last.get(base, 0))
        if number is not None:
            last[base] = number
    write_plain(out, bases)
    write_plain(out, steps)


def read_names(reader: Reader, rows: int, what: str) -> list[str]:
    bases = read_plain(reader, rows, lambda value: type(value) is str, what)
    steps = read_plain(reader, rows, lambda value: value is None or type(value) is int, what)
    if sum(map(len, bases)) > _CHARACTERS * rows + SLACK:
        raise DamagedError("its names are longer than any graph's")
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
    if len(set(names)) != rows or "" in names:
        raise DamagedError("two of its nodes have one name")
    return names


def _parted(name: str) -> tuple[str, int | None]:
    base, mark, digits = name.rpartition("_")
    if mark and digits.isascii() and digits.isdigit() and len(digits) <= _LONGEST_NUMBER:
        number = int(digits)
        if str(number) == digits:
            return base, number
    return name, None


def _write(out: bytearray, column: Iterable[bytes]) -> None:
    table: dict[bytes, int] = {}
    indices = array("I", [table.setdefault(entry, len(table)) for entry in column])
    entries = list(table)
    write_number(out, len(entries))
    for entry in entries:
        out += entry
    width = next((width for width in _WIDTHS if len(entries) <= 1 << 8 * width), 4)
    if len(entries) <= 1:
        return
    packed = array(_WIDTHS[width], indices)
    if sys.byteorder == "big":
        packed.byteswap()
    out += packed.tobytes()


def _read(reader: Reader, rows: int, what: str) -> tuple[list[Any], Sequence[int]]:
    count = reader.number()
    if count > rows or (rows and not count) or count > reader.left:
        raise DamagedError(f"its column `{what}` has another length than the graph")
    table = [reader.value() for _ in range(count)]
    if count <= 1:
        return table, bytes(rows)
    width = next(width for width in _WIDTHS if count <= 1 << 8 * width)
    indices = array(_WIDTHS[width])
    indices.frombytes(reader.take(width * rows))
    if sys.byteorder == "big":
        indices.byteswap()
    if max(indices) >= count:
        raise DamagedError(f"its column `{what}` has values that it does not list")
    return table, indices
