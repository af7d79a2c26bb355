"""What training does around blocks: dropout, autocast, several backwards, blocks left out, other checkpoints.
Under a policy the bits are those of the model without any checkpoint."""

import copy
import sys
import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint

import policylang
from policylang.errors import PolicyGraphError, PolicyMatchError, PolicyWarning
from policylang.language.syntax import Policy
from tests.backends.eager.test_observed import POLICY, Layer, Model, checkpointed, plainly
from tests.support import eager, models
from tests.support.eager import differences, train
from tests.support.models import Function, Layers

RECOMPUTE = policylang.parse("recompute everything in block")
SAVE = policylang.parse("save everything in block")
POLICIES = {
    "half of the products": eager.POLICY,
    "recompute": RECOMPUTE,
    "save": SAVE,
    "save random": policylang.parse("recompute everything in block; save random in block"),
}


def cast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def compare(
    example: models.Example, run: Callable[[nn.Module, int], Tensor], policy: Policy = eager.POLICY, plain: bool = True
) -> None:
    """Without checkpoints, with torch's own, and under the policy."""
    expected = eager.train(eager.twin(example.module), run)
    if plain:
        plainly = eager.train(eager.plainly_checkpointed(eager.twin(example.module)), run)
        assert eager.differences(expected, plainly) == []
    under_policy = policylang.checkpoint_model(eager.twin(example.module), policy)
    assert eager.differences(expected, eager.train(under_policy, run)) == []
    report = policylang.report(under_policy)
    assert report.decisions
    assert bool(report.recomputed.names) == (policy != SAVE)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_dropout_draws_the_same_numbers_again(policy: Policy) -> None:
    example = models.gpt2()
    compare(example, eager.backward_of(eager.loss_of(example)), policy)


@pytest.mark.parametrize("example", [models.gpt2(), models.llama(), models.qwen3()], ids=["gpt2", "llama", "qwen3"])
def test_autocast(example: models.Example) -> None:
    compare(example, eager.backward_of(eager.loss_of(example), cast()))


def two_forwards_first(loss: eager.Loss, model: nn.Module, step: int) -> Tensor:
    """What each block holds for two backwards at a time."""
    first, second = loss(model, 2 * step), loss(model, 2 * step + 1)
    second.backward()
    first.backward()
    return first + second


def one_after_the_other(loss: eager.Loss, model: nn.Module, step: int) -> Tensor:
    first = loss(model, 2 * step)
    first.backward()
    second = loss(model, 2 * step + 1)
    second.backward()
    return first + second


def summed(loss: eager.Loss, model: nn.Module, step: int) -> Tensor:
    total = loss(model, 2 * step) + loss(model, 2 * step + 1)
    total.backward()
    return total


def twice_through(loss: eager.Loss, model: nn.Module, step: int) -> Tensor:
    value = loss(model, step)
    value.backward(retain_graph=True)
    value.backward()
    return value


@pytest.mark.parametrize("run", [two_forwards_first, one_after_the_other, summed, twice_through])
def test_several_backwards_a_step(run: Callable[..., Tensor]) -> None:
    example = models.gpt2()
    compare(example, partial(run, eager.loss_of(example)))


def test_backward_under_autocast() -> None:
    """Torch advises against it, and it is common: the recomputation then finds the weights cast."""
    example = models.llama()

    def run(model: nn.Module, step: int) -> Tensor:
        with cast():
            value = loss(model, step)
            value.backward()
        return value

    loss = eager.loss_of(example)
    compare(example, run)


