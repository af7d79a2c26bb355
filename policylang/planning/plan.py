"""The plan: the decision on every forward value, the line that made it, graph edits, and the schedule that follows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen

from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Policy, Rule
from policylang.language.wording import as_html, as_text
from policylang.planning.checkpoints import Checkpoints, held_and_rerun
from policylang.planning.graph_edit import Edits
from policylang.planning.schedule.builder import build_checkpointed_schedule, build_schedule
from policylang.planning.value_decision import Decision, Fate, offloads, recomputes

if TYPE_CHECKING:
    from policylang.planning.schedule.order_plan import OrderPlan
    from policylang.simulation.node_times import NodeTimes


@frozen
class RuleOutcome:
    """The matches and decisions of one rule on one graph. Rows are owners, in graph order."""

    rule: Rule
    matched: tuple[int, ...]
    decided: tuple[int, ...]
    overridden_by: dict[int, int]
    """Later rule to how many of this rule's nodes it took over."""
    kept_by_user: int
    """How many matches kept the tag of the user's own ``checkpoint``."""


@frozen
class ExpectationOutcome:
    text: str
    source: str
    status: Literal["held", "failed", "deferred"]
    """``deferred``: depends on what ``undecided -> auto`` leaves to the partitioner; checked after partitioning."""
    found: str
    """The figure, as printed: ``219.5 MiB in block 3``."""
    margin: float | None = None
    """How far the figure is from the limit: negative where it fails; None where there is none."""


@frozen(eq=False)
class Plan:
    """Policy × facts. ``decisions`` has a row for every row of ``facts``; None for nodes no rule can range over."""

    policy: Policy
    before: Facts
    """The graph as it is."""
    facts: Facts
    """The graph as it will be once :attr:`edits` are carried out; the same object where there are none."""
    decisions: Sequence[Decision | None]
    """Decisions are shared objects: there are few distinct ones."""
    rules: tuple[RuleOutcome, ...]
    edits: Edits
    """The changes of the graph's structure; rules are planned on what they leave."""
    expectations: tuple[ExpectationOutcome, ...]
    diagnostics: tuple[Diagnostic, ...]
    """Errors and warnings. A caller that acts on the plan raises the errors first."""
    undecided: Fate
    digest: str
    """Hex SHA-256 over policy, node names, operators and decisions: equal plans, equal digests, on every rank."""
    order: OrderPlan | None = field(default=None, repr=False)
    """What the scheduling lines come to; None where the policy has none, or the path carries none out."""
    times: NodeTimes | None = field(default=None, repr=False)
    """The times of :attr:`facts` on a device, where one is given."""
    block_of: Sequence[int] = field(factory=tuple, repr=False)
    """Row to block number, 0-based, -1 outside every block."""
    block_names: tuple[str, ...] = field(factory=tuple, repr=False)

    checkpoints: Checkpoints | None = field(default=None, repr=False)
    """In eager: those around the blocks of a whole model, or that of the one block that the graph is."""

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"<policylang.Plan: {self}>"

    def _repr_html_(self) -> str:
        return as_html(self)

    @cached_property
    def schedule(self) -> Schedule:
        """The steps of what follows the plan, on the rows of :attr:`facts`. What is left to PyTorch's partitioner
        counts as kept."""
        if self.checkpoints is not None:
            kept = held_and_rerun(self.facts, self.decisions, self.checkpoints)
            return build_checkpointed_schedule(self.facts, self.checkpoints, *kept)
        return schedule_of(self.facts, self.decisions)

    @cached_property
    def untold(self) -> Diagnostic | None:
        """Of a plan on a device: what the graph and the plan do that its profile has no figure for."""
        from policylang.simulation.missing_figures import lacking  # an audit of plans knows no simulation

        return None if self.times is None else lacking(self.times, copies=any(map(offloads, self.decisions)))

    @property
    def shown_times(self) -> NodeTimes | None:
        """:attr:`times` that may be printed: none where the profile lacks a figure, since no time is made up."""
        return None if self.untold is not None else self.times

    def rule_of(self, row: int) -> Rule | None:
        """The rule that decided a row, if one did."""
        decision = self.decisions[row]
        return None if decision is None or decision.rule is None else self.policy.rules[decision.rule]


def schedule_of(facts: Facts, decisions: Sequence[Decision | None]) -> Schedule:
    """The steps under some decisions."""
    recomputed = (row for row, decision in enumerate(decisions) if recomputes(decision))
    offloaded = (row for row, decision in enumerate(decisions) if offloads(decision))
    return build_schedule(facts, recomputed, offloaded)
