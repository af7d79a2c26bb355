"""The trade-off as rows."""

from __future__ import annotations

import attrs

from policylang.report.plan_comparison import distinctions
from policylang.tuning.evaluation import Besides, Budget, Candidate, Tuned
from policylang.tuning.tuned_policy import neighbour_words


def candidate(rules: str, peak: int, recompute: float, saved: int = 0) -> Candidate:
    return Candidate(rules, peak, "mm", saved or peak // 2, 0, recompute, 0.0, 1.0 + recompute)


ALL = candidate("recompute everything\nsave everything in block where crosses block\n", 10 << 30, 0.6)
SOME = candidate(
    "recompute everything\nsave matmul in block\nsave everything in block where crosses block\n", 20 << 30, 0.2
)
NONE = candidate("save everything\n", 30 << 30, 0.0)


def tuned(budget: Budget = Budget("peak", 25 << 30), bound: float | None = 0.15) -> Tuned:  # noqa: B008
    return Tuned(budget, Besides(), SOME, ALL, NONE, (ALL, SOME, NONE), bound, 1.0)


def test_what_distinguishes_each_from_the_one_before():
    lines = "recompute everything; save everything in block where crosses block"
    assert distinctions((ALL, SOME, NONE)) == [lines, "save matmul in block", "save everything"]
    assert distinctions((SOME, ALL)) == [SOME.rules.strip().replace("\n", "; "), "without save matmul in block"]
    turned = attrs.evolve(ALL, rules="\n".join(reversed(ALL.rules.splitlines())))
    assert distinctions((ALL, turned))[1] == "the same rules in another order"


def test_copies_to_the_host_cost_what_the_step_waits_for_them():
    moved = attrs.evolve(
        SOME, rules="save everything\noffload mm\n", recompute=0.0, offloaded=1 << 30, step=1.4, copies=0.4
    )
    chosen = attrs.evolve(tuned(), chosen=moved, table=(ALL, moved, NONE))
    assert moved.price == 0.4
    assert neighbour_words(chosen) == "with 10 GiB more, 400 ms less; with 10 GiB less, 200 ms more"
