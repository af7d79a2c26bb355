"""The graph as it runs under a plan's decisions: each recomputation a node of its own, in the order of the schedule.

Without torch, so that scheduling lines are planned on a snapshot as they will be on the graph. The names of second runs
are those that the flat path gives its copies.
"""

from __future__ import annotations

from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule


def as_run(facts: Facts, schedule: Schedule) -> Facts:
    """The facts of the graph that runs this schedule: one row for each run of a node, in its order. Copies to the host
    and back are no rows. A half that runs as it is gives itself."""
    raise NotImplementedError
