"""The problem that a tuned policy solves: which operators are recomputed and which memory is kept, as plain columns.

A column is one binary choice: an operator is recomputed, at the price of its seconds, or a piece of memory is kept, at
the price of its bytes. A clause requires a value when another node runs: its memory is kept, or its operator is
recomputed. Both follow planning (:mod:`policylang.planning.liveness`) exactly, so that a choice costs here what the
planner computes:

- what the backward reads is kept or recomputed; what is recomputed needs its own inputs in the same way;
- an operator and what follows it are one decision, and all views of one memory are kept for the price of it;
- what may not be recomputed is kept where it is needed: see :mod:`policylang.planning.decisions.decide`, routing
  choices, seeds; sizes and what the graph is given are there anyway; what the user has tagged stays as it is tagged.

Planning counts bytes over all that it decides, the schedule seconds over what is really recomputed. The two differ if a
backward node is dead, and if the rest of a flat graph's forward holds a value anyway: an operator that may be decided
*recompute* and not run has no price here. A flat graph of several regions recomputes a value in each, and is priced as
if it did so once. The true cost is never below.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from math import fsum

from attrs import evolve, field, frozen

from policylang.graph.blocks import OUTSIDE
from policylang.graph.facts import Facts, Flag, GraphKind, Phase, is_gradient
from policylang.operators.names import GETITEM
from policylang.planning.capabilities import Capabilities
from policylang.planning.decisions.decide import routing_owners, user_decisions, why_unsafe
from policylang.planning.schedule import Checkpoints, EachBlock
from policylang.simulation.node_times import NodeTimes

NONE = -1
"""In a clause no such column; else no such node."""


def _read_by_backward(facts: Facts) -> list[tuple[int, int]]:
    """``(reader, forward node)``: what planning takes the backward to read."""
    forward = facts.forward_mask
    found: list[tuple[int, int]] = []
    for row, phase in enumerate(facts.phases):
        read = [source for source in facts.inputs[row] if forward[source]]
        if phase == Phase.BACKWARD:
            found += [(row, source) for source in read]
        elif phase == Phase.OUTPUT and facts.kind is GraphKind.JOINT:
            found += [(row, source) for source in read if is_gradient(facts, source)]
    return found


def _live_readers(facts: Facts) -> bytearray:
    """By node 1, where what it reads is really computed: in a joint graph a backward node may lead to nothing."""
    live = bytearray(len(facts))
    for row in range(len(facts) - 1, -1, -1):
        flags, phase = facts.flags[row], facts.phases[row]
        acts = flags & (Flag.RANDOM | Flag.EFFECTFUL) or flags & (Flag.WRITES | Flag.REPEATABLE) == Flag.WRITES
        if phase == Phase.BACKWARD and (acts or facts.kind is GraphKind.FLAT):
            live[row] = 1
        if phase == Phase.OUTPUT or (phase == Phase.BACKWARD and live[row]):
            live[row] = 1
            for source in facts.inputs[row]:
                live[source] = 1
    return live


def _regions(facts: Facts, roots: Sequence[int]) -> tuple[array[int], array[int]]:
    """By node of a flat graph's backward the last node of its region, and by memory the last node that reads it outside
    of the backward; :data:`NONE` for the others.

    A value that the forward still holds at the end of a region is read there as it is. Whether it does depends on all
    decisions; here it is taken to do so wherever it can, which leaves the price a lower bound.
    """
    ends, held_until = (array("i", [NONE]) * len(facts) for _ in range(2))
    end = NONE
    for row in range(len(facts) - 1, -1, -1) if facts.kind is GraphKind.FLAT else ():
        if facts.phases[row] == Phase.BACKWARD:
            ends[row] = end = row if end == NONE else end
            continue
        if facts.phases[row] == Phase.FORWARD and facts.ops[row] == "call_function":
            end = NONE
        for source in facts.inputs[row]:
            if held_until[roots[source]] == NONE:
                held_until[roots[source]] = row
    return ends, held_until


STAYS, MUST_RUN = 1, 2
"""A producer that is never recomputed, and one that is recomputed wherever the backward needs it."""


def fixed_owners(
    facts: Facts, capabilities: Capabilities, keep: Collection[int], override: bool, blocks: EachBlock | None
) -> tuple[bytearray, frozenset[int]]:
    """By producer :data:`STAYS`, :data:`MUST_RUN` or 0, and the producers that the user's tags move to the host.

    A path that runs one block at a time knows no tags: the policy's checkpoints replace the user's. It decides nothing
    outside ``blocks``, and not their outputs.
    """
    owners, fixed = facts.owners, bytearray(len(facts))
    by_block = capabilities.block_by_block
    tagged = {} if override or by_block else user_decisions(facts)
    moved: set[int] = set()
    for owner in (*(owners[row] for row in keep), *routing_owners(facts)):
        fixed[owner] = STAYS
    if by_block and blocks is not None:
        for row in (*blocks.around.outside, *blocks.around.block_outputs):
            fixed[owners[row]] = STAYS
    for owner, decision in tagged.items():
        action = decision.action
        assert action is not None
        fixed[owner] = MUST_RUN if action.recomputes else STAYS
        if action.offloads:
            moved.add(owner)
    for row in facts.forward:
        owner = owners[row]
        may_change = owner == row and fixed[row] != STAYS
        is_unsafe = may_change and why_unsafe(facts, row, capabilities) is not None
        if is_unsafe or facts.flags[owner] & (Flag.SYMBOLIC | Flag.SEED):
            fixed[owner] = STAYS
    return fixed, frozenset(moved)


Clause = tuple[int, int, int]
"""``(kept, runs, asked by)``: the first or the second column is 1 wherever the third is, or always where there is no
third."""


@frozen(eq=False)
class Choices:
    """Columns of 0 or 1, and the clauses between them."""

    facts: Facts
    seconds: Sequence[float] = field(repr=False)
    """By column: of recomputation; 0 for memory and for what is decided so and does not run."""
    sizes: Sequence[int] = field(repr=False)
    """By column: bytes of the memory; 0 for operators."""
    rows: Sequence[int] = field(repr=False)
    """By column: the operator, or the node that allocated the memory."""
    clauses: Sequence[Clause] = field(repr=False)
    keeps: Sequence[int] = field(repr=False)
    """By node: the column that keeps its memory, of a node that allocated some; ``NONE``."""
    runs: Sequence[int] = field(repr=False)
    """By producer: the column that decides to recompute it; ``NONE``."""
    fixed: Sequence[int] = field(repr=False)
    """By producer :data:`STAYS`, :data:`MUST_RUN` or 0."""


def choices_of(
    facts: Facts,
    times: NodeTimes,
    capabilities: Capabilities,
    *,
    keep: Collection[int] = (),
    override: bool = False,
    blocks: EachBlock | None = None,
) -> Choices:
    """The choices that a graph leaves open. O(nodes + edges).

    ``keep``: nodes whose decision is *save*, unless the user's tag says otherwise. ``override``: the user's tags count
    for nothing. ``blocks``: of a path that runs one block at a time; nothing outside them is decided.
    """
    fixed, moved = fixed_owners(facts, capabilities, keep, override, blocks)
    problem = _Problem(facts, times, fixed, moved)
    if capabilities.block_by_block and blocks is not None:
        problem.ask_for_blocks(blocks.checkpoints)
    else:
        problem.find_free()
        problem.ask()
    return Choices(
        facts=facts,
        seconds=problem.seconds,
        sizes=problem.sizes,
        rows=problem.rows,
        clauses=tuple(problem.clauses),
        keeps=problem.keeps,
        runs=problem.runs,
        fixed=fixed,
    )


def merged(choices: Choices, classes: Sequence[int]) -> Choices:
    """The choices of whole classes: what becomes of one value becomes of all of its class, as rules say it.
    ``classes``: by node; ``rows`` has one node of each class."""
    facts = choices.facts
    pieces: dict[int, int] = {}
    families: dict[tuple[bool, int, int], int] = {}
    column_of: list[int] = []
    seconds: list[list[float]] = []
    sizes: list[int] = []
    rows: list[int] = []
    for row, size, second in zip(choices.rows, choices.sizes, choices.seconds, strict=True):
        keeps, number, piece = choices.keeps[row] == len(column_of), classes[row], 0
        if keeps and number >= 0:  # the results of one operator are kept each for itself
            piece = pieces[facts.owners[row]] = pieces.get(facts.owners[row], -1) + 1
        elif choices.runs[row] == len(column_of):
            piece = -1
        elif not keeps:
            piece = -2
        if number < 0:
            number = -2 - row
        at = families.setdefault((keeps, number, piece), len(families))
        if at == len(rows):
            rows.append(row)
            sizes.append(0)
            seconds.append([])
        sizes[at] += size
        seconds[at].append(second)
        column_of.append(at)
    column_of.append(NONE)  # of what is none
    clauses = {(column_of[kept], column_of[runs], column_of[asked]): None for kept, runs, asked in choices.clauses}
    return evolve(
        choices,
        seconds=list(map(fsum, seconds)),
        sizes=sizes,
        rows=rows,
        clauses=tuple(each for each in clauses if each[2] == NONE or each[2] not in each[:2]),
    )


class _Problem:
    def __init__(self, facts: Facts, times: NodeTimes, fixed: bytearray, moved: frozenset[int]) -> None:
        self.facts = facts
        self.times = times.seconds
        self.roots = facts.storage_roots
        self.units: dict[int, list[int]] = {}  # by producer, values written in place, which are recomputed as a whole
        for row, flags in enumerate(facts.flags if facts.kind is GraphKind.FLAT else ()):
            if flags & Flag.REPEATABLE:
                self.units.setdefault(facts.owners[row], []).append(row)
        self.fixed, self.moved = fixed, moved
        self.same_as = array("i", range(len(facts)))
        self.free = bytearray(len(facts))
        self.may_keep = bytearray(len(facts))
        self.seconds: list[float] = []
        self.sizes: list[int] = []
        self.rows: list[int] = []
        self.keeps = array("i", [NONE]) * len(facts)
        self.runs = array("i", [NONE]) * len(facts)
        self.may_not_run = bytearray(len(facts))  # by producer: it may be decided to be recomputed, and not run
        self.clauses: dict[Clause, None] = {}

    def find_free(self) -> None:
        """Find values available whatever is decided, and views available with their base: a recomputed view needs only
        its base, and a kept one keeps the same memory."""
        facts, fixed, roots, free = self.facts, self.fixed, self.roots, self.free
        forward = facts.forward_mask
        for row in range(len(facts)):
            owner, root = facts.owners[row], roots[row]
            if not forward[row] or facts.flags[row] & Flag.SYMBOLIC or owner in self.moved:
                free[row] = 1
                continue
            must_run, stays = fixed[owner] == MUST_RUN, fixed[owner] == STAYS
            is_view = self._is_free_view(row)
            source = facts.inputs[row][0] if is_view else row
            if must_run:
                free[row] = is_view and free[source]
            else:
                free[row] = facts.ops[root] != "call_function" or not facts.bytes[root]
            self.may_keep[row] = not must_run or (is_view and self.may_keep[source])
            if is_view and not stays and not free[row] and not free[source]:
                self.same_as[row] = self.same_as[source]

    def _is_free_view(self, row: int) -> bool:
        """True for a view of memory that another node allocated or was given, at no cost and with no other input."""
        facts, inputs = self.facts, self.facts.inputs[row]
        if not inputs or self.roots[inputs[0]] != self.roots[row] or self.times[row]:
            return False
        if facts.flags[row] & Flag.REPEATABLE:
            return False
        return all(self.free[each] for each in inputs[1:])

    def ask(self) -> None:
        """From the last node to the first: all that asks for a node is known when it is reached."""
        facts, same_as, free, owners = self.facts, self.same_as, self.free, self.facts.owners
        counted, real = bytearray(len(facts)), bytearray(len(facts))
        sure = bytearray(b"\1") * len(facts)  # is needed whenever its producer is recomputed
        for rows in self.units.values():
            for row in rows:
                sure[row] = 0
        runs, may_not_run = bytearray(len(facts)), self.may_not_run  # by producer, of those that the backward reads
        live, (ends, held_until) = _live_readers(facts), _regions(facts, self.roots)
        flat = facts.kind is GraphKind.FLAT
        first_end = array("i", [len(facts)]) * len(facts)  # by node: of the first region that may recompute it
        clauses: list[tuple[int, int]] = []  # of a node as it is read: it has a separate choice whether it may be kept
        for reader, source in _read_by_backward(facts):
            if not free[source]:
                row = same_as[source]
                really = bool(live[reader]) and held_until[self.roots[row]] <= ends[reader]
                counted[row] = sure[row] = 1
                real[row] |= really
                (runs if really else may_not_run)[owners[row]] = 1
                clauses.append((source, NONE))
                if really and flat:
                    first_end[row] = min(first_end[row], ends[reader])
        for row in range(len(facts) - 1, -1, -1):
            owner = owners[row]
            may_not_run[owner] &= not runs[owner]
            if not counted[row] or self.fixed[owner] == STAYS:
                continue
            for source in facts.inputs[row]:
                read = same_as[source]
                inside = owners[read] == owner  # a piece is no reason to keep the whole
                if not inside and (free[source] or not sure[row]):
                    continue
                held = flat and held_until[self.roots[read]] > first_end[row]
                really = bool(real[row]) and (inside or not held)
                counted[read] = 1
                real[read] |= really
                sure[read] |= inside and sure[row]
                if really:
                    first_end[read] = min(first_end[read], first_end[row])
                may_not_run[owners[read]] |= may_not_run[owner] or not really
                if not inside:
                    clauses.append((source, owner))
        for source, asked_by in clauses:
            self._clause(source, asked_by)

    def ask_for_blocks(self, checkpoints: Checkpoints) -> None:
        """A block that runs again runs all that is not saved, whoever reads it, and holds all that is saved."""
        facts, roots, owners = self.facts, self.roots, self.facts.owners
        held = {roots[row] for row in checkpoints.read.union(*checkpoints.given)}
        for row in facts.forward:
            at, root, owner, flags = checkpoints.of[row], roots[row], owners[row], facts.flags[row]
            if at == OUTSIDE or row >= checkpoints.reach[at]:
                continue
            is_tuple = flags & Flag.MULTI_OUTPUT and facts.targets[row] != GETITEM
            is_foreign = flags & Flag.SYMBOLIC or flags & (Flag.WRITES | Flag.REPEATABLE) == Flag.WRITES
            is_view = root != row and not self.times[owner]
            if is_view:
                self.same_as[row] = root
            is_free = is_view or not (self.times[owner] or facts.bytes[row])
            if is_tuple or is_foreign or is_free or root in held or facts.ops[root] != "call_function":
                continue
            keep = self._keep(root)
            self.clauses[keep, self._run(owner), NONE] = None

    def _clause(self, source: int, asked_by: int) -> None:
        row = self.same_as[source]
        keep = self._keep(self.roots[row]) if self.may_keep[source] else NONE
        runs = self._run(self.facts.owners[row])
        self.clauses[keep, runs, NONE if asked_by == NONE else self._run(asked_by)] = None

    def _keep(self, root: int) -> int:
        if self.keeps[root] == NONE:
            self.keeps[root] = self._column(root, 0.0, self.facts.bytes[root])
        return self.keeps[root]

    def _run(self, owner: int) -> int:
        if self.runs[owner] == NONE and self.fixed[owner] != STAYS:
            rows = () if self.may_not_run[owner] else {owner, *self.units.get(owner, ())}
            self.runs[owner] = self._column(owner, fsum(self.times[row] for row in rows), 0)
        return self.runs[owner]

    def _column(self, row: int, seconds: float, size: int) -> int:
        self.seconds.append(seconds)
        self.sizes.append(size)
        self.rows.append(row)
        return len(self.rows) - 1
