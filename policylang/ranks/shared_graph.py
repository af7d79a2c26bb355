"""Compares one graph, step by step, with the other ranks that share it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from attrs import define, evolve, field

from policylang.errors import PolicyDivergenceError
from policylang.language.syntax import Policy
from policylang.planning.edits.offers import Offer, compared
from policylang.ranks import differences
from policylang.ranks.exchange import BehindOthers, CannotGoOn, EndedByOther, Exchange
from policylang.ranks.message_store import MessageStore, SentMessages
from policylang.ranks.messages import EndOfComparison, RankKey, RankMessage, RankStatus, address_of
from policylang.ranks.rank_account import SETTINGS, ComparedStage, OfferRound, policy_digest

_REPLY = 20.0
"""Seconds that a rank is waited for which has sent a digest, and is to say what is behind it."""

ALONE = "alone"


def abouts_of(topic: str, operators: str) -> tuple[str, str, str]:
    """What a rank is absent from where it stops, where it does not compare a graph of these operators, and where it
    stops in the middle of what all run."""
    address = address_of(topic)
    return address, f"{address}/{operators[:12]}", ALONE


def _is_before(occasion: int, end: EndOfComparison) -> bool:
    return end.occasion < occasion


@define(eq=False)
class SharedGraph:
    """One graph, as this rank compares it with the others.

    Every method raises ``PolicyDivergenceError`` where the ranks differ or one does not come: the same on all of them.
    """

    store: MessageStore
    topic: str
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
    keys: tuple[RankKey, ...] = ()
    _digest: str = ""
    _step: int = 0
    _taken: int = 0
    """How many steps are behind it."""
    _messages: dict[int, RankMessage] = field(factory=dict)
    """The last that were read."""
    _reached: dict[RankKey, RankMessage] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self._digest = policy_digest(self.policy)
        self._enter()

    def _enter(self, at_least: int = 0) -> None:
        address = address_of(self.topic)
        times = self.store.history.enter(address, at_least)
        self.keys = tuple(
            RankKey(ranks, address, times) for ranks in sorted({tuple(sorted(each)) for each in self.sets})
        )
        self.store.history.open.append(self.keys)

    def leave(self) -> None:
        self.store.history.open.remove(self.keys)

    # --- what is compared ---

    def compare(self, stage: ComparedStage) -> None:
        """Return once every rank has sent the same."""
        messages = self._exchange(stage)
        if stage.name == SETTINGS:
            self.alike = len({message.policy for message in messages.values()}) == 1
        pair = differences.first_pair(messages)
        if pair is not None:
            self._confront(stage, *pair)

    def settle(self, offered: OfferRound) -> Mapping[str, str]:
        """One round: what not all ranks offer alike (see :class:`Ranks`)."""
        stage = offered.stage
        messages = self._exchange(stage)
        self._check_stages(messages)
        first: dict[str, int] = {}
        for rank in sorted(messages):
            first.setdefault(messages[rank].digest, rank)
        if len(first) == 1:
            return {}
        if first[stage.digest] == self.store.rank:
            self._publish(offered.offers)
        contents: dict[str, tuple[Offer, ...]] = {
            digest: offered.offers if digest == stage.digest else self._content(rank) for digest, rank in first.items()
        }
        by_offers: dict[tuple[Offer, ...], list[int]] = {}
        for rank, message in messages.items():
            by_offers.setdefault(contents[message.digest], []).append(rank)
        return compared(by_offers)

    def end(self, end: EndOfComparison, keys: Sequence[RankKey] = ()) -> EndOfComparison:
        """Say that nobody is to go on, to all who wait or will: the first to say so is believed."""
        standing: EndOfComparison | None = None
        concerned = sorted({*self.keys, *self._reached, *keys}, key=lambda key: (key.place, key.occasion))
        end = evolve(end, keys=tuple(concerned))
        for key in concerned:
            said = evolve(standing or end, occasion=key.occasion, steps=self._taken)
            there = self.store.replace(key.end, partial(_is_before, key.occasion), said)
            standing = standing or there
        found = standing or end
        self.store.history.hear(found.absence)
        for key in found.keys:
            if self.store.rank in key.ranks:
                self.store.history.catch_up(key.topic, key.occasion)
        return found

    # --- steps ---

    def _exchange(self, stage: ComparedStage) -> dict[int, RankMessage]:
        while True:
            try:
                return self._exchange_once(stage)
            except BehindOthers as behind:  # before anything was compared
                self.leave()
                self._enter(behind.occasion)
                self._step = 0

    def _exchange_once(self, stage: ComparedStage) -> dict[int, RankMessage]:
        self._step += 1
        history = self.store.history
        mine = RankMessage(
            self.store.rank,
            stage.name,
            stage.digest,
            self.keys,
            self.label,
            self._digest,
            stage.by_group,
            tuple(self._other_places()),
            abouts_of(self.topic, self.operators),
            history.absences,
            history.last_heard(),
        )
        one = Exchange(self.store, mine, self._step, self.patience)
        with self._telling():
            sent = [key.message(self.store.rank, self._step) for key in self.keys]
            for key in sent:
                self.store.write(key, mine)
            try:
                one.hear()
                self._messages = one.run()
            finally:
                self._reached = one.named_by
                self._keep(sent, frozenset(one.known))
            self._taken = self._step
            self._clean_up()
            self._say_nothing()
        return self._messages

    def _confront(self, stage: ComparedStage, first: int, second: int) -> None:
        """Two ranks differ: the second publishes what is behind its digest, the first says for all how they differ."""
        mine = self.store.rank
        with self._telling():
            if mine == second:
                self._publish(stage.content())
            if mine == first:
                contents = {first: stage.content(), second: self._content(second)}
                found, rules = differences.between(stage.name, self._messages, contents)
                raise CannotGoOn(found, rules=rules)
            end = self._poll(lambda: self.store.end_of(self.keys, math.inf), self.patience, 0.02)
            if end is not None:
                raise EndedByOther(end)
            raise CannotGoOn(differences.missing(self._messages[mine], {first: "differs, and has not said how"}))

    def _check_stages(self, messages: Mapping[int, RankMessage]) -> None:
        """A rank whose graph is from a cache may have settled other rewrites than are settled now, or none."""
        mine = messages[self.store.rank]
        for rank, message in sorted(messages.items()):
            if message.stage != mine.stage:
                with self._telling():
                    raise CannotGoOn(differences.out_of_step(mine, rank, message))

    # --- what is behind a digest ---

    def _publish(self, content: Any) -> None:
        with self._reachable():
            place = self._place(self._messages[self.store.rank])
            self._keep(self.store.write_parts(place, content), frozenset(self._messages))

    def _content(self, rank: int) -> Any:
        with self._telling():
            place = self._place(self._messages[rank])
            found = self._poll(lambda: self.store.read_parts(place), min(_REPLY, self.patience), 0.01)
            if found is None:
                why = {rank: "has posted a digest, and not what is behind it"}
                raise CannotGoOn(differences.missing(self._messages[self.store.rank], why))
            return found

    def _poll(self, look: Callable[[], Any], seconds: float, pause: float) -> Any:
        """What is found when it is there; None where it does not come in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = look()
            if found is not None:
                return found
            time.sleep(pause)
        return None

    def _place(self, message: RankMessage) -> str:
        return f"{message.keys[0].message(message.rank, self._step)}/content"

    # --- the store ---

    def _keep(self, sent: list[str], readers: frozenset[int]) -> None:
        self.store.history.sent.append(SentMessages(readers, frozenset(key.place for key in self.keys), sent))

    def _other_places(self) -> Iterator[str]:
        """The places of comparisons that other threads of this rank are in."""
        return (key.place for keys in self.store.history.open if keys is not self.keys for key in keys)

    def _clean_up(self) -> None:
        """Take away what nobody reads any more: whoever has sent a message in a later step has left those before, but
        for comparisons that other threads are in."""
        history, come = self.store.history, self._messages.keys()
        still = {place for message in self._messages.values() for place in message.elsewhere}
        still = still.union(self._other_places()).difference(key.place for key in self.keys)
        now = {key.message(self.store.rank, self._step) for key in self.keys}
        for each in list(history.sent):
            if each.readers <= come and not each.places & still and now.isdisjoint(each.keys):
                history.sent.remove(each)
                self.store.remove(each.keys)

    def _say_nothing(self) -> None:
        if self.store.said.kind:
            self.store.say(RankStatus(absences=self.store.history.absences))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Within, a rank that finds why nobody can go on says so to the others, and all raise the same."""
        with self._reachable():
            try:
                yield
                return
            except CannotGoOn as failed:
                end = self.end(EndOfComparison(failed.diagnostic, failed.rules, failed.absence), failed.keys)
            except EndedByOther as ended:  # over one of the groups: those of the others are to hear it too
                end = self.end(ended.end)
            self._say_nothing()
        rule = end.rules.get(self._digest)
        span = self.policy.rules[rule].span if rule is not None else None
        raise PolicyDivergenceError([evolve(end.diagnostic, span=span)]) from None

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Within, an error of the store itself says that the process that held it has ended."""
        try:
            yield
        except RuntimeError as failure:  # torch's own errors of a store
            raise PolicyDivergenceError([differences.store_gone(failure)]) from failure
