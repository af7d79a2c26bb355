"""The decision on one forward value (save, recompute, offload, or left to the partitioner), and what decided it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Literal

from attrs import frozen

from policylang.language.syntax import Action, Policy, Rule

Fate = Literal["auto", "save", "recompute", "as traced", "as checkpointed"]
"""The fate of forward values that no rule decides."""


class Why(Enum):
    """What decided a node."""

    RULE = "rule"
    USER = "user"
    """The user's own ``checkpoint``."""
    ALWAYS = "always"
    """One of the things that always hold: a symbolic size or a seed is saved."""
    UNSAFE = "unsafe"
    """An ``optional`` rule asked for a recomputation that would be wrong: saved."""
    ROUTING = "routing"
    """A discrete choice that steers what follows, which would have been recomputed, and no rule named it: saved."""
    REBUILT = "rebuilt"
    """A view of what is offloaded: made again, at no cost, from the copy that came back."""
    STAYS = "stays"
    """A rule offloads it, and moving it would free nothing or exceed the budget: saved."""
    UNDECIDED = "undecided"
    """No rule; ``undecided -> …`` applies."""


@frozen
class Decision:
    """The fate of one forward value.

    ``action`` is None where PyTorch's partitioner is to decide. ``rule`` indexes ``Policy.rules`` and is None unless
    a rule matched the node last (it stays set where ``why`` is UNSAFE). ``reason`` is a phrase for people.
    """

    action: Action | None
    rule: int | None
    why: Why
    reason: str = ""


def by_rule(
    rows: Iterable[int], decisions: Sequence[Decision | None], policy: Policy
) -> list[tuple[Rule | None, list[int]]]:
    """Rows by the rule that decided them, in the order of the policy; last those that no rule did, by None."""
    found: dict[int | None, list[int]] = {}
    for row in rows:
        decision = decisions[row]
        found.setdefault(None if decision is None else decision.rule, []).append(row)
    indices = sorted(found, key=lambda index: len(policy.rules) if index is None else index)
    return [(None if index is None else policy.rules[index], found[index]) for index in indices]


def is_open(decision: Decision | None) -> bool:
    """Whether a value is left to PyTorch's partitioner."""
    return decision is not None and decision.action is None


def recomputes(decision: Decision | None) -> bool:
    return decision is not None and decision.action is not None and decision.action.recomputes


def saves(decision: Decision | None) -> bool:
    return decision is not None and decision.action is not None and decision.action.saves


def offloads(decision: Decision | None) -> bool:
    """Whether a value is to be moved to the host."""
    return decision is not None and decision.action is not None and decision.action.offloads
