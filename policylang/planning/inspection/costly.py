"""Rules that cost more than they need to, told before the step runs: blocks recomputed at once, one block where many
were meant, work that frees no memory. Each is found by a sweep; only what looks costly is planned another time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import evolve

from policylang.graph.facts import Facts, Flag, GraphKind
from policylang.language.diagnostics import Diagnostic, Fix, Span, TextChange, diagnose, is_error, put_behind, removed
from policylang.language.shown import counted, first_lines, format_quantity
from policylang.language.syntax import Action, BlockSet, Everything, InBlock, Is, Not, Policy, Rule, Where
from policylang.planning.capabilities import Capabilities
from policylang.planning.inspection.worth import SAVED, as_counted
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.plan import Plan, RuleOutcome
from policylang.planning.planner import plan as make_plan
from policylang.planning.value_outcome import Why, by_rule, recomputes, saves

SEVERAL_BLOCKS, ONE_BLOCK, FREES_NOTHING, SAVES_MORE = "APL701", "APL702", "APL703", "APL704"

_LOWER = 0.05
"""The share of the peak by which another one is worth a line."""
_WORK = 1e-3
"""The share of the forward's FLOPs below which recomputing costs nothing."""
_FREED = 0.05
"""The share of its values' bytes that a rule has to free."""
_MOST_LINES = 3


def costly_rules(plan: Plan, capabilities: Capabilities) -> Iterator[Diagnostic]:
    """A warning for each line of a policy that costs memory or work and need not; none of a plan with errors."""
    if plan.facts.kind not in (GraphKind.JOINT, GraphKind.FLAT) or any(map(is_error, plan.diagnostics)):
        return
    yield from _one_block(plan)
    yield from _several_blocks(plan, capabilities)
    yield from _frees_nothing(plan, capabilities)
    yield from _saves_more(plan, capabilities)


def _one_block(plan: Plan) -> Iterator[Diagnostic]:
    """A ``blocks`` glob that names lists of modules, and not the modules in them."""
    blocks, names = plan.policy.blocks, plan.block_names
    if blocks is None or any(name.rpartition(".")[2].isdigit() for name in names):
        return
    numbered: dict[int, set[str]] = {}
    for path, block in dict.fromkeys(zip(plan.facts.modules, plan.block_of, strict=True)):
        if block >= 0 and path.startswith(f"{names[block]}."):
            child = path[len(names[block]) + 1 :].partition(".")[0]
            if child.isdigit():
                numbered.setdefault(block, set()).add(child)
    lists = [block for block, found in numbered.items() if len(found) > 1 and not names[block][-1].isdigit()]
    if not lists or len(lists) < len(names):
        return
    span, many = blocks.span, sum(len(numbered[block]) for block in lists)
    end = span.end - span.text.endswith('"')
    text = f"{span.text[: end - span.start]}.*{span.text[end - span.start :]}"
    yield diagnose(
        ONE_BLOCK,
        f"`{span.one_line}` makes {counted(len(names), 'block')} of {many:,} numbered modules: `{names[lists[0]]}` is "
        "the list that holds them",
        span,
        help=f"write `{text}` for {many:,} blocks",
        fixes=[Fix(f"write `{text}`", (TextChange(Span(span.source, end, end), ".*"),))],
    )


_CROSSING = "save everything in block where crosses block"
_SAVE_CROSSING = Rule(
    Action.SAVE, Where(InBlock(Everything(), BlockSet("any"), outside=False), Is("crosses block")), optional=True
)


