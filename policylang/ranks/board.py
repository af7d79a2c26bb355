"""The store of the default process group, where ranks post what they tell each other.

Every group has a store, whatever carries its data, so comparing through it needs no collective and no device. Nothing
runs beside the program: a rank reads and writes while it compares, and at no other time.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import asdict, define, frozen

from policylang import _torch_store
from policylang.ranks.messages import Left

SWITCH = "POLICYLANG_AGREE"
PREFIX = "policylang"
_PART = 1 << 20
"""Bytes in one value of the store, which takes no values of any size."""


def is_on() -> bool:
    """``POLICYLANG_AGREE=0`` turns the comparison of ranks off for the whole program."""
    return os.environ.get(SWITCH, "1") not in ("0", "false", "off")


@frozen
class Status:
    """What a rank has to say outside of any comparison. The last one replaces those before."""

    kind: str = ""
    """``waiting``, ``stopped``, ``uncompared``; empty while there is nothing to say."""
    text: str = ""
    """For people: what the rank has, why it stopped, or why it does not compare."""
    left: Left | None = None
    """Where it stopped, or does not compare."""
    posts: tuple[str, ...] = ()
    """What a rank waits for."""
    threads: int = 1
    """How many threads of the rank have compared anything: one may come while another waits."""


@define(eq=False)
class Board:
    """Where this rank posts and reads, over a connection of policylang's own."""

    rank: int
    store: Any
    default: weakref.ref[Any]
    """The store of torch.distributed. Not kept alive: its server's port belongs to the user."""
    said: Status = Status()

    def write(self, key: str, value: str | bytes) -> None:
        self.store.set(f"{PREFIX}/{key}", value)

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all of them are there."""
        return bool(self.store.check([f"{PREFIX}/{key}" for key in keys]))

    def read(self, keys: Sequence[str]) -> list[bytes] | None:
        """None where one of them is not there."""
        if not keys:
            return []
        full = [f"{PREFIX}/{key}" for key in keys]
        found: list[bytes] | None = _torch_store.read_all(self.store, full)
        return found

    def read_one(self, key: str) -> bytes | None:
        found = self.read([key])
        return found[0] if found else None

    def swap(self, key: str, old: bytes, new: str) -> bytes:
        """Write ``new`` where ``old`` stands (empty: nothing); what stands there afterwards."""
        found: bytes = self.store.compare_set(f"{PREFIX}/{key}", old.decode(), new)
        return found

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.store.delete_key(f"{PREFIX}/{key}")

    # --- what is too long for one value ---

    def write_parts(self, place: str, content: bytes) -> list[str]:
        """The keys that were written."""
        parts = [content[at : at + _PART] for at in range(0, len(content), _PART)]
        keys = [f"{place}/{number}" for number in range(len(parts))]
        for key, part in zip(keys, parts, strict=True):
            self.write(key, part)
        self.write(place, str(len(parts)))
        return [*keys, place]

    def read_parts(self, place: str) -> bytes | None:
        """None while it is not there."""
        count = self.read_one(place)
        parts = None if count is None else self.read([f"{place}/{number}" for number in range(int(count))])
        return None if parts is None else b"".join(parts)

    # --- what a rank says of itself ---

    def say(self, status: Status) -> None:
        if status != self.said:
            self.write(_status(self.rank), json.dumps(asdict(status)))
            self.said = status

    def status(self, rank: int) -> Status:
        told = self.read_one(_status(rank))
        if told is None:
            return Status()
        content = json.loads(told)
        left = None if content["left"] is None else Left(**content["left"])
        return Status(**{**content, "posts": tuple(content["posts"]), "left": left})


_current: Board | None = None


def board() -> Board | None:
    """The board of the default process group; None where there are no ranks to compare with."""
    global _current
    default = _torch_store.default_store()
    if default is None:
        return None
    if _current is None or _current.default() is not default:
        _current = Board(_torch_store.own_rank(), _torch_store.own_connection(default), weakref.ref(default))
    return _current


def _status(rank: int) -> str:
    return f"status/{rank}"
