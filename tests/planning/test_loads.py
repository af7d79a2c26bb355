"""`balance`: sizes that come from data are planned for a stated load of the experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import policylang
from policylang.api.planned_graphs import facts_of as facts_of_graph
from policylang.commands.small_llama import step_memory
from policylang.errors import PolicyMeaningError
from policylang.graph import snapshot
from policylang.graph.expert_load import makers_of, under_load, untold
from policylang.graph.facts import Facts
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.plan import Plan
from tests.planning.test_public_names import TOKENS as LOOPED_TOKENS
from tests.planning.test_public_names import Model, tokens, traced_facts
from tests.support.routed import CHOICES, HIDDEN, RANKS, TOKENS, WIDTH, routed_step
from tests.support.versions import needs_traced_generators

pytestmark = needs_traced_generators
SENT = TOKENS * CHOICES
SHARE = SENT // RANKS
POLICIES = {
    "saved": "undecided -> save",
    "recomputed": "recompute everything in block\nsave (topk, all_to_all) in block",
}


@cache
def routed_facts() -> Facts:
    return facts_of_graph(routed_step())[0]


def planned(rules: str, facts: Facts) -> Plan:
    (made,) = policylang.check(policylang.parse(rules), graph=facts).plans
    return made


# --- against a slow, obvious evaluator: each size with numbers in place of its symbols --------------------------------


def with_numbers(numbers: Mapping[str, int]) -> Facts:
    """The graph with the sizes of one load: the expression of each length is evaluated."""

    def size(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return value.dtype.itemsize * prod(map(length, value.shape))
        return sum(map(size, value)) if isinstance(value, (tuple, list)) else 0

    def length(each: int | torch.SymInt) -> int:
        if isinstance(each, int):
            return each
        return int(each.node.expr.xreplace({symbol: numbers[str(symbol)] for symbol in each.node.expr.free_symbols}))

    facts = routed_facts()
    values = [node.meta.get("val") for node in routed_step().gm.graph.nodes]
    sizes = [size(value) if row and facts.data_sizes[row] else facts.bytes[row] for row, value in enumerate(values)]
    return evolve(facts, bytes=sizes, data_sizes=(), data_terms=())


def symbols() -> list[str]:
    """In the order in which they are made: what is sent to each rank, what is received from each, layer by layer."""
    made = dict.fromkeys(name for terms in routed_facts().data_terms if terms for name, _ in terms[2])
    assert len(made) == 2 * 2 * RANKS
    return list(made)


@st.composite
def loads(draw: st.DrawFn, most: int) -> dict[str, int]:
    """Each rank sends all its tokens, at most ``most`` to one rank; so many does this one receive from each."""
    numbers = []
    for _ in range(2):
        left, sent = SENT, []
        for others in range(RANKS - 1, -1, -1):
            sent.append(draw(st.integers(max(0, left - others * most), min(most, left))))
            left -= sent[-1]
        numbers += [*sent, *(draw(st.integers(SENT - min(SENT, (RANKS - 1) * most), most)) for _ in range(RANKS))]
    return dict(zip(symbols(), numbers, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=10)
@given(data=st.data(), factor=st.sampled_from([1.0, 1.25, 2.0, 4.0]))
def test_no_load_takes_more_and_the_largest_takes_as_much(policy: str, data: st.DataObject, factor: float) -> None:
    rules = POLICIES[policy]
    made = planned(f"balance up to {factor}\n{rules}", routed_facts())
    least, most = breakdown(made).saved_range
    most_rows = int(SHARE * factor)
    load = data.draw(loads(most_rows))
    found = planned(rules, with_numbers(load))
    assert least <= breakdown(found).under.amounts.saved_bytes <= most
    assert found.peak.bytes <= made.peak.bytes
    received = [name for at, name in enumerate(symbols()) if at % (2 * RANKS) >= RANKS]
    worst = planned(rules, with_numbers({**load, **dict.fromkeys(received, most_rows)}))
    assert breakdown(worst).under.amounts.saved_bytes == most
    assert worst.peak.bytes == made.peak.bytes


@settings(max_examples=8)
@given(seed=st.integers(0, 99), lean=st.floats(-1, 1))
def test_what_a_step_saves_is_within_the_range(seed: int, lean: float) -> None:
    """Real tensors, of experts that run one by one; ``lean`` makes the router choose one of the two more often."""
    model, x = Model(), tokens(seed)
    for layer in model.layers:
        layer.router.bias.data[0] += lean
    found = step_memory(lambda: model(x), [*model.parameters(), x], torch.device("cpu")).saved
    made = planned("balance up to 2.0\nundecided -> save", traced_facts())
    least, most = breakdown(made).saved_range
    assert least <= found <= most


def test_experts_that_run_one_by_one_have_their_share() -> None:
    facts = under_load(traced_facts(), 1.0, False)
    rows = {facts.shapes[row][0] for row in facts.by_target["aten.tanh.default"]}
    assert rows == {LOOPED_TOKENS // 2}
    assert not untold(facts)


# --- what is told, and what is not ------------------------------------------------------------------------------------


def test_an_even_load_is_one_figure_and_a_limit_is_a_range() -> None:
    ranges = {}
    for load in ("1.0", "up to 1.0", "0.5", "up to 1.5", "up to 99"):
        made = planned(f"balance {load}\nundecided -> save", routed_facts())
        ranges[load] = breakdown(made).saved_range
    assert ranges["1.0"] == ranges["up to 1.0"] == (ranges["1.0"][0],) * 2
    assert ranges["0.5"][1] < ranges["up to 1.5"][1] < ranges["up to 99"][1]
    assert ranges["up to 1.5"][0] < ranges["1.0"][0]
    (note,) = [each for each in breakdown(made).notes if each.startswith("saved is ")]
    assert note.endswith("by the tokens that a rank receives; the peak is of the rank that receives the most")


def test_flops_go_by_the_load() -> None:
    products = routed_facts().by_target["aten._grouped_mm.default"]
    even, double = (under_load(routed_facts(), factor, True).flops for factor in (1.0, 2.0))
    assert [double[row] for row in products] == [2 * even[row] for row in products]
    assert even[products[0]] == 2 * SENT * WIDTH * 2 * HIDDEN


def test_without_a_load_the_figure_says_so() -> None:
    (note,) = breakdown(planned("undecided -> save", routed_facts())).notes
    assert "no load is stated (`balance up to 2.0`)" in note
    assert note.endswith("without a known limit")


def test_a_load_is_kept_by_the_snapshot_and_stated_once() -> None:
    read = snapshot.parse(snapshot.dump(routed_facts()))
    text = "balance up to 2.0\nundecided -> save"
    made = planned(text, read)
    assert made.peak == planned(text, routed_facts()).peak
    assert planned(text, made.before).peak == made.peak  # figures of variants are planned on the facts of a plan


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (lambda: with_numbers(dict.fromkeys(symbols(), SHARE)), "no size of this graph comes from data"),
        (lambda: evolve(routed_facts(), data_terms=()), "these facts do not say which node makes a size"),
        (lambda: _summed(routed_facts()), "does not tell the size of "),
    ],
)
def test_a_load_that_tells_nothing_is_a_warning(facts: Any, said: str) -> None:
    made = planned("balance 1.0\nundecided -> save", facts())
    (found,) = [each for each in made.diagnostics if each.code == "APL660"]
    assert said in found.message
    assert found.span.text == "balance 1.0"


def _summed(facts: Facts) -> Facts:
    """The same with sizes that are read from running sums, which are no counts."""
    targets = ["aten.cumsum.default" if name == "aten.sum.dim_IntList" else name for name in facts.targets]
    changed = evolve(facts, targets=targets)
    assert makers_of(changed, untold(changed))
    return changed


@pytest.mark.parametrize(
    ("rules", "warned"),
    [
        ("balance 1.0\nexpect saved >= 1 KiB", 0),
        ("balance up to 2.0\nexpect saved >= 1 KiB", 1),
        ("expect peak >= 1 KiB", 1),
    ],
)
def test_an_expectation_about_a_range_is_warned_of(rules: str, warned: int) -> None:
    made = planned(f"undecided -> save\n{rules}", routed_facts())
    assert [each.code for each in made.diagnostics].count("APL350") == warned


@pytest.mark.slow
def test_tuning_goes_by_the_load() -> None:
    pytest.importorskip("highspy")
    peak = planned("balance up to 2.0\nundecided -> save", routed_facts()).peak.bytes - (16 << 10)
    tuned = policylang.tune(routed_facts(), peak=peak, device="h100-sxm", balance="up to 2.0")
    assert "\nbalance up to 2.0\n" in tuned.text
    assert planned(tuned.text, routed_facts()).peak.bytes <= peak
    with pytest.raises(PolicyMeaningError, match="APL116"):
        policylang.tune(routed_facts(), peak=peak, device="h100-sxm", balance="2 GiB")
    notes = policylang.tune(routed_facts(), peak="1 GiB", device="h100-sxm").notes
    (note,) = [each for each in notes if each.code == "APL350"]
    assert "no load is stated" in note.message
