"""Which graph input is a parameter, and what it is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ParamAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    TangentAOTInput,
)

from policylang.graph.collect import collect
from policylang.graph.facts import Facts, InputKind
from policylang.graph.inputs import Source, sources_of
from tests.graph.captured import joint_of
from tests.support.models import ZOO


def kinds_and_names(facts: Facts) -> list[tuple[InputKind, str]]:
    rows = [row for row in range(len(facts)) if facts.ops[row] == "placeholder"]
    return [(InputKind(facts.input_kinds[row]), facts.input_names[row]) for row in rows]


def facts_while_compiling(run: Any, *inputs: Any, dynamic: bool = False, hand_over_sources: bool = False) -> Facts:
    """The facts that a partitioner collects in the midst of ``torch.compile``."""
    found: list[Facts] = []
    sources: list[Source] = []

    def partition(gm: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        static = options.get("static_lifetime_input_indices")
        found.append(collect(gm, static_inputs=static, sources=sources if hand_over_sources else None))
        return min_cut_rematerialization_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def keep(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        return gm

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        sources.extend(sources_of(gm))
        return aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)(gm, example_inputs)

    torch._dynamo.reset()
    torch.compile(run, backend=backend, dynamic=dynamic)(*inputs)
    torch._dynamo.reset()
    return found[0]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["mlp", "resnet", "counter", "shared_parameters"])
def test_under_dynamo_parameters_and_buffers_have_the_names_of_the_module(name: str, dynamic: bool) -> None:
    module, inputs, _ = ZOO[name]()
    found = kinds_and_names(facts_while_compiling(module, *inputs, dynamic=dynamic))
    parameters = {path for kind, path in found if kind is InputKind.PARAMETER}
    buffers = {path for kind, path in found if kind is InputKind.BUFFER}
    assert parameters == {path for path, _ in module.named_parameters()}
    assert buffers == {path for path, _ in module.named_buffers()}


@pytest.mark.parametrize("name", ["mlp", "resnet", "llama", "bart"])
def test_without_names_a_parameter_is_what_is_static_and_gets_a_gradient(name: str) -> None:
    joint = joint_of(name)
    facts = collect(joint.gm, static_inputs=joint.static_lifetime_input_indices)
    found = [kind for kind, _ in kinds_and_names(facts)]
    module = ZOO[name]().module
    assert found.count(InputKind.PARAMETER) == len(list(module.parameters()))
    assert found.count(InputKind.TANGENT) == 1
    assert InputKind.USER in found


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.adapter = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.unused(x)
        return self.adapter(self.base(x)) * y.shape[0]


def test_a_frozen_parameter_is_a_parameter() -> None:
    found = kinds_and_names(
        facts_while_compiling(Frozen(), torch.randn(3, 4), torch.randn(5, 2), hand_over_sources=True)
    )
    names = {path for kind, path in found if kind is InputKind.PARAMETER}
    assert {"base.weight", "base.bias", "adapter.weight", "adapter.bias"} <= names


def test_names_that_do_not_fit_the_graph_are_not_used() -> None:
    """An input whose size alone is read is Dynamo's and not the graph's: positions can no longer be counted off."""
    found = kinds_and_names(facts_while_compiling(Frozen(), torch.randn(3, 4), torch.randn(5, 2)))
    assert {path for _, path in found} == {""}
    assert [kind for kind, _ in found].count(InputKind.PARAMETER) == 4  # those that may get a gradient


def test_two_modules_in_one_step_are_told_apart() -> None:
    left, right = nn.Linear(4, 4), nn.Linear(4, 4)

    def step(generator: nn.Module, critic: nn.Module, x: Tensor) -> Tensor:
        return critic(generator(x))

    found = kinds_and_names(facts_while_compiling(step, left, right, torch.randn(2, 4)))
    names = {path for kind, path in found if kind is InputKind.PARAMETER}
    assert names == {"generator.weight", "generator.bias", "critic.weight", "critic.bias"}


def test_descriptors_say_it_outright() -> None:
    graph = fx.Graph()
    descs = [
        ParamAOTInput("layers.0._checkpoint_wrapped_module.wq.weight"),
        BufferAOTInput("freqs"),
        SubclassGetAttrAOTInput(ParamAOTInput("head.weight"), "_local_tensor"),
        TangentAOTInput(PlainAOTOutput(0)),
    ]
    for index, desc in enumerate(descs):
        graph.placeholder(f"primals_{index}").meta["desc"] = desc
    graph.output(())
    assert kinds_and_names(collect(graph)) == [
        (InputKind.PARAMETER, "layers.0.wq.weight"),
        (InputKind.BUFFER, "freqs"),
        (InputKind.PARAMETER, "head.weight"),
        (InputKind.TANGENT, ""),
    ]


def test_a_parameter_read_by_get_attr_is_a_parameter() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    weight = nn.Parameter(torch.randn(4, 4))
    gm = make_fx(lambda x: x @ weight)(torch.randn(2, 4))
    facts = collect(gm)
    (row,) = [row for row in range(len(facts)) if facts.ops[row] == "get_attr"]
    assert facts.input_kinds[row] == InputKind.PARAMETER
