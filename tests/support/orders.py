"""Orders made by hand, or drawn: what carries them out and audits them is tested apart from what plans them."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from attrs import evolve
from torch import fx

import policylang
from policylang.graph.facts import Facts, Flag
from policylang.graph.reading.collect import collect
from policylang.graph.schedule import Schedule, ScheduleStep, StepKind
from policylang.operators.names import WAITS
from policylang.planning.graph_edit import Edits
from policylang.planning.plan import Plan
from policylang.planning.schedule.order_plan import OrderPlan

KEEP = policylang.parse("undecided -> save")


def order_of(facts: Facts, rows: Sequence[int] | None = None) -> OrderPlan:
    """The order in which a graph runs some rows, which are all that it computes: its own, unless others are given."""
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    traced = Schedule.of((StepKind.FIRST_RUN, row, 0) for row in calls)
    chosen = Schedule.of((StepKind.FIRST_RUN, row, 0) for row in (calls if rows is None else rows))
    return OrderPlan(facts, traced, Edits(), facts, chosen, (), ())


def with_order(plan: Plan, order: OrderPlan) -> Plan:
    return evolve(plan, order=order)


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


def steps_in(schedule: Schedule, facts: Facts) -> list[ScheduleStep]:
    return [step for step in schedule if facts.ops[step[1]] == "call_function"]


def facts_of_graph(gm: fx.GraphModule) -> Facts:
    return collect(gm)
