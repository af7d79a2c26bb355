"""Builds the schedule of a training step from facts and decisions: each recomputation runs as late as possible.

What a graph runs keeps the order in which it was traced, a partition all of its forward first. In a region of the
backward, the first step that needs a recomputed value gets, just before itself, everything that is recomputed for it,
in forward order; later steps of the region share it. Pieces of a tuple are taken right behind the recomputed operator,
so that what nobody takes can be freed. Copies to the host and back come last.

A forward or backward graph runs as it is. A *joint graph* has one region. Where anything is recomputed, the backward
that depends on no gradient and has no effect waits until it is needed, too. What leads to no result does not run, and
all pieces follow their operator.

A *flat graph* may have any number of regions, parted by forward nodes that still run. A recomputed value that the rest
of the forward holds beyond a region anyway is read there as it is. What is written in place is recomputed as a whole. A
forward run is left out where nothing of the forward reads the value, unless it draws, writes or has another effect: a
draw that does not happen would shift every later one.

O(nodes + edges), the recomputations of a step sorted into forward order.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from attrs import frozen

from policylang.graph.blocks import OUTSIDE
from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase, is_gradient, mask_of
from policylang.graph.schedule import Schedule, ScheduleStep, StepKind
from policylang.operators.names import GETITEM
from policylang.planning.checkpoints import Checkpoints

IN_FLIGHT = 2
"""The number of copies between device and host that may be under way, in either direction, before one is awaited."""


BLOCKS_AHEAD = 1
"""How many blocks ahead of its own a copy back starts in eager, unless a policy says it."""


def pool_bytes(size: int) -> int:
    """The bytes that a value takes in the pool of host memory: the power of two above, as in PyTorch's own pools of
    pinned memory."""
    return 1 << max(size - 1, 0).bit_length()


def host_memory(facts: Facts, schedule: Schedule) -> array[int]:
    """The bytes that the pool of host memory gives out while each step runs: to a value from where its copy starts to
    the end of its last copy back. Their most is the pool's size."""
    changes = array("q", bytes(8 * (len(schedule) + 1)))
    last_waits = {row: step for step, (kind, row, _) in enumerate(schedule) if kind == StepKind.WAIT_FROM_HOST}
    for step, (kind, row, _) in enumerate(schedule):
        if kind == StepKind.COPY_TO_HOST:
            changes[step] += pool_bytes(facts.bytes[row])
            changes[last_waits.get(row, len(schedule) - 1) + 1] -= pool_bytes(facts.bytes[row])
    return array("q", accumulate(changes[:-1]))


@frozen(eq=False)
class Ahead:
    """How far ahead copies back start: so many blocks, by the block of each row."""

    blocks: int
    block_of: Sequence[int]


