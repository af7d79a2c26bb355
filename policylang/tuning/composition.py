"""The figures of mixtures of patterns, composed of each pattern's figures in each block.

If blocks save their outputs, what one block keeps and recomputes depends on its pattern alone. So each pattern is
simulated once, in all blocks, and its step is cut into segments where forward and backward pass from one block to the
next. A segment has two figures: by how much the memory in use rises in it at most, and by how much it is higher after
it. The peak of a mixture is the highest point of its blocks' segments combined; what it keeps and recomputes is the sum
over its blocks.

A mixture hides as much of its copies to the host and back as one of its patterns would alone: the exact wait is
simulated with the written policy.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from policylang.graph.facts import Facts, Phase, StepKind
from policylang.language.syntax import Action, Policy
from policylang.planning.decisions.offloading import resolve_offloads
from policylang.planning.liveness import SavedForBackward, backward_needs, with_checkpoints
from policylang.planning.plan import schedule_of
from policylang.planning.schedule import EachBlock, build_checkpointed_schedule
from policylang.planning.value_outcome import Decision, Why
from policylang.simulation.memory import lifetimes
from policylang.simulation.node_times import NodeTimes
from policylang.tuning.evaluation import copies_of
from policylang.tuning.phrases import Option, ValueClasses

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_DECISIONS = {
    int(Option.SAVE): Decision(Action.SAVE, None, Why.RULE),
    int(Option.RECOMPUTE): Decision(Action.RECOMPUTE, None, Why.RULE),
    int(Option.OFFLOAD): Decision(Action.OFFLOAD, None, Why.RULE),
    int(Option.REBUILT): Decision(Action.RECOMPUTE, None, Why.RULE),
}
NO_RULES = Policy("tuned", {}, None, (), None, (), ())
_ALWAYS = Decision(Action.SAVE, None, Why.ALWAYS)


@frozen(eq=False)
class SegmentProfile:
    """A pattern that all blocks follow, cut into segments."""

    rise: Ints
    """Bytes by which the memory in use rises at most, per segment."""
    net: Ints
    """Bytes by which the memory in use is higher afterwards, per segment."""
    saved: Ints
    """Bytes kept for the backward, per block and, last, in the rest of the graph."""
    recompute: Floats
    """Seconds of recomputation, per block and, last, in the rest of the graph."""
    asked: tuple[int, ...]
    """An :class:`Option` per class; ``Option.EITHER`` where the backward asks for none of its values."""
    saves_outputs: bool
    """True if blocks save their outputs: only then does memory in use follow from that of each block."""
    copied: Floats
    """Seconds of copies to the host and back, per block and, last, in the rest of the graph."""
    hidden: float
    """Seconds of all of these in which computation goes on."""

    @property
    def offloads(self) -> bool:
        """True if any value is on the host in between."""
        return int(Option.OFFLOAD) in self.asked


class Composition:
    """Cuts patterns into segments and joins them."""

    def __init__(self, facts: Facts, times: NodeTimes, classes: ValueClasses, each_block: EachBlock | None) -> None:
        self.facts = facts
        self.checkpoints = None if each_block is None else each_block.checkpoints
        self.times = times
        self.classes = classes
        self.roots = facts.storage_roots
        self.count = len(classes.blocks.names)
        self.base = 0
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

    def profile(
        self, pattern: Sequence[int], *, with_peak: bool, known: Container[tuple[int, ...]] = ()
    ) -> SegmentProfile | None:
        """Simulate a pattern in all blocks; without the peak only bytes kept and seconds recomputed are worked out.
        None where all that the backward asks for has the outcome that it has in one of the ``known`` patterns."""
        decisions, needs = self._needs(pattern)
        asked = self._asked(needs)
        if self.checkpoints is not None:  # what they hold anyway need not run again
            decisions, needs = self._needs(asked)
            asked = self._asked(needs)
        if asked in known:
            return None
        saved, again = self._by_block(needs)
        recomputed = (asked[number] == Option.RECOMPUTE for number in self.classes.crossing)
        saves_outputs = self.checkpoints is not None or not any(recomputed)
        rise = np.zeros(len(self.block_of_segment), dtype=np.int64)
        net = np.zeros_like(rise)
        if not with_peak and not needs.offloaded:
            return SegmentProfile(rise, net, saved, again, asked, saves_outputs, np.zeros(self.count + 1), 0.0)
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
        copied, hidden = np.zeros(self.count + 1), 0.0
        if needs.offloaded:
            for row in needs.offloaded:
                copied[self.classes.blocks.block_of[row]] += 2 * self.facts.bytes[row]
            copied /= self.times.device.host_bandwidth or np.inf
            hidden = max(float(copied.sum()) - copies_of(self.facts, schedule, self.times), 0.0)
        return SegmentProfile(rise, net, saved, again, asked, saves_outputs, copied, hidden)

    def mixtures(
        self, patterns: Sequence[SegmentProfile], chosen: NDArray[np.integer[Any]]
    ) -> tuple[Ints, Ints, Floats, Floats]:
        """Of many mixtures the peak and the bytes saved, the seconds of recomputation and those in which computation
        waits for copies to the host and back. ``chosen``: mixture by block, the number of the pattern; the last column
        is that of the pattern outside the blocks."""
        rises = np.stack([each.rise for each in patterns], axis=1)
        nets = np.stack([each.net for each in patterns], axis=1)
        before, peak = np.zeros(len(chosen), dtype=np.int64), np.zeros(len(chosen), dtype=np.int64)
        by_block = np.ascontiguousarray(chosen.T)
        for segment, block in enumerate(self.block_of_segment):
            np.maximum(peak, before + rises[segment][by_block[block]], out=peak)
            before += nets[segment][by_block[block]]
        numbers = np.arange(self.count + 1)
        copied = np.stack([each.copied for each in patterns])[chosen, numbers].sum(axis=1)
        hidden = np.array([each.hidden for each in patterns])[chosen].max(axis=1)
        saved = np.stack([each.saved for each in patterns])[chosen, numbers].sum(axis=1)
        again = np.stack([each.recompute for each in patterns])[chosen, numbers].sum(axis=1)
        return self.base + peak, saved, again, np.maximum(copied - hidden, 0.0)

    def _needs(self, pattern: Sequence[int]) -> tuple[list[Decision | None], SavedForBackward]:
        decisions = self.decisions(pattern)
        needs = backward_needs(self.facts, decisions)
        if needs.offloaded:
            needs = with_checkpoints(needs, self.facts, decisions, self.checkpoints)
            resolve_offloads(NO_RULES, self.facts, decisions, needs, checkpoints=self.checkpoints)
            needs = backward_needs(self.facts, decisions)
        return decisions, with_checkpoints(needs, self.facts, decisions, self.checkpoints)

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
            if self.checkpoints is None or asked[of[row]] != Option.RECOMPUTE:  # they may hold some of a class
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
                interior[row] = 1
            elif row > final:
                forward[row] = count + 1
            for source in facts.inputs[row]:
                if block_of[source] != block:
                    interior[source] = 0
        for row, phase in enumerate(facts.phases):
            if phase != Phase.FORWARD and facts.ops[row] == "call_function":
                is_backward[row] = True
                read = [block_of[each] for each in facts.inputs[row] if interior[each]]
                backward[row] = self._backward_of(max(read)) if read else count + 2
        self._is_backward = is_backward
        return forward, backward
