"""What calls do: by their schemas, which memory they write, and how much they compute."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from policylang.graph.facts import Flag
from policylang.operators.calls import (
    describe,
    draws_random,
    effects,
    may_write,
    statistics_positions,
    written_statistics,
)
from policylang.operators.names import KNOWN, could_do_matrix_work
from policylang.operators.work import Work, WorkCounter
from policylang.torch_compat.graphs import operator_facts, operator_names

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (aten.mm.default, "aten.mm.default"),
        (torch.ops.prims.convert_element_type.default, "prims.convert_element_type.default"),
        (c10d.all_gather_into_tensor.default, "_c10d_functional.all_gather_into_tensor.default"),
        (torch.ops.higher_order.flex_attention, "higher_order.flex_attention"),
        (operator.getitem, "builtin.getitem"),
        (operator.floordiv, "builtin.floordiv"),
        (torch.sym_max, "torch.sym_max"),
        (len, "builtin.len"),
    ],
)
def test_names(target: object, name: str) -> None:
    assert describe(target).name == name


@pytest.mark.parametrize(
    ("target", "flags"),
    [
        (aten.mm.default, Flag.COMPUTE), (aten.view.default, Flag.VIEW),
        (aten.split.Tensor, Flag.VIEW | Flag.MULTI_OUTPUT),
        (aten.native_dropout.default, Flag.RANDOM | Flag.MULTI_OUTPUT), (aten.rand_like.default, Flag.RANDOM),
        (aten.add_.Tensor, Flag.WRITES), (aten.copy_.default, Flag.WRITES), (aten._assert_async.msg, Flag.EFFECTFUL),
        (aten._assert_scalar.default, Flag.EFFECTFUL), (c10d.all_gather_into_tensor.default, Flag.COLLECTIVE),
        (c10d.reduce_scatter_tensor.default, Flag.COLLECTIVE),
        (c10d.all_reduce_.default, Flag.COLLECTIVE | Flag.WRITES), (c10d.wait_tensor.default, 0),
        (torch.ops.higher_order.with_effects, Flag.EFFECTFUL),
        (torch.ops.higher_order.run_and_save_rng_state, Flag.RANDOM), (torch.ops.higher_order.run_with_rng_state, 0),
        (operator.getitem, 0),
    ],
)  # fmt: skip
def test_flags(target: object, flags: int) -> None:
    assert describe(target).flags == flags


def test_collectives_that_are_not_functional_have_effects() -> None:
    flags = describe(torch.ops.c10d.allreduce_.default).flags
    assert flags & Flag.EFFECTFUL
    assert flags & Flag.WRITES


@pytest.mark.parametrize(
    ("args", "kwargs", "draws"),
    [
        ((0.0,), {}, False),
        ((0.1,), {}, True),
        ((), {"dropout_p": 0.0}, False),
        ((), {"dropout_p": 0.5}, True),
        ((), {}, False),
    ],
)
def test_attention_draws_where_its_dropout_is_not_zero(args: tuple, kwargs: dict[str, float], draws: bool) -> None:
    q = fx.Graph().placeholder("q")
    attention = describe(aten._scaled_dot_product_flash_attention.default)
    assert attention.flags & Flag.RANDOM
    node = q.graph.call_function(aten._scaled_dot_product_flash_attention.default, (q, q, q, *args), kwargs)
    assert draws_random(attention, node) is draws


def test_dropout_draws_in_training() -> None:
    x, target = fx.Graph().placeholder("x"), aten.native_dropout.default
    for train, draws in ((True, True), (None, True), (False, False)):
        assert draws_random(describe(target), x.graph.call_function(target, (x, 0.5, train))) is draws


def test_a_triton_kernel_writes_whatever_it_is_given() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    given = {"kernel_idx": 0, "grid": [(1,)], "kwargs": {"in": x, "out": y}}
    node = graph.call_function(triton_kernel_wrapper_mutation, (), given)
    assert may_write(node)
    assert effects(node) == ([], [x, y])


def test_an_operator_inside_another_is_read_behind_it() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    wrapper = torch.ops.higher_order.run_and_save_rng_state
    assert effects(graph.call_function(wrapper, (aten.add_.Tensor, x, y))) == ([x], [x])
    assert effects(graph.call_function(wrapper, (aten.rand_like.default, x))) == ([], [])


def test_running_statistics_are_written_in_training_only() -> None:
    graph = fx.Graph()
    x, mean, var = (graph.placeholder(name) for name in ("x", "mean", "var"))
    for training, written in ((True, (3, 4)), (False, ())):
        call = graph.call_function(aten.native_batch_norm.default, (x, None, None, mean, var, training, 0.1, 1e-5))
        assert written_statistics(call) == written
    assert statistics_positions(aten.native_batch_norm.default) == (3, 4)
    assert statistics_positions(aten.batch_norm_update_stats.default) == ()


def called(target: Any, *args: Any, value: Any = None, **kwargs: Any) -> Work:
    """The work of one call, each tensor among its arguments being a node."""
    graph = fx.Graph()

    def placed(each: Any) -> Any:
        if isinstance(each, list) and any(isinstance(part, Tensor) for part in each):
            return [placed(part) for part in each]
        if not isinstance(each, Tensor):
            return each
        node = graph.placeholder("x")
        node.meta["val"] = each
        return node

    node = graph.call_function(target, tuple(map(placed, args)), {name: placed(each) for name, each in kwargs.items()})
    node.meta["val"] = target(*args, **kwargs) if value is None else value
    return WorkCounter().of(node)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def as_torch_counts(function: Callable[..., Any], *args: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops()


sizes = st.integers(1, 6)


@settings(max_examples=8)
@given(sizes, sizes, sizes, sizes, st.sampled_from(("mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "einsum")))
def test_products_are_counted_as_torch_counts_them(b: int, m: int, k: int, n: int, name: str) -> None:
    arguments = {
        "mm": (meta(m, k), meta(k, n)),
        "bmm": (meta(b, m, k), meta(b, k, n)),
        "addmm": (meta(n), meta(m, k), meta(k, n)),
        "baddbmm": (meta(b, m, n), meta(b, m, k), meta(b, k, n)),
        "linear": (meta(b, m, k), meta(n, k)),
        "matmul": (meta(b, m, k), meta(k, n)),
        "einsum": ("abk,kn->abn", [meta(b, m, k), meta(k, n)]),
    }[name]
    target = getattr(aten, name).default
    found = called(target, *arguments)
    assert found == Work(as_torch_counts(target, *arguments))
    if name != "einsum":  # torch multiplies dimensions of 1 element by element
        assert found.flops == 2 * (1 if name in ("mm", "addmm") else b) * m * k * n


@settings(max_examples=8)
@given(sizes, st.sampled_from((1, 2)), st.integers(1, 3), st.booleans(), st.integers(1, 2))
def test_convolutions_are_counted_as_torch_counts_them(batch, groups, width, transposed, rank) -> None:
    image = meta(batch, 4, *[5] * rank)
    weight = meta(4, 8 // groups if transposed else 4 // groups, *[width] * rank)
    call = (image, weight, None, [1] * rank, [0] * rank, [1] * rank, transposed, [0] * rank, groups)
    assert called(aten.convolution.default, *call).flops == as_torch_counts(aten.convolution.default, *call) > 0


@pytest.mark.parametrize(
    ("equation", "operands"),
    [
        ("bhqd, bhkd -> bhqk", [(2, 3, 8, 4), (2, 3, 16, 4)]),
        ("ab,bc->c", [(3, 4), (4, 5)]),  # a is summed before anything is multiplied
        ("i,j->ij", [(3,), (4,)]),  # no product of matrices
        ("...d,de->...e", [(2, 3, 4), (4, 5)]),
        ("ab,bc,cd->ad", [(2, 3), (3, 4), (4, 5)]),
        ("ii->i", [(3, 3)]),
    ],
)
def test_an_einsum_is_the_products_it_becomes(equation: str, operands: Any) -> None:
    tensors = [meta(*shape) for shape in operands]
    assert called(aten.einsum.default, equation, tensors) == Work(as_torch_counts(torch.einsum, equation, *tensors))


def test_every_operator_that_torch_composes_of_others_counts_as_they_do() -> None:
    query, cells = meta(2, 4, 6, 8), nn.LSTM(4, 8, num_layers=2, device="meta")
    one, two, weight = meta(5, 3), meta(5, 4), meta(6, 3, 4)
    state = [meta(2, 3, 8), meta(2, 3, 8)]
    weights = [each for group in cells.all_weights for each in group]
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.scaled_dot_product_attention.default, (query, query, query)),
        (aten.conv2d.default, (meta(1, 4, 6, 6), meta(8, 4, 3, 3))),
        (aten.conv_transpose1d.default, (meta(1, 4, 6), meta(4, 8, 3))),
        (aten.tensordot.default, (meta(3, 4), meta(4, 5), [1], [0])),
        (aten.linalg_multi_dot.default, ([meta(3, 4), meta(4, 5), meta(5, 2)],)),
        (aten.chain_matmul.default, ([meta(3, 4), meta(4, 5)],)),
        (aten.lstm.input, (meta(7, 3, 4), state, weights, True, 2, 0.0, True, False, False)),
    ]
    for target, arguments in calls:
        found = called(target, *arguments)
        assert found == Work(as_torch_counts(target, *arguments)), target
        assert found.flops > 0, target
    # of these torch has no formula for the operators they are made of
    assert called(aten.bilinear.default, one, two, weight, None) == Work(2 * 5 * 6 * 3 * 4 + 2 * 5 * 6 * 4)
    assert called(aten.linalg_solve.default, meta(4, 4), meta(4, 2)).uncounted == "aten._linalg_solve_ex.default"


@pytest.mark.parametrize(
    "kernel", ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"]
)
def test_attention_counts_a_head_of_keys_once_for_each_head_of_queries_that_it_serves(kernel: str) -> None:
    """Torch's own formulas refuse it before 2.13."""
    query, few, same, wrong = (meta(2, heads, length, 4) for heads, length in ((8, 16), (2, 32), (8, 32), (3, 32)))
    forward = getattr(aten, f"_scaled_dot_product_{kernel}").default
    backward = getattr(aten, f"_scaled_dot_product_{kernel}_backward").default
    products = 2 * 8 * 16 * 32 * 4
    for keys in (few, same):
        assert called(forward, query, keys, keys, value=(query,)) == Work(2 * 2 * products)
        assert called(backward, query, query, keys, keys, value=(query, keys, keys)) == Work(5 * 2 * products)
    assert called(forward, query, wrong, wrong, value=query).uncounted == str(forward)


