"""Steps on four gloo ranks in the orders that policies say, with the times of a profile slept through."""

from typing import Any

import pytest

from benchmarks import stages
from benchmarks.schedule_on_ranks import BY_HAND, POLICIES, RANKS, combined, on_rank
from examples.sharded_llama import LlamaConfig
from tests.support.ranks import run_ranks
from tests.support.versions import needs_traced_meshes

pytestmark = [needs_traced_meshes, pytest.mark.slow]

CONFIG = LlamaConfig(layers=2)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """By policy. What is asserted is what came out, not how long it took: the benchmark says that."""
    policies = {**POLICIES, BY_HAND: POLICIES["as traced"]}
    return {row["policy"]: row for row in combined(run_ranks(on_rank, RANKS, policies, 1, CONFIG))}


def test_every_order_gives_the_same_step(rows: dict[str, dict[str, Any]]) -> None:
    """Bit for bit where nothing is bucketed. In a bucket gloo adds the ranks' terms of an element in another order."""
    bits = {name: row["bits"] for name, row in rows.items() if "bucket" not in name}
    assert bits == dict.fromkeys(("as traced", "prefetch", "overlap", BY_HAND), "equal")
    apart = rows["bucket + prefetch"]["bits"]
    assert apart == "equal" or float(apart.split()[0]) < 1e-5


def test_only_buckets_change_how_many_collectives_there_are(rows: dict[str, dict[str, Any]]) -> None:
    counts = {name: row["collectives"] for name, row in rows.items()}
    bucketed = counts.pop("bucket + prefetch")
    assert len(set(counts.values())) == 1
    assert bucketed < counts["as traced"] / 2


def test_every_order_is_simulated_to_expose_less(rows: dict[str, dict[str, Any]]) -> None:
    traced = rows["as traced"]["exposed ms"]
    assert all(row["exposed ms"] < traced for name, row in rows.items() if name != "as traced")
    assert rows["overlap"]["exposed ms"] <= rows["prefetch"]["exposed ms"]


def test_tuned_stages_give_the_gradients_of_the_same_rules_in_all_of_them() -> None:
    """In torch's pipeline on four ranks, of which each holds no more than it may."""
    row = stages.run_slept(1)
    assert row["gradients"] == "equal"
    assert row["step s"] < row["same rules s"]
    assert " stage" in row["policy"].partition("schedule 1f1b")[2].partition("expect")[0].partition("\n")[2]
