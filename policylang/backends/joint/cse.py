"""Eliminates common subexpressions of a joint graph without losing what was decided about them.

PyTorch's own elimination keeps the first of two equal nodes and drops the other's metadata, tags included. Here the
kept node takes over the stronger decision of the two: save beats recompute, recompute beats undecided. A decision on
a node that the backward has no use for is the weakest: its save would keep what no rule asked to keep, and its
recomputation was never looked at for whether it may be done.

A backward node that equals a forward node is merged into it only where no one decided the forward node. Such a merge
makes the backward read a forward value it had computed for itself, which is a decision about that value: PyTorch's
min-cut may take it for the values that are left to it, a policy's values are kept apart.

Works in place, in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import fx

from policylang.graph.facts import Facts, Flag, Phase
from policylang.planning.liveness import backward_needs
from policylang.planning.plan import Plan
from policylang.planning.value_outcome import Decision, is_open
from policylang.torch_compat import eager

_NEVER_EQUAL = Flag.RANDOM | Flag.WRITES | Flag.EFFECTFUL
_NOT_BY_VALUE = ("aten.empty", "aten.new_empty", "higher_order.")


@frozen
class Merged:
    """What an elimination did to the rows of a plan."""

    kept_for: Mapping[int, int]
    """Dropped row to the row that stands for it."""
    decisions: Mapping[int, Decision]
    """Kept row to its decision, where it took over that of a dropped row."""


NOTHING_MERGED = Merged({}, {})


def eliminate(graph: fx.Graph, plan: Plan) -> Merged:
    """Merge equal nodes of a joint graph; ``plan`` was made on this graph as it stands.

    Random, mutating and effectful operators, higher-order operators, uninitialised memory, operators whose result
    has a size of its own, and values that share memory with an output stay apart, as do nodes with a write between.
    """
    facts = plan.facts
    index = facts.index
    returned = _output_storages(graph)
    seen: dict[Hashable, fx.Node] = {}
    kept_for: dict[int, int] = {}
    strongest: dict[int, Decision] = {}
    used = _used_by_backward(plan)
    writes = 0
    for node in graph.nodes:
        row = index.get(node.name)
        if row is None or node.op != "call_function":
            continue
        if facts.flags[row] & (Flag.WRITES | Flag.EFFECTFUL):
            writes += 1
        if not _may_merge(node, row, facts, returned):
            continue
        expression = _expression(node)
        if expression is None:
            continue
        phase = facts.phases[row]
        twin = seen.get((Phase.FORWARD, writes, expression)) if phase == Phase.BACKWARD else None
        if twin is None or _is_decided(index[twin.name], plan, strongest):
            twin = seen.setdefault((phase, writes, expression), node)
        if twin is node:
            continue
        _merge(row, index[twin.name], plan, strongest, used)
        kept_for[row] = index[twin.name]
        node.replace_all_uses_with(twin)
    for node in reversed(graph.nodes):
        if facts.index.get(node.name) in kept_for:
            graph.erase_node(node)
    return Merged(kept_for, strongest)


def _is_decided(row: int, plan: Plan, strongest: Mapping[int, Decision]) -> bool:
    decision = strongest.get(row, plan.decisions[row])
    return decision is not None and not is_open(decision)


def _used_by_backward(plan: Plan) -> frozenset[int]:
    """The owners of the rows that the plan, as it stands, may need for the backward, whole or in pieces."""
    needs = backward_needs(plan.facts, plan.decisions)
    return frozenset(plan.facts.owners[row] for row in needs.all)


def _merge(dropped: int, kept: int, plan: Plan, strongest: dict[int, Decision], used: frozenset[int]) -> None:
    """Let the kept row, and whatever shares its decision, take over a stronger decision."""
    owners, theirs = plan.facts.owners, plan.decisions[dropped]
    ours = strongest.get(kept, plan.decisions[kept])
    is_used = kept in strongest or owners[kept] in used
    if theirs is not None and _strength(theirs, owners[dropped] in used) > _strength(ours, is_used):
        strongest[kept] = theirs


def _strength(decision: Decision | None, is_used: bool) -> int:
    if decision is None or not is_used:
        return 0
    return 1 if is_open(decision) else 3 if decision.outcome.is_held else 2


def _may_merge(node: fx.Node, row: int, facts: Facts, returned: set[int]) -> bool:
    if facts.flags[row] & _NEVER_EQUAL or facts.targets[row].startswith(_NOT_BY_VALUE):
        return False
    if node.meta.get("unbacked_bindings"):
        return False  # a size of its own, by which the shapes of its readers are known
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or eager.storage_address(value) not in returned


def _output_storages(graph: fx.Graph) -> set[int]:
    """The memory that the graph returns: two results that were separate tensors must stay so."""
    output = graph.output_node()
    values = (node.meta.get("val") for node in output.all_input_nodes)
    keys = (eager.storage_address(value) for value in values if isinstance(value, torch.Tensor))
    return {key for key in keys if key is not None}


def _expression(node: fx.Node) -> Hashable | None:
    """What a node computes, as a key; None where an argument has no stable identity."""
    try:
        return (node.target, _frozen(node.args), _frozen(node.kwargs))
    except TypeError:
        return None


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
