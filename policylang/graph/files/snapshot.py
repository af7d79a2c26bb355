"""Writes and reads snapshots: the facts of a graph in a file, a few bytes a node, without weights and code.

The format is described in ``docs/snapshots.md``. Every field of :class:`~policylang.graph.facts.Facts` is stored under
its name, and a file with other fields is refused rather than read by halves.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from policylang.errors import PolicyGraphError
from policylang.graph.facts import LATER_COLUMNS, Facts, GraphKind, users_of
from policylang.graph.files import columns
from policylang.graph.files.columns import EDGES, SLACK, read_plain, write_plain
from policylang.graph.files.plain import DamagedError, Reader, write_number, write_text, write_value
from policylang.graph.files.validation import COLUMNS, check_document, check_facts
from policylang.language.diagnostics import diagnose
from policylang.language.files import reason_of, write_whole

SUFFIX = ".graph"
FORMAT = 1
MAGIC = b"\x8aAPLG\r\n\x1a"
"""As in PNG: a first byte that is no text, and a line end that a transfer as text would change."""
FOREIGN, NEWER, DAMAGED, TOO_LARGE, UNREADABLE = "APL351", "APL352", "APL353", "APL354", "APL355"

MOST_NODES = 1 << 21
MOST_BYTES = 1 << 27
"""Of the file, and of what it is decompressed to."""
_UNPACKED, _NODES = 256, 16
"""At most so many bytes, and nodes, for each byte of a file, beside what any graph may have: who opens a small file
pays for a small graph. The equal blocks of a model come to a tenth of that."""
_ANY_BYTES, _ANY_NODES = 1 << 22, 1 << 16
_UPDATE = "update policylang, or write the snapshot again"
_WRITE_AGAIN = "write the snapshot again"
_HEAD = struct.Struct("<8sHQI")
_DERIVED = ("users",)
"""Columns that follow from the others and are made again on loading."""
_SPECIAL: dict[str, tuple[Callable[..., None], Callable[..., Sequence[Any]]]] = {
    "names": (columns.write_names, columns.read_names),
    "inputs": (columns.write_reads, columns.read_reads),
    "owners": (columns.write_rows, columns.read_rows),
    "arguments": (columns.write_arguments, columns.read_arguments),
}
"""Columns that are written relative to their rows: how to write and to read each."""


def write(facts: Facts, path: str | os.PathLike[str]) -> None:
    """Write a snapshot. Raises ``PolicyGraphError`` if it cannot be written there, or the graph is too large."""
    data = dump(facts)
    try:
        write_whole(Path(path), data)
    except OSError as error:
        raise graph_error(UNREADABLE, f"`{os.fsdecode(path)}` cannot be written: {reason_of(error)}") from None


def load(path: str | os.PathLike[str]) -> Facts:
    """Read a snapshot. Needs no torch; takes bounded time and memory whatever the file holds.

    Raises ``PolicyGraphError`` for a file that cannot be read, is no snapshot, was written by a newer policylang, is
    damaged, or is larger than a snapshot can be.
    """
    return parse(_content(path), os.fsdecode(path))


def dump(facts: Facts) -> bytes:
    """The content of a snapshot. Equal facts give equal bytes."""
    _check_size(facts)
    body = bytearray()
    names = [each.name for each in attrs.fields(Facts)]
    document = {name: getattr(facts, name) for name in names if not is_column(name)} | {"kind": facts.kind.value}
    stored = [name for name in names if is_column(name) and name not in _DERIVED and not _is_unknown(facts, name)]
    write_number(body, len(facts))
    write_value(body, document)
    write_number(body, len(stored))
    for name in stored:
        write_text(body, name)
        put = _SPECIAL[name][0] if name in _SPECIAL else write_plain
        put(body, getattr(facts, name))
    packed = zlib.compress(bytes(body), 9)
    if len(body) > _most(_ANY_BYTES, _UNPACKED, packed) or len(facts) > _most(_ANY_NODES, _NODES, packed):
        packed = zlib.compress(bytes(body), 0)  # nodes that are all alike
    return _HEAD.pack(MAGIC, FORMAT, len(body), zlib.crc32(packed)) + packed


def parse(data: bytes, name: str = "<snapshot>") -> Facts:
    """The facts of a snapshot's content; ``name`` is what complaints call it."""
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            raise _damaged(name, "it ends too early" if data else "it is empty")
        help = "`policylang snapshot` writes one, `policylang import` makes one of a recorded graph in JSON"
        raise graph_error(FOREIGN, f"`{name}` is not a snapshot of a graph", help)
    if len(data) < _HEAD.size:
        raise _damaged(name, "it ends too early")
    _, version, length, checksum = _HEAD.unpack_from(data)
    if version > FORMAT:
        message = f"`{name}` has format {version}, and this policylang reads formats up to {FORMAT}"
        raise graph_error(NEWER, message, _UPDATE)
    packed = memoryview(data)[_HEAD.size :]
    if length > min(MOST_BYTES, _most(_ANY_BYTES, _UNPACKED, packed)):
        raise _too_large(name, f"its {len(data):,} bytes unpack to {length:,}")
    try:
        if zlib.crc32(packed) != checksum:
            raise DamagedError("its content does not fit its checksum")
        return _facts(_unpacked(packed, length), name, min(MOST_NODES, _most(_ANY_NODES, _NODES, packed)))
    except DamagedError as error:
        raise _damaged(name, str(error)) from None


