"""The steps of a training step and their order: eager checkpoints around blocks, and the schedule of facts and
decisions.

A checkpoint recomputes its block as a whole, operator by operator, up to the last value that its backward reads. A
value that a rule saves is held until the recomputation reaches it; the inputs of the block until its backward is over.

Everywhere else a recomputation runs as late as possible. Nodes keep the order in which they were traced, in a partition
the whole forward first. In a region of the backward, all that the first reader of a recomputed value needs is
recomputed just before that reader, in forward order; later steps of the region share it. Pieces of a tuple are taken
right after the recomputed operator, so that unused ones can be freed. Copies to the host and back are added last.

A forward or backward graph runs as it is. A *joint graph* has one region. Where anything is recomputed, the backward
that depends on no gradient and has no effect waits until it is needed, too. Dead nodes do not run, and all pieces
follow their operator.

A *flat graph* may have any number of regions, parted by forward nodes that still run. A recomputed value that the rest
of the forward holds beyond a region anyway is read there without recomputation. Values written in place are recomputed
as a whole. A forward run is left out where nothing of the forward reads the value, unless it draws, writes or has
another effect: a draw that does not happen would shift every later one.

O(nodes + edges), the recomputations of a step sorted into forward order.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType

from attrs import field, frozen

from policylang.graph.blocks import OUTSIDE, BlockTable
from policylang.graph.facts import (
    Facts,
    Flag,
    GraphKind,
    InputKind,
    MovedRows,
    Phase,
    Schedule,
    ScheduleStep,
    StepKind,
    forward_users,
    is_gradient,
    mask_of,
)
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.selectors import with_lets
from policylang.language.syntax import ExpectCount, ExpectTotal, InBlock, NarrowForm, Ordinal, Policy, Scope
from policylang.operators.names import DETACHES, GETITEM, ONES_LIKE, SUM
from policylang.planning.value_outcome import Decision, Why, moves, offloads, recomputes


@frozen(eq=False)
class Checkpoints:
    """The checkpoints of a step, numbered from 0; columns have an entry for each of them."""

    of: Sequence[int] = field(repr=False)
    """Node of the forward to its checkpoint; -1 outside of all."""
    reach: Sequence[int]
    """The first node that is not recomputed any more; 0 where the backward reads nothing of the block's."""
    first: Sequence[int]
    """The backward node before which the block is recomputed."""
    last: Sequence[int]
    """The last node of the backward that reads what the block has made."""
    given: Sequence[Collection[int]] = field(repr=False)
    """The values of the forward that the block reads and has not made."""
    read: frozenset[int] = field(default=frozenset(), repr=False)
    """Values that the backward reads and nothing recomputes: outside the blocks, or passed from one to the next."""
    unchanged: Collection[int] = ()
    """Nodes of a traced block that return their argument unchanged, and have nothing to keep."""
    inner: Mapping[int, int] = field(factory=dict)
    """In a traced block: by node of an operation inside an operator (a DTensor's), the node of that operator. It
    runs only with that operator, and is never held separately: if the operator is saved, it is neither saved nor
    recomputed."""
    crossing: frozenset[int] | None = None
    """Block outputs that the next block's checkpoint holds, and the values in their memory."""
    beyond: frozenset[int] = frozenset()
    """In a whole model: what a block returns and something else than the next checkpoint holds, or nothing."""


def checkpoint_of_all(facts: Facts, place: BlockContext) -> Checkpoints:
    """The checkpoint of a traced block, which is the whole graph."""
    backward = [row for row, phase in enumerate(facts.phases) if phase == _BACKWARD]
    of, first, last = array("i", bytes(4 * len(facts))), backward[:1] or [len(facts)], backward[-1:] or [OUTSIDE]
    returned = {row for row in facts.forward if place.crosses and facts.flags[row] & Flag.FORWARD_OUTPUT}
    crossing = returned.union(facts.storage_roots[row] for row in returned)
    made = frozenset(row for row in crossing if facts.ops[facts.storage_roots[row]] == "call_function")
    unchanged, inner = place.unchanged, place.inner
    return Checkpoints(of, (place.reach,), first, last, ((),), unchanged=unchanged, inner=inner, crossing=made)