def test_work_that_torch_has_no_formula_for_is_counted_by_hand() -> None:
    tokens, weights = 5 * 3, [(32, 4), (32, 8), (32,), (32,)]
    recurrent = 2 * tokens * (32 * 4 + 32 * 8)
    rnn = (meta(5, 3, 4), [meta(*each) for each in weights], 4, None, meta(1, 3, 8), meta(1, 3, 8))
    offsets = meta(3, dtype=torch.int32)
    made: list[tuple[Any, tuple[Any, ...], Any, int]] = [
        (aten.mv.default, (meta(3, 4), meta(4)), None, 2 * 3 * 4),
        (aten.dot.default, (meta(4), meta(4)), None, 2 * 4),
        (aten.addmv.default, (meta(3), meta(3, 4), meta(4)), None, 2 * 3 * 4),
        (aten.addbmm.default, (meta(3, 5), meta(2, 3, 4), meta(2, 4, 5)), None, 2 * 2 * 3 * 4 * 5),
        (aten.addmm_.default, (meta(3, 5), meta(3, 4), meta(4, 5)), None, 2 * 3 * 4 * 5),
        (aten._int_mm.default, (meta(32, 8), meta(8, 16)), meta(32, 16), 2 * 32 * 8 * 16),
        (
            aten._cudnn_rnn.default,
            (*rnn, 2, 8, 0, 1, False, 0.0, True, False, [], None),
            meta(5, 3, 8),
            recurrent,
        ),
        (aten._grouped_mm.default, (meta(16, 4), meta(3, 4, 8), offsets), meta(16, 8), 2 * 16 * 4 * 8),
        (aten._grouped_mm.default, (meta(3, 16, 4), meta(3, 4, 8)), meta(3, 16, 8), 3 * 2 * 16 * 4 * 8),
        (aten._grouped_mm.default, (meta(4, 16), meta(16, 8), offsets), meta(3, 4, 8), 2 * 4 * 16 * 8),
        (aten._grouped_mm.default, (meta(3, 16, 4), meta(4, 8), offsets), meta(16, 8), 2 * 16 * 4 * 8),
        (aten.conv_tbc.default, (meta(9, 2, 4), meta(3, 4, 6), meta(6)), meta(7, 2, 6), 2 * 7 * 2 * 6 * 3 * 4),
    ]
    if hasattr(aten, "_foreach_mm"):  # not in torch 2.11
        pairs = [meta(3, 4)] * 2, [meta(4, 5)] * 2
        made.append((aten._foreach_mm.default, pairs, [meta(3, 5)] * 2, 2 * 2 * 3 * 4 * 5))
    for target, arguments, value, flops in made:
        assert called(target, *arguments, value=value) == Work(flops), target