def with_host_copies(
    facts: Facts, steps: list[ScheduleStep], moved: Mapping[int, StepKind], ahead: Ahead | None = None
) -> list[ScheduleStep]:
    """The steps with the copies that move some rows. Linear in both.

    A copy starts right behind the last forward reader of its memory, and is awaited before the second copy after it
    starts, at the latest where the forward ends: until then the device holds the value. A backward region fetches a
    value where the second value before it, in the order of first use, is used first, at the earliest where the region
    begins, and awaits it right before its own first use. So at most :data:`IN_FLIGHT` copies are under way beside the
    one that is awaited. With ``ahead`` it fetches what a block uses first where the block so many before it begins.
    """
    if not moved:
        return steps
    begins = dict[int, int]()
    first_reads = defaultdict[int, dict[int, int]](dict)  # by region, moved rows and the step that reads each first
    for at, (_, row, region) in enumerate(steps):
        begins.setdefault(region, at)
        for source in facts.inputs[row] if region else ():
            if source in moved:
                first_reads[region].setdefault(source, at)
    for row, phase in enumerate(facts.phases if facts.kind is GraphKind.JOINT else ()):
        for source in facts.inputs[row] if phase == Phase.OUTPUT else ():
            if source in moved and is_gradient(facts, source):
                first_reads[1].setdefault(source, len(steps))
    roots = facts.storage_roots
    value_in = {roots[row]: row for reads in first_reads.values() for row in reads}
    last_readers = dict[int, int]()  # of each, the last forward step that reads its memory, or makes it, in order
    for at, (_, row, region) in enumerate(steps):
        for touched in () if region else (row, *facts.inputs[row]):
            value = value_in.get(roots[touched])
            if value is not None and facts.forward_mask[touched]:
                last_readers.pop(value, None)
                last_readers[value] = at
    before, behind = defaultdict[int, list[ScheduleStep]](list), defaultdict[int, list[ScheduleStep]](list)
    leaving = list(last_readers)
    for number, row in enumerate(leaving):
        if number >= IN_FLIGHT:
            behind[last_readers[row]].append((StepKind.WAIT_TO_HOST, leaving[number - IN_FLIGHT], 0))
        behind[last_readers[row]].append((StepKind.COPY_TO_HOST, row, 0))
    end = min((at for region, at in begins.items() if region), default=len(steps))
    before[end] += [(StepKind.WAIT_TO_HOST, row, 0) for row in leaving[-IN_FLIGHT:]]
    for region, reads in first_reads.items():
        firsts = list(reads.values())
        early = _begins_ahead(steps, region, ahead) if ahead is not None else {}
        for number, (row, first) in enumerate(reads.items()):
            start = begins.get(region, len(steps)) if number < IN_FLIGHT else firsts[number - IN_FLIGHT]
            if ahead is not None and first < len(steps):
                start = early.get(ahead.block_of[steps[first][1]], start)
            before[start].append((StepKind.COPY_FROM_HOST, row, region))
            before[first].append((StepKind.WAIT_FROM_HOST, row, region))
    found: list[ScheduleStep] = []
    for at, step in enumerate(steps):
        found.extend((*before.get(at, ()), step, *behind.get(at, ())))
    return [*found, *before[len(steps)]]


def _begins_ahead(steps: Sequence[ScheduleStep], region: int, ahead: Ahead) -> dict[int, int]:
    """By block, the step of a region where the block begins that is so many before it."""
    begins = dict[int, int]()
    for at, (_, row, where) in enumerate(steps):
        if where == region and ahead.block_of[row] != OUTSIDE:
            begins.setdefault(ahead.block_of[row], at)
    order = list(begins.values())
    return {block: order[max(number - ahead.blocks, 0)] for number, block in enumerate(begins)}


_FORWARD, _BACKWARD, _OUTPUT = int(Phase.FORWARD), int(Phase.BACKWARD), int(Phase.OUTPUT)
_RANDOM_OR_EFFECT = Flag.RANDOM | Flag.EFFECTFUL

Part = tuple[int, list[int]]
"""A region, 0 for the forward, and rows that run one after the other. A forward row in a region is recomputed."""


def build_schedule(
    facts: Facts,
    recomputed: Iterable[int],
    offloaded: Iterable[int] | Mapping[int, StepKind] = (),
    ahead: Ahead | None = None,
) -> Schedule:
    """The steps of a graph in which ``recomputed`` rows are recomputed for the backward, ``offloaded`` ones wait on the
    host in between (or where the step leads that is given for each), and all else that is read is kept. Either may name
    more rows than the backward needs."""
    again = mask_of(recomputed, len(facts))
    moved = offloaded if isinstance(offloaded, Mapping) else dict.fromkeys(offloaded, StepKind.COPY_TO_HOST)
    if facts.kind is GraphKind.FLAT:
        steps = _with_pieces_behind(facts, _steps(facts, _Flat(facts, again).parts()), StepKind.SECOND_RUN)
        return Schedule.of(with_host_copies(facts, steps, moved, ahead))
    steps = with_host_copies(facts, _steps(facts, _partition_parts(facts, again)), moved, ahead)
    return Schedule.of(
        _with_pieces_behind(facts, steps, StepKind.FIRST_RUN) if facts.kind is GraphKind.JOINT else steps
    )


