"""What calls do, by their schemas, and which memory they write where their schemas do not say so."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed._functional_collectives
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

from policylang.graph.facts import Flag
from policylang.operators.calls import (
    describe,
    draws_random,
    effects,
    may_write,
    statistics_positions,
    written_statistics,
)

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
        (aten.mm.default, Flag.COMPUTE),
        (aten.view.default, Flag.VIEW),
        (aten.split.Tensor, Flag.VIEW | Flag.MULTI_OUTPUT),
        (aten.native_dropout.default, Flag.RANDOM | Flag.MULTI_OUTPUT),
        (aten.rand_like.default, Flag.RANDOM),
        (aten.add_.Tensor, Flag.WRITES),
        (aten.copy_.default, Flag.WRITES),
        (aten._assert_async.msg, Flag.EFFECTFUL),
        (aten._assert_scalar.default, Flag.EFFECTFUL),
        (c10d.all_gather_into_tensor.default, Flag.COLLECTIVE),
        (c10d.reduce_scatter_tensor.default, Flag.COLLECTIVE),
        (c10d.all_reduce_.default, Flag.COLLECTIVE | Flag.WRITES),
        (c10d.wait_tensor.default, 0),
        (torch.ops.higher_order.with_effects, Flag.EFFECTFUL),
        (torch.ops.higher_order.run_and_save_rng_state, Flag.RANDOM),
        (torch.ops.higher_order.run_with_rng_state, 0),
        (operator.getitem, 0),
    ],
)
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
    node = graph.call_function(
        triton_kernel_wrapper_mutation, (), {"kernel_idx": 0, "grid": [(1,)], "kwargs": {"in": x, "out": y}}
    )
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
