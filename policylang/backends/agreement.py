"""Ranks that share a graph compare their plans before anything is compiled and before a process group is made.

Each rank posts the digest of its plan in the store of the default process group: once for every set of ranks that a
group of the graph consists of, and once for the mesh if one was passed. It reads what the other ranks of these sets
posted, and follows the sets that those name, breadth first; so all ranks that hang together over any groups read the
same posts and come to the same verdict. The store is asked for keys, not for a collective: it does not matter which
backend the groups have, and a rank that never comes is noticed.

A graph without collectives is not compared: whatever its ranks decide, none of them waits for another in it.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

from attrs import define, field

from policylang import _torch_store
from policylang._torch_graph import group_ranks
from policylang.backends import divergence, heartbeat
from policylang.backends.heartbeat import Board
from policylang.backends.posts import Account, Entry, Key, account_of
from policylang.errors import PolicyDivergenceError, PolicyGraphError
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Policy
from policylang.planning.plan import Plan

PATIENCE = "POLICYLANG_AGREE_TIMEOUT"
SILENCE = "POLICYLANG_AGREE_SILENCE"
_LOOK = 1.0
"""Seconds between two looks at why a rank has not posted yet."""
_PART = 1 << 20
"""Bytes of an account in one value of the store, which takes no values of any size."""


@define(eq=False)
class _Comparison:
    active: bool
    mesh: tuple[int, ...]
    """Its ranks, sorted; empty where none was passed."""
    accounts: list[Account] = field(factory=list)


_comparison: ContextVar[_Comparison | None] = ContextVar("policylang_comparison", default=None)


@contextmanager
def comparing(agree: bool, mesh: object = None) -> Iterator[list[Account]]:
    """Within, plans are compared between ranks (they are made deep inside torch, which passes nothing on).

    Yields the accounts of the graphs that have collectives, compared or not, for whoever keeps them beside a cache.
    """
    active = agree and heartbeat.board() is not None
    comparison = _Comparison(active, () if mesh is None else _torch_store.mesh_ranks(mesh))
    token = _comparison.set(comparison)
    try:
        yield comparison.accounts
    finally:
        _comparison.reset(token)


def agree_on_plan(plan: Plan, facts: Facts, errors: Sequence[Diagnostic] = ()) -> None:
    """Return once every rank that shares the graph has the same plan. ``facts``: as collected, before any rewrite.

    ``errors`` are what this rank is about to raise: they are posted, so that the others stop too, and nobody is waited
    for. Raises ``PolicyDivergenceError`` where plans differ or ranks are missing, and ``PolicyGraphError`` where the
    mesh does not contain the graph's groups. Does nothing outside of :func:`comparing`.
    """
    comparison = _comparison.get()
    if comparison is None or not facts.groups:
        return
    account = account_of(plan, facts)
    comparison.accounts.append(account)
    problems = _outside(facts, comparison.mesh)
    sets = [group.ranks for group in facts.groups.values()]
    _compare(comparison, account, sets, plan.policy, [*errors, *problems])
    if problems:
        raise PolicyGraphError(problems)


def agree_on_accounts(accounts: Sequence[Account], policy: Policy) -> None:
    """The same for graphs that came out of a cache: their plans were recorded when they were made."""
    comparison = _comparison.get()
    if comparison is not None:
        for account in accounts:
            _compare(comparison, account, [group_ranks(name) for name in account.groups], policy, ())


_numbers: dict[tuple[int, ...], int] = {}
"""How many graphs were compared over each set of ranks. Never reset: a store may outlive a process group."""


def _compare(
    comparison: _Comparison,
    account: Account,
    sets: Sequence[tuple[int, ...]],
    policy: Policy,
    errors: Sequence[Diagnostic],
) -> None:
    board = heartbeat.board() if comparison.active else None
    keys = _keys(board.rank, [*sets, comparison.mesh]) if board is not None else ()
    if board is None or not keys:
        return
    mine = Entry(board.rank, account.digest, keys, account.label, errors[0].message if errors else "")
    try:
        board.write(
            _waiting(board.rank), ""
        )  # a wait that failed stays on the board, for the others of a circle to see
        for key in keys:
            board.write(key.post(board.rank), mine.to_json())
        if errors:
            return
        gathering = _Gathering(board, mine)
        try:
            entries = gathering.run()
        except PolicyDivergenceError as error:
            origin = gathering.stopped or (board.rank, error.diagnostics[0].message)
            for key in keys:
                board.write(_failed(key), json.dumps(origin))
            raise
        if len({entry.digest for entry in entries.values()}) > 1:
            raise divergence.differing(mine, entries, _accounts(board, account, entries), policy)
    except RuntimeError as failure:  # torch's own errors of a store
        raise divergence.store_gone(failure) from failure


def _keys(rank: int, sets: Sequence[tuple[int, ...]]) -> tuple[Key, ...]:
    """One for each distinct set of several ranks that this rank is in, counted up."""
    found: list[Key] = []
    for ranks in sorted({tuple(sorted(each)) for each in sets if len(each) > 1 and rank in each}):
        number = _numbers.get(ranks, 0)
        _numbers[ranks] = number + 1
        found.append(Key(ranks, number))
    return tuple(found)


def _outside(facts: Facts, mesh: tuple[int, ...]) -> list[Diagnostic]:
    if not mesh:
        return []
    inside = frozenset(mesh)
    groups = (group for group in facts.groups.values() if not inside.issuperset(group.ranks))
    return [divergence.outside_mesh(group.name, group.ranks, mesh) for group in groups]


@define(eq=False)
class _Gathering:
    """The posts of all ranks that hang together with this one."""

    board: Board
    mine: Entry
    known: dict[int, Entry] = field(factory=dict)
    named_by: dict[Key, Entry] = field(factory=dict)
    awaited: dict[Key, list[int]] = field(factory=dict)
    watches: dict[int, _Watch] = field(factory=dict)
    started: float = field(factory=time.monotonic)
    stopped: tuple[int, str] | None = None
    """The rank that stopped first, and its error."""

    def run(self) -> dict[int, Entry]:
        self._meet(self.mine)
        pause, looked, waits = 0.002, time.monotonic(), False
        while self.awaited:
            came = [key for key, ranks in self.awaited.items() if self.board.has([key.post(rank) for rank in ranks])]
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
            self.board.write(_waiting(self.mine.rank), "")
        return self.known

    def _read(self, key: Key, ranks: Sequence[int]) -> None:
        for value in self.board.read([key.post(rank) for rank in ranks if rank not in self.known]):
            self._meet(Entry.from_json(value))

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
            told = self.board.read_if_there(_failed(key))
            if told:
                self._stop(*json.loads(told))
        for key, ranks in list(self.awaited.items()):
            for rank in ranks:
                if rank not in self.known and self.board.has([key.post(rank)]):
                    self._read(key, [rank])
            left = [rank for rank in ranks if rank not in self.known]
            if left:
                self.awaited[key] = left
            else:
                del self.awaited[key]
        posts = [key.post(rank) for key, ranks in self.awaited.items() for rank in ranks]
        self.board.write(_waiting(self.mine.rank), json.dumps([self.mine.label, posts]))
        for key, ranks in self.awaited.items():
            self._look_for_life(key, ranks)
            self._look_for_circle(key, ranks)

    def _look_for_life(self, key: Key, missing: list[int]) -> None:
        now = time.monotonic()
        patience, silence = _seconds(PATIENCE, 600.0), _seconds(SILENCE, 20.0)
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
                told = self.board.read_if_there(_waiting(at))
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


def _failed(key: Key) -> str:
    """Where a rank says that it stops without a verdict: the others wait for one that it could not come to."""
    return f"{key.post(-1)}/failed"


def _waiting(rank: int) -> str:
    return f"waiting/{rank}"


def _described(rank: int, board: Board) -> str:
    told = board.read_if_there(_waiting(rank))
    return f"rank {rank} has {json.loads(told)[0]}" if told else f"rank {rank} has gone on since"


def _accounts(board: Board, mine: Account, entries: dict[int, Entry]) -> dict[int, bytes]:
    """Of the lowest rank, and of the lowest that differs from it: the same two on every rank."""
    first = min(entries)
    second = min(rank for rank, entry in entries.items() if entry.digest != entries[first].digest)
    found: dict[int, bytes] = {}
    for rank in (first, second):
        if rank == board.rank:
            found[rank] = mine.pack()
            _write_parts(board, _account(entries[rank]), found[rank])
    for rank in (first, second):
        content = found.get(rank) or _read_parts(board, _account(entries[rank]), _seconds(SILENCE, 20.0))
        if content is not None:
            found[rank] = content
    return found


def _account(entry: Entry) -> str:
    return f"account/{entry.keys[0].post(entry.rank)}"


def _write_parts(board: Board, place: str, content: bytes) -> None:
    parts = [content[at : at + _PART] for at in range(0, len(content), _PART)]
    for number, part in enumerate(parts):
        board.write(f"{place}/{number}", part)
    board.write(place, str(len(parts)))


def _read_parts(board: Board, place: str, seconds: float) -> bytes | None:
    """None where it does not come: its rank has gone, and is not worth more time than that."""
    end = time.monotonic() + seconds
    while not board.has([place]):
        if time.monotonic() > end:
            return None
        time.sleep(0.05)
    count = int(board.read([place])[0])
    return b"".join(board.read([f"{place}/{number}" for number in range(count)]))


def _seconds(variable: str, usual: float) -> float:
    try:
        return float(os.environ[variable])
    except (KeyError, ValueError):
        return usual
