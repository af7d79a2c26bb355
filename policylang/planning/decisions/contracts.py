"""What a contract about gathered weights leaves: gathers that start at a buffer or at an input of the user's.

Parallelizers shard these too (a table of rotary embeddings, a batch over sequence), and their gathers look alike. They
are no weights, so a line that says `from parameter` does not decide about them; who takes it for all of them is told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from policylang.graph.chains import Chains
from policylang.graph.facts import Facts, Flag, InputKind
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Is, Policy, Reference, Selector, Where
from policylang.language.walk import predicates, walk
from policylang.operators.names import is_all_gather
from policylang.planning import refusals
from policylang.planning.plan import RuleOutcome
from policylang.planning.selection.predicates import ORIGINS

_OTHERS = (InputKind.BUFFER, InputKind.USER)


def gathers_left(policy: Policy, facts: Facts, chains: Chains, rules: Sequence[RuleOutcome]) -> list[Diagnostic]:
    """A note at the first contract about parameters' gathers, with those of other inputs that no such rule covers.

    What is meant to stand whatever else is said, `override`, is a contract; a rule among others leaves what it leaves.
    """
    asking = _lets(policy)
    about = [(outcome, kinds) for outcome in rules if (kinds := _kinds(outcome.rule.selector, asking))]
    contract = next((outcome for outcome, kinds in about if InputKind.PARAMETER in kinds and _binds(outcome)), None)
    if contract is None:
        return []
    covered = {row for outcome, _ in about for row in outcome.matched}
    needed = _needed(facts, chains)
    left = [row for row in _gathers(facts, chains) if row not in covered and needed[row]]
    return [refusals.gathers_left(contract, left, chains.origins, facts)] if left else []


def _binds(outcome: RuleOutcome) -> bool:
    return outcome.rule.override and bool(outcome.matched)


def _gathers(facts: Facts, chains: Chains) -> list[int]:
    """The all-gathers that start at an input of another kind than a parameter."""
    found = []
    for target, rows in facts.by_target.items():
        if is_all_gather(target):
            origins = ((row, chains.origins[row]) for row in rows)
            found += [row for row, origin in origins if origin >= 0 and facts.input_kinds[origin] in _OTHERS]
    return sorted(found)


def _needed(facts: Facts, chains: Chains) -> bytearray:
    """The forward rows of which the backward reads the value, or one that is made of the same input alone."""
    origins, flags, users = chains.origins, facts.flags, facts.users
    needed = bytearray(len(facts))
    for row in reversed(facts.forward):
        needed[row] = bool(flags[row] & Flag.FEEDS_BACKWARD) or any(
            needed[user] and origins[user] == origins[row] for user in users[row]
        )
    return needed


def _lets(policy: Policy) -> dict[str, frozenset[InputKind]]:
    found: dict[str, frozenset[InputKind]] = {}
    for let in policy.lets.values():  # each refers to earlier ones only
        found[let.name] = _kinds(let.selector, found)
    return found


def _kinds(selector: Selector, lets: Mapping[str, frozenset[InputKind]]) -> frozenset[InputKind]:
    """The kinds of inputs that a selector asks about."""
    return frozenset(kind for part in walk(selector) for kind in _kinds_of(part, lets))


def _kinds_of(part: Selector, lets: Mapping[str, frozenset[InputKind]]) -> Collection[InputKind]:
    if isinstance(part, Reference):
        return lets.get(part.name, frozenset())
    if isinstance(part, Where):
        tests = predicates(part.predicate)
        return [ORIGINS[test.name] for test in tests if isinstance(test, Is) and test.name in ORIGINS]
    return ()
