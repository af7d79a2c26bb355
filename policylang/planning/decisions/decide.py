"""Applies the rules in order: of each forward value, the last rule that matches decides.

A decision lives on an owner (``Facts.owners``): a ``getitem`` and the operator it reads, a ``wait_tensor`` and its
collective are one decision, whichever of them a rule denotes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from attrs import frozen

from policylang.graph.facts import Facts, Flag, mask_of, members
from policylang.language.syntax import Action, Policy, Rule
from policylang.planning.block_graph import AroundBlocks
from policylang.planning.capabilities import Capabilities
from policylang.planning.plan import RuleOutcome
from policylang.planning.selection.selectors import Selections
from policylang.planning.value_decision import Decision, Fate, Why

NO_RULE = -1
NOTHING_AROUND = AroundBlocks()


@frozen(eq=False)
class Verdict:
    """Which rule won each owner, before safety is looked at."""

    matched: tuple[tuple[int, ...], ...]
    """By rule: the owners it denotes, in graph order."""
    winner: Sequence[int]
    """By row, for owners: the index of the rule that decides it, or ``NO_RULE``."""


def owners_of(facts: Facts, rows: list[int]) -> list[int]:
    """The owners of some rows, in graph order, each once."""
    owners = facts.owners
    if all(owners[row] == row for row in rows):
        return rows
    return members(mask_of((owners[row] for row in rows), len(facts)), facts.forward)


def judge(
    policy: Policy,
    facts: Facts,
    selections: Selections,
    user_decisions: dict[int, Decision],
    around: AroundBlocks = NOTHING_AROUND,
) -> Verdict:
    """Evaluate every rule. Sizes, seeds and, without ``override``, values that the user tagged keep what they have.
    Rules range over nothing that lies outside the blocks where those have checkpoints of their own."""
    winner = array("i", [NO_RULE]) * len(facts)
    flags, fixed = facts.flags, Flag.SYMBOLIC | Flag.SEED
    matched: list[tuple[int, ...]] = []
    for index, rule in enumerate(policy.rules):
        denoted = owners_of(facts, selections.rows(rule.selector))
        if around.outside or around.detached:
            denoted = [row for row in denoted if row not in around.outside and row not in around.detached]
        matched.append(tuple(denoted))
        for row in denoted:
            if flags[row] & fixed or row in around.handed_on or (not rule.override and row in user_decisions):
                continue
            winner[row] = index
    return Verdict(tuple(matched), winner)


def first_decisions(
    policy: Policy,
    facts: Facts,
    verdict: Verdict,
    user_decisions: dict[int, Decision],
    undecided: Fate,
    capabilities: Capabilities,
    around: AroundBlocks = NOTHING_AROUND,
) -> list[Decision | None]:
    """The decision on every forward row if all is safe; None for the rows no rule ranges over."""
    by_rule = [_by_rule(rule, index, capabilities) for index, rule in enumerate(policy.rules)]
    symbolic = Decision(Action.SAVE, None, Why.ALWAYS, "symbolic size")
    seed = Decision(Action.SAVE, None, Why.ALWAYS, "a seed: operators that run again draw from it what they drew")
    outside = Decision(Action.SAVE, None, Why.ALWAYS, "outside the blocks, where there is no checkpoint")
    handed_on = Decision(Action.SAVE, None, Why.ALWAYS, "what a block returns: the next checkpoint holds it")
    action, reason = UNDECIDED[undecided]
    rest = Decision(action, None, Why.UNDECIDED, f"no rule matches it{reason}")
    decisions: list[Decision | None] = [None] * len(facts)
    owners, flags, winner = facts.owners, facts.flags, verdict.winner
    is_symbolic, is_seed = Flag.SYMBOLIC, Flag.SEED
    for row in facts.forward:
        owner = owners[row]
        if (flags[row] | flags[owner]) & is_symbolic:
            decisions[row] = symbolic
        elif flags[owner] & is_seed:
            decisions[row] = seed
        elif owner in around.outside:
            decisions[row] = outside
        elif owner in around.detached:
            decisions[row] = decisions[around.detached[owner]] or rest
        elif owner in around.handed_on:
            decisions[row] = handed_on
        elif winner[owner] != NO_RULE:
            decisions[row] = by_rule[winner[owner]]
        else:
            decisions[row] = user_decisions.get(owner, rest)
    return decisions


UNDECIDED: dict[Fate, tuple[Action | None, str]] = {
    "save": (Action.SAVE, ""),
    "recompute": (Action.RECOMPUTE, ""),
    "auto": (None, "; the partitioner decides"),
    "as traced": (Action.SAVE, "; it stays as it was traced"),
    "as checkpointed": (Action.RECOMPUTE, "; the checkpoint recomputes it"),
}
"""The action on what no rule decides, and how the reason ends."""


def _by_rule(rule: Rule, index: int, capabilities: Capabilities) -> Decision:
    if rule.action is not Action.LEAVE:
        return Decision(rule.action, index, Why.RULE)
    if capabilities.keeps_undecided:
        return Decision(Action.SAVE, index, Why.RULE, "left as it was traced")
    if capabilities.recomputes_undecided:
        return Decision(Action.RECOMPUTE, index, Why.RULE, "left to the checkpoint")
    return Decision(None, index, Why.RULE)


def rule_outcomes(policy: Policy, verdict: Verdict, user_decisions: dict[int, Decision]) -> tuple[RuleOutcome, ...]:
    """For each rule what it matched, what it decided, and which rules took over the rest."""
    matches = enumerate(zip(policy.rules, verdict.matched, strict=True))
    return tuple(_rule_outcome(index, *match, verdict.winner, user_decisions) for index, match in matches)


def _rule_outcome(
    index: int, rule: Rule, matched: tuple[int, ...], winner: Sequence[int], user_decisions: dict[int, Decision]
) -> RuleOutcome:
    decided = tuple(row for row in matched if winner[row] == index)
    if len(decided) == len(matched):
        return RuleOutcome(rule, matched, matched, {}, 0)
    taken = Counter(winner[row] for row in matched if winner[row] not in (index, NO_RULE))
    kept = sum(winner[row] == NO_RULE and row in user_decisions for row in matched)
    return RuleOutcome(rule, matched, decided, dict(sorted(taken.items())), kept)
