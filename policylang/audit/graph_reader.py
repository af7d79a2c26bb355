"""Reads what runs off FX graphs: what crosses from forward to backward, runs twice, is copied, and in which order.

One pass over nodes and edges of a graph, or of two halves one after the other. Of marks, only which node a second run
of a flat graph repeats is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from attrs import define, field
from torch import fx

from policylang.audit.outcome import Found, HostCopy
from policylang.graph import marks
from policylang.graph.facts import Facts, Flag, Phase, storage_roots
from policylang.operators.calls import argument, describe, function, nodes_in, piece_of_draw
from policylang.operators.names import RUNS_WITH_RANDOM_STATE, SAVES_RANDOM_STATE

_OFFLOAD, _RELOAD, _WAIT = (f"policylang.{name}.default" for name in ("offload", "reload", "wait"))
_RANDOM, _WRITES, _SYMBOLIC = int(Flag.RANDOM), int(Flag.WRITES), int(Flag.SYMBOLIC)
_EFFECTS = int(Flag.WRITES | Flag.EFFECTFUL | Flag.COLLECTIVE)
_ORDERED = int(Flag.RANDOM | Flag.READS_MUTATED) | _EFFECTS
"""What the edges of a graph do not order, and its positions do."""
_NO_NODES: Mapping[fx.Node, Any] = {}


def is_random_state(value: Any) -> bool:
    return piece_of_draw(value) == 0


def is_copy(node: fx.Node) -> bool:
    """Whether a node starts or awaits a copy between device and host."""
    return node.op == "call_function" and describe(node.target).name in (_OFFLOAD, _RELOAD, _WAIT)


def read(
    facts: Facts,
    graph: fx.Graph,
    backward: fx.Graph | None = None,
    *,
    handed: Mapping[fx.Node, fx.Node] = _NO_NODES,
    replays: Mapping[fx.Node, int] = _NO_NODES,
) -> Found:
    """What runs, in a flat graph or in a forward and its backward.

    ``handed``: what the backward takes, to what the forward returns for it. ``replays``: the rows of random operators
    that stand in the halves without their names.
    """
    nodes = list(graph.nodes)
    if backward is not None:  # what the forward returns is held until the end
        nodes = [*nodes[:-1], *backward.nodes, nodes[-1]]
    return _GraphReader(facts, nodes, backward, handed, dict(replays)).read()


@define(eq=False)
class _GraphReader:
    facts: Facts
    nodes: list[fx.Node]
    half: fx.Graph | None
    handed: Mapping[fx.Node, fx.Node]
    replays: dict[fx.Node, int]
    """A call that draws from a kept state, to the row whose first run kept it."""
    found: Found = field(factory=Found)
    position: dict[fx.Node, int] = field(factory=dict)
    rows: array[int] = field(factory=lambda: array("i"))
    """Of the plan; -1 for what it does not have, for copies and for random states."""
    second: bytearray = field(factory=bytearray)
    """Whether a node computes its row once more, for the backward."""
    late: bytearray = field(factory=bytearray)
    """Whether a node is work of the backward."""
    copies: dict[fx.Node, str] = field(factory=dict)
    hosts: dict[fx.Node, fx.Node] = field(factory=dict)
    """What hands a copy on the host out, to what started it."""
    back: dict[fx.Node, fx.Node] = field(factory=dict)
    """What hands a copy that came back out, to the copy on the host as its half has it."""
    in_region: set[int] = field(factory=set)
    latest: int = 0
    drawn: set[int] = field(factory=set)
    """Random operators of the forward."""
    unclaimed: bool = False
    """Whether the forward half has a wrapped random operator that no wrapper of the backward goes back to."""

    def read(self) -> Found:
        found, phases, flags = self.found, self.facts.phases, self.facts.flags
        self.copies = {node: describe(node.target).name for node in self.nodes if is_copy(node)}
        self._pair_copies()
        for at, node in enumerate(self.nodes):
            found.order.append(node.name)
            self.position[node] = at
            self._identify(node)
        for at, node in enumerate(self.nodes):
            self._follow_edges(at, node)
            if self.second[at]:
                self._second_run(node, self.rows[at])
            elif node.op == "call_function" and self.rows[at] >= 0:
                self._first_run(at, node, self.rows[at])
        crossing = sorted(found.crossing)
        found.saved = [row for row in crossing if phases[row] != Phase.INPUT and not flags[row] & _SYMBOLIC]
        found.begins = self.late.find(1) if 1 in self.late else len(self.nodes)
        self._host_copies()
        return found

    def _identify(self, node: fx.Node) -> None:
        phases, in_half, origin = self.facts.phases, node.graph is self.half, self._origin(node)
        if node in self.copies or is_random_state(node):
            row = -1
        elif piece_of_draw(node) == 1:
            row = self._row(node.args[0])
        else:
            row = self._row(node)
            if row < 0 and node.op == "call_function" and (self.half is None or describe(node.target).flags & _EFFECTS):
                self.found.unknown.append(node.name)
        self.found.random_states += function(node) == SAVES_RANDOM_STATE
        if function(node) in RUNS_WITH_RANDOM_STATE and is_random_state(node.args[0]):
            self.replays[node] = self._row(node.args[0].args[0])
        self.unclaimed |= (
            function(node) in (SAVES_RANDOM_STATE, *RUNS_WITH_RANDOM_STATE) and not in_half and node not in self.replays
        )
        is_backward = row >= 0 and self.half is None and phases[row] == Phase.BACKWARD
        again = origin is not None or (in_half and row >= 0 and phases[row] == Phase.FORWARD)
        self.rows.append(row)
        self.second.append(again and node.op == "call_function")
        self.late.append(in_half or origin is not None or is_backward or self._comes_back(node))

    def _origin(self, node: fx.Node) -> str | None:
        """The node that a second run of a flat graph repeats."""
        return marks.custom(node.meta).get(marks.RECOMPUTED) if self.half is None else None

    def _row(self, node: fx.Node) -> int:
        return self.replays.get(node, self.facts.index.get(self._origin(node) or node.name, -1))

    def _follow_edges(self, at: int, node: fx.Node) -> None:
        found, rows, roots = self.found, self.rows, storage_roots(self.facts)
        for source in node.all_input_nodes if node not in self.handed else (self.handed[node],):
            where = self.position[source]
            if where > at:
                found.early.append((node.name, source.name))
            if rows[where] < 0 or self.late[where]:
                continue
            if self.late[at]:
                found.crossing[rows[where]] = at
            else:
                found.held[roots[rows[where]]] = at

    def _first_run(self, at: int, node: fx.Node, row: int) -> None:
        flags = self.facts.flags[row]
        if not self.late[at]:
            self.in_region = set()
            if flags & _RANDOM:
                self.drawn.add(row)
            if flags & _WRITES:
                self.found.written[storage_roots(self.facts)[row]] = at
        # the half that recomputes has an order of its own
        if flags & _ORDERED and self.facts.owners[row] == row and node.graph is not self.half:
            if row < self.latest:
                self.found.swapped[self.facts.names[row]] = self.facts.names[self.latest]
            self.latest = max(self.latest, row)

    def _second_run(self, node: fx.Node, row: int) -> None:
        found, called = self.found, describe(node.target)
        found.recomputed.append(row)
        if row in self.in_region:
            found.twice.append(row)
        self.in_region.add(row)
        draws = self.facts.flags[row] & _RANDOM and (called.flags & _RANDOM or function(node) in RUNS_WITH_RANDOM_STATE)
        has_first_run = self.half is None or self.unclaimed or row in self.drawn
        if draws and has_first_run and self.replays.get(node) != row:
            found.redrawn.append(row)
        targets = nodes_in(argument(node, called.written)) if called.written else ()
        if any(not self.second[self.position[target]] for target in targets):
            found.rewritten.append(row)

    # --- copies between device and host ---------------------------------------------------------------------------

    def _pair_copies(self) -> None:
        """A value is moved where the chain ``offload``, ``wait``, ``reload``, ``wait`` leads from it to who reads it,
        each ``wait`` holding what its copy is made from. Anything else that one of these operators is part of, or that
        reads the copy where it lies on the host, is a race."""
        copies, races = self.copies, self.found.races
        for node, name in copies.items():
            if name != _WAIT:
                if not node.users or any(copies.get(user) != _WAIT for user in node.users):
                    races.append(node.name)
                continue
            start, source = node.args[:2]
            kind = copies.get(start) if isinstance(start, fx.Node) else None
            if kind not in (_OFFLOAD, _RELOAD) or not isinstance(source, fx.Node) or start.args[0] is not source:
                races.append(node.name)
            elif kind == _OFFLOAD:
                self.hosts[node] = start
            else:
                self.back[node] = source
        fetched = {source for node, source in self.back.items() if node.users}
        for place in (*self.hosts, *(place for place, sent in self.handed.items() if sent in self.hosts)):
            wrong = [user.name for user in place.users if user not in copies and user.op != "output"]
            is_sent = any(user.op == "output" for user in place.users)
            races.extend(wrong if wrong or is_sent or place in fetched else [place.name])

    def _comes_back(self, node: fx.Node) -> bool:
        return node in self.back or self.copies.get(node) == _RELOAD

    def _host_copies(self) -> None:
        found, handed = self.found, self.handed
        origin = {node: handed.get(source, source) for node, source in self.back.items()}
        found.unsent.extend(node.name for node, host in origin.items() if host not in self.hosts)
        fetched = {host for node, host in origin.items() if node.users}
        for host, start in self.hosts.items():
            value = start.all_input_nodes[0]
            steps = self.position[start], self.position[host]
            row = self.rows[self.position[value]]
            found.copies.append(HostCopy(row, value.name, host.name, *steps, host in fetched))
