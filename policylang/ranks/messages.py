"""What ranks tell each other, as plain data, and where in the store it stands.

A message is addressed by what it is about: a piece of code that is compiled, a call of ``apply``, a block in a
checkpoint; by the set of ranks that it concerns; and by how often these ranks have compared that before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import astuple, field, frozen

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
    """A set of ranks, a topic, and how often these ranks have met over it before."""

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
        topic, ranks, occasion, _, _ = post.split("/")
        return cls(unspell(ranks), topic, int(occasion))

    @property
    def end(self) -> str:
        """Where a rank says why nobody is to go on. The last few are kept, for ranks that come late."""
        return f"{self.place}/end/{self.occasion % _ENDS}"


@frozen
class Share:
    """What a rank is about to run over one process group: every member has to be about to run the same."""

    name: str
    """By which c10d knows the group, on all of its members alike; ``mesh`` for the ranks of a mesh."""
    ranks: tuple[int, ...]
    """Global, in group order."""
    digest: str


@frozen
class Left:
    """That a rank has left what others compare: it stopped before it could, or it does not compare."""

    about: str
    """The address of a topic; of what a rank does not compare, with the digest of the graph's operators."""
    times: int
    """How often it has."""
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
    left: tuple[Left, ...] = ()
    """What the rank has left before, of what is compared now."""

    def to_json(self) -> str:
        keys = _listed(self.keys)
        shares = [(share.name, _spell_order(share.ranks), share.digest) for share in self.shares]
        words = [self.rank, self.stage, self.digest, keys, self.label, self.policy, shares, list(self.elsewhere)]
        return json.dumps([*words, [astuple(each) for each in self.left]])

    @classmethod
    def from_json(cls, text: str | bytes) -> Entry:
        rank, stage, digest, keys, label, policy, shares, elsewhere, left = json.loads(text)
        return cls(
            rank,
            stage,
            digest,
            _unlisted(keys),
            label,
            policy,
            tuple(Share(name, _unspell_order(ranks), share) for name, ranks, share in shares),
            tuple(elsewhere),
            tuple(Left(*each) for each in left),
        )


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
    leaver: int | None = None
    """The rank that has left, where that is why: it is not told, and goes by what comes next."""
    left: Left | None = None
    keys: tuple[Key, ...] = ()
    """All that it is said under: whoever hears it counts these as past."""

    def ends(self, key: Key, step: int) -> bool:
        """Whether it concerns a rank that is in a step of the comparison over a key."""
        return self.occasion > key.occasion or (self.occasion == key.occasion and self.steps < step)

    def to_json(self) -> str:
        found = self.diagnostic
        words = [found.code, found.message, found.help, list(found.details)]
        left = None if self.left is None else astuple(self.left)
        return json.dumps([self.occasion, *words, self.steps, dict(self.rules), self.leaver, left, _listed(self.keys)])

    @classmethod
    def from_json(cls, text: str | bytes) -> End:
        occasion, code, message, help, details, steps, rules, leaver, left, keys = json.loads(text)
        diagnostic = Diagnostic(code, message, None, help, details=tuple(details))
        about = None if left is None else Left(*left)
        return cls(occasion, diagnostic, steps, rules, leaver, about, _unlisted(keys))


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


def _listed(keys: Sequence[Key]) -> list[Any]:
    return [(spell(key.ranks), key.topic, key.occasion) for key in keys]


def _unlisted(keys: Sequence[Any]) -> tuple[Key, ...]:
    return tuple(Key(unspell(ranks), topic, occasion) for ranks, topic, occasion in keys)


def _spell_order(ranks: Sequence[int]) -> str | list[int]:
    return spell(ranks) if list(ranks) == sorted(ranks) else list(ranks)


def _unspell_order(ranks: str | list[int]) -> tuple[int, ...]:
    return unspell(ranks) if isinstance(ranks, str) else tuple(ranks)
