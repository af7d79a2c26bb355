"""Which memory calls write, where their schemas do not say so."""

from __future__ import annotations

import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

from policylang.operators.calls import effects, may_write, statistics_positions, written_statistics

aten = torch.ops.aten


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
