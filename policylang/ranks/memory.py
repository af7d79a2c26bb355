"""What a rank remembers of comparisons, so that it takes no message for one of another occasion."""

from __future__ import annotations

import threading

from attrs import define, field

from policylang.ranks.messages import Absence, Key, Topic

_KEPT = 32
"""Of what is said again with every message."""


@define(eq=False)
class Memory:
    """Never forgotten while the process lives: a store may outlive a process group."""

    entered: dict[str, int] = field(factory=dict)
    """How often this rank has come to each topic."""
    absences: tuple[Absence, ...] = ()
    """The last of this rank."""
    heard: dict[tuple[int, int], None] = field(factory=dict)
    """The absences of other ranks that it knows of."""
    posted: list[Posted] = field(factory=list)
    open: list[tuple[Key, ...]] = field(factory=list)
    """The keys of the comparisons that this rank is in, in any of its threads."""
    threads: set[int] = field(factory=set)
    """Those that have compared anything."""

    def enter(self, topic: Topic, at_least: int = 0) -> int:
        """This rank comes to a topic; how often it has by now."""
        self.threads.add(threading.get_ident())
        found = max(self.entered.get(topic.address, 0) + 1, at_least)
        self.entered[topic.address] = found
        return found

    def catch_up(self, topic: str, occasion: int) -> None:
        self.entered[topic] = max(self.entered.get(topic, 0), occasion)

    def note_own(self, rank: int, about: str, entered: int, reason: str, stopped: bool) -> tuple[Absence, ...]:
        """This rank is absent from what others may compare."""
        serial = 1 + max((each.serial for each in self.absences), default=0)
        self.absences = (*self.absences, Absence(rank, serial, about, entered, reason, stopped))[-_KEPT:]
        return self.absences

    def note(self, absence: Absence | None) -> None:
        if absence is not None:
            self.heard[absence.rank, absence.serial] = None

    def last_heard(self) -> frozenset[tuple[int, int]]:
        return frozenset(list(self.heard)[-_KEPT:])


@define(eq=False)
class Posted:
    """What this rank has posted and others may still read."""

    readers: frozenset[int]
    places: frozenset[str]
    keys: list[str]
    """In the store."""
