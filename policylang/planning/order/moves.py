"""The collectives that scheduling lines select, also as joined by buckets, and what ``prefetch`` and ``delay`` move."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush

from attrs import define, evolve, field, frozen

from policylang.graph.blocks import BlockTable, Chains
from policylang.graph.facts import Facts, Flag, GraphKind, Phase
from policylang.language.cancellation import check_cancelled
from policylang.language.syntax import Delay, KeepOrder, Overlap, Policy, Prefetch, Scheduling, Selector
from policylang.planning.graph_edit import Edits
from policylang.planning.order.dependencies import NO_SEGMENT, Dependencies, Role, Segments, awaited, roles_of, segments
from policylang.planning.selection.selectors import Selections
from policylang.simulation.node_times import NodeTimes, node_times


class WholeStepSelections:
    """The selectors of one policy on the rematerialised graph, where they denote forward and backward nodes alike."""

    def __init__(
        self,
        policy: Policy,
        blocks: Mapping[str, int],
        block_names: tuple[str, ...],
        recomputed: Collection[str],
        times: NodeTimes | None,
    ) -> None:
        """``blocks``: of nodes by name, if the graph has them; ``recomputed``: names of recomputations."""
        self._policy, self._blocks, self._block_names = policy, blocks, block_names
        self._recomputed = frozenset(recomputed)
        self._times = times
        self._known: dict[Facts, tuple[Selections, Segments]] = {}

    def rows(self, facts: Facts, selector: Selector) -> tuple[Sequence[int], Sequence[int]]:
        """The nodes that a selector denotes, and the block of every node of the graph."""
        selections = self.selections(facts)
        return selections.rows(selector), selections.blocks.block_of

    def collectives(self, facts: Facts, selector: Selector) -> tuple[list[int], list[int]]:
        """The collectives that a selector denotes, also by a wait or a piece, in graph order; and its other nodes."""
        found, others = dict[int, None](), list[int]()
        for row in self.selections(facts).rows(selector):
            if facts.flags[row] & Flag.COLLECTIVE:
                found[row] = None
            elif facts.flags[facts.owners[row]] & Flag.COLLECTIVE:
                found[facts.owners[row]] = None
            else:
                others.append(row)
        return sorted(found), others

    def selections(self, facts: Facts) -> Selections:
        return self._of(facts)[0]

    def segments(self, facts: Facts) -> Segments:
        return self._of(facts)[1]

    def _of(self, facts: Facts) -> tuple[Selections, Segments]:
        if facts in self._known:
            return self._known[facts]
        labelled = [self._blocks.get(name, NO_SEGMENT) for name in facts.names]
        recomputed = frozenset(row for row, name in enumerate(facts.names) if name in self._recomputed)
        found = segments(facts, labelled, recomputed)
        block_of = array("i", labelled)
        for row, segment in enumerate(found.segment_of):
            if block_of[row] == NO_SEGMENT and segment >= 0:
                block_of[row] = found.block[segment]
        of_nodes = zip(facts.ops, facts.phases, strict=True)
        phases = bytearray(Phase.FORWARD if op == "call_function" else phase for op, phase in of_nodes)
        whole = evolve(facts, phases=phases)
        times = None if self._times is None else node_times(facts, self._times.device)
        blocks = BlockTable(block_of, self._block_names)
        selections = Selections(whole, self._policy.lets, blocks, Chains(whole), times)
        self._known[facts] = selections, found
        return selections, found


@frozen
class SelectedCollectives:
    """The collectives of one statement, in the graph as its buckets leave it."""

    statement: Scheduling
    rows: tuple[int, ...]
    taken: tuple[int, ...] = ()
    """The collectives that this statement moves, where several select them."""
    takers: Mapping[int, int] = field(factory=dict)
    """Other statement to how many of them it moves instead."""


def after_edits(names: Sequence[str], edits: Edits, facts: Facts) -> tuple[int, ...]:
    """The nodes of some collectives once edits are made; those that were joined are the bucket's."""
    became: dict[str, list[str]] = {}
    for edit in edits.done:
        made = [node.name for node in edit.nodes if node.name in facts.index]
        starts = [name for name in made if facts.flags[facts.index[name]] & Flag.COLLECTIVE]
        for name in edit.collectives:
            became.setdefault(name, []).extend(starts)
    found: set[int] = set()
    pending, seen = list(names), set[str]()
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            if name in facts.index:
                found.add(facts.index[name])
            pending.extend(became.get(name, ()))
    return tuple(sorted(found))


def assigned(policy: Policy, rows: Sequence[tuple[int, ...]]) -> list[SelectedCollectives]:
    """The collectives that each statement of ``Policy.scheduling`` moves."""
    last: dict[tuple[type, int], int] = {}
    for number, statement in enumerate(policy.scheduling):
        last.update(dict.fromkeys(((type(statement), row) for row in rows[number]), number))
    found = []
    for number, statement in enumerate(policy.scheduling):
        movers = {row: _mover(statement, number, row, last) for row in rows[number]}
        taken = tuple(row for row, mover in movers.items() if mover == number)
        takers = Counter(mover for mover in movers.values() if mover != number)
        found.append(SelectedCollectives(statement, rows[number], taken, takers))
    return found


