"""The memory that is alive while each step of a schedule runs, from the lifetimes of its values alone.

A simulation of the steps as they run without fusion: :mod:`policylang.simulation.lifetimes` says what is counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

from attrs import field, frozen

from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule, StepKind
from policylang.language.interruption.wanted import check_cancelled
from policylang.simulation.lifetimes import ALLOCATES, Lifetimes, lifetimes


@frozen(eq=False)
class Timeline:
    """The memory alive while each node runs, its own results included. One entry for each run of a node and each copy
    from the host, in the order of execution."""

    rows: Sequence[int]
    live: Sequence[int]
    """Bytes."""
    again: bytes
    """1 where a step computes a forward value a second time, or fetches it from the host."""
    backward: bytes
    """1 where a step belongs to the backward, second computations included."""
    resident: int
    """Bytes of the graph inputs that are there before the first step."""
    steps: Sequence[int] = field(repr=False)
    """The number of each entry's step in the schedule."""
    lifetimes: Lifetimes = field(repr=False)
    """What is alive at each step, value by value; at each it sums up to ``live``."""


def simulate(facts: Facts, schedule: Schedule) -> Timeline:
    """The memory of a step that runs in this order."""
    check_cancelled()
    found = lifetimes(facts, schedule)
    length = len(schedule)
    changes = array("q", bytes(8 * (length + 2)))  # the first of what is there before the first step
    for size, made, last in zip(found.bytes, found.made, found.last, strict=True):
        changes[made + 1] += size
        if last < length:
            changes[last + 2] -= size
    alive = array("q", accumulate(changes))
    steps = array("i", (step for step, kind in enumerate(schedule.kinds) if kind in ALLOCATES))
    return Timeline(
        rows=array("i", (schedule.rows[step] for step in steps)),
        live=array("q", (alive[step + 1] for step in steps)),
        again=bytes(schedule.kinds[step] != StepKind.FIRST_RUN for step in steps),
        backward=bytes(schedule.regions[step] > 0 for step in steps),
        resident=alive[0],
        steps=steps,
        lifetimes=found,
    )
