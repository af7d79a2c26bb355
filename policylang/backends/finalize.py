"""Writes decisions onto nodes, and finalizes a plan on the graph that is about to be split.

The ``recompute`` tag, which PyTorch's partitioners read, and who decided are on forward nodes only. Tagging again with
the same plan changes nothing; tagging with another one first takes off what policylang wrote before, and gives back the
user's own tags that an ``override`` rule had replaced.

A plan is made on the user's graph. Before the graph is split, equal nodes are merged and, with ``undecided -> auto``,
PyTorch's min-cut decides the values no rule touched. Both are made into a plan of the same shape, from which
:func:`policylang.planning.liveness.backward_needs` reads what is saved and what is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from attrs import evolve, frozen
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from policylang.backends import refusals
from policylang.backends.path import BackendPath
from policylang.backends.runtime import timed
from policylang.graph import marks
from policylang.graph.facts import Facts, Flag, InputKind, Phase, read_by_backward, users_of
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.syntax import Action
from policylang.planning.decisions.offloading import offload_diagnostics, resolve_offloads
from policylang.planning.liveness import backward_needs
from policylang.planning.plan import Plan
from policylang.planning.value_outcome import Decision, Why, is_open, moves
from policylang.torch_compat import eager

_RECOMPUTE = "recompute"
_REGION = "ac_graph_id"

_UNSAFE = Flag.WRITES | Flag.EFFECTFUL | Flag.READS_MUTATED


def write(graph: fx.Graph, plan: Plan) -> None:
    """Tag the nodes of ``graph`` with what ``plan`` decided, and untag every other node. Values that the user's
    ``checkpoint`` decided keep their tag, except those that torch's border rule saves."""
    index, decisions = plan.facts.index, plan.decisions
    for node in graph.nodes:
        remove(node)
        row = index.get(node.name)
        decision = None if row is None else decisions[row]
        if decision is None or (decision.why is Why.UNDECIDED and decision.action is None):
            continue
        if decision.why is Why.USER:
            assert decision.action is not None
            node.meta[_RECOMPUTE] = CheckpointPolicy[decision.action.tag]
        else:
            _tag(node, decision, provenance(plan, decision))


@contextmanager
def lent_to_min_cut(graph: fx.Graph, plan: Plan) -> Iterator[None]:
    """Within, every value that may not be recomputed is tagged ``MUST_SAVE``, the one tag that min-cut obeys, offloaded
    values included: they are copied back, so min-cut need not save what is made of them. The collectives of the
    backward are tagged to stay there: min-cut would move those that need no gradient into the forward and save what
    they gather. All these tags are removed after: no rule asked for them."""
    before = {node: node.meta[_RECOMPUTE] for node in graph.nodes if _RECOMPUTE in node.meta}
    facts = plan.facts
    communicated = _communicated_in_backward(facts)
    for node in graph.nodes:
        row = facts.index.get(node.name)
        decision = None if row is None else plan.decisions[row]
        if row in communicated:
            node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
        if row is None or decision is None:
            continue
        if is_unsafe(facts, row) if is_open(decision) else decision.outcome.is_held:
            node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        for node in graph.nodes:
            if node in before:
                node.meta[_RECOMPUTE] = before[node]
            else:
                node.meta.pop(_RECOMPUTE, None)


def _communicated_in_backward(facts: Facts) -> set[int]:
    """The collectives of the backward and what it computes to hand them."""
    found: set[int] = set()
    for row in range(len(facts) - 1, -1, -1):
        if facts.phases[row] != Phase.BACKWARD or facts.flags[row] & Flag.EFFECTFUL:
            continue
        if facts.flags[facts.owners[row]] & Flag.COLLECTIVE or any(user in found for user in facts.users[row]):
            found.add(row)
    return found


def is_unsafe(facts: Facts, row: int) -> bool:
    """True if recomputation would get a value wrong on this path; random numbers it can replay."""
    return bool((facts.flags[row] | facts.flags[facts.owners[row]]) & _UNSAFE)


def provenance(plan: Plan, decision: Decision) -> str:
    """Who decided, as written on the node: ``file:line`` of the rule, or of the ``undecided`` line."""
    if decision.rule is not None:
        return plan.policy.rules[decision.rule].source
    if decision.why is Why.UNDECIDED and plan.policy.undecided is not None:
        return plan.policy.undecided.span.location
    return decision.why.value