def _mover(statement: Scheduling, number: int, row: int, last: Mapping[tuple[type, int], int]) -> int:
    """The statement that moves a collective; ``last``: by kind and collective, the last statement that selects it."""
    if isinstance(statement, Overlap):
        return next((last[kind, row] for kind in (Prefetch, Delay, KeepOrder) if (kind, row) in last), number)
    return last[type(statement), row] if statement.is_alone else number


OrderKey = tuple[int, int, int]
_BEFORE, _AT, _BEHIND = -1, 0, 1
_EFFECT = int(Flag.RANDOM | Flag.SEED | Flag.EFFECTFUL | Flag.WRITES)


@frozen
class MoveRequest:
    """A collective that a statement selects, and by how many blocks it is to move."""

    row: int
    statement: int
    blocks: int


@define(eq=False)
class Moves:
    """The moves that prefetches and delays make."""

    order: list[int] = field(factory=list)
    """The calls in their new order."""
    left: dict[int, dict[int, str]] = field(factory=dict)
    """By statement, the collectives that are not moved, and why, as a phrase."""
    behind_kept: dict[int, dict[int, int]] = field(factory=dict)
    """By statement, those that are not moved because of a kept collective, and that one."""
    crossed: list[tuple[MoveRequest, MoveRequest]] = field(factory=list)
    """Pairs of which the first is to start before the second is to be awaited, and needs its result."""


def move_collectives(
    facts: Facts,
    dependencies: Dependencies,
    segments: Segments,
    prefetches: Sequence[MoveRequest],
    delays: Sequence[MoveRequest],
    kept: Collection[int] = (),
    unknown: Collection[int] = (),
) -> Moves:
    """The order of the calls with some collectives moved. A collective has one request of each kind at most. What only
    a prefetched collective needs, such as the cast of a shard, moves with it; so does what reads nothing but the result
    of a delayed one. O((nodes + edges) log nodes)."""
    mover = _Mover(facts, dependencies.before, segments, frozenset(kept), frozenset(unknown), waited=bool(delays))
    found = Moves()
    requests = [(mover.prefetch, each) for each in sorted(prefetches, key=lambda request: request.row)]
    requests += [(mover.delay, each) for each in sorted(delays, key=lambda request: request.row)]
    for move, request in requests:
        check_cancelled()
        try:
            if request.row in mover.kept:
                raise _StaysError("it is kept in order", keeper=request.row)
            move(request)
        except _StaysError as stays:
            found.left.setdefault(request.statement, {})[request.row] = stays.why
            if stays.keeper is not None:
                found.behind_kept.setdefault(request.statement, {})[request.row] = stays.keeper
            if stays.ahead is not None:
                found.crossed.append((stays.ahead, request))
    found.order = _sorted_by_keys(mover.calls, dependencies.before, mover.keys)
    return found


class _StaysError(Exception):
    """Why a collective is not moved, as a phrase."""

    def __init__(self, why: str, *, keeper: int | None = None, ahead: MoveRequest | None = None) -> None:
        super().__init__(why)
        self.why, self.keeper, self.ahead = why, keeper, ahead


