"""What an audit reads, read again as its definitions say: every pair of nodes looked at, nothing remembered."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from policylang.graph import marks
from policylang.graph.facts import Facts, Flag, Phase
from policylang.operators.calls import argument, describe, nodes_in

ORDERED = Flag.RANDOM | Flag.READS_MUTATED | Flag.WRITES | Flag.EFFECTFUL | Flag.COLLECTIVE


class SlowReader:
    """Of a flat graph without copies between device and host."""

    def __init__(self, facts: Facts, graph: fx.Graph) -> None:
        self.facts = facts
        self.nodes = list(graph.nodes)
        self.at = self.nodes.index

    def keeper(self, node: Any, piece: int) -> fx.Node | None:
        if isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == piece:
            source = node.args[0]
            if isinstance(source, fx.Node) and str(source.target) == "run_and_save_rng_state":
                return source
        return None

    def row(self, node: fx.Node) -> int:
        if self.keeper(node, 0) is not None:
            return -1
        named = self.keeper(node, 1) or node
        return self.facts.index.get(self.origin(named) or named.name, -1)

    def origin(self, node: fx.Node) -> str | None:
        return marks.custom(node.meta).get(marks.RECOMPUTED)

    def second(self, node: fx.Node) -> bool:
        return self.origin(node) is not None and node.op == "call_function"

    def late(self, node: fx.Node) -> bool:
        row = self.row(node)
        return self.origin(node) is not None or (row >= 0 and self.facts.phases[row] == Phase.BACKWARD)

    def forward_reads(self, late: bool) -> list[tuple[int, int]]:
        """Position of a reader, and the row that it reads of the forward or of the inputs."""
        return [
            (at, self.row(read))
            for at, node in enumerate(self.nodes)
            if self.late(node) is late
            for read in node.all_input_nodes
            if self.row(read) >= 0 and not self.late(read)
        ]

    def crossing(self) -> dict[int, int]:
        reads = self.forward_reads(late=True)
        return {row: max(at for at, each in reads if each == row) for _, row in reads}

    def held(self) -> dict[int, int]:
        roots = self.facts.storage_roots
        reads = [(at, roots[row]) for at, row in self.forward_reads(late=False)]
        return {root: max(at for at, each in reads if each == root) for _, root in reads}

    def saved(self) -> list[int]:
        facts = self.facts
        return sorted(
            row for row in self.crossing() if facts.phases[row] == Phase.FORWARD and not facts.has(row, Flag.SYMBOLIC)
        )

    def recomputed(self) -> list[int]:
        return [self.row(node) for node in self.nodes if self.second(node)]

    def first_runs(self) -> list[fx.Node]:
        called = (node for node in self.nodes if node.op == "call_function" and self.row(node) >= 0)
        return [node for node in called if not self.second(node)]

    def twice(self) -> list[int]:
        forward = [self.at(node) for node in self.first_runs() if not self.late(node)]
        again = [node for node in self.nodes if self.second(node)]

        def shares_a_part(node: fx.Node, earlier: fx.Node) -> bool:
            start, end = self.at(earlier), self.at(node)
            return start < end and self.row(earlier) == self.row(node) and not any(start < at < end for at in forward)

        return [self.row(node) for node in again if any(shares_a_part(node, other) for other in again)]

    def redrawn(self) -> list[int]:
        found = []
        for node in filter(self.second, self.nodes):
            replays = str(node.target) == "run_with_rng_state"
            draws = bool(describe(node.target).flags & Flag.RANDOM) or replays
            keeper = self.keeper(node.args[0], 0) if replays else None
            kept = self.row(keeper) if keeper is not None else -1
            if draws and self.facts.has(self.row(node), Flag.RANDOM) and kept != self.row(node):
                found.append(self.row(node))
        return found

    def rewritten(self) -> list[int]:
        return [
            self.row(node)
            for node in self.nodes
            if self.second(node)
            and any(not self.second(each) for each in nodes_in(argument(node, describe(node.target).written)))
        ]

    def swapped(self) -> set[str]:
        facts = self.facts
        rows = [self.row(node) for node in self.first_runs()]
        ordered = [row for row in rows if facts.flags[row] & ORDERED and facts.owners[row] == row]
        return {facts.names[row] for at, row in enumerate(ordered) if any(before > row for before in ordered[:at])}

    def early(self) -> list[tuple[str, str]]:
        return [
            (node.name, read.name)
            for node in self.nodes
            for read in node.all_input_nodes
            if self.at(read) > self.at(node)
        ]

    def unknown(self) -> list[str]:
        called = (node for node in self.nodes if node.op == "call_function")
        return [node.name for node in called if self.row(node) < 0 and self.keeper(node, 0) is None]
