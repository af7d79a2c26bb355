"""The units that the list scheduler moves, when each has to run, and the memory of the order that is being made.

A movable collective takes along nodes that only it needs and that may run anywhere before it, such as the cast of a
shard. A node that takes neither time nor memory (views, waits of collectives that may move) is *passive*: it is no
scheduler node, and runs right before the first one that reads it. Pieces of a tuple belong to the operator that returns
it. Times are seconds of computation from the start of the step, in the given order and without any waiting.

Memory is counted as :mod:`policylang.simulation.memory` counts it. All that has not run is expected in the given order
of the scheduler nodes; a node that is *pulled* runs now instead, which changes what is alive up to its old place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

from attrs import define, field

from policylang.graph.facts import Facts, Flag, InputKind, Phase, returns_memory_of_input
from policylang.operators.names import GETITEM, WAITS
from policylang.planning.order.dependencies import Dependencies
from policylang.simulation.memory import pieces_with_memory
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import streams_of

_SHARE = 0.1  # the most time that nodes taken along may need, as a share of the collective's
_MARGIN = 1.2
"""A collective starts ahead as if it, and all before its deadline on its stream, took this many times longer."""
_LOOSE = 0.25
"""A node is loose if its longest path takes at most this share of what is computed before it in the given order."""
_LIGHT = 0.5
"""A collective is not urgent if less compute than this share of its duration depends on it. The critical path counts,
not the first consumer: after bucketing, the first consumer is a split."""


@define(eq=False)
class SchedulerNodes:
    """One entry for each scheduler node, in the given order; *rows* are nodes of the graph."""

    rows: list[list[int]]
    """The nodes that run one after the other."""
    before: list[list[int]]
    after: list[list[int]] = field(init=False)
    seconds: list[float]
    sent: list[int]
    """The node of the collective that it issues, -1 for none."""
    streams: list[str]
    lengths: list[float]
    awaits: list[tuple[int, ...]]
    """The scheduler nodes whose collectives have to be over before it runs."""
    movable: bytearray
    """1 for a collective that may move."""
    inputs: Sequence[Sequence[int]]
    """By node, the passive nodes among what it reads."""
    waits: list[list[int]]
    """The passive nodes that await its collective."""

    def __attrs_post_init__(self) -> None:
        self.after = [[] for _ in self.rows]
        for node, before in enumerate(self.before):
            for earlier in before:
                self.after[earlier].append(node)

    def __len__(self) -> int:
        return len(self.rows)

    def in_rows(self, order: Iterable[int]) -> list[int]:
        """All nodes, with the scheduler nodes in this order; ``~node`` awaits the node's collective."""
        found: list[int] = []
        done = bytearray(len(self.inputs))
        for node in order:
            pending = [*reversed(self.waits[~node] if node < 0 else self.rows[node])]
            while pending:
                row = pending[-1]
                missing = [each for each in self.inputs[row] if not done[each]]
                if missing:
                    pending.extend(reversed(missing))
                    continue
                pending.pop()
                if not done[row]:
                    done[row] = 1
                    found.append(row)
        return found


def scheduler_nodes(
    facts: Facts, order: Sequence[int], dependencies: Dependencies, times: NodeTimes, movable: Collection[int]
) -> SchedulerNodes:
    """O(nodes + edges)."""
    return _NodeBuilder(facts, order, dependencies, times, movable).nodes()


