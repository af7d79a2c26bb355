"""Recomputation on a flat graph: forward, loss and backward in one, with no partitioner to act on a tag.

:func:`rematerialise` carries a plan out in place. Each backward region gets its own copies of what it has to run again,
each as late as it can be; forward nodes that nothing reads any more go. What is saved across from forward to backward
afterwards is what the plan saves, and nothing but copies is new: no node is rebuilt, other passes' metadata stays.

The technique is that of PyTorch's ``remat_using_tags_for_fwd_loss_bwd_graph`` and TorchTitan's
``selective_activation_remat_pass``, without their limits: random operators are replayed, there may be any number of
backward regions, and memory written in place is understood (:mod:`policylang.graph.reading.memory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.fx as fx
from attrs import field, frozen

from policylang.backends.flat import safety
from policylang.backends.flat.remat_schedule import Region, Schedule, schedule
from policylang.backends.surgery import copy_insertion, order, random_replay, tags
from policylang.graph import marks
from policylang.graph.facts import Facts, Flag
from policylang.graph.reading.memory import Memory, memory_of
from policylang.planning.liveness import backward_needs
from policylang.planning.plan import Decision, Plan
from policylang.planning.storage import storage_roots
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
    facts = plan.facts
    nodes = list(gm.graph.nodes)
    safety.check_same_graph(nodes, facts)
    recompute = _decided_recompute(plan)
    memory = memory_of(nodes, facts.phases)
    planned = schedule(facts, recompute, memory)
    safety.check(plan, nodes, memory, planned)
    tags.write(gm.graph, plan)  # before there are copies: a backward node carries no tag
    return _Surgeon(gm, nodes, plan, memory, planned).operate(recompute)


def _decided_recompute(plan: Plan) -> bytearray:
    recompute = bytearray(len(plan.facts))
    for row, decision in enumerate(plan.decisions):
        if decision is not None and decision.action is not None and decision.action.recomputes:
            recompute[row] = True
    return recompute


class _Surgeon:
    """The only part that touches the graph. Everything it does was worked out before."""

    def __init__(
        self, gm: fx.GraphModule, nodes: Sequence[fx.Node], plan: Plan, memory: Memory, planned: Schedule
    ) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.nodes = nodes
        self.plan = plan
        self.facts: Facts = plan.facts
        self.memory = memory
        self.planned = planned
        self.drawings: dict[int, random_replay.Drawing] = {}
        self.results: dict[int, fx.Node] = {}
        self.copied: list[fx.Node] = []
        self._who: dict[int, str] = {}

    def operate(self, recompute: bytearray) -> Rematerialised:
        facts, planned = self.facts, self.planned
        self._keep_random_states()
        outcomes = tuple(self._fill(region) for region in planned.regions)
        order.raise_pieces(self.copied)
        erased = [self.nodes[row] for row in planned.erased]
        names = tuple(node.name for node in reversed(erased))
        for node in erased:
            self.graph.erase_node(node)
        self._move()
        saved = self._mark_saved()
        partition.recompile_when_called(self.gm)
        return Rematerialised(
            regions=outcomes,
            saved=tuple(facts.names[row] for row in saved),
            saved_bytes=stored_bytes(facts, saved),
            erased=names,
            borrowed=tuple(facts.names[row] for row in sorted(planned.borrowed)),
            random_states=tuple(drawing.state.name for drawing in self.drawings.values()),
        )

    def _keep_random_states(self) -> None:
        again = {row for region in self.planned.regions for row in region.recomputed}
        for row in sorted(row for row in again if self.facts.flags[row] & Flag.RANDOM and self._draws(row)):
            self.drawings[row], self.results[row] = random_replay.keep_state(self.nodes[row])

    def _draws(self, row: int) -> bool:
        """A ``getitem`` of a random operator may carry its flag."""
        return self.facts.owners[row] == row or self.memory.units[row] >= 0

    def _fill(self, region: Region) -> RegionOutcome:
        """Insert the copies of one region and let its nodes read them."""
        copies: dict[fx.Node, fx.Node] = {}
        made: list[Copy] = []
        for batch in region.batches:
            anchor = self.nodes[batch.anchor]
            with self.graph.inserting_before(anchor):
                for row in batch.rows:
                    copy = self._copy(row, copies, anchor)
                    copies[self.nodes[row]] = copy
                    if row in self.results:
                        copies[self.results[row]] = copy
                    made.append(self._account(row, copy))
        if copies:
            self._redirect(region, copies)
        return RegionOutcome(self.nodes[region.rows[0]].name, tuple(made))

    def _account(self, row: int, copy: fx.Node) -> Copy:
        facts = self.facts
        size = 0 if facts.flags[row] & Flag.VIEW or facts.owners[row] != row else facts.bytes[row]
        return Copy(facts.names[row], copy.name, size, facts.flops[row])

    def _redirect(self, region: Region, copies: Mapping[fx.Node, fx.Node]) -> None:
        nodes = self.nodes

        def copied(node: fx.Node) -> fx.Node:
            return copies.get(node, node)

        for row in region.rows:
            node = nodes[row]
            if any(read in copies for read in node.all_input_nodes):
                node.args = fx.map_arg(node.args, copied)
                node.kwargs = fx.map_arg(node.kwargs, copied)

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
        self.copied.append(copy)
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
        roots, erased = storage_roots(self.facts), frozenset(self.planned.erased)
        moved = {roots[row]: self._result(row) for row in backward_needs(self.facts, self.plan.decisions).offloaded}
        if moved:
            rows = (row for row in self.facts.forward if roots[row] in moved and row not in erased)
            held = {self._result(row): moved[roots[row]] for row in rows}
            regions = (self.nodes[row] for region in self.planned.regions for row in region.rows)
            copy_insertion.move(self.graph, held, {*regions, *self.copied})

    def _result(self, row: int) -> fx.Node:
        return self.results.get(row, self.nodes[row])

    def _mark_saved(self) -> list[int]:
        """The forward rows that nothing but the backward keeps alive now, in graph order; their nodes are marked."""
        facts, borrowed = self.facts, self.planned.borrowed
        rows = {self.nodes[row]: row for row in facts.forward}
        rows.update((result, row) for row, result in self.results.items())
        saved: set[int] = set()
        backward = (self.nodes[row] for region in self.planned.regions for row in region.rows)
        for node in chain(backward, self.copied):
            for read in node.all_input_nodes:
                row = rows.get(read)
                if row is not None and row not in borrowed:
                    saved.add(row)
        ordered = sorted(saved)
        for row in ordered:
            for marked in (row, facts.owners[row]):
                meta = self.results.get(marked, self.nodes[marked]).meta
                meta["custom"] = {**marks.custom(meta), marks.SAVED: True}
        return ordered


def stored_bytes(facts: Facts, rows: Sequence[int]) -> int:
    """Bytes of the memory that some rows live in, each piece once; memory from outside the graph is not counted."""
    roots = storage_roots(facts)
    distinct = {roots[row] for row in rows}
    return sum(facts.bytes[root] for root in distinct if facts.ops[root] == "call_function")
