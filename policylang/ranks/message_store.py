"""Messages between ranks through the store of the default process group, and what a rank remembers of them.

Every group has a store, whatever carries its data, so comparing through it needs no collective and no device. Nothing
runs beside the program: a rank reads and writes while it compares, and at no other time.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import define, field

from policylang.ranks.messages import Absence, EndOfComparison, RankKey, RankStatus, pack, unpack
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
        self.store.set(f"{PREFIX}/{key}", pack(value))

    def read(self, keys: Sequence[str]) -> list[Any] | None:
        """None where one of them is not there."""
        found = self._read_texts(keys)
        return None if found is None else [unpack(text) for text in found]

    def _read_texts(self, keys: Sequence[str]) -> list[bytes] | None:
        return store.read_all(self.store, [f"{PREFIX}/{key}" for key in keys])

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
        old = self._read_texts([key])
        if old is not None and not is_past(standing := unpack(old[0])):
            return standing
        expected = "" if old is None else old[0].decode()
        return unpack(self.store.compare_set(f"{PREFIX}/{key}", expected, pack(value)))

    def write_parts(self, place: str, content: Any) -> list[str]:
        """What is too long for one value. The keys that were written."""
        text = pack(content)
        parts = {f"{place}/{at}": text[at : at + _PART] for at in range(0, len(text), _PART)}
        for key, part in parts.items():
            self.store.set(f"{PREFIX}/{key}", part)
        self.write(place, list(parts))
        return [*parts, place]

    def read_parts(self, place: str) -> Any:
        """None while it is not there."""
        keys = self.read_one(place)
        parts = None if keys is None else self._read_texts(keys)
        return None if parts is None else unpack(b"".join(parts))

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
