"""``policylang explain``: nodes, rules, collectives, scheduling lines and words, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import fsum
from textwrap import fill, indent
from typing import Any

from attrs import asdict, frozen

from policylang.graph.facts import Phase
from policylang.language.diagnostics import Span
from policylang.language.globs import NameGlob, PathGlob, is_magic, path_glob_problem
from policylang.language.lexer import comment_above
from policylang.language.operators import prelude_group
from policylang.language.shown import counted, did_you_mean, format_quantity, listed, nearest
from policylang.language.words import Meaning
from policylang.planning.capabilities import Capabilities
from policylang.planning.expectations import NodeOutcomes
from policylang.planning.inspection import communication
from policylang.planning.inspection.worth import rules_on, weighed
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.plan import Plan
from policylang.planning.selection.no_match import nearest_paths, part_counts
from policylang.planning.selection.selectors import selections_for
from policylang.report.plan_json import line_data, run_data
from policylang.report.plan_text import BOUNDED_BY, proof_texts, said_of
from policylang.report.rendering import columns, seconds_text, table

_MOST_NAMES = 8


@frozen
class Explained:
    """``str()`` of it is the text of ``policylang explain``."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@frozen
class NodeExplanation(Explained):
    name: str
    operator: str
    module: str
    block: str | None
    """The path of its block, None outside every block."""
    shape: tuple[int, ...] | None
    dtype: str
    bytes: int
    flops: int
    uncounted: str
    """The operators whose work is not in :attr:`flops`."""
    seconds: float | None
    """The time of one run; None without a device."""
    device: str | None
    """The profile that the seconds are of."""
    shares: str | None
    """The node whose decision it shares, where that is another."""
    action: str
    """The action in the words of the language; ``auto`` where it is left to PyTorch's partitioner."""
    reason: str
    """The decider instead of a rule, if any."""
    fate: str | None
    """``saved``, ``recomputed`` or ``offloaded``; None where the backward needs no such value."""
    rules: tuple[communication.LineStanding, ...]

    def __str__(self) -> str:
        shape = f"{'×'.join(map(str, self.shape or ()))} {self.dtype}".strip()
        work = format_quantity(self.flops, "flops")
        if self.uncounted:
            work = f"{work} and {self.uncounted}, which no FLOP formula counts" if self.flops else "FLOPs not counted"
        block = "outside every block" if self.block is None else f"in block {self.block}"
        what = ", ".join(filter(None, (block, shape, format_quantity(self.bytes, "bytes"), work)))
        lines = [
            f"{self.name}: {self.operator}{f' in {self.module}' if self.module else ''}",
            f"  {what}{_on(self.device, self.seconds)}",
        ]
        if self.shares is not None:
            lines.append(f"  it shares the decision of {self.shares}, which the rules below are about")
        because = f": {self.reason}" if self.reason else ""
        lines.append(f"  {self.action}{because}; {self.fate or 'the backward does not need it'}")
        rows = [("line", "rule", "")]
        for rule in self.rules:
            standing = f"no match: {rule.why}" if rule.standing == "no match" else f"{rule.standing} {rule.why}"
            rows.append((rule.source, rule.text, standing.rstrip()))
        return "\n".join(lines) + ("\n\n" + table(rows, right=range(0), ends=(0,), wraps=True) if self.rules else "")


@frozen
class RuleExplanation(Explained):
    source: str
    text: str
    matched: int
    decided: int
    kept_by_user: int
    taken_over: tuple[communication.LineStanding, ...]
    """The rules that took matches over, in order."""
    parts: tuple[str, ...]
    names: tuple[str, ...]
    """The first nodes that it decides."""
    seconds: float | None = None
    """The time of one run of all nodes that it decides; None without a device."""
    device: str | None = None

    def __str__(self) -> str:
        decides = f"  matches {self.matched:,}, decides {self.decided:,}{_on(self.device, self.seconds)}"
        lines = [f"{self.source}: {self.text}", decides]
        lines += [f"  {line.why} {line.source}: {line.text}" for line in self.taken_over]
        if self.kept_by_user:
            lines.append(f"  {self.kept_by_user:,} kept the tag of the user's own checkpoint")
        lines += ["", "what each part of it matches", *(f"  {part}" for part in self.parts)]
        if self.names:
            lines += ["", "what it decides", f"  {listed(self.names, _MOST_NAMES, self.decided)}"]
        return "\n".join(lines)


