"""The blocks of a graph in the order in which each half runs them: what ``ahead`` and ``later`` count by."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from functools import cached_property

from attrs import field, frozen

from policylang.graph.facts import Facts, GraphKind, Phase
from policylang.language.interruption.wanted import check_cancelled
from policylang.planning.order.reading.block_labels import UNSAID, BackwardLabels
from policylang.planning.order.reading.roles import Role, roles_of
from policylang.planning.order.reading.turns import turns

NOWHERE = -1
_BACKWARD = int(Phase.BACKWARD)


@frozen(eq=False, slots=False)
class Stages:
    """A *stage* is the computation of one block in one direction, or what runs outside the blocks between two."""

    stage_of: Sequence[int]
    """Row to stage, in the order of running; of a collective, the stage that makes or uses what it moves. -1 for
    inputs, constants and the output."""
    first: Sequence[int]
    """Stage to the first row that computes in it, as traced."""
    last: Sequence[int]
    direction: Sequence[int]
    """Stage to the half it belongs to: 0 the forward, then each region of the backward."""
    block: Sequence[int]
    """Stage to block number; -1 outside the blocks."""
    uses: Sequence[int] = field(repr=False)
    """Row to the first stage that computes with what it makes, directly or through what is no computation; -1 where
    none does."""
    makes: Sequence[int] = field(repr=False)
    """Row to the last stage that computed what it reads, directly or so; -1 where none did."""

    turn_of: Sequence[int] = field(repr=False)
    """Row to the turn it runs in (:mod:`policylang.planning.order.reading.turns`), as :attr:`direction` counts them."""

    @cached_property
    def _ends(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for stage, direction in enumerate(self.direction):
            found[direction] = (found.get(direction, (stage, stage))[0], stage)
        return found

    def ends(self, stage: int) -> tuple[int, int]:
        """The first and the last stage of the half that a stage belongs to."""
        return self._ends[self.direction[stage]]


@frozen
class _Stretch:
    """A stretch of computation of one label."""

    label: int
    """:data:`UNSAID` outside the blocks."""
    places: list[int]
    """Among what a turn computes."""


def stages(facts: Facts, block_of: Sequence[int], again: Collection[int] = ()) -> Stages:
    """The stages of a graph whose rows stand in the order in which they run. Linear in nodes and edges.

    ``again``: the rows that compute a forward value a second time; they belong to the stage that they serve. A backward
    row of which nothing says the block has that of the forward values it reads. What a forward computes outside the
    blocks between two of them is a stage; in a backward, what comes before the first of which the block is known is.
    """
    return _Stages(facts, block_of, frozenset(again)).found()


class _Stages:
    def __init__(self, facts: Facts, block_of: Sequence[int], again: Collection[int]) -> None:
        self.facts = facts
        self.again = again
        self.roles = roles_of(facts)
        self.block_of = self._computing(block_of)
        self.turn_of = turns(facts)
        self.labels = BackwardLabels(facts, self.block_of, self.roles)
        self.first: list[int] = []
        self.last: list[int] = []
        self.direction: list[int] = []
        self.block: list[int] = []

    def found(self) -> Stages:
        calls: dict[int, list[int]] = {}
        for row, op in enumerate(self.facts.ops):
            if op == "call_function":
                calls.setdefault(self.turn_of[row], []).append(row)
        for turn, rows in calls.items():
            check_cancelled()
            self._turn(turn, rows)
        check_cancelled()
        of_position = self._by_position()
        uses, makes = self._uses(of_position), self._makes(of_position)
        stage_of = array("i", of_position)
        for row, role in enumerate(self.roles):
            if role in (Role.COLLECTIVE, Role.AROUND):
                mine = [each for each in (makes[row], uses[row]) if self._in_turn_of(row, each)]
                stage_of[row] = mine[0] if mine else of_position[row]
        return Stages(stage_of, self.first, self.last, self.direction, self.block, uses, makes, self.turn_of)

    def _computing(self, block_of: Sequence[int]) -> Sequence[int]:
        """Without the blocks that only communicate: a checkpoint region may be one of all gathers of a model."""
        rows = [row for row, role in enumerate(self.roles) if role == Role.COMPUTES and block_of[row] >= 0]
        heavy = [row for row in rows if self.facts.flops[row]]
        computing = {block_of[row] for row in heavy or rows}
        return [block if block in computing else NOWHERE for block in block_of]

    # --- the stages of one turn ---

    def _turn(self, turn: int, calls: Sequence[int]) -> None:
        rows = [row for row in calls if self.roles[row] == Role.COMPUTES]
        if not rows:
            return
        kind = self.facts.kind
        half = kind in (GraphKind.FORWARD, GraphKind.BACKWARD)
        backward = kind is GraphKind.BACKWARD if half else self.facts.phases[rows[0]] == _BACKWARD
        if backward:
            told = self.labels.of(calls, self.again)
            labels = self._filled([UNSAID if row in self.again else told[row] for row in rows])
            for at in range(len(rows) - 2, -1, -1):
                if rows[at] in self.again:
                    labels[at] = labels[at + 1]
        else:
            labels = [self.block_of[row] for row in rows]
        runs = self._runs(rows, labels)
        _add_ends(runs, labels, trailing=not backward)
        starts = [_start(labels, runs, at) for at in range(len(runs))]
        blocks = [self.labels.block(run.label) if backward else run.label for run in runs]
        for at, start in enumerate(starts):
            self.first.append(rows[start])
            self.last.append(rows[(starts[at + 1] if at + 1 < len(starts) else len(rows)) - 1])
            self.direction.append(turn)
            self.block.append(blocks[at])
        if not backward:
            self.labels.learn(rows, starts, blocks)

    def _filled(self, labels: Sequence[int]) -> list[int]:
        """What nothing is said of belongs to what came before it; what comes first, to what lies outside the blocks."""
        before = next((label for label in labels if label != UNSAID), UNSAID)
        before = before if self.labels.block(before) == NOWHERE else UNSAID
        found = []
        for label in labels:
            before = before if label == UNSAID else label
            found.append(before)
        return found

    def _runs(self, rows: Sequence[int], labels: Sequence[int]) -> list[_Stretch]:
        """The stretches of one label among what multiplies, or among all where nothing does. A short one between two
        of the same label is a part of it: traces and schedules shift nodes across the seams of blocks."""
        flops, again = self.facts.flops, self.again
        heavy = [at for at, row in enumerate(rows) if flops[row] and row not in again]
        found: list[_Stretch] = []
        for at in heavy or [at for at, row in enumerate(rows) if row not in again]:
            if found and found[-1].label == labels[at]:
                found[-1].places.append(at)
            else:
                found.append(_Stretch(labels[at], [at]))
        longest: dict[int, int] = {}
        for run in found:
            longest[run.label] = max(longest.get(run.label, 0), len(run.places))
        merged: list[_Stretch] = []
        for run in found:
            between = merged[-1] if len(merged) > 1 and merged[-2].label == run.label else None
            if between and (between.label == UNSAID or 2 * len(between.places) <= longest[between.label]):
                merged.pop()
                merged[-1].places.extend((*between.places, *run.places))
            else:
                merged.append(run)
        return merged

    # --- the stage of each row ---

    def _by_position(self) -> Sequence[int]:
        found = array("i", [NOWHERE]) * len(self.facts)
        at = NOWHERE
        for row, op in enumerate(self.facts.ops):
            if op != "call_function":
                continue
            while at + 1 < len(self.first) and (
                self.first[at + 1] <= row or self.direction[at + 1] == self.turn_of[row] != self._direction(at)
            ):
                at += 1
            found[row] = at
        return found

    def _direction(self, stage: int) -> int:
        return self.direction[stage] if stage >= 0 else NOWHERE

    def _in_turn_of(self, row: int, stage: int) -> bool:
        return stage >= 0 and self.direction[stage] == self.turn_of[row]

    def _uses(self, of_position: Sequence[int]) -> Sequence[int]:
        found = array("i", [NOWHERE]) * len(self.facts)
        for row in range(len(self.facts) - 1, -1, -1):
            users = self.facts.users[row]
            stages = (of_position[each] if self.roles[each] == Role.COMPUTES else found[each] for each in users)
            found[row] = min((each for each in stages if each >= 0), default=NOWHERE)
        return found

    def _makes(self, of_position: Sequence[int]) -> Sequence[int]:
        found = array("i", [NOWHERE]) * len(self.facts)
        for row, reads in enumerate(self.facts.inputs):
            stages = (of_position[each] if self.roles[each] == Role.COMPUTES else found[each] for each in reads)
            found[row] = max(stages, default=NOWHERE)
        return found


def _add_ends(runs: list[_Stretch], labels: Sequence[int], *, trailing: bool) -> None:
    """What computes outside the blocks before the first and after the last of them is a stage, though it may not
    multiply: an embedding, a loss."""
    if not any(label != UNSAID for label in labels):
        return
    if labels[0] == UNSAID and runs[0].label != UNSAID:
        runs.insert(0, _Stretch(UNSAID, [0]))
    end = len(labels)
    while labels[end - 1] == UNSAID:
        end -= 1
    if trailing and end < len(labels) and runs[-1].label != UNSAID:
        runs.append(_Stretch(UNSAID, [end]))


def _start(labels: Sequence[int], runs: Sequence[_Stretch], at: int) -> int:
    """The place of the first computation of a stage: what it computes before it first multiplies is its own."""
    if not at:
        return 0
    low, high = runs[at - 1].places[-1] + 1, runs[at].places[0]
    return next((place for place in range(low, high) if labels[place] == runs[at].label), high)
