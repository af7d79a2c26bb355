"""Schedules offloading: when each copy to the host and back starts and is awaited.

A copy is started right behind the last forward reader of its memory, and awaited before the second copy after it is
started, at the latest where the forward ends: so long the device holds what is copied. A region of the backward fetches
a value where the second value before it, in the order of first use, is used first, at the earliest where the region
begins, and awaits it right before its own first use. So no more than :data:`IN_FLIGHT` copies are ever under way beside
the one that is awaited.
"""

from __future__ import annotations

from policylang.graph.facts import Facts, GraphKind, Phase, is_gradient, storage_roots
from policylang.graph.schedule import ScheduleStep, StepKind

IN_FLIGHT = 2
"""How many copies between device and host may be under way, in either direction, before one is awaited."""


def with_host_copies(facts: Facts, steps: list[ScheduleStep], moved: bytearray) -> list[ScheduleStep]:
    """The steps with the copies that move some rows. Linear in both."""
    return _Copies(facts, steps, moved).steps_with_copies() if any(moved) else steps


class _Copies:
    def __init__(self, facts: Facts, steps: list[ScheduleStep], moved: bytearray) -> None:
        self.facts = facts
        self.steps = steps
        self.moved = moved
        self.before: dict[int, list[ScheduleStep]] = {}
        self.behind: dict[int, list[ScheduleStep]] = {}

    def steps_with_copies(self) -> list[ScheduleStep]:
        first_reads = self._first_reads()
        begins: dict[int, int] = {}
        for at, (_, _, region) in enumerate(self.steps):
            begins.setdefault(region, at)
        backward = min((at for region, at in begins.items() if region), default=len(self.steps))
        self._copy_to_host({row for reads in first_reads.values() for row in reads}, backward)
        for region, reads in first_reads.items():
            self._copy_from_host(region, reads, begins.get(region, len(self.steps)))
        found: list[ScheduleStep] = []
        for at, step in enumerate(self.steps):
            found.extend((*self.before.get(at, ()), step, *self.behind.get(at, ())))
        return [*found, *self.before.get(len(self.steps), ())]

    def _first_reads(self) -> dict[int, dict[int, int]]:
        """By region, each moved row that it reads to the step that does so first, in the order of these steps."""
        facts, found = self.facts, dict[int, dict[int, int]]()
        for at, (_, row, region) in enumerate(self.steps):
            if region:
                for source in facts.inputs[row]:
                    if self.moved[source]:
                        found.setdefault(region, {}).setdefault(source, at)
        if facts.kind is GraphKind.JOINT:
            for row, phase in enumerate(facts.phases):
                if phase == Phase.OUTPUT:
                    for source in facts.inputs[row]:
                        if self.moved[source] and is_gradient(facts, source):
                            found.setdefault(1, {}).setdefault(source, len(self.steps))
        return found

    def _copy_to_host(self, wanted: set[int], backward: int) -> None:
        leaving = list(self._last_readers(wanted).items())
        for number, (row, at) in enumerate(leaving):
            steps = self.behind.setdefault(at, [])
            if number >= IN_FLIGHT:
                steps.append((StepKind.WAIT_TO_HOST, leaving[number - IN_FLIGHT][0], 0))
            steps.append((StepKind.COPY_TO_HOST, row, 0))
        for row, _ in leaving[-IN_FLIGHT:]:
            self.before.setdefault(backward, []).append((StepKind.WAIT_TO_HOST, row, 0))

    def _last_readers(self, wanted: set[int]) -> dict[int, int]:
        """Each wanted row to the last forward step that reads its memory, or makes it, in the order of these steps."""
        facts, roots = self.facts, storage_roots(self.facts)
        value_in = {roots[row]: row for row in wanted}
        last: dict[int, int] = {}
        for at, (_, row, region) in enumerate(self.steps):
            if region:
                continue
            for touched in (row, *facts.inputs[row]):
                value = value_in.get(roots[touched])
                if value is not None and facts.forward_mask[touched]:
                    last.pop(value, None)
                    last[value] = at
        return last

    def _copy_from_host(self, region: int, reads: dict[int, int], begin: int) -> None:
        rows, firsts = list(reads), list(reads.values())
        for number, row in enumerate(rows):
            start = begin if number < IN_FLIGHT else firsts[number - IN_FLIGHT]
            self.before.setdefault(start, []).append((StepKind.COPY_FROM_HOST, row, region))
            self.before.setdefault(firsts[number], []).append((StepKind.WAIT_FROM_HOST, row, region))
