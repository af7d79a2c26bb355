"""Finalizes a plan on the graph that is about to be split: equal nodes merged, min-cut's choices filled in.

A plan is made on the user's graph. Before the graph is split, equal nodes are merged and, with ``undecided -> auto``,
PyTorch's min-cut decides the values no rule touched. This module carries both into a plan of the same shape, from
which :func:`policylang.planning.liveness.backward_needs` reads what is saved and what is recomputed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from attrs import evolve
from torch import fx
from torch.utils import _pytree as pytree

from policylang.backends.joint.cse import Merged
from policylang.backends.surgery.tags import is_unsafe
from policylang.graph.facts import Facts, Flag, InputKind, Phase, read_by_backward, storage_roots, users_of
from policylang.language.syntax import Action
from policylang.planning.decisions.offloading import offload_diagnostics, resolve_offloads
from policylang.planning.liveness import backward_needs
from policylang.planning.plan import Plan
from policylang.planning.value_decision import Decision, Why, offloads

_AUTO_SAVE = Decision(Action.SAVE, None, Why.UNDECIDED, "PyTorch's min-cut saves it")
_AUTO_RECOMPUTE = Decision(Action.RECOMPUTE, None, Why.UNDECIDED, "PyTorch's min-cut recomputes it")
_SIZE = Decision(Action.SAVE, None, Why.ALWAYS, "symbolic size")
_FEEDS_BACKWARD = int(Flag.FEEDS_BACKWARD)
_GRADIENT = int(Flag.GRADIENT)
_EFFECTS = Flag.RANDOM | Flag.WRITES | Flag.EFFECTFUL


def merge(plan: Plan, merged: Merged) -> Plan:
    """The plan with dropped rows replaced by the rows that stand for them; dropped rows read nothing any more."""
    kept_for = merged.kept_for
    if not kept_for:
        return plan
    facts = plan.facts
    inputs, owners, decisions = list(facts.inputs), list(facts.owners), list(plan.decisions)
    for row, sources in enumerate(inputs):
        if row in kept_for:
            inputs[row] = ()
        elif any(source in kept_for for source in sources):
            inputs[row] = tuple(dict.fromkeys(kept_for.get(source, source) for source in sources))
        owners[row] = kept_for.get(owners[row], owners[row])
    for row, decision in merged.decisions.items():
        decisions[owners[row]] = decision
    for row, owner in enumerate(owners):
        if owner != row and decisions[row] is not None:
            decisions[row] = decisions[owner]
    return evolve(plan, facts=evolve(facts, inputs=inputs, owners=owners), decisions=decisions)


def fit(plan: Plan, gradients: Collection[int], chosen: Collection[int] | None = None) -> Plan:
    """The plan with everything decided that is not the policy's to decide.

    ``gradients`` are the rows that the backward returns. ``chosen`` are the rows that min-cut would save: an undecided
    value is saved if it is among them and recomputed if not, and a value that was traced in the backward but needs
    nothing of it is moved to the forward and saved where min-cut says so, unless it looks into memory that is
    offloaded: the backward makes such a view of what came back. Symbolic sizes that the backward takes of a
    forward tensor are taken in the forward, so that the tensor need not be kept for them. Backward nodes that lead to
    nothing read nothing. What a moved or a dead node read no longer feeds the backward for its sake.
    """
    facts = plan.facts
    phases, inputs, flags, decisions = list(facts.phases), list(facts.inputs), list(facts.flags), list(plan.decisions)
    for row in gradients:
        flags[row] |= _GRADIENT
    if chosen is not None:
        wanted = frozenset(chosen)
        for row in facts.forward:
            decision = decisions[row]
            if decision is not None and decision.action is None:
                decisions[row] = _AUTO_SAVE if row in wanted or is_unsafe(facts, row) else _AUTO_RECOMPUTE
        leaving = _offloaded_memory(plan)
        for row in wanted:
            if phases[row] == Phase.BACKWARD and not (leaving and storage_roots(facts)[row] in leaving):
                phases[row], decisions[row] = Phase.FORWARD, _AUTO_SAVE
    for row in _sizes_of_forward_values(facts):
        phases[row], decisions[row] = Phase.FORWARD, _SIZE
    live = set(gradients)
    for row in range(len(facts) - 1, -1, -1):
        if phases[row] != Phase.BACKWARD:
            continue
        if row not in live and not flags[row] & _EFFECTS:
            inputs[row] = ()
        live.update(inputs[row])
    flags = [flag & ~_FEEDS_BACKWARD for flag in flags]
    for row in read_by_backward(phases, inputs, facts.owners):
        flags[row] |= _FEEDS_BACKWARD
    return evolve(plan, facts=evolve(facts, phases=phases, inputs=inputs, flags=flags), decisions=decisions)


def resolve_offloads_again(plan: Plan) -> Plan:
    """The plan with its offloads decided once more: merged nodes share memory, and so does what min-cut saves.

    What stays on the device after all is in the diagnostics.
    """
    if not any(map(offloads, plan.decisions)):
        return plan
    policy, decisions = plan.policy, list(plan.decisions)
    facts = evolve(plan.facts, users=users_of(plan.facts.inputs))  # what was merged has other readers by now
    stays = resolve_offloads(policy, facts, decisions, backward_needs(facts, decisions))
    notes = offload_diagnostics(policy, facts, decisions, backward_needs(facts, decisions), stays)
    return evolve(plan, decisions=decisions, diagnostics=(*plan.diagnostics, *notes))


def _offloaded_memory(plan: Plan) -> frozenset[int]:
    """The rows whose memory leaves the device, as far as decisions go."""
    return frozenset(storage_roots(plan.facts)[row] for row, by in enumerate(plan.decisions) if offloads(by))


def _sizes_of_forward_values(facts: Facts) -> list[int]:
    """Backward rows that are a symbolic size of a tensor of the forward."""
    from_tangent = bytearray(len(facts))
    found: list[int] = []
    for row, phase in enumerate(facts.phases):
        if phase == Phase.INPUT:
            from_tangent[row] = facts.input_kinds[row] == InputKind.TANGENT
        elif phase == Phase.BACKWARD:
            sources = facts.inputs[row]
            from_tangent[row] = any(from_tangent[source] for source in sources)
            is_size = facts.flags[row] & Flag.SYMBOLIC and not from_tangent[row]
            if is_size and any(not facts.flags[source] & Flag.SYMBOLIC for source in sources):
                found.append(row)
    return found


def gradient_rows(graph: fx.Graph, facts: Facts, num_fwd_outputs: int) -> list[int]:
    """The rows that the backward returns."""
    gradients = returned(graph)[num_fwd_outputs:]
    return [facts.index[value.name] for value in gradients if isinstance(value, fx.Node)]


def returned(graph: fx.Graph) -> list[Any]:
    """What a graph returns, flat, in order."""
    output = graph.output_node()
    leaves: list[Any] = pytree.tree_leaves(output.args[0], is_leaf=lambda value: value is None)
    return leaves
