"""The effect of each kind of statement on the snapshot: lines for a hover, and words for a hint."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, assert_never, get_args

from attrs import define, field
from lsprotocol import types

from policylang.audit.outcome import rewrite_reports
from policylang.editor.state import GraphState, State
from policylang.graph.blocks import BlockTable, Chains, blocks_of
from policylang.graph.facts import Facts, Phase
from policylang.language import shown, syntax
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Source
from policylang.language.resources import installed_version
from policylang.language.shown import Dimension, counted, format_quantity, printable
from policylang.language.syntax import Rule, Selector, Statement
from policylang.language.words import meaning
from policylang.planning.inspection.breakdown import Amounts, BlockGroup, Breakdown
from policylang.planning.inspection.communication import Communication, LineInOrder, bucket_statements
from policylang.planning.inspection.worth import MOST_RULES, Worth
from policylang.planning.plan import ExpectationOutcome, Plan, RuleOutcome
from policylang.planning.selection.no_match import part_counts
from policylang.planning.selection.selectors import Selections
from policylang.planning.value_outcome import Why
from policylang.report import rendering
from policylang.report.explain import LineExplanation
from policylang.report.plan_text import step_totals
from policylang.report.rendering import bytes_text, seconds_text
from policylang.report.report_text import rewrite_lines

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters that mark code in a line; no text has them."""
_CODE = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~])")
_MARKS = str.maketrans("", "", _OPEN + _CLOSE)


def code(text: str) -> str:
    """Marks text of the policy or the graph as code within a line."""
    return f"{_OPEN}{' '.join(text.translate(_MARKS).split())}{_CLOSE}"


def with_code(text: str) -> str:
    """Marks as code what a line has between backticks."""
    return re.sub(r"`([^`]*)`", lambda found: code(found[1]), text)


@define
class Article:
    """The text about one subject, in blocks."""

    blocks: list[tuple[Literal["text", "item", "policy"], str]] = field(factory=list)

    def say(self, *lines: str) -> Article:
        """A paragraph each; empty ones are left out."""
        self.blocks.extend(("text", line) for line in lines if line)
        return self

    def items(self, lines: Iterable[str]) -> Article:
        """A list; empty lines are left out."""
        self.blocks.extend(("item", line) for line in lines if line)
        return self

    def policy(self, text: str) -> Article:
        if stripped := text.translate(_MARKS).replace("\r", "").strip("\n"):
            self.blocks.append(("policy", stripped))
        return self

    def follow(self, other: Article) -> Article:
        self.blocks.extend(other.blocks)
        return self

    def markdown(self) -> str:
        return self._joined(_markdown, lambda text: rendering.fenced(text, "apl"))

    def plain(self) -> str:
        return printable(self._joined(lambda line: line.translate(_MARKS), lambda text: text))

    def content(self, *, markdown: bool) -> types.MarkupContent:
        if markdown:
            return types.MarkupContent(types.MarkupKind.Markdown, self.markdown())
        return types.MarkupContent(types.MarkupKind.PlainText, self.plain())

    def _joined(self, line: Callable[[str], str], policy: Callable[[str], str]) -> str:
        shown: list[str] = []
        before = ""
        for kind, text in self.blocks:
            if shown:
                shown.append("\n" if kind == before == "item" else "\n\n")
            shown.append(policy(text) if kind == "policy" else f"{'- ' if kind == 'item' else ''}{line(text)}")
            before = kind
        return "".join(shown)


def _markdown(line: str) -> str:
    parts = _CODE.split(line)
    written = (
        rendering.code(part) if at % 2 else _MARKUP.sub(r"\\\1", printable(part)) for at, part in enumerate(parts)
    )
    return "".join(written)


MINUS = "\N{MINUS SIGN}"
BETWEEN = " · "


def signed(amount: float, dimension: Dimension) -> str:
    """``−1.9 GiB``, ``+8.2 TFLOP``; empty for what would be printed as nothing."""
    text = format_quantity(abs(amount), dimension)
    return "" if text.startswith("0 ") else f"{'+' if amount > 0 else MINUS}{text}"


def values(count: int) -> str:
    return counted(count, "value")


def in_short(parts: Iterable[str]) -> str:
    return BETWEEN.join(filter(None, parts))


