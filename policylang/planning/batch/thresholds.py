"""Warns of size thresholds that another batch can flip, so that ranks would run different collectives.

Under ``torch.compile`` a rank that meets a batch of another size compiles the same code again, alone: the others may
never see that size, so the plan cannot be compared. What a policy decides by names, modules or positions comes out the
same. What it decides by a size that follows the batch may not, and where a collective runs again with the value, this
rank runs it in its backward and the others do not.

Which values may flip follows from the bounds of the rules' selectors. Then the graph is planned twice: every such value
kept, and every such value recomputed. The more is kept, the less runs again, so what lies between runs collectives
between these two. If both run the same ones, no batch can hurt. Twice again for what is left to PyTorch's min-cut,
which may be kept, or recomputed unless it is costly; min-cut never repeats a collective of its own accord.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from policylang.graph.facts import Facts, Flag, GraphKind, mask_of
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Action, Policy
from policylang.language.walk import tests_of
from policylang.planning import refusals
from policylang.planning.batch.bounds import Bounds, size_tests
from policylang.planning.batch.sizes import BatchSizes
from policylang.planning.capabilities import Capabilities
from policylang.planning.decisions.decide import NO_RULE, UNDECIDED, Verdict, first_decisions, owners_of
from policylang.planning.decisions.routing import keep_routing
from policylang.planning.decisions.safety import Safety
from policylang.planning.liveness import backward_needs
from policylang.planning.selection.selectors import Selections
from policylang.planning.value_decision import Decision, Fate, Why, is_open

_COSTLY = Flag.COLLECTIVE | Flag.COMPUTE
_KEPT = Decision(Action.SAVE, None, Why.UNDECIDED)
_AGAIN = Decision(Action.RECOMPUTE, None, Why.UNDECIDED)


def flipping_thresholds(
    policy: Policy,
    facts: Facts,
    capabilities: Capabilities,
    selections: Selections,
    user_decisions: dict[int, Decision],
    undecided: Fate,
) -> list[Diagnostic]:
    """A warning for each rule that a batch of another size may flip, and another collective run again for it.

    Of joint graphs alone: a traced step has its sizes for good, and a checkpoint in eager decides block by block. No
    more than a look at the policy where it asks for no sizes; else linear.
    """
    if facts.kind is not GraphKind.JOINT or capabilities.recomputes_undecided or not _asks_for_sizes(policy):
        return []
    several = {name for name, group in facts.groups.items() if group.size > 1}
    forward = (row for row in facts.forward if facts.flags[row] & Flag.COLLECTIVE)
    collectives = mask_of((row for row in forward if facts.group_names[row] in several), len(facts))
    if not any(collectives):
        return []
    bounds = Bounds(selections, BatchSizes(facts))
    winners, by_rule = _flips(policy, facts, bounds, user_decisions, undecided)
    if not by_rule:
        return []
    cases = []
    for winner in winners:  # as the planner decides, but for what is moved to the host: that runs no collective
        decisions = first_decisions(policy, facts, Verdict((), winner), user_decisions, undecided, capabilities)
        keep_routing(policy, facts, decisions)
        Safety(policy, facts, capabilities, decisions).enforce()
        cases.append(decisions)
    runs = _first_again(facts, collectives, *cases)
    found = []
    for index, owners in sorted(by_rule.items()):
        hurt = [owner for owner in owners if runs[owner] >= 0]
        if hurt:
            rule = policy.rules[index]
            test = bounds.hanging_test(rule.selector, hurt[0])
            found.append(refusals.flipping_threshold(rule, test, [(owner, runs[owner]) for owner in hurt], facts))
    return found


def _asks_for_sizes(policy: Policy) -> bool:
    """Whether a rule, or a name that a rule stands for, does."""
    return any(any(size_tests(test)) for test in tests_of(policy, *policy.rules))


def _flips(
    policy: Policy, facts: Facts, bounds: Bounds, user_decisions: dict[int, Decision], undecided: Fate
) -> tuple[tuple[array[int], array[int]], dict[int, list[int]]]:
    """Who decides each value, by row of its owner as in :class:`Verdict`, where each size is such that the value is
    kept and where it is such that it is recomputed, if it can be; and by rule the owners that it may or may not decide,
    in graph order, if that matters."""
    keeping = array("i", [NO_RULE]) * len(facts)
    repeating = array("i", [NO_RULE]) * len(facts)
    open_rules: dict[int, list[int]] = {}  # owner to the rules that may decide it
    ranks = [_rank(rule.action) for rule in policy.rules]

    def rank(winner: int, row: int) -> int:
        if winner != NO_RULE:
            return ranks[winner]
        tagged = user_decisions.get(row)
        return _rank(UNDECIDED[undecided][0] if tagged is None else tagged.action)

    for index, rule in enumerate(policy.rules):
        bound = bounds.of(rule.selector)
        sure = mask_of(owners_of(facts, bound.sure), len(facts))
        for row in owners_of(facts, bound.possible):
            if row in user_decisions and not rule.override:
                continue
            if sure[row]:
                keeping[row] = repeating[row] = index
                open_rules.pop(row, None)
                continue
            open_rules.setdefault(row, []).append(index)
            if ranks[index] < rank(keeping[row], row):
                keeping[row] = index
            if ranks[index] > rank(repeating[row], row):
                repeating[row] = index
    by_rule: dict[int, list[int]] = {}
    for row in sorted(open_rules):
        if rank(keeping[row], row) != rank(repeating[row], row):
            for index in open_rules[row]:
                by_rule.setdefault(index, []).append(row)
    return (keeping, repeating), by_rule


def _rank(action: Action | None) -> int:
    """How much runs again under an action: nothing, what min-cut says, or the value."""
    if action is None or action is Action.LEAVE:
        return 1
    return 2 if action.recomputes else 0


def _first_again(
    facts: Facts, collectives: bytearray, keeping: list[Decision | None], repeating: list[Decision | None]
) -> Sequence[int]:
    """By row, the first collective that runs for it in the second case and not at all in the first; -1 without one."""
    found = array("i", [-1]) * len(facts)
    for costs_decide in (False, True):
        least = mask_of(_run_again(facts, keeping, costs_decide), len(facts))
        again = _run_again(facts, repeating, costs_decide)
        reached = array("i", [-1]) * len(facts)
        for row in again:
            if collectives[row] and not least[row]:
                reached[row] = row
                continue
            reached[row] = min((reached[read] for read in facts.inputs[row] if reached[read] >= 0), default=-1)
        for row in again:
            if found[row] < 0:
                found[row] = reached[row]
        if not any(map(is_open, keeping)) and not any(map(is_open, repeating)):
            break
    return found


def _run_again(facts: Facts, decisions: list[Decision | None], costs_decide: bool) -> Iterable[int]:
    """What is recomputed where min-cut keeps all that is left to it, or recomputes of it what is cheap."""
    needs = backward_needs(
        facts,
        [
            (_KEPT if not costs_decide or _is_costly(facts, row) else _AGAIN) if is_open(decision) else decision
            for row, decision in enumerate(decisions)
        ],
    )
    return needs.recomputed


def _is_costly(facts: Facts, row: int) -> bool:
    return bool((facts.flags[row] | facts.flags[facts.owners[row]]) & _COSTLY)
