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
from policylang.ranks.messages import End, Entry, Key, Left, Status, named

PATIENCE = "POLICYLANG_AGREE_TIMEOUT"
NOTICE = 10.0
"""Seconds after which a rank says whom it waits for; then whenever it has waited twice as long."""
_LOOK = 0.25
"""Seconds between two looks at why a rank has not posted yet."""

log = logging.getLogger("policylang.ranks")

_left: dict[str, Left] = {}
"""What this rank has left, and what it has heard that others have."""


def leave(about: str, reason: str, stopped: bool) -> Left:
    """Note that this rank leaves what others may compare."""
    known = _left.get(about)
    _left[about] = found = Left(about, 1 if known is None else known.times + 1, reason, stopped)
    return found


def note(left: Left | None) -> None:
    """Another rank has left it, and all know."""
    if left is not None and _is_news(left):
        _left[left.about] = left


def left_of(abouts: Sequence[str]) -> tuple[Left, ...]:
    return tuple(_left.get(about) or Left(about, 0, "", False) for about in abouts)


def _is_news(left: Left) -> bool:
    known = _left.get(left.about)
    return left.times > (0 if known is None else known.times)


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
        leaver: int | None = None,
        left: Left | None = None,
    ) -> None:
        super().__init__(diagnostic)
        self.keys = keys
        self.end = End(0, diagnostic, 0, dict(rules), leaver, left)


@define(eq=False)
class Gathering:
    """What all ranks that hang together with this one post in one step."""

    board: Board
    mine: Entry
    step: int
    patience: float
    """Seconds."""
    threads: int
    """How many of this rank's have compared anything."""
    abouts: Sequence[str]
    """What a rank may have left, as in :class:`Left`."""
    known: dict[int, Entry] = field(factory=dict)
    named_by: dict[Key, Entry] = field(factory=dict)
    awaited: dict[int, Key] = field(factory=dict)
    """The ranks that have not posted yet, and a key under which they will."""

    def run(self) -> dict[int, Entry]:
        """By rank. Raises :class:`Ended` and :class:`Failed`."""
        self._meet(self.mine)
        started = looked = time.monotonic()
        since = datetime.now()
        pause, notice = 0.001, NOTICE
        while self.awaited:
            if self._read(dict(self.awaited)):
                continue
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            now = time.monotonic()
            if now - looked < _LOOK:
                continue
            looked = now
            self._look()
            if self.awaited and now - started > self.patience:
                raise Failed(differences.missing(self.mine, self._reasons(now - started)))
            if self.awaited and now - started > notice:
                notice *= 2
                self._notice(since, now - started)
        self.hear()
        return self.known

    def hear(self) -> None:
        """Raises :class:`Ended` where another rank has said that nobody is to go on."""
        for key in self.named_by or self.mine.keys:
            end: End | None = self.board.read_one(key.end)
            if end is not None and end.ends(key, self.step):
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
        for left in entry.left:
            if left.about in self.abouts:  # a graph of other operators is a difference of its own
                self._check_left(entry.rank, left)
        theirs = {left.about: left.times for left in entry.left}
        if any(left.times > theirs.get(left.about, left.times) for left in self.mine.left):
            return  # this rank has left what the other still waits for, and will end; it comes again after that
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
        for rank, key in list(self.awaited.items()):
            if rank in self.awaited:
                self._read({rank: key})
        posts = tuple(key.post(rank, self.step) for rank, key in self.awaited.items())
        self.board.say(Status("waiting", self.mine.label, None, posts, self.threads))
        for rank in self.awaited:
            left = self.board.status(rank).left
            if left is not None and left.about in self.abouts:
                self._check_left(rank, left)
        self._look_for_circle()

    def _check_left(self, rank: int, left: Left) -> None:
        if _is_news(left):
            note(left)
            raise Failed(differences.left(self.mine, rank, left), leaver=rank, left=left)

    def _look_for_circle(self) -> None:
        """Whether a rank that is awaited itself waits, and in the end for this one.

        What a rank waits for counts only while it is not there; a rank that waits posts nothing meanwhile, so a circle
        that is seen once is there for good. Unless another thread of it may come.
        """
        me = self.mine.rank
        for rank, key in self.awaited.items():
            reached: dict[int, Status] = {}
            queue, posts = deque([rank]), {key.post(rank, self.step)}
            while queue:
                at = queue.popleft()
                status = self.board.status(at)
                if status.kind != "waiting" or status.threads > 1 or self.threads > 1:
                    continue
                reached[at] = status
                for post in status.posts:
                    awaited = int(post.rpartition("/")[2])
                    if awaited in reached or self.board.has(post):
                        continue
                    posts.add(post)
                    if awaited == me and not self.board.has(key.post(rank, self.step)):
                        keys = [Key.of_post(each) for each in posts]
                        raise Failed(differences.waiting(self.mine, key, rank, reached), keys)
                    queue.append(awaited)

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
