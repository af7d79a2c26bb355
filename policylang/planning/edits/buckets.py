"""``bucket``: collectives of one kind, process group and dtype become one, which is started and awaited once.

Members do not depend on each other. Within each stretch of blocks they are taken by depth (:func:`depths`), in running
order, each into the first bucket with room for it and a place where all inputs are ready before any result is read. The
proof runs on the shards of all ranks of the group.

===============  =====================================================================================================
all-gather       shards flattened, one after the other: the gather brings ``[ranks, all]``, of which each member's
                 columns are its shards. They are copied out, since they are not adjacent.
reduce-scatter   each ``[ranks, piece]``, side by side: every rank is given the sums of its own row, of which each
                 member's are a part.
all-reduce       flattened, one after the other, and cut apart where they begin.
===============  =====================================================================================================

The bytes sent are the same as before. A member's value keeps its strides; where it is a view of the bucket's memory, it
begins where an allocation might (kernels load sixteen bytes at a time), and the graph does not return it.

A graph's order is one of many. Shards are cast and gathered one by one, each where it is used, so the last shard of a
block comes after the first gather's reader; gradients are scattered one by one as they are made. Nodes on the wrong
side of a bucket are moved if that is cheap and safe: layout operators, casts and pointwise operators, of memory that
nobody writes in between. Collectives, random draws, writes and products stay where they are. Places are settled one
after the other, each in the order that the earlier ones leave.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property, partial
from math import prod
from typing import Any

from attrs import evolve, frozen, mutable

from policylang.graph.blocks import has_no_modules
from policylang.graph.facts import Facts, Flag
from policylang.language.cancellation import check_cancelled
from policylang.language.syntax import Bucket
from policylang.operators.layouts import MOVERS, contiguous, viewed
from policylang.operators.names import ALL_REDUCE, CAT, CLONE, GATHER, SCATTER, SLICE, VIEW, WAIT, WAITS
from policylang.planning.edits.edit_planner import REDUCES, EditPlanner, NewNodes, RefusedError, ReplacedMemory, Setting
from policylang.planning.edits.layout_chains import NO_ROW, phase, relaid, single_input
from policylang.planning.edits.other_ranks import Grid, dims_of
from policylang.planning.edits.proof import old_calls
from policylang.planning.graph_edit import Edit, FusedGroup, Node, Refusal

_STAYS = Flag.WRITES | Flag.RANDOM | Flag.SEED | Flag.EFFECTFUL | Flag.COLLECTIVE | Flag.COMPUTE
_NAMESPACES = ("aten", "prims", "builtin", "math")  # namespaces of operators that only compute their result
DEPENDS = "reads what another one of the bucket gives"
_LAST = 1 << 60
_NO_BLOCK = -1


class _Side(IntEnum):
    AHEAD = 0
    NEW = 1
    BEHIND = 2


Slot = tuple[int, int, int]
"""When a node runs: before which node, with which of the placements there, and on which side of it. An unmoved node
runs where it was, after all that was placed before it."""


@frozen
class Placement:
    """A place for a collective, and the nodes that move for it."""

    before: int
    """The node before which it is placed."""
    ahead: tuple[int, ...]
    behind: tuple[int, ...]


class Places:
    """The order of one graph while collectives are being joined."""

    def __init__(self, facts: Facts, held: Sequence[int] = ()) -> None:
        """``held``: nodes, in order, that no collective and no wait crosses."""
        self.facts = facts
        self.held = held
        self.memory = ReplacedMemory(facts)
        self._slots: dict[int, Slot] = {}
        self._count = 0

    def place(self, sources: Sequence[int], results: Sequence[int], starts: Sequence[int], *, late: bool) -> Placement:
        """A place before the first reader of any result, so that nobody waits longer; or, ``late``, where the last of
        several collectives starts.

        Args:
            sources: what is read.
            results: what is replaced.
            starts: the collectives.
            late: whether results are moved behind the last source, not sources ahead of the first reader.

        Raises:
            RefusedError: if an input cannot be ready by then.
        """
        inputs, users = self.facts.inputs, self.facts.users
        if late:
            before = max(*starts, *(self._slot(row)[0] for row in sources))
        else:
            before = min(map(self._first_reader, results))
        self._check(sources, results, starts, before)
        place = before, self._count + 1, _Side.NEW
        if late:
            readers = (user for row in results for user in users[row])
            moved = self._moved(readers, users, before, lambda row: self._slot(row) < place)
            apart = set(moved).isdisjoint(sources)
        else:
            moved = self._moved(sources, inputs, before, lambda row: self._slot(row) > place)
            apart = {source for row in moved for source in inputs[row]}.union(sources).isdisjoint(results)
        if not apart:
            raise RefusedError(DEPENDS)
        return Placement(before, (), moved) if late else Placement(before, moved, ())

    def settle(self, placement: Placement, replaced: Iterable[int]) -> int:
        """Make a placement final. ``replaced``: nodes made there. Returns its number among those before one node."""
        self._count += 1
        place = placement.before, self._count
        for side, rows in ((_Side.AHEAD, placement.ahead), (_Side.NEW, replaced), (_Side.BEHIND, placement.behind)):
            self._slots.update(dict.fromkeys(rows, (*place, side)))
        return self._count

    def _slot(self, row: int) -> Slot:
        return self._slots.get(row) or (row, _LAST, _LAST)

    def _first_reader(self, result: int) -> int:
        """The node before which a result has to be ready; a reader that has moved runs no later than the result did."""
        first = min((self._slot(user) for user in self.facts.users[result]), default=(result, _LAST, _LAST))
        return first[0] if first[1] == _LAST else result

    def _moved(
        self, rows: Iterable[int], edges: Sequence[Sequence[int]], before: int, is_wrong: Callable[[int], bool]
    ) -> tuple[int, ...]:
        """The nodes on the wrong side of a place, among some nodes and what they reach along edges."""
        found: set[int] = set()
        facts, pending = self.facts, [row for row in rows if is_wrong(row)]
        while pending:
            row = pending.pop()
            if row in found:
                continue
            name, target = facts.names[row], facts.targets[row]
            if row in self._slots:
                raise RefusedError(f"{name} is bound to another bucket")
            known = facts.ops[row] == "call_function" and target.partition(".")[0] in _NAMESPACES
            if not known or facts.flags[row] & _STAYS or facts.flops[row] or target in WAITS:
                raise RefusedError(f"{name} is in between")
            self._check_unwritten((row, *facts.inputs[row]), min(row, before), max(row, before))
            found.add(row)
            pending += [each for each in edges[row] if is_wrong(each)]
        return tuple(sorted(found))

    def _check(self, sources: Sequence[int], results: Sequence[int], starts: Sequence[int], before: int) -> None:
        """Check that collectives may move to a place: past no held node, and past no write to their inputs."""
        for row in (*starts, *results):
            first = bisect_left(self.held, min(row, before))
            if first < len(self.held) and self.held[first] < max(row, before):
                raise RefusedError(f"{self.facts.names[self.held[first]]} is in between")
        for source, start in zip(sources, starts, strict=True):
            self._check_unwritten((source,), min(start, before), max(start, before))

    def _check_unwritten(self, rows: Iterable[int], first: int, last: int) -> None:
        """Check that nobody writes to the memory of some nodes in ``[first, last)``."""
        for row in rows:
            for writer in self.memory.written.get(self.memory.roots[row], ()):
                if first <= writer < last:
                    raise RefusedError(f"memory is written: {self.facts.names[writer]}")


class Serving:
    """The block that each collective of a graph serves: that of the computation which it feeds, or which feeds it.

    Its position means little: shards may be gathered under another module path, whole blocks before their use, and
    nodes of a backward may carry no module path. Products and norms have their block; a node without one, in a graph
    that names blocks, belongs to the latest block among its inputs.
    """

    def __init__(self, facts: Facts, block_of: Sequence[int]) -> None:
        self.facts = facts
        self.block_of = block_of

    def block(self, collective: int) -> int:
        """The block that first uses what is gathered, or last makes what is reduced; -1 outside the blocks."""
        facts, gather = self.facts, self.facts.targets[collective] == GATHER
        edges = facts.users if gather else facts.inputs
        computed: list[int] = []
        seen, pending = {collective}, [collective]
        while pending:
            for each in edges[pending.pop()]:
                if facts.ops[each] == "call_function" and each not in seen:
                    seen.add(each)
                    (pending if self._passes[each] else computed).append(each)
        if not computed:
            return self.block_of[collective]
        return self.blocks[min(computed) if gather else max(computed)]

    @cached_property
    def blocks(self) -> Sequence[int]:
        """Node to block, for nodes that compute."""
        facts, passes = self.facts, self._passes
        if has_no_modules(facts):
            return self.block_of
        found, kept = array("l", self.block_of), bytearray(len(facts))
        order: dict[int, int] = {_NO_BLOCK: _NO_BLOCK}
        for row, owner in enumerate(facts.owners):
            passed_on = passes[row] and all(kept[source] for source in facts.inputs[row])
            kept[row] = facts.ops[row] != "call_function" or passed_on
            if kept[row]:  # an input, mostly a parameter, or what only passes inputs on: it belongs to no block
                found[row] = _NO_BLOCK
                continue
            is_named = facts.modules[row] or facts.modules[owner] or facts.ac_regions[owner] is not None
            if found[row] == _NO_BLOCK and not is_named:
                blocks = (found[source] for source in facts.inputs[row])
                found[row] = max(blocks, key=order.__getitem__, default=_NO_BLOCK)
            order.setdefault(found[row], len(order))
        return found

    @cached_property
    def _passes(self) -> bytearray:
        """The nodes that compute nothing: layout operators, casts, collectives and their waits, one byte each."""
        flags, targets = self.facts.flags, self.facts.targets
        return bytearray(
            targets[row] in MOVERS or targets[row] in WAITS or bool(flags[row] & (Flag.COLLECTIVE | Flag.VIEW))
            for row in range(len(self.facts))
        )


BUCKETABLE = (GATHER, SCATTER, ALL_REDUCE)
"""The operators of which several can be one."""


@frozen
class Alike:
    """The common properties of the members of one bucket."""

    target: str
    reduction: str
    """Empty for a gather."""
    group: str
    dtype: str
    device: str
    phase: int

    @property
    def late(self) -> bool:
        """True if its inputs become ready one by one, as gradients do; shards are ready from the start."""
        return self.target != GATHER


@frozen
class Member:
    """A collective that may join a bucket."""

    row: int
    wait: int
    source: int
    alike: Alike
    ranks: int
    given: tuple[int, ...]
    gives: tuple[int, ...]
    piece: int
    """The elements of one rank's part."""
    bytes: int
    """The more of its input and its result."""


