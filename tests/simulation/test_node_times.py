"""The time of each node: by hand, against the slow account and of recorded graphs, and what lacks a figure."""

from functools import cache
from math import prod
from pathlib import Path

import pytest
from hypothesis import strategies as st

import policylang
from policylang.errors import PolicyError
from policylang.graph import snapshot
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Flag, GraphKind, Group, Ref
from policylang.graph.recorded import recorded_facts
from policylang.language.devices.profile import DeviceProfile, Network, Rate
from policylang.language.devices.reading import read_device
from policylang.language.loader import parse_policy
from policylang.planning.capabilities import capabilities_for
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.planning.schedule import build_schedule
from policylang.report.rendering import plan_times_text
from policylang.simulation.node_times import NodeTimes, is_fused, lacking, node_times
from policylang.simulation.streams import step_time
from tests.simulation.test_step_time import slow_seconds
from tests.support.drawn import drawn
from tests.support.flat_graphs import flat_graph
from tests.support.joint import capture_joint
from tests.support.models import ZOO
from tests.support.textgraph import GraphBuilder, facts_of

WIDTH = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int64": 8, "bool": 1, "int8": 1}
FLAT = DeviceProfile(
    "flat",
    {"float32": Rate.constant(10.0), "bfloat16": Rate.constant(100.0), "float8_e4m3fn": Rate.constant(1000.0)},
    Rate.constant(10.0),
    pointwise=0.5,
    attention=0.25,
    host_bandwidth=2.0,
)
"""A device so slow that seconds are whole numbers."""


class Built(GraphBuilder):
    """Rows with a shape, a dtype, and strides of a tensor that lies densely unless they are given."""

    def tensor(self, target: str, inputs: tuple[int, ...] = (), shape=(4,), dtype="float32", **more) -> int:
        strides = more.pop("strides", tuple(prod(shape[at + 1 :]) for at in range(len(shape))))
        numel = prod(shape)
        size = {"shape": shape, "numel": numel, "bytes": numel * WIDTH[dtype], "strides": strides}
        return self.add(f"n_{len(self.rows)}", target, inputs, dtype=dtype, **{"device": "cuda:0", **size, **more})


def of_last(built: Built, device: DeviceProfile = FLAT) -> float:
    return priced(built, device).seconds[-1]


def priced(built: Built, device: DeviceProfile = FLAT) -> NodeTimes:
    return node_times(built.facts(GraphKind.FLAT), device)


def test_an_operator_takes_the_longer_of_computing_and_moving() -> None:
    built = Built()
    x = built.tensor("input", shape=(5, 5))
    built.tensor("aten.mm.default", (x,), shape=(5, 5), flops=1000)
    assert of_last(built) == 100  # 1000 FLOP at 10; 200 bytes would take 20
    built.tensor("aten.mm.default", (x,), shape=(5, 5), flops=100)
    assert of_last(built) == 20


@pytest.mark.parametrize(
    ("operands", "seconds"),
    [
        (("bfloat16", "bfloat16"), 10),
        (("float8_e4m3fn", "float8_e4m3fn"), 1),
        (("bfloat16", "float8_e4m3fn"), 10),  # the narrower is brought to the wider
        (("float8_e4m3fn", "bfloat16"), 10),
    ],
)
def test_the_dtype_of_a_product_is_that_of_its_operands(operands: tuple[str, str], seconds: float) -> None:
    built = Built()
    bias = built.tensor("input", shape=(2,), dtype="float32")
    scale = built.tensor("input", shape=(2, 1), dtype="float32")
    index = built.tensor("input", shape=(1, 2), dtype="int64")
    left, right = (built.tensor("input", shape=(1, 1), dtype=dtype) for dtype in operands)
    built.tensor("aten._scaled_mm.default", (index, bias, left, right, scale), shape=(1, 1), flops=1000)
    device = DeviceProfile("fast memory", FLAT.compute, Rate.constant(1e9))
    assert of_last(built, device) == seconds


def test_products_of_whole_numbers_are_products_of_whole_numbers() -> None:
    built = Built()
    x = built.tensor("input", shape=(2, 2), dtype="int64")
    built.tensor("aten.mm.default", (x,), shape=(2, 2), dtype="int64", flops=16)
    times = priced(built)
    assert times.unknown_dtypes == {"int64": 1}
    assert times.seconds[-1] == 6.4  # by its bytes