def checkpoints_around(facts: Facts, blocks: BlockTable) -> Checkpoints:
    """One around each block of a model's graph; a graph without blocks is one. Each micro-batch of a flat graph has its
    own. O(nodes + edges)."""
    block_of, phases = blocks.block_of, facts.phases
    of, within = array("i", [OUTSIDE]) * len(facts), array("i", [OUTSIDE]) * len(facts)  # forward; backward
    numbers: dict[tuple[int, int], int] = {}
    steps, behind = 0, False
    for row, phase in enumerate(phases):
        block = block_of[row] if blocks.names else 0
        if facts.forward_mask[row]:
            steps, behind = steps + behind, False
            if block != OUTSIDE:
                of[row] = numbers.setdefault((block, steps), len(numbers))
        elif phase == _BACKWARD:
            behind, within[row] = facts.kind is GraphKind.FLAT, numbers.get((block, steps), OUTSIDE)
    reach, first, last = ([start] * len(numbers) for start in (0, len(facts), OUTSIDE))
    given: list[dict[int, int]] = [{} for _ in numbers]  # with the first reader of each
    returned = bytearray(len(facts))
    for row in facts.forward:
        at = of[row]
        returned[row] = at != OUTSIDE and leaves_block(facts, row, of)
        for source in facts.inputs[row] if at != OUTSIDE else ():
            if of[source] != at and facts.forward_mask[source] and not facts.flags[source] & Flag.SYMBOLIC:
                given[at].setdefault(source, row)
    read, readers = set[int](), set[tuple[int, int]]()  # and by which block's backward what others return is read
    for row, phase in enumerate(phases):
        for source in facts.inputs[row] if phase == _BACKWARD else ():
            if not facts.forward_mask[source] or facts.flags[source] & Flag.SYMBOLIC:
                continue
            at, end = of[source], source + 1
            # a block's output is read by the block's backward, or by that of the next block, from its checkpoint
            if at == OUTSIDE or (returned[source] and block_of[row] != block_of[source]):
                read.add(source)
                if at != OUTSIDE:
                    readers.add((source, block_of[row]))
                at = within[row]
                end = given[at].get(source, 0) if at != OUTSIDE else 0
            if end:
                reach[at], first[at], last[at] = max(reach[at], end), min(first[at], row), max(last[at], row)
    given = [each if end else {} for each, end in zip(given, reach, strict=True)]
    takers = {(row, block) for (block, _), at in numbers.items() for row in given[at] if returned[row]}
    taken = {row for row, _ in takers}.difference(row for row, _ in readers - takers)
    crossing, roots = set(taken), facts.storage_roots
    for row in taken:
        while row != roots[row] and roots[facts.inputs[row][0]] == roots[row]:
            row = facts.inputs[row][0]
            crossing.add(row)
    # what a block takes whose backward reads nothing, nobody holds
    others = [row for row in facts.forward if returned[row] and row not in taken]
    users = {row: [of[user] for user in forward_users(facts, row)] for row in others}
    beyond = frozenset(row for row in others if row in read or OUTSIDE in users[row])
    return Checkpoints(of, reach, first, last, given, frozenset(read), crossing=frozenset(crossing), beyond=beyond)


