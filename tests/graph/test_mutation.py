"""Reads of memory that the graph writes: what a second run would not see again."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput, PlainAOTOutput

from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Flag
from tests.graph.captured import facts_of_model
from tests.support.models import counter

aten = torch.ops.aten


def marked(facts: Facts, flag: int) -> set[str]:
    return {facts.names[row] for row in range(len(facts)) if facts.has(row, flag)}


def test_a_counter_and_a_cache_are_read_before_they_are_written() -> None:
    facts = facts_of_model("counter")
    stale = {facts.targets[row] for row in facts.forward if facts.has(row, Flag.READS_MUTATED)}
    # (count + 1).rsqrt(), count + 1, cache.sin() and what scatters into the cache; not what these feed
    assert stale == {"aten.add.Tensor", "aten.sin.default", "aten.slice.Tensor", "aten.copy.default"} | {
        "aten.slice_scatter.default"
    }
    assert not any(facts.has(row, Flag.READS_MUTATED) for row in facts.by_target["aten.rsqrt.default"])
    assert not any(facts.has(row, Flag.READS_MUTATED) for row in facts.by_target["aten.addmm.default"])


def test_batch_norm_in_training_may_run_again_and_its_counter_may_not() -> None:
    facts = facts_of_model("resnet")
    norms = facts.by_target["aten._native_batch_norm_legit_functional.default"]
    assert len(norms) == 4
    assert not any(facts.has(row, Flag.READS_MUTATED) for row in norms)
    assert len(marked(facts, Flag.READS_MUTATED)) == 4  # num_batches_tracked + 1, once a norm


def test_models_without_buffers_read_nothing_that_is_written() -> None:
    for name in ("mlp", "llama", "aliased_output"):
        assert marked(facts_of_model(name), Flag.READS_MUTATED) == set()


def test_inductor_copies_into_buffers_at_the_end_of_the_graph() -> None:
    """There the new value is no output: ``copy_`` stands in the graph, after every read."""
    facts = facts_under_inductor()
    writing = marked(facts, Flag.WRITES)
    assert {facts.targets[facts.index[name]] for name in writing} == {"aten.copy_.default"}
    assert len(writing) == 2
    plain = facts_of_model("counter")
    stale = {"add", "add_1", "sin", "slice_2", "slice_scatter"}
    assert marked(facts, Flag.READS_MUTATED) == stale
    assert stale <= marked(plain, Flag.READS_MUTATED)


@cache
def facts_under_inductor() -> Facts:
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    found: list[Facts] = []

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
            found.append(collect(gm, static_inputs=options["static_lifetime_input_indices"]))
            return min_cut_rematerialization_partition(gm, joint_inputs, **options)

        def uuid(self) -> str:
            return "facts"

    module, inputs, _ = counter()
    torch._dynamo.reset()
    caches_off = inductor_config.patch(custom_partitioner_fn=Partitioner(), fx_graph_cache=False)
    with caches_off, functorch_config.patch(enable_autograd_cache=False):

        def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
            return compile_fx(gm, example_inputs, inner_compile=lambda inner, inputs, **options: inner)

        torch.compile(module, backend=backend)(*inputs)
    torch._dynamo.reset()
    return found[0]


def graph_of(build: Any) -> fx.Graph:
    """A graph over one buffer and one input, with ``build(graph, buffer, x)`` naming what it returns."""
    graph = fx.Graph()
    nodes = []
    for index, name in enumerate(("primals_1", "primals_2")):
        node = graph.placeholder(name)
        node.meta.update(val=torch.empty(4, device="meta"), desc=PlainAOTInput(index), partitioner_tag="is_forward")
        nodes.append(node)
    returned, descs = build(graph, *nodes)
    output = graph.output(tuple(returned))
    output.meta["desc"] = descs
    return graph


def call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    packet = getattr(target, "overloadpacket", target)
    node = graph.create_node("call_function", target, args, name=packet.__name__)
    node.meta.update(val=torch.empty(4, device="meta"), partitioner_tag="is_forward")
    return node


def test_a_view_of_a_written_buffer_is_that_buffer() -> None:
    def build(graph: fx.Graph, buffer: fx.Node, x: fx.Node) -> Any:
        view = call(graph, aten.view.default, buffer, [2, 2])
        read = call(graph, aten.sin.default, call(graph, aten.t.default, view))
        apart = call(graph, aten.tanh.default, x)
        after = call(graph, aten.cos.default, read)
        new = call(graph, aten.add.Tensor, buffer, 1)
        return [new, after, apart], [InputMutationAOTOutput(PlainAOTInput(0)), PlainAOTOutput(0), PlainAOTOutput(1)]

    assert marked(collect(graph_of(build)), Flag.READS_MUTATED) == {"view", "t", "sin", "add"}


def test_a_read_after_the_last_write_sees_the_same_again() -> None:
    def build(graph: fx.Graph, buffer: fx.Node, x: fx.Node) -> Any:
        before = call(graph, aten.sin.default, buffer)
        call(graph, aten.add_.Tensor, buffer, 1)
        between = call(graph, aten.cos.default, buffer)
        call(graph, aten.mul_.Tensor, buffer, 2)
        after = call(graph, aten.tanh.default, buffer)
        return [before, between, after], [PlainAOTOutput(index) for index in range(3)]

    facts = collect(graph_of(build))
    assert marked(facts, Flag.READS_MUTATED) == {"sin", "cos", "add_"}
    assert marked(facts, Flag.WRITES) == {"add_", "mul_"}


def test_a_piece_of_a_split_buffer_is_that_buffer() -> None:
    def build(graph: fx.Graph, buffer: fx.Node, x: fx.Node) -> Any:
        pieces = call(graph, aten.split.Tensor, buffer, 2)
        piece = call(graph, operator.getitem, pieces, 0)
        read = call(graph, aten.sin.default, piece)
        call(graph, aten.copy_.default, buffer, x)
        return [read], [PlainAOTOutput(0)]

    assert "sin" in marked(collect(graph_of(build)), Flag.READS_MUTATED)


def test_memory_of_the_graphs_own_that_is_written_later_comes_out_otherwise_the_second_time() -> None:
    def build(graph: fx.Graph, buffer: fx.Node, x: fx.Node) -> Any:
        made = call(graph, aten.add.Tensor, x, 1)
        view = call(graph, aten.t.default, made)
        call(graph, aten.mul_.Tensor, view, 2)
        after = call(graph, aten.sin.default, made)
        left = call(graph, aten.cos.default, x)
        return [after, left], [PlainAOTOutput(0), PlainAOTOutput(1)]

    assert marked(collect(graph_of(build)), Flag.READS_MUTATED) == {"add", "t"}
