"""The diagnostics of planning: their codes and sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from attrs import evolve

from policylang.graph.facts import Facts
from policylang.language import diagnostics, syntax
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.lexer import words_of
from policylang.language.shown import counted, first_lines
from policylang.language.syntax import Policy, Rule, Undecided
from policylang.planning.capabilities import WHAT_FSDP_MEANS, Capabilities
from policylang.planning.plan import RuleOutcome
from policylang.planning.selection import no_match
from policylang.planning.selection.selectors import Selections
from policylang.planning.value_outcome import Decision, Why, outcome_of

MATCHES_NOTHING = "APL301"
NO_SUCH_BLOCKS = "APL302"
OVERRIDDEN = "APL303"
UNSAFE = "APL304"
EXPECTATION_FAILED = "APL305"
PATH_CANNOT = "APL306"
KEPT_BY_USER = "APL307"
ROUTING_KEPT = "APL308"
NO_EFFECT = "APL309"
MARKERS_LOST = "APL310"
NOTHING_TO_REWRITE = "APL311"
REWRITES_REFUSED = "APL312"
STAYS_ON_DEVICE = "APL313"
OFFLOADS_NOTHING = "APL316"
MARKERS_OUTRANKED = "APL317"
NARROWS_NOTHING = "APL339"
NOT_NARROWED = "APL710"
GATHERS_LEFT = "APL318"
NO_BLOCKS = "APL375"

_MOST_NAMES = 8
_NAMEABLE = re.compile(r"[A-Za-z_]\w*\.\w+", re.ASCII)


def matches_nothing(rule: Rule, selections: Selections, *, of_weights: bool = False) -> Diagnostic:
    """``of_weights``: of a rule about gathered weights in a graph that gathers none."""
    help = f"if that is intended, write `optional {rule.text}`"
    fixes = [*no_match.would_match(rule.selector, selections), diagnostics.prefixed(rule.span, "optional")]
    if of_weights:
        sharded = f"where they are, {WHAT_FSDP_MEANS} explains who gathers them"
        help = f"leave it out, or write it with `optional`, where no weights are sharded; {sharded}"
        fixes.append(diagnostics.removed(rule.span))
    found = diagnose(
        MATCHES_NOTHING,
        f"`{rule.text}` matches nothing in this graph",
        span=rule.selector.span,
        help=no_match.other_origin_hint(rule.selector, selections) + help,
        details=no_match.part_counts(rule.selector, selections),
        fixes=fixes,
    )
    missing = diagnostics.GATHERS_NOTHING if of_weights else no_match.missing_parts(rule.selector, selections)
    return evolve(found, cause=missing)


def overridden(policy: Policy, outcome: RuleOutcome, rules: Sequence[RuleOutcome]) -> Diagnostic:
    """A rule that later rules override on every match. ``rules``: the outcomes of all rules."""
    takers = [(policy.rules[index], count) for index, count in outcome.overridden_by.items()]
    taken = sum(outcome.overridden_by.values())
    which = _all_nodes(taken) if taken == len(outcome.matched) else f"{taken} of the {len(outcome.matched)} nodes"
    kept = f", and the model's own checkpoint has tagged {outcome.kept_by_user}" if outcome.kept_by_user else ""
    message = f"`{outcome.rule.text}` decides nothing: other rules override {which} it matches{kept}"
    help = "remove it, or move it below the rules that override it"
    related = tuple(diagnostics.Related(f"`{rule.text}` overrides {count}", rule.span) for rule, count in takers)
    fixes = [diagnostics.removed(outcome.rule.span), *moved_below(outcome, rules)]
    return diagnose(OVERRIDDEN, message, span=outcome.rule.span, help=help, related=related, fixes=fixes)


def moved_below(outcome: RuleOutcome, rules: Sequence[RuleOutcome]) -> Iterator[diagnostics.Fix]:
    """The fix that moves a rule below those that take its nodes over, where each of them has others left then."""
    takers = [(rules[index], count) for index, count in outcome.overridden_by.items()]
    span, last = outcome.rule.span, max((taker.rule.span for taker, _ in takers), key=lambda each: each.start)
    if outcome.kept_by_user or any(taker.rule.span.source != span.source for taker, _ in takers):
        return
    if all(len(taker.decided) > count and taker.rule.span.start > span.start for taker, count in takers):
        yield diagnostics.moved(span, last, f"move it below line {last.line}", behind=True)


def kept_by_user(outcome: RuleOutcome) -> Diagnostic:
    return diagnose(
        KEPT_BY_USER,
        f"`{outcome.rule.text}` decides nothing: the model's own checkpoint has tagged "
        f"{_all_nodes(outcome.kept_by_user)} it matches",
        span=outcome.rule.span,
        help=f"write `override {outcome.rule.text}` to change them",
        fixes=[diagnostics.prefixed(outcome.rule.span, "override")],
    )


def unsafe(rule: Rule | Undecided, rows: Sequence[int], reasons: Sequence[str], facts: Facts) -> Diagnostic:
    """``rule``: the rule or default that asks for the recomputation. ``rows`` and ``reasons`` in graph order."""
    text, help = rule.span.one_line, "save these values with a rule"
    fixes = [diagnostics.put_behind(rule.span, f"save {operators}")] if (operators := _operators(rows, facts)) else []
    if isinstance(rule, Rule):
        text, fixes = rule.text, [*fixes, diagnostics.prefixed(rule.span, "optional")]
        help = f"save these values with a later rule, or write `optional {text}` to have them saved"
    more = f", and {len(rows) - 1} more" if len(rows) > 1 else ""
    message = f"`{text}` cannot recompute `{facts.names[rows[0]]}`{more}: {reasons[0]}"
    return diagnose(UNSAFE, message, span=rule.span, help=help, details=reason_lines(rows, reasons, facts), fixes=fixes)


def _operators(rows: Sequence[int], facts: Facts) -> str:
    """The operators of some nodes, as a selector; empty where there are many, or one that a policy cannot name."""
    names = dict.fromkeys(".".join(facts.targets[row].split(".")[:2]) for row in rows)
    nameable = len(names) <= _MOST_NAMES and all(map(_NAMEABLE.fullmatch, names))
    return ", ".join(names) if nameable else ""


def reason_lines(rows: Sequence[int], reasons: Sequence[str], facts: Facts) -> tuple[str, ...]:
    return detail_lines(f"{node_and_place(facts, row)}: {reason}" for row, reason in zip(rows, reasons, strict=True))


def node_and_place(facts: Facts, row: int) -> str:
    place = f" in {facts.modules[row]}" if facts.modules[row] else ""
    return f"{facts.names[row]} ({facts.targets[row]}){place}"


def routing_kept(rule: Rule | None, rows: Sequence[int], policy: Policy, facts: Facts) -> Diagnostic:
    """``rows``: discrete choices that a rule or the default would have recomputed; in graph order."""
    recomputes = policy.undecided is not None and policy.undecided.fate == "recompute"
    asked = "`undecided -> recompute`" if recomputes else "the checkpoint"
    if rule is not None:
        asked = f"`{rule.text}`"
    operator = facts.targets[rows[0]].split(".")[1]
    return diagnose(
        ROUTING_KEPT,
        f"{asked} leaves {forward_values(len(rows))} saved that steer later operators, `{facts.names[rows[0]]}` first: "
        "recomputation could choose otherwise",
        span=None if rule is None else rule.span,
        help=f"write `recompute {operator}`{' after it' if rule else ''} if that cannot happen here",
        fixes=[] if rule is None else [diagnostics.put_behind(rule.span, f"recompute {operator}")],
        details=detail_lines(node_and_place(facts, row) for row in rows),
    )


def beyond_capabilities(
    policy: Policy, facts: Facts, capabilities: Capabilities, decisions: Sequence[Decision | None], rows: Sequence[int]
) -> Iterator[Diagnostic]:
    """Refuses what the path cannot carry out. ``rows``: values that the backward reads and no rule decides."""
    decided = {decision.rule for decision in decisions if decision is not None}
    for number, rule in enumerate(policy.rules):
        if rule.optional and number not in decided:
            continue
        leaves = rule.action.leaves and capabilities.undecided is None
        why = f"leaves values to PyTorch's partitioner, and {capabilities.name} has none"
        if asks := outcome_of(rule.action, rule.form).asks:
            why = f"asks for {asks}, which {capabilities.name} cannot do"
        if leaves or (asks and not capabilities.offloads):
            help = "save or recompute these values instead"
            yield diagnose(PATH_CANNOT, f"`{rule.text}` {why}", rule.span, help=help, fixes=_other_action(rule))
    if capabilities.undecided is not None:
        return
    undecided = [row for row in rows if (each := decisions[row]) is not None and each.why is Why.UNDECIDED]
    details = detail_lines(node_and_place(facts, row) for row in undecided)
    fates = ("undecided -> save", "undecided -> recompute")
    help = f"write `{fates[0]}` or `{fates[1]}`"
    if policy.undecided is not None and policy.undecided.fate == "auto":
        message = f"`undecided -> auto` leaves values to PyTorch's partitioner, and {capabilities.name} has none"
        yield diagnose(PATH_CANNOT, message, policy.undecided.span, help=help, write=fates, details=details)
    elif undecided:
        own = [rule.span for rule in policy.rules if policy.included_by(rule.span) is None]
        message = (
            f"no rule decides {forward_values(len(undecided))} that the backward reads, "
            f"and {capabilities.name} has no partitioner to leave them to"
        )
        fixes = [diagnostics.put_behind(own[-1], fate) for fate in fates] if own else []
        yield diagnose(PATH_CANNOT, message, help=help, fixes=fixes, details=details)


def _other_action(rule: Rule) -> Iterator[diagnostics.Fix]:
    """The fixes that write another action, without the budget that only offloading has."""
    words = words_of(rule.span.source, rule.span.start, rule.span.end)
    verb = next((word for word in words if word.type == "ACTION"), None)
    if verb is None:
        return
    for action in ("save", "recompute"):
        (fix,) = diagnostics.written(verb.span, [action], is_choice=True)
        budget = diagnostics.left_out(rule.tail).changes if rule.tail is not None else ()
        yield evolve(fix, changes=tuple(sorted((*fix.changes, *budget), key=lambda each: each.span.start)))


def cannot_edit(statement: syntax.Rewriting, capabilities: Capabilities) -> Diagnostic:
    if isinstance(statement, syntax.Chunk):
        message = f"`{statement.span.one_line}` cuts a graph, which {capabilities.name} cannot do"
        help = "compile the model with `policylang.backend`, or trace the step with `policylang.trace_step`"
        return diagnose(PATH_CANNOT, message, statement.span, help=f"{help}; in eager, compute the loss slice by slice")
    asks = f"asks for a rewrite of collectives, which {capabilities.name} cannot do"
    message = f"`{statement.span.one_line}` {asks}"
    return diagnose(PATH_CANNOT, message, statement.span, help=capabilities.elsewhere or None)


def cannot_order(statement: syntax.Bucket | syntax.Scheduling, capabilities: Capabilities) -> Diagnostic:
    asks = f"asks for an order of collectives, which {capabilities.name} cannot keep"
    help = _done_with_fsdp(statement) if capabilities.orders_weights else capabilities.elsewhere or None
    return diagnose(PATH_CANNOT, f"`{statement.span.one_line}` {asks}", statement.span, help=help)


def _done_with_fsdp(statement: syntax.Bucket | syntax.Scheduling) -> str:
    """The calls of FSDP2 that do in eager what a line asks for."""
    match statement:
        case syntax.Bucket():
            return "leave the line out: `fully_shard` gathers and scatters at once what it is called with"
        case syntax.Prefetch() | syntax.Overlap():
            return "FSDP2 gathers beside computation; `prefetch … N blocks ahead` sets how far ahead"
        case syntax.Delay():
            return "FSDP2 has no call for that: it scatters a block's gradients behind its backward; compile the model"
        case syntax.KeepOrder():
            return "leave the line out: FSDP2 gathers in the order in which the blocks run"
        case syntax.SchedulingLine():
            return "FSDP2 has no call for that; compile the model"
        case _:
            assert_never(statement)


def detail_lines(lines: Iterable[str]) -> tuple[str, ...]:
    return first_lines(tuple(lines), _MOST_NAMES)


def _all_nodes(count: int) -> str:
    return "the only node" if count == 1 else f"all {count:,} nodes"


def forward_values(count: int) -> str:
    return counted(count, "forward value")