@frozen
class NodesExplanation(Explained):
    """Several nodes, one row each."""

    asked: str
    nodes: tuple[NodeExplanation, ...]

    def __str__(self) -> str:
        timed = any(each.device is not None for each in self.nodes)
        rows: list[tuple[str, ...]] = [("node", "operator", "module", "", "by", *("time",)[:timed])]
        for node in self.nodes:
            time = (seconds_text(node.seconds),)[:timed]
            fate = node.fate or f"{node.action}, not needed"
            rows.append((node.name, node.operator, node.module, fate, node.reason, *time))
        head = f"{self.asked}: {counted(len(self.nodes), 'node')}"
        if timed:
            head += _on(self.nodes[0].device, fsum(each.seconds or 0.0 for each in self.nodes))
        return f"{head}\n\n" + table(rows, right=range(5, 6), ends=(2, 4), spare=(1,), readable=22)


def explain_node(
    plan: Plan, row: int, outcomes: NodeOutcomes | None = None, *, reasons: bool = True
) -> NodeExplanation:
    """``reasons``: why a rule does not match, too. Raises ``ValueError`` for a node that no rule ranges over."""
    facts = plan.facts
    found = rules_on(plan, row, reasons=reasons)
    decision = plan.decisions[row]
    assert decision is not None
    outcome = (outcomes or _outcomes(plan)).really(row)
    owner, block, times = facts.owners[row], plan.block_of[row], plan.shown_times
    reason = decision.reason
    if not reason and decision.rule is not None:
        reason = f"{plan.policy.rules[decision.rule].source} decided"
    return NodeExplanation(
        name=facts.names[row],
        operator=facts.targets[row],
        module=facts.modules[row],
        block=plan.block_names[block] if block >= 0 else None,
        shape=facts.shapes[row],
        dtype=facts.dtypes[row],
        bytes=facts.bytes[row],
        flops=facts.flops[row],
        uncounted=facts.uncounted[row] if facts.uncounted else "",
        seconds=None if times is None else times.seconds[row],
        device=None if times is None else times.device.name,
        shares=None if owner == row else facts.names[owner],
        action=decision.word,
        reason=reason,
        fate=None if outcome is None else outcome.phrase,
        rules=found,
    )


def _outcomes(plan: Plan) -> NodeOutcomes:
    return NodeOutcomes(plan.facts, plan.decisions, saved_and_recomputed(plan))


def _on(device: str | None, seconds: float | None) -> str:
    """A time behind other figures; empty without a device, and for what takes no time."""
    return f", {format_quantity(seconds, 'seconds')} on {device}" if seconds else ""


def explain_rule(plan: Plan, index: int) -> RuleExplanation:
    outcome, rules, times = plan.rules[index], plan.policy.rules, plan.shown_times
    return RuleExplanation(
        source=outcome.rule.source,
        text=outcome.rule.text,
        matched=len(outcome.matched),
        decided=len(outcome.decided),
        kept_by_user=outcome.kept_by_user,
        taken_over=tuple(
            communication.LineStanding(rules[other].source, rules[other].text, "overridden", f"{count:,} overridden by")
            for other, count in outcome.overridden_by.items()
        ),
        parts=part_counts(outcome.rule.selector, selections_for(plan.policy, plan.facts, times=plan.times)),
        names=tuple(plan.facts.names[row] for row in outcome.decided[:_MOST_NAMES]),
        seconds=None if times is None else fsum(times.seconds[row] for row in outcome.decided),
        device=None if times is None else times.device.name,
    )


