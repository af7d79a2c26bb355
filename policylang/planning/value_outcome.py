"""Outcomes: how a forward value is kept for the backward, and the decisions that say so.

There is one class for each outcome: it says where the value is held, how many bytes that keeps, which steps it adds to
the schedule, and its word. Liveness, schedules, expectations, reports and audits ask it and have no formula of their
own, so that a new outcome is a class here, its steps in :mod:`policylang.graph.facts`, and the code that applies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import ClassVar, Literal, assert_never

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag, StepKind
from policylang.language.syntax import Action, NarrowForm, Policy, Rule

Default = Literal["auto", "save", "recompute", "as traced", "as checkpointed"]
"""The treatment of forward values that no rule decides."""


class Held(Enum):
    """The place of a value between its forward and its backward use."""

    DEVICE = "device"
    HOST = "host"
    NOWHERE = "nowhere"
    """It is recomputed."""
    UNDECIDED = "undecided"
    """PyTorch's partitioner decides; until then it counts as held on the device."""


@frozen
class Outcome:
    """The way in which the backward gets a value; one subclass each."""

    word: ClassVar[str]
    held: ClassVar[Held]
    steps: ClassVar[tuple[StepKind, ...]] = ()
    """The steps that it adds to the schedule, beside the run in the forward."""
    moves: ClassVar[str] = ""
    """The verb for a value that something else replaces between the forward and the backward."""
    asks: ClassVar[str] = ""
    """The capability that it needs of a path; empty where every path has it."""
    reads_again: ClassVar[bool] = False
    """True if the backward needs, for sure or possibly, the inputs of the value."""
    narrows: ClassVar[bool] = False
    """True if the backward gets the value with fewer bits than the forward made."""

    @property
    def is_held(self) -> bool:
        """True if the value itself waits for the backward."""
        return self.held in (Held.DEVICE, Held.HOST)

    @property
    def on_device(self) -> bool:
        """True if it counts as held on the device, until the partitioner decides otherwise."""
        return self.held in (Held.DEVICE, Held.UNDECIDED)

    @property
    def phrase(self) -> str:
        """The word in a sentence about partitions."""
        return self.word

    @property
    def fate(self) -> str:
        """The word of an expectation that it meets."""
        return KEPT.word if self.held is Held.DEVICE else self.word

    def kept_bytes(self, facts: Facts, rows: Sequence[int]) -> list[int]:
        """The bytes held for each value: memory that several of them share counts for the first."""
        return [0] * len(rows)

    def recomputed_bytes(self, facts: Facts, rows: Sequence[int]) -> list[int]:
        """The bytes that recomputing each value allocates."""
        return [0] * len(rows)

    def place(self, facts: Facts, row: int) -> int:
        """The node in whose block the value counts: the one that allocated its memory."""
        root = facts.storage_roots[row]
        return root if facts.ops[root] == "call_function" else row


@frozen
class Kept(Outcome):
    """On the device from the forward to the backward."""

    word = "saved"
    held = Held.DEVICE

    def kept_bytes(self, facts: Facts, rows: Sequence[int]) -> list[int]:
        """A view keeps the whole memory of its source; one of a parameter or an input keeps nothing more."""
        roots, ops, seen = facts.storage_roots, facts.ops, set[int]()
        found: list[int] = []
        for root in (roots[row] for row in rows):
            found.append(0 if root in seen or ops[root] != "call_function" else facts.bytes[root])
            seen.add(root)
        return found


@frozen
class LeftToMinCut(Kept):
    """PyTorch's partitioner keeps or recomputes it."""

    word = "left to PyTorch"
    held = Held.UNDECIDED
    reads_again = True

    @property
    def phrase(self) -> str:
        return "left to the partitioner"


@frozen
class Recomputed(Outcome):
    """Recomputed in the backward."""

    word = "recomputed"
    held = Held.NOWHERE
    steps = (StepKind.SECOND_RUN,)
    reads_again = True

    def recomputed_bytes(self, facts: Facts, rows: Sequence[int]) -> list[int]:
        return [own_bytes(facts, row) for row in rows]

    def place(self, facts: Facts, row: int) -> int:
        return row


@frozen
class OnHost(Outcome):
    """On the host between its last forward and its first backward use."""

    word = "offloaded"
    held = Held.HOST
    steps = (StepKind.COPY_TO_HOST, StepKind.WAIT_TO_HOST, StepKind.COPY_FROM_HOST, StepKind.WAIT_FROM_HOST)
    moves = "moved to the host"
    asks = "offloading"

    def kept_bytes(self, facts: Facts, rows: Sequence[int]) -> list[int]:
        return [facts.bytes[row] for row in rows]


@frozen
class Narrowed(Kept):
    """On the device in a narrower type: fewer bytes, and the rounding of that type in what the backward computes."""

    form: NarrowForm

    word = "narrowed"
    steps = (StepKind.NARROW, StepKind.WIDEN)
    moves = "narrowed"
    asks = "narrower copies"
    narrows = True

    @property
    def phrase(self) -> str:
        return f"saved as {self.form.text}"

    def kept_bytes(self, facts: Facts, rows: Sequence[int]) -> list[int]:
        return [self.form.bytes(facts.shapes[row] or (), facts.numel[row]) for row in rows]


