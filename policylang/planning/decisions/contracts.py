"""All-gathers of buffers and user inputs that a rule about gathered parameters does not cover: a note at that rule.

Parallelizers shard these too (a table of rotary embeddings, a batch over sequence), and their gathers look alike. They
are no weights, so a line that says `from parameter` does not decide about them; who takes it for all of them is told.
"""

from __future__ import annotations

from collections.abc import Sequence

from policylang.graph.chains import Chains
from policylang.graph.facts import Facts, Flag, InputKind
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Is, Policy, Rule
from policylang.language.walk import tests_of
from policylang.operators.names import is_all_gather
from policylang.planning import refusals
from policylang.planning.plan import RuleOutcome
from policylang.planning.selection.predicates import ORIGINS

_OTHERS = (InputKind.BUFFER, InputKind.USER)


def gathers_left(policy: Policy, facts: Facts, chains: Chains, rules: Sequence[RuleOutcome]) -> list[Diagnostic]:
    """A note at the first contract about parameters' gathers, with those of other inputs that no such rule covers.

    What is meant to stand whatever else is said, `override`, is a contract; a rule among others leaves what it leaves.
    """
    about = [(outcome, kinds) for outcome in rules if (kinds := origins_asked(outcome.rule, policy))]
    parameters = (outcome for outcome, kinds in about if InputKind.PARAMETER in kinds)
    contract = next((outcome for outcome in parameters if outcome.rule.override and outcome.matched), None)
    if contract is None:
        return []
    covered = {row for outcome, _ in about for row in outcome.matched}
    needed = _needed(facts, chains)
    left = [row for row in _gathers(facts, chains) if row not in covered and needed[row]]
    return [refusals.gathers_left(contract, left, chains.origins, facts)] if left else []


def _gathers(facts: Facts, chains: Chains) -> list[int]:
    """The all-gathers that start at an input of another kind than a parameter."""
    gathers = [row for target, rows in facts.by_target.items() if is_all_gather(target) for row in rows]
    origins = ((row, chains.origins[row]) for row in sorted(gathers))
    return [row for row, origin in origins if origin >= 0 and facts.input_kinds[origin] in _OTHERS]


def _needed(facts: Facts, chains: Chains) -> bytearray:
    """The forward rows of which the backward reads the value, or one that is made of the same input alone."""
    origins, flags, users = chains.origins, facts.flags, facts.users
    needed = bytearray(len(facts))
    for row in reversed(facts.forward):
        needed[row] = bool(flags[row] & Flag.FEEDS_BACKWARD) or any(
            needed[user] and origins[user] == origins[row] for user in users[row]
        )
    return needed


def origins_asked(rule: Rule, policy: Policy) -> frozenset[InputKind]:
    """The kinds of inputs that a rule's selector asks about."""
    names = [test.name for test in tests_of(policy, rule) if isinstance(test, Is)]
    return frozenset(ORIGINS[name] for name in names if name in ORIGINS)
