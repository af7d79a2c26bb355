"""The time of the step that a plan comes to."""

from __future__ import annotations

from math import fsum

from attrs import evolve

from policylang.graph.schedule import Schedule
from policylang.planning.liveness import Needs
from policylang.planning.plan import Plan
from policylang.simulation.step_time import StepTime, step_time


def time_of_step(plan: Plan, schedule: Schedule, needs: Needs) -> StepTime | None:
    """The times of a schedule on the graph of a plan; None without a device. Of a whole model in eager, whose blocks
    run again operator by operator, more runs a second time than its schedule has."""
    if plan.shown_times is None:
        return None
    found = step_time(plan.facts, schedule, plan.shown_times)
    if not plan.block_by_block:
        return found
    again = fsum(plan.shown_times.seconds[row] for row in needs.recomputed)
    return evolve(found, recomputed=again, step=found.step + again - found.recomputed)
