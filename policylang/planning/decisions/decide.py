"""Applies the rules in order: of each forward value, the last rule that matches decides.

A decision belongs to a producer (``Facts.owners``): a ``getitem`` and the operator it reads, a ``wait_tensor`` and its
collective share one decision, whichever of them a rule denotes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from attrs import evolve, frozen

from policylang.graph.facts import Facts, Flag, mask_of, members
from policylang.language.diagnostics import Diagnostic
from policylang.language.selectors import walk
from policylang.language.syntax import Action, Operator, Policy, Rule
from policylang.operators.names import CHOICES, ORDERINGS, STEERED
from policylang.planning import refusals
from policylang.planning.capabilities import Capabilities
from policylang.planning.liveness import SavedForBackward, backward_needs
from policylang.planning.plan import RuleOutcome
from policylang.planning.schedule import AroundBlocks
from policylang.planning.selection.selectors import Selections, operator_matcher
from policylang.planning.value_outcome import Decision, Default, Why, by_rule, recomputes, saves

_ACTIONS = {action.value: action for action in Action if not action.leaves}


def user_decisions(facts: Facts) -> dict[int, Decision]:
    """Producer to the decision of the user's checkpoint, in graph order.

    At the border of two regions torch saves values: a value tagged for recomputation that a later region reads to
    recompute its own is the later region's input (``cleanup_recompute_tags`` of torch's partitioners). So does a
    region's result with a backward hook: FSDP's hook gathers the weights that computing the result again would need,
    and runs only when the gradient that depends on the result is there.
    """
    tags, owners, flags = facts.user_tags, facts.owners, facts.flags
    tagged: dict[int, Action] = {}  # a tag on any member of a group counts, the producer's first
    for row in facts.forward:
        if (tag := tags[row]) is not None and tag in _ACTIONS:
            tagged.setdefault(owners[row], _ACTIONS[tag])
    actions = dict(sorted(tagged.items()))
    kept = {action: Decision(action, None, Why.USER, "tagged by the user's checkpoint") for action in Action}
    border = Decision(Action.SAVE, None, Why.USER, "the user's next checkpoint region reads it")
    hooked = Decision(Action.SAVE, None, Why.USER, "a backward hook waits for its gradient")
    result: dict[int, Decision] = {}
    recomputed = {owner for owner, action in actions.items() if action.recomputes}
    on_border = _border(facts, recomputed)
    for owner, action in actions.items():
        if flags[owner] & (Flag.SYMBOLIC | Flag.SEED):
            continue  # sizes and seeds are saved, whatever the tags
        hooks = (row for row in (owner, *facts.followers.get(owner, ())) if flags[row] & Flag.BACKWARD_HOOK)
        if owner in on_border:
            result[owner] = border
        elif owner in recomputed and (hook := next(hooks, None)) is not None:
            is_read = any(owners[user] in recomputed for user in facts.users[hook])
            result[owner] = kept[action] if is_read else hooked
        else:
            result[owner] = kept[action]
    return result


def _border(facts: Facts, recomputed: Collection[int]) -> set[int]:
    """The recomputed producers that a later region reads."""
    owners, regions = facts.owners, facts.ac_regions
    border: set[int] = set()
    for row in facts.forward:
        region = regions[row]
        if region is None or owners[row] not in recomputed:
            continue
        for source in facts.inputs[row]:
            earlier = regions[source]
            if owners[source] in recomputed and earlier is not None and earlier < region:
                border.add(owners[source])
    return border


NO_RULE = -1
NOTHING_AROUND = AroundBlocks()


@frozen(eq=False)
class Verdict:
    """The rule that won each producer, before safety is checked."""

    matched: tuple[tuple[int, ...], ...]
    """By rule: the producers it denotes, in graph order."""
    winner: Sequence[int]
    """By node, for producers: the index of the rule that decides it, or ``NO_RULE``."""


def judge(
    policy: Policy,
    facts: Facts,
    selections: Selections,
    user_decisions: dict[int, Decision],
    around: AroundBlocks = NOTHING_AROUND,
) -> Verdict:
    """Evaluate every rule. Sizes, seeds and, without ``override``, values that the user tagged keep their decision. If
    blocks are checkpointed, rules range over nothing outside them."""
    winner = array("i", [NO_RULE]) * len(facts)
    owners, flags, fixed = facts.owners, facts.flags, Flag.SYMBOLIC | Flag.SEED
    matched: list[tuple[int, ...]] = []
    for index, rule in enumerate(policy.rules):
        denoted = selections.rows(rule.selector)
        if any(owners[row] != row for row in denoted):
            denoted = members(mask_of((owners[row] for row in denoted), len(facts)), facts.forward)
        if around.outside or around.detached:
            denoted = [row for row in denoted if row not in around.outside and row not in around.detached]
        matched.append(tuple(denoted))
        for row in denoted:
            if flags[row] & fixed or (not rule.override and row in user_decisions):
                continue
            winner[row] = index
    return Verdict(tuple(matched), winner)


def first_decisions(
    policy: Policy,
    facts: Facts,
    verdict: Verdict,
    user_decisions: dict[int, Decision],
    undecided: Default,
    capabilities: Capabilities,
    around: AroundBlocks = NOTHING_AROUND,
    slices: Mapping[int, Action | None] = MappingProxyType({}),
) -> list[Decision | None]:
    """The decision on every forward node if all is safe; None for the nodes no rule ranges over. ``slices``: what
    ``chunk`` makes for the backward, and its action."""
    left = _LEFT[capabilities.undecided]
    actions = [(*left, None) if rule.action.leaves else (rule.action, "", rule.form) for rule in policy.rules]
    by_rule = [Decision(action, index, Why.RULE, reason, form) for index, (action, reason, form) in enumerate(actions)]
    symbolic = Decision(Action.SAVE, None, Why.ALWAYS, "symbolic size")
    seed = Decision(Action.SAVE, None, Why.ALWAYS, "a seed: recomputed operators draw the same numbers from it")
    outside = Decision(Action.SAVE, None, Why.ALWAYS, "outside the blocks, where there is no checkpoint")
    block_output = Decision(Action.SAVE, None, Why.ALWAYS, "what a block returns: the next checkpoint holds it")
    received = Decision(Action.SAVE, None, Why.ALWAYS, "another stage reads it: both hold it until their backward")
    unsharded = Decision(Action.SAVE, None, Why.ALWAYS, "a gathered weight: the stage holds it for all microbatches")
    action, reason = UNDECIDED[undecided]
    rest = Decision(action, None, Why.UNDECIDED, f"no rule matches it{reason}")
    chunked = {action: Decision(action, None, Why.CHUNKED, _CHUNKED[action]) for action in _CHUNKED}
    decisions: list[Decision | None] = [None] * len(facts)
    owners, flags, winner = facts.owners, facts.flags, verdict.winner
    is_symbolic, is_seed = Flag.SYMBOLIC, Flag.SEED
    for row in facts.forward:
        owner = owners[row]
        if (flags[row] | flags[owner]) & is_symbolic:
            decisions[row] = symbolic
        elif flags[owner] & is_seed:
            decisions[row] = seed
        elif owner in around.received:
            decisions[row] = received
        elif owner in around.unsharded:
            decisions[row] = unsharded
        elif owner in around.outside:
            decisions[row] = outside
        elif owner in around.detached:
            decisions[row] = decisions[around.detached[owner]] or rest
        elif (
            owner in around.block_outputs
            and not (by_rule[winner[owner]] if winner[owner] != NO_RULE else rest).outcome.is_held
        ):
            decisions[row] = block_output
        elif winner[owner] != NO_RULE:
            decisions[row] = by_rule[winner[owner]]
        else:
            decisions[row] = user_decisions.get(owner, chunked.get(slices.get(owner), rest))
    return decisions


UNDECIDED: dict[Default, tuple[Action | None, str]] = {
    "save": (Action.SAVE, ""),
    "recompute": (Action.RECOMPUTE, ""),
    "auto": (None, "; the partitioner decides"),
    "as traced": (Action.SAVE, "; it stays as it was traced"),
    "as checkpointed": (Action.RECOMPUTE, "; the checkpoint recomputes it"),
}
"""The action on what no rule decides, and how the reason ends."""
_CHUNKED: dict[Action | None, str] = {
    Action.RECOMPUTE: "a slice: the backward computes it again, slice by slice",
    Action.SAVE: "a gradient of slices, which ran backward beside their forward",
}
_LEFT: dict[Default | None, tuple[Action | None, str]] = {
    "auto": (None, ""),
    "as traced": (Action.SAVE, "left as it was traced"),
    "as checkpointed": (Action.RECOMPUTE, "left to the checkpoint"),
    None: (None, ""),
}
"""The outcome of a value that no rule decides, by the path's default, and the reason."""


