"""The simulated peak, worked out by hand."""

from __future__ import annotations

import pytest

from policylang.graph.facts import Facts
from policylang.planning.schedule import build_schedule
from policylang.simulation.memory import Peak, estimate_peak
from tests.support.textgraph import CHAIN, facts_of


def peak_of(facts: Facts, recomputed: tuple[int, ...]) -> Peak:
    return estimate_peak(facts, build_schedule(facts, recomputed))


def rows(facts, *names: str) -> tuple[int, ...]:
    return tuple(facts.index[name] for name in names)


def test_saved_values_live_until_the_backward_has_read_them():
    peak = peak_of(facts_of(CHAIN), ())
    # the input (10), a, b, c and the loss; then a, b and c beside dc, and the tangent that dc still reads
    assert peak.forward == 10 + 300 + 1
    assert peak.backward == 10 + 1 + 300 + 100 + 1
    assert (peak.bytes, peak.at) == (412, "dc")


def test_recomputed_values_are_there_only_when_they_are_needed():
    facts = facts_of(CHAIN)
    peak = peak_of(facts, rows(facts, "a", "b"))
    # forward: c with b before it is freed; backward: dc, then a and b again, and db; the tangent is gone
    assert peak.forward == 10 + 200
    assert peak.backward == 10 + 1 + 100 + 200 + 100
    assert peak.at == "db"


@pytest.mark.parametrize(
    ("text", "forward"),
    [
        pytest.param(
            """
            %a = aten.sin.default(%x) bytes=100
            %v = aten.view.default(%a) view bytes=100
            %b = aten.sin.default(%v) bytes=100
            output(%b)
            """,
            200,
            id="views share the memory of what they view",
        ),
        pytest.param(
            """
            %norm = aten.native_layer_norm.default(%x) multi_output bytes=110
            %out = builtin.getitem(%norm) bytes=100
            %mean = builtin.getitem(%norm) bytes=10
            output(%out, %mean)
            """,
            110,
            id="pieces of an operator are counted once",
        ),
        pytest.param(  # they share a decision, and its results are not pieces of its first node
            """
            %empty = aten.empty_like.default(%x) repeatable bytes=100
            %mask = aten.bernoulli_.float(%empty) writes view repeatable follows=%empty bytes=100
            %scaled = aten.mul.Tensor(%mask) repeatable follows=%empty bytes=100
            output(%scaled)
            """,
            200,
            id="memory written in place is counted where it was made",
        ),
    ],
)
def test_what_a_forward_holds(text: str, forward: int) -> None:
    assert peak_of(facts_of(f"%x = input bytes=10\n{text}"), ()).forward == 10 + forward


def test_the_state_of_a_generator_is_kept_for_a_second_draw():
    text = """
        %x = input bytes=10
        %a = aten.rand_like.default(%x) random bytes=100 device={device}
        %loss = aten.sum.default(%a) bytes=1
        ---
        %t = tangent bytes=1
        %h = aten.mul.Tensor(%t, %a) bytes=5
        output(%loss, %h)
    """
    for device, state in (("cpu", 5056), ("cuda:0", 16)):
        facts = facts_of(text.format(device=device))
        assert peak_of(facts, rows(facts, "a")).forward == 10 + 100 + 1 + state


def test_what_a_recomputation_reads_stays_until_then():
    text = """
        %x = input bytes=10
        %a = aten.sin.default(%x) bytes=100
        %b = aten.sin.default(%a) bytes=50
        %loss = aten.sum.default(%b) bytes=1
        ---
        %t = tangent bytes=1
        %g = aten.mul.Tensor(%t) bytes=500
        %h = aten.mul.Tensor(%g, %b) bytes=5
        output(%loss, %h)
    """
    facts = facts_of(text)
    # the input, the loss, a, g and b again; the tangent went with g
    assert peak_of(facts, rows(facts, "b")).backward == 10 + 1 + 100 + 500 + 50
