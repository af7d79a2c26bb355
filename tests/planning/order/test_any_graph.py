"""Scheduling lines on any graph: never an exception, an order that is allowed, and limits that hold."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import policylang
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.graph.schedule import StepKind
from policylang.planning.capabilities import FLAT, JOINT, Capabilities
from policylang.planning.order.dependencies import dependencies
from policylang.planning.planner import plan
from policylang.report.diagnostics import render_text
from tests.planning.strategies import QUICK, graphs
from tests.support.random_flat import random_flat

drawing = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMED = ("collective", "all_gather", "(all_gather where from parameter)", "(all_gather in block)", "reduce_scatter")
FORMS = (
    "prefetch {} 1 block ahead", "prefetch {} 2 blocks ahead", "delay {} 1 block", "keep order of {}",
    "overlap {}", "overlap {} up to 16 B in flight", "overlap {} within 10% of peak", "overlap {} within 8 B of peak",
    "bucket {} per block", "bucket {} up to 1 KiB",
)  # fmt: skip
lines = st.lists(
    st.builds(
        lambda form, named, optional: optional * "optional " + form.format(named),
        st.sampled_from(FORMS),
        st.sampled_from(NAMED),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
    unique=True,
)
rules = st.sampled_from(["undecided -> save", "recompute everything", "recompute all_gather", "offload mm"])


def check(facts: Facts, text: str, path: Capabilities) -> None:
    try:
        policy = policylang.parse(text)
    except policylang.PolicyMeaningError:  # a line said twice
        return
    made = plan(policy, facts, path, device=QUICK)
    assert render_text(made.diagnostics) is not None
    order = made.order
    assert order is not None
    before = dependencies(order.facts).before
    calls = [row for row, op in enumerate(order.facts.ops) if op == "call_function"]
    place = {row: at for at, (kind, row, _) in enumerate(order.schedule) if kind == StepKind.FIRST_RUN}
    assert sorted(place) == calls
    assert all(place[each] < place[row] for row in calls for each in before[row] if each in place)
    if not order.moves:
        assert list(order.schedule) == list(order.traced_schedule)


@given(graphs(), lines, rules)
@drawing
def test_of_a_joint_graph(facts: Facts, drawn: list[str], rule: str) -> None:
    check(facts, "\n".join((rule, *drawn)), JOINT)


@given(st.lists(st.integers(0, 63), min_size=12, max_size=60), lines, rules)
@drawing
def test_of_a_flat_graph(numbers: list[int], drawn: list[str], rule: str) -> None:
    check(collect(random_flat(numbers, 4).gm), "\n".join((rule, *drawn)), FLAT)
