"""Rules that are probably not meant as they are written, and rules about weights that FSDP gathers outside the graph.

``fully_shard`` gathers a block's weights in hooks around it, where neither an eager checkpoint nor a compiler sees an
operator; ``reshard_after_forward`` decides whether the backward gathers them again. A rule about such gathers alone has
nothing to match, and need not: FSDP has applied it or has not. The policy's decisions on them are read off a small
graph that gathers the same weights, and compared with FSDP's settings.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from attrs import evolve, field, frozen

from policylang.graph.blocks import BlockTable, Chains
from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, forward_users, mask_of
from policylang.graph.textual import GraphBuilder
from policylang.language import syntax
from policylang.language.diagnostics import Diagnostic, Related, Span, diagnose, prefixed, removed
from policylang.language.globs import PathGlob
from policylang.language.selectors import predicates, selectors_of, tests_of, with_lets
from policylang.language.shown import counted, first_lines, format_quantity, listed
from policylang.operators.names import GATHER, WAIT, is_all_gather
from policylang.planning import refusals
from policylang.planning.capabilities import WHAT_FSDP_MEANS
from policylang.planning.decisions.decide import NO_RULE, judge
from policylang.planning.liveness import SavedForBackward
from policylang.planning.plan import ExpectationOutcome, Plan, RuleOutcome
from policylang.planning.selection.selectors import ORIGINS, Selections, selections_for
from policylang.planning.value_outcome import Decision, Held, Why, outcome_of, saves

GATHERS_AGAIN = "APL658"
_OTHERS = {InputKind.BUFFER: "buffer", InputKind.USER: "input"}


def gathers_left(policy: syntax.Policy, facts: Facts, chains: Chains, rules: Sequence[RuleOutcome]) -> list[Diagnostic]:
    """A note at the first contract about parameters' gathers, with those of other inputs that no such rule covers. Only
    a rule with `override` is a contract; any other leaves what it leaves."""
    about = [(outcome, kinds) for outcome in rules if (kinds := origins_asked(outcome.rule, policy))]
    asking = (outcome for outcome, kinds in about if InputKind.PARAMETER in kinds and outcome.rule.override)
    # `where not from parameter` asks too, and is about none
    contract = next((each for each in asking if any(chains.from_parameter_mask[row] for row in each.matched)), None)
    if contract is None:
        return []
    covered = {row for outcome, _ in about for row in outcome.matched}
    origins, flags, users = chains.origins, facts.flags, facts.users
    # the forward nodes whose value the backward reads, or another value made of the same input alone
    needed = bytearray(len(facts))
    for row in reversed(facts.forward):
        passed_on = (user for user in users[row] if origins[user] == origins[row])
        needed[row] = bool(flags[row] & Flag.FEEDS_BACKWARD) or any(needed[user] for user in passed_on)
    gathers = sorted(row for target, rows in facts.by_target.items() if is_all_gather(target) for row in rows)
    others = [row for row in gathers if origins[row] >= 0 and facts.input_kinds[origins[row]] in _OTHERS]
    left = [row for row in others if row not in covered and needed[row]]
    if not left:
        return []
    asked = [InputKind(facts.input_kinds[origins[row]]) for row in left]
    lines = [
        f"{facts.names[row]}: of the {_OTHERS[kind]} `{facts.input_names[origins[row]] or facts.names[origins[row]]}`, "
        f"{format_quantity(facts.bytes[row], 'bytes')}"
        for row, kind in zip(left, asked, strict=True)
    ]
    chains_of = [f"`chain through (all_gather where from {word})`" for kind, word in _OTHERS.items() if kind in asked]
    leaves = "an all-gather of another input" if len(left) == 1 else f"{len(left):,} all-gathers of other inputs"
    message = f"`{contract.rule.text}` is about parameters, and leaves {leaves}"
    help = "to decide about them too, write rules for " + " and ".join(chains_of)
    details = refusals.detail_lines(lines)
    found = diagnose(refusals.GATHERS_LEFT, message, span=contract.rule.span, help=help, details=details)
    return [found]


def gathers_again(
    policy: syntax.Policy, rules: Sequence[RuleOutcome], held: Collection[int], chains: Chains
) -> Iterator[Diagnostic]:
    """An error for each line about gathered weights alone that does not leave them with the stage."""
    if not held:  # gathers are followed to their parameters for this alone
        return
    own = chains.from_parameter_mask
    for outcome in rules:
        rule = outcome.rule
        frees = not rule.optional and (rule.action.recomputes or rule.action.offloads)
        if not frees or not any(row in held for row in outcome.matched) or not all(own[row] for row in outcome.matched):
            continue
        message = f"`{rule.text}` frees gathered weights, and a stage gathers them once for all microbatches of a step"
        found = diagnose(GATHERS_AGAIN, message, rule.span, help="leave the line out: the pipeline frees them itself")
        yield evolve(found, include=policy.included_by(rule.span))


def origins_asked(rule: syntax.Rule, policy: syntax.Policy) -> frozenset[InputKind]:
    """The kinds of inputs that a rule's selector asks about."""
    names = [test.name for test in tests_of(policy, rule) if isinstance(test, syntax.Is)]
    return frozenset(ORIGINS[name] for name in names if name in ORIGINS)


