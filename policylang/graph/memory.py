"""Alias and mutation analysis of a flat graph: who shares memory, who writes it, what a recomputation would see.

A flat graph is traced as the step runs: dropout is ``empty_like → bernoulli_ → div_``, a counter is ``add_`` on a
buffer, an optimizer writes parameters. Memory that is made and finished within the forward does not prevent
recomputation: its first node and everything that writes to it form a *unit* that is recomputed as a whole or not at
all. Memory that comes from outside, or that somebody reads while it is still being written, is left alone.

One pass over the operators' schemas and two over the edges; fake tensors are not asked, since not every tracer leaves
them and not all of them share storage where the real ones do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any

from attrs import evolve, field, frozen
from torch import fx

from policylang.graph.facts import Phase
from policylang.operators import calls
from policylang.operators.names import Category
from policylang.torch_compat.graphs import mutated_input, underlying_input

_MOST_EARLY_READERS = 8
"""The most operators that read memory between two writes and still become part of its unit. A larger unit would tie
unrelated parts of a model together: the memory is saved instead."""


@frozen(eq=False)
class GraphMemory:
    """Nodes are those of the node list that :func:`memory_of` was given."""

    roots: Sequence[int]
    """The node that allocated the memory of a node's value, maybe itself."""
    writes: dict[int, list[int]]
    """Root to the nodes that write to its memory, ascending."""
    units: Sequence[int]
    """The root of the unit that a node belongs to, -1 for a node that is in none."""
    members: dict[int, list[int]]
    """Root of a unit to its nodes, ascending, itself first."""
    statistics: dict[int, tuple[int, ...]]
    """Nodes whose writes are running statistics that a recomputation leaves out: the positions of those arguments."""
    reads_no_bytes: Sequence[int] = field(repr=False)
    """1 for nodes that only alias memory, or ask for its sizes."""
    loose: frozenset[int]
    """Roots of memory made within the graph that somebody reads while it is still being written."""
    needed_until: Sequence[int] = field(repr=False)
    """The last backward node that could ask for a forward node, directly or through nodes that read it; -1 if none."""
    unstable: frozenset[int] = frozenset()
    """Forward nodes that a recomputation would compute from other bytes."""
    written: frozenset[int] = frozenset()
    """Forward nodes that write to memory from outside the forward, or to memory that is read in between."""

    def written_between(self, row: int, low: int, high: int) -> int | None:
        """The first write strictly between two nodes to the memory of ``row``."""
        writes = self.writes.get(self.roots[row])
        if not writes:
            return None
        first = bisect_right(writes, low)
        return writes[first] if first < len(writes) and writes[first] < high else None


def memory_of(nodes: Sequence[fx.Node], phases: Sequence[int], state: Collection[fx.Node] = ()) -> GraphMemory:
    """The memory of a flat graph whose phases are known. O(nodes + edges). ``state``: inputs that every run of the
    forward writes to, of which several may come before a backward. A recomputation reads other bytes there."""
    nothing = GraphMemory(range(len(nodes)), {}, [-1] * len(nodes), {}, {}, bytes(len(nodes)), frozenset(), ())
    if not any(map(calls.may_write, nodes)):
        return nothing
    row_of = {node: row for row, node in enumerate(nodes)}
    inputs = [tuple(row_of[each] for each in node.all_input_nodes) for node in nodes]
    parents = list(range(len(nodes)))
    raw_writes: list[tuple[int, int]] = []
    statistics: dict[int, tuple[int, ...]] = {}
    reads_no_bytes = bytearray(len(nodes))
    for row, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        aliased, written = calls.effects(node)
        for other in aliased:
            _join(parents, row, row_of[other])
        reads_no_bytes[row] = (bool(aliased) and not written) or calls.asks_for_sizes(node)
        raw_writes.extend((row, row_of[other]) for other in written)
        if left_out := calls.written_statistics(node):
            statistics[row] = left_out
            raw_writes.extend((row, row_of[node.args[at]]) for at in left_out)
    roots = [find_root(parents, row) for row in range(len(nodes))]
    writes: dict[int, list[int]] = {}
    for row, target in raw_writes:
        rows = writes.setdefault(roots[target], [])
        if not rows or rows[-1] != row:
            rows.append(row)
    if not writes:
        return nothing
    units, members = _units(nodes, phases, inputs, roots, writes, reads_no_bytes)
    needed = _needed_until(phases, inputs, units)
    loose = frozenset(root for root in writes if root not in members and nodes[root].op == "call_function")
    memory = GraphMemory(roots, writes, units, members, statistics, reads_no_bytes, loose, needed)
    unstable, outside = _hazards(nodes, phases, inputs, memory, frozenset(roots[row_of[each]] for each in state))
    return evolve(memory, unstable=unstable, written=outside)


def find_root(parents: MutableMapping[int, int] | list[int], row: int) -> int:
    while parents[row] != row:
        parents[row] = parents[parents[row]]
        row = parents[row]
    return row


def _join(parents: list[int], left: int, right: int) -> None:
    """The smaller node stays the root: memory is named for the node that made it."""
    left, right = find_root(parents, left), find_root(parents, right)
    if left != right:
        parents[max(left, right)] = min(left, right)


