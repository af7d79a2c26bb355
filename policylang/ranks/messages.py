"""What ranks tell each other, as plain data, and where in the store it stands.

A message is addressed by what it is about: a piece of code that is compiled, a call of ``apply``, a block in a
checkpoint; by the set of ranks that it concerns; and by how often these ranks have compared that before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from attrs import field, frozen

from policylang.language.diagnostics import Diagnostic


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
        """Where a rank says why nobody is to go on: one message for all occasions, the last that failed."""
        return f"{self.place}/end"


@frozen
class Share:
    """What a rank is about to run over one process group: every member has to be about to run the same."""

    name: str
    """By which c10d knows the group, on all of its members alike; ``mesh`` for the ranks of a mesh."""
    ranks: tuple[int, ...]
    """Global, in group order."""
    digest: str


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

    def to_json(self) -> str:
        keys = [(spell(key.ranks), key.topic, key.occasion) for key in self.keys]
        shares = [(share.name, _spell_order(share.ranks), share.digest) for share in self.shares]
        return json.dumps(
            [self.rank, self.stage, self.digest, keys, self.label, self.policy, shares, list(self.elsewhere)]
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Entry:
        rank, stage, digest, keys, label, policy, shares, elsewhere = json.loads(text)
        return cls(
            rank,
            stage,
            digest,
            tuple(Key(unspell(ranks), topic, occasion) for ranks, topic, occasion in keys),
            label,
            policy,
            tuple(Share(name, _unspell_order(ranks), share) for name, ranks, share in shares),
            tuple(elsewhere),
        )


@frozen
class End:
    """Why a comparison ends without anybody going on. All ranks show the same."""

    occasion: int
    diagnostic: Diagnostic
    """Its span does not travel."""
    rules: Mapping[str, int] = field(factory=dict)
    """By the digest of a policy, the rule of it that the message is about."""

    def to_json(self) -> str:
        found = self.diagnostic
        words = [found.code, found.message, found.help, list(found.details)]
        return json.dumps([self.occasion, *words, dict(self.rules)])

    @classmethod
    def from_json(cls, text: str | bytes) -> End:
        occasion, code, message, help, details, rules = json.loads(text)
        return cls(occasion, Diagnostic(code, message, None, help, details=tuple(details)), rules)


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


def _spell_order(ranks: Sequence[int]) -> str | list[int]:
    return spell(ranks) if list(ranks) == sorted(ranks) else list(ranks)


def _unspell_order(ranks: str | list[int]) -> tuple[int, ...]:
    return unspell(ranks) if isinstance(ranks, str) else tuple(ranks)