def under_one_autocast(loss: eager.Loss, model: nn.Module, step: int, cached: bool = False) -> Tensor:
    """Two micro-batches under one autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
        total = loss(model, 2 * step) + loss(model, 2 * step + 1)
    total.backward()
    return total


@pytest.mark.parametrize("example", [models.gpt2(), models.shared_parameters()], ids=["gpt2", "a block used twice"])
def test_a_weight_used_twice_under_one_autocast(example: models.Example) -> None:
    """Every call of a block casts its weights itself, so that all calls run the same operators. The gradients are
    those of an autocast that remembers no casts: summed in float32, not in bfloat16."""
    loss = eager.loss_of(example)
    expected = eager.train(eager.twin(example.module), partial(under_one_autocast, loss))
    under_policy = policylang.checkpoint_model(eager.twin(example.module), eager.POLICY)
    found = eager.train(under_policy, partial(under_one_autocast, loss, cached=True))
    ours = [
        difference
        for difference in eager.differences(expected, found)
        if "layers." in difference or ".h." in difference
    ]
    assert ours == []


def test_batches_of_other_shapes_and_evaluation_in_between() -> None:
    example = models.gpt2()

    def run(model: nn.Module, step: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            evaluated = example.loss_fn(model(example.inputs[0]))
        model.train()
        value = example.loss_fn(model(example.inputs[0][:, : 8 - 2 * step])) + 0 * evaluated
        value.backward()
        return value

    compare(example, run)


@pytest.mark.parametrize("within", [nullcontext, cast])
def test_frozen_weights(within: Callable[[], AbstractContextManager[Any]]) -> None:
    example = models.llama()
    for block in eager.blocks_of(example.module)[:1]:
        block.self_attn.requires_grad_(False)

    def run(model: nn.Module, step: int) -> Tensor:
        with within():
            value = loss(model, step)
            value.backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return value

    loss = eager.loss_of(example)
    compare(example, run)


# --- the example with the Trainer of Hugging Face ---
EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 4


@pytest.fixture(scope="module")
def example() -> Any:
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import hf_trainer

    return hf_trainer


@pytest.mark.slow
def test_the_loss_curve_is_the_same_with_and_without(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    without = example.main("none", STEPS)
    assert "policy" not in capsys.readouterr().out
    with_policy = example.main(example.POLICY, STEPS)
    assert len(without) == STEPS
    assert without[-1] < without[0]
    assert with_policy == without
    printed = capsys.readouterr().out
    assert "policy mine: 280 forward values, 4 blocks" in printed
    assert "audit       the changed graphs do what was planned" in printed


@pytest.mark.slow
def test_a_bundled_policy_serves_as_well(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    losses = example.main("llama3_sac", 1)
    assert losses == example.main("none", 1)
    assert "policy llama3_sac" in capsys.readouterr().out


# --- blocks that a step leaves out, or runs without a checkpoint ---
class Block(nn.Module):
    def __init__(self, *, rounds: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8) if rounds else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.sin(self.up(x)))
        return x if self.norm is None else torch.cos(self.norm(x))


class Chosen(nn.Module):
    """``last``: whether the last block is of another kind."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(rounds=last and at == 3) for at in range(4))
        self.context_fn: object = None

    def step(self, blocks: Collection[int], without: Collection[int] = ()) -> None:
        """Train a step through some of the blocks, with a checkpoint of the user's around each but for ``without``."""
        x = torch.ones(2, 8, requires_grad=True)
        for at in blocks:
            if self.context_fn is None or at in without:
                x = self.layers[at](x)
            else:
                x = checkpoint(self.layers[at], x, use_reentrant=False, context_fn=self.context_fn)
        x.sum().backward()


def chosen(rules: str, *, last: bool = False) -> Chosen:
    return policylang.checkpoint_model(Chosen(last=last), policylang.parse(f"recompute everything in block\n{rules}"))


RULES = ["save bmm", "save addmm in block 9", "save addmm in layers.9", "save cos in last block"]


@pytest.mark.parametrize("blocks", [(0,), (0, 2), (1, 2, 3)])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_matches_nothing_is_told_when_the_first_backward_begins(rule: str, blocks: tuple[int, ...]) -> None:
    with pytest.raises(PolicyMatchError, match=f"`{rule}` matches nothing") as error:
        chosen(rule).step(blocks)
    assert f"{4 - len(blocks)} of 4 blocks" in str(error.value)