def test_attention_reaches_a_share() -> None:
    built = Built()
    query = built.tensor("input", shape=(1, 1), dtype="bfloat16")
    for target in ("aten._scaled_dot_product_flash_attention.default", "higher_order.flex_attention"):
        built.tensor(target, (query,), shape=(1, 1), dtype="bfloat16", flops=1000)
        assert of_last(built) == 40


def test_views_pieces_waits_sizes_and_allocations_take_no_time() -> None:
    built = Built()
    x = built.tensor("input")
    built.tensor("aten.view.default", (x,), flags=Flag.VIEW)
    built.tensor("aten._unsafe_view.default", (x,))
    several = built.tensor("aten.native_layer_norm.default", (x,), flags=Flag.MULTI_OUTPUT)
    piece = built.tensor("builtin.getitem", (several,))
    built.tensor("_c10d_functional.wait_tensor.default", (piece,))
    built.tensor("aten.empty.memory_format", ())
    built.add("size", "aten.sym_size.int", (x,), flags=Flag.SYMBOLIC)
    built.add("sum", "builtin.add", (x,))
    built.add("check", "aten._assert_async.msg", (x,))
    assert [seconds for seconds in priced(built).seconds if seconds] == [3.2]  # the norm


def test_a_compiler_moves_a_share_of_what_pointwise_operators_and_reductions_move() -> None:
    casts = ("aten._to_copy.default", "prims.convert_element_type.default", "autoparallel.dtype_cast.default")
    fused = ("mul.Tensor", "add_.Tensor", "native_dropout.default", "mean.dim", "where.self")
    for target in (*casts, *(f"aten.{name}" for name in fused)):
        assert is_fused(target), target
    for target in ("mylib.add.default", *(f"aten.{name}.default" for name in ("mm", "_softmax", "cat", "sort"))):
        assert not is_fused(target), target
    built = Built()
    x = built.tensor("input")
    built.tensor("aten.mul.Tensor", (x, x))
    built.tensor("aten.cat.default", (x,))
    assert [*priced(built).seconds] == [0, 2.4, 3.2]  # `x` twice: the builder does not take duplicates out


def test_an_expanded_tensor_is_read_as_often_as_it_lies_in_memory() -> None:
    built = Built()
    wide = built.tensor("input", shape=(5, 10), strides=(0, 1))
    built.tensor("aten.cat.default", (wide,), shape=(10,))
    assert of_last(built) == (40 + 40) / 10
    window = built.tensor("input", shape=(3, 4), strides=(1, 1))  # 6 elements
    built.tensor("aten.cat.default", (window,), shape=(10,))
    assert of_last(built) == (24 + 40) / 10


def test_look_ups_read_what_they_find() -> None:
    built = Built()
    table = built.tensor("input", shape=(1000, 5))
    index = built.tensor("input", shape=(2,), dtype="int64")
    built.tensor("aten.embedding.default", (table, index), shape=(2, 5))
    assert of_last(built) == (40 + 40 + 16) / 10
    built.tensor("aten._embedding_bag.default", (table, index), shape=(1, 5))
    assert of_last(built) == (40 + 20 + 16) / 10


def test_what_is_written_in_place() -> None:
    built = Built()
    x, value = built.tensor("input", shape=(1000,)), built.tensor("input", shape=(5,))
    index = built.tensor("input", shape=(5,), dtype="int64")
    written = Flag.WRITES
    built.tensor("aten.index_put_.default", (x, index, value), shape=(1000,), flags=written)
    assert of_last(built) == (40 + 20 + 2 * 40) / 10
    built.tensor("aten.zero_.default", (x,), shape=(1000,), flags=written)
    assert of_last(built) == 200  # 4000 bytes written, none read, half of it fused
    built.tensor("aten.mm.out", (value, x), shape=(1000,), flags=written)
    assert of_last(built) == (20 + 4000) / 10
    built.add("step", "aten._fused_adamw_.default", (x, value), flags=written)
    assert of_last(built) == 2 * (4000 + 20) / 10
    built.add("kernel", "higher_order.triton_kernel_wrapper_mutation", (x, value), flags=written)
    assert of_last(built) == (4000 + 20) / 10


