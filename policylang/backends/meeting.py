"""The ranks that share one graph, while they settle what they rewrite in it and compare their plans for it.

In rounds: each rank posts the digest of what it offers, and only where digests differ one rank of each kind posts what
is in it. A rank that has nothing to rewrite, or has the graph from a cache with what was settled when it was made, does
not wait: it says that it posts no more rounds, and the others go by its last one.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from attrs import define, field

from policylang.backends import divergence
from policylang.backends.gathering import SILENCE, Gathering, failed, read_parts, seconds, waiting, write_parts
from policylang.backends.heartbeat import Board
from policylang.backends.posts import PLAN, Account, Entry, Key, Round
from policylang.errors import PolicyDivergenceError
from policylang.language.syntax import Policy
from policylang.planning.rewrites.offers import Offer, compared

_numbers: dict[tuple[int, ...], int] = {}
"""How many graphs were compared over each set of ranks. Never reset: a store may outlive a process group."""


def keys_of(rank: int, sets: Sequence[tuple[int, ...]]) -> tuple[Key, ...]:
    """One for each distinct set of several ranks that this rank is in, counted up."""
    found: list[Key] = []
    for ranks in sorted({tuple(sorted(each)) for each in sets if len(each) > 1 and rank in each}):
        number = _numbers.get(ranks, 0)
        _numbers[ranks] = number + 1
        found.append(Key(ranks, number))
    return tuple(found)


@define(eq=False)
class Meeting:
    """One graph, as this rank meets the others over it."""

    board: Board
    keys: tuple[Key, ...]
    label: str
    """For people: what is compared, ``a joint graph of 812 nodes``."""
    rounds: list[Round] = field(factory=list)
    """What this rank has offered, for whoever keeps it beside a cache."""
    gone_on: dict[int, Entry] = field(factory=dict)
    """The last posts of ranks that post no more rounds."""
    is_closed: bool = False
    _origin: tuple[int, str] | None = None
    """The rank that stopped first, and its error."""

    def settle(self, session: str, offers: Sequence[Offer]) -> Mapping[str, str]:
        """One round: what not all ranks offer alike (see :class:`Ranks`). ``session``: which graph of those that are
        made of this one.

        Raises ``PolicyDivergenceError`` where a rank is missing, or one that posts no more has something settled that
        this rank cannot offer.
        """
        self.rounds.append(Round(session, tuple(offers)))
        with self._telling():
            entries = self._exchanged()
            first: dict[str, int] = {}
            for rank in sorted(entries):
                first.setdefault(entries[rank].digest, rank)
            if len(first) == 1:
                return {}
            contents = {digest: self._offers(rank, entries[rank]) for digest, rank in first.items()}
            by_offers: dict[tuple[Offer, ...], list[int]] = {}
            for rank, entry in entries.items():
                by_offers.setdefault(contents[entry.digest], []).append(rank)
            found = compared(by_offers)
            for rank in sorted(rank for rank, entry in entries.items() if entry.closed):
                lost = [offer.name for offer in contents[entries[rank].digest] if offer.name in found]
                if lost:
                    raise divergence.settled_before(rank, lost[0], found[lost[0]])
            return found

    def close(self, rounds: Sequence[Round] = ()) -> None:
        """Post all rounds there will be, without waiting for anybody."""
        if self.is_closed or self.rounds:
            return
        self.is_closed = True
        rounds = rounds or (Round("", ()),)
        following = [each.session for each in rounds[1:]]
        for stage, (each, session) in enumerate(zip(rounds, [*following, None], strict=True), 1):
            self._publish(stage, each)
            self._post(stage, each, len(rounds), closed=session != each.session)

    def agree(self, account: Account, policy: Policy, error: str = "") -> None:
        """Compare plans. With an ``error``, only say so."""
        self.close()
        mine = Entry(self.board.rank, account.digest, self.keys, account.label, error)
        self._write(mine, PLAN)
        if error:
            return
        with self._telling():
            entries = self._gathered(Gathering(self.board, mine))
        if len({entry.digest for entry in entries.values()}) > 1:
            raise divergence.differing(mine, entries, self._accounts(account, entries), policy)

    def refuse(self, message: str) -> None:
        """Say instead of any round that this rank has an error of its own."""
        self.is_closed = True
        for stage in (1, PLAN):
            self._write(Entry(self.board.rank, "", self.keys, self.label, message), stage)

    def fail(self, message: str) -> None:
        """Say that this rank goes no further, to whoever waits for it."""
        with suppress(RuntimeError):  # of a store that is gone, and with it all who could read
            for key in self.keys:
                self.board.write(failed(key), json.dumps((self.board.rank, message)))

    # --- posts ---

    def _accounts(self, mine: Account, entries: Mapping[int, Entry]) -> dict[int, bytes]:
        """Of the lowest rank, and of the lowest that differs from it: the same two on every rank."""
        first = min(entries)
        second = min(rank for rank, entry in entries.items() if entry.digest != entries[first].digest)
        found: dict[int, bytes] = {}
        for rank in (first, second):
            if rank == self.board.rank:
                found[rank] = mine.pack()
                write_parts(self.board, _account(entries[rank]), found[rank])
        for rank in (first, second):
            content = found.get(rank) or self._read(_account(entries[rank]))
            if content is not None:
                found[rank] = content
        return found

    def _exchanged(self) -> dict[int, Entry]:
        stage = len(self.rounds)
        mine = self._post(stage, self.rounds[-1])
        entries = self._gathered(Gathering(self.board, mine, stage, tuple(self.gone_on.values())))
        self.gone_on = {rank: entry for rank, entry in entries.items() if 0 < entry.rounds <= stage}
        first = {entry.digest: rank for rank, entry in sorted(entries.items(), reverse=True)}
        if len(first) > 1 and first[mine.digest] == mine.rank:
            self._publish(stage, self.rounds[-1])
        return entries

    def _post(self, stage: int, offered: Round, rounds: int = 0, closed: bool = False) -> Entry:
        digest = hashlib.sha256(offered.pack()).hexdigest()
        entry = Entry(self.board.rank, digest, self.keys, self.label, rounds=rounds, closed=closed)
        self._write(entry, stage)
        return entry

    def _write(self, entry: Entry, stage: int) -> None:
        with self._store():
            # a wait that failed stays on the board, for the others of a circle to see
            self.board.write(waiting(self.board.rank), "")
            for key in self.keys:
                self.board.write(key.post(self.board.rank, stage), entry.to_json())

    def _publish(self, stage: int, offered: Round) -> None:
        with self._store():
            write_parts(self.board, self._place(self.board.rank, self.keys, stage), zlib.compress(offered.pack(), 1))

    def _offers(self, rank: int, entry: Entry) -> tuple[Offer, ...]:
        stage = min(len(self.rounds), entry.rounds or len(self.rounds))
        if rank == self.board.rank:
            return self.rounds[-1].offers
        content = self._read(self._place(rank, entry.keys, stage))
        if content is None:
            raise divergence.missing(entry.keys[0], {rank: "has posted what it offers, and not what is in it"})
        return Round.unpack(zlib.decompress(content)).offers

    def _place(self, rank: int, keys: Sequence[Key], stage: int) -> str:
        return f"offers/{keys[0].post(rank, stage)}"

    def _gathered(self, gathering: Gathering) -> dict[int, Entry]:
        try:
            with self._store():
                return gathering.run()
        except PolicyDivergenceError as error:
            self._origin = gathering.stopped or (self.board.rank, error.diagnostics[0].message)
            raise

    def _read(self, place: str) -> bytes | None:
        with self._store():
            return read_parts(self.board, place, seconds(SILENCE, 20.0))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Within, a rank that stops without a verdict says so: others may wait for one that it could not come to."""
        try:
            yield
        except PolicyDivergenceError as error:
            origin = self._origin or (self.board.rank, error.diagnostics[0].message)
            with self._store():
                for key in self.keys:
                    self.board.write(failed(key), json.dumps(origin))
            raise

    @contextmanager
    def _store(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as failure:  # torch's own errors of a store
            raise divergence.store_gone(failure) from failure


def _account(entry: Entry) -> str:
    return f"account/{entry.keys[0].post(entry.rank)}"
