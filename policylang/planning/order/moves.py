"""``prefetch`` and ``delay``: collectives start some blocks earlier, or are awaited some blocks later."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush

from attrs import define, field, frozen

from policylang.graph.facts import Facts, Flag, GraphKind, Phase
from policylang.language.cancellation import check_cancelled
from policylang.planning.order.dependencies import Dependencies, Role, awaited, roles_of
from policylang.planning.order.segments import Segments

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
    """The order of the calls with some collectives moved. A collective has one request of each kind at most.

    What only a prefetched collective needs, such as the cast of a shard, moves with it; so does what reads nothing but
    the result of a delayed one. O((nodes + edges) log nodes).
    """
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
            raise _StaysError("nothing computes with what it brings")
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
