"""The marginal cost of each rule: what the step would save and recompute if the line were not there.

The policy is planned again without the rule, on the same graph, and everything else stands: another rule, the user's
own checkpoint or ``undecided -> …`` then decides what it had decided. What is left to PyTorch counts as saved, on both
sides. The difference is the rule's *margin*. Margins do not add up: two rules may each be enough to keep a value.

A rule that keeps more and recomputes less buys FLOPs with memory, one that recomputes more and keeps less buys memory
with FLOPs. Either has a *price*: FLOPs a GiB. A rule that keeps is worth the more the higher its price is, a rule that
recomputes the more the lower it is; in a good policy every price of the first kind is above every price of the second.
The memory is that of the saved values, not the peak, which no single rule may move. On a device the price is time a
GiB, and what is bought is time: that of collectives and of moving bytes counts as well, which is in no figure of FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, frozen

from policylang.planning.capabilities import Capabilities
from policylang.planning.inspection.breakdown import as_counted
from policylang.planning.inspection.step_times import time_of_step
from policylang.planning.inspection.time_prices import a_gib, time_difference
from policylang.planning.liveness import BackwardCost, saved_and_recomputed
from policylang.planning.plan import Plan
from policylang.planning.planner import plan as make_plan
from policylang.simulation.peak import estimate_peak
from policylang.simulation.step_time import StepTime

MOST_RULES = 100
"""Of so many rules that decide something the worth is worked out, the first in the policy: each takes a plan."""

_BUYS = ((1, -1), (-1, 1))
_VERDICTS: dict[tuple[int, int], str] = {
    (1, -1): "buys {}",
    (-1, 1): "buys memory",
    (-1, 0): "frees memory",
    (1, 0): "costs memory",
    (0, -1): "saves {}",
    (0, 1): "costs {}",
    (-1, -1): "gains both",
    (1, 1): "costs both",
    (0, 0): "changes nothing",
}
"""By the signs of a rule's bytes and FLOPs, or of its bytes and time. Traffic, to memory or to other ranks, is in the
time and in no other of them."""


@frozen
class Worth:
    """The margin of one rule: with it minus without it."""

    rule: int
    """Its place in ``Policy.rules``."""
    saved_bytes: int
    """Of what is kept for the backward; negative where the rule frees memory."""
    recomputed_flops: int
    """Of what runs twice; negative where the rule saves work."""
    peak_bytes: int
    recomputed_seconds: float | None = None
    """Of what runs twice; None without a device."""
    step_seconds: float | None = None
    """Of the step, in which other work may hide what the rule costs; None without a device."""

    @property
    def verdict(self) -> str:
        """With a device it is about time, without one about FLOPs."""
        if self.recomputed_seconds is None:
            return _VERDICTS[_sign(self.saved_bytes), _sign(self.recomputed_flops)].format("FLOPs")
        return _VERDICTS[_sign(self.saved_bytes), _sign(self.recomputed_seconds)].format("time")

    @property
    def flops_per_gib(self) -> float | None:
        """The price; None where the rule does not exchange one for the other."""
        return self._per_gib(self.recomputed_flops)

    @property
    def seconds_per_gib(self) -> float | None:
        """The price in time; None without a device, and where the rule does not exchange one for the other."""
        return None if self.recomputed_seconds is None else self._per_gib(self.recomputed_seconds)

    def _per_gib(self, amount: float) -> float | None:
        if (_sign(self.saved_bytes), _sign(amount)) not in _BUYS:
            return None
        return a_gib(amount, self.saved_bytes)


def worth_of_rules(
    plan: Plan, capabilities: Capabilities, progress: Callable[[int, int], None] = lambda done, of: None
) -> tuple[Worth, ...]:
    """The worth of every rule that decides something, in the order of the policy, at most of ``MOST_RULES``.

    ``progress`` is told after each rule how many of how many are done. A plan and a simulation for each rule.
    """
    deciding = [index for index, outcome in enumerate(plan.rules) if outcome.decided][:MOST_RULES]
    device = None if plan.times is None else plan.times.device
    with_all, peak, time = _cost(plan)
    found: list[Worth] = []
    for done, index in enumerate(deciding, start=1):
        rules = plan.policy.rules
        policy = evolve(
            plan.policy, rules=rules[:index] + rules[index + 1 :], rewrites=(), scheduling=(), expectations=()
        )
        other = make_plan(policy, plan.facts, capabilities, device=device)
        outcome, other_peak, other_time = _cost(other)
        recomputed, step = _margins(time, other_time)
        found.append(
            Worth(
                rule=index,
                saved_bytes=with_all.saved_bytes - outcome.saved_bytes,
                recomputed_flops=with_all.recomputed_flops - outcome.recomputed_flops,
                peak_bytes=peak - other_peak,
                recomputed_seconds=recomputed,
                step_seconds=step,
            )
        )
        progress(done, len(deciding))
    return tuple(found)


def _margins(under: StepTime | None, other: StepTime | None) -> tuple[float | None, float | None]:
    """Of what runs twice, and of the step."""
    if under is None or other is None:
        return None, None
    return time_difference(under.recomputed, other.recomputed), time_difference(under.step, other.step)


def _sign(amount: float) -> int:
    return (amount > 0) - (amount < 0)


def _cost(plan: Plan) -> tuple[BackwardCost, int, StepTime | None]:
    outcome = saved_and_recomputed(plan, as_counted(plan.decisions))
    return outcome, estimate_peak(plan.facts, plan.schedule).bytes, time_of_step(plan, plan.schedule)
