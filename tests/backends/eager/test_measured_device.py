"""What a step comes to on a device that counts, beside what is planned: peak, host memory, copies, exposed time.

Nothing is read off a plan to be measured: see :mod:`tests.support.device`.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import policylang
from policylang.api.planned_graphs import facts_of
from policylang.graph.facts import Facts, StepKind
from policylang.planning.capabilities import EAGER
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.simulation.memory import simulate
from policylang.simulation.node_times import node_times
from policylang.simulation.streams import walk
from tests.support.device import BACK, OUT, PROFILE, Device, Step
from tests.support.drawn import drawn

WIDTH, TOKENS = 32, 64
BARE = "bare"


class Block(nn.Module):
    """Runs a list of steps; each takes the last value and one made before. ``bare``: there is no residual."""

    def __init__(self, steps: tuple[str, ...]) -> None:
        super().__init__()
        self.bare, self.steps = BARE in steps, tuple(step for step in steps if step != BARE)
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in self.steps])

    def forward(self, x: Tensor) -> Tensor:
        if not self.steps:
            return x + 1  # its backward reads nothing
        values = [x]
        for number, step in enumerate(self.steps):
            values.append(STEPS[step](self.linears[number](values[-1]), values[number // 2]))
            values[: (number + 1) // 2] = values[-1:] * ((number + 1) // 2)  # a local variable holds what no graph says
        return values[-1] if self.bare else values[-1].tanh() + x


def _chunked(x: Tensor, other: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=1)
    return torch.cat([right.sigmoid(), left * other[:, : WIDTH // 2]], dim=1)


def _twice(x: Tensor, _: Tensor) -> Tensor:
    left, right = x.sigmoid(), x.tanh()
    del x  # no graph says what a local variable holds
    return left * right


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "norm": lambda x, _: functional.layer_norm(x, (WIDTH,)),
    "gelu": lambda x, _: functional.gelu(x),
    "sigmoid": lambda x, _: x.sigmoid(),
    "twice": _twice,
    "gated": lambda x, other: functional.silu(x) * other,
    "softmax": lambda x, _: x.softmax(1),
    "turned": lambda x, _: x.t().sigmoid().t(),
    "viewed": lambda x, _: x.view(TOKENS // 2, 2, WIDTH).sigmoid().view(TOKENS, WIDTH),
    "chunked": _chunked,
    "mixed": lambda x, _: (x @ x.t()).tanh() @ x,
    "attention": lambda x, other: functional.scaled_dot_product_attention(
        x[None, None], x[None, None], other[None, None]
    )[0, 0],
    "linear": lambda x, _: x,
    "residual": lambda x, other: x + other,
    "joined": lambda x, _: torch.cat([x.narrow(1, 3, WIDTH - 3).tanh(), x.narrow(1, 0, 3)], dim=1),
}


class Model(nn.Module):
    def __init__(self, programs: tuple[tuple[str, ...], ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Block(steps) for steps in programs])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        out = self.head(x)
        return (out * out).mean()


def batch() -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


@cache
def traced(programs: tuple[tuple[str, ...], ...]) -> Facts:
    given = batch()
    return facts_of(policylang.trace_step(Model(programs), lambda model: model(given)))[0]


def gradients(model: nn.Module) -> list[Tensor]:
    """Their bits: an infinite one is one, too."""
    return [each.grad.view(torch.int32) for each in model.parameters() if each.grad is not None]


def measured(programs: tuple[tuple[str, ...], ...], text: str) -> Step:
    """A later step of the model under the policy; its bits are those of one without."""
    plain, model = Model(programs), policylang.checkpoint_model(Model(programs), policylang.parse(text))
    given = batch()
    plain(given).backward()
    model(given).backward()
    model.zero_grad()
    device = Device()
    found = device.step(lambda: model(given).backward(), [*model.parameters(), given])
    assert len(gradients(model)) == len(gradients(plain))
    if " as " not in text:
        assert all(map(torch.equal, gradients(model), gradients(plain)))
    return found


def planned(programs: tuple[tuple[str, ...], ...], text: str) -> tuple[Plan, int]:
    made = plan(policylang.parse(text), traced(programs), EAGER)
    timeline = simulate(made.facts, made.schedule)
    return made, max(timeline.live) - timeline.resident


def compare(programs: tuple[tuple[str, ...], ...], text: str) -> None:
    made, peak = planned(programs, text)
    walked = walk(made.facts, made.schedule, node_times(made.facts, PROFILE))
    found = measured(programs, text)
    ways = {OUT: StepKind.COPY_TO_HOST, BACK: StepKind.COPY_FROM_HOST}
    copied = {
        way: [made.facts.bytes[row] for kind, row, _ in made.schedule if kind == asked] for way, asked in ways.items()
    }
    assert {way: [each.bytes for each in found.copies if each.way == way] for way in ways} == copied
    assert found.host == made.host_memory
    assert found.exposed == pytest.approx(walked.exposed, rel=0.15, abs=1e-6)
    assert peak == pytest.approx(found.peak, rel=0.02)


GROUNDS = ("recompute everything in block", "save everything in block", "offload everything in block")
RULES = (
    "optional offload everything in block where crosses block",
    "optional offload everything in block where crosses block outside last block",
    "optional save everything in block where crosses block", "optional offload (addmm, mm) in block",
    "optional offload (sigmoid, gelu) in block outside last 2 blocks",
    "optional offload everything in block where is multi_output",
    "optional offload addmm in block where feeds backward", "optional offload select in block",
    "optional offload (addmm, tanh) in block up to 40 KiB per rank", "optional save first addmm per block",
    "optional save every 2nd addmm per block", "optional recompute addmm in block",
    "optional recompute everything in every 2nd block",
)  # fmt: skip
NARROWED = (
    "optional save addmm in block as bfloat16",
    "optional save (sigmoid, gelu) in block as bfloat16",
    "optional save (addmm, tanh) in block as float8_e4m3fn per row",
    "optional save everything in block where crosses block as bfloat16",
)
LINES = ("", "optional prefetch offloaded 2 blocks ahead", "optional prefetch offloaded 3 blocks ahead")

random_step = st.sampled_from([*sorted(STEPS), BARE])
random_block = st.lists(random_step, max_size=4).map(tuple)


def _come_to_what_is_planned(data: st.DataObject, ground: str, most: int, narrowed: int = 0) -> None:
    programs = data.draw(st.lists(random_block, min_size=1, max_size=most).map(tuple))
    rules = data.draw(st.lists(st.sampled_from(RULES), max_size=most - 1, unique=True))
    rules += data.draw(st.lists(st.sampled_from(NARROWED), min_size=min(narrowed, 1), max_size=narrowed, unique=True))
    line = data.draw(st.sampled_from(LINES))
    compare(programs, "\n".join(["blocks layers.*", f"optional {ground}", *data.draw(st.permutations(rules)), line]))


@drawn(8, 300, st.data(), st.sampled_from(GROUNDS))
def test_random_blocks_come_to_what_is_planned(data: st.DataObject, ground: str) -> None:
    _come_to_what_is_planned(data, ground, 4)


@drawn(5, 100, st.data(), st.sampled_from(GROUNDS))
def test_random_blocks_with_narrower_values_come_to_what_is_planned(data: st.DataObject, ground: str) -> None:
    _come_to_what_is_planned(data, ground, 3, narrowed=2)


@pytest.mark.slow
@pytest.mark.parametrize("ground", GROUNDS)
@given(data=st.data())
@settings(max_examples=500)
def test_many_random_blocks_come_to_what_is_planned(ground: str, data: st.DataObject) -> None:
    _come_to_what_is_planned(data, ground, 6)