def build_checkpointed_schedule(
    facts: Facts,
    checkpoints: Checkpoints,
    saved: Iterable[int],
    moved: Iterable[int],
    again: Iterable[int],
    ahead: int = BLOCKS_AHEAD,
) -> Schedule:
    """The steps of a model in eager, in the order in which they were traced. Each block is recomputed as a whole when
    its backward first asks for something of it, and gives up what it holds where that is met on the way. What a node of
    autograd reads goes when all its operators have run: those that read the same gradient, one behind the other.

    What crosses blocks is copied to the host as the next block begins, any other value behind its last reader. When a
    block's recomputation begins, the copies back start of what it needs, and of what the ``ahead`` blocks before it
    need. It awaits at once what it reads, and what it holds where that is met.
    """
    repeats, leaving, phases, inputs = frozenset(again), frozenset(moved), facts.phases, facts.inputs
    runs: list[list[int]] = [[] for _ in checkpoints.reach]
    for row in sorted({*saved, *leaving, *repeats}):
        at = checkpoints.of[row]
        if at != OUTSIDE and row < checkpoints.reach[at]:
            runs[at].append(row)
    begins, ends = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for at, (first, last) in enumerate(zip(checkpoints.first, checkpoints.last, strict=True)):
        begins[first].append(at)
        ends[last].append(at)
    copies = _BlockCopies(facts, checkpoints, leaving, runs)
    steps, held = copies.steps, list[tuple[int, int]]()
    region, inside, gradients, reads, until = 0, False, set[int](), list[int](), 0
    for row, op in enumerate(facts.ops):
        if op != "call_function":
            continue
        late = phases[row] == _BACKWARD
        region += late and not inside
        inside = late or (inside and phases[row] != _FORWARD)
        for at in begins.get(row, ()):
            copies.fetch(at, ahead, region)
            for each in runs[at]:
                if each in repeats:
                    steps.append((int(StepKind.SECOND_RUN), each, region))
                elif each in leaving:
                    steps.append((int(StepKind.WAIT_FROM_HOST), each, region))
                else:
                    held.append((each, len(steps)))
        for at in ends.get(row, ()):
            held.extend((each, len(steps)) for each in checkpoints.given[at] if not copies.moves(each))
        if late and not facts.flags[row] & Flag.VIEW:
            memory = (facts.storage_roots[each] for each in inputs[row])
            own = {each for each in memory if phases[each] == _BACKWARD or facts.input_kinds[each] == InputKind.TANGENT}
            if gradients.isdisjoint(own):
                held.extend((each, until) for each in reads)
                gradients, reads = own, []
            reads.extend(inputs[row])
            until = len(steps)
        copies.before(row)
        steps.append((int(StepKind.FIRST_RUN), row, region if late else 0))
        copies.behind(row)
    held.extend((each, until) for each in reads)
    return Schedule.of(steps, held)