def _units(
    nodes: Sequence[fx.Node],
    phases: Sequence[int],
    inputs: Sequence[tuple[int, ...]],
    roots: Sequence[int],
    writes: dict[int, list[int]],
    reads_no_bytes: bytearray,
) -> tuple[list[int], dict[int, list[int]]]:
    """Memory allocated and last written within the forward, with all that must be recomputed with it: its views and
    writers up to the last write, and their readers in between."""
    last_write = {
        root: rows[-1]
        for root, rows in writes.items()
        if nodes[root].op == "call_function" and all(phases[row] == Phase.FORWARD for row in (root, *rows))
    }
    found: dict[int, set[int]] = {root: set(writes[root]) for root in last_write}
    early: dict[int, set[int]] = {root: set() for root in last_write}
    for row in range(len(nodes)):
        root = roots[row]
        if root in last_write and row <= last_write[root]:
            found[root].add(row)
        if reads_no_bytes[row]:
            continue
        for read in inputs[row]:
            other = roots[read]
            if other != root and other in last_write and row < last_write[other]:
                early[other].add(row)
    memories = Counter(row for rows in writes.values() for row in rows)

    def several(row: int) -> bool:
        """It writes to several memories, or returns what it writes to beside something else."""
        operator = calls.describe(nodes[row].target)
        return memories[row] > 1 or bool(operator.aliased and operator.flags & Category.MULTI_OUTPUT)

    units = [-1] * len(nodes)
    members: dict[int, list[int]] = {}
    for root, own in found.items():
        rows = sorted(own | early[root])
        elsewhere = any(units[row] >= 0 or phases[row] != Phase.FORWARD for row in rows)
        tangled = any(roots[row] in writes or row in memories for row in early[root] - own) or any(
            several(row) for row in writes[root]
        )
        if elsewhere or tangled or len(early[root] - own) > _MOST_EARLY_READERS:
            continue
        members[root] = rows
        for row in rows:
            units[row] = root
    return units, members


def _needed_until(phases: Sequence[int], inputs: Sequence[tuple[int, ...]], units: Sequence[int]) -> list[int]:
    """Two sweeps against the edges: the second knows of units that are asked for before their last node."""
    needed = [-1] * len(inputs)
    unit_needed: dict[int, int] = {}
    for _ in range(2):
        for row in range(len(inputs) - 1, -1, -1):
            if phases[row] == Phase.BACKWARD:
                until = row
            elif phases[row] == Phase.FORWARD:
                unit = units[row]
                if unit >= 0 and unit_needed.get(unit, -1) > needed[row]:
                    needed[row] = unit_needed[unit]
                until = needed[row]
            else:
                continue
            for read in inputs[row]:
                if until > needed[read]:
                    needed[read] = until
                unit = units[read]
                if unit >= 0 and until > unit_needed.get(unit, -1):
                    unit_needed[unit] = until
    return needed


def _hazards(
    nodes: Sequence[fx.Node],
    phases: Sequence[int],
    inputs: Sequence[tuple[int, ...]],
    memory: GraphMemory,
    state: frozenset[int],
) -> tuple[frozenset[int], frozenset[int]]:
    """The nodes that must not be recomputed although their schema allows it, and the writers among them."""
    roots, units = memory.roots, memory.units
    writers = {row for rows in memory.writes.values() for row in rows}
    unstable: set[int] = set()
    written: set[int] = set()
    for row in range(len(nodes)):
        if phases[row] != Phase.FORWARD or nodes[row].op != "call_function":
            continue
        left_out = memory.statistics.get(row, ())
        if row in writers and units[row] < 0 and not (left_out and calls.statistics_positions(nodes[row].target)):
            written.add(row)
        if roots[row] in memory.loose:
            unstable.add(row)
        elif not memory.reads_no_bytes[row]:
            ignored = {nodes[row].args[at] for at in left_out}
            for read in inputs[row]:
                if nodes[read] in ignored or (units[row] >= 0 and units[read] == units[row]):
                    continue
                if roots[read] in state or memory.written_between(read, row, memory.needed_until[row]) is not None:
                    unstable.add(row)
                    break
    return frozenset(unstable), frozenset(written)


def mutated_reads(
    nodes: Sequence[fx.Node],
    operators: Sequence[calls.OperatorInfo],
    roots: Sequence[int],
    row_of: Mapping[fx.Node, int],
    output_descs: Sequence[Any],
) -> list[int]:
    """The nodes that read memory which is written after them, and those that make it: a recomputation would differ.

    A functional graph returns a changed buffer as a new value, which a ``copy_`` at the end of the graph, or the
    runtime, copies into the buffer after the forward. Every read of that buffer, through views or not, sees the old
    value in the forward and the new one in the backward. In a graph that is not functional, recomputing the memory does
    not repeat the write.

    Args:
        roots: node to the node that allocated its value's memory, maybe itself.
        output_descs: descriptor of each value that the graph returns.
    """
    last_write: dict[int, int] = {}
    for row, operator in enumerate(operators):
        for target in calls.nodes_in(calls.argument(nodes[row], operator.written)) if operator.written else ():
            last_write[roots[row_of[target]]] = row
    targets = [target for desc in output_descs if desc is not None and (target := mutated_input(desc)) is not None]
    copied_into = {underlying_input(target) for target in targets}
    for row, node in enumerate(nodes if copied_into else ()):
        desc = node.meta.get("desc") if node.op == "placeholder" else None
        if desc is not None and underlying_input(desc) in copied_into:
            last_write[roots[row]] = len(nodes)
    if not last_write:
        return []
    found = []
    for row, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        made_before = roots[row] == row and last_write.get(row, -1) > row  # recomputed, it would be as before the write
        if made_before or any(
            last_write.get(roots[row_of[read]], -1) > row and read not in calls.unread(node)
            for read in node.all_input_nodes
        ):
            found.append(row)
    return found