def group_sizes(facts: Facts) -> dict[str, int]:
    """The ranks of each group, from the graph, else from its gathers and scatters; 0 if these give none, or several."""
    sizes = {name: group.size or len(group.ranks) for name, group in facts.groups.items()}
    said: dict[str, set[int]] = {}
    for row, name in enumerate(facts.group_names):
        if not sizes.get(name, 1) and facts.targets[row] in (GATHER, SCATTER) and len(facts.arguments[row]) > 2:
            said.setdefault(name, set()).add(facts.arguments[row][-2])
    return {**sizes, **{name: found.pop() if len(found) == 1 else 0 for name, found in said.items()}}


def member_of(facts: Facts, row: int, places: Places, sizes: Mapping[str, int]) -> Member:
    """The collective in a node. Raises :class:`RefusedError` if it joins no others. ``sizes``: of the groups."""
    target, arguments = facts.targets[row], facts.arguments[row]
    if target not in BUCKETABLE:
        raise RefusedError(f"not one of those that can be joined: {target.partition('.')[2].partition('.')[0]}")
    source, group = single_input(facts, row), facts.group_names[row]
    if source == NO_ROW or len(arguments) < 3:  # the tensor, the group, and the ranks or the reduction
        raise RefusedError("arguments not known", "a snapshot of an earlier version does not have them")
    if group not in facts.groups:
        raise RefusedError("group not known")
    size = sizes[group]
    if size < 1:
        raise RefusedError(f"size of group `{group}` not known")
    if target != ALL_REDUCE and arguments[-2] != size:
        raise RefusedError(f"group size is not {size}")
    reduction = "" if target == GATHER else str(arguments[1])
    if reduction and reduction not in REDUCES:
        raise RefusedError(f"reduces with {reduction}")
    users = facts.users[row]
    if len(users) != 1 or facts.targets[users[0]] != WAIT:
        raise RefusedError("not waited for once")
    wait = users[0]
    given, gives = (_lengths(facts, each) for each in (source, wait))
    if facts.dtypes[source] != facts.dtypes[wait]:
        raise RefusedError("dtype changes")
    if not facts.numel[source]:
        raise RefusedError("nothing in it")
    if target != ALL_REDUCE and not given:
        raise RefusedError("without dimensions")
    if target == SCATTER and given[0] % size:
        raise RefusedError(f"{list(given)} has no {size} parts")
    if facts.flags[source] & Flag.SYMBOLIC or facts.flags[row] & Flag.DATA_DEPENDENT:
        raise RefusedError("sizes not fixed")
    for writer in places.memory.written.get(places.memory.roots[wait], ()):
        raise RefusedError(f"memory is written: {facts.names[writer]}")
    alike = Alike(target, reduction, group, facts.dtypes[wait], facts.devices[wait], phase(facts, row))
    piece = facts.numel[source] // (size if target == SCATTER else 1)
    larger = max(facts.bytes[source], facts.bytes[wait])
    return Member(row, wait, source, alike, size, given, gives, piece, larger)


