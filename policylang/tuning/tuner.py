"""From a budget to a policy: the set of candidates is fixed for a graph and a device, and the budget only picks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from policylang.graph.blocks import blocks_of
from policylang.graph.facts import Facts
from policylang.planning.capabilities import Capabilities
from policylang.simulation.node_times import NodeTimes
from policylang.tuning.evaluation import Evaluation
from policylang.tuning.hand_written import hand_written
from policylang.tuning.trade_off import Besides, Budget, Candidate, Infeasible, Tuned


def tune(
    facts: Facts,
    times: NodeTimes,
    budget: Budget,
    capabilities: Capabilities,
    *,
    besides: Besides = Besides(),
    offload: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Tuned | Infeasible:
    """The fastest candidate within the budget; of a budget of time the one that takes the least memory."""
    evaluation = Evaluation(facts, times, capabilities)
    forward = sum(times.seconds[row] for row in facts.forward)
    blocks = len(blocks_of(facts).names)
    texts = hand_written(blocks)
    if any(facts.user_tags):
        texts = (_override(text) for text in texts)
    found = [each for text in texts if (each := evaluation.of(text)) is not None]

    def memory(each: Candidate) -> int:
        return each.saved if budget.figure == "saved" else besides.on(each.peak)

    table = undominated(found, memory)
    if budget.figure == "recompute time":
        fits = [each for each in table if each.recompute <= budget.limit * forward]
        at = table.index(fits[0]) if fits else None
    else:
        fits = [each for each in table if memory(each) <= budget.limit]
        at = table.index(fits[-1]) if fits else None
    if at is None:
        return Infeasible(budget, besides, table[0])
    less, more = (table[at - 1] if at else None), (table[at + 1] if at + 1 < len(table) else None)
    return Tuned(budget, besides, table[at], less, more, tuple(table), None, forward)


def undominated(found: Iterable[Candidate], memory: Callable[[Candidate], int]) -> list[Candidate]:
    """Those that no other beats in both memory and time, by rising memory."""
    kept: list[Candidate] = []
    for each in sorted(found, key=lambda each: (memory(each), each.recompute, len(each.rules), each.rules)):
        if not kept or each.recompute < kept[-1].recompute:
            kept.append(each)
    return kept


def _override(text: str) -> str:
    return "".join(line if "->" in line else f"override {line}" for line in text.splitlines(keepends=True))
