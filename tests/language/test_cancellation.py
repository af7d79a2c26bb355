"""Work ends soon after nobody wants it any more, and is the same as ever where it is wanted."""

from __future__ import annotations

import pytest

from policylang.api.planned_graphs import facts_of
from policylang.graph.facts import Facts
from policylang.language.cancellation import Cancelled, cancellable, check_cancelled
from policylang.language.loader import load_policy
from policylang.planning.capabilities import capabilities_for
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.inspection.worth import worth_of_rules
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from tests.editor.conftest import GRAPHS


@pytest.fixture(scope="module")
def facts() -> Facts:
    return facts_of(GRAPHS / "fsdp.graph")


def planned(name: str, facts: Facts) -> Plan:
    policy = load_policy(name).policy
    assert policy is not None
    return plan(policy, facts, capabilities_for(facts.kind))


def test_without_anybody_to_ask_nothing_stops() -> None:
    check_cancelled()
    with cancellable(lambda: True):
        check_cancelled()
    with pytest.raises(Cancelled), cancellable(lambda: False):
        check_cancelled()
    check_cancelled()


@pytest.mark.parametrize("name", ["llama3_sac", "fsdp_overlap"])
def test_a_plan_can_be_given_up_wherever_it_asks_and_is_the_same_afterwards(name: str, facts: Facts) -> None:
    """Given up at places spread over the whole of it, on facts that it shares with the plan that is made in the end."""
    asked = 0

    def counting() -> bool:
        nonlocal asked
        asked += 1
        return True

    expected = planned(name, facts)
    with cancellable(counting):
        assert planned(name, facts).digest == expected.digest
    assert asked > 20
    for stop in range(0, asked, max(asked // 12, 1)):
        left = stop

        def wanted() -> bool:
            nonlocal left
            left -= 1
            return left >= 0

        with pytest.raises(Cancelled), cancellable(wanted):
            planned(name, facts)
        assert left == -1, "it stops at once"
    made = planned(name, facts)
    assert (made.digest, made.diagnostics) == (expected.digest, expected.diagnostics)


def test_loading_and_figures_can_be_given_up(facts: Facts) -> None:
    made = planned("llama3_sac", facts)
    for work in (
        lambda: load_policy("llama3_sac"),
        lambda: breakdown(made),
        lambda: worth_of_rules(made, capabilities_for(facts.kind)),
    ):
        with pytest.raises(Cancelled), cancellable(lambda: False):
            work()
