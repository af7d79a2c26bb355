"""Messages between ranks through the store of the default process group, and what a rank remembers of them.

Every group has a store, whatever carries its data, so comparing through it needs no collective and no device. Nothing
runs beside the program: a rank reads and writes while it compares, and at no other time.
"""

from __future__ import annotations

import base64
import os
import pickle
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import define, field

from policylang.ranks.messages import Absence, EndOfComparison, RankKey, RankStatus
from policylang.torch_compat import store

SWITCH = "POLICYLANG_AGREE"
PREFIX = "policylang"
_PART = 1 << 20
"""Bytes in one value of the store, which takes no values of any size."""
_KEPT = 32
"""Of what is said again with every message."""


def is_on() -> bool:
    """``POLICYLANG_AGREE=0`` turns the comparison of ranks off for the whole program."""
    return os.environ.get(SWITCH, "1") not in ("0", "false", "off")


@define(eq=False)
class SentMessages:
    """Messages of this rank that others may still read."""

    readers: frozenset[int]
    places: frozenset[str]
    keys: list[str]
    """In the store."""


@define(eq=False)
class RankHistory:
    """What a rank remembers of comparisons, so that it takes no message for one of another occasion.

    Never forgotten while the process lives: a store may outlive a process group.
    """

    entered: dict[str, int] = field(factory=dict)
    """How often this rank has come to each topic, by address."""
    absences: tuple[Absence, ...] = ()
    """The last of this rank."""
    heard: dict[tuple[int, int], None] = field(factory=dict)
    """The absences of other ranks that it knows of."""
    sent: list[SentMessages] = field(factory=list)
    open: list[tuple[RankKey, ...]] = field(factory=list)
    """The keys of the comparisons that this rank is in, in any of its threads."""
    threads: set[int] = field(factory=set)
    """Those that have compared anything."""

    def enter(self, topic: str, at_least: int = 0) -> int:
        """This rank comes to a topic; how often it has by now."""
        self.threads.add(threading.get_ident())
        found = self.entered[topic] = max(self.entered.get(topic, 0) + 1, at_least)
        return found

    def catch_up(self, topic: str, occasion: int) -> None:
        self.entered[topic] = max(self.entered.get(topic, 0), occasion)

    def add_absence(self, rank: int, about: str, entered: int, reason: str, stopped: bool) -> tuple[Absence, ...]:
        """This rank is absent from what others may compare."""
        serial = 1 + max((each.serial for each in self.absences), default=0)
        self.absences = (*self.absences, Absence(rank, serial, about, entered, reason, stopped))[-_KEPT:]
        return self.absences

    def hear(self, absence: Absence | None) -> None:
        if absence is not None:
            self.heard[absence.rank, absence.serial] = None

    def last_heard(self) -> frozenset[tuple[int, int]]:
        return frozenset(list(self.heard)[-_KEPT:])


@define(eq=False)
class MessageStore:
    """Where this rank sends and reads messages, over a connection of policylang's own."""

    rank: int
    store: Any
    default: Any
    """A weak reference to the store of torch.distributed. Not kept alive: its server's port belongs to the user."""
    history: RankHistory = field(factory=RankHistory)
    said: RankStatus = field(factory=RankStatus)

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

    def end_of(self, keys: Iterable[RankKey], step: float) -> EndOfComparison | None:
        """What concerns a rank that is in a step of a comparison over these keys."""
        found = ((key, self.read_one(key.end)) for key in keys)
        return next((end for key, end in found if end is not None and end.ends(key, step)), None)

    def say(self, status: RankStatus) -> None:
        """Tell other ranks what this one does."""
        if status != self.said:
            self.write(f"status/{self.rank}", status)
            self.said = status

    def status(self, rank: int) -> RankStatus:
        return self.read_one(f"status/{rank}") or RankStatus()


def _packed(value: Any) -> str:
    """Everything that ranks say is plain data of this package; the store compares text."""
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpacked(text: bytes) -> Any:
    return pickle.loads(base64.b64decode(text))


_current: MessageStore | None = None
_history = RankHistory()


def message_store() -> MessageStore | None:
    """Of the default process group; None where there are no ranks to compare with."""
    global _current
    default, rank = store.default_store(), store.own_rank()
    if default is None or rank is None:
        return None
    if _current is None or _current.default() is not default:
        _current = MessageStore(rank, store.own_connection(default), weakref.ref(default), _history)
    return _current