def remove(node: fx.Node) -> None:
    """Take policylang's tag off a node; a user's tag that it replaced comes back."""
    meta = node.meta
    if not marks.is_ours(meta):
        return
    annotations = dict(meta["custom"])
    tag, region = marks.user_tag(meta)
    for key in (marks.PROVENANCE, marks.USER_TAG):
        annotations.pop(key, None)
    _set_custom(meta, annotations)
    meta.pop(_RECOMPUTE, None)
    meta.pop(_REGION, None)
    if tag is not None:
        meta[_RECOMPUTE] = CheckpointPolicy[tag]
    if region is not None:
        meta[_REGION] = region


def mark_saved(graph: fx.Graph, saved: Mapping[str, bool | str]) -> None:
    """Leave ``custom["policylang_saved"]`` on the named nodes and no others, for ``where recorded saved``."""
    for node in graph.nodes:
        if node.name in saved:
            node.meta["custom"] = {**marks.custom(node.meta), marks.SAVED: saved[node.name]}
        elif marks.SAVED in marks.custom(node.meta):
            _set_custom(node.meta, {key: value for key, value in node.meta["custom"].items() if key != marks.SAVED})


def _tag(node: fx.Node, decision: Decision, who: str) -> None:
    """Write a rule's decision. ``leave`` writes no tag, and takes the user's off where it overrides one."""
    meta = node.meta
    if decision.action is None and _RECOMPUTE not in meta:
        return
    annotations = {**marks.custom(meta), marks.PROVENANCE: who}
    if _RECOMPUTE in meta:
        annotations[marks.USER_TAG] = list(marks.user_tag(meta))
    meta["custom"] = annotations
    if decision.action is None:
        del meta[_RECOMPUTE]
    else:
        meta[_RECOMPUTE] = CheckpointPolicy[decision.action.tag]
        meta[_REGION] = marks.AC_GRAPH_ID


def _set_custom(meta: dict[str, Any], annotations: dict[str, Any]) -> None:
    if annotations:
        meta["custom"] = annotations
    else:
        meta.pop("custom", None)


NOT_BY_MIN_CUT = "APL330"


class HookPath(BackendPath):
    name: ClassVar[str] = "hook"
    compares_ranks: ClassVar[bool] = False

    def refusals(self, plan: Plan) -> Sequence[Diagnostic]:
        return (*refusals.unsaveable(plan), *_beyond_min_cut(plan))

    def lower(self, gm: fx.GraphModule, plan: Plan, seconds: dict[str, float]) -> None:
        with timed(seconds, "tag"):
            write(gm.graph, plan)


def _beyond_min_cut(plan: Plan) -> Iterator[Diagnostic]:
    """The lines that min-cut would pass over in silence."""
    for rule in plan.policy.rules:
        if rule.action is Action.PREFER_SAVE:
            message = f"`{rule.text}` would do nothing behind a hook of Inductor's: min-cut knows no `prefer_save`"
            help = "write `save`, or compile with `policylang.backend`, which partitions itself"
            yield diagnose(NOT_BY_MIN_CUT, message, rule.span, help=help)
    for expectation, planned in zip(plan.policy.expectations, plan.expectations, strict=True):
        if planned.status == "deferred":
            message = f"`{planned.text}` cannot be checked behind a hook of Inductor's: min-cut decides after it"
            help = "write `undecided -> save` or `undecided -> recompute`, or compile with `policylang.backend`"
            yield diagnose(NOT_BY_MIN_CUT, message, expectation.span, help=help)


_NEVER_EQUAL = Flag.RANDOM | Flag.WRITES | Flag.EFFECTFUL
_NOT_BY_VALUE = ("aten.empty", "aten.new_empty", "higher_order.")


@frozen
class Merged:
    """The result of eliminating common subexpressions, by node of the plan."""

    kept_for: Mapping[int, int]
    """Dropped node to the node that replaces it."""
    decisions: Mapping[int, Decision]
    """Kept node to its decision, if it takes the decision of a dropped node."""


NOTHING_MERGED = Merged({}, {})