def rule_outcomes(policy: Policy, verdict: Verdict, user_decisions: dict[int, Decision]) -> tuple[RuleOutcome, ...]:
    """For each rule its matches, its decisions, and the rules that override it on the rest."""
    found: list[RuleOutcome] = []
    for index, (rule, matched) in enumerate(zip(policy.rules, verdict.matched, strict=True)):
        decided = tuple(row for row in matched if verdict.winner[row] == index)
        rest = [row for row in matched if verdict.winner[row] != index] if len(decided) < len(matched) else []
        taken = Counter(winner for row in rest if (winner := verdict.winner[row]) != NO_RULE)
        kept = sum(verdict.winner[row] == NO_RULE and row in user_decisions for row in rest)
        found.append(RuleOutcome(rule, matched, decided, dict(sorted(taken.items())), kept))
    return tuple(found)


_WHOLE = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})
REASON = "a discrete choice that steers later operators: recomputation could choose otherwise"


def routing_owners(facts: Facts) -> list[int]:
    """Discrete choices that steer a computation: token routing to experts, indices of a gather.

    The smallest difference between the forward and its recomputation, in a kernel that sums in another order, can flip
    such a choice, and then forward and backward go through different experts (pytorch#186572, torchtitan#1117). So they
    are saved on every path, whatever a sweeping rule decides; only a rule that names the operator (``recompute topk``)
    overrides that. Returns the producers of discrete choices that steer something in the forward, in graph order. Two
    sweeps."""
    choosing = [row for row in facts.forward if _operator(facts, row) in CHOICES]
    if not choosing:
        return []
    exact = bytearray(map(_is_whole, facts.dtypes))  # whole numbers computed of whole numbers alone
    chosen = frozenset(choosing)
    for row in facts.forward:
        if exact[row] and row not in chosen:
            exact[row] = all(exact[read] for read in facts.inputs[row])
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


