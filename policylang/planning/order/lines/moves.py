"""``prefetch`` and ``delay``: collectives start some blocks earlier, or are awaited some blocks later."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush

from attrs import define, field, frozen

from policylang.graph.facts import Facts, Flag, GraphKind, Phase
from policylang.language.interruption.wanted import check_cancelled
from policylang.planning.order.dependencies import Dependencies
from policylang.planning.order.reading.roles import Role, roles_of
from policylang.planning.order.reading.shared_memory import awaited
from policylang.planning.order.stages import Stages

Key = tuple[int, int, int]
_BEFORE, _AT, _BEHIND = -1, 0, 1
_EFFECT = int(Flag.RANDOM | Flag.SEED | Flag.EFFECTFUL | Flag.WRITES)


@frozen
class Wish:
    """A collective that a statement names, and by how many blocks."""

    row: int
    statement: int
    blocks: int


@define(eq=False)
class Moves:
    """What prefetches and delays come to."""

    order: list[int] = field(factory=list)
    """The calls in the order in which they run then."""
    left: dict[int, dict[int, str]] = field(factory=dict)
    """By statement, the collectives that stay where they are, and why, as a phrase."""
    in_place: dict[int, list[int]] = field(factory=dict)
    """By statement, the collectives that are where they should be without it."""
    behind_kept: dict[int, dict[int, int]] = field(factory=dict)
    """By statement, those that stay because of a kept collective, and that one."""
    crossed: list[tuple[Wish, Wish]] = field(factory=list)
    """Pairs of which the first is to start before the second is to be over, and needs what it brings."""


def moved(
    facts: Facts,
    dependencies: Dependencies,
    stages: Stages,
    prefetches: Sequence[Wish],
    delays: Sequence[Wish],
    kept: Collection[int] = (),
    unknown: Collection[int] = (),
) -> Moves:
    """The order of the calls with some collectives moved. A collective has one wish of each kind at most.

    What a prefetched collective alone needs, as the cast of a shard, moves with it; so does what only works on what a
    delayed one brings. O((nodes + edges) log nodes).
    """
    return _Mover(facts, dependencies, stages, prefetches, delays, frozenset(kept), frozenset(unknown)).moves()


class _Mover:
    def __init__(
        self,
        facts: Facts,
        dependencies: Dependencies,
        stages: Stages,
        prefetches: Sequence[Wish],
        delays: Sequence[Wish],
        kept: Collection[int],
        unknown: Collection[int],
    ) -> None:
        self.facts = facts
        self.before = dependencies.before
        self.stages = stages
        self.prefetches = {wish.row: wish for wish in prefetches}
        self.delays = {wish.row: wish for wish in delays}
        self.kept = kept
        self.unknown = unknown
        self.roles = roles_of(facts)
        self.calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
        self.keys: dict[int, Key] = {}
        self.moved_for: dict[int, Wish] = {}
        self.found = Moves()
        self.anchors = self._anchors()
        self.waits: dict[int, list[int]] = {}
        self.after: dict[int, list[int]] = {}
        if self.delays:
            for row in self.calls:
                if (collective := awaited(facts, row)) is not None:
                    self.waits.setdefault(collective, []).append(row)
                for each in self.before[row]:
                    self.after.setdefault(each, []).append(row)

    def moves(self) -> Moves:
        for wish in sorted(self.prefetches.values(), key=lambda wish: wish.row):
            check_cancelled()
            self._prefetch(wish)
        late: dict[int, int] = {}
        for wish in sorted(self.delays.values(), key=lambda wish: wish.row):
            check_cancelled()
            self._delay(wish, late)
        self.found.order = in_order(self.calls, self.before, self.keys)
        return self.found

    def _anchors(self) -> frozenset[int]:
        """The first call of each turn but the first, which stands before all others of it."""
        found, turn = dict[int, int](), self.stages.turn_of
        for row in self.calls:
            if turn[row]:
                found.setdefault(turn[row], row)
        return frozenset(found.values())

    def _leave(self, wish: Wish, why: str) -> None:
        self.found.left.setdefault(wish.statement, {})[wish.row] = why

    def _is_kept(self, wish: Wish) -> bool:
        if wish.row in self.kept:
            self._leave(wish, "it is kept in order")
            self.found.behind_kept.setdefault(wish.statement, {})[wish.row] = wish.row
        return wish.row in self.kept

    # --- prefetch ---

    def _prefetch(self, wish: Wish) -> None:
        stages, row = self.stages, wish.row
        if self._is_kept(wish):
            return
        used = stages.uses[row]
        if used < 0:
            self._leave(wish, "nothing computes with what it brings")
            return
        first, _ = stages.ends(used)
        if stages.direction[used] != stages.turn_of[row] or used == first:
            backward = self.facts.phases[stages.first[used]] == Phase.BACKWARD
            half = "backward" if backward or self.facts.kind is GraphKind.BACKWARD else "forward"
            self._leave(wish, f"it would start before the {half} does")
            return
        target = stages.first[max(first, used - wish.blocks)]
        if row < target:
            self.found.in_place.setdefault(wish.statement, []).append(row)
            return
        group = self._needed(wish, target)
        place = (target, _BEHIND if target in self.anchors else _BEFORE)
        for each in group:
            key = (*place, each)
            if key <= self.keys.get(each, key):
                self.keys[each] = key
                self.moved_for[each] = wish

    def _needed(self, wish: Wish, target: int) -> list[int]:
        """The collective and what has to run before it from a row on; nothing where that cannot move."""
        found, pending = {wish.row}, [wish.row]
        while pending:
            row = pending.pop()
            for each in self.before[row]:
                if each < target or each in found or (each == target and each in self.anchors):
                    continue
                if not self._may_move_up(each, target):
                    self._blocked(wish, each)
                    return []
                found.add(each)
                pending.append(each)
        return sorted(found)

    def _may_move_up(self, row: int, target: int) -> bool:
        """What is done for the collective's sake alone; of other collectives, those that start as early themselves."""
        if row in self.kept or row in self.unknown or self.facts.flags[row] & _EFFECT:
            return False
        if self.roles[row] != Role.COLLECTIVE:
            return self.roles[row] in (Role.NONE, Role.AROUND)
        collective = awaited(self.facts, row)
        key = self.keys.get(row if collective is None else collective)
        return key is not None and key[0] <= target

    def _blocked(self, wish: Wish, by: int) -> None:
        facts = self.facts
        collective = awaited(facts, by)
        source = by if collective is None else collective
        if source in self.kept:
            self._leave(wish, f"`{facts.names[source]}` is kept in order before it")
            self.found.behind_kept.setdefault(wish.statement, {})[wish.row] = source
        elif by in self.unknown:
            self._leave(wish, f"`{facts.names[by]}` stands before it, and nobody knows what {facts.targets[by]} does")
        else:
            self._leave(wish, f"it needs `{facts.names[by]}`, which runs later")

    # --- delay ---

    def _delay(self, wish: Wish, late: dict[int, int]) -> None:
        """``late``: by wait that is moved, the stage behind which it is awaited."""
        stages, row = self.stages, wish.row
        waits = self.waits.get(row, ())
        if self._is_kept(wish):
            return
        if not waits:
            self._leave(wish, "nothing awaits it")
            return
        if crossing := [self.moved_for[each] for each in waits if each in self.moved_for]:
            self._leave(wish, f"`{self.facts.names[crossing[0].row]}` needs it earlier")
            self.found.crossed.append((crossing[0], wish))
            return
        made = max((stages.makes[row], *(late[each] for each in self.before[row] if each in late)))
        if made < 0 or stages.direction[made] != stages.turn_of[row]:
            made = max(bisect_right(stages.first, row) - 1, 0)
        if made >= len(stages.first) or stages.direction[made] != stages.turn_of[row]:
            self._leave(wish, "nothing computes beside it")
            return
        stage = min(made + wish.blocks, stages.ends(made)[1])
        target = stages.last[stage]
        if min(waits) > target:
            self.found.in_place.setdefault(wish.statement, []).append(row)
            return
        group, readers = self._hanging(waits, target)
        early = [each for each in readers if self.keys.get(each, (each,))[0] < each]
        reader = min(readers, default=None)
        if early:
            ahead = self.moved_for[min(early)]
            self._leave(wish, f"`{self.facts.names[ahead.row]}` needs it earlier")
            self.found.crossed.append((ahead, wish))
            return
        place = (target, _BEHIND) if reader is None else (reader, _BEFORE)
        if reader is not None:
            between = self.calls[bisect_right(self.calls, min(waits)) : bisect_right(self.calls, reader) - 1]
            if not any(self.roles[each] >= Role.AROUND and each not in group for each in between):
                self._read_at_once(wish, reader)
                return
        for each in sorted(group):
            if place > self.keys.get(each, (each, _AT))[:2]:
                self.keys[each] = (*place, each)
        for each in waits:
            late[each] = stage

    def _read_at_once(self, wish: Wish, reader: int) -> None:
        collective = awaited(self.facts, reader)
        source = reader if collective is None else collective
        if source in self.kept:
            self._leave(wish, f"`{self.facts.names[source]}` is kept in order behind it")
            self.found.behind_kept.setdefault(wish.statement, {})[wish.row] = source
        else:
            self._leave(wish, f"`{self.facts.names[reader]}` reads it at once")

    def _hanging(self, waits: Sequence[int], target: int) -> tuple[set[int], list[int]]:
        """The waits and what only works on what they bring, up to a row; and what else reads that up to there."""
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


def in_order(calls: Sequence[int], before: Sequence[Sequence[int]], keys: Mapping[int, Key]) -> list[int]:
    """The rows in the order of their keys, as far as what has to run before what allows; a row's own place is its key
    where it has none."""
    if not keys:
        return list(calls)
    called = frozenset(calls)
    waiting: dict[int, int] = {}
    after: dict[int, list[int]] = {}
    for row in calls:
        waiting[row] = 0
        for each in before[row]:
            if each in called:
                waiting[row] += 1
                after.setdefault(each, []).append(row)
    ready = [keys.get(row, (row, _AT, row)) for row in calls if not waiting[row]]
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
