"""Blocks of random operators under random rules: the bits of the same training without checkpoints."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import policylang
from policylang.backends.copies import pool
from policylang.backends.eager import moved_values, region
from tests.support import models
from tests.support.drawn import crossed, examples
from tests.support.eager import differences, train
from tests.support.late import Late, copied_over
from tests.support.models import Layers


class Random(nn.Module):
    """Runs a list of steps; each takes the last value and one made before."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps
        self.linears = nn.ModuleList([nn.Linear(6, 6) for _ in steps])
        self.norms = nn.ModuleDict({str(at): nn.BatchNorm1d(6) for at, step in enumerate(steps) if step == "norm"})
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for number, step in enumerate(self.steps):
            value = self.linears[number](values[-1])  # every parameter is used
            values.append(STEPS[step](self, number, value, values[number // 2]))
        return values[-1] + values[0]


def _norm(block: Random, number: int, x: Tensor, _: Tensor) -> Tensor:
    return block.norms[str(number)](x)


def _in_place(_: Random, __: int, x: Tensor, ___: Tensor) -> Tensor:
    y = x.sin()
    y.mul_(2).add_(0.5)
    return y.cos()


def _through_view(_: Random, __: int, x: Tensor, other: Tensor) -> Tensor:
    y = x.clone()
    y[:, :3].add_(other[:, 3:])
    return y.exp().clamp(max=3.0)


def _pieces(_: Random, __: int, x: Tensor, other: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=1)
    return torch.cat([right.relu(), left * other[:, :3]], dim=1)


def _chosen(_: Random, __: int, x: Tensor, ___: Tensor) -> Tensor:
    best, at = x.topk(2, dim=1)
    return x + torch.zeros_like(x).scatter(1, at, best.sigmoid())


def _reassigned(block: Random, _: int, x: Tensor, __: Tensor) -> Tensor:
    block.mean = 0.5 * block.mean + 0.5 * x.detach().mean(0)
    return x - block.mean


def _counted(block: Random, _: int, x: Tensor, __: Tensor) -> Tensor:
    block.count += 1
    block.calls.add_(1)
    return x * (1 + 1 / block.count)


def _without_gradient(_: Random, __: int, x: Tensor, other: Tensor) -> Tensor:
    with torch.no_grad():
        scale = other.abs().mean().add(1)
    return x / scale


def _derivative(_: Random, __: int, x: Tensor, ___: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(x.tanh().pow(2).sum(), x, create_graph=True)
    return x + found


def _branch(_: Random, __: int, x: Tensor, ___: Tensor) -> Tensor:
    return x.sin() if x.numel() > 3 and bool((x == x).all()) else x.cos()


STEPS: dict[str, Callable[[Random, int, Tensor, Tensor], Tensor]] = {
    "norm": _norm, "in place": _in_place, "through view": _through_view, "pieces": _pieces, "chosen": _chosen,
    "reassigned": _reassigned, "counted": _counted, "without gradient": _without_gradient, "derivative": _derivative,
    "branch": _branch, "dropout": lambda _b, _n, x, _o: nn.functional.dropout(x, 0.5),
    "softmax": lambda _b, _n, x, other: x.softmax(1) * other,
    "turned": lambda _b, _n, x, other: (x.t() @ other).t().reshape(6, 6)[: len(x)].contiguous() + x,
    "twice": lambda _b, _n, x, _o: x.relu() + x.relu(),
}  # fmt: skip
RULES = (
    "optional save first addmm in block", "optional save every 2nd addmm in block",
    "optional save sin, cos, exp in block", "optional save view in block where feeds backward",
    "optional save everything in block where feeds backward", "optional save last 3 everything in block",
    "optional save everything in block where is random", "optional save everything in block where is multi_output",
    "optional save everything in block where crosses block", "optional offload everything in block where crosses block",
    "optional offload sin, cos, exp, addmm in block", "optional offload everything in block where feeds backward",
    "optional offload last 3 everything in block up to 200 B per rank", "optional recompute addmm in block",
    "optional recompute topk in block",
)  # fmt: skip


GROUNDS = ["recompute everything in block", "save everything in block", "offload everything in block"]


def Model(programs: list[list[str]]) -> Layers:
    torch.manual_seed(0)
    return Layers(*(Random(steps) for steps in programs))


def plainly(model: nn.Module, number: int) -> Tensor:
    loss = model(torch.randn(5, 6, generator=torch.Generator().manual_seed(number))).sum()
    loss.backward()
    return loss


def forwards_first(model: nn.Module, number: int) -> Tensor:
    inputs = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(number))
    losses = [model(each).sum() for each in inputs]
    for loss in losses:
        loss.backward()
    return torch.stack(losses).sum()


@given(
    programs=st.lists(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4), min_size=1, max_size=2),
    ground=st.sampled_from(GROUNDS),
    rules=st.lists(st.sampled_from(RULES), max_size=3, unique=True),
    run=st.sampled_from([plainly, forwards_first]),
)
@settings(max_examples=examples(25, 60))
def test_random_blocks_train_on_the_same_bits(programs, ground, rules, run) -> None:
    # what writes, a counter or an assertion, is never recomputed; `optional` leaves it saved
    text = "\n".join(["blocks layers.*", f"optional {ground}", *rules])
    expected, model = Model(programs), policylang.checkpoint_model(Model(programs), policylang.parse(text), strict=True)
    reference = train(expected, run)
    for step in reference:
        assume(all(bool(gradient.isfinite().all()) for gradient in step.gradients.values()))
        assume(any(bool(gradient.any()) for gradient in step.gradients.values()))
    late = Late(len(text))
    with copied_over(late):
        found = train(model, run)
    assert differences(reference, found) == []
    assert (pool.in_use, late.pending) == (0, [])
    if not any({"reassigned", "derivative"}.intersection(steps) for steps in programs):
        assert not any(late.held)  # else a buffer, or a block that still runs, has the memory as well
    for one, other in zip(expected.layers, model.layers, strict=True):
        assert one.count == other.count
    assert all(torch.equal(one, other) for one, other in zip(expected.buffers(), model.buffers(), strict=True))
    report = policylang.report(model)
    assert report.audit.agrees


NARROWED = ("everything", "everything where crosses block", "sin, cos, exp, addmm", "view", "last 3 everything")


@given(
    programs=st.lists(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4), min_size=1, max_size=3),
    rules=st.lists(st.sampled_from(RULES), max_size=2, unique=True),
    narrowed=st.sampled_from(NARROWED),
    form=st.sampled_from(["bfloat16", "float8_e4m3fn per row"]),
    run=st.sampled_from([plainly, forwards_first]),
)
@settings(max_examples=examples(15, 1000))
def test_what_is_narrowed_is_asked_for_where_it_was(programs, rules, narrowed, form, run) -> None:
    """With a form that loses nothing in its place, whose bytes the audit notices, the bits are those without it."""
    where = narrowed.replace(" where", " in block where") if "where" in narrowed else f"{narrowed} in block"
    lines = ["blocks layers.*", "optional recompute everything in block", *rules, f"optional save {where} as {form}"]
    text = "\n".join(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moved_values, "narrowed", lambda value, _: (value.clone(),))
        patch.setattr(moved_values, "widened", lambda parts, _: parts[0].clone())
        patch.setattr(region, "raise_differences", lambda _: None)
        expected, model = (
            Model(programs),
            policylang.checkpoint_model(Model(programs), policylang.parse(text), strict=True),
        )
        reference = train(expected, run)
        for step in reference:
            assume(all(bool(gradient.isfinite().all()) for gradient in step.gradients.values()))
            assume(any(bool(gradient.any()) for gradient in step.gradients.values()))
        assert differences(reference, train(model, run)) == []


@pytest.mark.slow
@given(st.data())
@settings(max_examples=1500)
def test_many_random_blocks(data: st.DataObject) -> None:
    programs = data.draw(
        st.lists(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6), min_size=1, max_size=3)
    )
    rules = data.draw(st.lists(st.sampled_from(RULES), max_size=5, unique=True))
    ground = data.draw(st.sampled_from(GROUNDS))
    run = data.draw(st.sampled_from([plainly, forwards_first]))
    inner = test_random_blocks_train_on_the_same_bits.hypothesis.inner_test
    inner(programs, ground, rules, run)


