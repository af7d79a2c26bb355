"""Which nodes of a joint graph are forward, what kind a graph is, and which memory it writes."""

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from policylang import trace_step
from policylang.errors import PolicyGraphError
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Flag, GraphKind, Phase
from tests.graph.captured import facts_of_model, joint_of
from tests.support.joint import capture_joint
from tests.support.models import ZOO, Function, counter, mlp
from tests.tracing.test_against_eager import Net, loss_of, mean_square, net, with_jacobian

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
    forward, backward = dict.fromkeys(("early", "between", "out"), "FORWARD"), ("unread", "grad")
    assert phases(joint.facts(out, grad)) == forward | dict.fromkeys(backward, "BACKWARD")


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
    joint = capture_joint(*mlp())
    forward, backward = default_partition(joint.gm, joint.joint_inputs, num_fwd_outputs=joint.num_fwd_outputs)
    assert collect(forward).kind is GraphKind.FORWARD
    halves = collect(backward)
    assert halves.kind is GraphKind.BACKWARD
    assert Phase.BACKWARD in halves.phases


def test_an_inference_graph_is_all_forward() -> None:
    facts = collect(make_fx(lambda x: (x @ x).sin())(torch.randn(3, 3)))
    assert facts.kind is GraphKind.FORWARD
    assert set(phases(facts).values()) == {"FORWARD"}
    assert not any(facts.has(row, Flag.FEEDS_BACKWARD) for row in range(len(facts)))


def test_a_caller_who_says_joint_of_a_graph_without_backward_is_told() -> None:
    with pytest.raises(PolicyGraphError, match="marks the backward nodes") as caught:
        collect(make_fx(lambda x: x.sin())(torch.randn(3)), kind=GraphKind.JOINT)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "APL340"
    assert "annotate" in diagnostic.help


LossFn = Callable[..., Tensor]
HAS_HOOKS = hasattr(torch.compiler, "_patch_engine_backward")


def annotated(**_: Any) -> Any:
    return traceback.annotate({"phase": "backward"})


@contextmanager
def hooked() -> Iterator[None]:
    """As TorchTitan traces, and Dynamo with ``trace_autograd_ops``: hooks mark what a backward function makes."""
    if not HAS_HOOKS:
        pytest.skip("this torch has no hooks for a tracer without Dynamo")
    with torch.compiler._non_strict_tracing_context(), torch.compiler._patch_engine_backward():
        yield


def flat(
    model: nn.Module, loss_fn: LossFn, *batch: Tensor, around_trace: Any = nullcontext, around_grad: Any = nullcontext
) -> fx.GraphModule:
    """Loss and gradients as plain ``make_fx`` traces them, in-place operators and all."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def step(values: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        held = Function(lambda holder, *inputs: loss_fn(holder.model, *inputs), model=model)
        named = dict(zip((f"model.{name}" for name in state), values, strict=True))
        loss = torch.func.functional_call(held, named, tuple(inputs))
        wanted = [value for value in values if value.requires_grad]
        with around_grad():
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        return [loss, *(gradient for gradient in gradients if gradient is not None)]

    with ExitStack() as stack:
        stack.enter_context(traceback.preserve_node_meta())
        stack.enter_context(around_trace())
        return make_fx(step, tracing_mode="fake")(list(state.values()), list(batch))


def by_phase(facts: Facts) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {phase: [] for phase in Phase}
    for row, name in enumerate(facts.names):
        found[facts.phases[row]].append(name)
    return found


def positions_of(facts: Facts, phase: Phase) -> list[int]:
    return [row for row in range(len(facts)) if facts.phases[row] == phase]


LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "flex", "resnet")]


@pytest.mark.parametrize("name", ["mlp", "shared_parameters", "dropout", *LARGE])
def test_data_flow_and_hooks_find_what_an_annotation_says(name: str) -> None:
    example = ZOO[name]()

    def facts(**around: Any) -> Facts:
        return collect(flat(example.module, loss_of(example), *example.inputs, **around))

    said, found = facts(around_grad=annotated), facts()
    assert said.kind is found.kind is GraphKind.FLAT
    assert said.names == found.names
    assert by_phase(found) == by_phase(said)
    assert len(by_phase(found)[Phase.BACKWARD]) > len(by_phase(found)[Phase.FORWARD]) / 2
    if name in ("mlp", "resnet", "flex") and HAS_HOOKS:
        assert by_phase(facts(around_trace=hooked)) == by_phase(said)


@pytest.mark.parametrize("around", ["nothing", "annotation", "hooks", "our tracer"])
def test_a_derivative_inside_the_forward_is_forward(around: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    contexts = {"annotation": {"around_grad": annotated}, "hooks": {"around_trace": hooked}}.get(around, {})
    model = with_jacobian()
    ours = around == "our tracer"
    facts = collect(trace_step(model, mean_square, x).gm if ours else flat(model, mean_square, x, **contexts))
    forward, backward = positions_of(facts, Phase.FORWARD), positions_of(facts, Phase.BACKWARD)
    assert max(forward) < min(backward)
    inside = {facts.targets[row] for row in forward}
    assert {"aten.neg.default", "aten.cos.default", "aten.ones_like.default"} <= inside
    assert "aten.mean.default" in inside, "the loss is forward"


class WithGradient(torch.autograd.Function):
    """A loss whose gradient is known: the way a loss in chunks hands over what its chunks have computed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, _output: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.saved_tensors[0], None, None