KEPT, RECOMPUTED, ON_HOST, LEFT_TO_MIN_CUT = Kept(), Recomputed(), OnHost(), LeftToMinCut()


def outcome_of(action: Action | None, form: NarrowForm | None = None) -> Outcome:
    """The outcome of an action; None and ``leave`` leave it to PyTorch's partitioner."""
    match action:
        case Action.SAVE | Action.PREFER_SAVE:
            return KEPT if form is None else Narrowed(form)
        case Action.RECOMPUTE | Action.MUST_RECOMPUTE:
            return RECOMPUTED
        case Action.OFFLOAD | Action.PREFER_OFFLOAD:
            return ON_HOST
        case Action.LEAVE | None:
            return LEFT_TO_MIN_CUT
        case _:
            assert_never(action)


class Why(Enum):
    """The cause of a decision."""

    RULE = "rule"
    USER = "user"
    """The user's own ``checkpoint``."""
    ALWAYS = "always"
    """Symbolic sizes and seeds are always saved."""
    UNSAFE = "unsafe"
    """An ``optional`` rule asked for a recomputation that would be wrong: saved."""
    ROUTING = "routing"
    """A discrete choice that steers what follows, which would have been recomputed, and no rule named it: saved."""
    CHUNKED = "chunked"
    """A value of a slice that the backward computes again, slice by slice, or a gradient that the forward made."""
    REBUILT = "rebuilt"
    """A view of an offloaded value, taken again at no cost from the copy that came back."""
    STAYS = "stays"
    """A rule offloads it, and moving it would free nothing or exceed the budget: saved."""
    UNDECIDED = "undecided"
    """No rule; ``undecided -> …`` applies."""


@frozen
class Decision:
    """The decision on one forward value.

    ``action`` is None where PyTorch's partitioner is to decide. ``rule`` indexes ``Policy.rules`` and is None unless
    a rule matched the node last (it stays set where ``why`` is UNSAFE). ``reason`` is a phrase for people.
    """

    action: Action | None
    rule: int | None
    why: Why
    reason: str = ""
    form: NarrowForm | None = None
    """The narrower type in which it is saved."""
    outcome: Outcome = field(init=False, eq=False, repr=False)

    @outcome.default
    def _outcome(self) -> Outcome:
        return outcome_of(self.action, self.form)

    @property
    def word(self) -> str:
        """The action as the language writes it; ``auto`` for what is left to PyTorch's partitioner."""
        action = "auto" if self.action is None else self.action.word
        return action if self.form is None else f"{action} as {self.form.text}"


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
    """True if a value is left to PyTorch's partitioner."""
    return decision is not None and decision.outcome.held is Held.UNDECIDED


def recomputes(decision: Decision | None) -> bool:
    return decision is not None and decision.outcome.held is Held.NOWHERE


def saves(decision: Decision | None) -> bool:
    """True if a value is to stay on the device as it is."""
    return decision is not None and decision.outcome.held is Held.DEVICE and not decision.outcome.moves


def offloads(decision: Decision | None) -> bool:
    """True if a value is to be moved to the host."""
    return decision is not None and decision.outcome.held is Held.HOST


def moves(decision: Decision | None) -> bool:
    """True if something else is to take the place of a value until the backward."""
    return decision is not None and bool(decision.outcome.moves)


def saved_as(
    rows: Iterable[int], decisions: Sequence[Decision | None], inner: Mapping[int, int] = MappingProxyType({})
) -> dict[Outcome, list[int]]:
    """Values that are on the device for the backward, by the outcome that keeps them there. ``inner``: as in
    :class:`policylang.planning.schedule.Checkpoints`."""
    found: dict[Outcome, list[int]] = {KEPT: []}
    for row in rows:
        by = decisions[inner.get(row, row)]
        outcome = by.outcome if by is not None and by.outcome.held is Held.DEVICE else KEPT
        found.setdefault(outcome, []).append(row)
    return found


def saved_bytes(facts: Facts, rows: Sequence[int], decisions: Sequence[Decision | None]) -> list[int]:
    """The bytes that each of them keeps there."""
    found = dict.fromkeys(rows, 0)
    for outcome, mine in saved_as(rows, decisions).items():
        found.update(zip(mine, outcome.kept_bytes(facts, mine), strict=True))
    return [found[row] for row in rows]


def narrowed_by(facts: Facts, row: int, decision: Decision | None) -> int:
    """The bytes by which a saved value is smaller than it was made; scales count."""
    if decision is None or not decision.outcome.narrows:
        return 0
    return facts.bytes[row] - decision.outcome.kept_bytes(facts, [row])[0]


def own_bytes(facts: Facts, row: int) -> int:
    """The bytes that recomputing a value allocates: none for a view or for a piece of an operator counted already."""
    return 0 if facts.flags[row] & Flag.VIEW or facts.owners[row] != row else facts.bytes[row]
