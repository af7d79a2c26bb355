"""Rematerialises a flat graph (forward, loss and backward in one), where no partitioner acts on tags.

:func:`rematerialise` applies a plan in place, in the order of its schedule. Each backward region gets copies of
what it has to recompute; forward nodes that do not run any more go. What is saved across from forward to backward
afterwards is what the plan saves, and nothing but copies is new: no node is rebuilt, other passes' metadata stays.

The technique is that of PyTorch's ``remat_using_tags_for_fwd_loss_bwd_graph`` and TorchTitan's
``selective_activation_remat_pass``, without their limits: random operators are replayed, there may be any number of
backward regions, and memory written in place is understood (:mod:`policylang.graph.memory`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import fx

from policylang.audit.graphs import audit_flat
from policylang.audit.outcome import Audit
from policylang.backends import finalize
from policylang.backends.copies import copy_in, copy_out
from policylang.backends.path import BackendPath
from policylang.backends.refusals import Problem
from policylang.backends.rewriting import first_difference
from policylang.backends.runtime import timed
from policylang.errors import PolicyMatchError
from policylang.graph import marks
from policylang.graph.facts import Facts, Flag, Phase, StepKind
from policylang.graph.memory import GraphMemory, memory_of
from policylang.language.diagnostics import diagnose
from policylang.language.syntax import Policy
from policylang.planning.order.rematerialised import RunNames
from policylang.planning.plan import Plan
from policylang.planning.refusals import UNSAFE
from policylang.planning.value_outcome import recomputes
from policylang.torch_compat import graphs
from policylang.torch_compat.graphs import OpOverload, schema_of
from policylang.torch_compat.tracing import tree_leaves


@frozen
class Drawing:
    """A random operator of the forward whose state is kept."""

    state: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def keep_state(node: fx.Node, drawn: str, kept: str) -> tuple[Drawing, fx.Node]:
    """Make a random operator keep the state it starts from; also return the node that now holds its result. The node
    stays where it is, under its name, and returns ``(state, result)``; two ``getitem`` follow, named ``drawn`` and
    ``kept``, which return the result and the state."""
    save, _ = graphs.random_state_operators()
    graph = node.graph
    target, args, kwargs = node.target, node.args, dict(node.kwargs)
    value = node.meta.get("val")
    tensor = next((leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)), None)
    names_device = kwargs.get("device") is not None or any(isinstance(each, fx.Node) for each in args)
    takes_device = isinstance(target, OpOverload) and any(each.name == "device" for each in schema_of(target).arguments)
    if tensor is not None and takes_device and not names_device:
        kwargs["device"] = tensor.device  # the operators that keep and take a state go by it
    users = list(node.users)
    with graph.inserting_after(node):
        result = graph.create_node("call_function", operator.getitem, (node, 1), name=drawn)
        state = graph.create_node("call_function", operator.getitem, (node, 0), name=kept)
    result.name, state.name = drawn, kept
    for user in users:
        user.replace_input_with(node, result)
    node.target, node.args, node.kwargs = save, (target, *args), kwargs
    result.meta = dict(node.meta)
    state.meta = {key: node.meta[key] for key in ("nn_module_stack", "seq_nr", "custom") if key in node.meta}
    state_value = None if tensor is None else _state_beside(tensor)
    for each, val in ((node, (state_value, value)), (result, value), (state, state_value)):
        each.meta["val"] = val
        each.meta.pop("tensor_meta", None)
        each.meta["custom"] = {**marks.custom(each.meta), marks.RANDOM_STATE: node.name}
    return Drawing(state, target, args, kwargs), result


def _state_beside(tensor: torch.Tensor) -> torch.Tensor | None:
    """A generator's state as a fake tensor; None where the graph carries no fake values."""
    mode = getattr(tensor, "fake_mode", None)
    if mode is None:
        return None
    with mode:
        size = 16 if tensor.device.type == "cuda" else torch.get_rng_state().numel()
        return torch.empty(size, dtype=torch.uint8, device="cpu")


GRAPH_CHANGED = Problem(
    "APL381",
    "the graph changed after it was planned: node {at} was `{planned}` and is `{found}`",
    "plan after the last pass that changes the graph",
)


