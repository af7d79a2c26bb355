"""Safety of recomputation: values with effects, writes or random draws that a second run would get wrong."""

from __future__ import annotations

from attrs import evolve

from policylang.graph.facts import Facts, Flag
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Action, Policy, Rule
from policylang.planning import refusals
from policylang.planning.capabilities import Capabilities
from policylang.planning.liveness import SavedForBackward, backward_needs
from policylang.planning.value_outcome import Decision, Why, by_rule

_SUSPECT = Flag.WRITES | Flag.EFFECTFUL | Flag.READS_MUTATED | Flag.RANDOM | Flag.DATA_DEPENDENT


def why_unsafe(facts: Facts, owner: int, capabilities: Capabilities) -> str | None:
    """The reason, as a sentence about the value, or None where a second run gives the same value.

    An owner and what follows it are judged together: they are recomputed together.
    """
    flags = facts.flags[owner]
    for follower in facts.followers.get(owner, ()):
        flags |= facts.flags[follower]
    if not flags & _SUSPECT:
        return None
    if flags & Flag.WRITES and not flags & Flag.REPEATABLE:
        return "it writes to one of its arguments, and a second run would do so again"
    if flags & Flag.EFFECTFUL:
        return "it has an effect beyond its result, and a second run would have it again"
    if flags & Flag.DATA_DEPENDENT:
        return "it is a collective whose sizes come from data: ranks that disagree on a second run wait for each other"
    if flags & Flag.READS_MUTATED:
        return "it reads memory that the graph changes, and a second run would not read what the first one read"
    if flags & Flag.RANDOM and not capabilities.replays_random:
        return f"it draws random numbers, and {capabilities.name} cannot replay them"
    return None


class Safety:
    """Looks at every value that is about to be recomputed, and saves it or objects where that would be wrong.

    Only values that the backward needs are looked at: a counter that no gradient depends on is never run twice,
    whatever a policy says of it.
    """

    def __init__(
        self, policy: Policy, facts: Facts, capabilities: Capabilities, decisions: list[Decision | None]
    ) -> None:
        self._policy = policy
        self._facts = facts
        self._capabilities = capabilities
        self._decisions = decisions
        self._refused: dict[int, str] = {}  # owner → reason, last in the graph first

    def enforce(self) -> SavedForBackward:
        """Look at all that the backward needs recomputed; what it needs afterwards.

        Where a recomputation would be wrong, what an ``optional`` rule or the user's own checkpoint asked for is saved
        instead, the whole group of an owner at once; what another rule asked for is kept for :meth:`diagnostics`.
        """
        return backward_needs(self._facts, self._decisions, self._enforce_on)

    def _enforce_on(self, row: int) -> None:
        """To be called with the rows that are about to be recomputed, the last in the graph first."""
        owner = self._facts.owners[row]
        if owner in self._refused:
            return
        reason = why_unsafe(self._facts, owner, self._capabilities)
        if reason is None:
            return
        decision = self._decisions[row]
        assert decision is not None
        if decision.why is Why.USER or self._may_save(decision):
            saved = evolve(decision, action=Action.SAVE, why=Why.UNSAFE, reason=reason)
            for member in (owner, *self._facts.followers.get(owner, ())):
                if not self._facts.has(member, Flag.SYMBOLIC):
                    self._decisions[member] = saved
        else:
            self._refused[owner] = reason

    def _may_save(self, decision: Decision) -> bool:
        """Whether nobody insists on the recomputation."""
        undecided = self._policy.undecided
        if decision.rule is None:
            return undecided is None or undecided.fate == "auto"
        return self._policy.rules[decision.rule].optional

    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """One error a rule, in the order of the rules, with all its values in graph order."""
        refused = by_rule(sorted(self._refused), self._decisions, self._policy)
        return tuple(self._diagnostic(rule, owners) for rule, owners in refused)

    def _diagnostic(self, rule: Rule | None, owners: list[int]) -> Diagnostic:
        reasons = [self._refused[owner] for owner in owners]
        if rule is not None:
            return refusals.unsafe(rule, owners, reasons, self._facts)
        assert self._policy.undecided is not None
        return refusals.unsafe(self._policy.undecided, owners, reasons, self._facts)
