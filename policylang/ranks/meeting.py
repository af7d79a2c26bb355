"""Compares one graph, step by step, with the other ranks that share it. This is the protocol.

**Keys.** A rank that is about to plan a graph has a key for each process group of the graph: the topic (the code that
is compiled, ``apply``, the block), the group (by the name that c10d gives it, which is the same on all members, and its
ranks), and the epoch: the number of times the rank's thread has reached the topic. Nothing of the graph is in a key, so
ranks whose graphs differ meet, and report that. Two models with separate groups never meet, in whatever order threads
run them. Ranks that run one program count alike. If one has run what others did not, or threads alternate, one of them
is ahead: a rank that waits sends its epoch, and a rank that reads a higher one moves there.

**A step.** A rank writes one message under each of its keys and reads those of the members of its groups; messages name
the keys of who sent them, and the ranks of these are read too, breadth first. So all ranks that are connected over any
groups read the same messages, and reach the same verdict without further messages: they are alike, or two ranks differ.
Of two that differ, the second writes the text of its digest, and the first reads it and reports the difference to all.
After a step, a rank deletes its messages of the step before. The last rank that leaves a meeting deletes the rest.

**A count.** Ranks that are alike need not read each other: a thousand would read a million messages. Before it writes
its message, a rank adds itself, for each of its groups, to a count of members that send the same there and take the
same groups to be connected: those that were when it last had these groups, and at first its own. Whoever completes the
count of the last group says so: all members of all these groups have sent the same, and are in no other group. Nothing
else follows from counts. Who waits for a rank, or whose count stays incomplete, reads the messages.

**An end.** A rank that finds why nobody can continue writes it under every key that it concerns; of several, the first
counts. A rank that reads it copies it to the keys that it knows, and raises. The message stays for ranks that are late.

**An absence.** A rank that stops before it knows its groups, or does not compare, counts as present, and sends that
with its status, topic and epoch. A rank that waits for it in this epoch, or reads a later message of it, ends its
meeting with that.

**Waiting.** Nobody guesses whether a rank is alive: it is waited for as long as its process groups would wait for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, TypeVar

from attrs import define, evolve, field

from policylang.errors import PolicyDivergenceError
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Policy
from policylang.planning.edits.other_ranks import Proposal, compared
from policylang.ranks import differences, rank_account
from policylang.ranks.rank_account import RankMessage, RankStatus, pack
from policylang.torch_compat import distributed

SWITCH = "POLICYLANG_AGREE"
PREFIX = "policylang"
_MOST = 7 << 20  # bytes in one value of a store, which takes 8 MiB
_KEPT = 8  # absences that are repeated with every message
_REASON = 1000
_T = TypeVar("_T")
_Group = tuple[str, str]  # its c10d name, and its ranks as text


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
    absences: tuple[rank_account.Absence, ...] = ()
    told: set[str] = field(factory=set)
    """The known absences of other ranks."""
    connected: dict[frozenset[_Group], frozenset[_Group]] = field(factory=dict)
    """By the groups of this rank those that were connected when it last read the messages of all their ranks."""
    _visits: threading.local = field(factory=threading.local)
    """By thread and topic the number of visits: threads run in no order that ranks share."""

    def come_to(self, topic: str, at_least: int = 0) -> int:
        """The epoch of this thread there; ``at_least``: others have come more often, and ran what this rank did not."""
        visits = self._visits.__dict__
        visits[topic] = found = max(visits.get(topic, 0) + 1, at_least)
        return int(found)


@define(eq=False)
class MessageStore:
    """This rank's own connection to the store. Raises :class:`StoreFailure` where the store's process has ended."""

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
        if distributed.read_one(found, key) != self.earlier.token.encode():
            self.earlier = RankHistory()  # others start anew with this store, too
            found.set(key, self.earlier.token)
        self._connection = found
        return found

    def write(self, key: str, value: Any) -> None:
        text = pack(value)
        self._ask(lambda to: to.set(f"{PREFIX}/{key}", text))

    def read_all(self, keys: Sequence[str]) -> list[RankMessage] | None:
        """None where one of them is not there."""
        found = self._ask(lambda at: distributed.read_all(at, [f"{PREFIX}/{key}" for key in keys]))
        how = rank_account.unpack
        return None if found is None else [_read(how, RankMessage, *each) for each in zip(keys, found, strict=True)]

    def read(self, kind: type[_T], key: str, how: Callable[[type[_T], bytes], _T] = rank_account.unpack) -> _T | None:
        found = self._ask(lambda at: distributed.read_one(at, f"{PREFIX}/{key}"))
        return None if found is None else _read(how, kind, key, found)

    def has(self, *keys: str) -> bool:
        return bool(self._ask(lambda at: at.check([f"{PREFIX}/{key}" for key in keys])))

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._ask(lambda to, key=key: to.delete_key(f"{PREFIX}/{key}"))  # type: ignore[misc]

    def count(self, key: str) -> int:
        return int(self._ask(lambda at: at.add(f"{PREFIX}/{key}", 1)))

    def first(self, key: str, value: _T) -> _T:
        """Write unless another rank has; returns what is there."""
        there = self._ask(lambda at: at.compare_set(f"{PREFIX}/{key}", "", pack(value)))
        return _read(rank_account.unpack, type(value), key, there)

    def write_content(self, key: str, content: rank_account.StepContent) -> None:
        """Compressed, because it may be long. Too long for the store: nothing is written."""
        data = rank_account.compress(content)
        if len(data) <= _MOST:
            self._ask(lambda to: to.set(f"{PREFIX}/{key}", data))

    def read_content(self, key: str) -> rank_account.StepContent | None:
        return self.read(rank_account.StepContent, key, rank_account.decompress)

    def end_of(self, keys: Iterable[rank_account.MeetingKey]) -> rank_account.EndOfComparison | None:
        """Why comparisons under some keys have ended."""
        return next(filter(None, (self.read(rank_account.EndOfComparison, key.end) for key in keys)), None)

    def say(self, status: RankStatus) -> None:
        """Tell other ranks what this one does."""
        if status != self.said:
            self.write(f"status/{self.rank}", status)
            self.said = status

    def status(self, rank: int) -> RankStatus:
        return self.read(RankStatus, f"status/{rank}") or RankStatus()

    def be_absent(self, topic: str, graph: str, reason: str) -> None:
        """Report that this rank takes no part in what others may compare (see :class:`Absence`)."""
        history, said = self.history, reason.partition("\n")[0][:_REASON]
        epoch = history.come_to(topic) if topic else 0
        added = rank_account.Absence(uuid.uuid4().hex, self.rank, topic, epoch, graph, said)
        history.absences = (*history.absences, added)[-_KEPT:]
        self.say(RankStatus("stopped" if added.stopped else "uncompared", said, history.absences))


def _read(how: Callable[[type[_T], bytes], _T], kind: type[_T], key: str, data: bytes) -> _T:
    try:
        return how(kind, data)
    except ValueError as error:
        raise StoreFailure(differences.unreadable(key, str(error)), False) from error


_current: dict[int, MessageStore] = {}  # by rank: a process may play several in threads


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


NOTICE = 10.0
"""Seconds after which a rank reports whom it waits for; then whenever it has waited twice as long."""
_LOOK = 0.25  # seconds between two looks at why a rank has not sent anything yet
_FEW = 32
"""Ranks that are looked at one by one. Where more are connected, looks are as many times rarer: a thousand that wait
for a thousand others would bring the store down."""
_CIRCLE = 4
"""Consecutive polls after which ranks that wait for each other get that error: a better reason may arrive before."""
_REPLY = 20.0  # seconds to wait for the text of a rank that has sent a digest

log = logging.getLogger("policylang.ranks")


@define
class _Ended(Exception):
    """Nobody can continue. This rank has found why, or received it from another."""

    end: rank_account.EndOfComparison


@define
class _BehindOthers(Exception):
    """Others have reached the topic more often, and wait there: they ran what this rank did not have."""

    epoch: int


@define(eq=False)
class Meeting:
    """One graph, as this rank compares it with the others. Every method raises ``PolicyDivergenceError`` where the
    ranks differ or one does not come: the same on all of them."""

    store: MessageStore
    topic: str
    groups: Mapping[str, Sequence[int]]
    """The ranks of each of the graph's groups."""
    operators: str
    label: str
    """For people: what is compared, ``a joint graph of 812 nodes, compiling forward (model.py:12)``."""
    policy: Policy
    timeout: float
    """Seconds."""
    alike: bool = True
    """All have the same policy. Otherwise they rewrite nothing together, and their plans will differ."""
    keys: tuple[rank_account.MeetingKey, ...] = ()
    _step: int = 0
    _mine: RankMessage = field(init=False)
    _messages: dict[int, RankMessage] = field(factory=dict)  # the last that were read, by rank
    _reached: dict[rank_account.MeetingKey, RankMessage] = field(factory=dict)
    """All connected keys, and the message that names each."""
    _shared: dict[int, list[rank_account.MeetingKey]] = field(factory=dict)
    """The connected keys by rank, of those that have sent something and others."""
    _awaited: dict[int, rank_account.MeetingKey] = field(factory=dict)
    """The ranks that have not sent anything yet, and a key under which they will."""
    _connected: Sequence[rank_account.MeetingKey] = ()
    """The keys that this rank takes to be connected, before it has read any message."""
    _agreed: str = ""
    """The store's key that says of a step that all ranks of these have sent the same."""
    _counts: list[str] = field(factory=list)
    _sent: list[str] = field(factory=list)
    _waits: bool = False  # it has sent its epoch
    _circle: tuple[tuple[str, ...], int] = ((), 0)
    """The messages that ranks wait for in a circle, and in how many looks on end they have been the same."""

    def __attrs_post_init__(self) -> None:
        with self._telling():
            self._come()

    def _come(self, at_least: int = 0) -> None:
        topic, history = rank_account.address_of(self.topic), self.store.history
        own = frozenset((group, rank_account.ranges(sorted(ranks))) for group, ranks in self.groups.items())
        found = [rank_account.MeetingKey(topic, *each, 0) for each in own]
        places = {key.place: key for key in found}
        epoch = history.come_to(topic, max(at_least, *(history.epochs.get(place, 0) + 1 for place in places)))
        history.epochs.update(dict.fromkeys(places, epoch))
        self.keys = tuple(evolve(places[place], epoch=epoch) for place in sorted(places))
        connected = history.connected.get(own, own)
        self._connected = [evolve(self.keys[0], group=group, members=members) for group, members in connected]
        self._step, self._sent, self._waits = 0, [], False

    def leave(self) -> None:
        """This rank goes on. The last to do so takes away the messages of the last step."""
        if not self._step:
            return
        with self._telling():
            root = min(self._connected, key=lambda key: key.place)
            if self.store.count(root.done) == len(self._messages_of_all()):
                self.store.remove(key.message(rank, self._step) for key in self._connected for rank in key.ranks)
                self.store.remove([root.done, self._agreed])

    # --- what is compared ---

    def compare(self, step: rank_account.ComparedStep) -> None:
        """Return once every rank has sent the same."""
        messages = self._exchange(step)
        if step.name == rank_account.SETTINGS:
            self.alike = len({message.policy for message in messages.values()}) == 1
        pair = differences.first_pair(messages)
        if pair is not None:
            self._confront(step, *pair)

    def settle(self, step: rank_account.ComparedStep) -> Mapping[str, str]:
        """One round: what not all ranks offer alike (see :class:`Ranks`)."""
        messages = self._exchange(step)
        for rank, message in sorted(messages.items()):
            if message.subject != self._mine.subject:  # from a cache, with other rewrites settled
                with self._telling():
                    raise _Ended(rank_account.EndOfComparison.of(differences.out_of_step(self._mine, rank, message)))
        first: dict[str, int] = {}
        for rank in sorted(messages):
            first.setdefault(messages[rank].digest, rank)
        if len(first) == 1:
            return {}
        own = step.content()
        if first[step.digest] == self.store.rank:
            self._publish(own)
        contents = {
            digest: own.offers if digest == step.digest else self._content(rank).offers
            for digest, rank in first.items()
        }
        by_offers: dict[tuple[Proposal, ...], list[int]] = {}
        for rank, message in messages.items():
            by_offers.setdefault(contents[message.digest], []).append(rank)
        return compared(by_offers)

    def end(self, end: rank_account.EndOfComparison) -> rank_account.EndOfComparison:
        """Tell all who wait or will that nobody can continue: the first message counts."""
        keys = sorted({*self.keys, *self._reached}, key=lambda key: (key.place, key.epoch))
        keys = list(dict.fromkeys((*keys, *end.keys)))  # those of others last: they may continue once they read it
        end = evolve(end, keys=tuple(keys))
        for key in keys:
            end = self.store.first(key.end, end)
        self.store.history.told.add(end.absence)
        for topic in {key.topic for key in keys} - {rank_account.address_of(self.topic)}:
            self.store.history.come_to(topic)  # where others were meanwhile
        return end

    def tell(self, found: Diagnostic) -> None:
        """This rank goes no further."""
        self.end(rank_account.EndOfComparison.of(found))

    # --- a step ---

    def _exchange(self, step: rank_account.ComparedStep) -> dict[int, RankMessage]:
        with self._telling():
            while True:
                try:
                    self._exchange_once(step)
                    return self._messages
                except _BehindOthers as behind:
                    self.store.remove([*self._sent, *self._counts, *(key.at(self.store.rank) for key in self.keys)])
                    self._come(at_least=behind.epoch)

    def _exchange_once(self, step: rank_account.ComparedStep) -> None:
        self._step += 1
        before, self._sent = self._sent, [key.message(self.store.rank, self._step) for key in self.keys]
        policy, rank, absences = rank_account.policy_digest(self.policy), self.store.rank, self.store.history.absences
        self._mine = RankMessage(
            rank, step.name, step.digest, self.keys, self.label, policy, step.by_group, self.operators, absences
        )
        self._messages, self._reached, self._shared, self._awaited = {}, {}, {}, {}
        self._count()  # first: whoever has read all messages may take the counts away
        for key in self._sent:
            self.store.write(key, self._mine)
        self._sent.append(self._agreed)
        self._hear(self.keys)
        self._take(self._mine)
        self._wait()
        self._hear(self._reached)
        if self._awaited:  # and none has to be read
            self._messages = {rank: self._mine}
        else:
            self._connected = list(self._reached)
            own, connected = (
                frozenset((key.group, key.members) for key in keys) for keys in (self.keys, self._reached)
            )
            self.store.history.connected[own] = connected
            self.store.remove(self._counts)
        self.store.remove([*before, *(key.at(self.store.rank) for key in self.keys if self._waits)])
        self._waits = False
        self._say_nothing()

    def _count(self) -> None:
        """Add this rank to the counts of its groups. Who completes the last of all says that they are."""
        among = rank_account.address_of(*sorted(key.place for key in self._connected))
        self._agreed = f"{among}/{self.keys[0].epoch}/{self._step}/agreed"
        self._counts = [f"{self._agreed}/groups"]
        if not all(absence.topic for absence in self._mine.absences):
            return  # somebody has to read why this rank stopped before
        for key in self.keys:
            said = self._mine.subject, self._mine.digest, self._mine.policy, *self._mine.over(key)
            self._counts.append(f"{self._agreed}/{key.place}/{rank_account.address_of(*said)}")
            if self.store.count(self._counts[-1]) < len(key.ranks):
                continue
            self.store.remove([self._counts.pop()])
            if self.store.count(self._counts[0]) == len(self._connected):
                self._hear(self._connected)
                self.store.remove([self._counts.pop(0)])
                self.store.count(self._agreed)

    def _messages_of_all(self) -> list[str]:
        """A key of the message of each rank."""
        keys = {rank: key for key in self._connected for rank in key.ranks}
        return [key.message(rank, self._step) for rank, key in keys.items()]

    def _wait(self) -> None:
        """Until every connected rank has sent its message, or is known to have sent the same."""
        started = looked = time.monotonic()
        since = datetime.now()
        pause, notice, due, unlike = 0.001, NOTICE, True, False
        everyone = self._messages_of_all()
        while self._awaited and not self.store.has(self._agreed):
            times = max(1.0, len(everyone) / _FEW, len(self._awaited) / _FEW)
            if due or times == 1:
                unlike = unlike or (self.store.has(*everyone) and not self.store.has(self._agreed))
                if unlike and self._read(dict(self._awaited)):
                    continue
            time.sleep(pause)
            pause = min(2 * pause, 0.1 * times, 1.0)
            now = time.monotonic()
            due = now - looked >= _LOOK * times
            if not due:
                continue
            looked = now
            self._look(_FEW if times == 1 else _FEW // 4)
            unlike |= times == 1 or now - started > notice  # others may be connected than it takes to be
            if now - started > self.timeout:
                raise _Ended(self._missing(now - started))
            if now - started > notice:
                notice *= 2
                waiting = "rank %d waits for %s to compare %s: for %.0f s, since %s"
                whom = rank_account.named(self._absent(_FEW) or list(self._awaited))
                log.warning(waiting, self.store.rank, whom, self.label, now - started, f"{since:%H:%M:%S}")

    def _absent(self, most: int) -> list[int]:
        """The first awaited ranks that have not sent anything yet, looked for by halves."""
        found, parts = list[int](), [sorted(self._awaited)]
        while parts and len(found) < most:
            ranks = parts.pop()
            if self.store.has(*(self._awaited[rank].message(rank, self._step) for rank in ranks)):
                continue
            half = len(ranks) // 2
            if half:
                parts += ranks[half:], ranks[:half]
            else:
                found += ranks
        return found

    def _hear(self, keys: Iterable[rank_account.MeetingKey]) -> None:
        """Raises if another rank has reported that nobody can continue."""
        end = self.store.end_of(keys)
        if end is not None:
            raise _Ended(end)

    def _read(self, ranks: Mapping[int, rank_account.MeetingKey]) -> bool:
        """Read what these have sent, if all of them have."""
        messages = self.store.read_all([key.message(rank, self._step) for rank, key in ranks.items()])
        for message in messages or ():
            self._check_absences(message.absences)
            self._take(message)
        return messages is not None and not self._awaited.keys() >= ranks.keys()

    def _take(self, message: RankMessage) -> None:
        self._messages[message.rank] = message
        self._awaited.pop(message.rank, None)
        for key in self._shared.get(message.rank, ()):
            self._check_shared(message, key)
        for key in message.keys:
            if key in self._reached:
                continue
            self._reached[key] = message
            for rank in key.ranks:
                self._shared.setdefault(rank, []).append(key)
                if rank in self._messages:
                    self._check_shared(self._messages[rank], key)
                else:
                    self._awaited[rank] = key

    def _check_shared(self, message: RankMessage, key: rank_account.MeetingKey) -> None:
        if key not in message.keys:
            found = differences.not_shared(message, key, self._reached[key])
            raise _Ended(rank_account.EndOfComparison.of(found))

    # --- why somebody has not come ---

    def _look(self, most: int) -> None:
        """Raises where waiting on makes no sense. ``most``: the ranks that are looked at."""
        self._hear(self._reached)
        few = self._absent(most)
        if not few:
            return
        absences, first = self.store.history.absences, few[0]
        if self.store.alone:
            awaited = self._awaited[first].message(first, self._step)
            self.store.say(RankStatus("waiting", self.label, absences, self.keys, awaited, first))
        for rank in few:
            self._check_absences(self.store.status(rank).absences)
        for key in self.keys if self._step == 1 else ():  # nothing is compared yet: others may be ahead
            if not self._waits:
                self.store.write(key.at(self.store.rank), key)
            for rank in key.ranks[:most]:
                other = None if rank == self.store.rank else self.store.read(rank_account.MeetingKey, key.at(rank))
                if other is not None and other.epoch > key.epoch:
                    raise _BehindOthers(other.epoch)
        self._waits |= self._step == 1
        if self.store.alone:
            self._look_for_circle(first)

    def _check_absences(self, absences: Sequence[rank_account.Absence]) -> None:
        for absence in absences:
            if absence.id not in self.store.history.told and self._mine.misses(absence):
                found = differences.absent(self._mine, absence)
                raise _Ended(rank_account.EndOfComparison.of(found, absence=absence.id))

    def _look_for_circle(self, first: int) -> None:
        """Raises where the ranks that are waited for, each for its first, wait for each other, for some looks on end.
        What a rank waits for counts only while it is not there."""
        waiting: dict[int, RankStatus] = {}
        at = first
        while at != self.store.rank and at not in waiting:
            status = self.store.status(at)
            if not status.awaited or self.store.has(status.awaited):
                self._circle = ((), 0)
                return
            waiting[at], at = status, status.awaited_rank
        awaited = tuple(status.awaited for status in waiting.values())
        self._circle = (awaited, self._circle[1] + 1 if awaited == self._circle[0] else 1)
        if self._circle[1] >= _CIRCLE:
            told = differences.waiting(self._mine, self._awaited[first], first, waiting)
            raise _Ended(rank_account.EndOfComparison.of(told, keys=_keys_of(waiting)))

    def _missing(self, seconds: float) -> rank_account.EndOfComparison:
        """Who has not come, and what each of these ranks is seen to do."""
        absent = self._absent(len(self._awaited)) or self._awaited
        statuses = {rank: self.store.status(rank) for rank in absent}
        does = {
            "waiting": "; it waits for other ranks, with {}",
            "stopped": "; it stopped elsewhere: {}",
            "uncompared": "; what it ran last was not compared ({})",
        }
        why = {
            rank: f"has not come in {seconds:.0f} s{does.get(status.kind, '').format(status.text)}"
            for rank, status in statuses.items()
        }
        return rank_account.EndOfComparison.of(differences.missing(self._mine, why), keys=_keys_of(statuses))

    # --- what is behind a digest ---

    def _confront(self, step: rank_account.ComparedStep, first: int, second: int) -> None:
        """Two ranks differ: the second publishes the text of its digest, the first reports the difference to all."""
        with self._telling():
            if self.store.rank == second:
                self._publish(step.content())
            if self.store.rank == first:
                contents = {first: step.content(), second: self._content(second)}
                found, rules = differences.between(step.name, self._messages, contents)
                raise _Ended(rank_account.EndOfComparison.of(found, rules=rules))
            end = self._poll(lambda: self.store.end_of(self.keys), self.timeout, 0.02)
            why = {first: "differs, and has sent no details"}
            raise _Ended(end or rank_account.EndOfComparison.of(differences.missing(self._mine, why)))

    def _publish(self, content: rank_account.StepContent) -> None:
        with self._telling():
            self._sent.append(self._place(self._mine))
            self.store.write_content(self._sent[-1], content)

    def _content(self, rank: int) -> rank_account.StepContent:
        with self._telling():
            place = self._place(self._messages[rank])
            found = self._poll(lambda: self.store.read_content(place), min(_REPLY, self.timeout), 0.01)
            if found is None:
                why = {rank: "has sent a digest without its content"}
                raise _Ended(rank_account.EndOfComparison.of(differences.missing(self._mine, why)))
            return found

    def _poll(self, look: Callable[[], _T | None], seconds: float, pause: float) -> _T | None:
        """The first result that is not None, or None after a timeout."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = look()
            if found is not None:
                return found
            time.sleep(pause)
        return None

    def _place(self, message: RankMessage) -> str:
        return f"{message.keys[0].message(message.rank, self._step)}/content"

    # --- reporting ---

    def _say_nothing(self) -> None:
        if self.store.said.kind:
            self.store.say(RankStatus(absences=self.store.history.absences))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Within, a rank that finds why nobody can continue reports it to the others, and all raise the same."""
        try:
            try:
                yield
                return
            except _Ended as ended:  # over one of the groups: the ranks of the others are to hear it, too
                end = self.end(ended.end)
            except StoreFailure as failed:
                if failed.is_gone:
                    raise
                end = self.end(rank_account.EndOfComparison.of(failed.diagnostic))
            self._say_nothing()
        except StoreFailure as failed:
            raise PolicyDivergenceError([failed.diagnostic]) from failed
        rule = end.rules.get(rank_account.policy_digest(self.policy))
        span = self.policy.rules[rule].span if rule is not None else None
        raise PolicyDivergenceError([evolve(end.diagnostic, span=span)]) from None


def _keys_of(statuses: Mapping[int, RankStatus]) -> tuple[rank_account.MeetingKey, ...]:
    return tuple(key for status in statuses.values() for key in status.keys)
