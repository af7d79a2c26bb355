"""How each collective of a step fares: when it starts, ends and is awaited, what is exposed of it, and what bounds it.

The same walk as :mod:`policylang.simulation.step_time`, which gives the totals.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum

from attrs import frozen

from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule, StepKind
from policylang.simulation.in_flight import in_flight as bytes_in_flight
from policylang.simulation.in_flight import size_in_flight
from policylang.simulation.memory import simulate
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import RunLog, SentRun, streams_of, walk


class ExposedBy(Enum):
    """Why a collective is exposed."""

    DATA = "data"
    """It starts as soon as what it reads is made, and is awaited where it is first read."""
    LIMIT = "limit"
    """A limit of the policy keeps it from starting earlier."""
    GROUP = "group"
    """Another collective of its group is on the way when it could start."""
    ORDER = "order"
    """Nothing but the order of the graph keeps it from starting earlier, or from being awaited later."""


@frozen
class CollectiveRun:
    """Seconds from the beginning of the step; a row of the facts."""

    row: int
    stream: str
    """``group 0``."""
    issued: float
    """When computation comes to its start."""
    start: float
    """When its stream is free for it."""
    end: float
    awaited: float
    """When computation comes to its wait."""
    exposed: float
    """How long computation waits there. What several are awaited for at once is shared out from the first to end."""
    exposed_by: ExposedBy | None
    """What keeps it exposed; None where it is hidden."""


@frozen
class ComputeRun:
    row: int
    start: float
    end: float


@frozen(eq=False)
class Lanes:
    """A step drawn as lanes: what computes, and what is on the way beside it."""

    compute: Sequence[ComputeRun]
    collectives: Sequence[CollectiveRun]
    """In the order in which they are issued; one that runs again is there twice."""
    step: float
    exposed: float
    """Of collectives and of copies to the host and back."""


def lanes(
    facts: Facts,
    schedule: Schedule,
    times: NodeTimes,
    *,
    in_flight: int | None = None,
    peak: int | None = None,
) -> Lanes:
    """One pass over the steps. ``in_flight`` and ``peak``: the limits, in bytes, that the order was made under; without
    them nothing is said to be exposed by a limit."""
    log = RunLog()
    walked = walk(facts, schedule, times, log)
    causes = _Causes(facts, schedule, log, in_flight, peak)
    least = 1e-12 * walked.end  # what rounding leaves
    runs = [
        CollectiveRun(
            each.row,
            each.stream,
            each.issued,
            each.start,
            each.end,
            each.issued if each.awaited is None else each.awaited,
            each.exposed,
            causes.of(each) if each.exposed > least else None,
        )
        for each in log.sent
    ]
    return Lanes([ComputeRun(row, start, end) for row, _, start, end in log.compute], runs, walked.end, walked.exposed)


class _Causes:
    """What keeps a collective exposed, from what the walk has noted."""

    def __init__(self, facts: Facts, schedule: Schedule, log: RunLog, in_flight: int | None, peak: int | None) -> None:
        self.facts, self.log = facts, log
        self.in_flight, self.peak = in_flight, peak
        self.made = _made(facts, schedule, log)
        of_data = [(row, start) for row, region, start, _ in log.compute if self.made[row, region]]
        self.starts = [start for _, start in of_data]
        self.over = max((end for *_, end in log.compute), default=0.0)
        if in_flight is not None or peak is not None:
            self._note_limits(schedule, {row for row, _ in of_data})

    def of(self, run: SentRun) -> ExposedBy:
        if run.start > run.issued:
            return ExposedBy.GROUP
        facts, made = self.facts, self.made
        reads = (made.get((each, run.region), made.get((each, 0), 0.0)) for each in facts.inputs[run.row])
        if self._computes_between(max(reads, default=0.0), run.issued):
            return ExposedBy.LIMIT if self._is_full_before(run) else ExposedBy.ORDER
        read = self.over if run.read is None else run.read
        late = run.awaited is not None and self._computes_between(max(run.awaited, run.end), read)
        return ExposedBy.ORDER if late else ExposedBy.DATA

    def _computes_between(self, start: float, end: float) -> bool:
        """Whether any computation begins in a stretch of time, what collectives take along aside."""
        at = bisect_left(self.starts, start)
        return at < len(self.starts) and self.starts[at] < end

    def _note_limits(self, schedule: Schedule, computing: set[int]) -> None:
        """For each step the last one before it that computes, and what is on the way and alive in each."""
        facts, self.before = self.facts, list[int]()
        last = -1
        for step, (kind, row, _) in enumerate(schedule):
            self.before.append(last)
            if kind <= StepKind.SECOND_RUN and row in computing:
                last = step
        self.sent = bytes_in_flight(facts, schedule)
        timeline = simulate(facts, schedule)
        self.live = dict(zip(timeline.steps, timeline.live, strict=True))

    def _is_full_before(self, run: SentRun) -> bool:
        """Whether a limit would be exceeded had it been started before what computes last ahead of it."""
        if self.in_flight is None and self.peak is None:
            return False
        before = self.before[run.step]
        if before < 0:
            return False
        if self.in_flight is not None and self.sent[before] + size_in_flight(self.facts, run.row) > self.in_flight:
            return True
        return self.peak is not None and self.live[before] + self.facts.bytes[run.row] > self.peak


def _made(facts: Facts, schedule: Schedule, log: RunLog) -> dict[tuple[int, int], float]:
    """By row and region, when the data is there that it gives on; of what a collective takes along, from the
    beginning."""
    taken = _taken_along(facts)
    made: dict[tuple[int, int], float] = {}
    for kind, row, region in schedule:
        if kind <= StepKind.SECOND_RUN:
            again = region if kind == StepKind.SECOND_RUN else 0
            made[row, again] = 0.0 if taken[row] else log.ends[row, again]
    return made


def _taken_along(facts: Facts) -> bytearray:
    """1 for what is made of the graph's inputs alone and read by collectives alone: the cast of a shard moves with its
    gather."""
    started, ops = streams_of(facts).started, facts.ops
    of_inputs, taken = bytearray(len(facts)), bytearray(len(facts))
    for row, op in enumerate(ops):
        of_inputs[row] = op != "call_function" or (
            row not in started and all(of_inputs[each] for each in facts.inputs[row])
        )
    for row in range(len(facts) - 1, -1, -1):
        users = facts.users[row]
        taken[row] = of_inputs[row] and bool(users) and all(each in started or taken[each] for each in users)
    return taken