def steering_values(facts: Facts) -> dict[int, str]:
    """Values that steer what others compute, or say where, and how; each may change a result by more than rounding: the
    numbers that a discrete choice is made from, back to the product that made them, and what is computed of whole
    numbers and constants alone. Two sweeps."""
    found: dict[int, str] = {}
    whole = bytearray(len(facts))
    for row, op in enumerate(facts.ops):
        if op == "call_function":
            whole[row] = all(whole[read] for read in facts.inputs[row])
            if whole[row]:
                found[row] = "it is computed of whole numbers and constants alone, as masks and positions are"
        else:
            whole[row] = op == "get_attr" or _is_whole(facts.dtypes[row])
    for owner in routing_owners(facts):
        pending = list(facts.inputs[owner][:1])
        most = max((facts.numel[row] for row in pending), default=0)
        while pending:
            row = pending.pop()
            if row in found or not facts.forward_mask[row] or facts.numel[row] > most:
                continue
            found[row] = f"{facts.names[owner]} chooses by it"
            pending.extend(() if facts.flops[row] else facts.inputs[row])
    return found


def _is_whole(dtype: str) -> bool:
    """True for whole numbers, tuples and sizes."""
    return not dtype or dtype in _WHOLE


def _operator(facts: Facts, row: int) -> str:
    return facts.targets[row].rpartition(".")[0]


def keep_routing(policy: Policy, facts: Facts, decisions: list[Decision | None]) -> tuple[int, ...]:
    """Save every discrete choice that would have been recomputed and that no rule names; returns their producers. What
    is left to PyTorch's min-cut stays with it."""
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
    """True if the text of a rule names one of these operators for recomputation, without a wildcard."""
    chosen = {facts.targets[row] for row in rows if _operator(facts, row) in CHOICES}
    return rule.action.recomputes and any(
        isinstance(part, Operator) and "*" not in part.name and any(map(operator_matcher(part), chosen))
        for part in walk(rule.selector)
    )


