"""Resolves `offload` and `save … as`: which memory is moved to the host or narrowed, as far as that frees any and the
budget of the rule lasts.

A value lives in the memory of the node that allocated it, its *holder*. The holder is moved, once, whichever of its
views the policy names, and what the backward reads of them is rebuilt there from the copy that came back: a view costs
nothing. A value stays on the device, with a reason, if moving it would free nothing or bring back other data, or if the
budget is used up. Budgets are spent in graph order, each value taken that still fits. What would not take
less memory in a narrower type is not narrowed, nor is what steers other operators, unless a rule picks nothing else.

When the copies start and are awaited is in the schedule (:mod:`policylang.planning.schedule`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from types import MappingProxyType

from attrs import evolve

from policylang.graph.blocks import OUTSIDE
from policylang.graph.facts import Facts, Flag, GraphKind, Phase, returns_memory_of_input
from policylang.language.diagnostics import Diagnostic, Severity, diagnose, prefixed, removed
from policylang.language.syntax import NARROW_BYTES, Action, NarrowForm, Policy
from policylang.operators.names import DETACHES, GETITEM, WAITS
from policylang.planning import refusals
from policylang.planning.decisions.decide import steering_values
from policylang.planning.liveness import SavedForBackward
from policylang.planning.schedule import Checkpoints, leaves_block
from policylang.planning.selection import no_match
from policylang.planning.value_outcome import Decision, Why, by_rule, is_open, moves, recomputes, saves

FULL = "the budget is full"
UNREAD = "the backward does not read it, and the budget is for what it reads"
_UNREBUILDABLE = Flag.WRITES | Flag.EFFECTFUL | Flag.READS_MUTATED


def resolve_offloads(
    policy: Policy,
    facts: Facts,
    decisions: list[Decision | None],
    needs: SavedForBackward,
    spent: Mapping[int, int] = MappingProxyType({}),
    checkpoints: Checkpoints | None = None,
    block_of: Sequence[int] = (),
) -> tuple[int, ...]:
    """Decide what of the offloaded values is moved; ``decisions`` are changed accordingly. ``needs``: what the backward
    reads, whatever checkpoints hold. ``spent``: by rule, the bytes of its budget that are used up already.

    Afterwards a value decided ``offload`` is a holder. Its views are decided ``recompute``, because of ``Why.REBUILT``;
    what stays is decided ``save``, because of ``Why.STAYS``, and returned in graph order. What no rule speaks of
    follows the value, or else the view, with which it shares its memory; so does what a line saves that is above the
    one that narrows that: memory has one form. What the backward does not read is decided as well, since checkpoints in
    eager hold it: it follows what is read of its memory, and takes nothing of a budget.
    """
    passed = set[int]()  # what a block gives to another, whose backward may read nothing of it
    of: Sequence[int] = bytes(len(facts)) if checkpoints is None else checkpoints.of
    if checkpoints is not None:
        crossing, beyond = checkpoints.crossing or (), checkpoints.beyond
        inside = (row for row in facts.forward if of[row] != OUTSIDE and row not in beyond)
        passed = {row for row in inside if row in crossing or leaves_block(facts, row, of)}
    read = {*needs.saved, *needs.undecided, *needs.offloaded, *needs.contingent, *passed}
    for row in reversed(facts.forward):
        if row in read and facts.targets[row] in DETACHES:  # what autograd reads of a value
            read.update(facts.inputs[row])
    needed = sorted(read)
    said = {(_holder(facts, row), of[row]): decisions[row] for row in reversed(needed) if moves(decisions[row])}
    for row in needed:
        decision, holder = decisions[row], _holder(facts, row)
        followed = decisions[holder] if moves(decisions[holder]) else said.get((holder, of[row]))
        if decision is None or followed is None:
            continue
        if _yields(decision, followed, facts.targets[row]) or (decision.why is Why.ALWAYS and row in passed):
            decisions[row] = followed
    roots = facts.storage_roots
    given = {roots[row] for row in facts.forward if facts.flags[row] & Flag.FORWARD_OUTPUT}
    given -= {roots[row] for row in needed}  # whoever takes it decides, unless a checkpoint holds it
    reach = None if checkpoints is None else checkpoints.reach
    asked = [
        row
        for row in facts.forward
        if moves(decisions[row]) and (roots[row] not in given or (reach is not None and row < reach[of[row]]))
    ]
    return _Offloads(policy, facts, decisions, needed, asked, spent, checkpoints, block_of).resolve() if asked else ()


def _yields(decision: Decision, followed: Decision, target: str) -> bool:
    if decision.why is Why.UNDECIDED:
        return True
    is_later = decision.rule is not None and followed.rule is not None and decision.rule < followed.rule
    is_one = target in DETACHES or (followed.form is not None and saves(decision))  # autograd detaches, not the model
    return is_one and is_later and decision.why is Why.RULE


class _Offloads:
    def __init__(
        self,
        policy: Policy,
        facts: Facts,
        decisions: list[Decision | None],
        needed: Collection[int],
        asked: Sequence[int],
        spent: Mapping[int, int],
        checkpoints: Checkpoints | None,
        block_of: Sequence[int],
    ) -> None:
        self.facts = facts
        self.decisions = decisions
        self.roots = facts.storage_roots
        self.asked = asked
        self.needed = frozenset(needed)
        self.crossing = (checkpoints and checkpoints.crossing) or frozenset()
        self.beyond = frozenset[int]() if checkpoints is None else checkpoints.beyond
        self.checkpointed = checkpoints is not None
        self.block_of = block_of if checkpoints is None else checkpoints.of
        budgets = (inf if rule.budget is None else rule.budget.value for rule in policy.rules)
        self.room = [budget - spent.get(number, 0) for number, budget in enumerate(budgets)]
        self.steering = steering_values(facts) if any(self._form(row) is not None for row in asked) else {}
        read = (row for row in asked if row in self.needed)
        rules = ((decision.rule, row) for row in read if (decision := decisions[row]) is not None)
        self.mixed = {rule for rule, row in rules if _holder(facts, row) not in self.steering}
        """The rules that pick more than what steers other operators."""
        self.backward = next((row for row, phase in enumerate(facts.phases) if phase == Phase.BACKWARD), len(facts))
        self.elsewhere = any(device and not device.startswith("cpu") for device in facts.devices)
        self.members: dict[int, list[int]] = {self.roots[row]: [] for row in asked}
        for row, root in enumerate(self.roots):
            if root in self.members and (checkpoints is None or facts.phases[row] == Phase.FORWARD):
                self.members[root].append(row)

    def resolve(self) -> tuple[int, ...]:
        together: dict[int, list[int]] = {}
        for row in self.asked:
            together.setdefault(self.roots[row], []).append(row)
        stays: list[int] = []
        for members in sorted(together.values(), key=lambda rows: _holder(self.facts, rows[0])):
            rows = [row for row in members if row in self.needed] or members
            holder = _holder(self.facts, rows[0])
            first = self.decisions[rows[0]]
            rule = None if first is None else first.rule
            reason = self._why_not(holder, rows)
            if reason is None and rule is not None and rows[0] not in self.needed and self.room[rule] < inf:
                reason = UNREAD
            elif reason is None and rule is not None and self.facts.bytes[holder] > self.room[rule]:
                reason = FULL
            if reason is None:
                self._move(holder, rows)
                continue
            stays += members
            for row in members:
                if (decision := self.decisions[row]) is not None:
                    self.decisions[row] = evolve(decision, action=Action.SAVE, form=None, why=Why.STAYS, reason=reason)
        return tuple(sorted(stays))

    def _form(self, row: int) -> NarrowForm | None:
        decision = self.decisions[row]
        return None if decision is None else decision.form

    def _move(self, holder: int, rows: Sequence[int]) -> None:
        facts, decisions = self.facts, self.decisions
        decision = decisions[rows[0]]
        assert decision is not None
        if decision.rule is not None and rows[0] in self.needed:
            self.room[decision.rule] -= facts.bytes[holder]
        if holder != rows[0]:
            decisions[holder] = evolve(decision, reason=f"it holds the memory of {facts.names[rows[0]]}")
        word = decision.outcome.word
        for row in self._to_rebuild(holder, rows):
            while row != holder:
                if not recomputes(decisions[row]):
                    reason = f"a view of {facts.names[holder]}, which is {word}"
                    decisions[row] = Decision(Action.RECOMPUTE, decision.rule, Why.REBUILT, reason)
                row = facts.inputs[row][0]

    def _to_rebuild(self, holder: int, rows: Sequence[int]) -> list[int]:
        """The values in a holder's memory that the backward may need: moved ones, those left to the partitioner, and
        views that another block takes of what it is given; and what checkpoints would hold for nobody."""
        found = [*rows]
        for row in self.members[self.roots[holder]]:
            decision = self.decisions[row]
            if row not in self.needed:
                held = row != holder and decision is not None and decision.outcome.is_held
                found += [row] if held and (self.checkpointed or _holder(self.facts, row) == holder) else []
            elif is_open(decision) or self._is_given(row, holder):
                found.append(row)
        return found

    def _is_given(self, row: int, holder: int) -> bool:
        """A saved view that another block takes of what its checkpoint is given: it takes it again."""
        of = self.block_of
        elsewhere = bool(of) and of[row] not in (OUTSIDE, of[holder])
        return elsewhere and saves(self.decisions[row])

    def _why_not(self, holder: int, rows: Sequence[int]) -> str | None:
        """Why moving a value would free nothing, or bring back something else; None where all is well."""
        facts, names = self.facts, self.facts.names
        root, form = self.roots[holder], self._form(rows[0])
        if facts.ops[root] != "call_function":
            doing = "moving" if form is None else "narrowing"
            return f"it is a view of {names[root]}, an input of the graph: {doing} it would free nothing"
        if facts.shapes[holder] is None or facts.flags[holder] & Flag.MULTI_OUTPUT:
            return "it is not a single tensor"
        if not facts.bytes[holder]:
            return "it has no memory"
        owner = facts.owners[holder]
        if self.checkpointed and facts.flags[holder] & Flag.WRITES and recomputes(self.decisions[owner]):
            return f"{names[holder]} writes to {names[owner]}, which is recomputed, and runs again for that"
        if form is not None and (reason := self._why_not_narrower(holder, form, rows[0])) is not None:
            return reason
        if form is None and self.elsewhere and facts.devices[holder].startswith("cpu"):
            return "it is on the host already"
        if holder > self.backward and facts.kind is GraphKind.FLAT:
            return "it is made after the backward has begun"
        sizes = zip(facts.shapes[holder] or (), facts.strides[holder] or (), strict=False)
        if any(stride == 0 and size > 1 for size, stride in sizes):
            return "its elements share memory"
        return self._other_reader(holder, form) or self._unlike(holder, rows)

    def _why_not_narrower(self, holder: int, form: NarrowForm, row: int) -> str | None:
        facts = self.facts
        dtype, shape, decision = facts.dtypes[holder], facts.shapes[holder] or (), self.decisions[row]
        if not dtype.startswith(("float", "bfloat")) or dtype.startswith("float4"):
            return f"it is {dtype}, and no floating-point value"
        if facts.bytes[holder] <= NARROW_BYTES[form.dtype] * facts.numel[holder]:
            return f"it is {dtype}, which is that narrow already"
        if form.bytes(shape, facts.numel[holder]) >= facts.bytes[holder]:
            return "with a scale for each row it would take no less memory"
        if self.checkpointed and facts.owners[holder] != holder and facts.targets[holder] not in (GETITEM, *WAITS):
            return f"it is written to in place where {facts.names[facts.owners[holder]]} has made it"
        if holder in self.steering and (decision is None or decision.rule in self.mixed):
            return self.steering[holder]
        return None

    def _other_reader(self, holder: int, form: NarrowForm | None) -> str | None:
        """Who else keeps the memory, or changes it under the copy."""
        facts, names = self.facts, self.facts.names
        for member in self.members[self.roots[holder]]:
            if member in self.needed and saves(self.decisions[member]) and not self._is_given(member, holder):
                return f"{names[member]}, which is saved, holds the same memory"
            if form is not None and member in self.crossing and not self._has_rows_of(member, holder):
                return f"its block returns {names[member]}, a view with other rows, which the next checkpoint holds"
            if facts.flags[member] & Flag.FORWARD_OUTPUT and member not in self.crossing:
                return f"the forward returns {names[member]}, and the caller holds it"
            if member in self.beyond:
                return f"its block returns {names[member]}, and what follows the blocks holds it"
            for user in facts.users[member]:
                if facts.phases[user] == Phase.OUTPUT and member not in self.crossing:
                    return f"the graph returns {names[member]}, and the caller holds it"
                if facts.phases[user] == Phase.FORWARD and (user < self.backward or facts.kind is not GraphKind.FLAT):
                    continue  # a partition runs all of its forward first
                if facts.flags[user] & Flag.WRITES:
                    return f"{names[user]} may write to it after the backward has begun"
                if facts.phases[user] == Phase.FORWARD:
                    return f"{names[user]}, of the forward, reads it after the backward has begun"
        return None

    def _has_rows_of(self, member: int, holder: int) -> bool:
        shapes = [(self.facts.shapes[row] or ())[-1:] for row in (member, holder)]
        return shapes[0] == shapes[1] and self.facts.numel[member] == self.facts.numel[holder]

    def _unlike(self, holder: int, rows: Sequence[int]) -> str | None:
        """A value in the memory that the backward may need and that is no view of the holder."""
        facts = self.facts
        for row in self._to_rebuild(holder, rows):
            if _holder(facts, row) != holder:
                return f"{facts.names[row]} holds the same memory, and is no view of {facts.names[holder]}"
            while row != holder:
                if facts.flags[row] & _UNREBUILDABLE:
                    return f"{facts.names[row]} reads it while it is written to"
                if self._form(rows[0]) is not None and facts.dtypes[row] not in ("", facts.dtypes[holder]):
                    return f"{facts.names[row]} reads its memory as {facts.dtypes[row]}"
                row = facts.inputs[row][0]
        return None


def _holder(facts: Facts, row: int) -> int:
    """The source of a view, or of a view of a view; a value that is no view itself."""
    while facts.inputs[row] and not facts.flags[row] & Flag.WRITES:
        owner = facts.owners[row]
        is_view = (owner == row or facts.targets[row] == GETITEM) and returns_memory_of_input(facts, owner)
        if not is_view:
            break
        row = facts.inputs[row][0]
    return row


def prefetch_diagnostics(
    policy: Policy, facts: Facts, needs: SavedForBackward, blocks: Sequence[str]
) -> Iterator[Diagnostic]:
    """Errors and warnings about a line that says when copies back start."""
    line = policy.prefetch_offloaded
    if line is None:
        return
    text = line.span.one_line
    if not (needs.moved or policy.offloads or line.optional):
        message = f"`{text}` is about copies back from the host, and nothing is offloaded"
        help = f"leave it out; if that is intended, write `optional {text}`"
        fixes = [removed(line.span), prefixed(line.span, "optional")]
        yield diagnose(refusals.MATCHES_NOTHING, message, line.span, help=help, fixes=fixes)
    elif needs.moved and not blocks:
        message = f"`{text}` counts in blocks, and no blocks were found in this graph"
        yield diagnose(refusals.NO_BLOCKS, message, line.span, help=no_match.naming_blocks(facts))


def offload_diagnostics(
    policy: Policy, facts: Facts, decisions: Sequence[Decision | None], needs: SavedForBackward, stays: Sequence[int]
) -> Iterator[Diagnostic]:
    """For each rule what of it stays on the device: a note, and a warning where nothing of it is moved. A rule that
    narrows nothing is an error: whoever wrote it counts on the memory."""
    moved = sorted((*needs.moved, *(row for row in needs.contingent if moves(decisions[row]))))
    moving = [rule for rule, _ in by_rule(moved, decisions, policy)]
    held, roots = frozenset(needs.all), facts.storage_roots
    given = {roots[row] for row in facts.forward if facts.flags[row] & Flag.FORWARD_OUTPUT}
    for rule, rows in by_rule([row for row in stays if row in held or roots[row] in given], decisions, policy):
        moves_none = all(rule is not each for each in moving)
        text = "the model's own checkpoint" if rule is None else f"`{rule.text}`"
        reasons = [decision.reason for row in rows if (decision := decisions[row]) is not None]
        first = f"`{facts.names[rows[0]]}`" if len(rows) == 1 else f"`{facts.names[rows[0]]}` first"
        does, where = "offloads", "on the device"
        codes = refusals.OFFLOADS_NOTHING, refusals.STAYS_ON_DEVICE
        if rule is not None and rule.form is not None:
            does, where = "narrows", "as it is" if len(rows) == 1 else "as they are"
            codes = refusals.NARROWS_NOTHING, refusals.NOT_NARROWED
        leaves = f"{f'{does} nothing: it leaves' if moves_none else 'leaves'} {refusals.forward_values(len(rows))}"
        found = diagnose(
            codes[not moves_none],
            f"{text} {leaves} {where}, {first}: {reasons[0]}",
            span=None if rule is None else rule.span,
            details=refusals.reason_lines(rows, reasons, facts),
        )
        yield evolve(found, severity=Severity.NOTE) if rule is None or rule.optional else found
