"""Warnings, before the step runs, of rules that cost more than they need to: blocks recomputed at once, one block where
many were meant, work that frees no memory, communication twice, copies that computation waits for, lines without
effect, thresholds among values. Each is found by a sweep; only what looks costly is planned another time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import evolve

from policylang.graph.blocks import Chains
from policylang.graph.facts import Facts, Flag, GraphKind, mask_of
from policylang.language import diagnostics, syntax
from policylang.language.cancellation import collector_paused
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.selectors import rebuild, replaced, tests_of, with_lets
from policylang.language.shown import beside, counted, first_lines, format_quantity, listed, read_quantity
from policylang.operators.names import is_all_gather
from policylang.planning.capabilities import Capabilities
from policylang.planning.inspection.breakdown import copies_of_rules
from policylang.planning.inspection.worth import SAVED, as_counted, slowing_edits
from policylang.planning.liveness import BackwardCost, saved_and_recomputed
from policylang.planning.plan import Plan, RuleOutcome
from policylang.planning.planner import plan as make_plan
from policylang.planning.selection.selectors import OperatorPrices, amount_of, operator_matcher
from policylang.planning.value_outcome import Why, by_rule, is_open, offloads, recomputes, saves
from policylang.simulation.node_times import is_fused, operator_name
from policylang.simulation.streams import size_in_flight

SEVERAL_BLOCKS, ONE_BLOCK, FREES_NOTHING, SAVES_MORE = "APL701", "APL702", "APL703", "APL704"
COMMUNICATES_TWICE, EXPOSED_COPIES, NO_WORTH, NEAR_VALUES = "APL705", "APL706", "APL707", "APL708"
SOURCE_SAVED = "APL709"

_LOWER = 0.05  # the share of the peak by which another one is worth a line
_WORK = 1e-3  # the share of the forward's FLOPs below which recomputing costs nothing
_FREED = 0.05  # the share of its values' bytes that a rule has to free
_MOST_LINES = 3


@collector_paused()
def costly_lines(plan: Plan, capabilities: Capabilities) -> tuple[Diagnostic, ...]:
    """A warning for each line that costs memory, work or time and need not, with the include that brings it; none of a
    plan with errors."""
    found = (*slowing_edits(plan, capabilities), *costly_rules(plan, capabilities))
    return tuple(evolve(each, include=plan.policy.included_by(each.span)) for each in found)


def costly_rules(plan: Plan, capabilities: Capabilities) -> Iterator[Diagnostic]:
    """A warning for each line of a policy that costs memory or work and need not; none of a plan with errors."""
    if plan.facts.kind not in (GraphKind.JOINT, GraphKind.FLAT) or any(map(diagnostics.is_error, plan.diagnostics)):
        return
    yield from _one_block(plan)
    yield from _several_blocks(plan, capabilities)
    yield from _frees_nothing(plan, capabilities)
    saves_more = tuple(_saves_more(plan, capabilities))
    yield from saves_more
    needs = saved_and_recomputed(plan, as_counted(plan.decisions))
    yield from _communicates_twice(plan, capabilities, needs)
    yield from _exposed_copies(plan, capabilities)
    yield from _no_worth(plan, capabilities, needs)
    yield from _near_values(plan, capabilities, needs)
    if not saves_more:  # the values of both are the same ones
        yield from _source_saved(plan, capabilities, needs)


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
        fixes=[
            diagnostics.Fix(f"write `{text}`", (diagnostics.TextChange(diagnostics.Span(span.source, end, end), ".*"),))
        ],
    )


_CROSSING = "save everything in block where crosses block"
_IN_BLOCKS = syntax.InBlock(syntax.Everything(), syntax.BlockSet("any"), outside=False)
_SAVE_CROSSING = syntax.Rule(syntax.Action.SAVE, syntax.Where(_IN_BLOCKS, syntax.Is("crosses block")), optional=True)


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
    at = _place(line, plan) + 1 if isinstance(line, syntax.Rule) else len(policy.rules)
    other = _planned(plan, capabilities, (*policy.rules[:at], _SAVE_CROSSING, *policy.rules[at:]))
    peak, lower = plan.peak.bytes, other.peak.bytes
    if peak - lower > _LOWER * peak:
        message = (
            f"`{line.span.one_line}` recomputes what crosses blocks too, so the backward holds several blocks at once: "
            f"the peak is {format_quantity(peak, 'bytes')}, and {format_quantity(lower, 'bytes')} with what crosses "
            "blocks saved"
        )
        fixes = [diagnostics.put_behind(line.span, _CROSSING)]
        yield diagnose(SEVERAL_BLOCKS, message, line.span, help=f"write `{_CROSSING}` below it", fixes=fixes)


def _undecided(plan: Plan, row: int) -> bool:
    decision = plan.decisions[row]
    return decision is not None and decision.why is Why.UNDECIDED


_NO_VIEWS = "recompute everything where is view"
_VIEWS = syntax.Rule(syntax.Action.RECOMPUTE, syntax.Where(syntax.Everything(), syntax.Is("is view")), optional=True)


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
    help, fixes = "remove the line", [diagnostics.removed(rule.span)]
    more, gone = _gained(_planned(plan, capabilities, (*rules[: at + 1], _VIEWS, *rules[at + 1 :])), without)
    if -gone > _FREED * size and more < 2 * flops:
        amounts = f"{format_quantity(-gone, 'bytes')} for {format_quantity(more, 'flops')}"
        help = f"write `{_NO_VIEWS}` below it, and the two free {amounts}; or remove the line"
        fixes = [diagnostics.put_behind(rule.span, _NO_VIEWS), *fixes]
    rows = dict.fromkeys(views)
    keeps = (f"{plan.facts.names[row]} ({plan.facts.targets[row]}): {_kept_by(plan, row)}" for row in rows)
    message = (
        f"`{rule.text}` recomputes {format_quantity(flops, 'flops')} and frees "
        f"{format_quantity(max(-freed, 0), 'bytes')}: saved views keep its {format_quantity(size, 'bytes')}"
    )
    details = first_lines(tuple(keeps), _MOST_LINES)
    yield diagnose(FREES_NOTHING, message, rule.span, help=help, details=details, fixes=fixes)


def _gained(plan: Plan, without: tuple[int, int]) -> tuple[int, int]:
    flops, saved = _cost(plan)
    return flops - without[0], saved - without[1]


def _kept_by(plan: Plan, row: int) -> str:
    rule, decision = plan.rule_of(row), plan.decisions[row]
    return f"saved by `{rule.text}`" if rule is not None else f"saved, {'' if decision is None else decision.reason}"


_READ = "recompute everything where not feeds backward"
_NOT_FED = syntax.Where(syntax.Everything(), syntax.Not(syntax.Is("feeds backward")))
_ONLY_READ = syntax.Rule(syntax.Action.RECOMPUTE, _NOT_FED, optional=True)


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
        fixes=[*([diagnostics.put_behind(rules[-1].span, _READ)] if has_fix else ()), diagnostics.removed(rule.span)],
    )


def _communicates_twice(plan: Plan, capabilities: Capabilities, needs: BackwardCost) -> Iterator[Diagnostic]:
    """The lines that have collectives recomputed whose results are cheap to save. A rule that names the collective
    asks for that, and FSDP gathers weights for the backward by design."""
    facts, decisions, policy, times = plan.facts, plan.decisions, plan.policy, plan.shown_times
    by_lines = (Why.RULE, Why.UNDECIDED)
    asked = [row for row in _collectives(facts, needs) if (by := decisions[row]) is not None and by.why in by_lines]
    least = _WORK * sum(facts.bytes[row] for row in facts.forward if facts.flags[row] & Flag.COLLECTIVE)
    for rule, rows in by_rule(asked, decisions, policy):
        line, at = (rule, _place(rule, plan) + 1) if rule is not None else (policy.undecided, len(policy.rules))
        kept = Counter[str]()
        for row in rows:
            named = rule is not None and _names(policy, rule, facts.targets[row])
            kept[facts.targets[row]] += 0 if named else facts.bytes[row]
        targets = [target for target, size in reversed(kept.most_common()) if size]
        spared, text, peak = list[int](), "", 0
        while targets and not spared:
            text, saving = _saving(targets)
            other = _planned(plan, capabilities, (*policy.rules[:at], saving, *policy.rules[at:]))
            peak = other.peak.bytes
            if peak <= (1 + _LOWER) * plan.peak.bytes:
                theirs = saved_and_recomputed(other, as_counted(other.decisions))
                left = {other.facts.names[row] for row in _collectives(other.facts, theirs)}
                spared = [row for row in rows if facts.targets[row] in targets and facts.names[row] not in left]
            targets.pop()
        sent = sum(size_in_flight(facts, row) for row in spared)
        if line is None or sent <= least:
            continue
        seconds = format_quantity(0 if times is None else sum(times.seconds[row] for row in spared), "seconds")
        takes = "" if times is None else f" ({seconds} on {times.device.name})"
        sizes = ((row, format_quantity(facts.bytes[row], "bytes")) for row in spared)
        each = (f"{facts.names[row]} ({facts.targets[row]}): {size}" for row, size in sizes)
        before, after = (format_quantity(amount, "bytes") for amount in (plan.peak.bytes, peak))
        yield diagnose(
            COMMUNICATES_TWICE,
            f"`{line.span.one_line}` recomputes {counted(len(spared), 'collective')} in the backward: "
            f"{format_quantity(sent, 'bytes')} of communication{takes} in each step",
            line.span,
            help=f"write `{text}` below it: the peak is {after} with it, {before} without",
            details=first_lines(tuple(each), _MOST_LINES),
            fixes=[diagnostics.put_behind(line.span, text)],
        )


def _saving(targets: Sequence[str]) -> tuple[str, syntax.Rule]:
    """The rule that saves collectives by their operators, and its text."""
    words = [operator_name(target) for target in targets]
    selector: syntax.Selector = syntax.Union(tuple(syntax.Operator(None, word, None) for word in words))
    if not any(map(is_all_gather, targets)):
        return f"save {' or '.join(words)}", syntax.Rule(syntax.Action.SAVE, selector, optional=True)
    others = syntax.Where(selector, syntax.Not(syntax.Is("from parameter")))
    saving = syntax.Rule(syntax.Action.SAVE, others, optional=True)
    return f"save ({' or '.join(words)}) where not from parameter", saving


def _collectives(facts: Facts, needs: BackwardCost) -> list[int]:
    """The recomputed collectives, without gathers of parameters."""
    rows = [row for row in needs.recomputed if facts.flags[row] & Flag.COLLECTIVE]
    of_parameters = Chains(facts).from_parameter_mask if rows else ()
    return [row for row in rows if not of_parameters[row]]


def _names(policy: syntax.Policy, rule: syntax.Rule, target: str) -> bool:
    """True if a rule names an operator, by itself or by a name that stands for it."""
    found = (each for each in with_lets(policy, rule.selector) if isinstance(each, syntax.Operator))
    return any(operator_matcher(each)(target) for each in found if each.text != "*")


def _exposed_copies(plan: Plan, capabilities: Capabilities) -> Iterator[Diagnostic]:
    """The rules for whose copies to the host and back computation waits."""
    if plan.shown_times is None or plan.shown_step_time is None or not any(map(offloads, plan.decisions)):
        return
    step, rules = plan.shown_step_time.step, plan.policy.rules
    for index, copies in copies_of_rules(plan).items():
        seconds, moved = copies.exposed or 0.0, copies.out_bytes
        if index is None or seconds <= _LOWER * step:
            continue
        rule = rules[index]
        help, fixes = "save or recompute the values instead", [diagnostics.removed(rule.span)]
        for halvings in range(1, _HALVINGS + 1):
            budget = format_quantity(moved / 2**halvings, "bytes")
            limit = syntax.Quantity(read_quantity(*budget.split())[0], "bytes")
            other = _planned(plan, capabilities, (*rules[:index], evolve(rule, budget=limit), *rules[index + 1 :]))
            whole = 0.0 if other.step_time is None else other.step_time.step
            left = copies_of_rules(other).get(index)
            if left is None or (left.exposed or 0.0) <= _LOWER * whole:
                end = rule.tail or diagnostics.Span(rule.span.source, rule.span.end, rule.span.end)
                text = f"{'' if rule.tail else ' '}up to {budget} per rank"
                step_text = format_quantity(whole, "seconds")
                help = f"write `{text.strip()}` for a step of {step_text}: the last values then stay on the device"
                fixes = [diagnostics.Fix(f"write `{text.strip()}`", (diagnostics.TextChange(end, text),)), *fixes]
                break
        message = (
            f"`{rule.text}` moves {format_quantity(moved, 'bytes')}, and computation waits "
            f"{format_quantity(seconds, 'seconds')} of {format_quantity(step, 'seconds')} for the copies on "
            f"{plan.shown_times.device.name}"
        )
        yield diagnose(EXPOSED_COPIES, message, rule.span, help=help, fixes=fixes)


_HALVINGS = 5
_WORTH = 1e-4  # the share of the step below which the worth of a rule is nothing
_MEMORY = ("saved_bytes", "recomputed_bytes", "offloaded_bytes")


def _no_worth(plan: Plan, capabilities: Capabilities, needs: BackwardCost) -> Iterator[Diagnostic]:
    """The rules that decide a little memory and a little work, and without which neither changes noticeably. No rule
    that says what would hold without it, for readers; and none of a bundled policy, which is for many models."""
    facts, rules = plan.facts, plan.policy.rules
    memory, work = _WORTH * plan.peak.bytes, _WORTH * sum(facts.flops[row] for row in facts.forward)
    needed = mask_of((facts.owners[row] for row in needs.all), len(facts))
    for at, outcome in enumerate(plan.rules):
        rule, rows = outcome.rule, [row for row in outcome.decided if needed[row]]
        if not rows or rule.optional or rule.override or diagnostics.is_bundled(rule.span.source.name):
            continue
        size = sum(facts.bytes[each] for row in rows for each in _with_memory(facts, row))
        if size >= memory or sum(facts.flops[row] for row in rows) >= work:
            continue
        other = _planned(plan, capabilities, (*rules[:at], *rules[at + 1 :]))
        if any(is_open(other.decisions[row]) for row in rows) or not any(_differ(plan, other, row) for row in rows):
            continue
        theirs = saved_and_recomputed(other, as_counted(other.decisions))
        times = (plan.shown_step_time, other.shown_step_time)
        read = _read(facts, needs.recomputed) - _read(other.facts, theirs.recomputed)
        sizes = (getattr(needs, name) - getattr(theirs, name) for name in _MEMORY)
        changes = [plan.peak.bytes - other.peak.bytes, read, *sizes]
        slower = times[0].step / times[1].step - 1 if times[0] and times[1] else 0.0
        is_worth = max(map(abs, changes)) >= memory or abs(needs.recomputed_flops - theirs.recomputed_flops) >= work
        if is_worth or abs(slower) >= _WORTH:
            continue
        message = (
            f"`{rule.text}` decides {counted(len(rows), 'value')} of {format_quantity(size, 'bytes')}, and changes "
            f"memory and work by less than {_WORTH:.2%}"
        )
        yield diagnose(NO_WORTH, message, rule.span, help="remove the line", fixes=[diagnostics.removed(rule.span)])


def _read(facts: Facts, rows: Iterable[int]) -> int:
    """The bytes that operators read: the price of a reduction, whose result is small and has no FLOPs."""
    return sum(facts.bytes[each] for row in rows if not facts.flags[row] & Flag.VIEW for each in facts.inputs[row])


_NEAR = 0.05  # the share of a threshold within which values are near it
_GRADUAL = ("bytes", "numel", "flops", "time", "time_per_gib")


def _near_values(plan: Plan, capabilities: Capabilities, needs: BackwardCost) -> Iterator[Diagnostic]:
    """The thresholds between values that are nearly alike, and of which some are decided otherwise for it."""
    facts, policy = plan.facts, plan.policy
    all_tests = (each for rule in policy.rules for each in tests_of(policy, rule))
    tests = {id(each): each for each in all_tests if isinstance(each, syntax.Compare)}
    asked = [each for each in tests.values() if each.quantity in _GRADUAL and each.op not in ("==", "!=")]
    prices = None if plan.times is None else OperatorPrices(facts, plan.times)
    rows = [row for row in needs.all if facts.storage_roots[row] == row == facts.owners[row]]
    for test in asked:
        limit, amount = test.value.value, amount_of(test, facts, prices)
        amounts = {row: found for row in rows if (found := amount(row))}
        near = [row for row, found in amounts.items() if abs(found - limit) <= _NEAR * limit]
        if len({syntax.COMPARISONS[test.op](amounts[row], limit) for row in near}) < 2:
            continue
        sides = []
        for moved in (limit * (1 - 2 * _NEAR), limit * (1 + 2 * _NEAR)):
            other = make_plan(_with_limit(policy, test, moved), plan.before, capabilities, device=_device(plan))
            sides.append([row for row in near if _differ(plan, other, row)])
        if all(sides):
            yield _near(plan, test, sides, amounts)


def _near(plan: Plan, test: syntax.Compare, sides: Sequence[Sequence[int]], amounts: Mapping[int, float]) -> Diagnostic:
    limit, dimension, facts = test.value.value, test.value.dimension, plan.facts
    rows = sorted((row for side in sides for row in side), key=lambda row: amounts[row])
    named: dict[tuple[float, str], list[int]] = {}
    for row in rows:
        decision = plan.decisions[row]
        named.setdefault((amounts[row], "" if decision is None else decision.outcome.word), []).append(row)
    details = [
        f"{beside(amount, limit, dimension)}: {counted(len(mine), 'value')} {word}, "
        f"{listed([facts.names[row] for row in mine[:2]], 2, len(mine))}"
        for (amount, word), mine in named.items()
    ]
    below, above = (_gap(limit, amounts.values(), up=up) for up in (False, True))
    texts = [format_quantity(found, dimension).replace(",", "_") for found in (below, above)]
    return diagnose(
        NEAR_VALUES,
        f"`{test.span.one_line}` is between values that are nearly alike: {counted(len(rows), 'value')} within "
        f"{format_quantity(_NEAR, 'fraction')} of it, on both sides",
        test.span,
        help=f"write `{texts[0]}` or `{texts[1]}`, which no value is near",
        details=first_lines(details, 2 * _MOST_LINES),
        fixes=diagnostics.written(test.value.span, texts, is_choice=True),
    )


def _gap(limit: float, amounts: Iterable[float], *, up: bool) -> float:
    """The next threshold that no amount is near."""
    found = limit
    while near := [each for each in amounts if abs(each - found) <= _NEAR * found]:
        found = max(near) * (1 + 2 * _NEAR) if up else min(near) * (1 - 2 * _NEAR)
    return found


def _with_limit(policy: syntax.Policy, test: syntax.Compare, limit: float) -> syntax.Policy:
    """The policy with another limit in one of its tests."""

    other = evolve(test, value=evolve(test.value, value=limit))

    def change(old: syntax.Selector) -> syntax.Selector:
        return evolve(old, predicate=replaced(old.predicate, test, other)) if isinstance(old, syntax.Where) else old

    lets = {name: evolve(each, selector=rebuild(each.selector, change)) for name, each in policy.lets.items()}
    rules = tuple(evolve(each, selector=rebuild(each.selector, change)) for each in policy.rules)
    return evolve(policy, lets=lets, rules=rules, expectations=())


_NOT_CHEAP = (
    Flag.VIEW | Flag.RANDOM | Flag.WRITES | Flag.MULTI_OUTPUT | Flag.EFFECTFUL | Flag.COLLECTIVE | Flag.COMPUTE
) | (Flag.SYMBOLIC | Flag.READS_MUTATED | Flag.FORWARD_OUTPUT)


def _source_saved(plan: Plan, capabilities: Capabilities, needs: BackwardCost) -> Iterator[Diagnostic]:
    """The rules that save what one cheap operator makes of a value that is saved as well. A rule that saves everything
    in its blocks asks for a step without recomputation there."""
    facts, decisions, policy, roots = plan.facts, plan.decisions, plan.policy, plan.facts.storage_roots
    sources: dict[int, int] = {}
    for row in needs.saved if needs.recomputed else ():
        reads = [each for each in facts.inputs[row] if not facts.flags[each] & Flag.SYMBOLIC]
        is_cheap = is_fused(facts.targets[row]) and not facts.flops[row] and not facts.flags[row] & _NOT_CHEAP
        if is_cheap and len(reads) == 1 and roots[row] == row and _is_kept(plan, roots[reads[0]]):
            sources[row] = roots[reads[0]]
    for rule, rows in by_rule(sources, decisions, policy):
        size, targets = sum(facts.bytes[row] for row in rows), sorted({facts.targets[row] for row in rows})
        if rule is None or size < _LOWER * needs.saved_bytes:
            continue
        if not any(tests_of(policy, rule)) and not any(_names(policy, rule, target) for target in targets):
            continue
        words, at = dict.fromkeys(map(operator_name, targets)), _place(rule, plan) + 1
        text = f"recompute {' or '.join(words)}"
        operators = syntax.Union(tuple(syntax.Operator(None, word, None) for word in words))
        without = syntax.Rule(syntax.Action.RECOMPUTE, operators, optional=True)
        other = _planned(plan, capabilities, (*policy.rules[:at], without, *policy.rules[at:]))
        theirs = saved_and_recomputed(other, as_counted(other.decisions))
        freed, flops = needs.saved_bytes - theirs.saved_bytes, theirs.recomputed_flops - needs.recomputed_flops
        costs_work = flops > _WORK * sum(facts.flops[row] for row in facts.forward)
        if freed < _LOWER * needs.saved_bytes or costs_work or other.peak.bytes > plan.peak.bytes:
            continue
        more = theirs.recomputed_operators - needs.recomputed_operators
        seconds = _seconds(other, theirs.recomputed) - _seconds(plan, needs.recomputed)
        times, takes = plan.shown_times, format_quantity(seconds, "seconds")
        sizes = ((row, format_quantity(facts.bytes[row], "bytes"), facts.names[sources[row]]) for row in rows)
        each = (f"{facts.names[row]} ({facts.targets[row]}): {size}, from {source}" for row, size, source in sizes)
        yield diagnose(
            SOURCE_SAVED,
            f"`{rule.text}` saves {counted(len(rows), 'value')} of {format_quantity(size, 'bytes')}, each one cheap "
            "operator away from a value that is saved too",
            rule.span,
            help=f"write `{text}` below it: it frees {format_quantity(freed, 'bytes')} and recomputes "
            f"{counted(more, 'operator')}{'' if times is None else f' ({takes} on {times.device.name})'}",
            details=first_lines(tuple(each), _MOST_LINES),
            fixes=[diagnostics.put_behind(rule.span, text)],
        )


def _seconds(plan: Plan, rows: Iterable[int]) -> float:
    times = plan.shown_times
    return 0.0 if times is None else sum(times.seconds[row] for row in rows)


def _is_kept(plan: Plan, root: int) -> bool:
    """True if memory is there in the backward without any recomputation: saved, or an input of the graph."""
    return plan.facts.ops[root] != "call_function" or saves(plan.decisions[root])


def _cost(plan: Plan) -> tuple[int, int]:
    """The recomputed FLOPs and the saved bytes."""
    cost = saved_and_recomputed(plan, as_counted(plan.decisions))
    return cost.recomputed_flops, cost.saved_bytes


def _differ(one: Plan, other: Plan, row: int) -> bool:
    """True if two plans of a graph treat a value differently."""
    a, b = one.decisions[row], other.decisions[row]
    return a is not None and b is not None and a.outcome != b.outcome


def _place(rule: syntax.Rule, plan: Plan) -> int:
    """Compared by identity: two rules may be equal."""
    return next(place for place, each in enumerate(plan.policy.rules) if each is rule)


def _planned(plan: Plan, capabilities: Capabilities, rules: tuple[syntax.Rule, ...]) -> Plan:
    policy: syntax.Policy = evolve(plan.policy, rules=rules, expectations=())
    return make_plan(policy, plan.before, capabilities, device=_device(plan))


def _device(plan: Plan) -> DeviceProfile | None:
    return None if plan.times is None else plan.times.device
