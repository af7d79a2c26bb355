"""The time and the peak of the step that a plan comes to."""

from __future__ import annotations

from attrs import evolve

from policylang.graph.schedule import Schedule
from policylang.planning.plan import Plan
from policylang.simulation.peak import Peak, estimate_peak
from policylang.simulation.step_time import StepTime, step_time


def time_of_step(plan: Plan, schedule: Schedule) -> StepTime | None:
    """The times of a schedule on the graph of a plan; None without a device."""
    return None if plan.shown_times is None else step_time(plan.facts, schedule, plan.shown_times)


def time_of_plan(plan: Plan) -> StepTime | None:
    """The times of the step that is carried out, in the order that the scheduling lines come to; None without a
    device."""
    found, order = time_of_step(plan, plan.schedule), plan.order
    if found is None or order is None or order.times is None:
        return found
    ordered = step_time(order.facts, order.schedule, order.times)
    return evolve(found, step=ordered.step, exposed=ordered.exposed)


def peak_of_plan(plan: Plan) -> Peak:
    """Of the step that is carried out."""
    if plan.order is None:
        return estimate_peak(plan.facts, plan.schedule)
    return estimate_peak(plan.order.facts, plan.order.schedule)