def without_effect(
    rules: Sequence[RuleOutcome], facts: Facts, decisions: Sequence[Decision | None], needs: SavedForBackward
) -> list[Diagnostic]:
    """A warning for each rule that decides values of which the backward needs none. ``optional`` rules may do so."""
    if facts.kind not in (GraphKind.JOINT, GraphKind.FLAT):
        return []
    needed = mask_of((facts.owners[row] for row in needs.all), len(facts))
    found: list[Diagnostic] = []
    for outcome in rules:
        rule, decided = outcome.rule, outcome.decided
        if not decided or rule.optional or any(needed[owner] for owner in decided):
            continue
        keeper = _keeper(decided, facts, decisions)
        instead, help = "", "remove the rule, or select the values that the backward reads"
        if keeper is not None:
            value, saved = (facts.names[row] for row in keeper)
            instead = f": `{saved}`, which reads `{value}`, is saved in its place"
            help = f"let the values behind it be recomputed as well: `chain after` reaches from `{value}` to `{saved}`"
        values = refusals.forward_values(len(decided))
        nothing = f"decides {values} and changes nothing: the backward reads none of them"
        fixes = [] if keeper is not None else [removed(rule.span)]
        message = f"`{rule.text}` {nothing}{instead}"
        found.append(diagnose(refusals.NO_EFFECT, message, rule.span, help=help, fixes=fixes))
    return found


def _keeper(owners: Sequence[int], facts: Facts, decisions: Sequence[Decision | None]) -> tuple[int, int] | None:
    """The first of the values that a saved value reads, and that saved value: it is what the backward reads instead."""
    for owner in owners:
        group = (owner, *facts.followers.get(owner, ()))
        for user in (user for row in group for user in forward_users(facts, row)):
            if user not in group and saves(decisions[user]):
                return owner, user
    return None


_RECORDED = ("recorded saved", "recorded offloaded")


def markers_lost(policy: syntax.Policy, facts: Facts) -> list[Diagnostic]:
    """An error for a policy that asks for saved markers some of which are lost: the rest would pass for the whole."""
    lost = facts.lost_records
    asking = selectors_of(each for each in policy.statements if lost and asks_for_record(each, policy))
    return [
        diagnose(
            refusals.MARKERS_LOST,
            f"`{selector.span.text}` cannot find all that the earlier partition saved: `{lost[0].name}` "
            f"{'is' if len(lost) == 1 else f'and {len(lost) - 1:,} more are'} lost in this graph",
            span=selector.span,
            help="trace the first partition with the decompositions of the second compilation, or compile the second "
            'time with `inner="aot_eager"`',
            details=refusals.detail_lines(f"{marker.name}: {marker.reason}" for marker in lost),
        )
        for selector in islice(asking, 1)
    ]