def _lengths(facts: Facts, row: int) -> tuple[int, ...]:
    shape, stride = facts.shapes[row], facts.strides[row]
    if shape is None or stride is None:
        raise RefusedError(f"sizes not fixed: {facts.names[row]}")
    if stride != contiguous(shape):
        raise RefusedError(f"not contiguous: {facts.names[row]}")
    return shape


def depths(facts: Facts, members: Sequence[Member]) -> list[int]:
    """The longest chain of other members that leads to each: two of one depth do not depend on each other, and at least
    as many buckets as depths are needed (Mirsky's theorem). ``members`` in graph order. Linear in the nodes between."""
    wanted = {member.row for member in members}
    behind: dict[int, int] = {}
    """Node to the longest chain of members up to its result."""
    found: list[int] = []
    for row in range(members[0].row, members[-1].row + 1) if members else ():
        depth = max((behind.get(source, 0) for source in facts.inputs[row]), default=0) if behind else 0
        if row in wanted:
            found.append(depth)
            depth += 1
        if depth:
            behind[row] = depth
    return found


ALIGNED = 16
"""Bytes: the alignment that Inductor assumes of memory that a graph allocates."""


def merge_members(
    facts: Facts, members: Sequence[Member], group: FusedGroup, new: NewNodes, memory: ReplacedMemory
) -> tuple[dict[int, str], list[tuple[int, tuple[int, ...]]]]:
    """Make the new nodes. Returns each wait with its replacement, and the nodes behind it whose strides change."""
    alike, like, ranks = members[0].alike, members[0].row, members[0].ranks
    target, total = alike.target, sum(member.piece for member in members)
    flat = []
    for member in members:
        node = Node(facts.names[member.source])
        shape = (ranks, member.piece) if target == SCATTER else (member.piece,)
        is_flat = shape == member.given
        flat.append(node if is_flat else new.add(VIEW, (node, shape), shape, contiguous(shape), member.row))
    shape = (ranks, total) if target == SCATTER else (total,)
    joining = (tuple(flat), 1) if target == SCATTER else (tuple(flat),)
    joined = new.add(CAT, joining, shape, contiguous(shape), like)
    if target == GATHER:
        shape = (ranks * total,)
        arguments: tuple[Any, ...] = (joined, ranks, group)
    elif target == SCATTER:
        shape, arguments = (1, total), (joined, alike.reduction, ranks, group)
    else:
        assert target == ALL_REDUCE
        arguments = (joined, alike.reduction, group)
    started = new.add(target, arguments, shape, contiguous(shape), like)
    whole = new.add(WAIT, (started,), shape, contiguous(shape), like)
    if target != ALL_REDUCE:
        shape = (ranks, total) if target == GATHER else (total,)
        whole = new.add(VIEW, (whole, shape), shape, contiguous(shape), like)
    start, replaced, restrided = 0, {}, list[tuple[int, tuple[int, ...]]]()
    for member in members:
        replaced[member.wait], behind = _cut(facts, member, whole, shape, start, new, memory)
        restrided += behind
        start += member.piece
    return replaced, restrided