class _NodeBuilder:
    def __init__(
        self, facts: Facts, order: Sequence[int], dependencies: Dependencies, times: NodeTimes, movable: Collection[int]
    ) -> None:
        self.facts, self.order, self.times = facts, order, times
        self.streams = streams_of(facts)
        self.roots = facts.storage_roots
        self.movable = frozenset(row for row in movable if row in self.streams.started)
        self.runs = bytearray(len(facts))
        for row in order:
            self.runs[row] = 1
        self.before: list[list[int]] = [[] for _ in range(len(facts))]
        self.after: list[list[int]] = [[] for _ in range(len(facts))]
        fixed = -1  # the last collective that keeps its place among those that do
        for row in order:
            before = dict.fromkeys(each for each in dependencies.before[row] if self.runs[each])
            if row in self.streams.started and row not in self.movable:
                if fixed >= 0:
                    before[fixed] = None
                fixed = row
            self.before[row] = [*before]
            for each in before:
                self.after[each].append(row)

    def nodes(self) -> SchedulerNodes:
        facts, order, started, length = self.facts, self.order, self.streams.started, self.times.seconds
        passive = self._passive()
        pieces = self._pieces(passive)
        reads, waits = self._past_passive(passive)
        taken = self._taken_along(passive, reads)
        members: dict[int, list[int]] = {}
        for row in order:
            if not passive[row]:
                members.setdefault(taken.get(row, pieces.get(row, row)), []).append(row)
        mains = [row for row in order if row in members]
        node_of = {row: node for node, main in enumerate(mains) for row in members[main]}
        before, awaits = list[list[int]](), list[tuple[int, ...]]()
        waits_of: dict[int, list[int]] = {main: [] for main in mains}  # those of the pieces that it returns as well
        for node, main in enumerate(mains):
            rows = members[main]
            read = dict.fromkeys(node_of[each] for row in rows for each in reads[row])
            before.append([each for each in read if each != node])
            awaited = dict.fromkeys(node_of[each] for row in rows for each in waits[row] if self.runs[each])
            awaits.append(tuple(each for each in awaited if each != node))
            for user in facts.users[main] if main in started else ():
                candidates = facts.users[user] if facts.targets[user] == GETITEM else (user,)
                waits_of[main] += (each for each in candidates if facts.targets[each] in WAITS and passive[each])
        return SchedulerNodes(
            rows=[members[main] for main in mains],
            before=before,
            seconds=[sum(length[row] for row in members[main] if row not in started) for main in mains],
            sent=[main if main in started else -1 for main in mains],
            streams=[started.get(main, "") for main in mains],
            lengths=[length[main] if main in started else 0.0 for main in mains],
            awaits=awaits,
            movable=bytearray(main in self.movable for main in mains),
            inputs=[[each for each in reads if passive[each]] for reads in facts.inputs],
            waits=[*waits_of.values()],
        )

    def _passive(self) -> bytearray:
        """Views and waits that only data dependencies bind, and that somebody reads."""
        facts, roots = self.facts, self.roots
        passive = bytearray(len(facts))
        for row in self.order:
            inputs, target = facts.inputs[row], facts.targets[row]
            if not inputs or not self.after[row] or self.times.seconds[row] or row in self.streams.started:
                continue
            if roots[row] == row or any(roots[each] != roots[row] for each in inputs if self.runs[each]):
                continue
            if target in WAITS:
                if any(each not in self.movable for each in self.streams.awaited.get(row, ())):
                    continue
            elif target != GETITEM and not returns_memory_of_input(facts, row):
                continue
            if not facts.flags[row] & (Flag.WRITES | Flag.EFFECTFUL | Flag.RANDOM):
                passive[row] = self._only_data(row)
        return passive

    def _only_data(self, row: int) -> bool:
        """True if only data dependencies bind a node to others before and after it."""
        inputs = self.facts.inputs
        data = set(inputs[row])
        return all(each in data for each in self.before[row]) and all(row in inputs[each] for each in self.after[row])

    def _pieces(self, passive: bytearray) -> dict[int, int]:
        """Each piece of a tuple, and the operator that returns it."""
        found: dict[int, int] = {}
        for row in self.order:
            if self.facts.targets[row] == GETITEM and not passive[row] and len(self.before[row]) == 1:
                source = self.before[row][0]
                if not passive[source]:
                    found[row] = found.get(source, source)
        return found

    def _past_passive(self, passive: bytearray) -> tuple[list[list[int]], list[tuple[int, ...]]]:
        """By node, the nodes before it that are not passive, and the collectives that it awaits."""
        reads: list[list[int]] = [[] for _ in passive]
        waits: list[tuple[int, ...]] = [()] * len(passive)
        awaited = self.streams.awaited
        for row in self.order:
            found: dict[int, None] = {}
            over = dict.fromkeys(awaited.get(row, ()))
            for each in self.before[row]:
                if passive[each]:
                    found.update(dict.fromkeys(reads[each]))
                    over.update(dict.fromkeys(waits[each]))
                else:
                    found[each] = None
            reads[row], waits[row] = [*found], tuple(over)
        return reads, waits

    def _taken_along(self, passive: bytearray, reads: list[list[int]]) -> dict[int, int]:
        """Nodes that only a movable collective needs and that cost no memory and hardly any time right before it."""
        facts, seconds = self.facts, self.times.seconds
        readers: dict[int, set[int]] = {}
        for row in self.order:
            if not passive[row]:
                for each in reads[row]:
                    readers.setdefault(each, set()).add(row)
        taken: dict[int, int] = {}
        barred = Flag.WRITES | Flag.EFFECTFUL | Flag.RANDOM | Flag.MULTI_OUTPUT
        for row in reversed(self.order):
            into = {taken.get(each, each) for each in readers.get(row, ())}
            if passive[row] or row in self.streams.started or len(into) != 1 or facts.flags[row] & barred:
                continue
            (main,) = into
            if main not in self.movable or row in self.streams.awaited or seconds[row] > _SHARE * seconds[main]:
                continue
            read = (each for each in facts.inputs[row] if facts.ops[self.roots[each]] == "call_function")
            cheap = facts.targets[row] != GETITEM and sum(facts.bytes[each] for each in read) <= facts.bytes[row]
            if cheap and self._only_data(row):
                taken[row] = main
        return taken