_SUSPECT = Flag.WRITES | Flag.EFFECTFUL | Flag.READS_MUTATED | Flag.RANDOM | Flag.DATA_DEPENDENT


def why_unsafe(facts: Facts, owner: int, capabilities: Capabilities) -> str | None:
    """The reason, as a sentence about the value, or None where recomputation gives the same value. A producer and its
    followers are judged together: they are recomputed together."""
    flags = facts.flags[owner]
    for follower in facts.followers.get(owner, ()):
        flags |= facts.flags[follower]
    if not flags & _SUSPECT:
        return None
    if flags & Flag.WRITES and not flags & Flag.REPEATABLE:
        if not facts.flags[owner] & Flag.WRITES:
            return "it is written to in place together with other values, and cannot be made again without them"
        return "it writes to one of its arguments, and recomputation would write twice"
    if flags & Flag.EFFECTFUL:
        return "it has an effect beyond its result, and recomputation would repeat it"
    if flags & Flag.DATA_DEPENDENT:
        return "it is a collective whose sizes come from data: ranks that disagree on recomputation wait for each other"
    if flags & Flag.READS_MUTATED:
        return "it reads memory that the graph changes, and recomputation would read other content"
    if flags & Flag.RANDOM and not capabilities.replays_random:
        return f"it draws random numbers, and {capabilities.name} cannot replay them"
    return None


class Safety:
    """Checks every value that is about to be recomputed; if recomputation would be wrong, saves the value or reports an
    error. Only values that the backward needs are looked at: a counter that no gradient depends on is never recomputed,
    whatever the policy."""

    def __init__(
        self,
        policy: Policy,
        facts: Facts,
        capabilities: Capabilities,
        decisions: list[Decision | None],
        unchanged: Collection[int] = (),
    ) -> None:
        self._policy = policy
        self._facts = facts
        self._capabilities = capabilities
        self._decisions = decisions
        self._unchanged = unchanged
        self._refused: dict[int, str] = {}  # producer → reason, last in the graph first

    def enforce(self) -> SavedForBackward:
        """Check all that the backward needs recomputed. Returns what the backward needs afterwards. Where a
        recomputation would be wrong, what an ``optional`` rule or the user's own checkpoint asked for is saved instead,
        the whole group of a producer at once; what another rule asked for is recorded for :meth:`diagnostics`. What
        gives its argument unchanged is no operator that a checkpoint could hold: where it is saved, its argument is
        asked for again."""
        facts, decisions = self._facts, self._decisions
        needs = backward_needs(facts, decisions, self._enforce_on)
        given = [facts.inputs[row][0] for row in self._unchanged if saves(decisions[row])]
        asked = [row for row in given if facts.forward_mask[row] and recomputes(decisions[row])]
        return backward_needs(facts, decisions, self._enforce_on, also=asked) if asked else needs

    def _enforce_on(self, row: int) -> None:
        facts, policy, decision = self._facts, self._policy, self._decisions[row]
        owner = facts.owners[row]
        if decision is None or owner in self._refused:
            return
        reason = why_unsafe(facts, owner, self._capabilities)
        if reason is None:
            return
        if decision.rule is None:  # nobody insists on the recomputation
            may_save = decision.why is Why.USER or policy.undecided is None or policy.undecided.fate == "auto"
        else:
            may_save = policy.rules[decision.rule].optional
        if not may_save:
            self._refused[owner] = reason
            return
        saved = evolve(decision, action=Action.SAVE, why=Why.UNSAFE, reason=reason)
        for member in (owner, *facts.followers.get(owner, ())):
            if not facts.has(member, Flag.SYMBOLIC):
                self._decisions[member] = saved

    def diagnostics(self) -> Iterator[Diagnostic]:
        """One error a rule, in the order of the rules, with all its values in graph order."""
        for rule, owners in by_rule(sorted(self._refused), self._decisions, self._policy):
            asking = rule or self._policy.undecided
            assert asking is not None
            yield refusals.unsafe(asking, owners, [self._refused[owner] for owner in owners], self._facts)