def markers_outranked(
    policy: syntax.Policy,
    facts: Facts,
    rules: Sequence[RuleOutcome],
    decisions: Sequence[Decision | None],
    needs: SavedForBackward,
) -> list[Diagnostic]:
    """An error for a rule that is to keep what an earlier partition saved, where tags of the user's ``checkpoint`` have
    some of it recomputed. The nodes carry the tags that the first compilation obeyed into the second one, so the two do
    not conflict: the saved values already reflect the user's tags."""
    recomputed = frozenset(facts.owners[row] for row in needs.recomputed)
    found = []
    for outcome in rules:
        rule = outcome.rule
        if not outcome_of(rule.action).is_held or not asks_for_record(rule, policy):
            continue
        again = [(row, decisions[row]) for row in outcome.matched if row in recomputed]
        lost = [row for row, decision in again if decision is not None and decision.why is Why.USER]
        if lost:
            again_of = f"would have {refusals.forward_values(len(lost))} of it recomputed"
            found.append(
                diagnose(
                    refusals.MARKERS_OUTRANKED,
                    f"`{rule.text}` does not repeat the earlier partition: tags of the model's own checkpoint, which "
                    f"that partition has followed or overridden, {again_of}",
                    span=rule.span,
                    help=f"write `override {rule.text}`",
                    fixes=[prefixed(rule.span, "override")],
                    details=refusals.detail_lines(facts.names[row] for row in lost),
                )
            )
    return found


def asks_for_record(statement: syntax.Statement, policy: syntax.Policy) -> bool:
    return any(isinstance(test, syntax.Is) and test.name in _RECORDED for test in tests_of(policy, statement))


SOFTENED = "APL314"
_MUST = re.compile(r"\bmust_(save|recompute)\b")  # a keyword: no name is spelled so


def conflicts(plan: Plan) -> tuple[Diagnostic, ...]:
    """A warning for each ``must`` rule that loses some of its nodes to later rules without ``must``."""
    found, rules = [], plan.policy.rules
    for outcome in plan.rules:
        rule = outcome.rule
        if not outcome.decided or not _says_must(rule):
            continue
        takers: list[tuple[syntax.Rule, int]] = []
        for later, count in ((rules[index], count) for index, count in outcome.overridden_by.items()):
            wants = outcome_of(later.action)
            opposite = wants.is_held if rule.action.recomputes else wants.held is not Held.DEVICE
            if opposite and not _says_must(later):
                takers.append((later, count))
        if takers:
            lost = f"{sum(count for _, count in takers):,} of its {len(outcome.matched):,} nodes"
            message = f"`{rule.text}` loses {lost} to later rules that ask for the opposite"
            help = "move it below them, or write `must` there too"
            related = tuple(Related(f"`{later.text}` overrides {count:,}", later.span) for later, count in takers)
            fixes = refusals.moved_below(outcome, plan.rules)
            warning = diagnose(SOFTENED, message, rule.span, help=help, related=related, fixes=fixes)
            found.append(warning)
    return tuple(found)


def _says_must(rule: syntax.Rule) -> bool:
    """Only by this word: ``save`` means ``must_save`` too, and every ordinary exception is written with it."""
    return bool(_MUST.search(rule.text))


def telling_apart(policy: syntax.Policy, names: Sequence[str]) -> tuple[Diagnostic, ...]:
    """An error for every line that treats one of the blocks of these names otherwise than another. Of a single name it
    is asked whether a block of another number would be treated alike; without any, only the numbers of blocks count."""
    names = tuple(names) if len(names) > 1 else tuple(_neighbours(names))
    reasons = [(each.span, _reason(each, policy, names)) for each in policy.deciding]
    shared = "and separately compiled blocks share their compiled graphs"
    help = "compile the whole model with this policy, or give each kind of block a separate policy and backend"
    return tuple(
        diagnose(refusals.PATH_CANNOT, f"`{span.one_line}` {reason}, {shared}", span, help=help)
        for span, reason in reasons
        if reason is not None
    )


def _reason(statement: syntax.Statement, policy: syntax.Policy, names: Sequence[str]) -> str | None:
    for part in with_lets(policy, *selectors_of([statement])):
        if isinstance(part, syntax.InBlock) and part.which.kind != "any" and part.which.of == "block":
            return "asks which block this is"
        tests = predicates(part.predicate) if isinstance(part, syntax.Where) else ()
        globs = [each.pattern for each in tests if isinstance(each, syntax.Match) and each.property == "module"]
        for glob in map(PathGlob, [part.glob] if isinstance(part, syntax.InModule) else globs):
            ways = {name: glob.progress(name) for name in names}
            other = next((name for name in names if ways[name] != ways[names[0]]), None)
            if other is not None:
                return f"treats `{other}` otherwise than `{names[0]}`"
    return None


