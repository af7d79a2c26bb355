"""Rules about all-gathered weights that FSDP gathers in hooks, outside the planned graph.

``fully_shard`` gathers a block's weights in hooks around it, where neither an eager checkpoint nor a compiler sees an
operator; ``reshard_after_forward`` decides whether the backward gathers them again. A rule about such gathers alone has
nothing to match, and need not: FSDP has applied it or has not. The policy's decisions on them are read off a small
graph that gathers the same weights, and compared with FSDP's settings.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from policylang.graph.blocks import BlockTable
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.textual import GraphBuilder
from policylang.language.diagnostics import Diagnostic, Span, diagnose
from policylang.language.shown import counted, first_lines, listed
from policylang.language.syntax import ExpectFate, Policy, Selector
from policylang.operators.names import GATHER, WAIT
from policylang.planning.capabilities import WHAT_FSDP_MEANS
from policylang.planning.decisions.decide import NO_RULE, judge
from policylang.planning.plan import ExpectationOutcome
from policylang.planning.selection.selectors import Selections, selections_for

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
    policy: Policy, aside: FsdpParameters | None, unmatched: Iterable[int], selections: Selections
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
        is_empty = isinstance(each, ExpectFate) and not selections.rows(each.selector)
        if isinstance(each, ExpectFate) and is_empty and graph.is_about_weights(each.selector):
            asked[index], problems = _expected(each, graph)
            found += problems
    if about:
        found += _held(policy, about, graph)
    found = [evolve(each, include=policy.included_by(each.span)) for each in found]
    return Answered(frozenset(about), asked, tuple(found))


def gathers_matching(policy: Policy, selector: Selector, aside: FsdpParameters) -> list[FsdpParameter]:
    """The weights whose gathers a selector matches."""
    graph = _Gathers.of(policy, aside)
    return [graph.weights[row] for row in sorted(graph.rows(selector)) if row in graph.weights]


def _held(policy: Policy, about: Sequence[int], graph: _Gathers) -> list[Diagnostic]:
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


def _expected(expectation: ExpectFate, graph: _Gathers) -> tuple[ExpectationOutcome, list[Diagnostic]]:
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
    def of(cls, policy: Policy, aside: FsdpParameters) -> _Gathers:
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

    def rows(self, selector: Selector) -> frozenset[int]:
        """The producers of the nodes that a selector denotes."""
        owners = self.facts.owners
        return frozenset(owners[row] for row in self.selections.rows(selector))

    def is_about_weights(self, selector: Selector) -> bool:
        """True if a selector denotes gathers of weights, and nothing else."""
        rows = self.rows(selector)
        return not rows.isdisjoint(self.weights) and rows.isdisjoint(self.others)
