"""Keeps discrete choices that steer a computation saved: which tokens go to which expert, which rows are gathered.

The smallest difference between the first run and a second one, in a kernel that sums in another order, can flip such a
choice, and then forward and backward go through different experts (pytorch#186572, torchtitan#1117). So the choice is
saved on every path, whatever a sweeping rule says; a rule that names the operator (``recompute topk``) has the last
word, and what the user's own checkpoint recomputes is the user's word already.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from policylang.graph.facts import Facts
from policylang.language.syntax import Action, Operator, Policy, Rule
from policylang.language.walk import walk
from policylang.operators.names import CHOICES, ORDERINGS, STEERED
from policylang.planning.selection.selectors import operator_matcher
from policylang.planning.value_outcome import Decision, Why, recomputes

_WHOLE = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})
REASON = "a discrete choice that steers what follows: a second run could choose otherwise"


def routing_owners(facts: Facts) -> list[int]:
    """The owners of discrete choices that steer something in the forward, in graph order. Two sweeps."""
    choosing = [row for row in facts.forward if _operator(facts, row) in CHOICES]
    if not choosing:
        return []
    exact = _exact(facts, choosing)
    ordered = {row for row in choosing if all(exact[read] for read in facts.inputs[row])}
    open_ = [row for row in choosing if _operator(facts, row) not in ORDERINGS or row not in ordered]
    carries = bytearray(len(facts))
    inputs, dtypes, targets = facts.inputs, facts.dtypes, facts.targets
    for row in choosing:
        carries[row] = _is_whole(dtypes[row])  # the largest of some floats is a number, and no choice
    for row in facts.forward:
        if not carries[row] and dtypes[row] in _WHOLE and any(carries[read] for read in inputs[row]):
            carries[row] = 1
    steers = bytearray(len(facts))
    for row in reversed(facts.forward):
        if steers[row] or targets[row].startswith(STEERED):
            for read in inputs[row]:
                if carries[read]:
                    steers[read] = 1
    return list(dict.fromkeys(facts.owners[row] for row in open_ if steers[row]))


def _exact(facts: Facts, choosing: list[int]) -> bytearray:
    """One byte a row, 1 where whole numbers are computed of whole numbers alone: given ones, sizes, earlier choices."""
    exact = bytearray(map(_is_whole, facts.dtypes))
    chosen = frozenset(choosing)
    for row in facts.forward:
        if exact[row] and row not in chosen:
            exact[row] = all(exact[read] for read in facts.inputs[row])
    return exact


def _is_whole(dtype: str) -> bool:
    """Of whole numbers, or a tuple or a size."""
    return not dtype or dtype in _WHOLE


def _operator(facts: Facts, row: int) -> str:
    return facts.targets[row].rpartition(".")[0]


def keep_routing(policy: Policy, facts: Facts, decisions: list[Decision | None]) -> tuple[int, ...]:
    """Save every discrete choice that would have been recomputed and that no rule names; returns their owners.

    What is left to PyTorch's min-cut stays with it.
    """
    kept = []
    for owner in routing_owners(facts):
        decision = decisions[owner]
        if decision is None or not recomputes(decision) or decision.why is Why.USER:
            continue
        members = (owner, *facts.followers.get(owner, ()))
        if decision.rule is not None and _names(policy.rules[decision.rule], facts, members):
            continue
        saved = evolve(decision, action=Action.SAVE, why=Why.ROUTING, reason=REASON)
        for row in members:
            if (planned := decisions[row]) is not None and planned.why is not Why.ALWAYS:
                decisions[row] = saved
        kept.append(owner)
    return tuple(kept)


def _names(rule: Rule, facts: Facts, rows: Sequence[int]) -> bool:
    """Whether a rule recomputes one of these operators by its name, without a wildcard and in its own text."""
    chosen = {facts.targets[row] for row in rows if _operator(facts, row) in CHOICES}
    return rule.action.recomputes and any(
        isinstance(part, Operator) and "*" not in part.name and any(map(operator_matcher(part), chosen))
        for part in walk(rule.selector)
    )
