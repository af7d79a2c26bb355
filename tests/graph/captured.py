"""Graphs of the zoo, traced once for all tests of a process, and their facts."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.torch_compat.graphs import hint
from tests.support.flat_graphs import Flat, flat_graph
from tests.support.heap import settle
from tests.support.joint import Joint, capture_joint
from tests.support.models import ZOO


def joint_of(name: str, dynamic: bool = False) -> Joint:
    """Not to be changed: tests share it."""
    return _joint_of(name, dynamic)  # a cache takes a default that is written out for another call


def facts_of_model(name: str, dynamic: bool = False) -> Facts:
    return _facts_of_model(name, dynamic)


@cache
def _joint_of(name: str, dynamic: bool) -> Joint:
    module, inputs, loss_fn = ZOO[name]()
    captured = capture_joint(module, inputs, loss_fn, dynamic=dynamic)
    settle()
    return captured


@cache
def flat_of(name: str) -> Flat:
    """Not to be changed: ``fresh`` gives a copy."""
    found = flat_graph(ZOO[name]())
    settle()
    return found


@cache
def _facts_of_model(name: str, dynamic: bool) -> Facts:
    joint = _joint_of(name, dynamic)
    return collect(joint.gm, static_inputs=joint.static_lifetime_input_indices)


def executed(gm: fx.GraphModule) -> dict[fx.Node, Any]:
    """What every node returned when the graph was run on real tensors of the traced sizes."""
    results: dict[fx.Node, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            results[node] = super().run_node(node)
            return results[node]

    torch.manual_seed(0)
    inputs = [_real(node.meta["val"]) for node in gm.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        Recorder(gm, garbage_collect_values=False).run(*inputs)
    return results


def _real(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return hint(value)
    shape = [hint(size) for size in value.shape]
    if value.dtype.is_floating_point:
        return torch.rand(shape, dtype=value.dtype)
    return torch.zeros(shape, dtype=value.dtype)