def worth_parts(worth: Worth) -> list[str]:
    """The changes that a rule makes: bytes kept, FLOPs recomputed and, on a device, time."""
    found = [signed(worth.saved_bytes, "bytes"), signed(worth.recomputed_flops, "flops")]
    if worth.recomputed_seconds is not None:
        found.append(signed(worth.recomputed_seconds, "seconds"))
    return [each for each in found if each] or ["changes nothing"]


def totals(found: Breakdown) -> str:
    """``keeps 18.3 GiB · recomputes 24.2% · peak 41.1 GiB · 1.07 s``: the share is one of the forward's operations."""
    under, amounts = found.under, found.under.amounts
    return in_short(
        (
            f"keeps {bytes_text(amounts.saved_bytes)}",
            f"offloads {bytes_text(amounts.offloaded_bytes)}" if amounts.offloaded else "",
            recomputed_share(found),
            f"peak {bytes_text(under.peak.bytes)}",
            f"step {format_quantity(under.time.step, 'seconds')}" if under.time is not None else "",
        )
    )


def recomputed_share(found: Breakdown) -> str:
    """The recomputed share of the operations; in bytes where it has none. Empty where nothing is recomputed."""
    amounts = found.under.amounts
    if not amounts.recomputed:
        return ""
    if not found.forward_flops or not amounts.recomputed_flops:
        return f"recomputes {bytes_text(amounts.recomputed_bytes)}"
    return f"recomputes {format_quantity(amounts.recomputed_flops / found.forward_flops, 'fraction')}"


def amounts_text(amounts: Amounts) -> str:
    """``37 MiB saved, 260.3 MiB and 3.9 GFLOP recomputed, which takes 12 ms``."""
    said = []
    if amounts.saved:
        said.append(f"{bytes_text(amounts.saved_bytes)} saved")
    if amounts.offloaded:
        said.append(f"{bytes_text(amounts.offloaded_bytes)} offloaded")
    if amounts.recomputed:
        work = f" and {format_quantity(amounts.recomputed_flops, 'flops')}" if amounts.recomputed_flops else ""
        took = seconds_text(amounts.recomputed_seconds)
        said.append(f"{bytes_text(amounts.recomputed_bytes)}{work} recomputed{took and f', which takes {took}'}")
    return ", ".join(said)


def selections_of(state: State) -> Selections | None:
    """None without a snapshot, and while what the policy denotes is being worked out. Of a text with errors, what needs
    none of its names can be asked."""
    if state.graph is not None:
        return state.graph.selections if state.graph.knows("selections") else None
    return None if state.facts is None else _without_policy(state.facts, state.document.source)


def denoted(state: State, selector: Selector) -> tuple[Selections, list[int]] | None:
    """The nodes of a selector; None if no graph can be asked, and for one with unresolved words."""
    selections = selections_of(state)
    try:
        return None if selections is None else (selections, selections.rows(selector))
    except (TypeError, KeyError):
        return None


def part_lines(counts: Sequence[str]) -> list[str]:
    found = (line.partition(": ") for line in counts)
    return [f"{code(label)}: {with_code(rest)}" if rest else label for label, _, rest in found]


@lru_cache(maxsize=2)
def backward_counts(facts: Facts) -> Mapping[str, int]:
    """Operator in full to how many backward nodes call it."""
    phases, ops, targets = facts.phases, facts.ops, facts.targets
    backward = (row for row, phase in enumerate(phases) if phase == Phase.BACKWARD)
    return Counter(targets[row] for row in backward if ops[row] == "call_function")


def forget_snapshots() -> None:
    """Hold none of those that were asked about."""
    for cache in (backward_counts, _without_policy, _blocks_and_chains):
        cache.cache_clear()


@lru_cache(maxsize=2)
def _without_policy(facts: Facts, source: Source) -> Selections:
    """``source``: the text whose selectors are asked of; they are kept as long as these answers."""
    return Selections(facts, {}, *_blocks_and_chains(facts))


@lru_cache(maxsize=2)
def _blocks_and_chains(facts: Facts) -> tuple[BlockTable, Chains]:
    return blocks_of(facts), Chains(facts)


_MOST_NAMES = 4
_MOST_LINES = 12
_SAID = {"held": "holds", "failed": "does not hold", "deferred": "cannot be checked yet"}
_MOST_GROUPS = 6


