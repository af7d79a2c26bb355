"""Messages between ranks through the store of the default process group, and what a rank remembers of them.

Every group has a store, whatever carries its data, so comparing through it needs no collective and no device. Nothing
runs beside the program: a rank reads and writes while it compares, and at no other time.
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from attrs import define, field

from policylang.language.diagnostics import Diagnostic
from policylang.ranks import differences
from policylang.ranks.messages import (
    Absence,
    EndOfComparison,
    MeetingKey,
    RankStatus,
    compress,
    decompress,
    pack,
    unpack,
)
from policylang.ranks.rank_account import StepContent
from policylang.torch_compat import distributed

SWITCH = "POLICYLANG_AGREE"
PREFIX = "policylang"
_MOST = 7 << 20
"""Bytes in one value of a store, which takes 8 MiB."""
_KEPT = 8
"""Absences that are repeated with every message."""
_REASON = 1000
"""Characters."""
_T = TypeVar("_T")


def is_on() -> bool:
    """``POLICYLANG_AGREE=0`` turns the comparison of ranks off for the whole program."""
    return os.environ.get(SWITCH, "1") not in ("0", "false", "off")


class StoreFailure(Exception):
    """The store cannot be reached, or holds what no rank has written."""

    def __init__(self, diagnostic: Diagnostic, is_gone: bool) -> None:
        super().__init__(diagnostic.message)
        self.diagnostic, self.is_gone = diagnostic, is_gone


@define(eq=False)
class RankHistory:
    """A rank's memory of earlier comparisons, so that it mistakes no old message for a new one."""

    token: str = field(factory=lambda: uuid.uuid4().hex)
    """Identifies the stores that it was made for: one may outlive a process group."""
    epochs: dict[str, int] = field(factory=dict)
    """The last at each place, whichever thread was there."""
    absences: tuple[Absence, ...] = ()
    """The last of this rank."""
    told: set[str] = field(factory=set)
    """The known absences of other ranks."""
    _visits: threading.local = field(factory=threading.local)
    """By thread and topic the number of visits: threads run in no order that ranks share."""

    def come_to(self, topic: str, at_least: int = 0) -> int:
        """The epoch of this thread there; ``at_least``: others have come more often, and ran what this rank did not."""
        visits = self._visits.__dict__
        visits[topic] = found = max(visits.get(topic, 0) + 1, at_least)
        return int(found)


@define(eq=False)
class MessageStore:
    """This rank's access to the store, over a connection of policylang's own. Methods raise :class:`StoreFailure` where
    the process that held the store has ended."""

    rank: int
    default: Callable[[], Any]
    """The store of torch.distributed while it is there. Not kept alive: its server's port belongs to the user."""
    earlier: RankHistory = field(factory=RankHistory)
    """The history of the store before, which may be this one."""
    threads: bool = False
    """Ranks are threads of one process."""
    said: RankStatus = field(factory=RankStatus)
    _connection: Any = None

    @property
    def history(self) -> RankHistory:
        if self._connection is None:
            with suppress(RuntimeError):  # of a store that is gone, as the next request to it shows
                self._join()
        return self.earlier

    @property
    def alone(self) -> bool:
        """No other thread of this rank may reach a comparison while this one waits."""
        return self.threads or threading.current_thread() is threading.main_thread()

    def _ask(self, call: Callable[[Any], _T]) -> _T:
        try:
            return call(self._connection or self._join())
        except RuntimeError as failure:  # torch's own errors of a store
            raise StoreFailure(differences.store_gone(failure), True) from failure

    def _join(self) -> Any:
        found, key = distributed.own_connection(self.default()), f"{PREFIX}/rank/{self.rank}"
        token = distributed.read_all(found, [key])
        if token is None or token[0] != self.earlier.token.encode():
            self.earlier = RankHistory()  # others start anew with this store, too
            found.set(key, self.earlier.token)
        self._connection = found
        return found

    def write(self, key: str, value: Any) -> None:
        text = pack(value)
        self._ask(lambda to: to.set(f"{PREFIX}/{key}", text))

    def read(
        self, kind: type[_T], keys: Sequence[str], how: Callable[[type[_T], bytes], _T] = unpack
    ) -> list[_T] | None:
        """None where one of them is not there."""
        found = self._ask(lambda at: distributed.read_all(at, [f"{PREFIX}/{key}" for key in keys]))
        return None if found is None else [_read(how, kind, *each) for each in zip(keys, found, strict=True)]

    def read_one(self, kind: type[_T], key: str) -> _T | None:
        found = self.read(kind, [key])
        return found[0] if found else None

    def has(self, key: str) -> bool:
        return bool(self._ask(lambda at: at.check([f"{PREFIX}/{key}"])))

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._ask(lambda to, key=key: to.delete_key(f"{PREFIX}/{key}"))  # type: ignore[misc]

    def count(self, key: str) -> int:
        return int(self._ask(lambda at: at.add(f"{PREFIX}/{key}", 1)))

    def first(self, key: str, value: _T) -> _T:
        """Write unless another rank has; returns what is there."""
        there = self._ask(lambda at: at.compare_set(f"{PREFIX}/{key}", "", pack(value)))
        return _read(unpack, type(value), key, there)

    def write_content(self, key: str, content: StepContent) -> None:
        """Compressed, because it may be long. Too long for the store: nothing is written."""
        data = compress(content)
        if len(data) <= _MOST:
            self._ask(lambda to: to.set(f"{PREFIX}/{key}", data))

    def read_content(self, key: str) -> StepContent | None:
        """None while it is not there."""
        found = self.read(StepContent, [key], decompress)
        return found[0] if found else None

    def end_of(self, keys: Iterable[MeetingKey]) -> EndOfComparison | None:
        """Why comparisons under some keys have ended."""
        return next(filter(None, (self.read_one(EndOfComparison, key.end) for key in keys)), None)

    def say(self, status: RankStatus) -> None:
        """Tell other ranks what this one does."""
        if status != self.said:
            self.write(f"status/{self.rank}", status)
            self.said = status

    def status(self, rank: int) -> RankStatus:
        return self.read_one(RankStatus, f"status/{rank}") or RankStatus()

    def be_absent(self, topic: str, graph: str, reason: str) -> None:
        """Report that this rank takes no part in what others may compare (see :class:`Absence`)."""
        history, said = self.history, reason.partition("\n")[0][:_REASON]
        added = Absence(uuid.uuid4().hex, self.rank, topic, history.come_to(topic) if topic else 0, graph, said)
        history.absences = (*history.absences, added)[-_KEPT:]
        self.say(RankStatus("stopped" if added.stopped else "uncompared", said, history.absences))


def _read(how: Callable[[type[_T], bytes], _T], kind: type[_T], key: str, data: bytes) -> _T:
    try:
        return how(kind, data)
    except ValueError as error:
        raise StoreFailure(differences.unreadable(key, str(error)), False) from error


_current: dict[int, MessageStore] = {}
"""By rank: a process may play several in threads."""


def message_store() -> MessageStore | None:
    """The store of the default process group; None where there are no ranks to compare with."""
    default, rank = distributed.default_store(), distributed.own_rank()
    if default is None or rank is None:
        return None
    found = _current.get(rank)
    if found is None or found.default() is not default:
        history = RankHistory() if found is None else found.earlier
        found = MessageStore(rank, weakref.ref(default), history, distributed.ranks_are_threads())
        _current[rank] = found
    return found