def test_copies_to_the_host_and_back_go_at_the_host_s_pace() -> None:
    built = Built()
    x = built.tensor("input")
    there = built.tensor("aten._to_copy.default", (x,), device="cpu")
    back = built.tensor("prims.device_put.default", (there,))
    number = built.tensor("input", shape=(), device="cpu")
    built.tensor("aten.mul.Tensor", (number, back))
    assert [*priced(built).seconds] == [0, 8, 8, 0, 0.5 * (4 + 32) / 10]
    assert problem(built, DeviceProfile("alone", {}, Rate.constant(1.0))) == (
        "copy between the device and the host (2 calls)",
        "add `[host]` with `bandwidth = …`, in bytes per second per direction",
    )


def test_what_has_no_formula_is_priced_by_its_bytes_and_named() -> None:
    built = Built()
    x = built.tensor("input")
    built.tensor("mylib.scan.default", (x,), uncounted="mylib.scan.default")
    times = priced(built)
    assert (times.seconds[-1], times.uncounted) == (3.2, {"mylib.scan.default": 1})
    assert lacking(times) is None


def problem(built: Built, device: DeviceProfile = FLAT, *, copies: bool = False) -> tuple[str, str]:
    """What is said of a profile that lacks a figure, after `has no figure for`, and what to do."""
    found = lacking(priced(built, device), copies=copies)
    assert found.code == "APL159"
    return found.message.removeprefix(f"the profile of `{device.name}` has no figure for "), found.help or ""


def test_what_a_profile_lacks_is_an_error_that_says_what_to_add() -> None:
    built = Built()
    pair = built.add("pair", "input", ())
    built.add("product", "mylib.pair_product.default", (pair,), flops=16)
    said, help = problem(built)
    assert said == "matrix work in an unknown dtype (1 call)"
    assert "no dtype in this graph" in help
    built = Built()
    x = built.tensor("input", shape=(2, 2), dtype="int8")
    built.tensor("aten._int_mm.default", (x,), shape=(2, 2), flops=16)
    said, help = problem(built, copies=True)
    assert said == "matrix work in int8 (1 call)"
    assert help.startswith("add `int8 = …` to `[compute]`")
    no_host = DeviceProfile("no host", {"int8": Rate.constant(1)}, Rate.constant(1))
    assert lacking(priced(built, no_host)) is None
    assert problem(built, no_host, copies=True)[0] == "copies to the host"
    built = Built()
    x = built.tensor("input")
    built.tensor("_c10d_functional.all_reduce.default", (x,), flags=Flag.COLLECTIVE, group="dp:64")
    said, help = problem(built, DeviceProfile("d", {}, Rate.constant(1), networks=(Network(8, 1.0),)))
    assert said == "all-reduce among 64 ranks (1 call)"
    assert help.startswith("add a `[[network]]`")


def test_a_kernel_that_gathers_while_it_multiplies_takes_the_longer_of_both() -> None:
    built = Built()
    x = built.tensor("input", shape=(2, 2))
    more = {"flags": Flag.COLLECTIVE, "group": "tp:2", "shape": (4, 2)}
    built.tensor("symm_mem.fused_all_gather_matmul.default", (x,), flops=1000, **more)
    device = DeviceProfile("d", FLAT.compute, Rate.constant(1e9), networks=(Network(bandwidth=1.0),))
    assert of_last(built, device) == 100
    built.tensor("symm_mem.fused_all_gather_matmul.default", (x,), flops=10, **more)
    assert of_last(built, device) == 16


def test_overhead_is_a_kernel_s_and_fused_operators_share_one() -> None:
    built = Built()
    x = built.tensor("input", shape=())
    built.tensor("aten.cat.default", (x,), shape=())
    built.tensor("aten.mul.Tensor", (x,), shape=())
    device = DeviceProfile("d", {}, Rate.constant(8.0), pointwise=0.5, overhead=100.0)
    assert [*priced(built, device).seconds] == [0, 101, 50.5]


def test_times_are_worked_out_once_for_equal_figures_and_name() -> None:
    built = Built()
    built.tensor("input")
    facts = built.facts(GraphKind.FLAT)
    again = DeviceProfile("flat", dict(reversed(FLAT.compute.items())), FLAT.bandwidth, 0.5, 0.25, host_bandwidth=2)
    assert node_times(facts, FLAT) is node_times(facts, again)
    assert node_times(facts, DeviceProfile("other", {}, Rate.constant(1.0))).device.name == "other"