class _BlockCopies:
    """The copies between host and device around the blocks of a model in eager, as steps between those that run."""

    def __init__(
        self, facts: Facts, checkpoints: Checkpoints, moved: Collection[int], runs: Sequence[Sequence[int]]
    ) -> None:
        self.facts, self.of = facts, checkpoints.of
        self.steps: list[ScheduleStep] = []
        self.holders = {facts.storage_roots[row]: row for row in moved}
        self.given = [[each for each in given if self.moves(each)] for given in checkpoints.given]
        """By block, the values that it reads and that wait on the host."""
        self.taken = [[*dict.fromkeys(self._holder(each) for each in given)] for given in self.given]
        self.fetched = [
            [*dict.fromkeys((*taken, *(row for row in rows if row in moved)))]
            for taken, rows in zip(self.taken, runs, strict=True)
        ]
        crossing = {row for taken in self.taken for row in taken}
        last_readers = dict[int, int]()  # by operator: what it returns leaves together
        for row in facts.forward:
            for touched in (row, *facts.inputs[row]):
                if self.moves(touched) and (holder := self._holder(touched)) not in crossing:
                    last_readers[facts.owners[holder]] = row
        self.leave_behind = defaultdict[int, list[int]](list)
        for holder in sorted(self.holders.values()):
            if holder not in crossing:
                self.leave_behind[last_readers[facts.owners[holder]]].append(holder)
        self.under_way, self.left, self.asked = list[int](), set[int](), set[int]()

    def moves(self, row: int) -> bool:
        return self.facts.storage_roots[row] in self.holders

    def _holder(self, row: int) -> int:
        return self.holders[self.facts.storage_roots[row]]

    def before(self, row: int) -> None:
        """A block that begins takes what it reads."""
        if self.facts.phases[row] == _FORWARD and self.of[row] != OUTSIDE:
            self._leave(self.taken[self.of[row]])

    def behind(self, row: int) -> None:
        self._leave(self.leave_behind.get(row, ()))

    def _leave(self, rows: Iterable[int]) -> None:
        for row in rows:
            if row in self.left:
                continue
            if len(self.under_way) >= IN_FLIGHT:
                self.steps.append((int(StepKind.WAIT_TO_HOST), self.under_way.pop(0), 0))
            self.steps.append((int(StepKind.COPY_TO_HOST), row, 0))
            self.under_way.append(row)
            self.left.add(row)

    def await_all(self, region: int) -> None:
        """The first block is recomputed: what comes before it in the backward knows of no copies."""
        self.steps += [(int(StepKind.WAIT_TO_HOST), row, region) for row in self.under_way]
        self.under_way.clear()

    def fetch(self, block: int, ahead: int, region: int) -> None:
        """The recomputation of a block begins: views of what it reads are taken again."""
        self.await_all(region)
        for each in range(block, max(block - ahead, 0) - 1, -1):
            if each not in self.asked:
                self.asked.add(each)
                self.steps += [(int(StepKind.COPY_FROM_HOST), row, region) for row in self.fetched[each]]
        self.steps += [(int(StepKind.WAIT_FROM_HOST), row, region) for row in self.taken[block]]
        views = set[int]()
        for row in self.given[block]:
            while row != self._holder(row) and row not in views:
                views.add(row)
                row = self.facts.inputs[row][0]
        self.steps += [(int(StepKind.SECOND_RUN), row, region) for row in sorted(views)]


def _steps(facts: Facts, parts: Sequence[Part]) -> list[ScheduleStep]:
    """A forward row is recomputed in a region, and so is a backward row that the forward has run."""
    first, second, phases = int(StepKind.FIRST_RUN), int(StepKind.SECOND_RUN), facts.phases
    ahead = {row for region, rows in parts if not region for row in rows if phases[row] == _BACKWARD}
    return [
        (second if region and (phases[row] == _FORWARD or row in ahead) else first, row, region)
        for region, rows in parts
        for row in rows
    ]


def _with_pieces_behind(facts: Facts, steps: list[ScheduleStep], lowest: StepKind) -> list[ScheduleStep]:
    """The steps with each ``getitem`` right behind the run that it reads, where that is in the same region.
    ``lowest``: the kind of run from which on steps move, all runs or recomputations alone."""
    targets, inputs, highest = facts.targets, facts.inputs, int(StepKind.SECOND_RUN)
    pieces = [step for step in steps if targets[step[1]] == GETITEM and lowest <= step[0] <= highest]
    sources = {inputs[row][0] for _, row, _ in pieces if inputs[row]}
    here = {step[1:] for step in steps if step[1] in sources and lowest <= step[0] <= highest}
    behind = defaultdict[tuple[int, int], list[ScheduleStep]](list)
    for step in pieces:
        source = (inputs[step[1]][0], step[2])
        if source in here:
            behind[source].append(step)
    if not behind:
        return steps
    moved = {step for each in behind.values() for step in each}
    order: list[ScheduleStep] = []
    for step in steps:
        pending = [] if step in moved else [step]
        while pending:
            order.append(pending.pop())
            if order[-1][0] <= highest:
                pending.extend(reversed(behind.get(order[-1][1:], ())))
    return order


