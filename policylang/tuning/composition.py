"""The figures of mixtures of patterns, composed of each pattern's figures in each block.

If blocks save their outputs, what one block keeps and recomputes depends on its pattern alone. So each pattern is
simulated once, in all blocks, and its step is cut into segments where forward and backward pass from one block to the
next. A segment has two figures: by how much the memory in use rises in it at most, and by how much it is higher after
it. The peak of a mixture is the highest point of its blocks' segments combined; what it keeps and recomputes is the sum
over its blocks.

How long computation waits for copies to the host and back (:mod:`policylang.planning.schedule` places their starts and
waits) is max-plus linear (Baccelli et al., *Synchronization and Linearity*, 1992): a small matrix a segment, which does
not depend on what other blocks do. Of the forward the moments are the present, and when the last copy and the one
before it are done; of the backward the present, when the last value and the one before it were used first, and when the
last copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from policylang.graph.facts import Facts, Flag, Phase, Schedule, StepKind, forward_users
from policylang.language.syntax import Action, Policy
from policylang.planning.decisions.offloading import resolve_offloads
from policylang.planning.liveness import SavedForBackward, backward_needs, with_checkpoints
from policylang.planning.plan import schedule_of
from policylang.planning.schedule import build_checkpointed_schedule, checkpoints_around
from policylang.planning.value_outcome import Decision, Why
from policylang.simulation.memory import Lifetimes, Origin, lifetimes
from policylang.simulation.node_times import NodeTimes
from policylang.tuning.phrases import Option, ValueClasses

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NEVER = -1e30
_MOMENTS = 4
_NOW = 0
_LAST, _BEFORE = 1, 2
_DONE = 3


@frozen(eq=False)
class SegmentWaits:
    """The waits of a pattern that all blocks follow."""

    matrices: Floats
    """By segment: of each moment after it and each before it, how much later the one is at least."""
    computes: Floats
    """By segment, seconds."""


def waits_of(
    facts: Facts, times: NodeTimes, schedule: Schedule, keys: Ints, segments: int, backward: int
) -> SegmentWaits:
    """``keys``: by step its segment, the first of the backward ``backward``. A collective counts as computation: what
    waits for it can hide a copy."""
    kinds, rows = np.frombuffer(schedule.kinds, dtype=np.uint8), np.frombuffer(schedule.rows, dtype=np.int32)
    seconds = np.where(kinds <= StepKind.SECOND_RUN, np.asarray(times.seconds, dtype=np.float64)[rows], 0.0)
    computes = np.bincount(keys, weights=seconds, minlength=segments).astype(np.float64)
    matrices = np.full((segments, _MOMENTS, _MOMENTS), _NEVER)
    matrices[:, range(_MOMENTS), range(_MOMENTS)] = 0.0
    since = np.cumsum(seconds) - seconds
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    starts = dict(zip(keys[first].tolist(), since[first].tolist(), strict=True))
    spent = np.zeros(segments)
    host = times.device.host_bandwidth or np.inf
    for step in np.flatnonzero((kinds == StepKind.COPY_TO_HOST) | (kinds == StepKind.WAIT_FROM_HOST)).tolist():
        leaves = kinds[step] == StepKind.COPY_TO_HOST
        segment = int(keys[step])
        if leaves is (segment >= backward):
            segment = backward - 1 if leaves else backward
        matrix, length = matrices[segment], facts.bytes[rows[step]] / host
        gap = max(since[step] - starts.get(segment, since[step]) - spent[segment], 0.0)
        spent[segment] += gap
        matrix[_NOW] += gap
        if leaves:
            matrix[_NOW] = np.maximum(matrix[_NOW], matrix[_BEFORE])
            matrix[_BEFORE] = matrix[_LAST]
            matrix[_LAST] = np.maximum(matrix[_NOW], matrix[_LAST]) + length
        else:
            matrix[_DONE] = np.maximum(matrix[_BEFORE], matrix[_DONE]) + length
            matrix[_NOW] = np.maximum(matrix[_NOW], matrix[_DONE])
            matrix[_BEFORE] = matrix[_LAST]
            matrix[_LAST] = matrix[_NOW]
    matrices[:, _NOW] += np.maximum(computes - spent, 0.0)[:, None]
    return SegmentWaits(matrices, computes)


def _seconds_waited(patterns: Sequence[SegmentWaits], by_segment: Ints, backward: int) -> Floats:
    """The waits of mixtures; ``by_segment``: mixture by segment, the number of the pattern."""
    matrices = np.stack([each.matrices for each in patterns])
    computes = np.stack([each.computes for each in patterns])
    count, segments = by_segment.shape
    waits = np.zeros(count)
    for part in (range(backward), range(backward, segments)):
        moments = np.full((count, _MOMENTS), _NEVER)
        moments[:, _NOW] = 0.0
        if part.start:
            moments[:] = 0.0
        for segment in part:
            number = by_segment[:, segment]
            later = matrices[number, segment]
            found = later[:, :, 0] + moments[:, 0, None]
            for each in range(1, _MOMENTS):
                np.maximum(found, later[:, :, each] + moments[:, each, None], out=found)
            moments = found
            waits -= computes[number, segment]
        waits += moments[:, _NOW] if part.start else moments[:, : _BEFORE + 1].max(axis=1)
    return np.maximum(waits, 0.0)


def on_their_way(found: Lifetimes, schedule: Schedule, keys: Ints, backward: Sequence[int]) -> tuple[Ints, Ints]:
    """By block, of what it and earlier blocks move: the bytes in flight to the host as its forward ends, and those
    back, or in flight, as its backward begins. Last, outside the blocks, none.

    ``keys``: by step its segment; ``backward``: by block the segment of its backward, as the one after 0 is of its
    forward.
    """
    moved = set(schedule.rows_of(StepKind.COPY_TO_HOST))
    leaving, returned = np.zeros((2, len(backward) + 1), dtype=np.int64)
    begins = np.searchsorted(keys, backward)
    ends = np.searchsorted(keys, np.arange(len(backward)) + 1, side="right") - 1
    makes: dict[int, int] = {}
    for origin, row, _, size, made, last in found:
        if row not in moved or origin not in (Origin.FIRST_RUN, Origin.COPY_FROM_HOST):
            continue
        own = ends >= makes.setdefault(row, made)
        if origin == Origin.FIRST_RUN:
            leaving[:-1] += size * (own & (last > ends))
        else:
            returned[:-1] += size * (own & (made < begins) & (last >= begins))
    return leaving, returned


def where_zones_meet(
    leaving: Ints, returned: Ints, moves: NDArray[np.bool_], chosen: Ints, backward: Sequence[int]
) -> Ints:
    """By mixture and segment, the bytes that segments of later blocks would have added or freed for copies of earlier
    ones if both followed one pattern. If the later ones copy nothing, bytes in flight are held until the forward ends.

    The first three by pattern; ``chosen``: by mixture and block the pattern.
    """
    more = np.zeros((len(chosen), 2 * len(backward) + 4), dtype=np.int64)
    for block in range(len(backward) - 1):
        here, there = chosen[:, block], chosen[:, block + 1]
        held = leaving[here, block] - leaving[there, block]
        back = returned[here, block] - returned[there, block]
        more[:, 2 + block] -= np.where(moves[there], held, 0)
        more[:, backward[block]] = np.where(moves[there], back, back - held)
    return more


_DECISIONS = {
    int(Option.SAVE): Decision(Action.SAVE, None, Why.RULE),
    int(Option.RECOMPUTE): Decision(Action.RECOMPUTE, None, Why.RULE),
    int(Option.OFFLOAD): Decision(Action.OFFLOAD, None, Why.RULE),
    int(Option.REBUILT): Decision(Action.RECOMPUTE, None, Why.RULE),
}
NO_RULES = Policy("tuned", {}, None, (), None, (), ())
_ALWAYS = Decision(Action.SAVE, None, Why.ALWAYS)

_BESIDE_COLLECTIVES = 0.85
"""The share of the composed waits for copies that is certain. A wait for a collective may hide the rest."""


@frozen(eq=False)
class SegmentProfile:
    """A pattern that all blocks follow, cut into segments."""

    rise: Ints
    """By segment: bytes by which what is alive at its highest exceeds what was alive before it."""
    net: Ints
    """By segment: bytes by which it is higher after it."""
    saved: Ints
    """By block, the rest of the graph last: bytes kept for the backward."""
    recompute: Floats
    """By block, the rest of the graph last: seconds of recomputation."""
    asked: tuple[int, ...]
    """By class: what becomes of its values; ``Option.EITHER`` of those that the backward does not ask for."""
    saves_outputs: bool
    """True if blocks save their outputs: only then does memory in use follow from that of each block."""
    leaving: Ints
    """By block, of what it and earlier blocks move to the host: bytes in flight as its forward ends."""
    returned: Ints
    """Bytes of the same that are back, or in flight, as its backward begins."""
    waits: SegmentWaits | None = None
    """When copies start and are awaited in each segment; None where none were asked for."""

    @property
    def offloads(self) -> bool:
        """True if any value is on the host in between."""
        return int(Option.OFFLOAD) in self.asked


@frozen(eq=False)
class Mixtures:
    """Figures of many mixtures, one entry each."""

    peak: Ints
    saved: Ints
    recompute: Floats
    copies: Floats
    """Seconds in which computation waits for copies to the host and back."""

    @property
    def price(self) -> Floats:
        """The seconds that order the candidates."""
        return self.recompute + self.copies


class Composition:
    """Cuts patterns into segments and joins them."""

    def __init__(
        self,
        facts: Facts,
        times: NodeTimes,
        classes: ValueClasses,
        *,
        block_by_block: bool = False,
        offload: bool = False,
    ) -> None:
        self.facts = facts
        self.offload = offload
        self.checkpoints = checkpoints_around(facts, classes.blocks) if block_by_block else None
        self.times = times
        self.classes = classes
        self.roots = facts.storage_roots
        self.count = len(classes.blocks.names)
        self.base = 0
        collective = any(flag & Flag.COLLECTIVE for flag in facts.flags)
        self._sure = _BESIDE_COLLECTIVES if collective else 1.0
        self._forward_key, self._backward_key = self._keys()
        keys = 2 * self.count + 4
        block = np.full(keys, self.count, dtype=np.int64)
        for number in range(self.count):
            block[1 + number] = block[self._backward_of(number)] = number
        self.block_of_segment = block

    def decisions(self, pattern: Sequence[int]) -> list[Decision | None]:
        """One decision per node; values that the pattern leaves open are recomputed in blocks and saved outside of
        them."""
        classes = self.classes
        by_class = []
        for number, option in enumerate(pattern):
            if option == Option.EITHER:
                option = Option.RECOMPUTE if classes.all[number].inside else Option.SAVE
            by_class.append(_DECISIONS[int(option)])
        by_class.append(_ALWAYS)
        decisions: list[Decision | None] = [None] * len(self.facts)
        for row in self.facts.forward:
            decisions[row] = by_class[classes.of[row]]
        return decisions

    def profile(self, pattern: Sequence[int], *, with_peak: bool) -> SegmentProfile:
        """Simulate a pattern in all blocks; without the peak only bytes kept and seconds recomputed are worked out."""
        decisions = self.decisions(pattern)
        needs = backward_needs(self.facts, decisions)
        if needs.offloaded:
            needs = with_checkpoints(needs, self.facts, decisions, self.checkpoints)
            resolve_offloads(NO_RULES, self.facts, decisions, needs, checkpoints=self.checkpoints)
            needs = backward_needs(self.facts, decisions)
        needs = with_checkpoints(needs, self.facts, decisions, self.checkpoints)
        saved, again = self._by_block(needs)
        asked = self._asked(needs)
        saves_outputs = all(asked[number] != Option.RECOMPUTE for number in self.classes.crossing)
        rise = np.zeros(len(self.block_of_segment), dtype=np.int64)
        net = np.zeros_like(rise)
        leaving = returned = np.zeros(self.count + 1, dtype=np.int64)
        if not with_peak and not self.offload:
            return SegmentProfile(rise, net, saved, again, asked, saves_outputs, leaving, returned)
        if self.checkpoints is None:
            schedule = schedule_of(self.facts, decisions)
        else:
            kept = needs.saved, needs.offloaded, needs.recomputed
            schedule = build_checkpointed_schedule(self.facts, self.checkpoints, *kept)
        found = lifetimes(self.facts, schedule)
        steps = len(schedule)
        made = np.frombuffer(found.made, dtype=np.int32).astype(np.int64)
        last = np.frombuffer(found.last, dtype=np.int32).astype(np.int64)
        size = np.frombuffer(found.bytes, dtype=np.int64)
        allocated = np.bincount(made + 1, weights=size, minlength=steps + 2)
        freed = np.bincount(np.minimum(last + 2, steps + 2), weights=size, minlength=steps + 3)[: steps + 2]
        alive = np.cumsum(allocated - freed)[1 : steps + 1]
        before = alive - allocated[1 : steps + 1]
        self.base = int(allocated[0])
        rows = np.frombuffer(schedule.rows, dtype=np.int32)
        late = (np.frombuffer(schedule.regions, dtype=np.int32) > 0) | self._is_backward[rows]
        keys = np.where(late, self._backward_key[rows], self._forward_key[rows])
        if needs.offloaded:  # a copy starts while another block computes
            keys[np.frombuffer(schedule.kinds, dtype=np.uint8) > StepKind.SECOND_RUN] = 0
        keys = np.maximum.accumulate(keys)
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        if steps:
            at_start = before[starts]
            rise[keys[starts]] = np.maximum.reduceat(alive, starts) - at_start
            net[keys[starts]] = np.diff(np.append(at_start, before[-1]))
            if needs.offloaded:
                back = [self._backward_of(block) for block in range(self.count)]
                leaving, returned = on_their_way(found, schedule, keys, back)
        waits = None
        if self.offload:
            waits = waits_of(self.facts, self.times, schedule, keys, len(self.block_of_segment), self.count + 2)
        return SegmentProfile(rise, net, saved, again, asked, saves_outputs, leaving, returned, waits)

    def with_cheap_saved(self, pattern: Sequence[int]) -> tuple[int, ...]:
        """The pattern with values saved that cost time and hardly any memory: on a flat graph the program
        assumes some values are free that the schedule recomputes."""
        decisions = self.decisions(pattern)
        needs, of, facts = backward_needs(self.facts, decisions), self.classes.of, self.facts
        forward = sum(self.times.seconds[row] for row in facts.forward)
        total = sum(facts.bytes[row] for row in facts.forward if self.roots[row] == row)
        seconds, size = [0.0] * (len(pattern) + 1), [0] * (len(pattern) + 1)
        for row in needs.recomputed:
            seconds[of[row]] += self.times.seconds[row]
            size[of[row]] += facts.bytes[row] if self.roots[row] == row else 0
        return tuple(
            int(Option.SAVE) if seconds[number] > forward / 2000 and size[number] < total / 1e5 else option
            for number, option in enumerate(pattern)
        )

    def mixtures(
        self, patterns: Sequence[SegmentProfile], blocks: NDArray[np.int32], around: NDArray[np.int32]
    ) -> Mixtures:
        """The figures of mixtures: ``blocks``: mixture by block, the number of the pattern; ``around``: that of the
        pattern outside the blocks."""
        chosen = np.column_stack([blocks, around]).astype(np.int64)
        moving, more, copies = self._with_copies(patterns, chosen)
        rises = np.stack([each.rise for each in patterns], axis=1)
        nets = np.stack([each.net for each in patterns], axis=1)
        before, peak = np.zeros(len(chosen), dtype=np.int64), np.zeros(len(chosen), dtype=np.int64)
        by_block = np.ascontiguousarray(chosen.T)
        for segment, block in enumerate(self.block_of_segment):  # all at once take more memory
            if len(moving):
                before[moving] += more[:, segment]
            np.maximum(peak, before + rises[segment][by_block[block]], out=peak)
            before += nets[segment][by_block[block]]
        numbers = np.arange(self.count + 1)
        return Mixtures(
            peak=self.base + peak,
            saved=np.stack([each.saved for each in patterns])[chosen, numbers].sum(axis=1),
            recompute=np.stack([each.recompute for each in patterns])[chosen, numbers].sum(axis=1),
            copies=copies,
        )

    def _with_copies(self, patterns: Sequence[SegmentProfile], chosen: Ints) -> tuple[Ints, Ints, Floats]:
        """The mixtures that copy, what is different in them by segment, and by mixture how long it waits for copies."""
        copies = np.zeros(len(chosen))
        moves = np.array([each.offloads for each in patterns])
        moving = np.flatnonzero(moves[chosen].any(axis=1))
        if not len(moving):
            return moving, np.zeros((0, 0), dtype=np.int64), copies
        leaving = np.stack([each.leaving for each in patterns])
        returned = np.stack([each.returned for each in patterns])
        back = [self._backward_of(block) for block in range(self.count)]
        more = where_zones_meet(leaving, returned, moves, chosen[moving], back)
        waits = [each.waits for each in patterns if each.waits is not None]
        by_segment = chosen[moving]
        if self.count:  # after the blocks the copies of the last one are in flight
            by_segment = np.column_stack([by_segment[:, :-1], by_segment[:, -2]])
        by_segment = by_segment[:, self.block_of_segment]
        copies[moving] = self._sure * _seconds_waited(waits, by_segment, self.count + 2)
        return moving, more, copies

    def _by_block(self, needs: SavedForBackward) -> tuple[Ints, Floats]:
        facts, block_of, roots = self.facts, self.classes.blocks.block_of, self.roots
        saved, again = np.zeros(self.count + 1, dtype=np.int64), np.zeros(self.count + 1)
        for root in dict.fromkeys(roots[row] for row in needs.saved):
            if facts.ops[root] == "call_function":
                saved[block_of[root]] += facts.bytes[root]
        for row in needs.recomputed:
            again[block_of[row]] += self.times.seconds[row]
        return saved, again

    def _asked(self, needs: SavedForBackward) -> tuple[int, ...]:
        """Saved views are attributed to the storage they alias: saving a view is free."""
        of, facts, roots = self.classes.of, self.facts, self.roots
        asked = [int(Option.EITHER)] * (len(self.classes) + 1)
        kept = {roots[row] for row in needs.saved}
        for row in needs.recomputed:
            if roots[row] not in kept and (roots[row] == row or facts.ops[roots[row]] == "call_function"):
                asked[of[row]] = int(Option.RECOMPUTE)
        moved = {roots[row] for row in needs.offloaded}
        if moved:
            for row in self.facts.forward:
                if roots[row] in moved:
                    asked[of[row]] = int(Option.REBUILT)
        for row in sorted(kept):
            asked[of[row]] = int(Option.SAVE)
        for row in needs.offloaded:
            asked[of[row]] = int(Option.OFFLOAD)
        return tuple(asked[:-1])

    def _backward_of(self, block: int) -> int:
        return 2 * self.count + 2 - block

    def _keys(self) -> tuple[Ints, Ints]:
        """By node the number of the segment that it begins or goes on with, in forward and in backward; 0 where it goes
        on with whatever there is."""
        facts, block_of, count = self.facts, self.classes.blocks.block_of, self.count
        forward, backward = np.zeros(len(facts), dtype=np.int64), np.zeros(len(facts), dtype=np.int64)
        is_backward = np.zeros(len(facts), dtype=bool)
        interior = bytearray(len(facts))
        final = max((row for row in facts.forward if block_of[row] >= 0), default=-1)
        for row in facts.forward:
            block = block_of[row]
            if block >= 0:
                forward[row] = 1 + block
                backward[row] = self._backward_of(block)
                interior[row] = all(block_of[user] == block for user in forward_users(facts, row))
            elif row > final:
                forward[row] = count + 1
        for row, phase in enumerate(facts.phases):
            if phase != Phase.FORWARD and facts.ops[row] == "call_function":
                is_backward[row] = True
                read = [block_of[each] for each in facts.inputs[row] if interior[each]]
                backward[row] = self._backward_of(max(read)) if read else count + 2
        self._is_backward = is_backward
        return forward, backward