def held_and_rerun(
    facts: Facts, decisions: Sequence[Decision | None], checkpoints: Checkpoints
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The nodes that are kept for the backward, those that wait for it on the host, and those that are recomputed, in
    graph order. A saved view is kept with its memory; a view of an input costs nothing and is rebuilt."""
    roots, of, reach, inner = facts.storage_roots, checkpoints.of, checkpoints.reach, checkpoints.inner
    saved = set(checkpoints.read).union(*checkpoints.given)
    # memory held for others: its own block may make it again
    others = checkpoints.beyond.union(checkpoints.crossing or ())
    returned = {each for row in others for each in (roots[row], facts.owners[row])}
    again: list[int] = []
    for row in facts.forward:
        if of[row] == OUTSIDE or row >= reach[of[row]]:
            continue
        decision = decisions[inner.get(row, row)]
        runs = decision is None or decision.outcome.reads_again
        is_returned = roots[row] in returned or facts.owners[row] in returned
        runs = runs or (is_returned and decision is not None and decision.why is Why.ALWAYS)
        if row in inner and not runs:
            continue
        is_inner = facts.ops[roots[row]] == "call_function"
        if runs or (row in checkpoints.unchanged and is_inner and roots[row] not in saved):
            again.append(row)
            continue
        # no size, no operator whose pieces are separate nodes or that returns nothing (a check), and none that returns
        # outer memory that it wrote to
        flags = facts.flags[row]
        is_tuple = flags & Flag.MULTI_OUTPUT and facts.targets[row] != GETITEM
        writes = (facts.flags[facts.owners[row]] | flags) & (Flag.WRITES | Flag.REPEATABLE)
        is_foreign = writes == Flag.WRITES or flags & Flag.SYMBOLIC
        if is_inner and (facts.bytes[row] or facts.dtypes[row]) and not is_tuple and not is_foreign:
            saved.add(row)
    saved.update(row for row in checkpoints.crossing or () if moves(decisions[inner.get(row, row)]))
    moved = {row for row in saved if offloads(decisions[inner.get(row, row)])}
    memory = {roots[row] for row in saved if moves(decisions[inner.get(row, row)])}
    rebuilt = {row for row in saved if roots[row] in memory and recomputes(decisions[row])}
    # an operator of which one result is moved does not run again: the others are held beside it
    whole = {facts.owners[row] for row in moved if facts.targets[row] == GETITEM}
    saved.update(row for row in again if facts.owners[row] in whole and facts.targets[row] == GETITEM)
    rerun = tuple(row for row in again if facts.owners[row] not in whole)
    return tuple(sorted(saved - moved - rebuilt)), tuple(sorted(moved)), rerun


def kept_rows(facts: Facts, saved: Collection[int]) -> frozenset[int]:
    """The saved nodes whose value has to be held: not the views of another saved value, which are rebuilt. A node that
    writes in place belongs to its memory's first node, and is held with it."""
    roots, rows = facts.storage_roots, frozenset(saved)
    return frozenset(
        row for row in rows if roots[row] == row or roots[row] not in rows or not facts.flags[row] & Flag.VIEW
    )


def leaves_block(facts: Facts, row: int, place_of: Sequence[int]) -> bool:
    """True if a value leaves its block in the forward."""
    return any(place_of[user] != place_of[row] for user in forward_users(facts, row))


PATH_CANNOT, WHOLE_GRAPH = "APL306", "APL391"


@frozen(eq=False)
class BlockContext:
    """The part of a model that a traced block is, and how far its recomputation goes."""

    reach: int
    """The first node that is not recomputed."""
    blocks: BlockTable | None = None
    """If the graph is one block: that block, among the others. None for a whole model."""
    numbered: bool = True
    """True if it is known which block it is."""
    unchanged: frozenset[int] = frozenset()
    """The nodes that return their argument as it is, and that a recomputation may skip."""
    inner: Mapping[int, int] = field(factory=dict)
    """By node of an operation inside an operator (a DTensor's), the node of that operator, with which alone it runs."""
    crosses: bool = False
    """The next block's checkpoint holds what this one returns."""
    spent: Mapping[int, int] = field(factory=dict)
    """By rule, the bytes of its budget that the blocks before have used up."""


@frozen(eq=False)
class AroundBlocks:
    """The nodes of a whole model that checkpoints around its blocks do not see."""

    outside: frozenset[int] = frozenset()
    """The forward nodes outside every block: no checkpoint is there, and no rule ranges over them."""
    block_outputs: frozenset[int] = frozenset()
    """Block outputs: the next checkpoint holds them as its input, unless a rule has them wait on the host."""
    detached: Mapping[int, int] = field(factory=dict)
    """Each ``detach``, with its input. Autograd asks for it, as often as it likes: it is no operator of a block."""
    received: frozenset[int] = frozenset()
    """Values that another stage of a pipeline reads: both stages hold them until their backward."""
    unsharded: frozenset[int] = frozenset()
    """The gathered weights of a stage, which the pipeline holds for all microbatches."""


def around_blocks(facts: Facts, blocks: BlockTable, checkpoints: Checkpoints) -> AroundBlocks:
    """One pass over the edges; nothing of a graph without blocks, which is one block as a whole."""
    if not blocks.names:
        return AroundBlocks()
    block_of, owners = blocks.block_of, facts.owners
    outside = frozenset(row for row in facts.forward if block_of[row] == OUTSIDE)
    held = checkpoints.beyond.union(checkpoints.crossing or ())
    returned = {owners[row] for row in held if leaves_block(facts, row, block_of)}
    detached = [row for row in facts.forward if facts.targets[row] in DETACHES and facts.inputs[row]]
    return AroundBlocks(outside, frozenset(returned), {row: facts.inputs[row][0] for row in detached})


@frozen(eq=False)
class EachBlock:
    """The checkpoints around the blocks of a graph: worked out once for all policies with the same blocks."""

    facts: Facts
    blocks: BlockTable

    @cached_property
    def checkpoints(self) -> Checkpoints:
        return checkpoints_around(self.facts, self.blocks)

    @cached_property
    def around(self) -> AroundBlocks:
        return around_blocks(self.facts, self.blocks, self.checkpoints)


def beyond_one_block(policy: Policy, place: BlockContext | None) -> Iterator[Diagnostic]:
    """An error for every rule that one block cannot follow as the whole model would, and a warning for every
    expectation about the whole, unless the graph is the whole model."""
    is_unnumbered = place is not None and not place.numbered
    for rule in policy.rules:
        for part in with_lets(policy, rule.selector):
            match part:
                case Ordinal(scope=Scope.GRAPH):
                    asks = "counts over the whole graph, and an eager checkpoint sees one block at a time"
                    help = "count `per block`"
                case InBlock(which=which) if which.of == "block" and which.kind != "any" and is_unnumbered:
                    asks = "asks which block this is, and the checkpoint does not know"
                    help = "use `policylang.checkpoint_model`, or give `policylang.context_fn` the whole model"
                case _:
                    continue
            yield diagnose(PATH_CANNOT, f"`{rule.text}` {asks}", rule.span, help=help)
            break
    for expectation in policy.expectations if place is not None else ():
        if is_about_whole(expectation):
            yield diagnose(
                WHOLE_GRAPH,
                f"`{expectation.span.one_line}` is about a whole graph, and is not checked: "
                "an eager checkpoint sees one block at a time",
                span=expectation.span,
                help="write it `per block`, or check it with `policylang plan` on a snapshot of the model",
            )


def is_about_whole(expectation: object) -> bool:
    """True if it adds up or counts over the whole graph."""
    if isinstance(expectation, ExpectTotal):
        return not expectation.per_block
    return isinstance(expectation, ExpectCount) and expectation.scope in (None, Scope.GRAPH)


IN_FLIGHT = 2
"""The most copies between device and host in flight, in either direction, before one is awaited."""
SMALLER = 16
"""In eager a copy to the host does not wait for an oldest one that is more than so many times its size: what attention
returns beside its output would wait for that."""
BLOCKS_AHEAD = 1
"""Blocks by which a copy back starts ahead in eager, unless the policy has a line for it."""


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
    """The number of blocks by which copies back start ahead, and the block of each row."""

    blocks: int
    block_of: Sequence[int]


def with_host_copies(
    facts: Facts, steps: list[ScheduleStep], moved: MovedRows, ahead: Ahead | None = None
) -> list[ScheduleStep]:
    """The steps with those that move some rows. Linear in both.

    A value is narrowed right behind the last forward reader of its memory, and widened right before the first step of a
    region that reads it.

    A copy starts right behind the last forward reader of its memory, and is awaited before the second copy after it
    starts, at the latest where the forward ends: until then the device holds the value. A backward region fetches a
    value where the second value before it, in the order of first use, is used first, at the earliest where the region
    begins, and awaits it right before its own first use. So at most :data:`IN_FLIGHT` copies are in flight beside the
    one that is awaited. With ``ahead`` it fetches what a block uses first where the block so many before it begins.
    """
    if not moved:
        return steps
    begins = dict[int, int]()
    first_reads = defaultdict[int, dict[int, int]](dict)  # by region, moved nodes and the step that reads each first
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
    for row, form in [(row, form) for row in last_readers if (form := moved[row]) is not None]:
        behind[last_readers.pop(row)] += _narrowing(row, form)
    leaving = list(last_readers)
    for number, row in enumerate(leaving):
        if number >= IN_FLIGHT:
            behind[last_readers[row]].append((StepKind.WAIT_TO_HOST, leaving[number - IN_FLIGHT], 0))
        behind[last_readers[row]].append((StepKind.COPY_TO_HOST, row, 0))
    end = min((at for region, at in begins.items() if region), default=len(steps))
    before[end] += [(StepKind.WAIT_TO_HOST, row, 0) for row in leaving[-IN_FLIGHT:]]
    for region, reads in first_reads.items():
        for row in [row for row in reads if moved[row] is not None]:
            before[reads.pop(row)].append((StepKind.WIDEN, row, region))
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


def _narrowing(row: int, form: NarrowForm | None) -> list[ScheduleStep]:
    scales = [(int(StepKind.SCALE), row, 0)] if form is not None and form.per_row else []
    return [*scales, (int(StepKind.NARROW), row, 0)]


def _begins_ahead(steps: Sequence[ScheduleStep], region: int, ahead: Ahead) -> dict[int, int]:
    """By block, the step of a region where the block begins that is so many before it."""
    begins = dict[int, int]()
    for at, (_, row, where) in enumerate(steps):
        if where == region and ahead.block_of[row] != OUTSIDE:
            begins.setdefault(ahead.block_of[row], at)
    order = list(begins.values())
    return {block: order[max(number - ahead.blocks, 0)] for number, block in enumerate(begins)}


_FORWARD, _BACKWARD, _OUTPUT = int(Phase.FORWARD), int(Phase.BACKWARD), int(Phase.OUTPUT)
_VIEW, _TANGENT = int(Flag.VIEW), int(InputKind.TANGENT)
_RANDOM_OR_EFFECT, _WRITTEN = Flag.RANDOM | Flag.EFFECTFUL, Flag.WRITES | Flag.REPEATABLE

Part = tuple[int, list[int]]
"""A region, 0 for the forward, and nodes that run one after the other. A forward node in a region is recomputed."""


def build_schedule(
    facts: Facts,
    recomputed: Iterable[int],
    offloaded: Iterable[int] | MovedRows = (),
    ahead: Ahead | None = None,
) -> Schedule:
    """The steps of a graph in which ``recomputed`` nodes are recomputed for the backward, ``offloaded`` ones wait on
    the host in between (or in the form that is given for each), and all else that is read is kept. Either may name more
    nodes than the backward needs."""
    again = mask_of(recomputed, len(facts))
    moved: MovedRows = offloaded if isinstance(offloaded, Mapping) else dict.fromkeys(offloaded)
    if facts.kind is GraphKind.FLAT:
        steps = _with_pieces_behind(facts, _steps(facts, _Flat(facts, again).parts()), StepKind.SECOND_RUN)
        return Schedule.of(with_host_copies(facts, steps, moved, ahead), moved=moved)
    steps = with_host_copies(facts, _steps(facts, _partition_parts(facts, again)), moved, ahead)
    if facts.kind is GraphKind.JOINT:
        steps = _with_pieces_behind(facts, steps, StepKind.FIRST_RUN)
    return Schedule.of(steps, moved=moved)


def build_checkpointed_schedule(
    facts: Facts,
    checkpoints: Checkpoints,
    saved: Iterable[int],
    moved: Iterable[int],
    again: Iterable[int],
    ahead: int = BLOCKS_AHEAD,
    forms: MovedRows = MappingProxyType({}),
) -> Schedule:
    """The steps of a model in eager, in the order in which they were traced. Each block is recomputed as a whole when
    its backward first asks for something of it, and gives up what it holds where that is met on the way. What a node of
    autograd reads goes when all its operators have run: those that read the same gradient, one behind the other,
    and those that make before it, of forward values alone, what it is multiplied by.

    What has one of ``forms`` is narrowed behind its last reader in its block, and widened as the recomputation of the
    next begins, or where its own meets it. What crosses blocks is copied to the host as the next block begins, any
    other value behind its last reader. When a block's recomputation begins, the copies back start of what it needs, and
    of what the ``ahead`` blocks before it need. It awaits at once what it reads, and what it holds where that is met.
    """
    repeats, leaving, phases, inputs = frozenset(again), frozenset((*moved, *forms)), facts.phases, facts.inputs
    flags, roots, kinds = facts.flags, facts.storage_roots, facts.input_kinds
    runs: list[list[int]] = [[] for _ in checkpoints.reach]
    for row in sorted({*saved, *leaving, *repeats}):
        at = checkpoints.of[row]
        if at != OUTSIDE and row < checkpoints.reach[at]:
            runs[at].append(row)
    begins, ends = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for at, (first, last) in enumerate(zip(checkpoints.first, checkpoints.last, strict=True)):
        begins[first].append(at)
        ends[last].append(at)
    copies = _BlockCopies(facts, checkpoints, leaving, runs, forms)
    steps, held = copies.steps, copies.held
    region, inside, gradients, reads, until = 0, False, set[int](), list[int](), 0
    factors, forming = set[int](), False
    for row, op in enumerate(facts.ops):
        if op != "call_function":
            continue
        late = phases[row] == _BACKWARD
        region += late and not inside
        inside = late or (inside and phases[row] != _FORWARD)
        for at in begins.get(row, ()):
            copies.fetch(at, ahead, region)
            made = frozenset(runs[at])
            for each in runs[at]:
                if each in repeats:
                    steps.append((int(StepKind.SECOND_RUN), each, region))
                elif each in leaving:
                    copies.take(each, region)
                else:
                    held.append((each, len(steps) - 1))
                if each in forms:  # its operator is called, with what it reads, and does not run
                    held.extend((source, len(steps) - 1) for source in inputs[facts.owners[each]] if source in made)
        for at in ends.get(row, ()):
            held.extend((each, len(steps)) for each in checkpoints.given[at] if copies.holder(each) is None)
            held.extend((~each, len(steps)) for each in copies.taken[at] if each in forms)
        if late and not flags[row] & _VIEW:
            memory = [roots[each] for each in inputs[row]]
            own = {each for each in memory if phases[each] == _BACKWARD or kinds[each] == _TANGENT}
            own -= factors
            adds_up = facts.targets[row] == SUM and own.issuperset(memory)  # gradients, when the nodes of both are over
            if anew := adds_up or (not forming and gradients.isdisjoint(own)):
                held.extend((each, until) for each in reads)
                reads = []
            if anew or forming:
                gradients = set() if adds_up else own
            if forming := not own and memory != [] and facts.targets[row] != ONES_LIKE:
                factors.add(row)
            reads.extend(inputs[row])
            until = len(steps)
        copies.before(row)
        steps.append((int(StepKind.FIRST_RUN), row, region if late else 0))
        copies.behind(row)
    held.extend((each, until) for each in reads)
    return Schedule.of(steps, held, forms)


class _BlockCopies:
    """The copies between host and device around the blocks of a model in eager, and the narrower ones of ``forms``, as
    steps between those that run."""

    def __init__(
        self, facts: Facts, checkpoints: Checkpoints, moved: Collection[int], runs: list[list[int]], forms: MovedRows
    ) -> None:
        self.facts, self.of, self.forms = facts, checkpoints.of, forms
        self.steps: list[ScheduleStep] = []
        self.held: list[tuple[int, int]] = []
        self.recomputed = [at for at, reach in enumerate(checkpoints.reach) if reach]
        self.number = {at: number for number, at in enumerate(self.recomputed)}
        self.holders = {facts.storage_roots[row]: row for row in moved}
        self.given = [[each for each in given if self.holder(each) is not None] for given in checkpoints.given]
        """By block, the values that it reads and that wait on the host or narrowed."""
        holders, roots = self.holders, facts.storage_roots
        self.taken = [[*dict.fromkeys(holders[roots[each]] for each in given)] for given in self.given]
        self.fetched = [
            [*dict.fromkeys(row for row in (*taken, *rows) if row in moved and row not in forms)]
            for taken, rows in zip(self.taken, runs, strict=True)
        ]
        crossing = {row for taken in self.taken for row in taken}.difference(forms, *runs)  # and held by no other block
        last_readers = dict[int, int]()  # by operator: what it returns leaves together
        for row in facts.forward if holders else ():
            for touched in (row, *facts.inputs[row]):
                if (holder := self.holder(touched)) is not None and self.of[holder] == self.of[row]:
                    at = facts.owners[row] if facts.targets[row] == GETITEM else row
                    last_readers[facts.owners[holder]] = max(at, last_readers.get(facts.owners[holder], at))
        self.leave_behind = defaultdict[int, list[int]](list)
        for holder in sorted(self.holders.values()):
            if holder not in crossing:
                self.leave_behind[last_readers[facts.owners[holder]]].append(holder)
        self.under_way, self.left, self.asked, self.back = list[int](), set[int](), set[int](), dict[int, int]()

    def holder(self, row: int) -> int | None:
        """The offloaded value whose copy moves the memory of ``row``."""
        return self.holders.get(self.facts.storage_roots[row])

    def before(self, row: int) -> None:
        """A block that begins takes what it reads."""
        if self.holders and self.facts.phases[row] == _FORWARD and self.of[row] != OUTSIDE:
            self._leave(self.taken[self.of[row]])

    def behind(self, row: int) -> None:
        if row in self.leave_behind:
            self._leave(self.leave_behind[row])

    def _leave(self, rows: Iterable[int]) -> None:
        sizes = self.facts.bytes
        for row in (each for each in rows if each not in self.left):
            self.left.add(row)
            if row in self.forms:
                self.steps += _narrowing(row, self.forms[row])
                continue
            while len(self.under_way) >= IN_FLIGHT and sizes[self.under_way[0]] <= SMALLER * sizes[row]:
                self.steps.append((int(StepKind.WAIT_TO_HOST), self.under_way.pop(0), 0))
            self.steps.append((int(StepKind.COPY_TO_HOST), row, 0))
            self.under_way.append(row)

    def await_all(self, region: int) -> None:
        """The first block is recomputed: what comes before it in the backward knows of no copies."""
        self.steps += [(int(StepKind.WAIT_TO_HOST), row, region) for row in self.under_way]
        self.under_way.clear()

    def take(self, row: int, region: int) -> None:
        """A block takes what came back, which stays until the last has, or widens what is narrow."""
        if row in self.forms:
            self.steps.append((int(StepKind.WIDEN), row, region))
            return
        if self.back.get(row) == region:
            self.held.append((row, len(self.steps) - 1))
            return
        if row in self.back:
            self.steps.append((int(StepKind.COPY_FROM_HOST), row, region))
        self.back[row] = region
        self.steps.append((int(StepKind.WAIT_FROM_HOST), row, region))

    def fetch(self, block: int, ahead: int, region: int) -> None:
        """The recomputation of a block begins: views of what it reads are taken again."""
        self.await_all(region)
        last = self.number[block]
        for at in range(last, max(last - ahead, 0) - 1, -1):
            coming = [row for row in self.fetched[self.recomputed[at]] if row not in self.asked]
            self.asked.update(coming)
            self.steps += [(int(StepKind.COPY_FROM_HOST), row, region) for row in coming]
        for row in self.taken[block]:
            self.take(row, region)
        views = set[int]()
        for row in self.given[block]:
            while row != self.holder(row) and row not in views:
                views.add(row)
                row = self.facts.inputs[row][0]
        self.steps += [(int(StepKind.SECOND_RUN), row, region) for row in sorted(views)]


def _steps(facts: Facts, parts: Sequence[Part]) -> list[ScheduleStep]:
    """A forward node is recomputed in a region, and so is a backward node that the forward has run."""
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
    """The nodes that run in the forward and those that run in the backward: what leads to a result or has an effect."""
    in_forward, in_backward = bytearray(len(facts)), bytearray(len(facts))
    flags, phases, inputs = facts.flags, facts.phases, facts.inputs
    for row in range(len(facts) - 1, -1, -1):
        flag, phase = flags[row], phases[row]
        if flag & _RANDOM_OR_EFFECT or flag & _WRITTEN == Flag.WRITES:
            (in_backward if phase == _BACKWARD else in_forward)[row] = 1
        for source in inputs[row] if phase == _OUTPUT else ():
            late = phases[source] == _BACKWARD or (again[source] and is_gradient(facts, source))
            (in_backward if late else in_forward)[source] = 1
            if late and flags[source] & Flag.FORWARD_OUTPUT:
                in_forward[source] = 1
        if in_forward[row]:
            for source in inputs[row]:
                in_forward[source] = 1
        if in_backward[row]:
            for source in inputs[row]:
                (in_backward if phases[source] == _BACKWARD or again[source] else in_forward)[source] = 1
    return in_forward, in_backward


def _as_late_as_possible(facts: Facts, rows: Sequence[int]) -> list[int]:
    order: list[int] = []
    phases, inputs = facts.phases, facts.inputs
    late = bytearray(kind == InputKind.TANGENT for kind in facts.input_kinds)  # depends on a gradient
    waiting = bytearray(len(facts))
    effect = _RANDOM_OR_EFFECT | Flag.WRITES
    for row in rows:
        if any(map(late.__getitem__, inputs[row])):
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
            if any(map(waiting.__getitem__, inputs[row])):
                run(list(inputs[row]))
            order.append(row)
    for row, phase in enumerate(phases):
        if phase == _OUTPUT:
            run([each for each in inputs[row] if phases[each] == _BACKWARD or is_gradient(facts, each)])
    return order


# --- flat graphs -----------------------------------------------------------------------------------------------------


class _Flat:
    """The parts of a flat graph. :meth:`parts` runs what the forward needs whatever is recomputed, and before each
    backward node what is recomputed for it."""

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
        ends, end = dict[int, int](), -1  # backward node → the last one of its region
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
        """The forward nodes that run whatever is recomputed, and until when its values are held anyway: by the node
        that allocated some memory, the last forward node that reads it. Readers in recomputations are not counted, so a
        value counts as alive only where it certainly is."""
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
                # Running statistics outlive the operator: an operator that can be recomputed without them returns fresh
                # memory, one that writes in place returns the memory it writes to.
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
        """The nodes recomputed just before a backward node; ``done`` are those that its region has by then."""
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