# --- partitions ------------------------------------------------------------------------------------------------------


def _partition_parts(facts: Facts, again: bytearray) -> list[Part]:
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    if facts.kind is not GraphKind.JOINT:  # forward or backward alone
        return [(int(facts.phases[row] == _BACKWARD), [row]) for row in calls]
    in_forward, in_backward = _runs(facts, again)
    forward = [row for row in calls if in_forward[row]]
    backward = [row for row in calls if in_backward[row]]
    if any(facts.phases[row] == _FORWARD for row in backward):
        backward = _as_late_as_possible(facts, backward)
    return [(0, forward), (1, backward)]


def _runs(facts: Facts, again: bytearray) -> tuple[bytearray, bytearray]:
    """The rows that run in the forward and those that run in the backward: what leads to a result or has an effect."""
    in_forward, in_backward = bytearray(len(facts)), bytearray(len(facts))
    flags, phases, inputs = facts.flags, facts.phases, facts.inputs
    for row in range(len(facts) - 1, -1, -1):
        flag, phase = flags[row], phases[row]
        if flag & _RANDOM_OR_EFFECT or flag & (Flag.WRITES | Flag.REPEATABLE) == Flag.WRITES:
            (in_backward if phase == _BACKWARD else in_forward)[row] = 1
        for source in inputs[row]:
            repeated = phases[source] == _BACKWARD or again[source]
            if phase == _OUTPUT:
                late = phases[source] == _BACKWARD or (again[source] and is_gradient(facts, source))
                (in_backward if late else in_forward)[source] = 1
                if late and flags[source] & Flag.FORWARD_OUTPUT:
                    in_forward[source] = 1
            if in_forward[row]:
                in_forward[source] = 1
            if in_backward[row]:
                (in_backward if repeated else in_forward)[source] = 1
    return in_forward, in_backward


def _as_late_as_possible(facts: Facts, rows: Sequence[int]) -> list[int]:
    order: list[int] = []
    phases, inputs = facts.phases, facts.inputs
    late = bytearray(kind == InputKind.TANGENT for kind in facts.input_kinds)  # depends on a gradient
    waiting = bytearray(len(facts))
    effect = _RANDOM_OR_EFFECT | Flag.WRITES
    for row in rows:
        if any(late[source] for source in inputs[row]):
            late[row] = 1
        elif phases[row] != _BACKWARD or not facts.flags[row] & effect:  # a recomputed draw repeats its numbers
            waiting[row] = 1
    waits = bytes(waiting)

    def run(pending: list[int]) -> None:
        found: list[int] = []
        while pending:
            row = pending.pop()
            if waiting[row]:
                waiting[row] = 0
                found.append(row)
                pending.extend(inputs[row])
        order.extend(sorted(found))

    for row in rows:
        if not waits[row]:
            run(list(inputs[row]))
            order.append(row)
    for row, phase in enumerate(phases):
        if phase == _OUTPUT:
            run([each for each in inputs[row] if phases[each] == _BACKWARD or is_gradient(facts, each)])
    return order


# --- flat graphs -----------------------------------------------------------------------------------------------------


