"""What becomes of one forward value, and what decided it."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from attrs import frozen

from policylang.language.syntax import Action

Fate = Literal["auto", "save", "recompute", "as traced", "as checkpointed"]
"""What becomes of forward values that no rule decides."""


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
    """What becomes of one forward value.

    ``action`` is None where PyTorch's partitioner is to decide. ``rule`` indexes ``Policy.rules`` and is None unless
    a rule matched the node last (it stays set where ``why`` is UNSAFE). ``reason`` is a phrase for people.
    """

    action: Action | None
    rule: int | None
    why: Why
    reason: str = ""


def recomputes(decision: Decision | None) -> bool:
    return decision is not None and decision.action is not None and decision.action.recomputes


def saves(decision: Decision | None) -> bool:
    return decision is not None and decision.action is not None and decision.action.saves


def offloads(decision: Decision | None) -> bool:
    """Whether a value is to be moved to the host."""
    return decision is not None and decision.action is not None and decision.action.offloads
