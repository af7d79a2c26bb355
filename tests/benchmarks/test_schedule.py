"""The benchmark of orders: torch's passes run without a GPU on our times, and steps take the time that is simulated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch import fx

from benchmarks import schedule, schedule_peers
from benchmarks.schedule_graphs import cut, laid_out, process_groups, synthetic_half
from benchmarks.schedule_on_ranks import combined, started_early
from benchmarks.slept_steps import SleptGraph, simulated
from policylang.api.load import load_device
from policylang.graph.facts import Group
from policylang.language.devices.profile import DeviceProfile, Network, Rate
from policylang.simulation.collective_times import CollectivePrices
from policylang.simulation.node_times import node_times
from tests.support.sharded import fake_ranks
from tests.support.textgraph import facts_of

REFERENCE = load_device(schedule.REFERENCE)
SMALL = synthetic_half(150)
"""Two blocks."""


def test_torch_schedules_by_our_times_without_a_gpu() -> None:
    with process_groups(SMALL.groups):
        before = schedule.judged(schedule.as_traced(SMALL), REFERENCE)
        alone, bucketed = (
            schedule.judged(schedule.of_torch(SMALL, REFERENCE, name), REFERENCE)
            for name in ("torch", "torch, pre-bucketing")
        )
    assert alone["exposed ms"] < before["exposed ms"]
    assert alone["collectives"] == before["collectives"] == 28
    assert bucketed["collectives"] < 28
    assert [node.name for node in SMALL.graph.nodes] == list(SMALL.facts.names)  # it got copies


def test_times_are_those_of_the_profile_and_a_size_of_nothing_is_its_latency() -> None:
    module = SMALL.fresh()
    prices = schedule_peers._Prices(SMALL, module, REFERENCE)
    times = node_times(SMALL.facts, REFERENCE)
    gather = next(row for row, target in enumerate(SMALL.facts.targets) if "all_gather" in target)
    node = list(module.graph.nodes)[gather]
    assert prices.milliseconds(node, None) == 1e3 * times.seconds[gather]
    assert prices.milliseconds(node, 0) == pytest.approx(1e3 * 30e-6)
    new = module.graph.node_copy(node)  # what a pass adds is priced when it asks
    assert prices.milliseconds(new, None) == prices.milliseconds(node, None)


def test_products_wait_for_the_scatter_that_ends_a_long_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = facts_of(
        """
        %x = input bytes=8
        %grad = aten.mm.default(%x) compute bytes=8
        %one = aten.mm.default(%x) compute bytes=8
        %two = aten.mm.default(%one) compute bytes=8
        %sent = _c10d_functional.reduce_scatter_tensor.default(%grad) collective bytes=4 group=dp:2
        %here = _c10d_functional.wait_tensor.default(%sent) bytes=4
        """
    )
    for most, named in ((1, "grad sent one two here"), (2, "grad one sent two here"), (3, "grad one two sent here")):
        monkeypatch.setattr(schedule, "AT_MOST", most)
        assert " ".join(facts.names[row] for row in schedule.at_most(facts, range(1, 6))) == named


def test_torch_plans_by_the_names_of_blocks() -> None:
    assert schedule.blocks_of(SMALL.facts) == ["layers.1", "layers.0"]
    with process_groups(SMALL.groups):
        found = schedule.judged(schedule.of_torch(SMALL, REFERENCE, schedule.MANUAL), REFERENCE)
    assert found["collectives"] == 4  # a gather and a scatter of each block


def test_groups_that_are_all_numbered_from_0_become_dimensions_of_a_mesh() -> None:
    ranks = (0, 1, 2, 3)
    found = laid_out({"0": Group("0", ranks, 4), "1": Group("1", ranks, 4), "2": Group("2", (0, 5), 2)})
    assert found["0"].ranks == (0, 4, 8, 12)
    assert found["1"].ranks == ranks
    assert found["2"].ranks == (0, 5)


def test_a_table_of_times_takes_the_place_of_the_networks(tmp_path: Path) -> None:
    path = tmp_path / "measured.table"
    path.write_text(
        "Group  Group Size  Collective  1MB (ms)  32MB (ms)\n"
        "0  64  all_gather_into_tensor  1.0  8.0\n"
        "1  8  all_gather_into_tensor  0.1  0.5\n"
    )
    device = schedule.with_times(REFERENCE, path)
    gather = next(row for row, target in enumerate(SMALL.facts.targets) if "all_gather" in target)
    near = evolve(SMALL.facts, groups={"0": Group("0", tuple(range(8)), 8)})
    prices = CollectivePrices(device)
    assert prices.seconds(SMALL.facts, gather) == pytest.approx((1 - 7 / 62) * 1e-3)  # 512 KiB: the line
    assert prices.seconds(near, gather) < 1.1e-4
    assert device.name == "measured"


def test_a_flat_graph_is_cut_where_its_backward_begins() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = graph.call_function(torch.ops.aten.mm.default, (x, w))
    seed = graph.call_function(torch.ops.aten.ones_like.default, (product,))
    gradient = graph.call_function(torch.ops.aten.mm.default, (seed, w))
    graph.output((product, gradient))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, 4, device="meta")
    for node in (seed, gradient):
        node.meta["custom"] = {"phase": "backward"}
    forward, backward = cut(graph)
    assert [node.name for node in forward.nodes] == ["x", "w", "mm_default", "output"]
    assert [node.name for node in backward.nodes] == ["mm_default", "w", "ones_like_default", "mm_default_1", "output"]
    assert [node.op for node in backward.nodes][:2] == ["placeholder", "placeholder"]
    (read,) = (node.args[0] for node in forward.nodes if node.op == "output")
    assert [node.name for node in read] == ["mm_default", "w"]


# --- steps that are slept through ------------------------------------------------------------------------------------

SLEEPY = DeviceProfile(
    "sleepy",
    {"float32": Rate.constant(1e15)},
    Rate.constant(1e15),
    networks=(Network(bandwidth=1e15, latency=2e-3),),
)


def reduced(count: int) -> fx.GraphModule:
    """Sums over ranks, each awaited where it is used; on one process that pretends to be several, of equal terms."""
    graph = fx.Graph()
    c10d = torch.ops._c10d_functional
    found = []
    for number in range(count):
        given = graph.placeholder(f"x_{number}")
        doubled = graph.call_function(torch.ops.aten.add.Tensor, (given, given))
        start = graph.call_function(c10d.all_reduce.default, (doubled, "sum", "0"))
        awaited = graph.call_function(c10d.wait_tensor.default, (start,))
        found.append(graph.call_function(torch.ops.aten.mul.Tensor, (awaited, given)))
    graph.output(tuple(found))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, device="meta")
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_step_that_is_slept_through_gives_what_the_graph_gives() -> None:
    values = [torch.arange(4.0) + number for number in range(3)]
    with fake_ranks(4):
        module = reduced(3)
        slept = SleptGraph(module, SLEEPY)
        try:
            returned, seconds = slept.run(values)
        finally:
            slept.close()
        expected = module(*values)
        foreseen = simulated(module, SLEEPY)
    assert all(map(torch.equal, returned, expected))
    assert foreseen.step == pytest.approx(6e-3, rel=1e-3)
    assert seconds >= foreseen.step  # nothing was left out: three that wait for each other


def test_a_graph_is_reordered_by_hand_within_its_data_flow() -> None:
    module = SMALL.fresh()
    before = [node.name for node in module.graph.nodes]
    started_early(module, ahead=3)
    after = [node.name for node in module.graph.nodes]
    assert sorted(before) == sorted(after)
    gather = "all_gather_into_tensor_default_4"
    assert after.index(gather) < before.index(gather)


def test_the_slowest_rank_counts_and_one_that_differs_is_told() -> None:
    rows = [
        [{"policy": name, "simulated ms": said, "measured ms": slow * rank, "bits": bits} for name, said, slow in STEPS]
        for rank, bits in ((1.0, "equal"), (1.1, "1e-07 apart"))
    ]
    traced, overlap = combined(rows)
    assert traced["measured ms"] == pytest.approx(220)
    assert traced["bits"] == "1e-07 apart"
    assert overlap["falls by, simulated"] == pytest.approx(0.5)
    assert overlap["measured / simulated"] == pytest.approx(1.21)


STEPS = (("as traced", 200.0, 200.0), ("overlap", 100.0, 110.0))