def _neighbours(names: Sequence[str]) -> Iterator[str]:
    """The name, and with another number in the place of its last one."""
    for name in names:
        yield name
        parts = name.split(".")
        last = max((at for at, part in enumerate(parts) if part.isdigit()), default=None)
        if last is not None:
            yield ".".join((*parts[:last], str(int(parts[last]) + 1), *parts[last + 1 :]))


DIFFERS, DONE_BY_FSDP = "APL414", "APL415"
_MOST_UNITS = 8
_WAYS = {True: "gathered again in the backward", False: "kept gathered until the backward"}


@frozen
class FsdpParameter:
    """A weight that FSDP gathers before a module runs."""

    module: str
    """The module's path."""
    name: str
    unit: str
    """The path of what ``fully_shard`` was called with; its class where no path is known."""
    gathered_again: bool
    """``reshard_after_forward``."""
    block: int = -1
    """The number of its block."""
    shape: tuple[int, ...] = ()
    bytes: int = 0
    """The whole weight."""
    ranks: int = 2
    """Over how many it is gathered."""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}" if self.module else self.name


@frozen
class FsdpParameters:
    """The weights of a block, or of all blocks that share a graph."""

    weights: tuple[FsdpParameter, ...] = ()
    blocks: tuple[str, ...] = ()
    """The paths of the model's blocks."""


