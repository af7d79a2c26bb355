"""Steps traced from models whose checkpoints follow a policy already: the step is given the same one, and decides."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import policylang
from policylang import PolicyMatchError, PolicyWarning, TracedStep, trace_step
from policylang.graph import marks
from tests.support import models
from tests.tracing.steps import eager_step, loss_of

POLICY = policylang.parse("blocks layers.*\nrecompute everything in block; save addmm", name="mine.apl")
SAME = policylang.parse("# the same\nblocks layers.*\nrecompute  everything in block\nsave addmm", name="mine.apl")
OTHER = policylang.parse("blocks layers.*\nrecompute everything in block", name="other.apl")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))
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
    says_so_once(trace_step(wrapped(), loss_fn, batch()), "carries nothing out")
    with nothing_said():
        trace_step(wrapped(), loss_fn, batch()).apply(POLICY)(batch())


def test_checkpoints_of_the_users_own_that_nothing_carries_out_say_so_once() -> None:
    class Plain(Model):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x.sin()

    says_so_once(trace_step(Plain(), loss_fn, batch()), "nothing carries them out")
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
    with pytest.warns(PolicyWarning, match="carries nothing out"):
        _, found = traced(*example.inputs)
    _, expected = eager_step(model, loss_of(example), *example.inputs)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in found)
    assert found.keys() == expected.keys()
