"""What a rule decides in the snapshot, and what it is worth: the figures of ``policylang plan`` and ``explain``."""

from __future__ import annotations

from collections.abc import Iterator

from policylang.editor.explaining.amounts import amounts_text, in_short, signed, values, worth_parts
from policylang.editor.explaining.article import Article, code
from policylang.editor.explaining.on_snapshot import part_lines
from policylang.editor.state import GraphState
from policylang.language.syntax import Rule
from policylang.language.wording import Measured, counted, figure, file_name, listed
from policylang.language.words import meaning
from policylang.planning.inspection.breakdown import RuleInBlocks
from policylang.planning.inspection.explain import beginning_of
from policylang.planning.inspection.worth import MOST_RULES, Worth
from policylang.planning.plan import Plan, RuleOutcome
from policylang.planning.selection.no_match import part_counts

_MOST_NAMES = 4
_MOST_GROUPS = 6


def rule_index(graph: GraphState, rule: Rule) -> int | None:
    """Its place in the policy."""
    return graph.index.rules.get(beginning_of(rule.span))


def worth_of(graph: GraphState, index: int) -> Worth | None:
    """None where it is not worked out: not yet, not for a rule that decides nothing, nor for all of very many."""
    return next((each for each in graph.worth if each.rule == index), None) if graph.knows("worth") else None


def rule_meaning(rule: Rule) -> Article:
    """What a rule means, without a graph."""
    article = Article()
    said = meaning(rule.action.word, "action")
    assert said is not None
    article.say(f"{said.text} The nodes are those of {code(rule.selector.span.one_line)}.")
    if rule.budget is not None:
        article.say(f"At most {figure(rule.budget.value, 'bytes')} on each rank; the rest is saved.")
    for word, holds in (("optional", rule.optional), ("override", rule.override)):
        if holds and (modifier := meaning(word, "modifier")) is not None:
            article.say(modifier.text)
    return article


def rule_article(graph: GraphState, index: int) -> Article:
    """What it decides on the snapshot."""
    plan, outcome = graph.plan, graph.plan.rules[index]
    return rule_figures(graph, index).say(_nodes(plan, outcome)).items(_parts(graph, outcome))


def rule_figures(graph: GraphState, index: int) -> Article:
    """The same without the names of nodes and the parts of the selector."""
    plan, outcome = graph.plan, graph.plan.rules[index]
    article = Article().say(f"It {counts_text(outcome)}.", *_amounts(graph, index))
    return article.items(taken_over(plan, outcome)).say(*worth_text(graph, index))


def counts_text(outcome: RuleOutcome) -> str:
    """As ``policylang explain --rule`` says it."""
    return f"matches {counted(len(outcome.matched), 'node')}, decides {len(outcome.decided):,}"


def taken_over(plan: Plan, outcome: RuleOutcome) -> Iterator[str]:
    """Which later rules decide what it matches, and what the user's own checkpoint keeps."""
    for other, count in outcome.overridden_by.items():
        rule = plan.policy.rules[other]
        own = rule.span.source == outcome.rule.span.source
        place = f"line {rule.span.line}" if own else file_name(rule.source)
        yield f"{count:,} taken over by {place}: {code(rule.text)}"
    if outcome.kept_by_user:
        yield f"{outcome.kept_by_user:,} kept the tag of the user's own checkpoint"


def _amounts(graph: GraphState, index: int) -> Iterator[str]:
    if not graph.knows("amounts"):
        return
    outcome = graph.plan.rules[index]
    found = graph.amounts.get(outcome.rule.source)
    if found is None:
        if outcome.decided:
            yield "The backward needs none of what it decides."
        return
    shares = outcome.rule.source in graph.index.shared_lines
    of = "What the rules of this line decide, and the backward needs" if shares else "Of what it decides"
    yield f"{of}: {amounts_text(found.amounts)}."
    if len(found.groups) > 1 or found.groups[0].times > 1:
        said = [_in_blocks(each) for each in found.groups[:_MOST_GROUPS]]
        more = len(found.groups) - _MOST_GROUPS
        yield "By block: " + "; ".join((*said, *([f"and {more} more"] if more > 0 else ()))) + "."


def _in_blocks(found: RuleInBlocks) -> str:
    each = ", each" if found.times > 1 else ""
    return f"{amounts_text(found.amounts)} in {code(found.label) if found.blocks else found.label}{each}"


def worth_text(graph: GraphState, index: int) -> Iterator[str]:
    """Its margin and its price."""
    outcome = graph.plan.rules[index]
    if not graph.knows("worth"):
        if outcome.decided:
            yield "What it is worth is still being worked out."
        return
    worth = worth_of(graph, index)
    if worth is None:
        if outcome.decided:
            yield f"Its worth is not worked out: only that of the first {MOST_RULES} rules that decide something is."
        return
    timed = worth.recomputed_seconds is not None
    said = [
        f"saved {_or_none(worth.saved_bytes, 'bytes')}",
        f"recomputed {_or_none(worth.recomputed_flops, 'flops')}",
        *([f"its time {_or_none(worth.recomputed_seconds or 0.0, 'seconds')}"] if timed else []),
        f"peak {_or_none(worth.peak_bytes, 'bytes')}",
    ]
    price = worth.seconds_per_gib if timed else worth.flops_per_gib
    at = "" if price is None else f", at {figure(price, 'seconds' if timed else 'flops')} a GiB"
    yield f"Compared with the policy without it: {', '.join(said)}. It {worth.verdict}{at}."


def _or_none(amount: float, dimension: Measured) -> str:
    return signed(amount, dimension) or "0"


def _nodes(plan: Plan, outcome: RuleOutcome) -> str:
    facts = plan.facts
    names = [
        code(facts.names[row]) + (f" in {code(facts.modules[row])}" if facts.modules[row] else "")
        for row in outcome.decided[:_MOST_NAMES]
    ]
    return f"It decides {listed(names, _MOST_NAMES, len(outcome.decided))}." if names else ""


def _parts(graph: GraphState, outcome: RuleOutcome) -> list[str]:
    """What each part of its selector matches, where it has several, or matches nothing."""
    if not graph.knows("selections"):
        return []
    found = part_counts(outcome.rule.selector, graph.selections)
    return part_lines(found) if len(found) > 1 or not outcome.matched else []


def rule_hint(graph: GraphState, index: int) -> str:
    """``24 values · −1.9 GiB · +8.2 TFLOP``; without what it is worth until that is worked out."""
    outcome, worth = graph.plan.rules[index], worth_of(graph, index)
    kept = outcome.kept_by_user
    return in_short(
        (
            values(len(outcome.decided)),
            *(worth_parts(worth) if worth is not None else ()),
            f"{kept:,} kept by the user's checkpoint" if kept and not outcome.decided else "",
        )
    )