@frozen
class Answered:
    """The statements of a policy that FSDP answers. ``rules``: the indices of those that are about its gathers."""

    rules: frozenset[int] = frozenset()
    expectations: Mapping[int, ExpectationOutcome] = field(factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()


def answered(
    policy: syntax.Policy, aside: FsdpParameters | None, unmatched: Iterable[int], selections: Selections
) -> Answered:
    """``unmatched``: the rules that match nothing in the graph. Of the expectations, those are asked that are about a
    set of nodes which is empty there."""
    if aside is None or not aside.weights:
        return Answered()
    graph = _Gathers.of(policy, aside)
    about = [index for index in unmatched if graph.is_about_weights(policy.rules[index].selector)]
    asked: dict[int, ExpectationOutcome] = {}
    found: list[Diagnostic] = []
    for index, each in enumerate(policy.expectations):
        is_empty = isinstance(each, syntax.ExpectFate) and not selections.rows(each.selector)
        if isinstance(each, syntax.ExpectFate) and is_empty and graph.is_about_weights(each.selector):
            asked[index], problems = _expected(each, graph)
            found += problems
    if about:
        found += _held(policy, about, graph)
    found = [evolve(each, include=policy.included_by(each.span)) for each in found]
    return Answered(frozenset(about), asked, tuple(found))


def gathers_matching(policy: syntax.Policy, selector: syntax.Selector, aside: FsdpParameters) -> list[FsdpParameter]:
    """The weights whose gathers a selector matches."""
    graph = _Gathers.of(policy, aside)
    return [graph.weights[row] for row in sorted(graph.rows(selector)) if row in graph.weights]


def _held(policy: syntax.Policy, about: Sequence[int], graph: _Gathers) -> list[Diagnostic]:
    """An error for each rule that FSDP does not follow, or a note that it does."""
    verdict = judge(policy, graph.facts, graph.selections, {})
    wrong: dict[int, list[FsdpParameter]] = {}
    right: list[FsdpParameter] = []
    for row, weight in graph.weights.items():
        winner = verdict.winner[row]
        if winner == NO_RULE or not any(row in verdict.matched[index] for index in about):
            continue
        action = policy.rules[winner].action
        if action.saves or action.recomputes:
            (right if action.recomputes == weight.gathered_again else wrong.setdefault(winner, [])).append(weight)
    if wrong or not right:
        rules = [(policy.rules[index], weights) for index, weights in sorted(wrong.items())]
        return [_differs(rule.text, rule.span, weights) for rule, weights in rules]
    ways = [way for way in (True, False) if any(weight.gathered_again is way for weight in right)]
    told = " and ".join(f"`reshard_after_forward={way}`" for way in ways)
    message = (
        f"`fully_shard` does this itself ({told}): "
        f"weights are {' or '.join(_WAYS[way] for way in ways)}, as the policy asks"
    )
    return [diagnose(DONE_BY_FSDP, message, policy.rules[about[0]].span, help=f"see {WHAT_FSDP_MEANS}")]


def _expected(expectation: syntax.ExpectFate, graph: _Gathers) -> tuple[ExpectationOutcome, list[Diagnostic]]:
    weights = [graph.weights[row] for row in graph.rows(expectation.selector) if row in graph.weights]
    fates = {True: "recomputed", False: "saved"}
    wanted = expectation.quantifier == "every"
    wrong = [weight for weight in weights if (fates[weight.gathered_again] == expectation.fate) is not wanted]
    span, status = expectation.span, f"by `fully_shard`, {_WAYS[weights[0].gathered_again]}"
    outcome = ExpectationOutcome(span.one_line, span.location, "failed" if wrong else "held", status)
    return outcome, [_differs(span.one_line, span, wrong)] if wrong else []


def _differs(text: str, span: Span, weights: Sequence[FsdpParameter]) -> Diagnostic:
    """``weights``: those that FSDP treats differently from a line."""
    wanted = not weights[0].gathered_again
    units = Counter(f"`{weight.unit}`" for weight in weights)
    other = "fsdp_reshard_never" if wanted else "fsdp_reshard_always"
    call = f"call `fully_shard(…, reshard_after_forward={wanted})`"
    return diagnose(
        DIFFERS,
        f"`{text}` wants the weights of {listed(list(units), 3)} {_WAYS[wanted]}, and `fully_shard` is set "
        f"otherwise: `reshard_after_forward={not wanted}`",
        span,
        help=f"{call}, or `include <{other}>` here; see {WHAT_FSDP_MEANS}",
        details=first_lines(tuple(f"{unit}: {counted(count, 'weight')}" for unit, count in units.items()), _MOST_UNITS),
    )


@frozen(eq=False)
class _Gathers:
    """A graph that gathers the weights, each in its module, and beside each something that is no weight."""

    facts: Facts
    selections: Selections
    weights: Mapping[int, FsdpParameter]
    """By the node of its gather."""
    others: frozenset[int]
    """Nodes that have nothing to do with a weight: what a rule about collectives, or about everything, matches too."""

    @classmethod
    def of(cls, policy: syntax.Policy, aside: FsdpParameters) -> _Gathers:
        graph = GraphBuilder()
        batch = graph.add("batch", "input", (), input_name="batch")
        owned: dict[int, FsdpParameter] = {}
        others: list[int] = []
        blocks: list[int] = []
        for number, weight in enumerate(aside.weights):
            parameter = graph.add(f"weight_{number}", "parameter", (), input_name=weight.path)
            for origin, kind in ((parameter, "gather"), (batch, "other")):
                size: dict[str, Any] = {"bytes": weight.bytes, "shape": weight.shape, "module": weight.module}
                gather = graph.add(f"{kind}_{number}", GATHER, (origin,), group=f"fsdp:{weight.ranks}", **size)
                wait = graph.add(f"{kind}_wait_{number}", WAIT, (gather,), **size)
                used = graph.add(f"{kind}_used_{number}", "aten.mm.default", (batch, wait), module=weight.module)
                graph.add(f"{kind}_backward_{number}", "aten.mm.default", (wait, used), backward=True)
                if kind == "gather":
                    owned[gather] = weight
                    others.append(used)
                else:
                    others += [gather, wait, used]
            blocks += [weight.block] * (len(graph.rows) - len(blocks))
        facts = graph.facts(GraphKind.JOINT)
        table = BlockTable(array("i", blocks), aside.blocks)
        return cls(facts, selections_for(policy, facts, table), owned, frozenset(others))

    def rows(self, selector: syntax.Selector) -> frozenset[int]:
        """The producers of the nodes that a selector denotes."""
        owners = self.facts.owners
        return frozenset(owners[row] for row in self.selections.rows(selector))

    def is_about_weights(self, selector: syntax.Selector) -> bool:
        """True if a selector denotes gathers of weights, and nothing else."""
        rows = self.rows(selector)
        return not rows.isdisjoint(self.weights) and rows.isdisjoint(self.others)
