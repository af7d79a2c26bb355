"""Rematerialises a flat graph (forward, loss and backward in one), where no partitioner acts on tags.

:func:`rematerialise` carries a plan out in place, in the order of its schedule. Each backward region gets copies of
what it has to run again; forward nodes that do not run any more go. What is saved across from forward to backward
afterwards is what the plan saves, and nothing but copies is new: no node is rebuilt, other passes' metadata stays.

The technique is that of PyTorch's ``remat_using_tags_for_fwd_loss_bwd_graph`` and TorchTitan's
``selective_activation_remat_pass``, without their limits: random operators are replayed, there may be any number of
backward regions, and memory written in place is understood (:mod:`policylang.graph.memory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from policylang.backends.flat import safety
from policylang.backends.surgery import copy_insertion, random_replay, tags
from policylang.graph import marks
from policylang.graph.facts import Facts, Flag, Phase
from policylang.graph.memory import GraphMemory, memory_of
from policylang.graph.schedule import StepKind
from policylang.planning.order.run_names import RunNames
from policylang.planning.plan import Plan
from policylang.planning.value_decision import recomputes
from policylang.torch_compat import partition


def rematerialise(gm: fx.GraphModule, plan: Plan) -> None:
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
    _Rematerializer(gm, nodes, plan, memory).run()


class _Rematerializer:
    """The only part that touches the graph. Everything it does is in the plan's schedule."""

    def __init__(self, gm: fx.GraphModule, nodes: Sequence[fx.Node], plan: Plan, memory: GraphMemory) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.nodes = nodes
        self.plan = plan
        self.facts: Facts = plan.facts
        self.schedule = plan.schedule
        self.memory = memory
        self.names = RunNames(self.facts.names)
        self.drawings: dict[int, random_replay.Drawing] = {}
        self.results: dict[int, fx.Node] = {}
        self.ran: list[fx.Node | None] = []
        """By step of the schedule, the node that runs then; None for a copy to the host or back."""
        self.in_region: dict[fx.Node, int] = {}
        """The nodes of the backward, recomputations among them."""

    def run(self) -> None:
        self._keep_random_states()
        self._run_again()
        runs = frozenset(self.schedule.rows_of(StepKind.FIRST_RUN))
        for row in reversed(self.facts.forward):
            if row not in runs:
                self.graph.erase_node(self.nodes[row])
        self._move()
        self._mark_saved()
        partition.recompile_when_called(self.gm)

    def _keep_random_states(self) -> None:
        again = sorted(set(self.schedule.rows_of(StepKind.SECOND_RUN)))
        for row in (row for row in again if self.facts.flags[row] & Flag.RANDOM and self._draws(row)):
            name = self.facts.names[row]
            names = self.names.drawn(name), self.names.state(name)
            self.drawings[row], self.results[row] = random_replay.keep_state(self.nodes[row], *names)

    def _draws(self, row: int) -> bool:
        """A ``getitem`` of a random operator may carry its flag."""
        return self.facts.owners[row] == row or self.memory.units[row] >= 0

    def _run_again(self) -> None:
        """Insert each second run before the node that it is for, and let the nodes of its region read it."""
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
                self.in_region[node] = region
            self.ran.append(node)

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
        name = self.names.second_run(self.facts.names[row])
        copy = self.graph.create_node("call_function", target, args, kwargs, name=name)
        copy.name = name  # torch does not give a name twice, not even that of a node that is gone
        copy.meta = self._meta(node if drawing is None else self.results[row], anchor, row)
        return copy

    def _own_subgraph(self, read: fx.Node) -> fx.Node:
        """A copy of a higher-order operator gets its own reference to its subgraph: passes that compile a region by
        itself (flex_attention) cannot share one across regions."""
        if not isinstance(getattr(self.gm, str(read.target), None), torch.nn.Module):
            return read
        name = self.names.second_run(read.name)
        copy = self.graph.create_node("get_attr", read.target, (), {}, name=name)
        copy.name = name
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
            annotations[marks.PROVENANCE] = tags.provenance(self.plan, decision)
        meta["custom"] = annotations
        meta["autograd_backward"] = True
        return meta

    def _move(self) -> None:
        """Send what is offloaded to the host, and let the backward fetch it."""
        values = {row: self._result(row) for row in self.schedule.rows_of(StepKind.COPY_TO_HOST)}
        if values:
            graph, schedule = self.graph, self.schedule
            hosts = copy_insertion.copy_out(graph, schedule, self.ran, values)
            copy_insertion.copy_in(graph, schedule, self.ran, values, hosts, lambda node: self.in_region.get(node, 0))

    def _result(self, row: int) -> fx.Node:
        return self.results.get(row, self.nodes[row])

    def _mark_saved(self) -> None:
        """Mark the forward values that nothing but the backward keeps alive now. One decided ``recompute`` that the
        backward reads as it is lives on anyway, for a later part of the forward or for the caller."""
        facts = self.facts
        rows = {self.nodes[row]: row for row in facts.forward}
        rows.update((result, row) for row, result in self.results.items())
        read = {rows[read] for node in self.in_region for read in node.all_input_nodes if read in rows}
        for row in sorted(row for row in read if not recomputes(self.plan.decisions[row])):
            for marked in (row, facts.owners[row]):
                meta = self._result(marked).meta
                meta["custom"] = {**marks.custom(meta), marks.SAVED: True}
