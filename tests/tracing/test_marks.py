"""What the nodes of a traced step carry: the side of the step they lie on, their module, the user's own tags."""

import copy
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from attrs import fields_dict
from torch import Tensor, nn
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import policylang
from policylang import PolicyMatchError, PolicyWarning, TracedStep, trace_step
from policylang.graph import marks
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.graph.phases import raw_path
from tests.support import models
from tests.support.drawn import slow
from tests.support.models import ZOO, Function
from tests.tracing.test_against_eager import Net, calls, eager_step, loss_of, mean_square, net, phase, trace

aten = torch.ops.aten


@pytest.mark.parametrize("name", ["llama", "resnet", "shared_parameters", slow("gpt2"), slow("flex")])
def test_forward_then_backward_then_epilogue(name: str) -> None:
    found = [phase(node) for node in trace(ZOO[name]()).gm.graph.nodes if node.op == "call_function"]
    order = [marks.FORWARD, marks.BACKWARD, marks.EPILOGUE]
    assert None not in found
    assert found == sorted(found, key=order.index)
    assert found.count(marks.FORWARD) > 5
    assert found.count(marks.BACKWARD) > 5
    assert (marks.EPILOGUE in found) == (name == "resnet")


def test_only_backward_nodes_have_the_mark_that_torch_knows() -> None:
    step = trace(ZOO["flex"]())
    for node in step.gm.graph.nodes:
        assert bool(node.meta.get("autograd_backward")) == (phase(node) == marks.BACKWARD), node.name


def test_sums_of_gradients_are_backward_and_a_shared_module_has_its_first_name() -> None:
    step = trace(ZOO["shared_parameters"]())
    sums = [node for node in calls(step, aten.add.Tensor) if node.meta["seq_nr"] == -1]
    assert len(sums) >= 5
    assert {phase(node) for node in sums} == {marks.BACKWARD}
    paths = [raw_path(node.meta) for node in calls(step, aten.gelu.default)]
    assert paths == ["layers.0", "layers.1", "layers.0"]


def test_forward_nodes_carry_their_modules_outermost_first() -> None:
    step = trace(ZOO["llama"]())
    node = next(node for node in step.gm.graph.nodes if raw_path(node.meta).endswith("layers.1.self_attn.q_proj"))
    assert list(node.meta["nn_module_stack"]) == [
        "", "model", "model.model", "model.model.layers.1", "model.model.layers.1.self_attn",
        "model.model.layers.1.self_attn.q_proj",
    ]  # fmt: skip
    assert node.meta["nn_module_stack"]["model.model.layers.1.self_attn.q_proj"][1] is nn.Linear


def test_backward_nodes_carry_the_modules_of_what_they_differentiate() -> None:
    step = trace(ZOO["mlp"]())
    backwards = calls(step, aten.gelu_backward.default)
    assert [raw_path(node.meta) for node in backwards] == ["layers.2", "layers.1", "layers.0"]
    mms = [raw_path(node.meta) for node in calls(step, aten.mm.default)]
    assert mms[:4] == ["layers.2.down", "layers.2.down", "layers.2.up", "layers.2.up"]


@pytest.mark.slow
def test_a_step_has_the_same_facts_whatever_was_traced_before_it() -> None:
    """torch numbers backward functions by thread, from 0 as in a process that has traced nothing. GPT-2 begins with
    operators that have no derivative, and so no number there."""
    with ThreadPoolExecutor(1) as fresh:
        first = fresh.submit(lambda: trace(ZOO["gpt2"]())).result()
    trace(ZOO["mlp"]())
    before, after = collect(first.gm), collect(trace(ZOO["gpt2"]()).gm)
    assert [column for column in fields_dict(Facts) if getattr(before, column) != getattr(after, column)] == []
    sums = [node for node in calls(first, aten.add.Tensor) if node.meta["seq_nr"] == -1]
    backward = {raw_path(node.meta) for node in sums if phase(node) == marks.BACKWARD}
    assert backward == {""}, "a sum of two gradients is nobody's derivative"


def test_a_module_that_raises_and_is_caught_leaves_its_name_nowhere() -> None:
    class Tolerant(Net):
        def __init__(self) -> None:
            super().__init__()
            self.picky = Function(Mock(side_effect=ValueError))

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.picky(x)
            except ValueError:
                return self.first(x).sin()

    _, x = net()
    step = trace_step(Tolerant(), mean_square, x)
    (sin,) = calls(step, aten.sin.default)
    assert list(sin.meta["nn_module_stack"]) == [""]


