"""Recomputation on a flat graph: forward, loss and backward in one, with no partitioner to act on a tag.

:func:`rematerialise` carries a plan out in place, in the order of its schedule. Each backward region gets copies of
what it has to run again; forward nodes that do not run any more go. What is saved across from forward to backward
afterwards is what the plan saves, and nothing but copies is new: no node is rebuilt, other passes' metadata stays.

The technique is that of PyTorch's ``remat_using_tags_for_fwd_loss_bwd_graph`` and TorchTitan's
``selective_activation_remat_pass``, without their limits: random operators are replayed, there may be any number of
backward regions, and memory written in place is understood (:mod:`policylang.graph.reading.memory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from attrs import field, frozen

from policylang.backends.flat import safety
from policylang.backends.surgery import copy_insertion, random_replay, tags
from policylang.graph import marks
from policylang.graph.facts import Facts, Flag, Phase
from policylang.graph.reading.memory import GraphMemory, memory_of
from policylang.graph.schedule import StepKind
from policylang.graph.storage import storage_roots
from policylang.planning.decision import Decision, recomputes
from policylang.planning.plan import Plan
from policylang.torch_compat import partition


@frozen
class Copy:
    """One operator that runs again."""

    origin: str
    name: str
    bytes: int
    flops: int


@frozen
class RegionOutcome:
    """What one backward region runs again."""

    first: str
    """The region's first node."""
    copies: tuple[Copy, ...]

    @property
    def bytes(self) -> int:
        return sum(copy.bytes for copy in self.copies)

    @property
    def flops(self) -> int:
        return sum(copy.flops for copy in self.copies)


