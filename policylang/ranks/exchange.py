"""One step of a meeting: a rank waits until every rank that hangs together with it has sent its message.

A rank reads what the members of its groups sent, and follows the groups that those name, breadth first. So all ranks
that hang together over any groups read the same, and come to the same verdict. Nobody guesses whether a rank is alive:
it is waited for as long as a collective would wait for it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime

from attrs import define, field

from policylang.ranks import differences
from policylang.ranks.message_store import MessageStore
from policylang.ranks.messages import Absence, Awaited, EndOfComparison, MeetingKey, RankMessage, RankStatus, named

NOTICE = 10.0
"""Seconds after which a rank says whom it waits for; then whenever it has waited twice as long."""
_LOOK = 0.25
"""Seconds between two looks at why a rank has not sent anything yet."""
_FEW = 32
"""Ranks that are looked at one by one. Where more are awaited, looks become rarer: a thousand that wait for a thousand
others would bring the store down."""
_LONGEST = 4.0
_CYCLE = 4
"""Looks on end after which ranks that wait for each other are told so: they may be about to hear a better reason."""

log = logging.getLogger("policylang.ranks")


@define
class Ended(Exception):
    """Nobody can go on. This rank has found why, or another has told it."""

    end: EndOfComparison


@define
class BehindOthers(Exception):
    """Others have come to the topic more often, and wait there: they ran what this rank did not have."""

    number: int


@define(eq=False)
class Exchange:
    """What all ranks that hang together with this one send in one step."""

    store: MessageStore
    mine: RankMessage
    step: int
    patience: float
    """Seconds."""
    known: dict[int, RankMessage] = field(factory=dict)
    named_by: dict[MeetingKey, RankMessage] = field(factory=dict)
    awaited: dict[int, MeetingKey] = field(factory=dict)
    """The ranks that have not sent anything yet, and a key under which they will."""
    waits: bool = False
    """Whether it has said to which number it has come."""
    cycle: tuple[frozenset[Awaited], int] = (frozenset(), 0)
    """The messages that ranks wait for in a cycle, and in how many looks on end they have been the same."""

    def run(self) -> dict[int, RankMessage]:
        """By rank. Raises :class:`Ended`."""
        self.hear(self.mine.keys)
        self._take(self.mine)
        started = looked = time.monotonic()
        since = datetime.now()
        pause, look, notice = 0.001, _LOOK, NOTICE
        while self.awaited:
            if self._read(dict(self.awaited)):
                continue
            time.sleep(pause)
            pause = min(2 * pause, 0.1 if len(self.awaited) <= _FEW else 1.0)
            now = time.monotonic()
            if now - looked < look:
                continue
            looked, look = now, _LOOK if len(self.awaited) <= _FEW else min(1.5 * look, _LONGEST)
            self._look()
            if self.awaited and now - started > self.patience:
                raise Ended(EndOfComparison.of(differences.missing(self.mine, self._reasons(now - started))))
            if self.awaited and now - started > notice:
                notice *= 2
                self._notice(since, now - started)
        self.hear(self.named_by)
        return self.known

    def hear(self, keys: Sequence[MeetingKey] | Mapping[MeetingKey, RankMessage]) -> None:
        """Raises :class:`Ended` where another rank has said that nobody is to go on."""
        end = self.store.end_of(keys, self.step)
        if end is not None:
            raise Ended(end)

    # --- reading ---

    def _read(self, ranks: dict[int, MeetingKey]) -> bool:
        """Read what these have sent, if all of them have."""
        messages = self.store.read(RankMessage, [key.message(rank, self.step) for rank, key in ranks.items()])
        for message in messages or ():
            self._take(message)
        return messages is not None and not self.awaited.keys() >= ranks.keys()

    def _take(self, message: RankMessage) -> None:
        if message is not self.mine:
            self._check_absences(message.absences)
        self.known[message.rank] = message
        self.awaited.pop(message.rank, None)
        for key, other in self.named_by.items():
            if message.rank in key.ranks and key not in message.keys:
                raise Ended(EndOfComparison.of(differences.not_shared(message, key, other)))
        for key in message.keys:
            if key in self.named_by:
                continue
            self.named_by[key] = message
            for rank in key.ranks:
                if rank not in self.known:
                    self.awaited[rank] = key
                elif key not in self.known[rank].keys:
                    raise Ended(EndOfComparison.of(differences.not_shared(self.known[rank], key, message)))

    # --- why somebody has not come ---

    def _look(self) -> None:
        """Raises where waiting on makes no sense."""
        self.hear(self.named_by)
        for rank, key in self._few():
            if rank in self.awaited:
                self._read({rank: key})
        if self.store.alone:
            awaited = tuple(Awaited(key, self.step, rank) for rank, key in self.awaited.items())
            self.store.say(RankStatus("waiting", self.mine.label, self.store.history.absences, awaited))
        for rank, _ in self._few():
            self._check_absences(self.store.status(rank).absences)
        if self.awaited and self.step == 1:
            self._look_for_others_ahead()
        if self.store.alone:
            self._look_for_cycle()

    def _few(self) -> list[tuple[int, MeetingKey]]:
        """Of the ranks that are awaited, those that are looked at one by one: at first the lowest."""
        return sorted(self.awaited.items(), key=lambda each: each[0])[:_FEW]

    def _look_for_others_ahead(self) -> None:
        """Raises :class:`BehindOthers`. Before anything is compared."""
        for key in self.mine.keys:
            if not self.waits:
                self.store.write(key.at(self.mine.rank), key.number)
            for rank in key.ranks[:_FEW]:
                number = 0 if rank == self.mine.rank else self.store.read_one(int, key.at(rank)) or 0
                if number > key.number:
                    raise BehindOthers(number)
        self.waits = True

    def _check_absences(self, absences: Sequence[Absence]) -> None:
        for absence in absences:
            if absence.id not in self.store.history.known and self.mine.misses(absence):
                raise Ended(EndOfComparison.of(differences.absent(self.mine, absence), absence=absence.id))

    def _look_for_cycle(self) -> None:
        """Whether a rank that is awaited itself waits, and in the end for this one: the same looks on end. What a rank
        waits for counts only while it is not there."""
        waiting: dict[int, RankStatus] = {}
        found = [Awaited(key, self.step, rank) for rank, key in self._few()]
        queue, closed = deque(rank for rank, _ in self._few()), False
        while queue:
            at = queue.popleft()
            if at in waiting or at == self.mine.rank:
                closed = closed or at == self.mine.rank
                continue
            status = self.store.status(at)
            wanted = [each for each in status.awaited if not self.store.has(each.key.message(each.rank, each.step))]
            if wanted:
                waiting[at] = status
            found += wanted
            queue += [each.rank for each in wanted]
        awaited = frozenset(found) if closed else frozenset[Awaited]()
        self.cycle = (awaited, self.cycle[1] + 1 if awaited == self.cycle[0] else 1)
        if closed and self.cycle[1] >= _CYCLE:
            rank = next(rank for rank, _ in self._few() if rank in waiting)
            told = differences.waiting(self.mine, self.awaited[rank], rank, waiting)
            raise Ended(EndOfComparison.of(told, keys=tuple(each.key for each in found)))

    def _reasons(self, seconds: float) -> dict[int, str]:
        """By rank that has not come, what it is seen to do."""
        found = {}
        for rank in self.awaited:
            status = self.store.status(rank)
            does = {
                "waiting": f"; it waits for other ranks, with {status.text}",
                "stopped": f"; it stopped elsewhere: {status.text}",
                "uncompared": f"; what it ran last was not compared ({status.text})",
            }
            found[rank] = f"has not come in {seconds:.0f} s{does.get(status.kind, '')}"
        return found

    def _notice(self, since: datetime, seconds: float) -> None:
        waiting = "rank %d waits for %s to compare %s: for %.0f s, since %s"
        log.warning(waiting, self.mine.rank, named(list(self.awaited)), self.mine.label, seconds, f"{since:%H:%M:%S}")