class LatestStarts:
    """When each scheduler node is due; O(nodes + edges). ``close``: loose nodes are due this far before their reader,
    as a share of all computation; ``nearest``: the first consumer, not the critical path, decides what is urgent."""

    def __init__(self, nodes: SchedulerNodes, close: float, *, nearest: bool = False) -> None:
        count, self._close, self._nearest = len(nodes), close, nearest
        *self.place, self.total = accumulate(nodes.seconds, initial=0.0)
        """When each node computes in the given order, and when the step ends."""
        self.loose = bytearray(count)
        """1 for a node with little upstream compute, which could run much earlier: recomputation of inputs, say."""
        self.at_end = bytearray(count)
        """1 for what only the end of the step needs: weight gradients, their scatters and waits."""
        self.due = [0.0] * count
        """When a node has to start, no later than in the given order, for no dependent collective to be late."""
        self.latest = [0.0] * count
        """When a collective has to start for those behind it on its stream not to be late."""
        self.early = [0.0] * count
        """From when on a collective is started ahead."""
        self.read = [self.total] * count
        """When the first reader of a collective computes in the given order."""
        self._find(nodes)
        bound = (node for node in range(len(nodes.lengths)) if not self.at_end[node] and not self.loose[node])
        self.hole = max((nodes.lengths[node] for node in bound), default=0.0)
        """The longest collective between two pieces of dependent computation: other computation has to hide it."""

    def keys(self, lag: float) -> list[float]:
        """The order of computation: by due time; what only the end needs, up to ``lag`` later than given."""
        nodes = zip(self.due, self.place, self.at_end, strict=True)
        return [min(due, place + lag) if at_end else due for due, place, at_end in nodes]

    def _find(self, nodes: SchedulerNodes) -> None:
        path = [0.0] * len(nodes)  # the longest that ends with a node
        awaited_by: list[list[int]] = [[] for _ in nodes.rows]
        for node, before in enumerate(nodes.before):
            head = max((path[each] for each in before), default=0.0)
            head = max((head, *(path[each] + nodes.lengths[each] for each in nodes.awaits[node])))
            self.loose[node] = head <= _LOOSE * self.place[node]
            path[node] = head + nodes.seconds[node]
            for each in nodes.awaits[node]:
                awaited_by[each].append(node)
        tail = [0.0] * len(nodes)  # the longest path of computation from a node to the end
        free: dict[str, tuple[float, float]] = {}  # by stream, when it has to be free for what is behind
        for node in range(len(nodes) - 1, -1, -1):
            after = nodes.after[node]
            tail[node] = nodes.seconds[node] + max((tail[each] for each in after), default=0.0)
            late = min((self._wanted(each, node) for each in after), default=self.total)
            awaited = sum(nodes.lengths[each] for each in nodes.awaits[node])
            is_light = (nodes.seconds[node] if self._nearest else tail[node]) <= _LIGHT * awaited
            self.at_end[node] = all(self.at_end[each] for each in after) and (is_light or not nodes.awaits[node])
            if not nodes.movable[node]:
                due = late - nodes.seconds[node]
                self.due[node] = due if self.at_end[node] else min(due, self.place[node])
                continue
            length, readers = nodes.lengths[node], awaited_by[node]
            start = min(late, min((self._wanted(each, node) for each in readers), default=self.total) - length)
            self.read[node] = min((self.place[each] for each in readers), default=self.total)
            self.at_end[node] = self.at_end[node] and all(self.at_end[each] for each in readers)
            self.due[node] = start - nodes.seconds[node]
            self.latest[node] = self.early[node] = start
            if not self.at_end[node]:
                last, early = free.get(nodes.streams[node], (self.total, self.total))
                self.latest[node] = min(start, last - length)
                self.early[node] = min(start - length, early - _MARGIN * length)
                free[nodes.streams[node]] = (self.latest[node], self.early[node])

    def _wanted(self, reader: int, node: int) -> float:
        """When a node has to be done for a reader. In a step that sends more than it computes, every path between
        collectives is overdue; a loose node is no more overdue than its readers are close."""
        due = self.due[reader]
        if self.loose[node] and not self.loose[reader]:
            return max(due, self.place[reader] - self._close * self.total)
        return due


