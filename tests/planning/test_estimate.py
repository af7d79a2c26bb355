"""The simulated peak, worked out by hand; that of any graph is held against a slow account in `test_peak_values`."""

from __future__ import annotations

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