@frozen
class CollectiveExplanation(Explained):
    """One collective: which lines joined or moved it, from where to where, and how it fares."""

    found: communication.PlacedCollective

    def to_dict(self) -> dict[str, Any]:
        found = {**asdict(self.found), "traced": _data(self.found.traced), "planned": _data(self.found.planned)}
        return {"collective": found}

    def __str__(self) -> str:
        found = self.found
        lines = [f"{found.name}: {found.operator} in group {found.group}"]
        if found.members:
            joined = "" if found.planned is None else f" as {found.planned.name}"
            lines.append(f"  one with others{joined}: {listed(found.members, _MOST_NAMES)}")
        rows: list[tuple[str, ...]] = [("order", "starts", "awaited", "takes", "exposed", "bounded by")]
        for name, place in (("as traced", found.traced), ("as planned", found.planned)):
            if place is not None:
                rows.append((name, *_place_row(place)))
        if not any(row[3] for row in rows[1:]):
            rows = [row[:3] for row in rows]
        parts = ["\n".join(lines), table(rows, right=range(0))]
        if found.lines:
            said = [
                (each.source, each.text, f"{each.standing}: {each.why}" if each.why else each.standing)
                for each in found.lines
            ]
            parts.append(table([("line", "scheduling line", ""), *said], right=range(0), ends=(0,)))
        return "\n\n".join(parts)


def _place_row(place: communication.CollectivePlace) -> tuple[str, str, str, str, str]:
    start = f"step {place.step:,}" + (f", before {place.before}" if place.before else "")
    awaited = "by nothing"
    if place.awaited_step is not None:
        before = f", before {place.awaited_before}" if place.awaited_before else ""
        awaited = f"step {place.awaited_step:,}{before}"
    run = place.run
    if run is None:
        return start, awaited, "", "", ""
    exposed = format_quantity(run.exposed, "seconds") if run.exposed_by is not None else "hidden"
    bounded = BOUNDED_BY[run.exposed_by] if run.exposed_by else ""
    return start, awaited, format_quantity(run.end - run.start, "seconds"), exposed, bounded


def _data(place: communication.CollectivePlace | None) -> dict[str, Any] | None:
    if place is None:
        return None
    return {**asdict(place, filter=lambda each, _: each.name != "run"), **run_data(place.run)}


@frozen
class LineExplanation(Explained):
    """A scheduling line: what it picked and what it did."""

    line: communication.LineInOrder
    exposed: float | None
    """Seconds of the step as planned in which computation waits; None without a device."""

    def to_dict(self) -> dict[str, Any]:
        return {**line_data(self.line), "exposed_seconds": self.exposed}

    def __str__(self) -> str:
        line = self.line
        lines = [f"{line.source}: {line.text}", f"  {said_of(line)}"]
        if self.exposed is not None and self.line.exposed_without is not None:
            with_it, without = (format_quantity(each, "seconds") for each in (self.exposed, self.line.exposed_without))
            lines.append(f"  exposed: {with_it} with it, {without} without")
        lines += [f"  {said}" for said in proof_texts(line)]
        for reason, names in line.left.items():
            lines.append(f"  left {listed(names, _MOST_NAMES)}: {reason}")
        if line.buckets:
            joined = (f"  {listed(each.names, 1)} <- {listed(each.members, _MOST_NAMES)}" for each in line.buckets)
            lines += ["", "what it joins", *joined]
        elif line.moved:
            lines += ["", "what it moves", f"  {listed(line.moved, _MOST_NAMES)}"]
        told = {*line.moved, *(name for names in line.left.values() for name in names)}
        if kept := [name for name in line.matched if name not in told]:
            lines += ["", "what it leaves where it is", f"  {listed(kept, _MOST_NAMES)}"]
        return "\n".join(lines)


_MOST_NODES = 4
_FORWARD = "rules decide about forward nodes alone; `policylang show GRAPH --module …` names them"


class NothingToExplain(Exception):
    """A name without nodes that rules decide. The first argument reports it, the second is the fix."""