class _Mover:
    def __init__(
        self,
        facts: Facts,
        before: Sequence[Sequence[int]],
        segments: Segments,
        kept: Collection[int],
        unknown: Collection[int],
        *,
        waited: bool,
    ) -> None:
        self.facts, self.before, self.segments = facts, before, segments
        self.kept, self.unknown = kept, unknown
        self.roles = roles_of(facts)
        self.calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
        self.keys: dict[int, OrderKey] = {}
        self.prefetched: dict[int, MoveRequest] = {}
        self.waits: dict[int, list[int]] = {}
        self.after: dict[int, list[int]] = {}
        self.late: dict[int, int] = {}  # moved wait to the segment after which it is placed
        first: dict[int, int] = {}
        for row in self.calls:
            first.setdefault(segments.direction_of[row], row)
        self.anchors = frozenset(row for direction, row in first.items() if direction)
        """The first call of each direction but the first, before which none of that direction runs."""
        for row in self.calls if waited else ():
            if (collective := awaited(facts, row)) is not None:
                self.waits.setdefault(collective, []).append(row)
            for each in before[row]:
                self.after.setdefault(each, []).append(row)

    def _collective(self, row: int) -> int:
        """The collective that a node awaits, or the node itself."""
        collective = awaited(self.facts, row)
        return row if collective is None else collective

    # --- prefetch ---

    def prefetch(self, request: MoveRequest) -> None:
        segments, row = self.segments, request.row
        used = segments.uses[row]
        if used < 0:
            raise _StaysError("nothing computes with its result")
        first, _ = segments.ends(used)
        if segments.direction[used] != segments.direction_of[row] or used == first:
            backward = self.facts.phases[segments.first[used]] == Phase.BACKWARD
            half = "backward" if backward or self.facts.kind is GraphKind.BACKWARD else "forward"
            raise _StaysError(f"it would start before the {half} does")
        target = segments.first[max(first, used - request.blocks)]
        if row < target:
            return
        place = (target, _BEHIND if target in self.anchors else _BEFORE)
        for each in self._needed(row, target):
            key = (*place, each)
            if key <= self.keys.get(each, key):
                self.keys[each] = key
                self.prefetched[each] = request

    def _needed(self, collective: int, target: int) -> list[int]:
        """A collective, and what has to run before it from ``target`` on."""
        found, pending = {collective}, [collective]
        while pending:
            for each in self.before[pending.pop()]:
                if each >= target and each not in found and not (each == target and each in self.anchors):
                    if not self._may_move_up(each, target):
                        raise self._blocked(each)
                    found.add(each)
                    pending.append(each)
        return sorted(found)

    def _may_move_up(self, row: int, target: int) -> bool:
        """True if a node serves a collective alone, or a collective that starts as early itself."""
        if row in self.kept or row in self.unknown or self.facts.flags[row] & _EFFECT:
            return False
        if self.roles[row] != Role.COLLECTIVE:
            return self.roles[row] in (Role.NONE, Role.AROUND)
        key = self.keys.get(self._collective(row))
        return key is not None and key[0] <= target

    def _blocked(self, by: int) -> _StaysError:
        names, source = self.facts.names, self._collective(by)
        if source in self.kept:
            return _StaysError(f"`{names[source]}` is kept in order before it", keeper=source)
        if by in self.unknown:
            target = self.facts.targets[by]
            return _StaysError(f"`{names[by]}` is before it, and what {target} does is not known")
        return _StaysError(f"it needs `{names[by]}`, which runs later")

    # --- delay ---

    def delay(self, request: MoveRequest) -> None:
        facts, segments, row = self.facts, self.segments, request.row
        waits = self.waits.get(row, ())
        if not waits:
            raise _StaysError("nothing awaits it")
        self._check_ahead([each for each in waits if each in self.prefetched])
        direction = segments.direction_of[row]
        made = max((segments.makes[row], *(self.late[each] for each in self.before[row] if each in self.late)))
        if made < 0 or segments.direction[made] != direction:
            made = max(bisect_right(segments.first, row) - 1, 0)
        if made >= len(segments.first) or segments.direction[made] != direction:
            raise _StaysError("nothing computes beside it")
        segment = min(made + request.blocks, segments.ends(made)[1])
        target = segments.last[segment]
        if min(waits) > target:
            return
        group, readers = self._following(waits, target)
        self._check_ahead(sorted(each for each in readers if self.keys.get(each, (each,))[0] < each))
        place = (target, _BEHIND)
        if readers:
            reader = min(readers)
            place = (reader, _BEFORE)
            between = self.calls[bisect_right(self.calls, min(waits)) : bisect_right(self.calls, reader) - 1]
            if not any(self.roles[each] >= Role.AROUND and each not in group for each in between):
                source = self._collective(reader)
                if source in self.kept:
                    raise _StaysError(f"`{facts.names[source]}` is kept in order behind it", keeper=source)
                raise _StaysError(f"`{facts.names[reader]}` reads it at once")
        for each in sorted(group):
            if place > self.keys.get(each, (each, _AT))[:2]:
                self.keys[each] = (*place, each)
        for each in waits:
            self.late[each] = segment

    def _check_ahead(self, rows: Sequence[int]) -> None:
        """Raise if a prefetched collective needs one of some nodes."""
        if rows:
            ahead = self.prefetched[rows[0]]
            raise _StaysError(f"`{self.facts.names[ahead.row]}` needs it earlier", ahead=ahead)

    def _following(self, waits: Sequence[int], target: int) -> tuple[set[int], list[int]]:
        """The waits and what reads nothing but their results, up to ``target``; and the other readers up to there."""
        found, pending, readers = set(waits), list(waits), list[int]()
        while pending:
            for each in self.after.get(pending.pop(), ()):
                if each in found or min(each, self.keys.get(each, (each,))[0]) > target:
                    continue
                cheap = self.roles[each] in (Role.NONE, Role.AROUND) and not self.facts.flags[each] & _EFFECT
                if cheap and each not in self.unknown and each not in self.keys:
                    found.add(each)
                    pending.append(each)
                else:
                    readers.append(each)
        return found, readers


def _sorted_by_keys(calls: Sequence[int], before: Sequence[Sequence[int]], keys: Mapping[int, OrderKey]) -> list[int]:
    """The nodes sorted by key as far as dependencies allow; a node without a key keeps its place."""
    if not keys:
        return list(calls)
    waiting = dict.fromkeys(calls, 0)
    after: dict[int, list[int]] = {}
    for row in calls:
        for each in before[row]:
            if each in waiting:
                waiting[row] += 1
                after.setdefault(each, []).append(row)
    ready = [keys.get(row, (row, _AT, row)) for row, count in waiting.items() if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        row = heappop(ready)[2]
        order.append(row)
        for each in after.get(row, ()):
            waiting[each] -= 1
            if not waiting[each]:
                heappush(ready, keys.get(each, (each, _AT, each)))
    return order