class _Flat:
    """The parts of a flat graph. :meth:`parts` runs what the forward needs whatever is recomputed, and before each
    backward row what is recomputed for it."""

    def __init__(self, facts: Facts, again: bytearray) -> None:
        self.facts = facts
        self.again = again
        self.roots = facts.storage_roots
        self.units = defaultdict[int, list[int]](list)  # memory written in place, and all that is recomputed with it
        for row, flag in enumerate(facts.flags):
            if flag & Flag.REPEATABLE:
                self.units[facts.owners[row]].append(row)
        self.kept = bytearray(len(facts))
        self.held_until: dict[int, int] = {}
        self._read_forward()

    def parts(self) -> list[Part]:
        phases, ops, kept = self.facts.phases, self.facts.ops, self.kept
        ends, end = dict[int, int](), -1  # backward row → the last one of its region
        for row in range(len(phases) - 1, -1, -1):
            if phases[row] == _BACKWARD:
                end = ends[row] = row if end < 0 else end
            elif phases[row] == _FORWARD and kept[row] and ops[row] == "call_function":
                end = -1
        found: list[Part] = [(0, [])]
        between: list[int] = []  # the epilogue parts no region
        regions, done = 0, set[int]()
        for row, phase in enumerate(phases):
            if ops[row] != "call_function" or (phase == _FORWARD and not kept[row]):
                continue
            region, rows = found[-1]
            if phase == _OUTPUT and region:
                between.append(row)
            elif phase == _BACKWARD:
                if not region:
                    regions += 1
                    rows, done = [], set()
                    found.append((regions, rows))
                rows.extend((*between, *self._again_for(row, ends[row], done), row))
                between = []
            elif region:
                found.append((0, [*between, row]))
                between = []
            else:
                rows.append(row)
        found.append((0, between))
        return found

    def _read_forward(self) -> None:
        """The forward rows that run whatever is recomputed, and until when its values are held anyway: by the row that
        allocated some memory, the last forward row that reads it. Counted without what recomputations will read, so a
        value is said to be alive only where it surely is."""
        facts, kept, again = self.facts, self.kept, self.again
        flags, inputs, owners = facts.flags, facts.inputs, facts.owners
        kept_units: set[int] = set()
        for row in range(len(facts) - 1, -1, -1):
            if facts.phases[row] == _BACKWARD:
                for source in inputs[row]:
                    if not again[source]:
                        kept[source] = 1
                continue
            flag = flags[row]
            in_unit = flag & Flag.REPEATABLE
            if facts.ops[row] == "call_function" and not kept[row]:
                # Running statistics are memory that outlives the operator: one that can be recomputed without them
                # returns memory of its own, where one that writes in place returns what it writes to.
                returns_own = not flag & Flag.VIEW and (owners[row] == row or flag & Flag.MULTI_OUTPUT)
                has_effect = flag & _RANDOM_OR_EFFECT or (flag & Flag.WRITES and (not in_unit or returns_own))
                kept[row] = bool(not again[row] or has_effect or (in_unit and owners[row] in kept_units))
            if facts.ops[row] != "output" and not kept[row]:
                continue
            if in_unit:
                kept_units.add(owners[row])
            for source in inputs[row]:
                kept[source] = 1
                self.held_until.setdefault(self.roots[source], row)
                if flags[source] & Flag.REPEATABLE:
                    kept_units.add(owners[source])

    def _again_for(self, reader: int, end: int, done: set[int]) -> list[int]:
        """The rows recomputed just before a backward row; ``done`` are those that its region has by then."""
        facts, again = self.facts, self.again
        found: list[int] = []
        pending = [source for source in facts.inputs[reader] if again[source]]
        while pending:
            row = pending.pop()
            if row in done or (self.kept[row] and self.held_until.get(self.roots[row], -1) > end):
                continue
            rows = self.units[facts.owners[row]] if facts.flags[row] & Flag.REPEATABLE else [row]
            done.update(rows)
            found.extend(rows)
            pending.extend(source for each in rows for source in facts.inputs[each] if again[source])
        return sorted(found)
