"""The messages that ranks compare by, as plain data, and their keys in the store.

A message is addressed by its topic (a piece of code that is compiled, a call of ``apply``, a block in a checkpoint), by
the set of ranks that compare, and by how often these have come to the topic.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from policylang.language.diagnostics import Diagnostic

_ENDS = 8
"""How many are kept of those over one set of ranks and one topic."""


def address_of(topic: str) -> str:
    """``topic``: what a comparison is about, the same words on every rank: ``compiling forward (model.py:12)``."""
    return hashlib.sha256(topic.encode("utf-8", "surrogatepass")).hexdigest()[:12]


@frozen
class RankKey:
    """A set of ranks, a topic, and how often they have come to it: one program comes equally often on all."""

    ranks: tuple[int, ...]
    """Global ranks, sorted."""
    topic: str
    """Its address."""
    occasion: int

    @property
    def place(self) -> str:
        return f"{self.topic}/{ranges(self.ranks)}"

    def message(self, rank: int, step: int) -> str:
        """Where the message of a rank stands in one step of the comparison, counted from 1."""
        return f"{self.place}/{self.occasion}/{step}/{rank}"

    @property
    def end(self) -> str:
        """Where a rank says why nobody is to go on. The last few are kept, for ranks that come late."""
        return f"{self.place}/end/{self.occasion % _ENDS}"


Awaited = tuple[RankKey, int, int]
"""A message that is waited for: its key, the step, the rank that is to send it."""


@frozen
class GroupDigest:
    """What a rank is about to run over one process group: every member has to be about to run the same."""

    name: str
    """By which c10d knows the group, on all of its members alike."""
    ranks: tuple[int, ...]
    """Global, in group order."""
    digest: str


@frozen
class Absence:
    """That a rank does not take part in what others compare: it stopped before it could, or it does not compare."""

    rank: int
    serial: int
    """Which of this rank's it is."""
    about: str
    """The address of a topic; of what a rank does not compare, with the digest of the graph's operators."""
    entered: int
    """How often the rank had come to the topic by then: ranks that run one program have all come equally often. 0 where
    it concerns whatever is compared next."""
    reason: str
    """For people."""
    stopped: bool


@frozen
class RankMessage:
    """What a rank sends in one step, the same under each of its keys."""

    rank: int
    stage: str
    """``settings``, ``rewrites of the joint graph``, ``plan``, ``collectives``: what the step compares."""
    digest: str
    """Of what has to be equal on all ranks that hang together."""
    keys: tuple[RankKey, ...]
    label: str = ""
    """For people: what is compared, ``a joint graph of 812 nodes``."""
    policy: str = ""
    """The digest of its policy's text."""
    by_group: tuple[GroupDigest, ...] = ()
    """In the order in which the graph first uses the groups."""
    elsewhere: tuple[str, ...] = ()
    """The places of comparisons that other threads of this rank are in."""
    abouts: tuple[str, ...] = ()
    """What an absence from this comparison would be about."""
    absences: tuple[Absence, ...] = ()
    """The last of this rank."""
    heard: frozenset[tuple[int, int]] = frozenset()
    """The absences that it knows of, by rank and serial."""

    def misses(self, absence: Absence) -> bool:
        """Whether it waits for a rank that is absent, and does not know it."""
        known = (absence.rank, absence.serial) in self.heard
        return absence.about in self.abouts and absence.entered in (0, self.keys[0].occasion) and not known


@frozen
class EndOfComparison:
    """Why a comparison ends without anybody going on. All ranks show the same."""

    diagnostic: Diagnostic
    """Its span is not sent."""
    rules: Mapping[str, int] = field(factory=dict)
    """By the digest of a policy, the rule of it that the message is about."""
    absence: Absence | None = None
    """Where that is why."""
    occasion: int = 0
    steps: int = 0
    """How many steps the rank that says it has taken with the others: until there, all go on."""
    keys: tuple[RankKey, ...] = ()
    """All that it is said under: whoever hears it has come to these topics as often."""

    def ends(self, key: RankKey, step: float) -> bool:
        """Whether it concerns a rank that is in a step of the comparison over a key."""
        return self.occasion > key.occasion or (self.occasion == key.occasion and self.steps < step)


@frozen
class RankStatus:
    """What a rank has to say outside of any comparison. The last one replaces those before."""

    kind: str = ""
    """``waiting``, ``stopped``, ``uncompared``; empty while there is nothing to say."""
    text: str = ""
    """For people: what the rank has, why it stopped, or why it does not compare."""
    absences: tuple[Absence, ...] = ()
    """Its last."""
    awaited: tuple[Awaited, ...] = ()
    """The messages that a rank waits for."""
    threads: int = 1
    """How many threads of the rank have compared anything: one may come while another waits."""


def pack(value: Any) -> str:
    """Plain data of this package as text, which is what a store compares."""
    return base64.b64encode(zlib.compress(pickle.dumps(value), 1)).decode()


def unpack(text: str | bytes) -> Any:
    """The inverse of :func:`pack`; raises whatever unpickling runs into."""
    return pickle.loads(zlib.decompress(base64.b64decode(text)))


def ranges(ranks: Sequence[int]) -> str:
    """Sorted ranks, short: ``0-7``, ``0-56/8`` (every eighth), ``0,3,4``."""
    parts: list[str] = []
    start = 0
    while start < len(ranks):
        step = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 0
        end = start
        while end + 1 < len(ranks) and ranks[end + 1] - ranks[end] == step:
            end += 1
        if end - start < 2:
            end = start
            parts.append(str(ranks[start]))
        else:
            parts.append(f"{ranks[start]}-{ranks[end]}" + (f"/{step}" if step > 1 else ""))
        start = end + 1
    return ",".join(parts)


def in_order(ranks: Sequence[int]) -> str:
    """Ranks whose order counts; as :func:`ranges` where they are sorted."""
    return ranges(ranks) if list(ranks) == sorted(ranks) else ", ".join(map(str, ranks))


def named(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(sorted(ranks))}"
