"""Orders made by hand, or drawn: what carries them out and audits them is tested apart from what plans them."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve
from torch import fx

import policylang
from policylang.graph.facts import Facts, Flag, GraphKind, Schedule, StepKind
from policylang.language.syntax import Policy
from policylang.operators.names import GETITEM, WAITS
from policylang.planning.graph_edit import Edits
from policylang.planning.plan import OrderPlan, SchedulingOutcome

KEEP = policylang.parse("undecided -> save")


def order_of(facts: Facts, rows: Sequence[int] | None = None) -> OrderPlan:
    """The order in which a graph runs some rows, which are all that it computes: its own, unless others are given."""
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    traced = Schedule.of((StepKind.FIRST_RUN, row, 0) for row in calls)
    chosen = Schedule.of((StepKind.FIRST_RUN, row, 0) for row in (calls if rows is None else rows))
    return OrderPlan(facts, traced, Edits(), facts, chosen, (), ())


def drawn_order(facts: Facts, seed: int) -> list[int]:
    """The rows that a graph computes in another order, in which each stands behind what it reads. What draws, writes or
    has an effect keeps its place among its like."""
    schedule = order_of(facts).schedule
    return [row for _, row, _ in drawn_schedule(facts, schedule, seed)]


def drawn_schedule(facts: Facts, schedule: Schedule, seed: int) -> Schedule:
    """The steps of a graph as it runs in another order. A copy to the host is awaited before the copy back starts, and
    that before its region reads the value."""
    steps = list(schedule)
    run = {row: at for at, (kind, row, _) in enumerate(steps) if kind <= StepKind.SECOND_RUN}
    copies = {step: at for at, step in enumerate(steps) if step[0] > StepKind.SECOND_RUN}
    before: list[set[int]] = []
    last = -1
    for at, (kind, row, region) in enumerate(steps):
        if kind == StepKind.COPY_TO_HOST:
            before.append({run[row]})
        elif kind == StepKind.WAIT_TO_HOST:
            before.append({copies[StepKind.COPY_TO_HOST, row, 0]})
        elif kind == StepKind.COPY_FROM_HOST:
            before.append({copies[StepKind.WAIT_TO_HOST, row, 0]})
        elif kind == StepKind.WAIT_FROM_HOST:
            before.append({copies[StepKind.COPY_FROM_HOST, row, region]})
        else:
            back = [copies.get((StepKind.WAIT_FROM_HOST, read, region)) for read in facts.inputs[row]]
            before.append({run[read] for read in facts.inputs[row] if read in run} | {each for each in back if each})
            has_turn = facts.flags[row] & (Flag.RANDOM | Flag.WRITES | Flag.EFFECTFUL)
            if has_turn and facts.targets[row] not in (GETITEM, *WAITS):
                before[-1] |= {last} - {-1}
                last = at
    return Schedule.of(steps[at] for at in drawn_places(before, random.Random(seed)))


def drawn_places(before: list[set[int]], numbers: random.Random) -> list[int]:
    """Any order that has each behind what has to come before it."""
    behind: list[list[int]] = [[] for _ in before]
    for at, needed in enumerate(before):
        for each in needed:
            behind[each].append(at)
    missing = [len(needed) for needed in before]
    ready = [(numbers.random(), at) for at, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, at = heapq.heappop(ready)
        order.append(at)
        for each in behind[at]:
            missing[each] -= 1
            if not missing[each]:
                heapq.heappush(ready, (numbers.random(), each))
    return order


def names_in(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "call_function"]


def drawing(seed: int) -> Callable[..., OrderPlan | None]:
    """A stand-in for what plans an order, which draws one for each half."""

    def plan_order(policy: Policy, facts: Facts, schedule: Schedule, *_: Any, **__: Any) -> OrderPlan | None:
        if not policy.orders or facts.kind is GraphKind.JOINT:
            return None
        order = order_of(facts, drawn_order(facts, seed))
        return evolve(order, outcomes=tuple(SchedulingOutcome(each, (), ()) for each in policy.scheduling))

    return plan_order
