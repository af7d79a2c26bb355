"""Discrete choices that steer a computation: which tokens go to which expert, which rows are gathered.

The smallest difference between the first run and a second one, in a kernel that sums in another order, can flip such a
choice, and then forward and backward go through different experts (pytorch#186572, torchtitan#1117). So the choice is
saved, whatever a sweeping rule says; a rule that names the operator (``recompute topk``) has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from policylang.graph.facts import Facts
from policylang.language.syntax import Action, Operator, Policy, Selector
from policylang.language.walk import walk
from policylang.planning.plan import Decision, Why
from policylang.planning.selectors import operator_matcher

_CHOOSES = frozenset(
    f"aten.{name}" for name in ("topk", "argmax", "argmin", "argsort", "sort", "multinomial", "kthvalue", "max", "min")
)
_STEERED = (
    "aten.index",
    "aten.gather",
    "aten.scatter",
    "aten.embedding",
    "aten.take",
    "aten.masked_",
    "aten.where",
    "aten.bincount",
    "aten.histc",
    "aten.nonzero",
    "aten._local_scalar_dense",
    "aten._grouped_mm",
    "aten._embedding_bag",
)
"""Beginnings of the names of operators that go by whole numbers or truth values computed elsewhere."""

_WHOLE = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})
REASON = "a discrete choice that steers what follows: a second run could choose otherwise"


def routing_owners(facts: Facts) -> list[int]:
    """The owners of discrete choices that steer something in the forward, in graph order. Two sweeps."""
    choosing = [row for row in facts.forward if facts.targets[row].rpartition(".")[0] in _CHOOSES]
    if not choosing:
        return []
    carries = bytearray(len(facts))
    for row in choosing:
        carries[row] = 1
    inputs, dtypes, targets = facts.inputs, facts.dtypes, facts.targets
    for row in facts.forward:
        if not carries[row] and dtypes[row] in _WHOLE and any(carries[read] for read in inputs[row]):
            carries[row] = 1
    steers = bytearray(len(facts))
    for row in reversed(facts.forward):
        if steers[row] or targets[row].startswith(_STEERED):
            for read in inputs[row]:
                if carries[read]:
                    steers[read] = 1
    return list(dict.fromkeys(facts.owners[row] for row in choosing if steers[row]))


def keep_routing(policy: Policy, facts: Facts, decisions: list[Decision | None]) -> tuple[int, ...]:
    """Save every discrete choice that a rule would have recomputed without naming it; returns their owners."""
    kept = []
    for owner in routing_owners(facts):
        decision = decisions[owner]
        if decision is None or decision.action is None or not decision.action.recomputes:
            continue
        members = (owner, *facts.followers.get(owner, ()))
        if decision.rule is not None and _names(policy.rules[decision.rule].selector, facts, members):
            continue
        saved = evolve(decision, action=Action.SAVE, why=Why.ROUTING, reason=REASON)
        for row in members:
            if (planned := decisions[row]) is not None and planned.why is not Why.ALWAYS:
                decisions[row] = saved
        kept.append(owner)
    return tuple(kept)


def _names(selector: Selector, facts: Facts, rows: Sequence[int]) -> bool:
    """Whether a rule names, without a wildcard and in its own text, one of these operators."""
    chosen = {facts.targets[row] for row in rows if facts.targets[row].rpartition(".")[0] in _CHOOSES}
    return any(
        isinstance(part, Operator) and "*" not in part.name and any(map(operator_matcher(part), chosen))
        for part in walk(selector)
    )
