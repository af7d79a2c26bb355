"""Encodes plain values as bytes: numbers, text, tuples of them, and the few classes of facts. Nothing read can run.

One byte says what follows; whole numbers are written seven bits at a time, lowest first. What is read is bounded: a
number has at most 19 bytes, nothing lies deeper than 16 levels, and a reader makes no more values than it may.
"""

from __future__ import annotations

import struct
from typing import Any

import attrs

from policylang.graph.facts import Group, LostMarker, Mesh, Ref
from policylang.language.wording import one_line

_NONE, _FALSE, _TRUE, _INT, _NEGATIVE, _FLOAT, _TEXT, _TUPLE, _LIST, _DICT, _RECORD, _REF = range(12)
_RECORDS: tuple[type, ...] = (Group, LostMarker, Mesh)
"""The classes a value may be of, by the number that stands for each. Numbers are never reused."""
_LONGEST_NUMBER = 19
_DEEPEST = 16


class MalformedError(Exception):
    """What was read is no recorded graph. The message is a phrase that says why."""


class DamagedError(Exception):
    """The bytes are not what was written. The message is a phrase that says what is wrong with them."""


def write_number(out: bytearray, number: int) -> None:
    """A whole number from 0 on."""
    if number >= 1 << (7 * _LONGEST_NUMBER):
        raise TypeError(f"a snapshot cannot hold the number {number}")
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)


def write_text(out: bytearray, text: str) -> None:
    data = one_line(text).encode()
    write_number(out, len(data))
    out += data


def write_value(out: bytearray, value: Any, row: int = 0) -> None:
    """A :class:`Ref` is written as its distance back from ``row``. Raises ``TypeError`` for what is not plain."""
    kind = type(value)
    if value is None:
        out.append(_NONE)
    elif kind is bool:
        out.append(_TRUE if value else _FALSE)
    elif kind is int:
        out.append(_INT if value >= 0 else _NEGATIVE)
        write_number(out, value if value >= 0 else -1 - value)
    elif kind is float:
        out.append(_FLOAT)
        out += struct.pack("<d", value)
    elif kind is str:
        out.append(_TEXT)
        write_text(out, value)
    elif kind is tuple or kind is list:
        out.append(_TUPLE if kind is tuple else _LIST)
        write_number(out, len(value))
        for part in value:
            write_value(out, part, row)
    elif kind is dict:
        out.append(_DICT)
        write_number(out, len(value))
        for key, part in value.items():
            write_value(out, key)
            write_value(out, part, row)
    elif kind is Ref:
        if not 0 <= value.row < row:
            raise TypeError(f"a snapshot cannot hold a node that reads a later one: {value!r} in row {row}")
        out.append(_REF)
        write_number(out, row - value.row)
    elif kind in _RECORDS:
        out.append(_RECORD)
        write_number(out, _RECORDS.index(kind))
        write_value(out, tuple(getattr(value, each.name) for each in attrs.fields(kind)))
    else:
        raise TypeError(f"a snapshot cannot hold a {kind.__name__}: {value!r}")


class Reader:
    """Reads what the functions above wrote. Every method raises :class:`DamagedError` for anything else.

    ``allowance``: how many values it may make in all.
    """

    def __init__(self, data: bytes, allowance: int) -> None:
        self._data = data
        self._at = 0
        self.allowance = allowance

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, length: int) -> bytes:
        if length > self.left:
            raise DamagedError("it ends too early")
        taken = self._data[self._at : self._at + length]
        self._at += length
        return taken

    def number(self) -> int:
        data, at = self._data, self._at
        number = shift = 0
        for _ in range(_LONGEST_NUMBER):
            if at >= len(data):
                raise DamagedError("it ends too early")
            byte = data[at]
            at += 1
            number |= (byte & 127) << shift
            if byte < 128:
                self._at = at
                return number
            shift += 7
        raise DamagedError("a number in it has no end")

    def text(self) -> str:
        try:
            text = self.take(self.number()).decode()
        except UnicodeDecodeError:
            raise DamagedError("a text in it is not text") from None
        if not text.isprintable():
            raise DamagedError("a text in it holds what no snapshot is written with: it cannot be printed")
        return text

    def value(self, depth: int = 0) -> Any:
        """A plain value; in it, a :class:`Ref` has the distance to its row for its row."""
        self.allowance -= 1
        if self.allowance < 0 or depth > _DEEPEST:
            raise DamagedError("it holds more than a graph of its size can")
        kind = self.take(1)[0]
        if kind == _INT:
            return self.number()
        if kind == _TEXT:
            return self.text()
        if kind == _TUPLE:
            return tuple([self.value(depth + 1) for _ in range(self._count())])
        if kind == _NONE:
            return None
        if kind in (_FALSE, _TRUE):
            return kind == _TRUE
        if kind == _NEGATIVE:
            return -1 - self.number()
        if kind == _FLOAT:
            return struct.unpack("<d", self.take(8))[0]
        if kind == _LIST:
            return [self.value(depth + 1) for _ in range(self._count())]
        if kind == _DICT:
            return self._dict(depth)
        if kind == _RECORD:
            return self._record(depth)
        if kind == _REF:
            return Ref(self.number())
        raise DamagedError(f"it holds a value of an unknown kind, {kind}")

    def _count(self) -> int:
        count = self.number()
        if count > self.left:  # each value is a byte at least
            raise DamagedError("it ends too early")
        return count

    def _dict(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(self._count()):
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise DamagedError("a name in it is not text")
            found[key] = self.value(depth + 1)
        return found

    def _record(self, depth: int) -> Any:
        number = self.number()
        if number >= len(_RECORDS):
            raise DamagedError(f"it holds a record of an unknown kind, {number}")
        kind = _RECORDS[number]
        fields = self.value(depth + 1)
        if not isinstance(fields, tuple) or len(fields) != len(attrs.fields(kind)):
            raise DamagedError(f"a {kind.__name__} in it has other fields")
        return kind(*fields)