def rule_index(graph: GraphState, rule: Rule) -> int | None:
    return graph.index.number(rule)


def worth_of(graph: GraphState, index: int) -> Worth | None:
    """None where it is not worked out: not yet, not for a rule that decides nothing, nor for all of very many."""
    return next((each for each in graph.worth if each.rule == index), None) if graph.knows("worth") else None


def rule_meaning(rule: Rule) -> Article:
    article = Article()
    said = meaning(rule.action.word.split()[0], "action")
    assert said is not None
    article.say(f"{said.text} The nodes are those of {code(rule.selector.span.one_line)}.")
    if rule.budget is not None:
        article.say(f"At most {shown.format_quantity(rule.budget.value, 'bytes')} on each rank; the rest is saved.")
    if rule.form is not None and (narrows := meaning("as", "limit")) is not None:
        article.say(narrows.text)
    for word, holds in (("optional", rule.optional), ("override", rule.override)):
        if holds and (modifier := meaning(word, "modifier")) is not None:
            article.say(modifier.text)
    return article


def rule_article(graph: GraphState, index: int) -> Article:
    """The decisions of a rule on the snapshot."""
    plan, outcome = graph.plan, graph.plan.rules[index]
    return rule_figures(graph, index).say(_nodes(plan, outcome)).items(_parts(graph, outcome))


def rule_figures(graph: GraphState, index: int) -> Article:
    """The figures of a rule, without names of nodes and parts of the selector."""
    plan, outcome = graph.plan, graph.plan.rules[index]
    counts = f"matches {shown.counted(len(outcome.matched), 'node')}, decides {len(outcome.decided):,}"
    article = Article().say(f"It {counts}.", *_amounts(graph, index))
    return article.items(taken_over(plan, outcome)).say(*worth_text(graph, index))


def taken_over(plan: Plan, outcome: RuleOutcome) -> Iterator[str]:
    """The later rules that decide nodes of this one, and what the user's own checkpoint keeps."""
    for other, count in outcome.overridden_by.items():
        rule = plan.policy.rules[other]
        own = rule.span.source == outcome.rule.span.source
        place = f"line {rule.span.line}" if own else shown.file_name(rule.source)
        yield f"{count:,} overridden by {place}: {code(rule.text)}"
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
    of = "Decided by this line and needed by the backward" if shares else "Decided and needed by the backward"
    yield f"{of}: {amounts_text(found.amounts)}."
    if len(found.groups) > 1 or found.groups[0].times > 1:
        said = [_in_blocks(each) for each in found.groups[:_MOST_GROUPS]]
        more = len(found.groups) - _MOST_GROUPS
        yield "By block: " + "; ".join((*said, *([f"and {more} more"] if more > 0 else ()))) + "."


def _in_blocks(found: BlockGroup) -> str:
    each = ", each" if found.times > 1 else ""
    return f"{amounts_text(found.amounts)} in {code(found.label) if found.blocks else found.label}{each}"


def worth_text(graph: GraphState, index: int) -> Iterator[str]:
    """The worth of a rule, with its price."""
    outcome = graph.plan.rules[index]
    if not graph.knows("worth"):
        if outcome.decided:
            yield "Its worth is still being computed."
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
    at = "" if price is None else f", at {shown.format_quantity(price, 'seconds' if timed else 'flops')} a GiB"
    yield f"Compared with the policy without it: {', '.join(said)}. It {worth.verdict}{at}."


def _or_none(amount: float, dimension: shown.Dimension) -> str:
    return signed(amount, dimension) or "0"


def _nodes(plan: Plan, outcome: RuleOutcome) -> str:
    facts = plan.facts
    names = [
        code(facts.names[row]) + (f" in {code(facts.modules[row])}" if facts.modules[row] else "")
        for row in outcome.decided[:_MOST_NAMES]
    ]
    return f"It decides {shown.listed(names, _MOST_NAMES, len(outcome.decided))}." if names else ""


def _parts(graph: GraphState, outcome: RuleOutcome) -> list[str]:
    """The matches of each part of its selector, where it has several, or matches nothing."""
    if not graph.knows("selections"):
        return []
    found = part_counts(outcome.rule.selector, graph.selections)
    return part_lines(found) if len(found) > 1 or not outcome.matched else []