def _is_unknown(facts: Facts, name: str) -> bool:
    return name in LATER_COLUMNS and len(getattr(facts, name)) != len(facts)


def is_column(name: str) -> bool:
    """Whether a field of facts has a value for every row."""
    return str(getattr(attrs.fields(Facts), name).type).startswith("Sequence[")


def _most(of_any: int, of_a_byte: int, packed: bytes | memoryview) -> int:
    return of_any + of_a_byte * len(packed)


def _facts(body: bytes, name: str, most: int) -> Facts:
    reader = Reader(body, SLACK)
    rows = reader.number()
    if rows > most:
        raise _too_large(name, f"it has {rows:,} nodes")
    reader.allowance += 4 * EDGES * rows
    found = reader.value()
    if not isinstance(found, dict):
        raise DamagedError("it does not begin with what is true of the whole graph")
    for _ in range(reader.number()):
        column = reader.text()
        if column in found:
            raise DamagedError(f"it has two columns `{column}`")
        _check_known(column, name)
        found[column] = _read_column(reader, column, rows)
    if reader.left:
        raise DamagedError("something follows its last column")
    _check_complete(found, name)
    check_document(found)
    found["kind"] = GraphKind(found["kind"])
    facts = Facts(**found, users=users_of(found["inputs"]))
    check_facts(facts)
    return facts


def _read_column(reader: Reader, name: str, rows: int) -> Sequence[Any]:
    if name in _SPECIAL:
        return _SPECIAL[name][1](reader, rows, name)
    return read_plain(reader, rows, COLUMNS[name], name)


def _check_known(name: str, file: str) -> None:
    if name not in COLUMNS and name not in _SPECIAL:
        message = f"`{file}` has a column `{name[:40]}`, which this policylang does not know"
        raise graph_error(NEWER, message, _UPDATE)


def _check_complete(found: dict[str, Any], file: str) -> None:
    for later in LATER_COLUMNS:
        found.setdefault(later, ())
    wanted = {each.name for each in attrs.fields(Facts)}.difference(_DERIVED)
    more, less = sorted(set(found) - wanted), sorted(wanted - set(found))
    if more:
        message = f"`{file}` says `{more[0][:40]}` of its graph, which this policylang does not know"
        raise graph_error(NEWER, message, _UPDATE)
    if less:
        message = f"`{file}` does not say `{less[0]}` of its graph: an older policylang wrote it, or something else did"
        raise graph_error(DAMAGED, message, _WRITE_AGAIN)


def _check_size(facts: Facts) -> None:
    edges = sum(map(len, facts.inputs))
    if len(facts) > MOST_NODES or edges > EDGES * len(facts) + SLACK:
        raise _too_large("the graph", f"it has {len(facts):,} nodes and {edges:,} edges")


def _unpacked(packed: memoryview, length: int) -> bytes:
    """Never more than ``length`` and one byte, whatever the stream would unpack to."""
    stream = zlib.decompressobj()
    try:
        body = stream.decompress(packed, length + 1)
    except zlib.error:
        raise DamagedError("its content cannot be unpacked") from None
    if len(body) != length or not stream.eof or stream.unused_data:
        raise DamagedError("its content has another length than it says")
    return body


def _content(path: str | os.PathLike[str]) -> bytes:
    name = os.fsdecode(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno())
            if stat.S_ISREG(size.st_mode) and size.st_size > MOST_BYTES:
                raise _too_large(name, f"it has {size.st_size:,} bytes")
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise graph_error(UNREADABLE, f"`{name}` cannot be read: {reason_of(error)}") from None
    if len(data) > MOST_BYTES:
        raise _too_large(name, f"it has more than {MOST_BYTES:,} bytes")
    return data


def _damaged(name: str, reason: str) -> PolicyGraphError:
    return graph_error(DAMAGED, f"`{name}` is damaged: {reason}", _WRITE_AGAIN)


def _too_large(name: str, reason: str) -> PolicyGraphError:
    what = name if name == "the graph" else f"`{name}`"
    return graph_error(TOO_LARGE, f"{what} is larger than a snapshot can be: {reason}")


def graph_error(code: str, message: str, help: str | None = None) -> PolicyGraphError:
    return PolicyGraphError([diagnose(code, message, help=help)])