def test_no_operator_of_torch_is_taken_for_another_kind() -> None:
    """What torch itself tags as pointwise, as a reduction or as a view does no matrix work, and what it has a formula
    for does."""
    facts = operator_facts()
    taken = [name for fact in ("pointwise", "reduction", "view") for name in facts[fact] if could_do_matrix_work(name)]
    assert taken == []
    counted = [str(packet) for packet in flop_registry if str(packet).startswith("aten.")]
    assert [name for name in counted if not could_do_matrix_work(f"{name}.default")] == []
    names = [name for name in operator_names() if name.partition(".")[0] in KNOWN]
    assert 200 < len({name.rpartition(".")[0] for name in names if could_do_matrix_work(name)}) < 450
    for name in ("aten.upsample_bilinear2d.vec", "aten._thnn_fused_lstm_cell.default", "aten.convert.default"):
        assert not could_do_matrix_work(name)


@pytest.fixture(scope="module")
def library() -> torch.library.Library:
    library = torch.library.Library("flops_of_mine", "DEF")
    library.define("fused(Tensor x, Tensor w) -> Tensor")
    library.define("look(Tensor(a) x) -> Tensor(a)")
    library.define("scaled(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    library.define("told(Tensor x) -> ()")
    library.define("into(Tensor x, Tensor(a!) out) -> ()")
    return library


def test_a_custom_operator_is_not_counted_until_it_has_a_formula(library: torch.library.Library) -> None:
    mine = torch.ops.flops_of_mine
    x, w = meta(3, 4), meta(4, 5)
    assert called(mine.fused.default, x, w, value=meta(3, 5)) == Work(0, "flops_of_mine.fused.default")
    assert called(mine.into.default, x, w, value=()) == Work(0, "flops_of_mine.into.default")
    for spared, value in ((mine.look, x), (mine.scaled, x), (mine.told, ())):
        assert called(spared.default, x, value=value) == Work()
    register_flop_formula(mine.fused)(lambda left, right, **_: 2 * left[0] * left[1] * right[1])
    try:
        assert called(mine.fused.default, x, w, value=meta(3, 5)) == Work(2 * 3 * 4 * 5)
    finally:
        del flop_registry[mine.fused]


def test_a_formula_of_the_user_that_takes_tensors_is_handed_tensors(library: torch.library.Library) -> None:
    mine, seen = torch.ops.flops_of_mine, []

    def formula(left: Tensor, right: Tensor, *, out_val: Any, **_: Any) -> int:
        seen.append((left.dtype, tuple(right.shape), tuple(out_val.shape)))
        return 7

    register_flop_formula(mine.fused, get_raw=True)(formula)
    try:
        assert called(mine.fused.default, meta(3, 4), meta(4, 5), value=meta(3, 5)) == Work(7)
    finally:
        del flop_registry[mine.fused]
    assert seen == [(torch.float32, (4, 5), (3, 5))]


def test_a_formula_that_cannot_deal_with_a_call_leaves_it_uncounted() -> None:
    wrong = called(aten.mm.default, meta(3, 4), meta(5, 6), value=meta(3, 6))
    assert wrong == Work(0, "aten.mm.default")


def test_operators_inside_others_are_counted(library: torch.library.Library) -> None:
    higher, mine = torch.ops.higher_order, torch.ops.flops_of_mine
    product = (aten.mm.default, meta(3, 4), meta(4, 5))
    out, flops = meta(3, 5), 2 * 3 * 4 * 5
    state, token = torch.get_rng_state(), meta(0)
    assert called(higher.run_and_save_rng_state, *product, value=(state, out)) == Work(flops)
    assert called(higher.run_with_rng_state, state, *product, value=out) == Work(flops)
    assert called(higher.with_effects, token, *product, value=(token, out)) == Work(flops)
    unknown = called(higher.with_effects, token, mine.fused.default, out, out, value=(token, out))
    assert unknown.uncounted == "flops_of_mine.fused.default"
    into = {"x": meta(3, 4), "out": meta(4, 5), "value": (None, meta(4, 5))}
    assert called(higher.auto_functionalized, mine.into.default, **into).uncounted == "flops_of_mine.into.default"


def _with_body(name: str, bodies: list[Callable[..., Any]], *rest: Any, value: Any) -> Work:
    owner, graph = nn.Module(), fx.Graph()
    reads = []
    for number, body in enumerate(bodies):
        traced = make_fx(body)(torch.ones(3, 4), torch.ones(4, 4))
        setattr(owner, f"body_{number}", traced)
        reads.append(graph.get_attr(f"body_{number}"))
    places = []
    for each in rest:
        places.append(graph.placeholder(f"x{len(places)}") if isinstance(each, Tensor) else each)
        if isinstance(each, Tensor):
            places[-1].meta["val"] = each
    node = graph.call_function(getattr(torch.ops.higher_order, name), (*reads, *places))
    node.meta["val"] = value
    graph.output(node)
    kept = fx.GraphModule(owner, graph)
    return WorkCounter().of(next(each for each in kept.graph.nodes if each.op == "call_function"))


def test_the_graphs_inside_higher_order_operators_are_counted() -> None:
    x, out, flops = meta(3, 4), (meta(3, 4),), 2 * 3 * 4 * 4
    product, twice = (lambda x, w: x @ w), (lambda x, w: (x @ w) @ w)
    pointwise = lambda x, w: x.sin()  # noqa: E731
    assert _with_body("invoke_subgraph", [product], "first", x, x, value=out) == Work(flops)
    assert _with_body("cond", [product, twice], x, value=out) == Work(2 * flops)
    assert _with_body("while_loop", [pointwise, pointwise], (x,), (), value=out) == Work()
    assert _with_body("while_loop", [pointwise, product], (x,), (), value=out).uncounted == "higher_order.while_loop"
    assert _with_body("map_impl", [product], [meta(6, 3, 4)], value=out).flops == 6 * flops


def test_a_triton_kernel_is_named_until_it_has_a_formula() -> None:
    """There is no Triton on every machine: of a kernel no more is asked than its class and its name."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel = type("JITFunction", (), {"__name__": "fused_mlp_kernel"})()
    tuned = type("Autotuner", (), {"fn": kernel})()
    index = kernel_side_table.add_kernel(tuned)
    target = torch.ops.higher_order.triton_kernel_wrapper_functional
    call = {"kernel_idx": index, "grid": [(1, 1, 1)], "kwargs": {"x": 3}}
    assert called(target, value={}, **call) == Work(0, "triton.fused_mlp_kernel")
    flop_registry[kernel] = lambda *_, kwargs, **__: 100 * kwargs["x"]
    try:
        assert called(target, value={}, **call) == Work(300)
    finally:
        del flop_registry[kernel]


def test_what_a_real_expert_layer_falls_back_to_is_counted() -> None:
    pytest.importorskip("transformers.integrations.moe")
    theirs = torch.ops.transformers
    rows, experts, offsets = meta(16, 4), meta(3, 4, 8), meta(3, dtype=torch.int32)
    flops = 2 * 16 * 4 * 8
    assert called(theirs.grouped_mm_fallback.default, rows, experts, offsets, value=meta(16, 8)) == Work(flops)
    back = theirs.grouped_mm_fallback_backward.default
    assert called(back, rows, experts, offsets, meta(16, 8), value=(rows, experts)) == Work(2 * flops)


def test_a_linear_layer_counts_the_same_in_every_form_that_a_graph_has_of_it() -> None:
    x, w = meta(2, 5, 4), meta(8, 4)
    counted = Work(as_torch_counts(functional.linear, x, w))
    assert called(aten.linear.default, x, w) == counted
    assert called(aten.einsum.default, "btk,nk->btn", [x, w]) == counted
    assert called(aten.mm.default, meta(10, 4), meta(4, 8)) == counted
