"""`offload` in eager: what comes back is what went, and nothing on the device keeps what waits on the host."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

import policylang
from policylang.backends import copies
from policylang.backends.copies import HOST, HostPool, pool
from policylang.backends.eager.first_call import BlockMode
from policylang.errors import PolicyGraphError
from policylang.language.cancellation import collector_paused
from tests.support.late import Late, copied_over

CROSSING = "recompute everything in block\noffload everything in block where crosses block"
ALL = "offload everything in block"


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    yield
    gc.collect()
    assert pool.in_use == 0


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Turned(Plain):
    """Returns a view that is not contiguous, and takes one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.t().contiguous()).t() if x.shape[0] == 8 else super().forward(x).t()


class Nested(Plain):
    """Takes and returns a dictionary: a value, a view of the same memory, one broadcast, and a number."""

    def forward(self, given: Any) -> Any:
        x = given["x"] if isinstance(given, dict) else given
        extra = given["views"][0].sum() + given["views"][1].sum() if isinstance(given, dict) else 0
        made = super().forward(x) * 2 + extra
        return {"x": made, "views": [made[1:], made.mean().expand(3, 2)], "count": 3}


@dataclass
class State:
    x: Tensor
    views: list[Tensor]


class Stated(Nested):
    """Hands on a dataclass."""

    def forward(self, given: Any) -> State:
        made = super().forward(vars(given) if isinstance(given, State) else given)
        return State(made["x"], made["views"])


class FromFirst(Plain):
    """Reads what the first block has returned beside what the one before has."""

    def forward(self, x: Tensor, *, first: Tensor | None = None) -> Tensor:
        return super().forward(x if first is None else x * first.sigmoid())


class InPlace(Plain):
    """Writes to what it has made, and to a view of that, after others have read it."""

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(self.norm(x)).sin()
        kept = made.exp()
        made = made * 2
        made[:, :4].add_(1)
        return x + self.down(functional.relu(made * kept, inplace=True))


