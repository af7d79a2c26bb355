"""The marginal cost of each rule: what the step would save and recompute if the line were not there.

The policy is planned again without the rule, on the same graph, and everything else stands: another rule, the user's
own checkpoint or ``undecided -> …`` then decides what it had decided. What is left to PyTorch counts as saved, on both
sides. The difference is the rule's *margin*. Margins do not add up: two rules may each be enough to keep a value.

A rule that keeps more and recomputes less buys FLOPs with memory, one that recomputes more and keeps less buys memory
with FLOPs. Either has a *price*: FLOPs a GiB. A rule that keeps is worth the more the higher its price is, a rule that
recomputes the more the lower it is; in a good policy every price of the first kind is above every price of the second.
The memory is that of the saved values, not the peak, which no single rule may move.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, frozen

from policylang.planning.capabilities import Capabilities
from policylang.planning.inspection.breakdown import as_counted
from policylang.planning.liveness import CostedNeeds, saved_and_recomputed
from policylang.planning.plan import Plan
from policylang.planning.planner import plan as make_plan
from policylang.simulation.peak import estimate_peak

GIB = 2**30

MOST_RULES = 100
"""Of so many rules that decide something the worth is worked out, the first in the policy: each takes a plan."""

_VERDICTS: dict[tuple[int, int], str] = {
    (1, -1): "buys FLOPs",
    (-1, 1): "buys memory",
    (-1, 0): "frees memory",
    (1, 0): "costs memory",
    (0, -1): "saves FLOPs",
    (0, 1): "costs FLOPs",
    (-1, -1): "gains both",
    (1, 1): "costs both",
    (0, 0): "changes nothing",
}
"""By the signs of a rule's bytes and FLOPs. Traffic, to memory or to other ranks, is in neither."""


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

    @property
    def verdict(self) -> str:
        return _VERDICTS[_sign(self.saved_bytes), _sign(self.recomputed_flops)]

    @property
    def flops_per_gib(self) -> float | None:
        """The price; None where the rule does not exchange one for the other."""
        if self.verdict not in ("buys FLOPs", "buys memory"):
            return None
        return abs(self.recomputed_flops) / (abs(self.saved_bytes) / GIB)


def worth_of_rules(
    plan: Plan, capabilities: Capabilities, progress: Callable[[int, int], None] = lambda done, of: None
) -> tuple[Worth, ...]:
    """The worth of every rule that decides something, in the order of the policy, at most of ``MOST_RULES``.

    ``progress`` is told after each rule how many of how many are done. A plan and a simulation for each rule.
    """
    deciding = [index for index, outcome in enumerate(plan.rules) if outcome.decided][:MOST_RULES]
    with_all, peak = _outcome_and_peak(plan)
    found: list[Worth] = []
    for done, index in enumerate(deciding, start=1):
        rules = plan.policy.rules
        policy = evolve(plan.policy, rules=rules[:index] + rules[index + 1 :], rewrites=(), expectations=())
        outcome, other_peak = _outcome_and_peak(make_plan(policy, plan.facts, capabilities))
        found.append(
            Worth(
                rule=index,
                saved_bytes=with_all.saved_bytes - outcome.saved_bytes,
                recomputed_flops=with_all.recomputed_flops - outcome.recomputed_flops,
                peak_bytes=peak - other_peak,
            )
        )
        progress(done, len(deciding))
    return tuple(found)


def _sign(amount: int) -> int:
    return (amount > 0) - (amount < 0)


def _outcome_and_peak(plan: Plan) -> tuple[CostedNeeds, int]:
    outcome = saved_and_recomputed(plan, as_counted(plan.decisions))
    return outcome, estimate_peak(plan.facts, plan.schedule).bytes