def _cut(
    facts: Facts,
    member: Member,
    whole: Node,
    whole_shape: tuple[int, ...],
    start: int,
    new: NewNodes,
    memory: ReplacedMemory,
) -> tuple[str, list[tuple[int, tuple[int, ...]]]]:
    """Cut a member's value out of the result of a bucket's collective, as a view of its memory if that may be. Returns
    the new node, and the nodes behind the value whose strides change."""
    wait, gives = member.wait, member.gives
    shape, stride = (*whole_shape[:-1], member.piece), contiguous(whole_shape)
    like = wait if shape == gives else member.row
    arguments = (whole, len(whole_shape) - 1, start, start + member.piece)
    part = new.add(SLICE, arguments, shape, stride, like)
    strides = viewed(shape, stride, gives)
    # For dimensions of length 1 in memory with gaps, torch computes the strides of a view in more than one way.
    plain = stride == contiguous(shape) or 1 not in (*shape, *gives)
    item = facts.bytes[wait] // facts.numel[wait]
    gap = whole_shape[-1] if prod(whole_shape[:-1]) > 1 else 0
    aligned = not start * item % ALIGNED and not gap * item % ALIGNED
    behind: list[tuple[int, tuple[int, ...]]] | int = NO_ROW
    if strides is not None and plain and aligned and not memory.is_returned(wait):
        behind = relaid(facts, wait, strides)
    if strides is None or isinstance(behind, int):
        part = new.add(CLONE, (part, "contiguous_format"), shape, contiguous(shape), like)
        strides, behind = contiguous(gives), []
    if shape != gives:
        part = new.add(VIEW, (part, gives), gives, strides, wait)
    return part.name, behind