def explain_named(plan: Plan, asked: str) -> Sequence[Explained]:
    """Explain a node by its rules, and a collective by its scheduling lines too; several nodes have a row each.
    Raises :class:`NothingToExplain`."""
    row, ordered = plan.facts.index.get(asked), communication.communication(plan)
    collective = None if ordered is None else communication.collective_asked(ordered, asked)
    if ordered is not None and collective is not None:
        decided = [explain_node(plan, row)] if row is not None and plan.decisions[row] is not None else []
        return [*decided, CollectiveExplanation(communication.placed(ordered, collective))]
    if row is not None:
        if plan.decisions[row] is None:
            kinds = {Phase.INPUT: "a graph input", Phase.BACKWARD: "a backward node", Phase.OUTPUT: "the output"}
            what = kinds.get(Phase(plan.facts.phases[row]), "not a call")
            raise NothingToExplain(f"no rule decides about `{asked}`, which is {what}", _FORWARD)
        return [explain_node(plan, row)]
    rows, outcomes = _rows(plan, asked), _outcomes(plan)
    return [NodesExplanation(asked, tuple(explain_node(plan, row, outcomes, reasons=False) for row in rows))]


def explained_statements(plan: Plan) -> tuple[list[Span], list[Span]]:
    """The statements that can be explained: the rules, and the lines that order collectives where they do."""
    lines = [plan.policy.rewrites[at].span for at in communication.bucket_statements(plan.policy)]
    lines += [each.span for each in plan.policy.scheduling]
    return [rule.span for rule in plan.policy.rules], [] if communication.communication(plan) is None else lines


def explain_statement(plan: Plan, span: Span, capabilities: Capabilities) -> Explained:
    rules, lines = explained_statements(plan)
    ordered = communication.communication(plan)
    if ordered is not None and span in lines:
        at = lines.index(span)
        found = weighed(ordered, plan, capabilities, at)
        return LineExplanation(found.lines[at], None if found.planned.lanes is None else found.planned.lanes.exposed)
    return explain_rule(plan, rules.index(span))


def _rows(plan: Plan, asked: str) -> list[int]:
    """The rows that rules range over of the nodes whose names a glob matches, else of those in a module."""
    facts = plan.facts
    found: list[int] = []
    if is_magic(asked) and "." not in asked:
        matches = NameGlob(asked).matches
        found = [row for row, name in enumerate(facts.names) if matches(name)]
    if not found and path_glob_problem(asked) is None:
        covers = cache(PathGlob(asked).covers)
        found = [row for row in range(len(facts)) if covers(facts.modules[row] or facts.modules[facts.owners[row]])]
    if decided := [row for row in found if plan.decisions[row] is not None]:
        return decided
    if found:
        names = listed([facts.names[row] for row in found], _MOST_NODES)
        raise NothingToExplain(f"no rule decides about any node that `{asked}` names: {names}", _FORWARD)
    near = nearest(asked, (facts.names[each] for each in facts.forward))
    if "." in asked or not near:
        near = (*near, *nearest_paths(asked, facts, count=2))[:3]
    fix = did_you_mean(near) or "node names are those of the graph, such as mm_3: `policylang show GRAPH --module …`"
    raise NothingToExplain(f"the graph has no node `{asked}`", fix)


_WIDEST = 100


def meanings_text(word: str, found: Sequence[Meaning]) -> str:
    """A paragraph, an example and where there is more, of each sense."""
    width = columns(_WIDEST) or _WIDEST
    parts = []
    for each in found:
        parts.append(fill(f"{word} ({each.sense}): {each.text}", width=width))
        parts += [indent(each.example, "    "), f"More in docs/language.md, {each.section}."]
    return "\n\n".join(parts)


def meanings_data(word: str, found: Sequence[Meaning]) -> dict[str, Any]:
    said = [{"sense": e.sense, "text": e.text, "example": e.example, "section": e.section} for e in found]
    return {"word": word, "meanings": said}


def of_group(word: str) -> tuple[Meaning, ...]:
    """The meaning of a bundled group of operators; empty where the word is none."""
    let = prelude_group(word)
    if let is None:
        return ()
    text = f"A group of operators that every policy knows. {comment_above(let.span)}".strip()
    return (Meaning((word,), "group", text, let.span.text, "Groups"),)
