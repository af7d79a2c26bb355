"""Which nodes of a joint graph are forward, and what kind a graph is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import default_partition
from torch import fx
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput, TangentAOTInput

from policylang.errors import PolicyGraphError
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Flag, GraphKind, Phase
from tests.graph.captured import joint_of
from tests.support.joint import capture_joint
from tests.support.models import mlp

aten = torch.ops.aten


class Joint:
    """A joint graph of one input and one tangent, built by hand."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.primal = self.graph.placeholder("primals_1")
        self.primal.meta.update(desc=PlainAOTInput(0), partitioner_tag="is_forward")
        self.tangent = self.graph.placeholder("tangents_1")
        self.tangent.meta.update(desc=TangentAOTInput(PlainAOTOutput(0)), partitioner_tag="is_backward")

    def call(self, name: str, target: Any, *args: Any, tag: str | None) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        if tag is not None:
            node.meta["partitioner_tag"] = tag
        return node

    def facts(self, forward: fx.Node, gradient: fx.Node) -> Facts:
        output = self.graph.output((forward, gradient))
        output.meta["desc"] = [PlainAOTOutput(0), GradAOTOutput(PlainAOTInput(0))]
        return collect(self.graph)


def phases(facts: Facts) -> dict[str, str]:
    calls = [row for row in range(len(facts)) if facts.ops[row] == "call_function"]
    return {facts.names[row]: Phase(facts.phases[row]).name for row in calls}


def test_what_is_read_by_the_forward_is_forward_whatever_its_tag() -> None:
    joint = Joint()
    early = joint.call("early", aten.sin.default, joint.primal, tag="is_backward")
    between = joint.call("between", aten.cos.default, early, tag="is_backward")
    out = joint.call("out", aten.add.Tensor, joint.primal, between, tag="is_forward")
    unread = joint.call("unread", aten.tanh.default, early, tag="is_backward")
    grad = joint.call("grad", aten.mul.Tensor, joint.tangent, unread, tag="is_backward")
    assert phases(joint.facts(out, grad)) == {
        "early": "FORWARD",
        "between": "FORWARD",
        "out": "FORWARD",
        "unread": "BACKWARD",
        "grad": "BACKWARD",
    }


def test_what_depends_on_a_tangent_is_backward_whatever_its_tag() -> None:
    joint = Joint()
    out = joint.call("out", aten.sin.default, joint.primal, tag="is_forward")
    wrong = joint.call("wrong", aten.mul.Tensor, joint.tangent, out, tag="is_forward")
    grad = joint.call("grad", aten.cos.default, wrong, tag=None)
    facts = joint.facts(out, grad)
    assert phases(facts) == {"out": "FORWARD", "wrong": "BACKWARD", "grad": "BACKWARD"}
    assert facts.has(facts.index["out"], Flag.FEEDS_BACKWARD)


def test_backward_nodes_may_stand_between_forward_nodes() -> None:
    joint = Joint()
    first = joint.call("first", aten.sin.default, joint.primal, tag="is_forward")
    back = joint.call("back", aten.mul.Tensor, joint.tangent, first, tag="is_backward")
    second = joint.call("second", aten.cos.default, first, tag="is_forward")
    assert phases(joint.facts(second, back)) == {"first": "FORWARD", "back": "BACKWARD", "second": "FORWARD"}


def test_without_tags_a_joint_graph_is_told_by_its_tangents() -> None:
    joint = joint_of("mlp")
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.gm.graph, {}))
    for node in graph.nodes:
        for key in ("partitioner_tag", "autograd_backward", "desc"):
            node.meta.pop(key, None)
    facts, tagged = collect(graph), collect(joint.gm)
    assert facts.kind is GraphKind.JOINT
    read_by_backward = [row for row in tagged.forward if tagged.has(row, Flag.FEEDS_BACKWARD)]
    forward = set(facts.forward)
    assert set(read_by_backward) <= forward
    assert set(tagged.forward) <= forward  # and what the backward computes without its tangents


def test_the_halves_of_a_partition_are_known_for_what_they_are() -> None:
    module, inputs, loss_fn = mlp()
    joint = capture_joint(module, inputs, loss_fn)
    forward, backward = default_partition(joint.gm, joint.joint_inputs, num_fwd_outputs=joint.num_fwd_outputs)
    assert collect(forward).kind is GraphKind.FORWARD
    halves = collect(backward)
    assert halves.kind is GraphKind.BACKWARD
    assert Phase.BACKWARD in halves.phases


def test_an_inference_graph_is_all_forward() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    facts = collect(make_fx(lambda x: (x @ x).sin())(torch.randn(3, 3)))
    assert facts.kind is GraphKind.FORWARD
    assert set(phases(facts).values()) == {"FORWARD"}
    assert not any(facts.has(row, Flag.FEEDS_BACKWARD) for row in range(len(facts)))


def test_a_caller_who_says_joint_of_a_graph_without_backward_is_told() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    with pytest.raises(PolicyGraphError, match="says which nodes are backward") as caught:
        collect(make_fx(lambda x: x.sin())(torch.randn(3)), kind=GraphKind.JOINT)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "APL340"
    assert diagnostic.help is not None
    assert "annotate" in diagnostic.help
