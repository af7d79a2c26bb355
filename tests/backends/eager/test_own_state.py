"""Blocks that write what they read (buffers, counters, caches, generators) before an earlier backward has run: the bits
of the same training without checkpoints, or an error by name, and never other numbers."""

import collections
import contextlib
import gc
import random
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import policylang
from policylang.backends.eager import first_call
from policylang.errors import PolicyGraphError, PolicyMatchError
from policylang.language.cancellation import collector_paused
from policylang.language.syntax import Policy
from tests.support.drawn import crossed, slow
from tests.support.eager import differences, train
from tests.support.models import Function, Layers

W = 6


@torch.library.custom_op("policylang_tests::bump", mutates_args=("buffer",))
def bump(x: Tensor, buffer: Tensor) -> None:
    buffer.add_(x.mean(0))


@torch.library.custom_op("policylang_tests::bump_and_give", mutates_args=("buffer",))
def bump_and_give(x: Tensor, buffer: Tensor) -> Tensor:
    buffer.add_(x.mean(0))
    return x * buffer


@torch.library.custom_op("policylang_tests::bump_and_give_two", mutates_args=("buffer",))
def bump_and_give_two(x: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    buffer.add_(x.mean(0))
    return x * buffer, x.sin()


declared = torch.library.Library("policylang_tests", "FRAGMENT")
declared.define("bump_declared(Tensor x, Tensor(a!) buffer) -> Tensor(a!)")
declared.impl("bump_declared", lambda x, buffer: buffer.add_(x.mean(0)), "CompositeExplicitAutograd")
declared.define("sin_and_add(Tensor x, Tensor(a!) y) -> (Tensor, Tensor(a!))")
declared.impl("sin_and_add", lambda x, y: (x.sin(), y.add_(x)), "CompositeExplicitAutograd")


class State(nn.Module):
    """What the states below keep; a model has one for each step of each block, or one for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(W))
        self.register_buffer("table", torch.ones(4, W))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.norm = nn.BatchNorm1d(W, momentum=None)
        self.old, self.new = (
            each(nn.Linear(W, W)) for each in (nn.utils.spectral_norm, parametrizations.spectral_norm)
        )
        self.counts, self.cache, self.calls = [0], SimpleNamespace(values={"n": 0}), 0
        self.queue = collections.deque([torch.ones(W)] * 3, maxlen=3)
        self.generator = torch.Generator().manual_seed(3)


def in_place(s: State, h: Tensor) -> Tensor:
    with torch.no_grad():
        s.mean.mul_(0.9).add_(h.detach().mean(0))
    return h * s.mean.clone()


def added_directly(s: State, h: Tensor) -> Tensor:
    s.mean.add_(h.detach().mean(0))
    return (h + s.mean).sin()


def between_two_writes(s: State, h: Tensor) -> Tensor:
    s.mean.mul_(0.9)
    y = h * s.mean.exp()
    s.mean.add_(h.detach().mean(0))
    return y * s.mean.sin()


def through_views(s: State, h: Tensor) -> Tensor:
    s.table[1].add_(h.detach().mean(0))
    return h * s.table[1:3].sum(0) + s.table[0].cos()


def through_data(s: State, h: Tensor) -> Tensor:
    """Of a buffer that nobody assigns: what autograd has saved of a value is another behind its back, checkpoint or
    not."""
    y = h * s.table.mean(0)
    s.table.data.mul_(0.9).add_(h.detach().mean(0))
    return y * s.table.sin().sum(0)


def reassigned(s: State, h: Tensor) -> Tensor:
    s.mean = 0.9 * s.mean + h.detach().mean(0)
    return h * s.mean


def into_memory_of_its_own(s: State, h: Tensor) -> Tensor:
    s.mean.add_(h.detach().mean(0))
    mask = torch.zeros(W)
    mask[1:4] = s.mean[1:4]
    return h * mask + h


def foreach(s: State, h: Tensor) -> Tensor:
    torch._foreach_mul_([s.mean, s.table], 0.9)
    return h * s.mean.clone() + s.table.sum(0)


def codebook_with_gradients(s: State, h: Tensor) -> Tensor:
    """Autograd keeps the codebook for distances that no gradient reaches."""
    nearest = torch.cdist(h, s.table).argmin(1)
    quantised = s.table[nearest].clone()
    s.table.lerp_(h.detach()[:1].expand(4, -1), 0.1)
    return h + (quantised - h).detach() + (quantised - h) ** 2


def number(s: State, h: Tensor) -> Tensor:
    s.count.add_(1)
    return h * (1 + 1 / s.count.item())


def branch(s: State, h: Tensor) -> Tensor:
    s.count += 1
    return h.sin() if s.count % 2 == 0 else h.cos() * 2


def statistics(s: State, h: Tensor) -> Tensor:
    return s.norm(h) * s.norm.running_mean.exp()


def codebook(s: State, h: Tensor) -> Tensor:
    nearest = torch.cdist(h.detach(), s.table).argmin(1)
    quantised = F.embedding(nearest, s.table)
    s.table.data.mul_(0.9).add_(F.one_hot(nearest, 4).to(h.dtype).t() @ h.detach(), alpha=0.1)
    return h + (quantised - h).detach() + (quantised.detach() - h) ** 2


def ring(s: State, h: Tensor) -> Tensor:
    logits = h @ s.table.clone().t()
    at = int(s.count) % 4
    s.table[at] = h.detach().mean(0)
    s.count.copy_(torch.tensor((at + 1) % 4))
    return h * logits.logsumexp(1, keepdim=True)


def attribute(s: State, h: Tensor) -> Tensor:
    s.calls += 1
    return h * s.calls


def in_containers(s: State, h: Tensor) -> Tensor:
    s.counts[0] += 1
    s.cache.values["n"] += s.counts[0]
    return h * (1 + 1 / s.cache.values["n"]) * s.table[s.counts[0] % 4]


def in_queue(s: State, h: Tensor) -> Tensor:
    y = h * torch.stack(list(s.queue)).mean(0)
    s.queue.append(h.detach().mean(0))
    return y


STATES: dict[str, Callable[[State, Tensor], Tensor]] = {
    each.__name__: each
    for each in (
        *(in_place, added_directly, between_two_writes, through_views, through_data, reassigned, foreach, number),
        *(into_memory_of_its_own, branch, statistics, codebook, codebook_with_gradients, ring, attribute),
        *(in_containers, in_queue),
    )
}
STATES |= {
    "old spectral_norm": lambda s, h: s.old(h),
    "new spectral_norm": lambda s, h: s.new(h),
    "custom operator": lambda s, h: (bump(h.detach(), s.mean), h * s.mean.clone())[1],
    "generator it makes": lambda s, h: h * torch.rand(W, generator=torch.Generator().manual_seed(3)),
    "operator that gives": lambda s, h: h * bump_and_give(h.detach(), s.mean),
    "operator that gives two": lambda s, h: h * bump_and_give_two(h.detach(), s.mean)[1],
    "declared operator": lambda s, h: h * torch.ops.policylang_tests.bump_declared(h.detach(), s.mean).clone(),
    "generator": lambda s, h: h * torch.rand(W, generator=s.generator),
    "python's generator": lambda s, h: h.sin() if random.random() < 0.5 else h * random.random(),
    "inference mode": lambda s, h: h + torch.inference_mode()(lambda: h.detach().exp())(),
    "written to behind it": lambda s, h: (h * s.mean, s.mean.add_(1))[0],  # an error of autograd's own
    "kept by autograd": lambda s, h: (s.mean.add_(1), h * s.mean)[1],  # and this where two forwards come first
    "own data": lambda s, h: (s.mean.data.mul_(0.9), h * s.mean.clone())[1],
    "rebound and written": lambda s, h: (s.mean.add_(1), setattr(s, "mean", s.mean * 0.5), h * s.mean.clone())[2],
}
RIGHT = [name for name in STATES if name not in ("written to behind it", "kept by autograd", "rebound and written")]
POLICIES = (
    "include <torchtitan_full>",
    "blocks layers.*\noptional recompute everything in block",
    "blocks layers.*\noptional recompute everything in block\noptional save mul in block",
    "blocks layers.*\noptional save everything in block",
    "blocks layers.*\noptional save addmm in block",
)


class Block(nn.Module):
    def __init__(self, steps: list[str], states: list[State]) -> None:
        super().__init__()
        self.steps, self.states = steps, nn.ModuleList(states)
        self.linear, self.out = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        for step, state in zip(self.steps, self.states, strict=True):
            h = STATES[step](state, h).tanh()
        return x + self.out(h)


class Model(Layers):
    def __init__(self, programs: list[list[str]], shared: bool = False) -> None:
        torch.manual_seed(0)
        random.seed(0)
        one = [State() for _ in max(programs, key=len)]
        own = [one[: len(steps)] if shared else [State() for _ in steps] for steps in programs]
        super().__init__(*(Block(*each) for each in zip(programs, own, strict=True)))


def forwards_first(order: tuple[int, ...], between: bool = False) -> Callable[[nn.Module, int], Tensor]:
    def run(model: nn.Module, seed: int) -> Tensor:
        inputs = torch.randn(len(order) + 1, 5, W, generator=torch.Generator().manual_seed(seed))
        losses = [model(inputs[at]).pow(2).mean() for at in range(len(order))]
        if between:
            with torch.no_grad():
                model(inputs[-1])
        for at in order:
            losses[at].backward()
        for parameter in model.parameters():  # of states that no step uses
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return torch.stack(losses).sum()

    return run


ORDERS = {str(each): forwards_first(*each) for each in (((0,),), ((0, 1),), ((1, 0),), ((1, 0, 2), True))}


def state_of(model: nn.Module) -> list[Any]:
    """All that training has changed beside the parameters."""
    own = [each for each in model.modules() if isinstance(each, State)]
    plain = [(each.counts, each.cache.values, each.calls, each.generator.get_state().tolist()) for each in own]
    queues = [tensor.tolist() for each in own for tensor in each.queue]
    return [*plain, *queues, *(each.tolist() for each in model.buffers()), random.getstate()]


def trained(model: nn.Module, run: Callable[[nn.Module, int], Tensor]) -> tuple[Any, list[Any]]:
    random.seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", policylang.PolicyWarning)  # a block that takes another way
        return train(model, run), state_of(model)


def check(programs: list[list[str]], policy: Policy, run: Callable[[nn.Module, int], Tensor], shared: bool) -> None:
    expected, before = trained(Model(programs, shared), run)
    model = Model(programs, shared)
    found, after = trained(policylang.checkpoint_model(model, policy), run)
    assert differences(expected, found) == []
    assert before == after


@pytest.mark.parametrize(("state", "order"), crossed(RIGHT, list(ORDERS)[2:]))
def test_a_block_that_runs_again_before_its_backward(state: str, order: str) -> None:
    for shared in (False, True):
        check([[state], [state]], policylang.parse(POLICIES[0]), ORDERS[order], shared)


@given(
    programs=st.lists(st.lists(st.sampled_from(sorted(STATES)), min_size=1, max_size=3), min_size=1, max_size=2),
    policy=st.sampled_from(POLICIES),
    order=st.sampled_from(sorted(ORDERS)),
    shared=st.booleans(),
    looks_from=st.sampled_from([0, first_call._LOOKS_FROM]),
)
@settings(max_examples=25)
def test_random_states_are_right_or_refused(programs, policy, order, shared, looks_from) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_call, "_LOOKS_FROM", looks_from)  # with what is thrown away let go at once
        try:
            expected = trained(Model(programs, shared), ORDERS[order])
        except RuntimeError:  # of autograd, about a buffer that was written to
            with pytest.raises((PolicyGraphError, PolicyMatchError, RuntimeError)):
                check(programs, policylang.parse(policy), ORDERS[order], shared)
            return
        assert expected
        with contextlib.suppress(PolicyGraphError, PolicyMatchError):
            check(programs, policylang.parse(policy), ORDERS[order], shared)


def block_model(forward: Callable[[nn.Module, Tensor], Tensor], policy: str = POLICIES[1]) -> nn.Module:
    class Other(Block):
        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.ModuleDict({"layers": nn.ModuleList([Other([], [State()])])}))
    model.forward = lambda x: model[0]["layers"][0](x)
    return policylang.checkpoint_model(model, policylang.parse(policy.replace("layers.*", "*layers.*")))


counted = [0]


def counts(block: nn.Module, x: Tensor) -> Tensor:
    counted[0] += 1
    return (block.out(x) * counted[0]).sin()


def skips(block: nn.Module, x: Tensor) -> Tensor:
    counted[0] += 1
    return block.out(x).sin() if counted[0] % 2 else x * block.out.bias


jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (counts, r"APL393.*calls `aten.mul.Tensor` \(operator 3\) with \[2\], where its forward did with \[1\]"),
        (skips, r"APL393.*the recomputation of .* runs `aten.mul.Tensor` as operator 1, where its forward ran `aten.t"),
        (lambda b, x: x * (skips(b, x) if b.out(x).numel() else x), "APL393.*the recomputation of"),
        (lambda b, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (b.out(x),)), "APL396.*calls `torch.cond`"),
        (lambda b, x: torch.cond(x.sum() > 0, lambda h: b.out(h), torch.cos, (x,)), "APL396.*calls `torch.cond`"),
        (lambda b, x: x - torch.func.grad(lambda v: b.out(v).sin().sum())(x), "APL398.*differentiates a function by"),
        (lambda b, x: torch.nested.as_nested_tensor([b.out(x)]), "APL428.*`aten._nested_tensor_from_tensor"),
        (lambda b, x: jagged([b.out(x)]).sin().values(), "APL428.*makes a nested tensor"),
        (lambda b, x: STATES["written to behind it"](b.states[0], b.out(x)), "APL395.*`aten.mul.Tensor`.*in place"),
        (lambda b, x: (b.out(x) * b.states[0].table[0], b.states[0].table.add_(1))[0], "APL395.*`aten.mul.Tensor`"),
    ],
    ids=["counter", "operators", "ends early", "cond", "module", "func.grad", "nested", "jagged", "behind it", "view"],
)
def test_what_cannot_be_right_is_an_error_by_name(forward: Callable[[nn.Module, Tensor], Tensor], said: str) -> None:
    counted[0] = 0
    model = block_model(forward)
    with pytest.raises(PolicyGraphError, match=f"(?s){said}"):
        model(torch.ones(3, W, requires_grad=True)).sum().backward()


def test_nested_tensors_that_a_block_is_called_with() -> None:
    model, given = block_model(lambda b, x: b.out(x).sin()), [torch.ones(2, W), torch.ones(3, W)]
    with pytest.raises(PolicyGraphError, match=r"APL428.*is called with a nested tensor of strided layout"):
        model(torch.nested.as_nested_tensor(given))
    plain = policylang.checkpoint_model(block_model(lambda b, x: b.out(x).sin()), None)

    def run(model: nn.Module, _: int) -> Tensor:
        loss = model(jagged(given)).values().sum() + 0 * sum(each.sum() for each in model.parameters())
        loss.backward()
        return loss

    assert differences(train(plain, run), train(model, run)) == []


def test_a_custom_operator_that_writes_is_told_as_one_of_torchs_own() -> None:
    forward = STATES["custom operator"]
    model = block_model(lambda b, x: forward(b.states[0], b.out(x)), "blocks layers.*\nrecompute everything in block")
    with pytest.raises(PolicyMatchError, match=r"APL304.*`clone`: it reads memory that the graph changes"):
        model(torch.ones(3, W)).sum().backward()


def test_a_write_that_is_not_done_again_is_not_counted() -> None:
    model = block_model(lambda b, x: STATES["in_place"](b.states[0], b.out(x)))
    buffer = model[0]["layers"][0].states[0].mean
    loss = model(torch.ones(3, W)).sum()
    before = buffer._version
    loss.backward()
    assert buffer._version == before


def test_what_a_block_throws_away_is_not_held_while_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_call, "_LOOKS_FROM", 0)
    held = []

    def tunes(block: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(40):
                (torch.ones(7, 5) @ torch.ones(5, 7)).sin().sum().item()
        held.append(sum(isinstance(each, Tensor) and each.shape == (7, 7) for each in gc.get_objects()))
        return block.out(x).sin()

    block_model(tunes)(torch.ones(3, W)).sum().backward()
    assert held[0] < 10


def test_a_block_that_leaves_its_plan_and_writes_behind_autograds_back() -> None:
    with pytest.raises(PolicyGraphError, match="APL395"):
        check([["branch", "codebook"]], policylang.parse(POLICIES[0]), ORDERS["((0, 1),)"], False)


def own_noise(b: nn.Module, x: Tensor) -> Tensor:
    return F.rrelu(b.out(x), training=True)  # autograd keeps the noise before the operator fills it


def filled_and_read(b: nn.Module, x: Tensor) -> Tensor:
    made = torch.zeros(W)
    return (bump_and_give(x.detach(), made) * b.out(x) * made).tanh()


def tangled(b: nn.Module, x: Tensor) -> Tensor:
    return F.alpha_dropout(b.out(x), training=True)


def test_memory_that_is_read_between_its_writes_is_refused_with_the_reason() -> None:
    model = block_model(lambda b, x: F.alpha_dropout(b.out(x), training=True), "recompute everything in block")
    with pytest.raises(PolicyMatchError, match=r"APL304.*`empty_like`: it is written to in place together"):
        model(torch.ones(3, W))


def behind_its_back(b: nn.Module, x: Tensor) -> Tensor:
    made = b.out(x).exp()
    made.data.add_(1)
    return made * 2


def two_at_once(b: nn.Module, x: Tensor) -> Tensor:
    made = [x.detach().clone(), x.detach().sin()]
    torch._foreach_mul_(made, 0.5)
    return b.out(x) * made[0] + made[1].sin() * b.out(x)


def read_between_writes(b: nn.Module, x: Tensor) -> Tensor:
    made = b.out(x).data.clone()
    normed = F.layer_norm(made.add_(0.5), (W,))
    return (normed * b.out(x) + made.mul_(2)).tanh()


def reads_one_and_fills_another(b: nn.Module, x: Tensor) -> Tensor:
    made, other = b.out(x), torch.ones_like(x)
    made.data.mul_(0.5)
    result = bump_and_give(made.detach(), other[0])
    made.data.mul_(0.5)
    return made * other + result


def both(b: nn.Module, x: Tensor) -> Tensor:
    made = x.detach().clone()
    result, made = torch.ops.policylang_tests.sin_and_add(x.detach(), made)
    return b.out(x) * result * made


def two_results(b: nn.Module, x: Tensor) -> Tensor:
    made = torch.empty_like(x[0]).fill_(1)
    result, _ = bump_and_give_two(x.detach(), made)
    return b.out(x) * result.mul_(2) * made


def view_of_noise(b: nn.Module, x: Tensor) -> Tensor:
    return F.rrelu(b.out(x), training=True)[..., 0].sin() * x.mean()


def into_another(b: nn.Module, x: Tensor) -> Tensor:
    return b.out(x) * torch.sin(b.out(x).detach(), out=torch.empty_like(x))


@pytest.mark.parametrize(
    "forward",
    [
        own_noise,
        filled_and_read,
        tangled,
        behind_its_back,
        two_at_once,
        read_between_writes,
        both,
        two_results,
        view_of_noise,
        reads_one_and_fills_another,
        into_another,
    ],
)
@pytest.mark.parametrize(
    "policy",
    [
        "optional recompute everything in block",
        "save everything in block",
        "optional recompute everything in block\noptional save everything in block where is mutated",
        "optional recompute everything in block\noptional offload view in block",
        "optional recompute everything in block\noptional offload empty_like in block",
    ],
    ids=["recompute", "save", "save mutated", "offload view", "offload"],
)
def test_memory_of_its_own_that_an_operator_fills_beside_its_result(
    forward: Callable[[nn.Module, Tensor], Tensor], policy: str
) -> None:
    model = block_model(forward, policy)
    plain = policylang.checkpoint_model(block_model(forward), None)
    run = forwards_first((1, 0))
    assert differences(train(plain, run), train(model, run)) == []


@pytest.mark.parametrize(
    "policy",
    [
        "optional recompute everything in block",
        "save everything in block",
        "optional recompute everything in block\noptional offload view in block",
    ],
    ids=["recompute", "save", "offload"],
)
def test_a_piece_of_a_result_is_written_to_in_its_own_memory(policy: str) -> None:
    """As a router's scores are."""

    def forward(b: nn.Module, x: Tensor) -> Tensor:
        scores, _ = b.out(x).softmax(-1).topk(2)
        scores /= scores.sum(-1, keepdim=True)
        return x * scores[..., :1].exp()

    model, run = block_model(forward, policy), forwards_first((1, 0))
    plain = policylang.checkpoint_model(block_model(forward), None)
    assert differences(train(plain, run), train(model, run)) == []
    assert policylang.report(model).audit.agrees


def test_a_forward_derivative_that_is_zero_has_no_memory_to_offload() -> None:
    def forward(b: nn.Module, x: Tensor) -> Tensor:
        return torch.func.jvp(lambda each: b.out(each).sin(), (b.out(x),), (torch.ones_like(x),))[1]

    model, run = block_model(forward, "optional offload everything in block"), forwards_first((1, 0))
    assert differences(train(policylang.checkpoint_model(block_model(forward), None), run), train(model, run)) == []


@pytest.mark.parametrize("policy", ["recompute", "save"])
def test_what_autograd_refuses_without_a_checkpoint_is_refused(policy: str) -> None:
    model = block_model(lambda b, x: b.out(x).exp().add_(1).sin(), f"{policy} everything in block")
    loss = model(torch.ones(3, W)).sum()
    with pytest.raises(PolicyGraphError, match=r"APL395.*shape \[3, 6\] that the block itself .* `aten.add_.Tensor`"):
        loss.backward()


@pytest.mark.parametrize("later", ["foreach", "declared operator", "custom operator", "own data"])
def test_a_later_block_that_writes_to_what_an_earlier_one_holds(later: str) -> None:
    with pytest.raises(PolicyGraphError, match=r"APL395.*`layers.0`.*`aten.mul.Tensor`.*in place"):
        check([["rebound and written"], [later]], policylang.parse(POLICIES[0]), ORDERS["((0,),)"], True)


@pytest.mark.parametrize("writes", ["the block", "the code behind it"])
def test_a_tensor_that_a_block_is_called_with_is_written_to(writes: str) -> None:
    def block(module: nn.Module, x: Tensor) -> Tensor:
        made = x + module.out(x + 1)
        return made + x.mul_(2) if writes == "the block" else made

    model, x = block_model(block), torch.ones(3, W)
    policylang.checkpoint_model(model, policylang.parse("save everything in block"))
    found = model(x)
    x.add_(1)
    with pytest.raises(PolicyGraphError, match=r"APL395.*`0.layers.0`.* was called with a tensor that was written to"):
        found.sum().backward()


def masked() -> nn.Module:
    linear, masks = nn.Linear(16, 16, bias=False, dtype=torch.double), nn.Sequential(*[nn.Dropout(0.3)] * 4)
    return Function(lambda block, x: block.masks(block.linear(x)), linear=linear, masks=masks)


@pytest.mark.parametrize("preserve", [True, slow(False)])
def test_threads_that_draw_at_the_same_time_are_right_or_refused(preserve: bool) -> None:
    """A loss that is linear in each weight is the product of that weight and its gradient."""
    model = Layers(*(masked() for _ in range(3)))
    policylang.checkpoint_model(model, policylang.parse(POLICIES[0]), preserve_rng_state=preserve)
    weights = [block.linear.weight for block in model.layers]
    inputs = torch.randn(64, 16, dtype=torch.double)
    model(inputs).sum().backward()  # the plan is made

    def wrong(_: int) -> int:
        loss = model(inputs).sum()
        try:
            gradients = torch.autograd.grad(loss, weights)
        except PolicyGraphError as error:
            assert "another thread drew random numbers" in str(error)  # noqa: PT017
            assert preserve
            return 0
        return sum(not torch.allclose((g * w).sum(), loss) for g, w in zip(gradients, weights, strict=True))

    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with collector_paused(), ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(wrong, range(100))) == 0
    finally:
        sys.setswitchinterval(often)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=600)
def test_many_random_states(data: st.DataObject) -> None:
    drawn = st.lists(st.lists(st.sampled_from(sorted(STATES)), min_size=1, max_size=4), min_size=1, max_size=3)
    chosen = [data.draw(each) for each in (drawn, st.sampled_from(POLICIES), st.sampled_from(sorted(ORDERS)))]
    inner = test_random_states_are_right_or_refused.hypothesis.inner_test
    inner(*chosen, data.draw(st.booleans()), data.draw(st.sampled_from([0, first_call._LOOKS_FROM])))