def _check_recomputations(plan: Plan, nodes: Sequence[fx.Node], memory: GraphMemory) -> None:
    """Raise PolicyMatchError for every copy that would not compute what the forward computed."""
    reasons: dict[int, str] = {}
    for (kind, row, _), anchor in zip(plan.schedule, plan.schedule.next_first_runs(), strict=True):
        if kind == StepKind.SECOND_RUN and row not in reasons:
            reason = _why_not_again(nodes[row], row, plan.facts, memory, anchor)
            if reason is not None:
                reasons[row] = reason
    found = []
    for row, reason in reasons.items():
        rule = plan.rule_of(row)
        who, span = (f"`{rule.text}`", rule.span) if rule is not None else ("the policy", None)
        message = f"{who} cannot recompute `{plan.facts.names[row]}`: {reason}"
        found.append(diagnose(UNSAFE, message, span, help="save it, or make the rule `optional`"))
    if found:
        raise PolicyMatchError(found)


def _why_not_again(node: fx.Node, row: int, facts: Facts, memory: GraphMemory, anchor: int) -> str | None:
    if row in memory.written:
        return "it writes to memory that outlives it, and recomputation would write twice"
    if node.kwargs.get("generator") is not None:
        return "it draws from an explicit generator, whose state is not saved"
    if memory.roots[row] in memory.loose:
        return "it is written to while others read it, so recomputation would give another value"
    if memory.reads_no_bytes[row]:
        return None
    ignored = {node.args[at] for at in memory.statistics.get(row, ())}
    unit = memory.units[row]
    for read, read_node in zip(facts.inputs[row], node.all_input_nodes, strict=True):
        if read_node in ignored or (unit >= 0 and memory.units[read] == unit):
            continue
        writer = memory.written_between(read, row, anchor)
        if writer is not None:
            return f"it reads memory that `{facts.names[writer]}` changes before the backward asks for it"
    return None


def rematerialise(gm: fx.GraphModule, plan: Plan) -> None:
    """Apply ``plan`` to the flat graph it was made for, in place; linear in the graph. Raises ``PolicyMatchError``
    where a value would be recomputed from other bytes than the forward saw, and ``PolicyGraphError`` where the graph is
    not the one that was planned; the graph is then untouched."""
    nodes = list(gm.graph.nodes)
    if (difference := first_difference(nodes, plan.facts)) is not None:
        at, found, planned = difference
        raise GRAPH_CHANGED.error(at=at, planned=planned or "nothing more", found=found or "nothing more")
    memory = memory_of(nodes, plan.facts.phases)
    _check_recomputations(plan, nodes, memory)
    finalize.write(gm.graph, plan)  # before there are copies: a backward node carries no tag
    _Rematerializer(gm, nodes, plan, memory).run()


