"""Figures that take a simulation of the step: its peak, its time, and what of it runs a second time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from policylang.graph.schedule import Schedule, StepKind
from policylang.planning.checkpoints import Checkpoints
from policylang.planning.liveness import CostedNeeds
from policylang.planning.plan import schedule_of
from policylang.planning.schedule.builder import build_checkpointed_schedule
from policylang.planning.schedule.order_plan import OrderPlan
from policylang.planning.selection.selectors import Selections
from policylang.planning.value_decision import Decision
from policylang.simulation.peak import estimate_peak
from policylang.simulation.step_time import StepTime, step_time

Amounts = tuple[float, Sequence[float]]
"""In all, and by block."""


class Simulated:
    """The step that follows some decisions; nothing is worked out before an expectation asks for it."""

    def __init__(
        self,
        selections: Selections,
        decisions: Sequence[Decision | None],
        outcome: CostedNeeds,
        *,
        checkpoints: Checkpoints | None,
        order: OrderPlan | None = None,
    ) -> None:
        """``order``: what the scheduling lines come to, in which the step then runs."""
        self._facts = selections.facts
        self._blocks = selections.blocks
        self._times = selections.times
        self._decisions = decisions
        self._outcome = outcome
        self._order = order
        self._checkpoints = checkpoints

    @property
    def timed(self) -> bool:
        """Whether there is a device."""
        return self._times is not None

    @cached_property
    def peak(self) -> int:
        """Bytes."""
        if self._order is not None:
            return estimate_peak(self._order.facts, self._order.schedule).bytes
        return estimate_peak(self._facts, self._schedule).bytes

    @cached_property
    def step(self) -> StepTime:
        assert self._times is not None
        order = self._order
        if order is not None and order.times is not None:
            return step_time(order.facts, order.schedule, order.times)
        return step_time(self._facts, self._schedule, self._times)

    @cached_property
    def forward_time(self) -> Amounts:
        """Seconds of the forward's operators, each run once."""
        return self._total(self._facts.forward)

    @cached_property
    def recomputed_time(self) -> Amounts:
        """Seconds of the operators that run a second time: once in each region of the backward that asks for them."""
        return self._total(row for kind, row, _ in self._schedule if kind == StepKind.SECOND_RUN)

    @cached_property
    def _schedule(self) -> Schedule:
        if self._checkpoints is not None:
            kept = self._outcome
            return build_checkpointed_schedule(self._facts, self._checkpoints, kept.saved, kept.recomputed)
        return schedule_of(self._facts, self._decisions)

    def _total(self, rows: Iterable[int]) -> Amounts:
        assert self._times is not None
        seconds, block_of = self._times.seconds, self._blocks.block_of
        total, by_block = 0.0, [0.0] * len(self._blocks.names)
        for row in rows:
            total += seconds[row]
            if by_block and block_of[row] >= 0:
                by_block[block_of[row]] += seconds[row]
        return total, by_block
