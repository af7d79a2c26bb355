"""``policylang explain`` of a node or a rule: the data, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import Any

from attrs import asdict, frozen

from policylang.audit.summary.assemble import word
from policylang.language.wording import counted, figure, listed
from policylang.planning.expectations.fates import Fates
from policylang.planning.inspection.explain import RuleOnNode, rules_on
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.plan import Plan
from policylang.planning.selection.empty_matches import part_counts
from policylang.planning.selection.selectors import selections_for
from policylang.planning.value_decision import Decision
from policylang.report.device_times import seconds_text
from policylang.report.width import table

_MOST_NAMES = 8


@frozen
class RuleLine:
    """One rule, as a node or another rule sees it."""

    source: str
    text: str
    standing: str
    """``decided``, ``overridden``, ``no match``, ``kept by the user`` or ``always saved``."""
    why: str = ""
    """What left the node out, or which rule took it over."""


@frozen
class NodeExplanation:
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
    """Of one run; None without a device."""
    device: str | None
    """The profile that the seconds are of."""
    shares: str | None
    """The node whose decision it shares, where that is another."""
    action: str
    """As the language writes it; ``auto`` where it is left to PyTorch's partitioner."""
    reason: str
    """Where something other than a rule decided: what."""
    fate: str | None
    """``saved``, ``recomputed`` or ``offloaded``; None where the backward needs no such value."""
    rules: tuple[RuleLine, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _work(self) -> str:
        work = figure(self.flops, "flops")
        if self.uncounted:
            work = f"{work} and {self.uncounted}, which no FLOP formula counts" if self.flops else "FLOPs not counted"
        return work + _on(self.device, self.seconds)

    def __str__(self) -> str:
        sizes = "×".join(map(str, self.shape)) if self.shape is not None else ""
        what = f"{f'{sizes} {self.dtype}'.strip()}, " if sizes or self.dtype else ""
        place = f" in {self.module}" if self.module else ""
        lines = [
            f"{self.name}: {self.operator}{place}",
            f"  {'in block ' + self.block if self.block is not None else 'outside every block'}, "
            f"{what}{figure(self.bytes, 'bytes')}, {self._work()}",
        ]
        if self.shares is not None:
            lines.append(f"  it shares the decision of {self.shares}, which the rules below are about")
        because = f": {self.reason}" if self.reason else ""
        lines.append(f"  {self.action}{because}; {self.fate or 'the backward does not need it'}")
        rows = [("line", "rule", ""), *((r.source, r.text, _standing(r)) for r in self.rules)]
        return "\n".join(lines) + ("\n\n" + table(rows, right=range(0), ends=(0,)) if self.rules else "")


@frozen
class RuleExplanation:
    source: str
    text: str
    matched: int
    decided: int
    kept_by_user: int
    taken_over: tuple[RuleLine, ...]
    """The rules that took matches over, in order."""
    parts: tuple[str, ...]
    names: tuple[str, ...]
    """The first nodes that it decides."""
    seconds: float | None = None
    """Of one run of all that it decides; None without a device."""
    device: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

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
class NodesExplanation:
    """Of several nodes, what becomes of each."""

    asked: str
    nodes: tuple[NodeExplanation, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        timed = any(each.device is not None for each in self.nodes)
        rows = [("node", "operator", "module", "", "by", *("time",)[:timed]), *map(_summary, self.nodes)]
        head = f"{self.asked}: {counted(len(self.nodes), 'node')}"
        if timed:
            total = fsum(each.seconds or 0.0 for each in self.nodes)
            head += _on(self.nodes[0].device, total)
        return f"{head}\n\n" + table(rows, right=range(5, 6), ends=(2,))


def explain_node(plan: Plan, row: int) -> NodeExplanation:
    """Raises ``ValueError`` for a node that no rule ranges over."""
    return _node(plan, row, Fates(plan.facts, plan.decisions, saved_and_recomputed(plan)), reasons=True)


def explain_nodes(plan: Plan, asked: str, rows: Sequence[int]) -> NodesExplanation:
    """Raises ``ValueError`` for a node that no rule ranges over. Why a rule does not match, one node is asked."""
    fates = Fates(plan.facts, plan.decisions, saved_and_recomputed(plan))
    return NodesExplanation(asked, tuple(_node(plan, row, fates, reasons=False) for row in rows))


def _node(plan: Plan, row: int, fates: Fates, *, reasons: bool) -> NodeExplanation:
    facts = plan.facts
    rules = tuple(map(_line, rules_on(plan, row, reasons=reasons)))
    decision = plan.decisions[row]
    assert decision is not None
    owner, block, times = facts.owners[row], plan.block_of[row], plan.shown_times
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
        action=word(decision.action),
        reason=_reason(plan, decision),
        fate=fates.really(row),
        rules=rules,
    )


def _summary(node: NodeExplanation) -> tuple[str, ...]:
    time = [] if node.device is None else [seconds_text(node.seconds)]
    return node.name, node.operator, node.module, node.fate or f"{node.action}, not needed", node.reason, *time


def _on(device: str | None, seconds: float | None) -> str:
    """Behind other figures; nothing without a device, and of what takes no time."""
    return f", {figure(seconds, 'seconds')} on {device}" if seconds else ""


def explain_rule(plan: Plan, index: int) -> RuleExplanation:
    outcome, rules, times = plan.rules[index], plan.policy.rules, plan.shown_times
    return RuleExplanation(
        source=outcome.rule.source,
        text=outcome.rule.text,
        matched=len(outcome.matched),
        decided=len(outcome.decided),
        kept_by_user=outcome.kept_by_user,
        taken_over=tuple(
            RuleLine(rules[other].source, rules[other].text, "overridden", f"{count:,} taken over by")
            for other, count in outcome.overridden_by.items()
        ),
        parts=part_counts(outcome.rule.selector, selections_for(plan.policy, plan.facts, times=plan.times)),
        names=tuple(plan.facts.names[row] for row in outcome.decided[:_MOST_NAMES]),
        seconds=None if times is None else fsum(times.seconds[row] for row in outcome.decided),
        device=None if times is None else times.device.name,
    )


def _reason(plan: Plan, decision: Decision) -> str:
    if decision.reason:
        return decision.reason
    return f"{plan.policy.rules[decision.rule].source} decided" if decision.rule is not None else ""


def _line(found: RuleOnNode) -> RuleLine:
    why = found.why if found.by is None else f"by {found.by.source}: {found.by.text}"
    return RuleLine(found.rule.source, found.rule.text, found.standing, why)


def _standing(line: RuleLine) -> str:
    return f"no match: {line.why}" if line.standing == "no match" else f"{line.standing} {line.why}".rstrip()