class _Rematerializer:
    """The only part that touches the graph. Everything it does is in the plan's schedule."""

    def __init__(self, gm: fx.GraphModule, nodes: Sequence[fx.Node], plan: Plan, memory: GraphMemory) -> None:
        self.gm, self.graph, self.nodes = gm, gm.graph, nodes
        self.plan, self.facts, self.schedule = plan, plan.facts, plan.schedule
        self.memory = memory
        self.names = RunNames(self.facts.names)
        self.drawings: dict[int, Drawing] = {}
        self.results: dict[int, fx.Node] = {}
        self.ran: list[fx.Node | None] = []
        """By step of the schedule, the node that runs then; None for a copy to the host or back."""
        self.in_region: dict[fx.Node, int] = {}
        """The nodes of the backward, recomputations among them."""

    def run(self) -> None:
        self._keep_random_states()
        self._recompute()
        runs = frozenset(self.schedule.rows_of(StepKind.FIRST_RUN))
        for row in reversed(self.facts.forward):
            if row not in runs:
                self.graph.erase_node(self.nodes[row])
        values = {row: self._result(row) for row in self.schedule.moved}
        if values:
            hosts = copy_out(self.graph, self.schedule, self.ran, values)
            regions = self.in_region
            dtypes = self.facts.dtypes
            copy_in(self.graph, self.schedule, self.ran, values, dtypes, hosts, lambda node: regions.get(node, 0))
        self._mark_saved()
        graphs.recompile_when_called(self.gm)

    def _keep_random_states(self) -> None:
        facts = self.facts
        for row in sorted(set(self.schedule.rows_of(StepKind.SECOND_RUN))):
            is_piece = facts.owners[row] != row and self.memory.units[row] < 0  # a `getitem` may carry the flag
            if is_piece or not facts.flags[row] & Flag.RANDOM:
                continue
            drawn, kept = (self.names.new(facts.names[row], made) for made in ("result", "state"))
            self.drawings[row], self.results[row] = keep_state(self.nodes[row], drawn, kept)

    def _recompute(self) -> None:
        """Insert each recomputation before the node that it is for, and let the nodes of its region read it."""
        copies: dict[fx.Node, fx.Node] = {}
        current = 0
        for (kind, row, region), anchor in zip(self.schedule, self.schedule.next_first_runs(), strict=True):
            if region != current:
                copies, current = {}, region
            node: fx.Node | None = None
            if kind == StepKind.FIRST_RUN:
                node = self.nodes[row]
                if self.facts.phases[row] == Phase.BACKWARD:
                    for read in node.all_input_nodes:
                        if read in copies:
                            node.replace_input_with(read, copies[read])
                    self.in_region[node] = region
            elif kind == StepKind.SECOND_RUN:
                with self.graph.inserting_before(self.nodes[anchor]):
                    node = self._copy(row, copies, self.nodes[anchor])
                copies[self.nodes[row]] = copies[self._result(row)] = node
                self.in_region[node] = region
            self.ran.append(node)

    def _copy(self, row: int, copies: Mapping[fx.Node, fx.Node], anchor: fx.Node) -> fx.Node:
        node = self.nodes[row]
        drawing = self.drawings.get(row)
        target, args, kwargs = node.target, node.args, node.kwargs
        if drawing:
            target, args, kwargs = graphs.random_state_operators()[1], drawing.args, drawing.kwargs
        if row in self.memory.statistics:
            left_out = self.memory.statistics[row]
            args = tuple(None if at in left_out else value for at, value in enumerate(args))

        def copied(read: fx.Node) -> fx.Node:
            if read in copies:
                return copies[read]
            return self._own_subgraph(read) if read.op == "get_attr" else read

        args, kwargs = fx.map_arg((args, kwargs), copied)
        if drawing:
            args = (drawing.state, drawing.target, *args)
        name = self.names.new(self.facts.names[row], "recomputed")
        copy = self.graph.create_node("call_function", target, args, kwargs, name=name)
        copy.name = name  # torch does not give a name twice, not even that of a node that is gone
        copy.meta = self._meta(node if drawing is None else self.results[row], anchor, row)
        return copy

    def _own_subgraph(self, read: fx.Node) -> fx.Node:
        """A copy of a higher-order operator gets a separate reference to its subgraph: passes that compile a region by
        itself (flex_attention) cannot share one across regions."""
        if not isinstance(getattr(self.gm, str(read.target), None), torch.nn.Module):
            return read
        name = self.names.new(read.name, "recomputed")
        copy = self.graph.create_node("get_attr", read.target, (), {}, name=name)
        copy.name = name
        copy.meta = dict(read.meta)
        return copy

    def _meta(self, node: fx.Node, anchor: fx.Node, row: int) -> dict[str, Any]:
        """The forward node's metadata, as a node of the backward: a backward node carries no tag."""
        meta = {key: value for key, value in node.meta.items() if key not in ("recompute", "ac_graph_id")}
        annotations = dict(marks.custom(meta))
        for key in (marks.SAVED, marks.RANDOM_STATE):
            annotations.pop(key, None)
        if (phase := marks.custom(anchor.meta).get("phase")) is not None:
            annotations["phase"] = phase
        if marks.PHASE in annotations:
            annotations[marks.PHASE] = marks.BACKWARD
        annotations[marks.RECOMPUTED] = self.facts.names[row]
        decision = self.plan.decisions[row]
        if decision is not None:
            annotations[marks.PROVENANCE] = finalize.provenance(self.plan, decision)
        return {**meta, "custom": annotations, "autograd_backward": True}

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


APPLIED_BEFORE = Problem(
    "APL382",
    "a policy was applied to this graph before: `{node}` {verb} `{value}`",
    "trace the step again, and apply one policy; `include` joins two policies",
)
_DONE = {marks.RECOMPUTED: "recomputes", marks.MOVED: "moves"}


class FlatPath(BackendPath):
    name: ClassVar[str] = "flat"

    def check(self, gm: fx.GraphModule, policy: Policy, facts: Facts) -> None:
        """Refuse a graph to which a policy was applied before: nodes that it erased cannot be decided anew."""
        for node, found in ((node, marks.custom(node.meta)) for node in gm.graph.nodes):
            for mark, verb in _DONE.items():
                if mark in found:
                    raise APPLIED_BEFORE.error(node=node.name, verb=verb, value=found[mark])

    def lower(self, gm: fx.GraphModule, plan: Plan, seconds: dict[str, float]) -> None:
        super().lower(gm, plan, seconds)
        with timed(seconds, "rematerialise"):
            rematerialise(gm, plan)

    def audit(self, plan: Plan, graph: fx.Graph) -> Audit:
        return audit_flat(plan, graph)
