"""The ranks that share one graph, while they compare step by step what they are about to do with it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from attrs import define, evolve, field

from policylang.errors import PolicyDivergenceError
from policylang.language.syntax import Policy
from policylang.planning.edits.offers import Offer, compared
from policylang.ranks import differences
from policylang.ranks.accounts import SETTINGS, Round, Stage, policy_digest
from policylang.ranks.board import Board
from policylang.ranks.gathering import Behind, Ended, Failed, Gathering
from policylang.ranks.memory import Posted
from policylang.ranks.messages import End, Entry, Key, Status, Topic

_REPLY = 20.0
"""Seconds that a rank is waited for which has posted, and is to say what is behind it."""

ALONE = "alone"


def abouts_of(topic: Topic, operators: str) -> tuple[str, str, str]:
    """What a rank is absent from where it stops, where it does not compare a graph of these operators, and where it
    stops in the middle of what all run."""
    return topic.address, f"{topic.address}/{operators[:12]}", ALONE


def _is_before(occasion: int, end: End) -> bool:
    return end.occasion < occasion


@define(eq=False)
class Meeting:
    """One graph, as this rank meets the others over it.

    Every method raises ``PolicyDivergenceError`` where the ranks differ or one does not come: the same on all of them.
    """

    board: Board
    topic: Topic
    sets: Sequence[tuple[int, ...]]
    """The ranks of each of the graph's groups."""
    operators: str
    """The digest of the graph's."""
    label: str
    """For people: what is compared, ``a joint graph of 812 nodes, compiling forward (model.py:12)``."""
    policy: Policy
    patience: float
    alike: bool = True
    """Whether all have the same policy. Otherwise they rewrite nothing together, and their plans will differ."""
    keys: tuple[Key, ...] = ()
    _digest: str = ""
    _step: int = 0
    _taken: int = 0
    """How many steps are behind it."""
    _entries: dict[int, Entry] = field(factory=dict)
    """The last that were read."""
    _reached: dict[Key, Entry] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self._digest = policy_digest(self.policy)
        self._enter()

    def _enter(self, at_least: int = 0) -> None:
        times = self.board.memory.enter(self.topic, at_least)
        sets = sorted({tuple(sorted(each)) for each in self.sets})
        self.keys = tuple(Key(ranks, self.topic.address, times) for ranks in sets)
        self.board.memory.open.append(self.keys)

    def leave(self) -> None:
        self.board.memory.open.remove(self.keys)

    # --- what is compared ---

    def compare(self, stage: Stage) -> None:
        """Return once every rank has posted the same."""
        entries = self._exchange(stage)
        if stage.name == SETTINGS:
            self.alike = len({entry.policy for entry in entries.values()}) == 1
        pair = differences.first_pair(entries)
        if pair is not None:
            self._confront(stage, *pair)

    def settle(self, offered: Round) -> Mapping[str, str]:
        """One round: what not all ranks offer alike (see :class:`Ranks`)."""
        stage = offered.stage
        entries = self._exchange(stage)
        self._check_stages(entries)
        first: dict[str, int] = {}
        for rank in sorted(entries):
            first.setdefault(entries[rank].digest, rank)
        if len(first) == 1:
            return {}
        if first[stage.digest] == self.board.rank:
            self._publish(offered.offers)
        contents: dict[str, tuple[Offer, ...]] = {stage.digest: offered.offers}
        for digest, rank in first.items():
            if digest not in contents:
                contents[digest] = self._content(rank)
        by_offers: dict[tuple[Offer, ...], list[int]] = {}
        for rank, entry in entries.items():
            by_offers.setdefault(contents[entry.digest], []).append(rank)
        return compared(by_offers)

    def end(self, end: End, keys: Sequence[Key] = ()) -> End:
        """Say that nobody is to go on, to all who wait or will: the first to say so is believed."""
        standing: End | None = None
        concerned = sorted({*self.keys, *self._reached, *keys}, key=lambda key: (key.place, key.occasion))
        end = evolve(end, keys=tuple(concerned))
        for key in concerned:
            said = evolve(standing or end, occasion=key.occasion, steps=self._taken)
            there = self.board.replace(key.end, partial(_is_before, key.occasion), said)
            standing = standing or there
        found = standing or end
        self.board.memory.note(found.absence)
        for key in found.keys:
            if self.board.rank in key.ranks:
                self.board.memory.catch_up(key.topic, key.occasion)
        return found

    # --- steps ---

    def _exchange(self, stage: Stage) -> dict[int, Entry]:
        while True:
            try:
                return self._exchange_once(stage)
            except Behind as behind:  # before anything was compared
                self.leave()
                self._enter(behind.occasion)
                self._step = 0

    def _exchange_once(self, stage: Stage) -> dict[int, Entry]:
        self._step += 1
        abouts = abouts_of(self.topic, self.operators)
        memory = self.board.memory
        elsewhere = tuple(key.place for keys in memory.open if keys is not self.keys for key in keys)
        mine = Entry(
            self.board.rank,
            stage.name,
            stage.digest,
            self.keys,
            self.label,
            self._digest,
            stage.shares,
            elsewhere,
            abouts,
            memory.absences,
            memory.last_heard(),
        )
        one = Gathering(self.board, mine, self._step, self.patience)
        with self._telling(), self._store():
            posts = [key.post(self.board.rank, self._step) for key in self.keys]
            for post in posts:
                self.board.write(post, mine)
            try:
                one.hear()
                self._entries = one.run()
            finally:
                self._reached = one.named_by
                self._keep(posts, frozenset(one.known))
            self._taken = self._step
            self._clean_up()
            self._say_nothing()
        return self._entries

    def _confront(self, stage: Stage, first: int, second: int) -> None:
        """Two ranks differ: the second publishes what is behind its digest, the first says for all how they differ."""
        mine = self.board.rank
        with self._telling(), self._store():
            if mine == second:
                self._publish(stage.content())
            if mine == first:
                theirs = self._content(second)
                contents = {first: stage.content(), second: theirs}
                found, rules = differences.between(stage.name, self._entries, contents)
                raise Failed(found, rules=rules)
            deadline = time.monotonic() + self.patience
            while time.monotonic() < deadline:
                end = self.board.end_of(self.keys, math.inf)
                if end is not None:
                    raise Ended(end)
                time.sleep(0.02)
            raise Failed(differences.missing(self._entries[mine], {first: "differs, and has not said how"}))

    def _check_stages(self, entries: Mapping[int, Entry]) -> None:
        """A rank whose graph is from a cache may have settled other rewrites than are settled now, or none."""
        mine = entries[self.board.rank]
        for rank, entry in sorted(entries.items()):
            if entry.stage != mine.stage:
                with self._telling():
                    raise Failed(differences.out_of_step(mine, rank, entry))

    # --- what is behind a digest ---

    def _publish(self, content: Any) -> None:
        with self._store():
            place = self._place(self._entries[self.board.rank])
            self._keep(self.board.write_parts(place, content), frozenset(self._entries))

    def _content(self, rank: int) -> Any:
        with self._telling(), self._store():
            end = time.monotonic() + min(_REPLY, self.patience)
            while time.monotonic() < end:
                content = self.board.read_parts(self._place(self._entries[rank]))
                if content is not None:
                    return content
                time.sleep(0.01)
            why = {rank: "has posted a digest, and not what is behind it"}
            raise Failed(differences.missing(self._entries[self.board.rank], why))

    def _place(self, entry: Entry) -> str:
        return f"{entry.keys[0].post(entry.rank, self._step)}/content"

    # --- the store ---

    def _keep(self, posts: list[str], readers: frozenset[int]) -> None:
        self.board.memory.posted.append(Posted(readers, frozenset(key.place for key in self.keys), posts))

    def _clean_up(self) -> None:
        """Take away what nobody reads any more: whoever has posted in a later step has left those before, but for
        comparisons that other threads are in."""
        memory, come = self.board.memory, self._entries.keys()
        still = {place for entry in self._entries.values() for place in entry.elsewhere}
        still |= {key.place for keys in memory.open if keys is not self.keys for key in keys}
        still -= {key.place for key in self.keys}
        now = {key.post(self.board.rank, self._step) for key in self.keys}
        for each in list(memory.posted):
            if each.readers <= come and not each.places & still and now.isdisjoint(each.keys):
                memory.posted.remove(each)
                self.board.remove(each.keys)

    def _say_nothing(self) -> None:
        if self.board.said.kind:
            self.board.say(Status(absences=self.board.memory.absences))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Within, a rank that finds why nobody can go on says so to the others, and all raise the same."""
        try:
            yield
        except Failed as failed:
            end = self.end(failed.end, failed.keys)
        except Ended as ended:  # over one of the groups: those of the others are to hear it too
            end = self.end(ended.end)
        else:
            return
        with self._store():
            self._say_nothing()
        rule = end.rules.get(self._digest)
        span = self.policy.rules[rule].span if rule is not None else None
        raise PolicyDivergenceError([evolve(end.diagnostic, span=span)]) from None

    @contextmanager
    def _store(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as failure:  # torch's own errors of a store
            raise PolicyDivergenceError([differences.store_gone(failure)]) from failure