# --- against the slow account ----------------------------------------------------------------------------------------
TARGETS = (
    *("aten.mm.default", "aten.bmm.default", "aten._scaled_dot_product_flash_attention.default"),
    *("aten.add.Tensor", "aten.mul.Tensor", "aten.add_.Tensor", "prims.convert_element_type.default", "aten.sum.dim"),
    *("aten.cat.default", "aten._softmax.default", "aten.embedding.default", "aten.copy_.default", "mylib.op.default"),
    *("aten.view.default", "aten.expand.default", "builtin.getitem", "_c10d_functional.wait_tensor.default"),
)
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "broadcast")
RATES = st.lists(
    st.tuples(st.sampled_from([1.0, 8.0, 100.0]), st.integers(1, 50)), min_size=1, max_size=3, unique_by=lambda p: p[0]
)


def rate(points: list[tuple[float, int]]) -> Rate:
    return Rate(tuple((size, float(figure)) for size, figure in sorted(points)))


@st.composite
def devices(draw: st.DrawFn) -> DeviceProfile:
    networks = draw(st.lists(st.tuples(st.sampled_from([None, 2, 4]), st.integers(1, 9)), max_size=2))
    return DeviceProfile(
        "any",
        {dtype: rate(draw(RATES)) for dtype in draw(st.sets(st.sampled_from(["float32", "bfloat16", "int8"])))},
        rate(draw(RATES)),
        pointwise=draw(st.sampled_from([1.0, 0.35])),
        attention=draw(st.sampled_from([1.0, 0.5])),
        overhead=draw(st.sampled_from([0.0, 2.0])),
        host_bandwidth=draw(st.sampled_from([None, 3.0])),
        networks=tuple(Network(ranks, float(bandwidth), 0.5) for ranks, bandwidth in networks),
    )


@st.composite
def tensors(draw: st.DrawFn) -> Facts:
    built = Built()
    built.groups = {
        name: Group(name, ranks, len(ranks))
        for name, ranks in (("one", (3,)), ("near", (4, 5)), ("far", (3, 4)), ("four", (0, 1, 2, 3)))
    }
    for _ in range(draw(st.integers(2, 12))):
        earlier = list(range(len(built.rows)))
        reads = tuple(draw(st.lists(st.sampled_from(earlier), max_size=3, unique=True))) if earlier else ()
        shape = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
        strides = draw(st.sampled_from(["dense", "zeros", "window", None]))
        given = {"shape": shape, "dtype": draw(st.sampled_from(sorted({*WIDTH} - {"bool"})))}
        if strides != "dense":
            given["strides"] = strides and tuple(0 if strides == "zeros" else 1 for _ in shape)
        if not reads:
            built.tensor("input", **given)
        elif draw(st.integers(0, 3)):
            target = draw(st.sampled_from(TARGETS))
            flags = Flag.VIEW if target in ("aten.view.default", "aten.expand.default") else 0
            multiplies = "mm" in target or "attention" in target
            built.tensor(target, reads, flops=draw(st.integers(0, 5)) * 100 * multiplies, flags=flags, **given)
        else:
            target = f"_c10d_functional.{draw(st.sampled_from(COLLECTIVES))}.default"
            group = draw(st.sampled_from(sorted(built.groups)))
            first = (Ref(reads[0]), group)
            built.tensor(target, reads[:1], flags=Flag.COLLECTIVE, group=group, arguments=first, **given)
    return built.facts(GraphKind.FLAT)


@drawn(60, 500, tensors(), devices())
def test_every_node_is_priced_as_the_slow_account_prices_it(facts: Facts, device: DeviceProfile) -> None:
    times = node_times(facts, device)
    for row in range(len(facts)):
        assert times.seconds[row] == pytest.approx(slow_seconds(facts, row, device)), facts.targets[row]


DATA = Path(__file__).parents[1] / "data"
BASELINE = {"bfloat16": Rate.constant(600e12), "float32": Rate.constant(600e12)}
RING = Network(bandwidth=45e9, latency=30e-6)
"""The cost model of the baseline: 600 TFLOP/s, 2.6 TB/s, pointwise operators 0.35 of their bytes, and collectives
30 µs and their bytes at 45 GB/s."""


def device(*networks: Network) -> DeviceProfile:
    return DeviceProfile("baseline", BASELINE, Rate.constant(2.6e12), pointwise=0.35, networks=networks)


@cache
def forward() -> Facts:
    return recorded_facts(DATA / "llama3_8b_fsdp64_forward.json.gz")