def eliminate(graph: fx.Graph, plan: Plan) -> Merged:
    """Merge equal nodes of the joint graph that ``plan`` was made on. Random, mutating, effectful and higher-order
    operators, uninitialised memory, results with a new symbolic size, values that share memory with an output, and
    nodes with a write between are not merged."""
    facts, index, owners = plan.facts, plan.facts.index, plan.facts.owners
    values = (node.meta.get("val") for node in graph.output_node().all_input_nodes)
    returned = {eager.storage_address(value) for value in values if isinstance(value, torch.Tensor)} - {None}
    used = _used_by_backward(plan)
    seen: dict[Hashable, fx.Node] = {}
    kept_for: dict[int, int] = {}
    strongest: dict[int, Decision] = {}
    writes = 0
    for node in graph.nodes:
        row = index.get(node.name)
        if row is None or node.op != "call_function":
            continue
        if facts.flags[row] & (Flag.WRITES | Flag.EFFECTFUL):
            writes += 1
        if not _may_merge(node, row, facts, returned):
            continue
        try:
            expression = (node.target, _frozen(node.args), _frozen(node.kwargs))
        except TypeError:  # an argument has no stable identity
            continue
        phase = facts.phases[row]
        twin = seen.get((Phase.FORWARD, writes, expression)) if phase == Phase.BACKWARD else None
        decision = None if twin is None else strongest.get(index[twin.name], plan.decisions[index[twin.name]])
        if twin is None or (decision is not None and decision.action is not None):
            twin = seen.setdefault((phase, writes, expression), node)
        if twin is node:
            continue
        kept = kept_for[row] = index[twin.name]
        theirs, ours = plan.decisions[row], strongest.get(kept, plan.decisions[kept])
        is_used = kept in strongest or owners[kept] in used
        if theirs is not None and _strength(theirs, owners[row] in used) > _strength(ours, is_used):
            strongest[kept] = theirs
        node.replace_all_uses_with(twin)
    for node in reversed(graph.nodes):
        if index.get(node.name) in kept_for:
            graph.erase_node(node)
    return Merged(kept_for, strongest)


def _used_by_backward(plan: Plan) -> frozenset[int]:
    """The producers of the nodes that the plan may need for the backward so far, whole or in pieces."""
    return frozenset(plan.facts.owners[row] for row in backward_needs(plan.facts, plan.decisions).all)


def _strength(decision: Decision | None, is_used: bool) -> int:
    if decision is None or not is_used:
        return 0
    return 1 if is_open(decision) else 3 if decision.outcome.is_held else 2


def _may_merge(node: fx.Node, row: int, facts: Facts, returned: Collection[int | None]) -> bool:
    if facts.flags[row] & _NEVER_EQUAL or facts.targets[row].startswith(_NOT_BY_VALUE):
        return False
    if node.meta.get("unbacked_bindings"):
        return False  # a size of its own, by which the shapes of its readers are known
    value = node.meta.get("val")  # two results that were separate tensors stay so
    return not isinstance(value, torch.Tensor) or eager.storage_address(value) not in returned


def _frozen(argument: Any) -> Hashable:
    """An argument as a key: with its type, since ``1 == 1.0 == True``, floats by their text, since ``0.0 == -0.0``."""
    convert = _CONVERSIONS.get(type(argument))
    if convert is not None:
        return convert(argument)
    if isinstance(argument, tuple | list):
        return (list, *map(_frozen, argument))
    if isinstance(argument, dict):
        return (dict, *((key, _frozen(value)) for key, value in argument.items()))
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool | torch.Tensor):
        raise TypeError("compared by value, not by identity")
    hash(argument)
    return (type(argument), argument)


_CONVERSIONS: dict[type, Callable[[Any], Hashable]] = {
    fx.Node: lambda node: node,
    float: lambda number: (float, repr(number)),
    complex: lambda number: (complex, repr(number)),
    slice: lambda part: (slice, _frozen(part.start), _frozen(part.stop), _frozen(part.step)),
}


