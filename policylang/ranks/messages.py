"""The messages that ranks compare by, as plain data, and their text in the store."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from attrs import field, frozen

from policylang.language.diagnostics import Diagnostic
from policylang.language.plain_data import from_plain, to_plain

LONGEST = 1 << 20
"""Bytes of a message. Whatever is longer was not written by policylang, and is not read."""
_LARGEST = 1 << 28
"""Bytes of decompressed text."""
_T = TypeVar("_T")


def address_of(*words: str) -> str:
    """``words``: what something is about, the same on every rank: ``compiling forward (model.py:12)``."""
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogatepass")).hexdigest()[:16]


@frozen
class MeetingKey:
    """Names one comparison over a process group, alike on all of its members."""

    topic: str
    group: str
    """Its c10d name, the same on all members."""
    ranks: tuple[int, ...]
    """Global, sorted."""
    epoch: int
    """The number of times a rank has reached the topic."""

    @property
    def place(self) -> str:
        return address_of(self.topic, self.group, ranges(self.ranks))

    def message(self, rank: int, step: int) -> str:
        """The store key of a rank's message in one step, counted from 1."""
        return f"{self.place}/{self.epoch}/{step}/{rank}"

    @property
    def end(self) -> str:
        """The store key of the reason why nobody goes on."""
        return f"{self.place}/{self.epoch}/end"

    def at(self, rank: int) -> str:
        """The store key of a waiting rank's latest key at this place."""
        return f"{self.place}/at/{rank}"

    @property
    def done(self) -> str:
        """The store key that counts the ranks that are through."""
        return f"{self.place}/{self.epoch}/done"


@frozen
class GroupDigest:
    """A digest of what a rank is about to run over one process group; the same on every member."""

    name: str
    ranks: tuple[int, ...]
    """Global, in group order."""
    digest: str


@frozen
class Absence:
    """A rank takes no part in what others compare: it stopped before it could, or it does not compare."""

    id: str
    rank: int
    topic: str
    """Its address; empty where it concerns whatever is compared next."""
    epoch: int
    graph: str
    """The digest of the operators of what is not compared; empty where it stopped before there was a graph."""
    reason: str
    """For people."""

    @property
    def stopped(self) -> bool:
        return not self.graph


@frozen
class RankMessage:
    """One rank's message in one step, the same under each of its keys."""

    rank: int
    subject: str
    """``settings``, ``rewrites of the joint graph``, ``plan``, ``collectives``: what the step compares."""
    digest: str
    """Equal on all ranks that are connected through groups."""
    keys: tuple[MeetingKey, ...]
    label: str = ""
    """For people: what is compared, ``a joint graph of 812 nodes``."""
    policy: str = ""
    """The digest of its policy's text."""
    by_group: tuple[GroupDigest, ...] = ()
    """In the order in which the graph first uses the groups."""
    graph: str = ""
    absences: tuple[Absence, ...] = ()

    def misses(self, absence: Absence) -> bool:
        """It waits for a rank that is absent."""
        here = (absence.topic, absence.epoch) == (self.keys[0].topic, self.keys[0].epoch)
        return not absence.topic or (here and absence.graph in ("", self.graph))


@frozen
class EndOfComparison:
    """Why a comparison ends without anybody going on. All ranks show the same."""

    code: str
    message: str
    help: str | None = None
    details: tuple[str, ...] = ()
    rules: Mapping[str, int] = field(factory=dict)
    """By policy digest, the rule that the message is about."""
    absence: str = ""
    """The id of the absence that is why."""
    keys: tuple[MeetingKey, ...] = ()
    """All keys that it is sent under."""

    @classmethod
    def of(cls, found: Diagnostic, **more: Any) -> EndOfComparison:
        return cls(found.code, found.message, found.help, found.details, **more)

    @property
    def diagnostic(self) -> Diagnostic:
        return Diagnostic(self.code, self.message, help=self.help, details=self.details)


@frozen
class RankStatus:
    """What a rank reports outside of any comparison. The last one replaces those before."""

    kind: str = ""
    """``waiting``, ``stopped``, ``uncompared``; empty without anything to report."""
    text: str = ""
    """For people: what the rank has, why it stopped, or why it does not compare."""
    absences: tuple[Absence, ...] = ()
    keys: tuple[MeetingKey, ...] = ()
    """The keys of its comparison, while it waits and nothing else of it can run that others may wait for."""
    awaited: str = ""
    """The first message that it waits for, then."""
    awaited_rank: int = 0


# --- as text --------------------------------------------------------------------------------------------------------


def pack(value: Any) -> str:
    return json.dumps(to_plain(value), separators=(",", ":"))


def compress(value: Any) -> bytes:
    """:func:`pack` for long values."""
    return zlib.compress(pack(value).encode(), 1)


def unpack(kind: type[_T], text: str | bytes, longest: int = LONGEST) -> _T:
    """The inverse of :func:`pack`. Raises ``ValueError`` for what it would not write."""
    try:
        if len(text) > longest:
            raise ValueError(f"more than {longest} bytes")
        found = from_plain(kind, json.loads(text))
    except (RecursionError, TypeError) as error:
        raise ValueError(str(error)) from error
    return found


def decompress(kind: type[_T], data: bytes) -> _T:
    """The inverse of :func:`compress`. Raises ``ValueError`` for what it would not write."""
    try:
        text = zlib.decompressobj().decompress(data, _LARGEST)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    return unpack(kind, text, _LARGEST)


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