def announced(nodes: SchedulerNodes) -> tuple[list[list[int]], list[float]]:
    """For each node, the collectives whose critical path starts at the end of its own collective; for each collective,
    the computation left on that path. Once the first is issued, the start of the second can be predicted."""
    done, announcer, computes = [0.0] * len(nodes), [-1] * len(nodes), [0.0] * len(nodes)
    for node, before in enumerate(nodes.before):
        latest = 0.0
        for each in before:
            if done[each] > latest:
                latest, announcer[node], computes[node] = done[each], announcer[each], computes[each]
        for each in nodes.awaits[node]:
            over = done[each] + nodes.lengths[each]
            if over >= latest:
                latest, announcer[node], computes[node] = over, each, 0.0
        done[node] = latest + nodes.seconds[node]
        computes[node] += nodes.seconds[node]
    found: list[list[int]] = [[] for _ in nodes.rows]
    for node, each in enumerate(announcer):
        if nodes.movable[node] and each >= 0:
            found[each].append(node)
    return found, computes


_LEAST = -(1 << 62)


class RangeMaximum:
    """Numbers: adds to a range and asks for the maximum of a range in O(log length), in a lazy segment tree."""

    def __init__(self, values: Sequence[int]) -> None:
        self._size = 1 << (len(values) + 1).bit_length()
        self._most = [_LEAST] * (2 * self._size)
        self._added = [0] * (2 * self._size)
        most, size = self._most, self._size
        most[size + 1 : size + 1 + len(values)] = values  # a leaf is free at either end
        for at in range(size - 1, 0, -1):
            left, right = most[2 * at], most[2 * at + 1]
            most[at] = left if left > right else right

    def add(self, start: int, end: int, amount: int) -> None:
        """To each number of ``[start, end)``."""
        if start >= end or not amount:
            return
        most, added = self._most, self._added
        low, high = start + self._size, end + self._size + 1
        while low ^ high ^ 1:
            if not low & 1:
                most[low ^ 1] += amount
                added[low ^ 1] += amount
            if high & 1:
                most[high ^ 1] += amount
                added[high ^ 1] += amount
            low >>= 1
            high >>= 1
            left, right = most[2 * low], most[2 * low + 1]
            most[low] = (left if left > right else right) + added[low]
            left, right = most[2 * high], most[2 * high + 1]
            most[high] = (left if left > right else right) + added[high]
        low >>= 1
        while low:
            left, right = most[2 * low], most[2 * low + 1]
            now = (left if left > right else right) + added[low]
            if most[low] == now:  # so is all above
                break
            most[low] = now
            low >>= 1

    def most(self, start: int, end: int) -> int:
        """The maximum of ``[start, end)``; far below zero if that is empty."""
        if start >= end:
            return _LEAST
        most, added = self._most, self._added
        low, high = start + self._size, end + self._size + 1
        left = right = _LEAST
        while low ^ high ^ 1:
            if not low & 1 and most[low ^ 1] > left:
                left = most[low ^ 1]
            if high & 1 and most[high ^ 1] > right:
                right = most[high ^ 1]
            low >>= 1
            high >>= 1
            left += added[low]
            right += added[high]
        found = left if left > right else right
        low >>= 1
        while low:
            found += added[low]
            low >>= 1
        return found