_AUTO_SAVE = Decision(Action.SAVE, None, Why.UNDECIDED, "PyTorch's min-cut saves it")
_AUTO_RECOMPUTE = Decision(Action.RECOMPUTE, None, Why.UNDECIDED, "PyTorch's min-cut recomputes it")
_SIZE = Decision(Action.SAVE, None, Why.ALWAYS, "symbolic size")
_FEEDS_BACKWARD = int(Flag.FEEDS_BACKWARD)
_GRADIENT = int(Flag.GRADIENT)
_EFFECTS = Flag.RANDOM | Flag.WRITES | Flag.EFFECTFUL


def merge(plan: Plan, merged: Merged) -> Plan:
    """The plan with dropped nodes replaced; they read nothing any more."""
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
    changed = {owners[row]: decision for row, decision in merged.decisions.items()}
    for row, owner in enumerate(owners):
        if owner in changed and (row == owner or decisions[row] is not None):  # pieces of others keep their own
            decisions[row] = changed[owner]
    return evolve(plan, facts=evolve(facts, inputs=inputs, owners=owners), decisions=decisions)


def fit(plan: Plan, gradients: Collection[int], chosen: Collection[int] | None = None) -> Plan:
    """The plan with everything decided that the policy leaves open. ``gradients`` are the nodes that the backward
    returns, ``chosen`` those that min-cut would save: an undecided value is saved if it is among them and recomputed if
    not, and one traced in the backward that does not depend on it moves to the forward if min-cut saves it, unless it
    is a view of offloaded memory, with all that only moved nodes read. Symbolic sizes of forward tensors that the
    backward needs are computed in the forward, so that the tensors need not be kept for them. Dead backward nodes read
    nothing, and the inputs of a moved or dead node no longer feed the backward."""
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
        leaving = {facts.storage_roots[row] for row, by in enumerate(plan.decisions) if moves(by)}
        for row in wanted:
            if phases[row] == Phase.BACKWARD and not (leaving and facts.storage_roots[row] in leaving):
                phases[row], decisions[row] = Phase.FORWARD, _AUTO_SAVE
    for row in _sizes_of_forward_values(facts):
        phases[row], decisions[row] = Phase.FORWARD, _SIZE
    live, ahead = set(gradients), set[int]()
    for row in range(len(facts) - 1, -1, -1):
        if facts.phases[row] != Phase.BACKWARD:
            continue
        if phases[row] == Phase.BACKWARD and row not in live and not flags[row] & _EFFECTS:
            if row in ahead:
                phases[row], decisions[row] = Phase.FORWARD, _AUTO_SAVE
            else:
                inputs[row] = ()
        (live if phases[row] == Phase.BACKWARD else ahead).update(inputs[row])
    flags = [flag & ~_FEEDS_BACKWARD for flag in flags]
    for row in read_by_backward(phases, inputs, facts.owners):
        flags[row] |= _FEEDS_BACKWARD
    return evolve(plan, facts=evolve(facts, phases=phases, inputs=inputs, flags=flags), decisions=decisions)


def resolve_offloads_again(plan: Plan) -> Plan:
    """The plan with its offloads decided once more: merged nodes share memory, and so does what min-cut saves. What
    stays on the device after all is in the diagnostics."""
    if not any(map(moves, plan.decisions)):
        return plan
    policy, decisions = plan.policy, list(plan.decisions)
    facts = evolve(plan.facts, users=users_of(plan.facts.inputs))  # merged nodes have other readers by now
    stays = resolve_offloads(policy, facts, decisions, backward_needs(facts, decisions))
    notes = offload_diagnostics(policy, facts, decisions, backward_needs(facts, decisions), stays)
    news = (each for each in notes if each not in plan.diagnostics)
    return evolve(plan, decisions=decisions, diagnostics=(*plan.diagnostics, *news))


def _sizes_of_forward_values(facts: Facts) -> list[int]:
    """Backward nodes that are a symbolic size of a tensor of the forward."""
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
    """The nodes that the backward returns."""
    return [facts.index[value.name] for value in gradients_of(graph, num_fwd_outputs)]


def gradients_of(graph: fx.Graph, num_fwd_outputs: int) -> list[fx.Node]:
    """The nodes that the backward returns."""
    returned = pytree.tree_leaves(graph.output_node().args[0], is_leaf=lambda value: value is None)
    return [value for value in returned[num_fwd_outputs:] if isinstance(value, fx.Node)]
