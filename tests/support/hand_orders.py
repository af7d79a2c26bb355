"""Orders made by hand, or drawn: what carries them out and audits them is tested apart from what plans them."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve
from torch import fx

import policylang
from policylang.graph.facts import Facts, Flag, GraphKind
from policylang.graph.schedule import Schedule, StepKind
from policylang.language.syntax import Policy
from policylang.operators.names import WAITS
from policylang.planning.graph_edit import Edits
from policylang.planning.schedule.order_plan import OrderPlan, SchedulingOutcome

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
    numbers = random.Random(seed)
    before: list[set[int]] = [set(rows) for rows in facts.inputs]
    last = -1
    for row, flags in enumerate(facts.flags):
        if flags & (Flag.RANDOM | Flag.WRITES | Flag.EFFECTFUL) and facts.targets[row] not in WAITS:
            if last >= 0:
                before[row].add(last)
            last = row
    readers: list[list[int]] = [[] for _ in facts.inputs]
    missing = [0] * len(before)
    for row, needed in enumerate(before):
        for each in needed:
            readers[each].append(row)
            missing[row] += 1
    ready = [(numbers.random(), row) for row, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, row = heapq.heappop(ready)
        if facts.ops[row] == "call_function":
            order.append(row)
        for reader in readers[row]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (numbers.random(), reader))
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