@pytest.mark.parametrize("rule", ["save addmm in block 3", "save addmm in layers.3", "save addmm in last block"])
def test_what_is_for_a_block_that_runs_later_is_no_error(rule: str) -> None:
    model = chosen(rule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.step((0, 1))
        assert "2 of 4 blocks have not run so far: layers.2–3" in str(policylang.report(model))
        model.step((0, 1, 2, 3))
    assert "blocks have" not in str(policylang.report(model))
    assert policylang.report(model).rules[1].matched == 2


def test_a_block_of_another_kind_is_waited_for() -> None:
    model = chosen("save cos", last=True)
    with pytest.warns(PolicyWarning, match=r"`save cos` matches nothing .* layers.3 has not run \(APL359\)"):
        model.step((0, 1))
    model.step((0, 1))
    model.step((2, 3))
    typo = chosen("save bmm", last=True)
    with pytest.warns(PolicyWarning, match="APL359"):
        typo.step((0, 1))
    with pytest.raises(PolicyMatchError, match="`save bmm` matches nothing"):
        typo.step((0, 1, 2, 3))


@pytest.mark.parametrize("rule", ["save addmm in block 1", "save addmm in every 2nd block"])
def test_what_is_trained_without_a_checkpoint_is_not_under_the_policy(rule: str) -> None:
    """As with Transformers' ``every_n_layers``."""
    found = []
    for rules in ("save addmm in block 2", rule):
        model = Chosen()
        model.context_fn = policylang.context_fn(policylang.parse(f"recompute everything in block\n{rules}"), model)
        found.append(model)
    found[0].step(range(4), without=(1, 3))
    said = "2 of 4 blocks have run without a checkpoint, and not under the policy: layers.1, 3"
    assert said in policylang.report(found[0]).notes
    with pytest.raises(PolicyMatchError, match=f"`{rule}` matches nothing") as error:
        found[1].step(range(4), without=(1, 3))
    assert said in str(error.value)


def test_an_error_on_the_way_into_a_recomputation_is_none_of_the_next_model() -> None:
    """As in Transformers, where the checkpoint lies in the block's own call."""
    for rule in ("save bmm", "save addmm in block 1"):
        model = Chosen()
        context_fn = policylang.context_fn(policylang.parse(f"recompute everything in block\n{rule}"), model)
        for at, block in enumerate(model.layers):
            if at not in (1, 3):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=context_fn)
        with pytest.raises(PolicyMatchError, match=f"`{rule}` matches nothing"):
            model.step(range(4))


# --- shares are of the blocks of the whole model, though each is planned on its own ---
TEXT = """
blocks layers.*
recompute everything in block
save mm in first half of blocks
save activation in last 40% of blocks
expect saved per block <= 60% of forward
expect recomputed operators per block <= 100%
expect exactly 1 activation per block
"""


def block() -> nn.Module:
    parts = {"up": nn.Linear(8, 8, bias=False), "down": nn.Linear(8, 8, bias=False)}
    return Function(lambda block, x: x + block.down(nn.functional.silu(block.up(x))), **parts)


def trained(blocks: int, text: str) -> nn.Module:
    model = policylang.checkpoint_model(Layers(*(block() for _ in range(blocks))), policylang.parse(text))
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    return model


@pytest.mark.parametrize(("blocks", "halves", "last"), [(5, 2, 2), (4, 2, 1), (3, 1, 1)])
def test_shares_are_of_the_blocks_of_the_model(blocks: int, halves: int, last: int) -> None:
    report = policylang.report(trained(blocks, TEXT))
    assert [rule.matched for rule in report.rules[1:]] == [2 * halves, last]
    assert {each.status for each in report.expectations} == {"held"}


def test_a_share_of_one_block_is_none() -> None:
    with pytest.raises(PolicyMatchError, match=r"`first half of blocks` of .* is no block: this graph has 1 block"):
        trained(1, TEXT)