# --- blocks that differentiate a part of themselves, alone and inside one another ---
Function = Callable[[Tensor], Tensor]
Around = Callable[[Function], Function]

POLICIES = {
    "recompute": "recompute everything",
    "save": "save everything",
    "some": "recompute everything\noptional save sin, exp\noptional save every 2nd mul",
}


def plain(function: Function) -> Function:
    return lambda x: checkpoint(function, x, use_reentrant=False)


def under(policy: str) -> Around:
    loaded = policylang.parse(f"policy p\n{policy}\n")

    def around(function: Function) -> Function:
        block = models.Function(function)
        contexts = policylang.context_fn(loaded, block, strict=True)
        return lambda x: checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    return around


def gradient(function: Function) -> Function:
    def differentiated(x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return found

    return differentiated


def scaled_by_its_slope(x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(x.sin().exp().sum(), x)
    return (x.sin() * slope).exp().sin()


def alone(around: Around) -> Function:
    return around(scaled_by_its_slope)


def inside_one_another(around: Around) -> Function:
    return gradient(around(gradient(around(scaled_by_its_slope))))


def differentiated_twice(around: Around) -> Function:
    return around(gradient(gradient(around(scaled_by_its_slope))))


def by_the_slope(energy: Tensor, x: Tensor) -> Function:
    def scaled(z: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return z.sin() * force

    return scaled


def of_the_outer_block(around: Around) -> Function:
    return around(lambda x: around(by_the_slope(x.exp().sin(), x))(x.cos()))


def of_the_outer_block_and_again(around: Around) -> Function:
    def outer(x: Tensor) -> Tensor:
        inner = by_the_slope(x.exp().sin(), x)
        return gradient(lambda y: around(inner)(y.cos()))(x)

    return around(outer)


def of_a_block_before(around: Around) -> Function:
    first = around(lambda x: x.exp().sin())
    return lambda x: around(by_the_slope(first(x), x))(x.cos())


SHAPES = [
    alone, inside_one_another, differentiated_twice, of_the_outer_block, of_the_outer_block_and_again,
    of_a_block_before,
]  # fmt: skip


READ_TWICE = {of_the_outer_block, of_the_outer_block_and_again}
"""One backward runs the outer block again twice, and what it saves is gone after the first time unless it is kept."""


def gradients(function: Function, again: bool = False) -> list[Tensor]:
    """The first call is observed, the others follow a plan."""
    found = []
    for number in range(3):
        x = torch.linspace(0.1, 1 + number, 5).requires_grad_()
        function(x).sum().backward(retain_graph=again)
        assert x.grad is not None
        found.append(x.grad)
    return found


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(("shape", "policy"), crossed(SHAPES, POLICIES))
def test_blocks_that_differentiate_inside_one_another(shape, policy, early_stop) -> None:
    with set_checkpoint_early_stop(early_stop):
        expected, found = (gradients(shape(each), shape in READ_TWICE) for each in (plain, under(POLICIES[policy])))
        assert all(map(torch.equal, found, expected))


def test_what_stands_in_for_an_unread_result_is_no_operator_of_the_block_around() -> None:
    def picks(x: Tensor) -> Tensor:
        _, places = torch.topk(x, 2)
        return x.gather(-1, places).sin()

    def twice(around: Around) -> Function:
        inner = around(picks)
        return around(lambda x: inner(x).cos())

    ours = under("save topk\noptional recompute sin")
    assert all(map(torch.equal, gradients(twice(ours)), gradients(twice(plain))))
