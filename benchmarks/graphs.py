"""Joint graphs to measure passes on: real ones of any depth, and a synthetic one of any size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from functorch.compile import default_partition, nop
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode


@frozen
class JointGraph:
    """A joint graph as a partitioner receives it, to be copied for each contender."""

    module: torch.fx.GraphModule
    inputs: Any
    arguments: dict[str, Any]

    def fresh(self) -> torch.fx.GraphModule:
        return copy.deepcopy(self.module)

    def __len__(self) -> int:
        return len(self.module.graph.nodes)


def llama_joint(layers: int) -> JointGraph:
    """The joint graph of a Hugging Face Llama, narrow (width changes no node), under ``torch.compile``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    tokens = torch.randint(64, (2, 16))
    return joint_of(lambda: model(input_ids=tokens, labels=tokens).loss)


def joint_of(loss: Callable[[], torch.Tensor]) -> JointGraph:
    """The joint graph of a model that compiles whole, from one forward; ``loss`` calls the model."""
    torch._dynamo.reset()
    captured: list[JointGraph] = []

    def partition(module: torch.fx.GraphModule, inputs: Any, **arguments: Any) -> Any:
        captured.append(JointGraph(copy.deepcopy(module), inputs, arguments))
        return default_partition(module, inputs, **arguments)

    compiled = torch.compile(loss, backend=aot_autograd(fw_compiler=nop, partition_fn=partition), fullgraph=True)
    compiled()
    return captured[0]


def synthetic_joint(nodes: int, per_block: int = 60) -> torch.fx.GraphModule:
    """A joint graph of about ``nodes`` nodes: blocks of matmuls, adds and activations, and their backward.

    Built by hand, since tracing a million nodes would take longer than anything measured on it. Values are fake.
    """
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    with FakeTensorMode():
        value = torch.empty(16, 64)
        weight = torch.empty(64, 64)

    def mark(node: torch.fx.Node, phase: str, path: str | None) -> torch.fx.Node:
        node.meta["val"] = value
        node.meta["partitioner_tag"] = phase
        if path is not None:
            node.meta["nn_module_stack"] = {"0": (path, torch.nn.Module)}
        return node

    primal = mark(graph.placeholder("primals_1"), "is_forward", None)
    parameter = mark(graph.placeholder("primals_2"), "is_forward", None)
    parameter.meta["val"] = weight
    tangent = mark(graph.placeholder("tangents_1"), "is_backward", None)
    blocks = max(1, nodes // (2 * per_block))
    cycle = (aten.mm.default, aten.sigmoid.default, aten.add.Tensor, aten.mul.Tensor)
    x, forward = primal, []
    for block in range(blocks):
        path = f"L['self'].layers.{block}"
        residual = x
        for position in range(per_block):
            target = cycle[position % 4]
            second = (
                (parameter,) if target is aten.mm.default else () if target is aten.sigmoid.default else (residual,)
            )
            x = mark(graph.call_function(target, (x, *second)), "is_forward", path)
            forward.append(x)
    gradient = tangent
    for node in reversed(forward):
        gradient = mark(graph.call_function(aten.mul.Tensor, (gradient, node)), "is_backward", None)
    graph.output((x, gradient, None))
    return torch.fx.GraphModule(torch.nn.Module(), graph)