def test_the_forward_of_64_ranks_waits_for_every_gather_as_traced() -> None:
    """The baseline says 365.6 ms: 291 gathers, and what each returns at 45 GB/s. A ring sends 63 of 64 shards, as
    a rank has its own: 360.1 ms, and that is the whole difference."""
    facts = forward()
    gathers = [row for row, flags in enumerate(facts.flags) if flags & Flag.COLLECTIVE]
    found = step_time(facts, build_schedule(facts, ()), node_times(facts, device(RING)))
    assert len(gathers) == 291
    assert found.exposed == pytest.approx(sum(30e-6 + facts.bytes[row] * 63 / 64 / 45e9 for row in gathers))
    assert round(sum(30e-6 + facts.bytes[row] / 45e9 for row in gathers) * 1e3, 1) == 365.6
    assert round(found.exposed * 1e3, 1) == 360.1
    assert found.step == pytest.approx(found.forward)  # nothing is hidden


def test_measured_tables_price_by_what_a_rank_puts_in(tmp_path: Path) -> None:
    """The recorded table of 64 ranks says 0.25 ms for a shard of 1 MiB, which is 264 GB/s of what is gathered."""
    text = (
        "[compute]\nbfloat16 = 600e12\n[memory]\nbandwidth = 2.6e12\n"
        f"[[network]]\ntimes = '{DATA / 'colls64_1.table'}'\n"
    )
    (tmp_path / "d.toml").write_text(text)
    profile = read_device("d.toml", tmp_path)
    facts = forward()
    times = node_times(facts, profile)
    assert lacking(times) is None
    first = next(row for row, flags in enumerate(facts.flags) if flags & Flag.COLLECTIVE)  # the embedding
    put = facts.bytes[first] / 64 / (1 << 20)
    assert 8 < put < 16
    assert times.seconds[first] == pytest.approx((1.5 + (2.9 - 1.5) * (put - 8) / 8) * 1e-3)


def test_a_table_of_two_networks_is_taken_apart_by_its_groups(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(
        "[compute]\nbfloat16 = 600e12\n[memory]\nbandwidth = 2.6e12\n"
        f"[[network]]\nranks = 8\ntimes = '{DATA / 'colls8_8.table'}'\ngroup = '1'\n"
        f"[[network]]\ntimes = '{DATA / 'colls8_8.table'}'\ngroup = '0'\n"
    )
    profile = read_device("d.toml", tmp_path)
    near, far = profile.networks
    assert {each.collective for each in near.times} == {"all_reduce", "all_gather_into_tensor"}
    assert len(far.times) == 3


def test_every_bundled_device_prices_all_of_the_recorded_forward() -> None:
    found = {}
    for name in ("a100", "h100", "h200", "b200", "mi300x", "cpu"):
        profile = read_device(name)
        times = node_times(forward(), profile)
        assert lacking(times) is None
        assert times.uncounted == {}
        found[name] = step_time(forward(), build_schedule(forward(), ()), times).step
    assert found["b200"] < found["h200"] <= found["h100"] < found["a100"] < found["cpu"]


def assert_same_times(facts: Facts) -> None:
    profile = read_device("cpu")
    again = snapshot.parse(snapshot.dump(facts))
    times, same = node_times(facts, profile), node_times(again, profile)
    assert list(times.seconds) == list(same.seconds)
    assert (times.uncounted, times.unpriced) == (same.uncounted, same.unpriced)
    assert lacking(times) is None
    schedule = build_schedule(facts, facts.forward)
    assert step_time(facts, schedule, times) == step_time(again, schedule, same)
    assert any(times.seconds)


def test_a_snapshot_has_the_times_of_its_graph() -> None:
    assert_same_times(forward())


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(ZOO))
def test_a_snapshot_of_a_model_has_the_times_of_its_graph(model: str) -> None:
    """Joint and flat; and nothing of a real model is without a price but what has no formula."""
    assert_same_times(collect(capture_joint(*ZOO[model]()).gm, kind=GraphKind.JOINT))
    if model != "mixtral":  # eager's grouped product takes bfloat16 alone
        assert_same_times(collect(flat_graph(ZOO[model]()).gm, kind=GraphKind.FLAT))


PROFILE = """
[compute]
float32 = 10
{compute}
[memory]
bandwidth = 10
pointwise = 0.5
{operators}
"""


def profile(folder: Path, operators: str = "", compute: str = "") -> DeviceProfile:
    path = folder / "slow.toml"
    path.write_text(PROFILE.format(operators=operators, compute=compute), encoding="utf-8")
    return read_device(path)


