"""What a policy's scheduling lines come to on one graph: which collectives become one, and the order of everything.

Planned once values are decided, on the rematerialised graph (:mod:`policylang.planning.order.rematerialised`): forward
and backward, with each recomputation a node of its own. A half of a partition is such a graph already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag
from policylang.graph.schedule import Schedule, StepKind
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Scheduling
from policylang.operators.names import WAITS
from policylang.planning.graph_edit import Edits

if TYPE_CHECKING:  # the audit of an order knows no simulation
    from policylang.simulation.node_times import NodeTimes


@frozen
class SchedulingOutcome:
    """What one scheduling statement came to."""

    statement: Scheduling
    matched: tuple[str, ...]
    """The collectives that it picks, in the order of the graph."""
    moved: tuple[str, ...]
    """Those that start earlier, or are awaited later, because of it."""
    left: Mapping[str, str] = field(factory=dict)
    """Collectives that could not be moved, and why, as a phrase."""


@frozen(eq=False)
class OrderPlan:
    """Plain data, in terms of the names of nodes."""

    traced: Facts
    """The graph as it runs without any scheduling line."""
    traced_schedule: Schedule
    """Its order, copies to the host and back included."""
    edits: Edits
    """The buckets; a statement is numbered as in ``Policy.rewrites``."""
    facts: Facts
    """The graph as it runs once they are carried out, its rows still in traced order."""
    schedule: Schedule
    """The steps in the order that is carried out, on the rows of :attr:`facts`."""
    outcomes: tuple[SchedulingOutcome, ...]
    """One for each of ``Policy.scheduling``."""
    diagnostics: tuple[Diagnostic, ...]
    times: NodeTimes | None = field(default=None, repr=False)
    """Of :attr:`facts`, where there is a device."""
    traced_times: NodeTimes | None = field(default=None, repr=False)
    """Of :attr:`traced`."""
    barriers: Mapping[str, int] = field(factory=dict)
    """Operators that nothing was moved across because nobody knows what they do, and how many calls."""
    block_of: Sequence[int] = field(factory=tuple, repr=False)
    """Row of :attr:`facts` to block number, -1 outside every block."""
    block_names: tuple[str, ...] = field(factory=tuple, repr=False)

    @property
    def moves(self) -> bool:
        """Whether anything runs elsewhere than it was traced."""
        return bool(self.edits) or any(each.moved for each in self.outcomes)

    def order(self) -> list[str]:
        """The names of the nodes in the order in which they run; a copy to the host or back is none."""
        return [self.facts.names[row] for kind, row, _ in self.schedule if kind <= 1]

    def words(self) -> Iterator[str]:
        """What every rank has alike: the buckets, and the order in which collectives start and are awaited."""
        yield from self.edits.words()
        yield from self.communication()

    def communication(self) -> Iterator[str]:
        """The starts and waits in order, without the names of nodes and groups, which may be each rank's own."""
        facts, numbers = self.facts, dict[str, int]()
        for kind, row, _ in self.schedule:
            if kind <= StepKind.SECOND_RUN and (group := facts.group_names[row]):
                number = numbers.setdefault(group, len(numbers))
                shape = "" if facts.flags[row] & Flag.DATA_DEPENDENT else facts.shapes[row]
                yield f"{facts.targets[row]} {shape} {facts.dtypes[row]} over group {number}"
            elif kind <= StepKind.SECOND_RUN and facts.targets[row] in WAITS:
                yield "wait"