def _several_blocks(plan: Plan, capabilities: Capabilities) -> Iterator[Diagnostic]:
    """The line that recomputes what blocks hand to each other, so that the backward recomputes a block for the next."""
    if plan.checkpoints is not None or len(plan.block_names) < 2:
        return
    facts, decisions, policy, block_of = plan.facts, plan.decisions, plan.policy, plan.block_of
    mask, users = facts.forward_mask, facts.users
    crossing = [
        row
        for row in facts.forward
        if recomputes(decisions[row])
        and (block := block_of[row]) >= 0
        and any(block_of[user] != block and mask[user] for user in users[row])
    ]
    recomputed = [(rule, rows) for rule, rows in by_rule(crossing, decisions, policy) if rule is not None]
    asked = policy.undecided if any(_undecided(plan, row) for row in crossing) else None
    line = recomputed[-1][0] if recomputed else asked
    if line is None:
        return
    at = _place(line, plan) + 1 if isinstance(line, Rule) else len(policy.rules)
    other = _planned(plan, capabilities, (*policy.rules[:at], _SAVE_CROSSING, *policy.rules[at:]))
    peak, lower = plan.peak.bytes, other.peak.bytes
    if peak - lower > _LOWER * peak:
        yield diagnose(
            SEVERAL_BLOCKS,
            f"`{line.span.one_line}` recomputes what crosses blocks too, so the backward holds several blocks at once: "
            f"the peak is {format_quantity(peak, 'bytes')}, and {format_quantity(lower, 'bytes')} with what crosses "
            "blocks saved",
            line.span,
            help=f"write `{_CROSSING}` below it",
            fixes=[put_behind(line.span, _CROSSING)],
        )


def _undecided(plan: Plan, row: int) -> bool:
    decision = plan.decisions[row]
    return decision is not None and decision.why is Why.UNDECIDED


_NO_VIEWS = "recompute everything where is view"
_VIEWS = Rule(Action.RECOMPUTE, Where(Everything(), Is("is view")), optional=True)


def _frees_nothing(plan: Plan, capabilities: Capabilities) -> Iterator[Diagnostic]:
    """The rules that recompute work and free next to none of its memory, since saved views keep it."""
    facts, decisions = plan.facts, plan.decisions
    asked = [outcome for outcome in plan.rules if outcome.rule.action.recomputes and outcome.decided]
    if not asked:
        return
    roots, flags, feeds = facts.storage_roots, facts.flags, Flag.FEEDS_BACKWARD
    least = _WORK * sum(facts.flops[row] for row in facts.forward)
    views: dict[int, int] = {}  # memory, and the first saved value that looks into it
    for row in facts.forward:
        if flags[row] & feeds and saves(decisions[row]):
            views.setdefault(roots[row], row)
    for outcome in asked:
        rows = [row for owner in outcome.decided for row in _with_memory(facts, owner)]
        size = sum(facts.bytes[row] for row in rows)
        free = sum(facts.bytes[row] for row in rows if row not in views)
        if sum(facts.flops[row] for row in outcome.decided) > least and free < _FREED * size:
            yield from _weighed(outcome, plan, capabilities, size, least, [views[row] for row in rows if row in views])


def _with_memory(facts: Facts, owner: int) -> Sequence[int]:
    """The rows of an owner that hold its memory: the pieces of a tuple, or the owner."""
    pieces = [row for row in facts.followers.get(owner, ()) if facts.storage_roots[row] == row and facts.bytes[row]]
    return pieces or ([owner] if facts.storage_roots[owner] == owner else [])


def _weighed(
    outcome: RuleOutcome, plan: Plan, capabilities: Capabilities, size: int, least: float, views: Sequence[int]
) -> Iterator[Diagnostic]:
    rule, rules = outcome.rule, plan.policy.rules
    at = _place(rule, plan)
    without = _cost(_planned(plan, capabilities, (*rules[:at], *rules[at + 1 :])))
    flops, freed = _gained(plan, without)
    if flops <= least or -freed >= _FREED * size:
        return
    help, fixes = "remove the line", [removed(rule.span)]
    more, gone = _gained(_planned(plan, capabilities, (*rules[: at + 1], _VIEWS, *rules[at + 1 :])), without)
    if -gone > _FREED * size and more < 2 * flops:
        amounts = f"{format_quantity(-gone, 'bytes')} for {format_quantity(more, 'flops')}"
        help = f"write `{_NO_VIEWS}` below it, and the two free {amounts}; or remove the line"
        fixes = [put_behind(rule.span, _NO_VIEWS), *fixes]
    keeps = (
        f"{plan.facts.names[row]} ({plan.facts.targets[row]}): {_kept_by(plan, row)}" for row in dict.fromkeys(views)
    )
    yield diagnose(
        FREES_NOTHING,
        f"`{rule.text}` recomputes {format_quantity(flops, 'flops')} and frees "
        f"{format_quantity(max(-freed, 0), 'bytes')}: saved views keep its {format_quantity(size, 'bytes')}",
        rule.span,
        help=help,
        details=first_lines(tuple(keeps), _MOST_LINES),
        fixes=fixes,
    )


