"""The diagnostics of planning: their codes and sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from attrs import evolve

from policylang.graph.facts import Facts, InputKind, LostMarker
from policylang.language.diagnostics import (
    GATHERS_NOTHING,
    Diagnostic,
    Fix,
    Related,
    Severity,
    Span,
    diagnose,
    left_out,
    moved,
    prefixed,
    put_before,
    put_behind,
    removed,
    written,
)
from policylang.language.grammar import words_of
from policylang.language.shown import counted, first_lines, format_quantity
from policylang.language.syntax import (
    Blocks,
    Bucket,
    Delay,
    Expectation,
    KeepOrder,
    Overlap,
    Policy,
    Prefetch,
    Rewriting,
    Rule,
    Scheduling,
    Selector,
    Undecided,
)
from policylang.planning.capabilities import WHAT_FSDP_MEANS, Capabilities
from policylang.planning.plan import RuleOutcome
from policylang.planning.selection.no_match import (
    block_globs,
    glob_span,
    missing_parts,
    naming_blocks,
    other_origin_hint,
    part_counts,
    would_match,
)
from policylang.planning.selection.selectors import Selections
from policylang.planning.value_outcome import Decision

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
GATHERS_LEFT = "APL318"

_MOST_NAMES = 8
_NAMEABLE = re.compile(r"[A-Za-z_]\w*\.\w+", re.ASCII)
_OTHER_INPUTS = {InputKind.BUFFER: "buffer", InputKind.USER: "input"}


def matches_nothing(rule: Rule, selections: Selections, *, of_weights: bool = False) -> Diagnostic:
    """``of_weights``: of a rule about gathered weights in a graph that gathers none."""
    help = f"if that is as it should be, write `optional {rule.text}`"
    if of_weights:
        sharded = f"where they are, {WHAT_FSDP_MEANS} says who gathers them"
        help = f"leave it out, or write it with `optional`, where no weights are sharded; {sharded}"
    fixes = [*would_match(rule.selector, selections), prefixed(rule.span, "optional")]
    if of_weights:
        fixes.append(removed(rule.span))
    found = diagnose(
        MATCHES_NOTHING,
        f"`{rule.text}` matches nothing in this graph",
        span=rule.selector.span,
        help=other_origin_hint(rule.selector, selections) + help,
        details=part_counts(rule.selector, selections),
        fixes=fixes,
    )
    cause = GATHERS_NOTHING if of_weights else missing_parts(rule.selector, selections)
    return evolve(found, cause=cause)


def outside_checkpoints(nothing: Diagnostic) -> Diagnostic:
    """A rule matches nothing because all of its nodes lie outside the checkpoints."""
    why = "all of it lies outside the blocks, where an eager checkpoint decides nothing"
    return evolve(nothing, details=(*nothing.details, why))


def no_such_blocks(blocks: Blocks, facts: Facts) -> Diagnostic:
    return diagnose(
        NO_SUCH_BLOCKS,
        f"`{blocks.glob}` matches no module path of this graph, so there are no blocks",
        span=blocks.span,
        help=naming_blocks(facts, blocks.glob),
        fixes=written(glob_span(blocks.glob, blocks.span), block_globs(blocks.glob, facts), near=True),
    )


def no_blocks(rule: Rule, facts: Facts) -> Diagnostic:
    """The policy names no blocks, and the graph has none; ``rule``: the first that speaks of them."""
    found = diagnose(
        NO_SUCH_BLOCKS,
        "no blocks were found in this graph",
        span=rule.selector.span,
        help=naming_blocks(facts),
        fixes=[put_before(rule.span, f"blocks {glob}") for glob in block_globs("layers.*", facts)],
    )
    return evolve(found, cause=NO_SUCH_BLOCKS)


def overridden(policy: Policy, outcome: RuleOutcome, rules: Sequence[RuleOutcome]) -> Diagnostic:
    """A rule whose every match later rules took over. ``rules``: what became of all of them."""
    takers = [(policy.rules[index], count) for index, count in outcome.overridden_by.items()]
    taken = sum(outcome.overridden_by.values())
    which = _all_nodes(taken) if taken == len(outcome.matched) else f"{taken} of the {len(outcome.matched)} nodes"
    kept = f", and the model's own checkpoint has tagged {outcome.kept_by_user}" if outcome.kept_by_user else ""
    return diagnose(
        OVERRIDDEN,
        f"`{outcome.rule.text}` decides nothing: other rules take over {which} it matches{kept}",
        span=outcome.rule.span,
        help="remove it, or move it below the rules that take its nodes over",
        related=tuple(Related(f"`{rule.text}` takes over {count}", rule.span) for rule, count in takers),
        fixes=[removed(outcome.rule.span), *moved_below(outcome, rules)],
    )


def moved_below(outcome: RuleOutcome, rules: Sequence[RuleOutcome]) -> Iterator[Fix]:
    """The fix that moves a rule below those that take its nodes over, where each of them has others left then."""
    takers = [(rules[index], count) for index, count in outcome.overridden_by.items()]
    span, last = outcome.rule.span, max((taker.rule.span for taker, _ in takers), key=lambda each: each.start)
    if outcome.kept_by_user or any(taker.rule.span.source != span.source for taker, _ in takers):
        return
    if all(len(taker.decided) > count and taker.rule.span.start > span.start for taker, count in takers):
        yield moved(span, last, f"move it below line {last.line}", behind=True)


def kept_by_user(outcome: RuleOutcome) -> Diagnostic:
    return diagnose(
        KEPT_BY_USER,
        f"`{outcome.rule.text}` decides nothing: the model's own checkpoint has tagged "
        f"{_all_nodes(outcome.kept_by_user)} it matches",
        span=outcome.rule.span,
        help=f"write `override {outcome.rule.text}` to change them",
        fixes=[prefixed(outcome.rule.span, "override")],
    )


def no_effect(outcome: RuleOutcome, facts: Facts, keeper: tuple[int, int] | None) -> Diagnostic:
    """``keeper``: a value the rule decides and, where there is one, the saved value that is read in its place."""
    count = len(outcome.decided)
    if keeper is None:
        instead, help = "", "remove the rule, or say it of the values that the backward reads"
    else:
        value, saved = (facts.names[row] for row in keeper)
        instead = f": `{saved}`, which reads `{value}`, is saved in its place"
        help = f"let the values behind it be recomputed as well: `chain after` reaches from `{value}` to `{saved}`"
    return diagnose(
        NO_EFFECT,
        f"`{outcome.rule.text}` decides {_values(count)} and changes nothing: the backward reads none of them{instead}",
        span=outcome.rule.span,
        help=help,
        fixes=[] if keeper is not None else [removed(outcome.rule.span)],
    )


def unsafe(rule: Rule | Undecided, rows: Sequence[int], reasons: Sequence[str], facts: Facts) -> Diagnostic:
    """``rule``: what asks for the recomputation. ``rows`` and ``reasons`` in graph order."""
    text, help = rule.span.one_line, "save these values with a rule"
    fixes = [put_behind(rule.span, f"save {operators}")] if (operators := _operators(rows, facts)) else []
    if isinstance(rule, Rule):
        text, fixes = rule.text, [*fixes, prefixed(rule.span, "optional")]
        help = f"save these values with a later rule, or write `optional {text}` to have them saved"
    more = f", and {len(rows) - 1} more" if len(rows) > 1 else ""
    return diagnose(
        UNSAFE,
        f"`{text}` cannot recompute `{facts.names[rows[0]]}`{more}: {reasons[0]}",
        span=rule.span,
        help=help,
        details=_reasons(rows, reasons, facts),
        fixes=fixes,
    )


def _operators(rows: Sequence[int], facts: Facts) -> str:
    """The operators of some rows, as a selector; empty where there are many, or one that a policy cannot name."""
    names = dict.fromkeys(".".join(facts.targets[row].split(".")[:2]) for row in rows)
    nameable = len(names) <= _MOST_NAMES and all(map(_NAMEABLE.fullmatch, names))
    return ", ".join(names) if nameable else ""


def _reasons(rows: Sequence[int], reasons: Sequence[str], facts: Facts) -> tuple[str, ...]:
    return _listed(f"{_where(facts, row)}: {reason}" for row, reason in zip(rows, reasons, strict=True))


def _where(facts: Facts, row: int) -> str:
    place = f" in {facts.modules[row]}" if facts.modules[row] else ""
    return f"{facts.names[row]} ({facts.targets[row]}){place}"


def routing_kept(rule: Rule | None, rows: Sequence[int], policy: Policy, facts: Facts) -> Diagnostic:
    """``rows``: discrete choices that a rule, or what no rule decides, would have recomputed; in graph order."""
    recomputes = policy.undecided is not None and policy.undecided.fate == "recompute"
    asked = "`undecided -> recompute`" if recomputes else "the checkpoint"
    if rule is not None:
        asked = f"`{rule.text}`"
    operator = facts.targets[rows[0]].split(".")[1]
    return diagnose(
        ROUTING_KEPT,
        f"{asked} leaves {_values(len(rows))} saved that choose what follows, `{facts.names[rows[0]]}` first: "
        "a second run could choose otherwise",
        span=None if rule is None else rule.span,
        help=f"write `recompute {operator}`{' after it' if rule else ''} if that cannot happen here",
        fixes=[] if rule is None else [put_behind(rule.span, f"recompute {operator}")],
        details=_listed(_where(facts, row) for row in rows),
    )


def markers_lost(span: Span, lost: Sequence[LostMarker]) -> Diagnostic:
    which = f"`{lost[0].name}` is" if len(lost) == 1 else f"`{lost[0].name}` and {len(lost) - 1:,} more are"
    return diagnose(
        MARKERS_LOST,
        f"`{span.text}` cannot tell all that the earlier partition saved: {which} lost in this graph",
        span=span,
        help="trace the first partition with the decompositions of the second compilation, or compile the second time "
        'with `inner="aot_eager"`',
        details=_listed(f"{marker.name}: {marker.reason}" for marker in lost),
    )


def markers_outranked(outcome: RuleOutcome, lost: Sequence[int], facts: Facts) -> Diagnostic:
    """``lost``: the owners of what was saved and would be recomputed, in graph order."""
    rule = outcome.rule
    return diagnose(
        MARKERS_OUTRANKED,
        f"`{rule.text}` does not repeat the earlier partition: tags of the model's own checkpoint, which that "
        f"partition has followed or overridden, would have {_values(len(lost))} of it recomputed",
        span=rule.span,
        help=f"write `override {rule.text}`",
        fixes=[prefixed(rule.span, "override")],
        details=_listed(facts.names[row] for row in lost),
    )


def gathers_left(contract: RuleOutcome, left: Sequence[int], origins: Sequence[int], facts: Facts) -> Diagnostic:
    """``left``: all-gathers of graph inputs that are no parameters."""
    kinds = {InputKind(facts.input_kinds[origins[row]]) for row in left}
    words = [word for kind, word in _OTHER_INPUTS.items() if kind in kinds]
    lines = [
        f"{facts.names[row]}: of the {_OTHER_INPUTS[InputKind(facts.input_kinds[origins[row]])]} "
        f"`{facts.input_names[origins[row]] or facts.names[origins[row]]}`, "
        f"{format_quantity(facts.bytes[row], 'bytes')}"
        for row in left
    ]
    gathers = "an all-gather of another input" if len(left) == 1 else f"{len(left):,} all-gathers of other inputs"
    return diagnose(
        GATHERS_LEFT,
        f"`{contract.rule.text}` is about parameters, and leaves {gathers}",
        span=contract.rule.span,
        help="to decide about them too, say so of "
        + " and of ".join(f"`chain through (all_gather where from {word})`" for word in words),
        details=_listed(lines),
    )


def stays_on_device(
    rule: Rule | None, rows: Sequence[int], decisions: Sequence[Decision | None], facts: Facts, *, moves_none: bool
) -> Diagnostic:
    """``rows``: in graph order; the reasons are those of their decisions."""
    text = "the model's own checkpoint" if rule is None else f"`{rule.text}`"
    reasons = [decision.reason for row in rows if (decision := decisions[row]) is not None]
    first = f"`{facts.names[rows[0]]}`" if len(rows) == 1 else f"`{facts.names[rows[0]]}` first"
    which = "offloads nothing: it leaves" if moves_none else "leaves"
    found = diagnose(
        OFFLOADS_NOTHING if moves_none else STAYS_ON_DEVICE,
        f"{text} {which} {_values(len(rows))} on the device, {first}: {reasons[0]}",
        span=None if rule is None else rule.span,
        details=_reasons(rows, reasons, facts),
    )
    return evolve(found, severity=Severity.NOTE) if rule is None or rule.optional else found


def cannot_decide(rule: Rule, capabilities: Capabilities) -> Diagnostic:
    """A rule offloads or leaves values on a path that cannot."""
    why = f"leaves values to PyTorch's partitioner, and {capabilities.name} has none"
    if rule.action.offloads:
        why = f"asks for offloading, which {capabilities.name} cannot do"
    help = "save or recompute these values instead"
    return diagnose(PATH_CANNOT, f"`{rule.text}` {why}", rule.span, help=help, fixes=_other_action(rule))


def _other_action(rule: Rule) -> Iterator[Fix]:
    """The fixes that say another action, without the budget that only offloading has."""
    words = words_of(rule.span.source, rule.span.start, rule.span.end)
    verb = next((word for word in words if word.type == "ACTION"), None)
    if verb is None:
        return
    for action in ("save", "recompute"):
        (fix,) = written(verb.span, [action], is_choice=True)
        budget = left_out(rule.budget.span).changes if rule.budget is not None else ()
        yield evolve(fix, changes=tuple(sorted((*fix.changes, *budget), key=lambda each: each.span.start)))


def cannot_edit(statement: Rewriting, capabilities: Capabilities) -> Diagnostic:
    asks = f"asks for a rewrite of collectives, which {capabilities.name} cannot do"
    return diagnose(PATH_CANNOT, f"`{statement.span.one_line}` {asks}", statement.span)


def cannot_order(statement: Bucket | Scheduling, capabilities: Capabilities) -> Diagnostic:
    asks = f"asks for an order of collectives, which {capabilities.name} cannot keep"
    help = _done_with_fsdp(statement) if capabilities.orders_weights else None
    return diagnose(PATH_CANNOT, f"`{statement.span.one_line}` {asks}", statement.span, help=help)


def _done_with_fsdp(statement: Bucket | Scheduling) -> str:
    """The calls of FSDP2 that do in eager what a line asks for."""
    match statement:
        case Bucket():
            return "leave the line out: `fully_shard` gathers and scatters at once what it is called with"
        case Prefetch() | Overlap():
            return "FSDP2 gathers beside what computes; `prefetch … N blocks ahead` says how far ahead"
        case Delay():
            return "FSDP2 has no call for that: it scatters a block's gradients behind its backward; compile the model"
        case KeepOrder():
            return "leave the line out: FSDP2 gathers in the order in which the blocks run"
        case _:
            assert_never(statement)


def cannot_be_auto(
    undecided: Undecided | None, rows: Sequence[int], facts: Facts, capabilities: Capabilities, policy: Policy
) -> Diagnostic:
    """``rows``: the values that would be left undecided, in graph order."""
    own = [rule.span for rule in policy.rules if policy.included_by(rule.span) is None]
    fates = ("undecided -> save", "undecided -> recompute")
    message = f"`undecided -> auto` leaves values to PyTorch's partitioner, and {capabilities.name} has none"
    if undecided is None:
        open_values = f"{_values(len(rows))} that the backward reads"
        message = f"no rule decides {open_values}, and {capabilities.name} has no partitioner to leave them to"
    return diagnose(
        PATH_CANNOT,
        message,
        span=None if undecided is None else undecided.span,
        help="write `undecided -> save` or `undecided -> recompute`",
        write=[] if undecided is None else fates,
        fixes=[put_behind(own[-1], fate) for fate in fates] if undecided is None and own else [],
        details=_listed(_where(facts, row) for row in rows),
    )


def _listed(lines: Iterable[str]) -> tuple[str, ...]:
    return first_lines(tuple(lines), _MOST_NAMES)


def _all_nodes(count: int) -> str:
    return "the only node" if count == 1 else f"all {count:,} nodes"


def _values(count: int) -> str:
    return counted(count, "forward value")


def expects_of_nothing(text: str, selector: Selector, details: tuple[str, ...]) -> Diagnostic:
    return diagnose(
        MATCHES_NOTHING,
        f"`{text}` is about nothing: `{selector.span.one_line}` matches nothing in this graph",
        span=selector.span,
        details=details,
    )


def expectation_failed(expectation: Expectation, text: str, found: str, details: tuple[str, ...]) -> Diagnostic:
    return diagnose(EXPECTATION_FAILED, f"`{text}` does not hold: {found}", span=expectation.span, details=details)