def chunked(model: Net, x: Tensor) -> Tensor:
    """Each chunk of the loss is differentiated on its own, and the loss is their sum."""
    hidden = model.first(x).relu()
    losses, gradients = [], []
    for chunk in hidden.detach().chunk(2):
        leaf = chunk.requires_grad_()
        part = model.second(leaf).cos().mean()
        gradients.append(torch.autograd.grad(part, leaf)[0])
        losses.append(part.detach())
    return WithGradient.apply(hidden, torch.cat(gradients), sum(losses))


@pytest.mark.parametrize("around", ["nothing", "hooks", "our tracer"])
def test_chunks_of_a_loss_are_regions_of_their_own(around: str) -> None:
    model, x = net()
    if around == "our tracer":
        facts = collect(trace_step(model, chunked, x).gm)
    else:
        facts = collect(flat(model, chunked, x, around_trace=hooked if around == "hooks" else nullcontext))
    phases = [facts.phases[row] for row in range(len(facts)) if facts.ops[row] == "call_function"]
    assert phases_of(facts, "cos") == [Phase.FORWARD] * 2
    assert phases_of(facts, "sin") == [Phase.BACKWARD] * 2
    assert phases_of(facts, "threshold_backward") == [Phase.BACKWARD]
    begins = sum(one == Phase.FORWARD and other == Phase.BACKWARD for one, other in pairwise(phases))
    assert begins >= 3


def phases_of(facts: Facts, name: str) -> list[int]:
    return [facts.phases[row] for row, target in enumerate(facts.targets) if target == f"aten.{name}.default"]


def test_our_own_tracer_is_taken_at_its_word() -> None:
    example = ZOO["resnet"]()
    step = trace_step(example.module, loss_of(example), *example.inputs)
    facts = collect(step.gm)
    assert facts.kind is GraphKind.FLAT
    phases = by_phase(facts)
    copies = step.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert [name for name in phases[Phase.OUTPUT] if name.startswith("copy_")] == [node.name for node in copies]
    assert not any(facts.targets[row] == "aten.copy_.default" for row in facts.forward)
    assert max(positions_of(facts, Phase.FORWARD)) < min(positions_of(facts, Phase.BACKWARD))


def test_a_forward_that_goes_on_after_a_backward_is_forward() -> None:
    """An adversarial example: the gradient of a first loss is added to the input of the second."""

    def adversarial(model: Net, x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(leaf).cos().mean(), leaf)
        return model(x + slope.sign()).sin().mean()

    model, x = net()
    facts = collect(trace_step(model, adversarial, x).gm)
    assert phases_of(facts, "sign") == [Phase.FORWARD]
    assert phases_of(facts, "relu") == [Phase.FORWARD] * 2
    assert phases_of(facts, "threshold_backward") == [Phase.BACKWARD] * 2


