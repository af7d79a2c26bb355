"""The store of the default process group, where ranks post what they tell each other.

Every group has a store, whatever carries its data, so comparing through it needs no collective and no device. Nothing
runs beside the program: a rank reads and writes while it compares, and at no other time.
"""

from __future__ import annotations

import base64
import os
import pickle
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import define, field

from policylang.ranks.memory import Memory
from policylang.ranks.messages import End, Key, Status
from policylang.torch_compat import store

SWITCH = "POLICYLANG_AGREE"
PREFIX = "policylang"
_PART = 1 << 20
"""Bytes in one value of the store, which takes no values of any size."""


def is_on() -> bool:
    """``POLICYLANG_AGREE=0`` turns the comparison of ranks off for the whole program."""
    return os.environ.get(SWITCH, "1") not in ("0", "false", "off")


@define(eq=False)
class Board:
    """Where this rank posts and reads, over a connection of policylang's own."""

    rank: int
    store: Any
    default: Any
    """A weak reference to the store of torch.distributed. Not kept alive: its server's port belongs to the user."""
    memory: Memory = field(factory=Memory)
    said: Status = field(factory=Status)

    def write(self, key: str, value: Any) -> None:
        self.store.set(f"{PREFIX}/{key}", _packed(value))

    def read(self, keys: Sequence[str]) -> list[Any] | None:
        """None where one of them is not there."""
        found = store.read_all(self.store, [f"{PREFIX}/{key}" for key in keys])
        return None if found is None else [_unpacked(value) for value in found]

    def read_one(self, key: str) -> Any:
        found = self.read([key])
        return found[0] if found else None

    def has(self, key: str) -> bool:
        return bool(self.store.check([f"{PREFIX}/{key}"]))

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.store.delete_key(f"{PREFIX}/{key}")

    def replace(self, key: str, is_past: Callable[[Any], bool], value: Any) -> Any:
        """What stands there afterwards: ``value``, unless there is something that is not past. One of several ranks
        that do this at once has its way."""
        old = store.read_all(self.store, [f"{PREFIX}/{key}"])
        if old is not None and not is_past(standing := _unpacked(old[0])):
            return standing
        expected = "" if old is None else old[0].decode()
        return _unpacked(self.store.compare_set(f"{PREFIX}/{key}", expected, _packed(value)))

    def write_parts(self, place: str, content: Any) -> list[str]:
        """What is too long for one value. The keys that were written."""
        packed = zlib.compress(pickle.dumps(content), 1)
        keys = [f"{place}/{at}" for at in range(0, len(packed), _PART)]
        for number, key in enumerate(keys):
            self.write(key, packed[number * _PART : (number + 1) * _PART])
        self.write(place, keys)
        return [*keys, place]

    def read_parts(self, place: str) -> Any:
        """None while it is not there."""
        keys = self.read_one(place)
        parts = None if keys is None else self.read(keys)
        return None if parts is None else pickle.loads(zlib.decompress(b"".join(parts)))

    def end_of(self, keys: Iterable[Key], step: float) -> End | None:
        """What concerns a rank that is in a step of a comparison over these keys."""
        for key in keys:
            end: End | None = self.read_one(key.end)
            if end is not None and end.ends(key, step):
                return end
        return None

    # --- what a rank says of itself ---

    def say(self, status: Status) -> None:
        if status != self.said:
            self.write(f"status/{self.rank}", status)
            self.said = status

    def status(self, rank: int) -> Status:
        found: Status | None = self.read_one(f"status/{rank}")
        return found or Status()


def _packed(value: Any) -> str:
    """Everything that ranks say is plain data of this package; the store compares text."""
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpacked(text: bytes) -> Any:
    return pickle.loads(base64.b64decode(text))


_current: Board | None = None
_memory = Memory()


def board() -> Board | None:
    """The board of the default process group; None where there are no ranks to compare with."""
    global _current
    default = store.default_store()
    if default is None:
        return None
    rank = store.own_rank()
    if rank is not None and (_current is None or _current.default() is not default):
        _current = Board(rank, store.own_connection(default), weakref.ref(default), _memory)
    return _current
