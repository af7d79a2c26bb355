"""The trade-off between memory and time: what is asked of a tuned policy, the policies to choose from, the choice."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen
class Budget:
    """What must not be exceeded; the other of memory and time is then as little as can be."""

    figure: Literal["peak", "saved", "recompute time"]
    limit: float
    """Bytes of one rank; of ``recompute time`` a fraction of the forward's time."""


@frozen
class Candidate:
    """A policy with what planning and simulation say of it on the graph that is tuned for."""

    rules: str
    """The statements that decide, a line each, without a comment and without expectations."""
    peak: int
    """Bytes, simulated, of the graph alone: without what :class:`Besides` adds."""
    peak_at: str
    """The node at which the peak is."""
    saved: int
    """Bytes kept on the device for the backward."""
    offloaded: int
    recompute: float
    """Seconds of second runs."""
    exposed: float
    """Seconds in which computation waits for a collective or a copy."""
    step: float
    """Seconds of the whole step."""
    copies: float = 0.0
    """Of ``exposed`` what copies to the host and back add: zero where computation hides them."""

    @property
    def price(self) -> float:
        """Seconds that are lost to have it fit: second runs, and waiting for copies."""
        return self.recompute + self.copies


@frozen
class Besides:
    """What takes memory beside the graph."""

    optimizer: int = 0
    """Bytes of the optimizer's state."""
    gradients: int = 0
    """Bytes of gradients that the graph does not hold at its peak."""
    reserve: float = 0.0
    """The share of the memory that the allocator wastes."""

    def on(self, peak: int) -> int:
        """The bytes that a peak of the graph comes to."""
        return round((peak + self.optimizer + self.gradients) / (1 - self.reserve))


@frozen
class Tuned:
    """A choice among the candidates of one graph on one device."""

    budget: Budget
    besides: Besides
    chosen: Candidate
    less: Candidate | None
    """Its neighbour that takes less memory and more time; None where there is none."""
    more: Candidate | None
    """Its neighbour that takes more memory and less time."""
    table: tuple[Candidate, ...]
    """All that no other beats in both memory and time, by rising memory."""
    bound: float | None
    """Seconds of recomputation that no choice of values can go below in as many bytes as the chosen one keeps, on the
    device and on the host together."""
    forward: float
    """Seconds of the forward."""


@frozen
class Infeasible:
    """No policy meets the budget."""

    budget: Budget
    besides: Besides
    smallest: Candidate
    """The candidate that comes nearest."""