def test_sums_of_gradients_after_an_annotated_region_are_backward() -> None:
    model, x = net()

    def step(first: Tensor, second: Tensor, x: Tensor) -> list[Tensor]:
        halves = [(half @ first).relu() @ second for half in x.chunk(2)]
        totals = None
        for half in halves:
            with annotated():
                gradients = torch.autograd.grad(half.square().mean(), [first, second], retain_graph=True)
            totals = gradients if totals is None else [a + b for a, b in zip(totals, gradients, strict=True)]
        return list(totals)  # type: ignore[arg-type]

    weights = [model.first.weight, model.second.weight]
    facts = collect(make_fx(step, tracing_mode="fake")(*weights, x))
    last = [row for row in range(len(facts)) if facts.targets[row] == "aten.add.Tensor"][-2:]
    assert [facts.phases[row] for row in last] == [Phase.BACKWARD] * 2


def test_a_graph_that_does_not_say_and_cannot_be_known() -> None:
    """A gradient that comes from outside leaves no trace of where the backward begins."""
    model, x = net()

    def step(weight: Tensor, x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(nn.functional.gelu(x @ weight), weight, gradient)

    graph = make_fx(step, tracing_mode="fake")(model.first.weight, x, torch.ones(4, 8))
    with pytest.raises(PolicyGraphError) as caught:
        collect(graph)
    (found,) = caught.value.diagnostics
    called = "the graph calls `aten.gelu_backward.default`, but nothing marks the backward nodes"
    assert (found.code, found.message) == ("APL340", called)
    assert "policylang.trace_step" in (found.help or "")


def test_ones_that_the_model_makes_begin_no_backward() -> None:
    _, x = net()

    def forward(x: Tensor) -> Tensor:
        total = x.square().mean()
        return total * torch.ones_like(total)

    facts = collect(make_fx(forward, tracing_mode="fake")(x))
    assert facts.kind is GraphKind.FORWARD


@pytest.mark.slow
def test_torchtitan_tracer() -> None:
    tracer = pytest.importorskip("torchtitan.experiments.graph_trainer.make_fx_tracer")
    example = ZOO["llama"]()
    loss_fn = loss_of(example)

    def step(*inputs: Tensor) -> list[Tensor]:
        loss = loss_fn(example.module, *inputs)
        return [loss, *torch.autograd.grad(loss, list(example.module.parameters()))]

    facts = collect(tracer.minimal_fx_tracer(step, module=example.module)(*example.inputs).gm)
    assert facts.kind is GraphKind.FLAT
    forward, backward = positions_of(facts, Phase.FORWARD), positions_of(facts, Phase.BACKWARD)
    assert max(forward) < min(backward)
    ours = collect(trace_step(example.module, loss_fn, *example.inputs).gm)
    assert facts.by_target["aten.mm.default"]
    assert len(facts.by_target["aten.mm.default"]) == len(ours.by_target["aten.mm.default"])


def marked(facts: Facts, flag: int) -> set[str]:
    return {facts.names[row] for row in range(len(facts)) if facts.has(row, flag)}


def test_a_counter_and_a_cache_are_read_before_they_are_written() -> None:
    facts = facts_of_model("counter")
    stale = {facts.targets[row] for row in facts.forward if facts.has(row, Flag.READS_MUTATED)}
    # (count + 1).rsqrt(), count + 1, cache.sin() and what scatters into the cache; not what these feed
    names = ("add.Tensor", "sin.default", "slice.Tensor", "copy.default", "slice_scatter.default")
    assert stale == {f"aten.{name}" for name in names}
    assert not any(facts.has(row, Flag.READS_MUTATED) for row in facts.by_target["aten.rsqrt.default"])
    assert not any(facts.has(row, Flag.READS_MUTATED) for row in facts.by_target["aten.addmm.default"])


def test_what_reads_a_buffer_that_is_written_is_the_counter_of_a_batch_norm_alone() -> None:
    facts = facts_of_model("resnet")
    norms = facts.by_target["aten._native_batch_norm_legit_functional.default"]
    assert len(norms) == 4
    assert not any(facts.has(row, Flag.READS_MUTATED) for row in norms)
    assert len(marked(facts, Flag.READS_MUTATED)) == 4  # num_batches_tracked + 1, once a norm
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