def test_a_step_leaves_nothing_behind_in_torch() -> None:
    call, checkpointed = nn.Module.__call__, torch.utils.checkpoint.CheckpointFunction
    engine, meta = torch.autograd.graph._engine_run_backward, dict(traceback.get_current_meta())
    trace(ZOO["flex"]())
    model, x = net()
    with pytest.raises(Exception, match="no_such_thing"):
        trace_step(model, lambda model, x: model.no_such_thing, x)
    assert nn.Module.__call__ is call
    assert torch.utils.checkpoint.CheckpointFunction is checkpointed
    assert torch.autograd.graph._engine_run_backward is engine
    assert torch.autograd._engine_run_backward is engine
    assert dict(traceback.get_current_meta()) == meta
    assert not torch.compiler.is_compiling()


def _save_mm(_context: object, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator is aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.a, self.b, self.head = Net(), Net(), nn.Linear(8, 8)
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.a, x, **self.settings)
        x = checkpoint(self.b, x, **self.settings)
        return self.head(x).cos()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_regions_are_tagged_and_not_carried_out(reentrant: bool) -> None:
    _, x = net()
    step = trace_step(Checkpointed(use_reentrant=reentrant), mean_square, x)
    regions = {raw_path(node.meta): marks.user_tag(node.meta) for node in calls(step, aten.relu.default)}
    assert regions == {"a": ("PREFER_RECOMPUTE", 0), "b": ("PREFER_RECOMPUTE", 1)}
    assert len(calls(step, aten.relu.default)) == 2, "the trace recomputes by itself"
    outside = [node for node in step.gm.graph.nodes if raw_path(node.meta).split(".")[0] not in ("a", "b")]
    outside += [node for node in step.gm.graph.nodes if phase(node) == marks.BACKWARD]
    assert {marks.user_tag(node.meta) for node in outside} == {(None, None)}


def test_checkpoint_with_a_policy_of_its_own() -> None:
    _, x = net()
    context_fn = partial(create_selective_checkpoint_contexts, _save_mm)
    step = trace_step(Checkpointed(use_reentrant=False, context_fn=context_fn), mean_square, x)
    tags = [(raw_path(node.meta), marks.user_tag(node.meta)) for node in calls(step, aten.addmm.default)]
    assert tags == [
        ("a.first", ("MUST_SAVE", 0)),
        ("a.second", ("MUST_SAVE", 0)),
        ("b.first", ("MUST_SAVE", 1)),
        ("b.second", ("MUST_SAVE", 1)),
        ("head", (None, None)),
    ]
    (cos,) = calls(step, aten.cos.default)
    assert marks.user_tag(cos.meta) == (None, None)
    later = trace_step(*net()[:1], mean_square, x)
    assert {marks.user_tag(node.meta) for node in later.gm.graph.nodes} == {(None, None)}


def test_a_tag_that_another_trace_left_behind_reaches_no_node() -> None:
    model, x = net()
    meta = traceback.get_current_meta()
    meta.update(recompute=CheckpointPolicy.MUST_SAVE, ac_graph_id=None)
    try:
        step = trace_step(model, mean_square, x)
    finally:
        meta = traceback.get_current_meta()
        left = meta.pop("recompute", None), meta.pop("ac_graph_id", 0)
    assert {marks.user_tag(node.meta) for node in step.gm.graph.nodes} == {(None, None)}
    assert left == (CheckpointPolicy.MUST_SAVE, None), "what was there before is there after"


def test_annotations_of_the_user_stay() -> None:
    model, x = net()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with traceback.annotate({"stage": 1}):
            return mean_square(model, x)

    with traceback.annotate({"run": "a"}):
        step = trace_step(model, loss_fn, x)
    forward = [node for node in step.gm.graph.nodes if phase(node) == marks.FORWARD]
    assert {(marks.custom(node.meta)["run"], marks.custom(node.meta)["stage"]) for node in forward} == {("a", 1)}


def test_inputs_are_named_and_described() -> None:
    step = trace(ZOO["resnet"]())
    names = [node.name for node in step.gm.graph.find_nodes(op="placeholder")]
    assert names[:2] == ["parameter_stem_weight", "parameter_stem_bias"]
    assert "buffer_layers_0_bn1_running_mean" in names
    assert names[-1] == "input_0"
    descs = {node.name: node.meta["desc"] for node in step.gm.graph.find_nodes(op="placeholder")}
    assert descs["buffer_layers_0_bn1_running_mean"].target == "layers.0.bn1.running_mean"
    assert descs["parameter_stem_weight"].is_param()


def test_random_and_mutating_operators_are_functional_nodes() -> None:
    step = trace(ZOO["dropout"]())
    assert len(calls(step, aten.bernoulli.p)) == 2
    for name in ("dropout", "resnet", "counter", "gpt2"):
        for node in trace(ZOO[name]()).gm.graph.nodes:
            schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
            mutable = schema is not None and schema.is_mutable
            assert not mutable or (node.target is aten.copy_.default and phase(node) == marks.EPILOGUE), node.name


