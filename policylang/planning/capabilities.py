"""The paths that carry plans out, by what they can do: the one place that says it, so that a plan made without torch
is the plan that will be made with it."""

from __future__ import annotations

from policylang.graph.facts import GraphKind
from policylang.planning.plan import Capabilities

JOINT = Capabilities(
    name="the joint-graph partitioner", replays_random=True, offloads=True, rewrites=True, undecided_auto=True
)
FLAT = Capabilities(
    name="a flat graph",
    replays_random=True,
    offloads=True,
    rewrites=True,
    keeps_undecided=True,
)
"""No min-cut exists there: with ``undecided -> auto``, and for ``leave``, a value stays saved as the traced graph has
it, and the report says how many those are."""

HALF = Capabilities(name="a half of a partition", rewrites=True, undecided_auto=True)
"""Given a policy's rewrites alone: what it saves was settled when it was cut."""

HOOK = Capabilities(name="a hook of Inductor's", replays_random=True, undecided_auto=True)
"""A joint graph that is tagged for min-cut. No rewrites: where Inductor takes a graph from its caches nobody is called,
and the groups that rewrites need would not be made."""

EAGER = Capabilities(name="an eager checkpoint", replays_random=True, recomputes_undecided=True)
"""A block as it runs, operator by operator. What no rule saves is recomputed, as a checkpoint does."""


def capabilities_for(kind: GraphKind) -> Capabilities:
    """Of the path that a graph of this kind takes. A half of a partition can be planned as its joint graph was."""
    return FLAT if kind is GraphKind.FLAT else JOINT