class Cast(Plain):
    """Casts what it takes twice, under an autocast of its own: autocast would cast a leaf once."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made = self.up(x) * self.up(x)
        return x + self.down(made.float())


class Derived(Plain):
    """Adds a derivative of a part of itself with respect to what it takes."""

    def forward(self, x: Tensor) -> Tensor:
        alias = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(torch.tanh(self.up(alias)).sum(), alias, create_graph=True)
        return x + found


class Model(nn.Module):
    def __init__(self, kind: type[Plain], count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([kind() for _ in range(count)])
        self.kind = kind

    def forward(self, x: Any) -> Tensor:
        first = None
        for layer in self.layers:
            x = layer(x, first=first) if self.kind is FromFirst else layer(x)
            first = x if first is None else first
        x = vars(x) if isinstance(x, State) else x
        return (x["x"] if isinstance(x, dict) else x).square().sum()


def pair(kind: type[Plain], policy: str, count: int = 4) -> tuple[nn.Module, nn.Module]:
    model = Model(kind, count)
    return copy.deepcopy(model), policylang.checkpoint_model(model, policylang.parse(policy), strict=True)


def batch(seed: int = 1) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, run: Callable[[nn.Module], None]) -> list[Tensor]:
    model.zero_grad()
    run(model)
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def same(plain: nn.Module, model: nn.Module, run: Callable[[nn.Module], None]) -> None:
    for seed in (None, 1, 2):  # the first call is observed, the others follow the plan
        late = Late(seed)
        expected = gradients(plain, run)
        with copied_over(late):
            found = gradients(model, run)
        assert late.out
        assert not late.pending
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def plainly(model: nn.Module) -> None:
    model(batch()).backward()


def with_gradient(model: nn.Module) -> None:
    model(batch().requires_grad_()).backward()


def twice_before_a_backward(model: nn.Module) -> None:
    losses = [model(batch(seed)) for seed in (1, 2, 3)]
    for loss in losses:
        loss.backward()


def last_first(model: nn.Module) -> None:
    losses = [model(batch(seed)) for seed in (1, 2)]
    for loss in reversed(losses):
        loss.backward()


def keeping_the_graph(model: nn.Module) -> None:
    loss = model(batch())
    loss.backward(retain_graph=True)
    loss.backward()


def in_parts(model: nn.Module) -> None:
    loss, weights = model(batch()), [*model.parameters()]
    for part in (weights[-2:], weights[:3], weights[3:-2]):
        found = torch.autograd.grad(loss, part, retain_graph=True)
        for weight, gradient in zip(part, found, strict=True):
            weight.grad = gradient


RUNS = (plainly, with_gradient, twice_before_a_backward, last_first, keeping_the_graph, in_parts)


@pytest.mark.parametrize("policy", [CROSSING, ALL], ids=["crossing", "all"])
@pytest.mark.parametrize("run", RUNS, ids=lambda each: each.__name__)
def test_the_bits_of_plain_training(policy: str, run: Callable[[nn.Module], None]) -> None:
    same(*pair(Plain, policy), run)


@pytest.mark.parametrize("policy", [CROSSING, ALL], ids=["crossing", "all"])
@pytest.mark.parametrize("kind", [Turned, Nested, FromFirst, InPlace, Cast, Derived])
def test_views_structures_and_shared_values_come_back(policy: str, kind: type[Plain]) -> None:
    same(*pair(kind, policy), plainly)


def test_what_a_dataclass_hands_on_crosses_blocks_and_stays_on_the_device() -> None:
    plain, model = pair(Stated, CROSSING)
    for _ in range(3):
        assert all(map(torch.equal, gradients(plain, plainly), gradients(model, plainly)))
    found = policylang.report(model)
    assert found.rules[0].matched > 0
    assert "values that blocks returned stayed on the device" in str(found)


@pytest.mark.parametrize(("policy", "copies"), [(CROSSING, 3), (ALL, 3 * 6 + 5)], ids=["crossing", "all"])
def test_nothing_on_the_device_keeps_what_waits_on_the_host(policy: str, copies: int) -> None:
    _, model = pair(Plain, policy)
    for _ in range(3):
        late = Late()
        with copied_over(late):
            plainly(model)
        assert (late.out, late.back) == (copies, copies)
        assert not any(late.held)


def test_a_value_that_several_blocks_read_is_moved_once() -> None:
    plain, model = pair(FromFirst, CROSSING)
    late = Late()
    with copied_over(late):
        found = gradients(model, plainly)
    assert late.out == 3
    assert all(map(torch.equal, found, gradients(plain, plainly)))


def test_at_most_two_copies_are_under_way() -> None:
    _, model = pair(Plain, ALL)
    late = Late()
    with copied_over(late):
        loss = model(batch())
        assert len(late.pending) == 2
        loss.backward()
    assert not late.pending


SOME = "recompute everything in block\noffload addmm outside last 2 blocks"
"""Blocks that hold nothing on the host count among the blocks ahead."""


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (CROSSING, [2, 3, 4, 4, 4]),
        (f"{CROSSING}\nprefetch offloaded 2 blocks ahead", [3, 4, 4, 4, 4]),
        (SOME, [0, 1, 2, 3, 3]),
    ],
)
def test_copies_back_start_one_block_ahead_or_as_many_as_a_line_says(policy: str, expected: list[int]) -> None:
    _, model = pair(Plain, policy, count=5)
    late, started = Late(), list[int]()
    for layer in model.layers:
        layer.norm.register_forward_pre_hook(lambda *_: started.append(late.back))
    for _ in range(2):
        with copied_over(late):
            loss = model(batch())
            started.clear()
            late.back = 0
            loss.backward()
        assert started == expected


def test_a_forward_without_a_backward_leaves_nothing() -> None:
    _, model = pair(Plain, ALL)
    for _ in range(2):
        loss = model(batch())
        assert pool.in_use
        del loss
        assert not pool.in_use


def test_an_error_in_a_block_leaves_nothing() -> None:
    _, model = pair(Plain, ALL)
    plainly(model)
    handle = model.layers[2].up.register_forward_hook(lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(batch())
        gc.collect()
        assert not pool.in_use
    handle.remove()
    plainly(model)


def test_a_value_that_is_written_to_while_it_is_copied_is_named() -> None:
    _, model = pair(Plain, CROSSING, count=2)
    with copied_over(Late()):
        between = model.layers[0](batch())
        loss = model.layers[1](between).sum()
        between.data.add_(0)  # autograd does not count it: nor does the copy
        loss.backward()
        between = model.layers[0](batch())
        loss = model.layers[1](between).sum()
        with torch.no_grad():
            between.add_(1)
        with pytest.raises(PolicyGraphError, match="was written to in place"):
            loss.backward()


def test_a_budget_holds_over_all_blocks() -> None:
    size = 6 * 8 * 4
    _, model = pair(
        Plain,
        f"recompute everything in block\noffload everything in block where crosses block up to {2 * size} B per rank",
    )
    plainly(model)
    report = policylang.report(model)
    assert report.offloaded.bytes == 2 * size
    assert any("the budget is full" in each for each in report.warnings)


def test_a_checkpoint_of_the_users_own() -> None:
    plain = Model(Plain)
    model = copy.deepcopy(plain)
    contexts = policylang.context_fn(policylang.parse(ALL), model)

    def run(which: nn.Module) -> None:
        x = batch()
        for layer in which.layers:
            x = layer(x) if which is plain else checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        x.square().sum().backward()

    same(plain, model, run)


def test_double_backward() -> None:
    plain, model = pair(Plain, ALL)

    def run(which: nn.Module) -> None:
        x = batch().requires_grad_()
        (slope,) = torch.autograd.grad(which(x), x, create_graph=True)
        slope.square().sum().backward()

    same(plain, model, run)


def test_the_pool_is_reused_and_bounded() -> None:
    own = HostPool()
    one = own.take(1000, HOST)
    assert (own.in_use, own.held, own.most) == (1024, 1024, 1024)
    address = one.data_ptr()
    view = one[5:]
    del one
    assert own.in_use == 1024
    del view
    assert (own.in_use, own.held) == (0, 1024)
    one = own.take(600, HOST)
    assert one.data_ptr() == address
    other = own.take(5000, HOST)
    assert (own.in_use, own.held, own.most) == (9216, 9216, 9216)
    del one, other
    large = own.take(8193, HOST)  # what is free makes room
    assert (own.in_use, own.held, own.most) == (16384, 16384, 16384)
    del large
    own.give_back()
    assert own.held == 0


def test_reports_say_what_was_copied_and_what_stayed() -> None:
    _, model = pair(Plain, CROSSING)
    out, back = pool.out, pool.back
    plainly(model)
    report, size = policylang.report(model), 6 * 8 * 4
    assert (pool.out - out, pool.back - back) == (3 * size, 3 * size)
    scalars = report.scalars("")
    assert scalars["copied_out_bytes"] == pool.out
    assert scalars["copied_back_bytes"] == pool.back
    assert scalars["host_pool_bytes"] == pool.most >= 3 * 256
    assert "back so far, through a pool of" in str(report)
    assert not any("stayed on the device" in each for each in report.notes)


@pytest.mark.parametrize("action", ["save", "offload"])
def test_what_crosses_blocks_counts_for_its_line_and_for_the_block_that_returns_it(action: str) -> None:
    text = f"recompute everything in block\n{action} everything in block where crosses block"
    _, model = pair(Plain, text + "\nexpect saved per block <= 200 B")
    plainly(model)
    report, size = policylang.report(model), 6 * 8 * 4
    assert report.rules[1].decided == 4
    moved = report.offloaded.bytes if report.offloaded else 0
    assert (report.rules[1].saved_bytes, moved) == ((3 * size, 0) if action == "save" else (0, 3 * size))
    assert report.saved.bytes == report.rules[1].saved_bytes
    assert report.audit.agrees
    _, model = pair(Plain, f"save everything in block where crosses block\nexpect saved per block <= {size - 1} B")
    with pytest.raises(policylang.PolicyMatchError, match="saved per block"):
        plainly(model)


def test_what_no_checkpoint_takes_is_said() -> None:
    _, model = pair(Plain, CROSSING)
    x = batch()
    for layer in model.layers:
        x = layer(x.clone())  # another value: what the block returned dies here
    x.sum().backward()
    del x
    found = policylang.report(model).notes
    assert any("3 values that blocks returned stayed on the device" in each for each in found)


@pytest.mark.parametrize("ending", ["the model goes first", "the loss goes first", "the policy is removed"])
def test_the_pool_is_given_back_with_the_model(ending: str) -> None:
    _, model = pair(Plain, ALL)
    _, other = pair(Plain, CROSSING)
    kept, loss = other(batch()), model(batch())
    assert pool.held
    if ending == "the policy is removed":
        loss.backward()
        policylang.checkpoint_model(model, None)
    elif ending == "the loss goes first":
        del loss, model
    else:
        del model, loss
    gc.collect()
    assert pool.held == pool.in_use > 0, "what the other model holds"
    kept.backward()


def test_modes_of_threads_that_overlap_leave_no_note_behind() -> None:
    """Compiled code would be compiled anew at each call."""
    first, second = BlockMode(), BlockMode()
    with ThreadPoolExecutor(1) as other:
        other.submit(first.__enter__).result()
        second.__enter__()
        other.submit(first.__exit__, None, None, None).result()
        second.__exit__(None, None, None)
    assert not any(value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_"))


def test_threads_take_steps_of_models_of_their_own() -> None:
    pairs = [pair(Plain, ALL) for _ in range(4)]
    for plain, _ in pairs:
        plainly(plain)
    with collector_paused(), ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            for _, model in pairs:
                model.zero_grad()
            list(threads.map(lambda both: plainly(both[1]), pairs))
    for plain, model in pairs:
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
    assert pool.in_use == 0


def test_a_step_that_is_captured_is_refused_by_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair(Plain, ALL)
    plainly(model)
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    with pytest.raises(policylang.PolicyMeaningError, match=r"APL338.*no CUDA graph captures"):
        model(batch())
    _, model = pair(Plain, "save everything")
    plainly(model)


class Accelerator:
    """What torch says of one: a current device, a current stream of each, and what streams wait for."""

    def __init__(self) -> None:
        self.device, self.made = 0, 0
        self.streams: dict[int, FakeStream] = {}
        self.streams.update({at: FakeStream(self, torch.device("meta", at)) for at in range(2)})

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.streams[device.index]

    def set_stream(self, stream: FakeStream) -> None:
        self.device = stream.device.index
        self.streams[self.device] = stream

    @contextmanager
    def device_index(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        yield
        self.device = before


class FakeStream:
    def __init__(self, of: Accelerator, device: torch.device) -> None:
        self.device, self.waits_for = device, list[Any]()

    def wait_stream(self, other: FakeStream) -> None:
        self.waits_for.append(other)

    def wait_event(self, event: FakeStream) -> None:
        self.waits_for.append(event)

    def record_event(self) -> FakeStream:
        return self


def test_a_copy_leaves_device_and_stream_as_they_were_and_is_awaited_by_what_computed(monkeypatch) -> None:
    accelerator = Accelerator()
    for name in ("current_stream", "set_stream", "device_index"):
        monkeypatch.setattr(torch.accelerator, name, getattr(accelerator, name))
    monkeypatch.setattr(torch, "Stream", lambda device: FakeStream(accelerator, device))
    computing, second = accelerator.streams[1], torch.device("meta", 1)
    link = copies._on_own_stream(second)
    wait = link(torch.empty(2, device=second), torch.empty(2, device=second))
    assert accelerator.device == 0
    assert accelerator.streams[1] is computing
    assert wait is not None
    accelerator.streams[1] = elsewhere = FakeStream(accelerator, second)  # another thread's
    wait()
    (copied,) = computing.waits_for
    assert elsewhere.waits_for == [copied]
    assert copied.waits_for == [computing]