def _gained(plan: Plan, without: tuple[int, int]) -> tuple[int, int]:
    flops, saved = _cost(plan)
    return flops - without[0], saved - without[1]


def _kept_by(plan: Plan, row: int) -> str:
    rule, decision = plan.rule_of(row), plan.decisions[row]
    return f"saved by `{rule.text}`" if rule is not None else f"saved, {'' if decision is None else decision.reason}"


_READ = "recompute everything where not feeds backward"
_ONLY_READ = Rule(Action.RECOMPUTE, Where(Everything(), Not(Is("feeds backward"))), optional=True)


def _saves_more(plan: Plan, capabilities: Capabilities) -> Iterator[Diagnostic]:
    """The line that saves the most of what the backward reads none of, where all of it is more than it reads."""
    facts, decisions = plan.facts, plan.decisions
    roots, flags, feeds = facts.storage_roots, facts.flags, Flag.FEEDS_BACKWARD
    if plan.checkpoints is not None or not any(map(recomputes, decisions)):
        return
    read = {roots[row] for row in facts.forward if flags[row] & feeds}
    unread = [row for row in facts.forward if saves(decisions[row]) and roots[row] not in read]
    lines = by_rule(dict.fromkeys(roots[row] for row in unread), decisions, plan.policy)
    beside = {rule: sum(facts.bytes[row] for row in rows) for rule, rows in lines if rule is not None}
    whole = saved_and_recomputed(plan, [None if each is None else SAVED for each in decisions]) if beside else None
    if whole is None or (saved := _cost(plan)[1]) <= (1 + _LOWER) * whole.saved_bytes:
        return
    rule = max(beside, key=lambda each: beside[each])
    rules = plan.policy.rules
    flops, less = _cost(_planned(plan, capabilities, (*rules, _ONLY_READ)))
    has_fix = less < saved and rules[-1].span.source == rule.span.source
    amounts = f"{format_quantity(less, 'bytes')} and {format_quantity(flops, 'flops')} recomputed"
    yield diagnose(
        SAVES_MORE,
        f"`{rule.text}` saves what the backward never reads: the policy saves {format_quantity(saved, 'bytes')}, "
        f"and a step that recomputes nothing {format_quantity(whole.saved_bytes, 'bytes')}",
        rule.span,
        help=f"write `{_READ}` as the last rule, for {amounts}" if has_fix else "remove the line",
        fixes=[*([put_behind(rules[-1].span, _READ)] if has_fix else ()), removed(rule.span)],
    )


def _cost(plan: Plan) -> tuple[int, int]:
    """The recomputed FLOPs and the saved bytes."""
    cost = saved_and_recomputed(plan, as_counted(plan.decisions))
    return cost.recomputed_flops, cost.saved_bytes


def _place(rule: Rule, plan: Plan) -> int:
    """Of two that say the same, the one that is meant."""
    return next(place for place, each in enumerate(plan.policy.rules) if each is rule)


def _planned(plan: Plan, capabilities: Capabilities, rules: tuple[Rule, ...]) -> Plan:
    policy: Policy = evolve(plan.policy, rules=rules, expectations=())
    return make_plan(policy, plan.before, capabilities, device=None if plan.times is None else plan.times.device)
