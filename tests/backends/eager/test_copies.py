"""Models with checkpoints that are copied, stored, wrapped, traced, or transformed."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import policylang
from policylang.errors import PolicyGraphError, PolicyWarning
from tests.backends.eager.test_observed import POLICY, Layer, Model, batch, check, checkpointed, plainly
from tests.support import models
from tests.support.eager import differences, train
from tests.support.models import Function
from tests.support.versions import needs_forward_derivatives_of_checkpoints


@pytest.mark.parametrize("seen", [False, True], ids=["before its first call", "after it"])
def test_a_model_is_stored_and_loaded_with_its_checkpoints(seen: bool) -> None:
    model, again = checkpointed(Model()), checkpointed(Model())
    for each in (model, again) if seen else (again,):
        plainly(each, 0)
        each.zero_grad()
    before = [(rule.text, rule.matched) for rule in policylang.report(again).rules]
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    expected = train(Model(), plainly)
    for loaded in (pickle.loads(pickle.dumps(model)), torch.load(stored, weights_only=False)):
        assert differences(expected, train(loaded, plainly)) == []
        report = policylang.report(loaded)
        assert report.audit.agrees
        assert [(rule.text, rule.matched) for rule in report.rules] == before


def test_a_copy_of_a_model_whose_own_checkpoints_follow_a_policy() -> None:
    example = models.llama()
    function = policylang.context_fn("llama3_sac", example.module, strict=True)
    inner: Any = example.module.model
    inner.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": function})

    def run(model: nn.Module, number: int) -> Tensor:
        loss = example.loss_fn(model(*example.inputs))
        loss.backward()
        return loss

    other = copy.deepcopy(example.module)
    expected = train(copy.deepcopy(models.llama().module), run)
    assert differences(expected, train(other, run)) == []
    assert differences(expected, train(example.module, run)) == []
    blocks = {name.partition("/")[0] for name in policylang.report(example.module).decisions}
    assert blocks == {f"model.model.layers.{each}" for each in ("0", "1", "0#2", "1#2")}, "the copy's come second"


class Checkpointing(Model):
    """Has the function among its attributes, as models of Hugging Face do, and calls the checkpoints itself."""

    context_fn: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=self.context_fn)
        return x


def test_a_function_is_stored_with_the_arguments_of_a_training() -> None:
    model = Checkpointing()
    function = policylang.context_fn(policylang.parse(POLICY), model, strict=True)
    model.context_fn = function
    assert copy.deepcopy({"context_fn": function})["context_fn"] is function
    loaded, its_own = pickle.loads(pickle.dumps((model, function)))
    assert loaded.context_fn is its_own
    expected = train(Model(), plainly)
    assert differences(expected, train(model, plainly)) == []
    assert differences(expected, train(loaded, plainly)) == []
    assert policylang.report(its_own).saved == policylang.report(function).saved
    alone = pickle.loads(pickle.dumps(function))
    with pytest.raises(PolicyGraphError, match="has lost its model") as caught:
        checkpoint(model.layers[0], batch(0), use_reentrant=False, context_fn=alone)
    assert caught.value.diagnostics[0].code == "APL394"


def test_a_rule_that_matches_nowhere_in_a_copy_is_an_error() -> None:
    example = models.llama()
    function = policylang.context_fn(policylang.parse("save mm; save bmm"), example.module)
    inner: Any = example.module.model
    inner.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": function})
    other = copy.deepcopy(example.module)
    with pytest.raises(policylang.PolicyError, match="`save bmm` matches nothing"):
        example.loss_fn(other(*example.inputs))


def test_the_report_of_a_model_around_the_one_that_was_given() -> None:
    example = models.llama()
    function = policylang.context_fn("llama3_sac", example.module)
    inner: Any = example.module.model
    inner.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": function})
    wrapper = Function(lambda wrapper, *inputs: wrapper.base(*inputs), base=example.module)
    example.loss_fn(wrapper(*example.inputs)).backward()
    assert str(policylang.report(wrapper)) == str(policylang.report(function))


def lazy() -> nn.Module:
    return Function(lambda block, x: block.norm(block.up(x)).sin(), up=nn.LazyLinear(8), norm=nn.LazyBatchNorm1d())


def test_lazy_modules() -> None:
    def run(model: nn.Module, number: int) -> Tensor:
        if number == 0:
            torch.manual_seed(3)  # the parameters get their values in the first call
        return plainly(model, number)

    def trained(model: nn.Module) -> list[Tensor]:
        for number in range(3):
            model.zero_grad()
            run(model, number)
        return [each.grad for each in model.parameters()] + list(model.buffers())

    model = checkpointed(Model(lazy))
    expected = trained(Model(lazy))
    assert all(torch.equal(one, other) for one, other in zip(expected, trained(model), strict=True))
    assert policylang.report(model).audit is not None


def test_pruned_and_quantized_weights_are_no_reason_to_warn() -> None:
    class Quantized(Layer):
        def __init__(self) -> None:
            super().__init__()
            values = torch.arange(64, dtype=torch.int8).reshape(8, 8)
            self.weight = nn.Parameter(values, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x @ self.weight.to(x.dtype))

    def pruned() -> nn.Module:
        model = Model()
        for layer in model.layers:
            prune.l1_unstructured(layer.up, "weight", 0.3)
        return model

    check(pruned)
    model = checkpointed(Model(Quantized))
    expected = Model(Quantized)
    for each in (expected, model):
        for number in range(2):
            plainly(each, number)
    pairs = zip(expected.parameters(), model.parameters(), strict=True)
    assert all(one.grad is other.grad or torch.equal(one.grad, other.grad) for one, other in pairs)


@pytest.mark.parametrize("copied", [copy.copy, nn.Module._replicate_for_data_parallel])
def test_a_shallow_copy_of_a_block_is_refused(copied: Callable[[nn.Module], nn.Module]) -> None:
    """As ``nn.DataParallel`` makes them, one a device: its checkpoint would run the weights of the block."""
    model = checkpointed(Model())
    with pytest.raises(PolicyGraphError, match=r"a copy of `layers\.0`.*shares the checkpoint"):
        copied(model.layers[0])(batch(0))


def test_checkpoints_let_go_of_their_inputs_also_one_inside_another() -> None:
    def outer() -> nn.Module:
        return Function(lambda block, x: block.after(block.inner(x)), inner=Layer(), after=nn.Linear(8, 8))

    model = checkpointed(Model(outer), "blocks layers.*; recompute everything in block")
    checkpointed(model, "blocks layers.*.inner; recompute everything in block")
    gc.collect()
    gc.disable()
    try:
        inputs = []
        for number in range(4):
            x = batch(number).requires_grad_()
            model(x).sum().backward()
            inputs.append(weakref.ref(x))
            del x
        assert [each() for each in inputs] == [None] * 4
    finally:
        gc.enable()


def test_transformations_and_traces_run_without_the_checkpoint() -> None:
    plain, model = Model(), checkpointed(Model())
    x = batch(0)
    with torch.no_grad():
        assert torch.equal(torch.func.vmap(model)(x[None]), plain(x)[None])
        assert torch.equal(torch.func.jvp(model, (x,), (x,))[1], torch.func.jvp(plain, (x,), (x,))[1])
    assert torch.equal(fx.symbolic_trace(model)(x), plain(x))
    assert torch.equal(torch.export.export(model, (x,)).module()(x), plain(x))
    with pytest.warns((DeprecationWarning, FutureWarning), match=r"torch\.jit"):  # the second from torch 2.15
        assert torch.equal(torch.jit.trace(model, x)(x), plain(x))
    with pytest.warns(PolicyWarning, match="APL398"):
        output = torch.func.vmap(model)(x[None])
    output.sum().backward()
    plain(x).sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.allclose(one.grad, other.grad) for one, other in pairs)
    assert differences(train(Model(), plainly), train(checkpointed(Model()), plainly)) == []


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_a_derivative_that_allows_no_checkpoint_is_refused_by_name(transform: Any) -> None:
    model = checkpointed(Model())
    with pytest.raises(PolicyGraphError, match=r"`layers\.0`.*differentiated by `torch.func`"):
        transform(lambda x: model(x).sum())(batch(0))


@needs_forward_derivatives_of_checkpoints
def test_forward_mode_derivatives_are_carried_through() -> None:
    from torch.autograd import forward_ad

    plain, model = Model(), checkpointed(Model())
    plainly(model, 0)
    with forward_ad.dual_level():
        found = [forward_ad.unpack_dual(each(forward_ad.make_dual(batch(0), batch(1)))) for each in (plain, model)]
        for each in found:
            each.tangent.sum().backward()
    assert torch.equal(found[0].tangent, found[1].tangent)