def test_a_share_of_the_whole_forward_is_deferred() -> None:
    report = policylang.report(trained(3, TEXT + "expect saved <= 1% of forward\n"))
    assert "deferred" in {each.status for each in report.expectations}
    assert any("APL391" in found for found in report.warnings)


# --- checkpoints of others around those of a policy, inside them and in their place ---
class Around(Model):
    """Checkpoints its blocks itself."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Around):
    reentrant = True


class Offloads(torch.autograd.Function):
    """Unsloth's checkpoint: the block's input waits on the host, and the block runs again in the backward."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x.to("cpu", non_blocking=True))
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.block(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


class Unsloth(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = Offloads.apply(layer, x)
        return x


def wrapped(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Layer))
    return model


@pytest.mark.parametrize(
    ("kind", "wrap", "said"),
    [
        (Around, lambda model: model, r"the checkpoint of `layers\.0` \(Layer\) is inside another one"),
        (Reentrant, lambda model: model, r"`layers\.1` \(Layer\) runs with gradients only in the backward"),
        (Unsloth, lambda model: model, r"`layers\.1` \(Layer\) runs with gradients only in the backward"),
        (Model, wrapped, r"the checkpoint of `layers\.0` \(Layer\) is inside another one"),
    ],
)
def test_a_checkpoint_around_that_of_the_policy_is_named(kind: type[Model], wrap: Any, said: str) -> None:
    model = wrap(checkpointed(kind()))
    with pytest.warns(PolicyWarning, match=rf"{said}.*\(APL426\)") as caught:
        trained = train(model, plainly)
    assert differences(train(Model(), plainly), trained) == []
    assert sum("APL426" in str(each.message) for each in caught) == 1, "of all blocks once"
    assert sum("(APL426)" in warning for warning in policylang.report(model).warnings) == 1


class Inside(Layer):
    """As layers of Hugging Face: the class checkpoints its own forward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.reentrant)


class InsideReentrant(Inside):
    reentrant = True


@pytest.mark.parametrize("kind", [Inside, InsideReentrant])
def test_a_block_all_of_which_runs_in_its_own_checkpoint_is_refused(kind: type[Layer]) -> None:
    model = checkpointed(Model(kind))
    with pytest.raises(PolicyGraphError, match=r"inside the policy's, runs all of `layers\.0`") as caught:
        plainly(model, 0)
    assert caught.value.diagnostics[0].code == "APL394"


def test_the_switch_of_a_trainer_beside_checkpoints_of_a_policy_is_refused() -> None:
    example = models.llama()
    inner: Any = example.module.model
    inner.gradient_checkpointing_enable()
    policylang.checkpoint_model(inner, "llama3_sac")
    for _ in range(2):
        with pytest.raises(PolicyGraphError, match="another checkpoint, inside the policy's"):
            example.module(*example.inputs)
        function = policylang.context_fn("llama3_sac", inner)
        inner.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": function})
    policylang.checkpoint_model(inner, None)
    example.module(*example.inputs).sum().backward()
    assert policylang.report(function).saved is not None


def test_a_switch_that_takes_the_place_of_the_function_is_named() -> None:
    example = models.llama()
    inner: Any = example.module.model
    function = policylang.context_fn("llama3_sac", inner)
    enable = inner.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": function})
    other = copy.deepcopy(inner)
    enable()  # as a trainer with the switch among its arguments
    with pytest.warns(PolicyWarning, match=r"none in a checkpoint with the policy's `context_fn` \(APL426\)"):
        example.module(*example.inputs).sum().backward()
    for subject in (inner, function):
        with pytest.raises(PolicyGraphError, match="none in a checkpoint with the policy's `context_fn`") as caught:
            policylang.report(subject)
        assert caught.value.diagnostics[0].code == "APL327"
    with warnings.catch_warnings():
        warnings.simplefilter("error", PolicyWarning)
        other(*example.inputs)
        policylang.context_fn(policylang.parse(POLICY), Model())
        inner.eval()(*example.inputs)
        with torch.no_grad():
            inner.train()(*example.inputs)