def rule_hint(graph: GraphState, index: int) -> str:
    """``24 values · −1.9 GiB · +8.2 TFLOP``; without what it is worth until that is worked out."""
    outcome, worth = graph.plan.rules[index], worth_of(graph, index)
    kept = outcome.kept_by_user
    changes = worth_parts(worth) if worth is not None else ()
    by_user = f"{kept:,} kept by the user's checkpoint" if kept and not outcome.decided else ""
    return in_short((values(len(outcome.decided)), *changes, by_user))


def statement_article(state: State, statement: Statement) -> Article:
    """The effect of a statement, without the meaning of its words."""
    graph = state.graph
    if isinstance(statement, syntax.Restructuring):
        return Article() if graph is None else _rewrite(graph, statement)
    match statement:
        case syntax.Rule():
            index = None if graph is None else rule_index(graph, statement)
            return rule_meaning(statement) if graph is None or index is None else rule_article(graph, index)
        case syntax.Include():
            return _include(state, statement)
        case syntax.Requires():
            return Article().say(f"The version of policylang here is {installed_version()}.")
        case syntax.Device():
            return _device(state)
        case syntax.PolicyName():
            return Article() if graph is None else policy_article(graph)
        case syntax.Undecided():
            return Article() if graph is None else _undecided(graph)
        case syntax.Bucket() | syntax.SchedulingLine():
            line = None if graph is None else line_of(graph, statement)
            return Article() if graph is None or line is None else _scheduling(graph, *line)
        case syntax.ExpectTotal() | syntax.ExpectCount() | syntax.ExpectFate() | syntax.ExpectLossless():
            outcome = None if graph is None else outcome_of(graph, statement)
            return Article() if outcome is None else _expectation(statement, outcome)
        case syntax.Let() | syntax.Blocks() | syntax.PrefetchOffloaded() | syntax.Pipeline() | syntax.Balance():
            return Article()
        case _:
            assert_never(statement)


# --- the policy ---


def policy_article(graph: GraphState) -> Article:
    """The totals of ``policylang plan``."""
    plan = graph.plan
    forward = sum(decision is not None for decision in plan.decisions)
    blocks = shown.counted(len(plan.block_names), "block") if plan.block_names else "no blocks"
    article = Article().say(f"On {code(graph.name)}: {shown.counted(forward, 'forward value')}, {blocks}.")
    if not graph.knows("breakdown"):
        return article
    (_, *rows), notes = step_totals(graph.breakdown)
    for name, under, without in rows:
        other = "" if without == "-" else f"; {without} if nothing is recomputed"
        article.items([f"{name}: {under}{other}"] if (under, without) != ("-", "-") else ())
    return article.say(*(f"{note[0].upper()}{note[1:]}." for note in notes))


def policy_hint(graph: GraphState) -> str:
    return totals(graph.breakdown) if graph.knows("breakdown") else ""


# --- files ---


def _include(state: State, include: syntax.Include) -> Article:
    kinds = _kinds(state, include)
    article = Article().say(f"It brings {shown.joined(kinds)}." if kinds else "It brings nothing.")
    graph = state.graph
    if graph is not None:
        policy = graph.plan.policy
        mine = [f"{code(policy.rules[at].text)}: {rule_hint(graph, at)}" for at in rules_of(graph, include)]
        for each in policy.statements[len(policy.rules) :]:
            if policy.included_by(each.span) == include.span and (said := statement_hint(state, graph, each)):
                mine.append(f"{code(each.span.one_line)}: {with_code(said)}")
        article.items(shown.first_lines(mine, _MOST_LINES))
    return article


