"""``time`` and ``time_per_gib``: what a run of an operator takes, and what keeping its value saves for its memory.

The pieces of a tuple and the wait for a collective share the decision of their operator, and so its time and its
price: a rule about quick operators would else decide about a slow one by a piece that takes no time of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from attrs import frozen

from policylang.graph.facts import Facts, storage_roots
from policylang.simulation.node_times import NodeTimes

_GIB = 2.0**30


@frozen(eq=False, slots=False)
class OperatorPrices:
    """Those of one graph on one device."""

    facts: Facts
    times: NodeTimes

    def time(self, row: int) -> float:
        """Seconds; 0 of what does nothing on the device, as views."""
        return self.times.seconds[self.facts.owners[row]]

    def time_per_gib(self, row: int) -> float | None:
        """Seconds to make the value again, per GiB that it takes to keep; None of what has no memory of its own."""
        facts, owner = self.facts, self.facts.owners[row]
        size = facts.bytes[owner]
        if not size or self._roots[owner] != owner:
            return None
        return self.times.seconds[owner] * _GIB / size

    def of(self, measure: str, row: int) -> float | None:
        """By its word in the language."""
        return self.time(row) if measure == "time" else self.time_per_gib(row)

    @cached_property
    def _roots(self) -> Sequence[int]:
        return storage_roots(self.facts)
