"""Compares one graph, step by step, with the other ranks that share it. This is the protocol.

**Where ranks meet.** A rank that is about to plan a graph comes to one place for each process group of the graph. A
place is named by the topic (the code that is compiled, ``apply``, the block) and by the group: the name that c10d gives
it, which is the same on all members, and its ranks. Nothing of the graph is in the name, so ranks whose graphs differ
meet, and are told so. Two models with groups of their own never meet, in whatever order threads run them. A meeting has
a number: how often the rank's thread has come to the topic. Ranks that run one program count alike. Where one has run
what others did not have, or threads take turns, one of them is ahead: a rank that waits says its number, and who reads
a higher one at its own place goes there.

**A step.** A rank writes one message under each of its keys (place and number) and reads those of the members of its
groups; messages name the keys of who sent them, and the ranks of these are read too. All that hang together over any
groups read the same messages, and come to the same verdict without a further word: they are alike, or two ranks differ.
Of two that differ, the second writes what is behind its digest, and the first reads it and tells all what the
difference is. A step over, a rank takes away its messages of the step before. The last of all ranks that leaves a
meeting takes away the rest.

**An end.** Whoever finds why nobody can go on writes it under every key that it concerns; of several, the first is
believed. Whoever reads it writes it under the keys that it knows of, too, and raises. It stays, so that a rank that
comes late is told.

**An absence.** A rank that stops before it knows its groups, or does not compare, counts that as having come, and says
so beside its status, with the topic and the number. A rank that waits for it under this number, or reads a later
message of it, ends its meeting with that.

**Waiting.** A rank is waited for as long as its process groups would wait for it. A rank that waits says for what,
unless other threads of it may come meanwhile; ranks that wait for each other over different graphs are told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from attrs import define, evolve, field

from policylang.errors import PolicyDivergenceError
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Policy
from policylang.planning.edits.other_ranks import Proposal, compared
from policylang.ranks import differences
from policylang.ranks.exchange import BehindOthers, Ended, Exchange
from policylang.ranks.message_store import MessageStore, StoreFailure
from policylang.ranks.messages import EndOfComparison, MeetingKey, RankMessage, RankStatus, address_of
from policylang.ranks.rank_account import SETTINGS, ComparedStage, StageContent, policy_digest

_REPLY = 20.0
"""Seconds that a rank is waited for which has sent a digest, and is to say what is behind it."""
_T = TypeVar("_T")


@define(eq=False)
class Meeting:
    """One graph, as this rank compares it with the others.

    Every method raises ``PolicyDivergenceError`` where the ranks differ or one does not come: the same on all of them.
    """

    store: MessageStore
    topic: str
    groups: Mapping[str, Sequence[int]]
    """The ranks of each of the graph's groups."""
    operators: str
    """The digest of the graph's."""
    label: str
    """For people: what is compared, ``a joint graph of 812 nodes, compiling forward (model.py:12)``."""
    policy: Policy
    patience: float
    alike: bool = True
    """Whether all have the same policy. Otherwise they rewrite nothing together, and their plans will differ."""
    keys: tuple[MeetingKey, ...] = ()
    _step: int = 0
    _taken: int = 0
    """How many steps are behind it."""
    _messages: dict[int, RankMessage] = field(factory=dict)
    """The last that were read."""
    _reached: dict[MeetingKey, RankMessage] = field(factory=dict)
    _sent: list[str] = field(factory=list)
    """In this step."""

    def __attrs_post_init__(self) -> None:
        with self._telling():
            self._come()

    def _come(self, at_least: int = 0) -> None:
        topic, history = address_of(self.topic), self.store.history
        found = [MeetingKey(topic, group, tuple(sorted(ranks)), 0) for group, ranks in self.groups.items()]
        places = {key.place: key for key in found}
        number = history.come_to(topic, max(at_least, *(history.numbers.get(place, 0) + 1 for place in places)))
        history.numbers.update(dict.fromkeys(places, number))
        self.keys = tuple(evolve(places[place], number=number) for place in sorted(places))

    def leave(self) -> None:
        """This rank goes on. The last to do so takes away the messages of the last step."""
        if not self._messages:
            return
        with self._telling():
            root = min(self._reached, key=lambda key: (key.place, key.number))
            if self.store.count(root.done) == len(self._messages):
                messages = self._messages.values()
                self.store.remove(key.message(each.rank, self._step) for each in messages for key in each.keys)
                self.store.remove([root.done])

    # --- what is compared ---

    def compare(self, stage: ComparedStage) -> None:
        """Return once every rank has sent the same."""
        messages = self._exchange(stage)
        if stage.name == SETTINGS:
            self.alike = len({message.policy for message in messages.values()}) == 1
        pair = differences.first_pair(messages)
        if pair is not None:
            self._confront(stage, *pair)

    def settle(self, stage: ComparedStage) -> Mapping[str, str]:
        """One round: what not all ranks offer alike (see :class:`Ranks`)."""
        messages = self._exchange(stage)
        self._check_stages(messages)
        first: dict[str, int] = {}
        for rank in sorted(messages):
            first.setdefault(messages[rank].digest, rank)
        if len(first) == 1:
            return {}
        own = stage.content()
        if first[stage.digest] == self.store.rank:
            self._publish(own)
        contents = {
            digest: own.offers if digest == stage.digest else self._content(rank).offers
            for digest, rank in first.items()
        }
        by_offers: dict[tuple[Proposal, ...], list[int]] = {}
        for rank, message in messages.items():
            by_offers.setdefault(contents[message.digest], []).append(rank)
        return compared(by_offers)

    def end(self, end: EndOfComparison) -> EndOfComparison:
        """Say that nobody is to go on, to all who wait or will: the first to say so is believed."""
        own = {*self.keys, *self._reached}
        keys = tuple(sorted({*own, *end.keys}, key=lambda key: (key.place, key.number)))
        for topic in {key.topic for key in keys} - {address_of(self.topic)}:
            self.store.history.come_to(topic)  # where others were meanwhile
        for key in keys:
            end = self.store.first(key.end, evolve(end, steps=self._taken if key in own else 0, keys=keys))
        self.store.history.known.add(end.absence)
        return end

    def tell(self, found: Diagnostic) -> None:
        """This rank goes no further."""
        self.end(EndOfComparison.of(found))

    # --- steps ---

    def _exchange(self, stage: ComparedStage) -> dict[int, RankMessage]:
        with self._telling():
            while True:
                try:
                    self._exchange_once(stage)
                    return self._messages
                except BehindOthers as behind:
                    self.store.remove([*self._sent, *(key.at(self.store.rank) for key in self.keys)])
                    self._come(at_least=behind.number)
                    self._step, self._sent = 0, []

    def _exchange_once(self, stage: ComparedStage) -> None:
        self._step += 1
        before, self._sent = self._sent, [key.message(self.store.rank, self._step) for key in self.keys]
        mine = self._message(stage)
        one = Exchange(self.store, mine, self._step, self.patience)
        for key in self._sent:
            self.store.write(key, mine)
        try:
            self._messages = one.run()
        finally:
            self._reached = one.named_by
        self._taken = self._step
        self.store.remove([*before, *(key.at(self.store.rank) for key in self.keys if one.waits)])
        self._say_nothing()

    def _message(self, stage: ComparedStage) -> RankMessage:
        return RankMessage(
            self.store.rank,
            stage.name,
            stage.digest,
            self.keys,
            self.label,
            policy_digest(self.policy),
            stage.by_group,
            self.operators,
            self.store.history.absences,
        )

    def _confront(self, stage: ComparedStage, first: int, second: int) -> None:
        """Two ranks differ: the second publishes what is behind its digest, the first says for all how they differ."""
        mine = self.store.rank
        with self._telling():
            if mine == second:
                self._publish(stage.content())
            if mine == first:
                contents = {first: stage.content(), second: self._content(second)}
                found, rules = differences.between(stage.name, self._messages, contents)
                raise Ended(EndOfComparison.of(found, rules=rules))
            end = self._poll(lambda: self.store.end_of(self.keys, math.inf), self.patience, 0.02)
            if end is None:
                why = {first: "differs, and has not said how"}
                end = EndOfComparison.of(differences.missing(self._messages[mine], why))
            raise Ended(end)

    def _check_stages(self, messages: Mapping[int, RankMessage]) -> None:
        """A rank whose graph is from a cache may have settled other rewrites than are settled now, or none."""
        mine = messages[self.store.rank]
        for rank, message in sorted(messages.items()):
            if message.stage != mine.stage:
                with self._telling():
                    raise Ended(EndOfComparison.of(differences.out_of_step(mine, rank, message)))

    # --- what is behind a digest ---

    def _publish(self, content: StageContent) -> None:
        with self._telling():
            self._sent.append(self._place(self._messages[self.store.rank]))
            self.store.write_long(self._sent[-1], content)

    def _content(self, rank: int) -> StageContent:
        with self._telling():
            place = self._place(self._messages[rank])
            found = self._poll(lambda: self.store.read_long(StageContent, place), min(_REPLY, self.patience), 0.01)
            if found is None:
                why = {rank: "has posted a digest, and not what is behind it"}
                raise Ended(EndOfComparison.of(differences.missing(self._messages[self.store.rank], why)))
            return found

    def _poll(self, look: Callable[[], _T | None], seconds: float, pause: float) -> _T | None:
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

    # --- telling ---

    def _say_nothing(self) -> None:
        if self.store.said.kind:
            self.store.say(RankStatus(absences=self.store.history.absences))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Within, a rank that finds why nobody can go on says so to the others, and all raise the same."""
        try:
            try:
                yield
                return
            except Ended as ended:  # over one of the groups: the ranks of the others are to hear it, too
                end = self.end(ended.end)
            except StoreFailure as failed:
                if failed.is_gone:
                    raise
                end = self.end(EndOfComparison.of(failed.diagnostic))
            self._say_nothing()
        except StoreFailure as failed:
            raise PolicyDivergenceError([failed.diagnostic]) from failed
        rule = end.rules.get(policy_digest(self.policy))
        span = self.policy.rules[rule].span if rule is not None else None
        raise PolicyDivergenceError([evolve(end.diagnostic, span=span)]) from None