POLICY = policylang.parse("blocks layers.*\nrecompute everything in block; save addmm", name="mine.apl")
SAME = policylang.parse("# the same\nblocks layers.*\nrecompute  everything in block\nsave addmm", name="mine.apl")
OTHER = policylang.parse("blocks layers.*\nrecompute everything in block", name="other.apl")


def block() -> nn.Module:
    up, down = nn.Linear(16, 64), nn.Linear(64, 16)
    return Function(lambda block, x: x + block.down(torch.relu(block.up(x))), up=up, down=down)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.context_fn = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.context_fn is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=self.context_fn)
        return x.sin()


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batch() -> Tensor:
    return torch.linspace(-1, 1, 64).reshape(4, 16)


def wrapped() -> nn.Module:
    return policylang.checkpoint_model(Model(), POLICY)


def by_hand() -> nn.Module:
    model = Model()
    model.context_fn = policylang.context_fn(POLICY, model)
    return model


@contextmanager
def nothing_said() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PolicyWarning)
        yield


def says_so_once(step: TracedStep, text: str) -> None:
    with pytest.warns(PolicyWarning, match=text):
        step(batch())
    with nothing_said():
        step(batch())


@pytest.mark.parametrize("make", [wrapped, by_hand])
def test_the_step_does_what_it_does_without_the_checkpoints(make) -> None:
    model = make()
    step = trace_step(model, loss_fn, batch())
    assert {marks.user_tag(node.meta) for node in step.gm.graph.nodes} == {(None, None)}
    step.apply(SAME)
    plain = trace_step(Model(), loss_fn, batch()).apply(POLICY)
    assert step.report.saved == plain.report.saved
    assert step.report.recomputed == plain.report.recomputed
    assert step.report.saved.bytes > 0
    (loss, gradients), (expected, wanted) = step(batch()), plain(batch())
    assert torch.equal(loss, expected)
    assert gradients.keys() == wanted.keys()
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("make", [wrapped, by_hand])
def test_the_checkpoints_go_on_as_before(make) -> None:
    model = make()
    step = trace_step(model, loss_fn, batch()).apply(POLICY)
    _, gradients = step(batch())
    loss_fn(model, batch()).backward()
    assert all(torch.equal(parameter.grad, gradients[name]) for name, parameter in model.named_parameters())
    assert policylang.report(model).saved.bytes > 0


def test_another_policy_is_refused_before_anything_changes() -> None:
    step = trace_step(wrapped(), loss_fn, batch())
    before = str(step.gm.graph)
    for call in (step.apply, lambda policy: policylang.apply(step.gm, policy)):
        with pytest.raises(PolicyMatchError) as refused:
            call(OTHER)
        (found,) = refused.value.diagnostics
        assert found.code == "APL397"
        assert "the graph" in found.message
        assert str(step.gm.graph) == before
    step.apply(POLICY)


def test_a_step_that_was_given_no_policy_says_so_once() -> None:
    says_so_once(trace_step(wrapped(), loss_fn, batch()), "applies nothing")
    with nothing_said():
        trace_step(wrapped(), loss_fn, batch()).apply(POLICY)(batch())


def test_checkpoints_of_the_users_own_that_nothing_carries_out_say_so_once() -> None:
    class Plain(Model):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x.sin()

    says_so_once(trace_step(Plain(), loss_fn, batch()), "nothing applies them")
    with nothing_said():
        trace_step(Model(), loss_fn, batch())(batch())
        another = trace_step(Plain(), loss_fn, batch()).apply(policylang.parse("undecided -> auto"))
        another(batch())
    assert len(another.report.recomputed.names) > 0


def test_checkpoints_of_the_users_own_beside_them_keep_their_tags() -> None:
    class Mixed(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.layers[0], x, use_reentrant=False)
            x = checkpoint(self.layers[1], x, use_reentrant=False, context_fn=self.context_fn)
            return self.layers[2](x).sin()

    model = Mixed()
    model.context_fn = policylang.context_fn(POLICY, model)
    step = trace_step(model, loss_fn, batch())
    tagged = [marks.user_tag(node.meta) for node in step.gm.graph.nodes]
    assert {tag for tag in tagged if tag != (None, None)} == {("PREFER_RECOMPUTE", 0)}


def test_a_copy_of_the_model_is_traced_likewise() -> None:
    step = trace_step(copy.deepcopy(wrapped()), loss_fn, batch())
    assert {marks.user_tag(node.meta) for node in step.gm.graph.nodes} == {(None, None)}


def test_a_real_model_traces_as_before() -> None:
    example = models.llama()
    model = policylang.checkpoint_model(example.module, "llama3_sac", strict=True)
    traced = trace_step(model, loss_of(example), *example.inputs)
    with pytest.warns(PolicyWarning, match="applies nothing"):
        _, found = traced(*example.inputs)
    _, expected = eager_step(model, loss_of(example), *example.inputs)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in found)
    assert found.keys() == expected.keys()