@frozen
class Rematerialised:
    """What became of a flat graph. Names are those of its nodes, in graph order."""

    regions: tuple[RegionOutcome, ...]
    """Every backward region, those that run nothing again included."""
    saved: tuple[str, ...]
    """Forward values that the backward, or a recomputation in it, reads."""
    saved_bytes: int
    """Of the memory they live in, each piece once: views share it."""
    erased: tuple[str, ...]
    """Forward nodes that nothing read any more."""
    borrowed: tuple[str, ...]
    """Values decided ``recompute`` that a region reads as they are: a later part of the forward, or the caller, needs
    them anyway."""
    random_states: tuple[str, ...] = field(factory=tuple)
    """The nodes that hold a generator's state for a random operator that runs again."""

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The forward nodes that run again, each once, in the order of their first copy."""
        return tuple(dict.fromkeys(copy.origin for region in self.regions for copy in region.copies))

    @property
    def recomputed_flops(self) -> int:
        return sum(region.flops for region in self.regions)


def rematerialise(gm: fx.GraphModule, plan: Plan) -> Rematerialised:
    """Carry ``plan`` out on the flat graph it was made for, in place; linear in the graph.

    Raises:
        PolicyMatchError: a value would be recomputed from other bytes than the forward saw. The graph is untouched.
        PolicyGraphError: the graph is not the one that was planned.
    """
    nodes = list(gm.graph.nodes)
    safety.check_same_graph(nodes, plan.facts)
    memory = memory_of(nodes, plan.facts.phases)
    safety.check(plan, nodes, memory)
    tags.write(gm.graph, plan)  # before there are copies: a backward node carries no tag
    return _Surgeon(gm, nodes, plan, memory).operate()


class _Surgeon:
    """The only part that touches the graph. Everything it does was worked out before."""

    def __init__(self, gm: fx.GraphModule, nodes: Sequence[fx.Node], plan: Plan, memory: GraphMemory) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.nodes = nodes
        self.plan = plan
        self.facts: Facts = plan.facts
        self.schedule = plan.schedule
        self.memory = memory
        self.drawings: dict[int, random_replay.Drawing] = {}
        self.results: dict[int, fx.Node] = {}
        self.ran: list[fx.Node | None] = []
        """By step of the schedule, the node that runs then; None for a copy to the host or back."""
        self.in_region: dict[fx.Node, int] = {}
        """The nodes of the backward, recomputations among them."""
        self._who: dict[int, str] = {}

    def operate(self) -> Rematerialised:
        facts = self.facts
        self._keep_random_states()
        outcomes = self._run_again()
        runs = frozenset(self.schedule.rows_of(StepKind.FIRST_RUN))
        erased = [self.nodes[row] for row in facts.forward if row not in runs]
        names = tuple(node.name for node in erased)
        for node in reversed(erased):
            self.graph.erase_node(node)
        self._move()
        saved, borrowed = self._mark_saved()
        partition.recompile_when_called(self.gm)
        return Rematerialised(
            regions=outcomes,
            saved=tuple(facts.names[row] for row in saved),
            saved_bytes=stored_bytes(facts, saved),
            erased=names,
            borrowed=tuple(facts.names[row] for row in borrowed),
            random_states=tuple(drawing.state.name for drawing in self.drawings.values()),
        )

    def _keep_random_states(self) -> None:
        again = sorted(set(self.schedule.rows_of(StepKind.SECOND_RUN)))
        for row in (row for row in again if self.facts.flags[row] & Flag.RANDOM and self._draws(row)):
            self.drawings[row], self.results[row] = random_replay.keep_state(self.nodes[row])

    def _draws(self, row: int) -> bool:
        """A ``getitem`` of a random operator may carry its flag."""
        return self.facts.owners[row] == row or self.memory.units[row] >= 0

    def _run_again(self) -> tuple[RegionOutcome, ...]:
        """Insert each second run before the node that it is for, and let the nodes of its region read it."""
        made: dict[int, list[Copy]] = {}
        first: dict[int, str] = {}
        copies: dict[fx.Node, fx.Node] = {}
        current = 0
        for (kind, row, region), anchor in zip(self.schedule, self.schedule.next_first_runs(), strict=True):
            if region != current:
                copies, current = {}, region
            node: fx.Node | None = None
            if kind == StepKind.FIRST_RUN:
                node = self.nodes[row]
                if self.facts.phases[row] == Phase.BACKWARD:
                    self._read_copies(node, copies)
                    self.in_region[node] = region
            elif kind == StepKind.SECOND_RUN:
                with self.graph.inserting_before(self.nodes[anchor]):
                    node = self._copy(row, copies, self.nodes[anchor])
                copies[self.nodes[row]] = copies[self._result(row)] = node
                made.setdefault(region, []).append(self._account(row, node))
                self.in_region[node] = region
            if region:
                first.setdefault(region, self.nodes[anchor].name)
            self.ran.append(node)
        return tuple(RegionOutcome(name, tuple(made.get(region, ()))) for region, name in first.items())

    def _account(self, row: int, copy: fx.Node) -> Copy:
        facts = self.facts
        size = 0 if facts.flags[row] & Flag.VIEW or facts.owners[row] != row else facts.bytes[row]
        return Copy(facts.names[row], copy.name, size, facts.flops[row])

    def _read_copies(self, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> None:
        if any(read in copies for read in node.all_input_nodes):
            node.args = fx.map_arg(node.args, lambda read: copies.get(read, read))
            node.kwargs = fx.map_arg(node.kwargs, lambda read: copies.get(read, read))

    def _copy(self, row: int, copies: Mapping[fx.Node, fx.Node], anchor: fx.Node) -> fx.Node:
        node = self.nodes[row]
        drawing = self.drawings.get(row)
        source_args, source_kwargs = (drawing.args, drawing.kwargs) if drawing else (node.args, node.kwargs)
        if row in self.memory.statistics:
            left_out = self.memory.statistics[row]
            source_args = tuple(None if at in left_out else value for at, value in enumerate(source_args))

        def copied(read: fx.Node) -> fx.Node:
            found = copies.get(read)
            if found is None:
                return self._own_subgraph(read) if read.op == "get_attr" else read
            return found

        target, args, kwargs = node.target, fx.map_arg(source_args, copied), fx.map_arg(source_kwargs, copied)
        if drawing:
            target, args, kwargs = random_replay.repeat(drawing, args, kwargs)
        name = self.facts.names[row]
        copy = self.graph.create_node("call_function", target, args, kwargs, name=f"{name}_recomputed")
        copy.meta = self._meta(node if drawing is None else self.results[row], anchor, row)
        return copy

    def _own_subgraph(self, read: fx.Node) -> fx.Node:
        """A copy of a higher-order operator gets its own reference to its subgraph: passes that compile a region by
        itself (flex_attention) cannot share one across regions."""
        if not isinstance(getattr(self.gm, str(read.target), None), torch.nn.Module):
            return read
        copy = self.graph.create_node("get_attr", read.target, (), {}, name=f"{read.name}_recomputed")
        copy.meta = dict(read.meta)
        return copy

    def _meta(self, node: fx.Node, anchor: fx.Node, row: int) -> dict[str, Any]:
        """The forward node's metadata, as a node of the backward: a backward node carries no tag."""
        meta = dict(node.meta)
        meta.pop("recompute", None)
        meta.pop("ac_graph_id", None)
        annotations = {key: value for key, value in marks.custom(meta).items() if key != marks.SAVED}
        if (phase := marks.custom(anchor.meta).get("phase")) is not None:
            annotations["phase"] = phase
        if marks.PHASE in annotations:
            annotations[marks.PHASE] = marks.BACKWARD
        annotations.pop(marks.RANDOM_STATE, None)
        annotations[marks.RECOMPUTED] = self.facts.names[row]
        decision = self.plan.decisions[row]
        if decision is not None:
            annotations[marks.PROVENANCE] = self._provenance(decision)
        meta["custom"] = annotations
        meta["autograd_backward"] = True
        return meta

    def _provenance(self, decision: Decision) -> str:
        """Decisions are shared objects, and where a rule stands in its file takes a search."""
        who = self._who.get(id(decision))
        if who is None:
            who = self._who[id(decision)] = tags.provenance(self.plan, decision)
        return who

    def _move(self) -> None:
        """Send what is offloaded to the host, and let the backward fetch it."""
        values = {row: self._result(row) for row in self.schedule.rows_of(StepKind.COPY_TO_HOST)}
        if values:
            graph, schedule = self.graph, self.schedule
            hosts = copy_insertion.copy_out(graph, schedule, self.ran, values)
            copy_insertion.copy_in(graph, schedule, self.ran, values, hosts, lambda node: self.in_region.get(node, 0))

    def _result(self, row: int) -> fx.Node:
        return self.results.get(row, self.nodes[row])

    def _mark_saved(self) -> tuple[list[int], list[int]]:
        """The forward rows that nothing but the backward keeps alive now, whose nodes are marked; and those decided
        ``recompute`` that it reads as they are. In graph order."""
        facts = self.facts
        rows = {self.nodes[row]: row for row in facts.forward}
        rows.update((result, row) for row, result in self.results.items())
        read = {rows[read] for node in self.in_region for read in node.all_input_nodes if read in rows}
        borrowed = {row for row in read if recomputes(self.plan.decisions[row])}
        saved = sorted(read - borrowed)
        for row in saved:
            for marked in (row, facts.owners[row]):
                meta = self._result(marked).meta
                meta["custom"] = {**marks.custom(meta), marks.SAVED: True}
        return saved, sorted(borrowed)


def stored_bytes(facts: Facts, rows: Sequence[int]) -> int:
    """Bytes of the memory that some rows live in, each piece once; memory from outside the graph is not counted."""
    roots = storage_roots(facts)
    distinct = {roots[row] for row in rows}
    return sum(facts.bytes[root] for root in distinct if facts.ops[root] == "call_function")
