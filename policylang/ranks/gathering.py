"""One step of a comparison: waiting until every rank that hangs together with this one has posted.

A rank reads what the members of its groups posted, and follows the groups that those name, breadth first. So all ranks
that hang together over any groups read the same, and come to the same verdict. Nobody guesses whether a rank is alive:
it is waited for as long as a collective would wait for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType

from attrs import define, field

from policylang.language.diagnostics import Diagnostic
from policylang.ranks import differences
from policylang.ranks.board import Board
from policylang.ranks.messages import Absence, End, Entry, Key, Status, named

PATIENCE = "POLICYLANG_AGREE_TIMEOUT"
NOTICE = 10.0
"""Seconds after which a rank says whom it waits for; then whenever it has waited twice as long."""
_LOOK = 0.25
"""Seconds between two looks at why a rank has not posted yet."""
_FEW = 32
"""Ranks that are looked at one by one. Where more are awaited, looks become rarer: a thousand that wait for a thousand
others would bring the store down."""
_LONGEST = 4.0
_CIRCLE = 4
"""Looks on end after which ranks that wait for each other are told so: they may be about to hear a better reason."""

log = logging.getLogger("policylang.ranks")


class Ended(Exception):
    """Another rank has ended the comparison, for all."""

    def __init__(self, end: End) -> None:
        super().__init__(end)
        self.end = end


class Failed(Exception):
    """This rank has found why nobody can go on. ``keys``: who waits there is to hear it too."""

    def __init__(
        self,
        diagnostic: Diagnostic,
        keys: Sequence[Key] = (),
        rules: Mapping[str, int] = MappingProxyType({}),
        absence: Absence | None = None,
    ) -> None:
        super().__init__(diagnostic)
        self.keys = keys
        self.end = End(0, diagnostic, 0, dict(rules), absence)


class Behind(Exception):
    """Others of this rank's have come to the topic more often, and wait for it there: they run another part of the
    program than the others did until now."""

    def __init__(self, occasion: int) -> None:
        super().__init__(occasion)
        self.occasion = occasion


@define(eq=False)
class _Circle:
    """Ranks that wait for each other."""

    rank: int
    """The one that this rank waits for."""
    key: Key
    posts: list[str]
    """What is waited for."""
    waiting: dict[int, Status] = field(factory=dict)


@define(eq=False)
class Gathering:
    """What all ranks that hang together with this one post in one step."""

    board: Board
    mine: Entry
    step: int
    patience: float
    """Seconds."""
    known: dict[int, Entry] = field(factory=dict)
    named_by: dict[Key, Entry] = field(factory=dict)
    awaited: dict[int, Key] = field(factory=dict)
    """The ranks that have not posted yet, and a key under which they will."""
    circle: tuple[frozenset[str], int] = (frozenset(), 0)
    """The posts that ranks wait for in a circle, and in how many looks on end they have been the same."""

    def run(self) -> dict[int, Entry]:
        """By rank. Raises :class:`Ended` and :class:`Failed`."""
        self._meet(self.mine)
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
            self._look_for_circle()
            if self.awaited and now - started > self.patience:
                raise Failed(differences.missing(self.mine, self._reasons(now - started)))
            if self.awaited and now - started > notice:
                notice *= 2
                self._notice(since, now - started)
        self.hear()
        return self.known

    def hear(self) -> None:
        """Raises :class:`Ended` where another rank has said that nobody is to go on."""
        end = self.board.end_of(self.named_by or self.mine.keys, self.step)
        if end is not None:
            raise Ended(end)

    # --- reading ---

    def _read(self, ranks: dict[int, Key]) -> bool:
        """Read what these have posted, if all of them have."""
        values = self.board.read([key.post(rank, self.step) for rank, key in ranks.items()])
        if values is None:
            return False
        for value in values:
            self._meet(value)
        return not self.awaited.keys() >= ranks.keys()

    def _meet(self, entry: Entry) -> None:
        if entry is not self.mine:
            self._check(entry.absences)
        self.known[entry.rank] = entry
        self.awaited.pop(entry.rank, None)
        for key, other in self.named_by.items():
            if entry.rank in key.ranks and key not in entry.keys:
                raise Failed(differences.not_shared(entry, key, other))
        for key in entry.keys:
            if key in self.named_by:
                continue
            self.named_by[key] = entry
            for rank in key.ranks:
                if rank not in self.known:
                    self.awaited[rank] = key
                elif key not in self.known[rank].keys:
                    raise Failed(differences.not_shared(self.known[rank], key, entry))

    # --- why somebody has not come ---

    def _look(self) -> None:
        """Raises where waiting on makes no sense."""
        self.hear()
        for rank, key in self._few():
            if rank in self.awaited:
                self._read({rank: key})
        posts = tuple(key.post(rank, self.step) for rank, key in self.awaited.items())
        memory = self.board.memory
        self.board.say(Status("waiting", self.mine.label, memory.absences, posts, len(memory.threads)))
        for rank, _ in self._few():
            status = self.board.status(rank)
            self._check(status.absences)
            if self.step == 1:
                self._check_occasion(status.posts)

    def _few(self) -> list[tuple[int, Key]]:
        """Of the ranks that are awaited, those that are looked at one by one: at first the lowest."""
        return sorted(self.awaited.items(), key=lambda each: each[0])[:_FEW]

    def _check_occasion(self, posts: Sequence[str]) -> None:
        own = {key.place: key for key in self.mine.keys}
        for key in map(Key.of_post, posts):
            if key.place in own and key.occasion > own[key.place].occasion:
                raise Behind(key.occasion)

    def _check(self, absences: Sequence[Absence]) -> None:
        for absence in filter(self.mine.misses, absences):
            raise Failed(differences.absent(self.mine, absence), absence=absence)

    def _look_for_circle(self) -> None:
        """Whether a rank that is awaited itself waits, and in the end for this one: the same looks on end."""
        found = next(filter(None, (self._circle_over(rank, key) for rank, key in self._few())), None)
        posts = frozenset() if found is None else frozenset(found.posts)
        self.circle = (posts, self.circle[1] + 1 if posts == self.circle[0] else 1)
        if found is not None and self.circle[1] >= _CIRCLE:
            keys = [Key.of_post(each) for each in found.posts]
            raise Failed(differences.waiting(self.mine, found.key, found.rank, found.waiting), keys)

    def _circle_over(self, rank: int, key: Key) -> _Circle | None:
        """What a rank waits for counts only while it is not there, and only where no other thread of it may come."""
        circle = _Circle(rank, key, [key.post(rank, self.step)])
        queue = deque([rank])
        while queue:
            at = queue.popleft()
            status = self.board.status(at)
            if status.kind != "waiting" or status.threads > 1 or len(self.board.memory.threads) > 1:
                continue
            circle.waiting[at] = status
            for post in status.posts:
                awaited = int(post.rpartition("/")[2])
                if awaited not in circle.waiting and not self.board.has(post):
                    circle.posts.append(post)
                    if awaited == self.mine.rank:
                        return circle
                    queue.append(awaited)
        return None

    def _reasons(self, seconds: float) -> dict[int, str]:
        """By rank that has not come, what it is seen to do."""
        found = {}
        for rank in self.awaited:
            status = self.board.status(rank)
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


def patience(usual: float) -> float:
    """How long a rank is waited for, in seconds: ``usual`` is what its process groups would."""
    try:
        return float(os.environ[PATIENCE])
    except (KeyError, ValueError):
        return usual