def seconds(device: DeviceProfile, target: str, flops: int = 0) -> float:
    """Of an operator that reads and writes 20 bytes each."""
    built = GraphBuilder()
    like = {"shape": (5,), "numel": 5, "bytes": 20, "strides": (1,), "dtype": "float32", "device": "cpu"}
    x = built.add("x", "input", (), **like)
    built.add("y", target, (x,), flops=flops, **like)
    return node_times(built.facts(GraphKind.FLAT), device).seconds[-1]


def test_an_operator_is_no_faster_than_its_own_rate(tmp_path: Path) -> None:
    assert seconds(profile(tmp_path), "aten.tanh.default") == 2  # half of 40 bytes
    slow = profile(tmp_path, "[operators]\ntanh = 4\n'my_kernels.norm' = 2\n'aten.exp' = 1000")
    assert seconds(slow, "aten.tanh.default") == 10
    assert seconds(slow, "aten.exp.default") == 2
    assert seconds(slow, "my_kernels.norm.default") == 20
    assert seconds(slow, "aten.tanh_backward.default") == seconds(profile(tmp_path), "aten.tanh_backward.default")


def test_convolutions_reach_a_share_of_products_and_may_exceed_it(tmp_path: Path) -> None:
    target = "aten.convolution_backward.default"
    assert seconds(profile(tmp_path), target, 1000) == 100
    assert seconds(profile(tmp_path, compute="convolution = 2"), target, 1000) == 50
    assert seconds(profile(tmp_path, compute="convolution = 2"), "aten.mm.default", 1000) == 100


GRAPH = """
    %x = input bytes=8
    %w = parameter bytes=8 shape=2x2 dtype=int8
    %g = _c10d_functional.all_gather_into_tensor.default(%x) collective group=dp:4 bytes=32
    %gw = _c10d_functional.wait_tensor.default(%g) bytes=32
    %a = aten.mm.default(%w, %gw) layers.0 bytes=32 flops=100
    %b = aten.sin.default(%a) layers.0 bytes=32
    %loss = aten.sum.default(%b) bytes=4
    ---
    %t = tangent bytes=4
    %db = aten.mul.Tensor(%t, %b) bytes=32
    %da = aten.mul.Tensor(%db, %a) bytes=32
    output(%loss, %da)
"""
POOR = DeviceProfile("poor", {"float32": Rate.constant(1.0)}, Rate.constant(1.0))


@pytest.fixture(scope="module")
def facts() -> Facts:
    return facts_of(GRAPH)


def planned(text: str, facts: Facts) -> Plan:
    policy = parse_policy(text).policy
    return plan(policy, facts, capabilities_for(facts.kind), device=POOR)


@pytest.mark.parametrize(
    ("text", "underlined"),
    [
        ("save everything where time > 4 s", "time > 4 s"),
        ("save everything\nexpect recomputed time <= 8%", "expect recomputed time <= 8%"),
    ],
)
def test_a_policy_that_speaks_of_time_is_refused(text: str, underlined: str, facts: Facts) -> None:
    (found,) = [each for each in planned(text, facts).diagnostics if each.code == "APL159"]
    assert found.message == "the profile of `poor` has no figure for matrix work in int8 (1 call)"
    assert found.details == ("nor for all-gather among 4 ranks (1 call)",)
    assert found.span.text == underlined


def test_whoever_names_the_device_wants_its_times(facts: Facts) -> None:
    (found,) = [each for each in planned("save everything", facts).diagnostics if each.code == "APL159"]
    assert found.span is None


def test_times_that_are_only_shown_are_not_shown_and_it_is_said_why(facts: Facts) -> None:
    why = "no times: the profile of `poor` has no figure for matrix work in int8 (1 call)"
    assert plan_times_text(planned("save everything", facts)) == why


def test_nothing_is_tuned_by_times_that_are_not_known(facts: Facts) -> None:
    pytest.importorskip("highspy")
    with pytest.raises(PolicyError) as raised:
        policylang.tune(facts, peak="1 KiB", device=POOR)
    assert [each.code for each in raised.value.diagnostics] == ["APL159"]


def test_a_path_is_a_path_in_python_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").write_text("[compute]\nfloat32 = 1e9\n[memory]\nbandwidth = 7e9\n")
    monkeypatch.chdir(tmp_path)
    assert policylang.load_device(Path("cpu")).bandwidth == Rate.constant(7e9)
    assert policylang.load_device("cpu").bandwidth != Rate.constant(7e9)
    with pytest.raises(PolicyError):
        policylang.load_device(3)  # type: ignore[arg-type]
