"""What ranks tell each other, as plain data, and where in the store it stands.

A message is addressed by what it is about: a piece of code that is compiled, a call of ``apply``, a block in a
checkpoint; by the set of ranks that it concerns; and by how often these have come to that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from attrs import field, frozen

from policylang.language.diagnostics import Diagnostic

_ENDS = 8
"""How many are kept of those over one set of ranks and one topic."""


@frozen
class Topic:
    """What a comparison is about, the same words on every rank."""

    text: str
    """For people: ``compiling forward (model.py:12)``."""

    @property
    def address(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


@frozen
class Key:
    """A set of ranks, a topic, and how often they have come to it: one program comes equally often on all."""

    ranks: tuple[int, ...]
    """Global ranks, sorted."""
    topic: str
    """Its address."""
    occasion: int

    @property
    def place(self) -> str:
        return f"{self.topic}/{spell(self.ranks)}"

    def post(self, rank: int, step: int) -> str:
        """Where a rank posts what it has to say in one step of the comparison, counted from 1."""
        return f"{self.place}/{self.occasion}/{step}/{rank}"

    @classmethod
    def of_post(cls, post: str) -> Key:
        place, occasion, _, _ = post.rsplit("/", 3)
        topic, _, ranks = place.partition("/")
        return cls(unspell(ranks), topic, int(occasion))

    @property
    def end(self) -> str:
        """Where a rank says why nobody is to go on. The last few are kept, for ranks that come late."""
        return f"{self.place}/end/{self.occasion % _ENDS}"


@frozen
class Share:
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
class Entry:
    """What a rank posts in one step, the same under each of its keys."""

    rank: int
    stage: str
    """``settings``, ``rewrites of the joint graph``, ``plan``, ``collectives``: what the step compares."""
    digest: str
    """Of what has to be equal on all ranks that hang together."""
    keys: tuple[Key, ...]
    label: str = ""
    """For people: what is compared, ``a joint graph of 812 nodes``."""
    policy: str = ""
    """The digest of its policy's text."""
    shares: tuple[Share, ...] = ()
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
class End:
    """Why a comparison ends without anybody going on. All ranks show the same."""

    occasion: int
    diagnostic: Diagnostic
    """Its span does not travel."""
    steps: int = 0
    """How many steps the rank that says it has taken with the others: until there, all go on."""
    rules: Mapping[str, int] = field(factory=dict)
    """By the digest of a policy, the rule of it that the message is about."""
    absence: Absence | None = None
    """Where that is why."""
    keys: tuple[Key, ...] = ()
    """All that it is said under: whoever hears it has come to these topics as often."""

    def ends(self, key: Key, step: float) -> bool:
        """Whether it concerns a rank that is in a step of the comparison over a key."""
        return self.occasion > key.occasion or (self.occasion == key.occasion and self.steps < step)


@frozen
class Status:
    """What a rank has to say outside of any comparison. The last one replaces those before."""

    kind: str = ""
    """``waiting``, ``stopped``, ``uncompared``; empty while there is nothing to say."""
    text: str = ""
    """For people: what the rank has, why it stopped, or why it does not compare."""
    absences: tuple[Absence, ...] = ()
    """Its last."""
    posts: tuple[str, ...] = ()
    """What a rank waits for."""
    threads: int = 1
    """How many threads of the rank have compared anything: one may come while another waits."""


def spell(ranks: Sequence[int]) -> str:
    """Sorted ranks, short: ``0-7``, ``0-56/8`` (every eighth), ``0,3,4``."""
    parts: list[str] = []
    start = 0
    while start < len(ranks):
        step = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 0
        end = start
        while end + 1 < len(ranks) and ranks[end + 1] - ranks[end] == step:
            end += 1
        if end - start < 2:
            parts.append(str(ranks[start]))
            start += 1
            continue
        parts.append(f"{ranks[start]}-{ranks[end]}" + (f"/{step}" if step > 1 else ""))
        start = end + 1
    return ",".join(parts)


def unspell(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        bounds, _, step = part.partition("/")
        first, _, last = bounds.partition("-")
        found.extend(range(int(first), int(last or first) + 1, int(step or 1)))
    return tuple(found)


def named(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2``."""
    listed = sorted(ranks)
    return f"rank {listed[0]}" if len(listed) == 1 else f"ranks {spell(listed)}"