def statement_hint(state: State, graph: GraphState, statement: Statement) -> str:
    """The effect of a statement in a few words; empty for statements without one, and until it is known."""
    if isinstance(statement, syntax.Restructuring):
        return rewrite_hint(graph, statement)
    match statement:
        case syntax.Rule():
            index = rule_index(graph, statement)
            return "" if index is None else rule_hint(graph, index)
        case syntax.Let():
            if (count := picked(graph, statement)) is not None:
                return shown.counted(count, "collective")
            selections = selections_of(state)
            return "" if selections is None else shown.counted(len(selections.rows(statement.selector)), "node")
        case syntax.Blocks():
            return shown.counted(len(graph.plan.block_names), "block")
        case syntax.Undecided():
            return values(undecided(graph))
        case syntax.Include():
            return include_hint(state, graph, statement)
        case syntax.Bucket() | syntax.SchedulingLine():
            line = line_of(graph, statement)
            return "" if line is None else line_hint(*line)
        case syntax.ExpectTotal() | syntax.ExpectCount() | syntax.ExpectFate() | syntax.ExpectLossless():
            outcome = outcome_of(graph, statement)
            return "" if outcome is None else expectation_hint(statement, outcome)
        case syntax.PolicyName() | syntax.Requires() | syntax.Device() | syntax.PrefetchOffloaded() | syntax.Pipeline():
            return ""
        case syntax.Balance():
            return ""
        case _:
            assert_never(statement)


def rules_of(graph: GraphState, include: syntax.Include) -> list[int]:
    policy = graph.plan.policy
    return [at for at, rule in enumerate(policy.rules) if policy.included_by(rule.span) == include.span]


def include_hint(state: State, graph: GraphState, include: syntax.Include) -> str:
    """``2 rules · 291 values``; of a file without rules what else it has."""
    mine = rules_of(graph, include)
    if not mine:
        return in_short(_kinds(state, include))
    decided = sum(len(graph.plan.rules[at].decided) for at in mine)
    return in_short((shown.counted(len(mine), "rule"), values(decided)))


_KINDS: dict[type, str] = {
    syntax.Rule: "rule",
    syntax.Let: "name",
    **dict.fromkeys(get_args(syntax.Expectation), "expectation"),
    **dict.fromkeys((syntax.Bucket, *get_args(syntax.Scheduling)), "scheduling line"),
}


def _kinds(state: State, include: syntax.Include) -> list[str]:
    """``2 names``, ``1 rule``: the statements that an include of the document is replaced by."""
    brought = (each.statement for each in state.text.expansion.statements if each.include == include.span)
    found = Counter(_KINDS.get(type(each), "other statement") for each in brought)
    return [shown.counted(count, kind) for kind, count in found.items()]


def _device(state: State) -> Article:
    policy = state.text.loaded.policy
    named = policy.device if policy is not None else None
    times = state.graph.plan.times if state.graph is not None else None
    used = named if times is None else times.device
    article = Article()
    if used is not None:
        article.say(f"Times are those of {code(used.name)}.").items(_figures(used))
    if used is not None and named is not None and used.name != named.name:
        article.say("The settings name another device than the policy, and go before it.")
    return article


def _figures(device: DeviceProfile) -> Iterator[str]:
    for dtype, rate in device.compute.items():
        most = shown.format_quantity(max(most for _, most in rate.points), "flops")
        yield f"{code(dtype)} products: {most} a second at most"
    yield f"memory: {shown.format_quantity(max(most for _, most in device.bandwidth.points), 'bytes')} a second at most"
    if device.capacity is not None:
        yield f"capacity: {shown.format_quantity(device.capacity, 'bytes')}"
    if device.host_bandwidth is not None:
        yield f"to and from the host: {shown.format_quantity(device.host_bandwidth, 'bytes')} a second"


def _undecided(graph: GraphState) -> Article:
    plan = graph.plan
    return Article().say(f"No rule decides {values(undecided(graph))}: {code(f'undecided -> {plan.undecided}')}.")


def undecided(graph: GraphState) -> int:
    """The number of values that no rule decides, as reports count them: a tuple with its pieces is one."""
    owners = graph.plan.facts.owners
    decisions = enumerate(graph.plan.decisions)
    return sum(by is not None and by.why is Why.UNDECIDED and owners[row] == row for row, by in decisions)


# --- rewrites and order ---


def _rewrite(graph: GraphState, statement: syntax.Restructuring) -> Article:
    reports = rewrite_reports(graph.plan.policy, graph.plan.edits)
    found = zip(graph.plan.policy.rewrites, reports, strict=True)
    mine = next((report for each, report in found if each.span == statement.span), None)
    if mine is None:
        return Article()
    head, *rest = rewrite_lines(mine)
    what = head.rpartition(f"{mine.text}: ")[2]
    return Article().say(f"{what[0].upper()}{what[1:]}.").items(line.strip() for line in rest)


