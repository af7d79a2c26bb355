"""What is known of operators."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed._functional_collectives
from torch import fx

from policylang.graph.facts import Flag
from policylang.operators.calls import describe, draws_random

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
def test_attention_draws_where_its_dropout_is_not_zero(
    args: tuple[float], kwargs: dict[str, float], draws: bool
) -> None:
    graph = fx.Graph()
    q = graph.placeholder("q")
    target = aten._scaled_dot_product_flash_attention.default
    node = graph.call_function(target, (q, q, q, *args), kwargs)
    assert describe(target).flags & Flag.RANDOM
    assert draws_random(describe(target), node) is draws


@pytest.mark.parametrize(("train", "draws"), [(True, True), (None, True), (False, False)])
def test_dropout_draws_in_training(train: bool | None, draws: bool) -> None:
    graph = fx.Graph()
    node = graph.call_function(aten.native_dropout.default, (graph.placeholder("x"), 0.5, train))
    assert draws_random(describe(aten.native_dropout.default), node) is draws