NO_OTHER = "no other like it"
BOUND = "others like it depend on it, or it on them"
OUTSIDE_BLOCKS = "outside the blocks"
TOO_LARGE = "larger than the limit"
NO_ROOM = "no neighbour fits beside it"
LIMITED = (TOO_LARGE, NO_ROOM)
KEPT = "its order is kept"
MOST_OPEN = 8
"""The buckets that a member is tried in; others of its depth are too far away."""


@mutable
class _OpenBucket:
    """Members that can be one."""

    members: list[Member]
    size: int
    full: bool = False


class Buckets(EditPlanner[Bucket]):
    """One ``bucket`` statement on one graph."""

    kind = "bucket"
    counted = "all_gather"
    nothing_found = "no two collectives that it selects in this graph can be one"

    def __init__(self, statement: Bucket, setting: Setting) -> None:
        super().__init__(statement, setting)
        held = (self.facts.index.get(name) for name in setting.held)
        self.places = Places(self.facts, sorted(row for row in held if row is not None))
        self.sizes = group_sizes(self.facts)
        self.limit = None if statement.size is None else int(statement.size.value)
        self._refused: list[tuple[int, Refusal]] = []
        self._done: list[tuple[int, int, Edit]] = []  # by place, and by number among those placed before the same node
        self._moved: set[int] = set()

    def outcomes(self) -> list[Edit | Refusal]:
        for members, alone in self._candidates():
            check_cancelled()
            for bucket in self._packed(members, alone):
                if len(bucket) > 1:
                    self._bucket(bucket)
        found: list[Edit | Refusal] = []
        for place, _, edit in sorted(self._done, key=lambda each: each[:2]):
            while place in self._moved:  # nothing can be placed before a node that has moved
                place += 1
            found.append(evolve(edit, before=self.facts.names[place]))
        return [*found, *(each for _, each in sorted(self._refused, key=lambda each: each[0]))]

    def grid(self, groups: tuple[str, ...]) -> Grid:
        """The ranks of the one group: whoever takes part in a collective is in its group."""
        if groups not in self._grids:
            group, size = self.facts.groups[groups[0]], self.sizes[groups[0]]
            if self.setting.consensus.asked and not group.ranks:
                raise RefusedError(f"ranks of group `{groups[0]}` not known")
            dims = dims_of(group, self.facts.meshes)
            self._grids[groups] = Grid((size,), group.ranks or tuple(range(size)), (0,), (), (dims,))
        return super().grid(groups)

    # --- what may be joined ---

    def _candidates(self) -> list[tuple[list[Member], str]]:
        """Independent collectives that are alike, of the same blocks, in graph order; why one would stay alone."""
        assert self.setting.select is not None, "buckets are planned where values are decided"
        rows, block_of = self.setting.select(self.facts, self.statement.selector)
        members: list[Member] = []
        for row in rows:
            try:
                if self.facts.names[row] in self.setting.held:
                    raise RefusedError(KEPT)
                members.append(member_of(self.facts, row, self.places, self.sizes))
            except RefusedError as why:
                self._refuse([row], why)
        depth_of = {each.row: depth for each, depth in zip(members, depths(self.facts, members), strict=True)}
        found: list[tuple[list[Member], str]] = []
        for alike in self._within_blocks(members, block_of):
            by_depth: dict[int, list[Member]] = {}
            for member, depth in zip(alike, depths(self.facts, alike), strict=True):
                by_depth.setdefault(depth, []).append(member)
            found.extend((each, BOUND if len(alike) > 1 else NO_OTHER) for each in by_depth.values())
        return sorted(found, key=lambda each: _placing_order(each[0], depth_of))

    def _within_blocks(self, members: Sequence[Member], block_of: Sequence[int]) -> list[list[Member]]:
        """Members that are alike, by stretches of blocks in running order."""
        order: dict[int, dict[int, int]] = {}
        stretches: dict[tuple[int, Alike], list[Member]] = {}
        serving, place = Serving(self.facts, block_of), 0
        for member in members:
            if self.statement.blocks is not None:
                block = serving.block(member.row)
                if block < 0:
                    self._refuse([member.row], RefusedError(OUTSIDE_BLOCKS))
                    continue
                places = order.setdefault(member.alike.phase, {})
                place = places.setdefault(block, len(places)) // self.statement.blocks
            stretches.setdefault((place, member.alike), []).append(member)
        return list(stretches.values())

    def _packed(self, members: Sequence[Member], alone: str) -> Iterator[list[Member]]:
        """Members in buckets that have a place for them within their size; the rest are refused."""
        buckets: list[_OpenBucket] = []
        reasons: dict[int, RefusedError] = {}
        for member in members:
            if self.limit is not None and member.bytes > self.limit:
                reasons[member.row] = RefusedError(TOO_LARGE)
                buckets.append(_OpenBucket([member], member.bytes, full=True))
                continue
            for bucket in [each for each in buckets if not each.full][-MOST_OPEN:]:
                if self.limit is not None and bucket.size + member.bytes > self.limit:
                    bucket.full = True
                    for each in (member, bucket.members[0]):
                        reasons.setdefault(each.row, RefusedError(NO_ROOM))
                    continue
                try:
                    self._place([*bucket.members, member])
                except RefusedError as why:
                    reasons.setdefault(member.row, why)
                    reasons.setdefault(bucket.members[0].row, why)
                else:
                    bucket.members.append(member)
                    bucket.size += member.bytes
                    break
            else:
                buckets.append(_OpenBucket([member], member.bytes))
        for bucket in buckets:
            if len(bucket.members) == 1:
                (member,) = bucket.members
                self._refuse([member.row], reasons.get(member.row) or RefusedError(alone, _described(member.alike)))
            yield bucket.members

    def _place(self, members: Sequence[Member]) -> Placement:
        sources, waits, rows = zip(*((each.source, each.wait, each.row) for each in members), strict=True)
        return self.places.place(sources, waits, rows, late=members[0].alike.late)

    # --- one bucket ---

    def _bucket(self, members: Sequence[Member]) -> None:
        words, groups = self.names_of(each.row for each in members), (members[0].alike.group,)
        try:
            placement = self._place(members)
            edit = self.shared(words, groups, partial(self._planned, members, placement))
        except RefusedError as why:
            self._refuse([each.row for each in members], why)
            return
        replaced = [row for each in members for row in (each.row, each.wait)]
        self._done.append((placement.before, self.places.settle(placement, replaced), edit))
        self._moved.update((*replaced, *placement.ahead, *placement.behind))

    def _planned(self, members: Sequence[Member], placement: Placement) -> Edit:
        facts, first = self.facts, members[0]
        new = NewNodes(self.setting, self.kind)
        replaced, restrided = merge_members(facts, members, self._group(first.alike.group), new, self.places.memory)
        sources = tuple(dict.fromkeys(each.source for each in members))
        rows = sorted(row for each in members for row in (each.row, each.wait))
        proof = self.prove(sources, old_calls(facts, rows), new.calls(), replaced, (first.alike.group,))
        new.take_names()
        joined, names, strides = [each.row for each in members], self.names_of(sources), sorted(restrided)
        ahead, behind = self.names_of(placement.ahead), self.names_of(placement.behind)
        proof = evolve(proof, exact=_is_exact(first))
        return self.edit(
            joined, names, placement.before, new.made, replaced, rows, proof, strides, ahead=ahead, behind=behind
        )

    def _group(self, name: str) -> FusedGroup:
        group = self.facts.groups[name]
        # Unknown ranks are counted from 0: a proof needs their number, and the name identifies the group.
        ranks = group.ranks or tuple(range(self.sizes[name]))
        found = FusedGroup(ranks, None, dims_of(group, self.facts.meshes))
        # A group that a line before it has planned has another name once it is made: it is found by its ranks.
        return found if found.label == name else evolve(found, name=group.name)

    def _refuse(self, rows: Sequence[int], why: RefusedError) -> None:
        self._refused.append((rows[0], self.refusal(rows, why)))


def _is_exact(member: Member) -> bool:
    """True if one collective gives the same bits as several: gathers, sums of two, sums of integers. The order of
    longer sums depends on how the backend cuts its input, which is longer now."""
    alike = member.alike
    return alike.target == GATHER or member.ranks <= 2 or not alike.dtype.startswith(("float", "bfloat", "complex"))


def _placing_order(members: Sequence[Member], depth_of: Mapping[int, int]) -> tuple[bool, int, int]:
    """Late buckets that read another's results come before it, so that its readers are placed when it is."""
    late = members[0].alike.late
    return late, -max(depth_of[each.row] for each in members) if late else 0, members[0].row


def _described(alike: Alike) -> str:
    """The common properties of a bucket's members, as a phrase."""
    operator = alike.target.partition(".")[2].partition(".")[0]
    return f"{operator} of {alike.dtype} over group `{alike.group}`"