def rewrite_hint(graph: GraphState, statement: syntax.Restructuring) -> str:
    """``96 rewritten · 96 collectives fewer``."""
    at = graph.index.number(statement)
    if at is None:
        return ""
    mine = graph.plan.edits.of(at)
    if isinstance(statement, syntax.Chunk):
        return in_short((f"{mine.count:,} cut", shown.counted(len(mine.split_sums), "sum") + " split"))
    fewer = sum(edit.fewer_collectives for edit in mine.done)
    return in_short((f"{mine.count:,} rewritten", shown.counted(fewer, "collective") + " fewer"))


def _ordered(graph: GraphState) -> Communication | None:
    """The communication of the plan, with the worth of each line once that is known."""
    if graph.knows("order"):
        return graph.order
    return graph.breakdown.communication if graph.knows("breakdown") else None


def line_of(graph: GraphState, statement: Statement) -> tuple[Communication, LineInOrder] | None:
    """The effect of a scheduling line; None until that is known."""
    found, policy = _ordered(graph), graph.plan.policy
    if found is None:
        return None
    spans = [*(policy.rewrites[at].span for at in bucket_statements(policy)), *(e.span for e in policy.scheduling)]
    mine = (line for span, line in zip(spans, found.lines, strict=False) if span == statement.span)
    line = next(mine, None)
    return None if line is None else (found, line)


def _scheduling(graph: GraphState, found: Communication, line: LineInOrder) -> Article:
    """The explanation that ``policylang explain --rule`` prints, below its head."""
    lanes, article = found.planned.lanes, Article()
    said = str(LineExplanation(line, None if lanes is None else lanes.exposed)).partition("\n")[2]
    for each in said.split("\n"):
        text = with_code(each.strip())
        article.items([text]) if each.startswith(" ") else article.say(text)
    return article.say("" if graph.knows("order") or found.device is None else "Its worth is still being computed.")


def line_hint(found: Communication, line: LineInOrder) -> str:
    """``291 collectives · 289 moved into 64 · exposed −1.2 ms``."""
    lanes = found.planned.lanes
    into = f" into {sum(len(each.names) for each in line.buckets):,}" if line.buckets else ""
    change = ""
    if lanes is not None and line.exposed_without is not None:
        less = signed(lanes.exposed - line.exposed_without, "seconds")
        change = f"exposed {less}" if less else "exposes as much without"
    return in_short((shown.counted(len(line.matched), "collective"), f"{len(line.moved):,} moved{into}", change))


def picked(graph: GraphState, let: syntax.Let) -> int | None:
    """The number of collectives that a name selects, if only scheduling lines use it. None for other names, and until
    known."""
    policy = graph.plan.policy
    if let.name in graph.index.named_by_rules:
        return None
    for statement in (*policy.buckets, *policy.scheduling):
        if statement.selector == syntax.Reference(let.name) and (found := line_of(graph, statement)) is not None:
            return len(found[1].matched)
    return None


# --- expectations ---


def outcome_of(graph: GraphState, expectation: Statement) -> ExpectationOutcome | None:
    number = graph.index.number(expectation)
    return graph.plan.expectations[number] if number is not None and number < len(graph.plan.expectations) else None


def _expectation(statement: Statement, outcome: ExpectationOutcome) -> Article:
    margin = margin_text(statement, outcome)
    rest = f"Between that and the limit: {margin}." if margin else ""
    return Article().say(f"It {_SAID[outcome.status]}: {with_code(outcome.found)}.", rest)


def margin_text(statement: Statement, outcome: ExpectationOutcome) -> str:
    """The distance between figure and limit; may be empty."""
    if not outcome.margin:
        return ""
    dimension = statement.limit.dimension if isinstance(statement, syntax.ExpectTotal) else "number"
    return shown.format_quantity(abs(outcome.margin), dimension)


def expectation_hint(statement: Statement, outcome: ExpectationOutcome) -> str:
    """``held, 219.5 MiB in block 3 · 5 MiB to spare``."""
    margin = margin_text(statement, outcome) if isinstance(statement, syntax.ExpectTotal) else ""
    if margin:
        margin = f"{margin} to spare" if outcome.status == "held" else f"off by {margin}"
    return in_short((f"{outcome.status}, {outcome.found}", margin))