class BufferUses:
    """The buffers of a graph, named by the node that allocates each, and the scheduler nodes that make or read them."""

    def __init__(self, facts: Facts, nodes: SchedulerNodes) -> None:
        self.sizes: dict[int, int] = {}
        self.resident = 0
        """Bytes that are there before the first node."""
        self.needs: list[int] = []
        """By node, the bytes that it allocates."""
        self.keeps: list[int] = []
        """By node, those that outlive it."""
        self.used: list[list[int]] = []
        """By node, the buffers that it makes or reads, that others use as well, and that are freed after the last."""
        self.users: dict[int, list[int]] = {}
        """By buffer, the nodes that use it, in their order."""
        owner_of, pieces_of = pieces_with_memory(facts)
        roots, storage = facts.storage_roots, list(range(len(facts)))  # by node, the node that allocates its buffer
        for row, inputs in enumerate(facts.inputs):
            if roots[row] != row and inputs:
                storage[row] = storage[inputs[0]]
        runs = {row for rows in nodes.rows for row in rows}
        stays = set[int]()  # never freed
        for row, (op, phase) in enumerate(zip(facts.ops, facts.phases, strict=True)):
            if phase == Phase.OUTPUT:
                stays.update(storage[each] for each in facts.inputs[row])
            if op in ("placeholder", "get_attr"):
                self.resident += facts.bytes[row]
                if facts.input_kinds[row] == InputKind.TANGENT:  # as if the backward had begun
                    self.sizes[row] = facts.bytes[row]
                else:
                    stays.add(row)
        stays = stays.union(*(pieces_of.get(each, ()) for each in stays))
        for node, rows in enumerate(nodes.rows):
            new: list[int] = []
            for row in rows:
                if storage[row] == row and row not in owner_of:
                    pieces = [each for each in pieces_of.get(row, ()) if each in runs]
                    self.sizes.update((each, facts.bytes[each]) for each in pieces)
                    self.sizes[row] = facts.bytes[row] - sum(facts.bytes[each] for each in pieces)
                    new += (row, *pieces)
            own = dict.fromkeys(storage[each] for row in rows for each in (row, *facts.inputs[row]))
            for each in [*own]:  # a tuple holds its pieces until the last is taken
                own.update((piece, None) for piece in pieces_of.get(each, ()) if piece in runs)
            own.update((each, None) for each in new)
            self.needs.append(sum(self.sizes[each] for each in new))
            self.used.append([each for each in own if each not in stays])
            for each in self.used[node]:
                self.users.setdefault(each, []).append(node)
        for node, used in enumerate(self.used):
            inner = [each for each in used if self.users[each] == [node] and facts.ops[each] == "call_function"]
            self.keeps.append(self.needs[node] - sum(self.sizes[each] for each in inner))
            self.used[node] = [each for each in used if each not in inner and self.sizes.get(each)]


class LiveMemory:
    """The bytes alive now, as nodes run in any order."""

    def __init__(self, buffers: BufferUses) -> None:
        self._buffers = buffers
        self._left = {each: len(nodes) for each, nodes in buffers.users.items()}
        self.bytes = buffers.resident

    def run(self, node: int) -> None:
        buffers, left = self._buffers, self._left
        self.bytes += buffers.keeps[node]
        for each in buffers.used[node]:
            left[each] -= 1
            if not left[each]:
                self.bytes -= buffers.sizes[each]


class MemoryAhead:
    """The bytes alive at each node that has not run, if the rest runs in the given order."""

    def __init__(self, buffers: BufferUses) -> None:
        self._buffers = buffers
        self._live = LiveMemory(buffers)
        self._last = {each: [*nodes] for each, nodes in buffers.users.items()}
        self._done = bytearray(len(buffers.needs))
        levels: list[int] = []
        simulated = LiveMemory(buffers)
        for node, needs in enumerate(buffers.needs):
            levels.append(simulated.bytes + needs)
            simulated.run(node)
        self._levels = RangeMaximum(levels)

    def run(self, node: int) -> None:
        """Run the next node of the given order."""
        self._done[node] = 1
        self._live.run(node)

    def pull(self, node: int, head: int, limit: int) -> bool:
        """Run a node ahead of the next one, ``head``, if nothing up to its old place then exceeds the limit."""
        buffers, levels = self._buffers, self._levels
        if self._live.bytes + buffers.needs[node] > limit:
            return False
        keeps = buffers.keeps[node]
        changes = {head: keeps}  # from where on up to its old place
        for each in buffers.used[node]:
            start = self._last_before(each, node, head)
            changes[start] = changes.get(start, 0) - buffers.sizes[each]
        levels.add(node, node + 1, _LEAST)
        for start, more in changes.items():
            levels.add(start, node, more)
        if keeps > 0 and levels.most(head, node) > limit:
            for start, more in changes.items():
                levels.add(start, node, -more)
            levels.add(node, node + 1, -_LEAST)
            return False
        self._done[node] = 1
        self._live.run(node)
        return True

    def _last_before(self, each: int, node: int, head: int) -> int:
        """The first node at which a buffer would be free already, had ``node`` run; past ``node`` if none."""
        last, done = self._last[each], self._done
        while done[last[-1]]:
            last.pop()
        if last[-1] != node:
            return node + 1
        last.pop()
        while last and done[last[-1]]:
            last.pop()
        start = last[-1] + 1 if last else head
        last.append(node)
        return start
