"""Plain data of the audit: what was read off the transformed graph, and what a path reports of it."""

from __future__ import annotations

from attrs import define, field, frozen

from policylang.language.diagnostics import Diagnostic


@frozen
class HostCopy:
    """A value that is copied to the host. ``started`` and ``awaited`` are positions."""

    row: int
    """Of the value; -1 where the plan does not have it."""
    value: str
    host: str
    """The node that hands the copy out once it is awaited."""
    started: int
    awaited: int
    fetched: bool
    """Whether anything reads it once it is back on the device."""


@define
class Found:
    """What runs, read off what came out. Values are rows of the planned facts; positions are those in ``order``."""

    order: list[str] = field(factory=list)
    """The nodes, as they run."""
    begins: int = 0
    """Where the backward begins."""
    crossing: dict[int, int] = field(factory=dict)
    """What of the forward and of the inputs the backward reads, second runs included: to the last position where."""
    saved: list[int] = field(factory=list)
    """Of these, the tensors that the forward computes, in graph order."""
    held: dict[int, int] = field(factory=dict)
    """By the row that allocated some memory: the last position at which the forward, or what is returned, reads it."""
    written: dict[int, int] = field(factory=dict)
    """The same of the forward's writes in place."""
    recomputed: list[int] = field(factory=list)
    """What runs again, in the order in which it does, and as often."""
    twice: list[int] = field(factory=list)
    """Second runs beyond the first of their backward region, which is what stands between two forward operators."""
    redrawn: list[int] = field(factory=list)
    """Second runs that do not start from the random state of the first."""
    rewritten: list[int] = field(factory=list)
    """Second runs that write to memory that is not a second run's."""
    random_states: int = 0
    early: list[tuple[str, str]] = field(factory=list)
    """Nodes that run before a node they read, and that node."""
    swapped: dict[str, str] = field(factory=dict)
    """First runs with an effect, to one that runs before them and follows them in the plan."""
    unknown: list[str] = field(factory=list)
    """Nodes that the plan does not have; of two halves, those with an effect."""
    kept_unknown: list[str] = field(factory=list)
    """What a forward keeps, and the plan does not have or the backward does not take."""
    places: dict[int, tuple[int, int]] = field(factory=dict)
    """Of what crosses between two halves: its number among the outputs of one and among the inputs of the other."""
    copies: list[HostCopy] = field(factory=list)
    unsent: list[str] = field(factory=list)
    """Nodes that bring back what is not handed over as a copy on the host."""
    races: list[str] = field(factory=list)
    """Nodes that start, take or read a copy without the wait that makes it safe."""


@frozen
class Audit:
    """What a partition came to, by node name in graph order, and where it differs from its plan."""

    saved: tuple[str, ...]
    """Values of the forward kept for the backward; no graph inputs, no symbolic sizes."""
    saved_bytes: int
    """Of the distinct memory they keep alive."""
    recomputed: tuple[str, ...]
    """Forward operators that run again in the backward."""
    recomputed_bytes: int
    recomputed_flops: int
    forward_flops: int
    random_states: int
    """Generator states kept so that recomputed random operators draw the same numbers."""
    differences: tuple[Diagnostic, ...] = field(default=())
    offloaded: tuple[str, ...] = ()
    """Values that are on the host between their last forward and their first backward use; none of ``saved``."""
    offloaded_bytes: int = 0

    @property
    def agrees(self) -> bool:
        return not self.differences
