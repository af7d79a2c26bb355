"""What all ranks that hang together have posted for a graph, or why some have not: the waiting, and whom it names."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from attrs import define, field

from policylang.backends import divergence, heartbeat
from policylang.backends.heartbeat import Board
from policylang.backends.posts import PLAN, Entry, Key

PATIENCE = "POLICYLANG_AGREE_TIMEOUT"
SILENCE = "POLICYLANG_AGREE_SILENCE"
_LOOK = 1.0
"""Seconds between two looks at why a rank has not posted yet."""
_PART = 1 << 20
"""Bytes of an account in one value of the store, which takes no values of any size."""


@define(eq=False)
class Gathering:
    """The posts of all ranks that hang together with this one, in one round."""

    board: Board
    mine: Entry
    stage: int = PLAN
    before: Sequence[Entry] = ()
    """Of ranks that post no more rounds of settling: what they posted last."""
    known: dict[int, Entry] = field(factory=dict)
    named_by: dict[Key, Entry] = field(factory=dict)
    awaited: dict[Key, list[int]] = field(factory=dict)
    watches: dict[int, _Watch] = field(factory=dict)
    started: float = field(factory=time.monotonic)
    stopped: tuple[int, str] | None = None
    """The rank that stopped first, and its error."""

    def run(self) -> dict[int, Entry]:
        for entry in (self.mine, *self.before):
            self._meet(entry)
        pause, looked, waits = 0.002, time.monotonic(), False
        while self.awaited:
            came = [key for key, ranks in self.awaited.items() if self._came(key, ranks)]
            for key in came:
                self._read(key, self.awaited.pop(key))
            if came:
                continue
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
            if time.monotonic() - looked > _LOOK:
                waits, looked = True, time.monotonic()
                self._look()
        if waits:
            self.board.write(waiting(self.mine.rank), "")
        return self.known

    def _read(self, key: Key, ranks: Sequence[int]) -> None:
        for value in self.board.read([self._post(key, rank) for rank in ranks if rank not in self.known]):
            self._meet(Entry.from_json(value))

    def _came(self, key: Key, ranks: Sequence[int]) -> bool:
        return self.board.has([self._post(key, rank) for rank in ranks])

    def _post(self, key: Key, rank: int) -> str:
        return key.post(rank, self.stage)

    def _meet(self, entry: Entry) -> None:
        if entry.error:
            self._stop(entry.rank, entry.error)
        self.known[entry.rank] = entry
        for key, other in self.named_by.items():
            if entry.rank in key.ranks and key not in entry.keys:
                raise divergence.not_shared(entry, key, other)
        for key in entry.keys:
            if key in self.named_by:
                continue
            self.named_by[key] = entry
            for rank in key.ranks:
                if rank in self.known and key not in self.known[rank].keys:
                    raise divergence.not_shared(self.known[rank], key, entry)
            missing = [rank for rank in key.ranks if rank not in self.known]
            if missing:
                self.awaited[key] = missing

    def _stop(self, rank: int, error: str) -> NoReturn:
        self.stopped = rank, error
        raise divergence.stopped(rank, error)

    def _look(self) -> None:
        """Why have some not posted yet? Raises where waiting on makes no sense."""
        for key in self.named_by:
            told = self.board.read_if_there(failed(key))
            if told:
                self._stop(*json.loads(told))
        for key, ranks in list(self.awaited.items()):
            for rank in ranks:
                if rank not in self.known and self.board.has([self._post(key, rank)]):
                    self._read(key, [rank])
            left = [rank for rank in ranks if rank not in self.known]
            if left:
                self.awaited[key] = left
            else:
                del self.awaited[key]
        posts = [self._post(key, rank) for key, ranks in self.awaited.items() for rank in ranks]
        self.board.write(waiting(self.mine.rank), json.dumps([self.mine.label, posts]))
        for key, ranks in self.awaited.items():
            self._look_for_life(key, ranks)
            self._look_for_circle(key, ranks)

    def _look_for_life(self, key: Key, missing: list[int]) -> None:
        now = time.monotonic()
        patience, silence = seconds(PATIENCE, 600.0), seconds(SILENCE, 20.0)
        why: dict[int, str] = {}
        for rank in missing:
            watch = self.watches.setdefault(rank, _Watch(now))
            watch.see(self.board.read_if_there(heartbeat.sign(rank)), now)
            if now - watch.since > silence:
                why[rank] = watch.last_words(now - watch.since)
            elif now - self.started > patience:
                why[rank] = f"is alive, and has not come for {now - self.started:.0f} s{watch.place}"
        if why:
            raise divergence.missing(key, why)

    def _look_for_circle(self, key: Key, missing: list[int]) -> None:
        """Whether a missing rank itself waits, and in the end for this one.

        What a rank waits for counts only while it is not there; a rank that waits posts nothing meanwhile, so a circle
        that is seen once is there for good.
        """
        for rank in missing:
            reached, queue = {rank}, deque([rank])
            while queue:
                at = queue.popleft()
                told = self.board.read_if_there(waiting(at))
                for post in json.loads(told)[1] if told else ():
                    awaited = int(post.rpartition("/")[2])
                    if awaited in reached or self.board.has([post]):
                        continue
                    if awaited == self.mine.rank:
                        raise divergence.waiting(self.mine, key, rank, _described(rank, self.board))
                    reached.add(awaited)
                    queue.append(awaited)


@define
class _Watch:
    """A rank's sign of life as seen from here."""

    since: float
    """When it last moved, on this rank's clock."""
    value: str = ""

    def see(self, value: str, now: float) -> None:
        if value != self.value:
            self.value, self.since = value, now

    @property
    def place(self) -> str:
        place = self.value.partition(" ")[2]
        return f"; it is at {place}" if place else ""

    def last_words(self, seconds: float) -> str:
        if not self.value:
            return "has given no sign of life: it has died, or has loaded no policy"
        return f"has given no sign of life for {seconds:.0f} s{self.place.replace('it is', 'it was')}"


def failed(key: Key) -> str:
    """Where a rank says that it stops without a verdict: the others wait for one that it could not come to."""
    return f"{key.post(-1)}/failed"


def waiting(rank: int) -> str:
    return f"waiting/{rank}"


def _described(rank: int, board: Board) -> str:
    told = board.read_if_there(waiting(rank))
    return f"rank {rank} has {json.loads(told)[0]}" if told else f"rank {rank} has gone on since"


def write_parts(board: Board, place: str, content: bytes) -> None:
    parts = [content[at : at + _PART] for at in range(0, len(content), _PART)]
    for number, part in enumerate(parts):
        board.write(f"{place}/{number}", part)
    board.write(place, str(len(parts)))


def read_parts(board: Board, place: str, seconds: float) -> bytes | None:
    """None where it does not come: its rank has gone, and is not worth more time than that."""
    end = time.monotonic() + seconds
    while not board.has([place]):
        if time.monotonic() > end:
            return None
        time.sleep(0.05)
    count = int(board.read([place])[0])
    return b"".join(board.read([f"{place}/{number}" for number in range(count)]))


def seconds(variable: str, usual: float) -> float:
    try:
        return float(os.environ[variable])
    except (KeyError, ValueError):
        return usual
