"""Scheduling lines in eager with ``fully_shard``: what is gathered when, on real ranks, and the bits of the same steps
without them."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import policylang
from tests.support.eager import differences, train
from tests.support.ranks import run_ranks

WEIGHTS = "all_gather where from parameter"
AHEAD = f"prefetch ({WEIGHTS}) 1 block ahead"
EVENTS: list[tuple[str, int]] = []


class _Noted(torch.autograd.Function):
    """Notes when a block computes, forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, number: int) -> Tensor:
        ctx.number = number
        EVENTS.append(("forward", number))
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        EVENTS.append(("backward", ctx.number))
        return gradient, None


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up = nn.Linear(8, 16 + 8 * number)  # each block gathers another size
        self.down = nn.Linear(16 + 8 * number, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = _Noted.apply(self.up(hidden), self.number)
        return hidden + self.down(torch.relu(inner))


class Model(nn.Module):
    def __init__(self, order: Sequence[int] = range(4)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block(number) for number in range(4))
        self.head = nn.Linear(8, 1)
        self.order = tuple(order)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.embed(hidden)
        for number in self.order:
            hidden = self.layers[number](hidden)
        return self.head(hidden)


@contextmanager
def noted() -> Iterator[list[tuple[str, int]]]:
    """What is gathered and computed within, in order; of gathers, those of blocks."""
    sizes = {sum(each.numel() for each in Block(number).parameters()): number for number in range(4)}
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13
    gather = getattr(dist, name)

    def note(output: Tensor, *rest: Any, **options: Any) -> Any:
        if output.numel() in sizes:
            EVENTS.append(("gather", sizes[output.numel()]))
        return gather(output, *rest, **options)

    EVENTS.clear()
    setattr(dist, name, note)
    try:
        yield EVENTS
    finally:
        setattr(dist, name, gather)


def shard(model: Model, mesh: DeviceMesh, **options: Any) -> Model:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


def under(model: nn.Module, text: str) -> nn.Module:
    return policylang.checkpoint_model(model, policylang.parse(text))


def run(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step + 10 * dist.get_rank())
    loss = model(torch.randn(3, 8, generator=generator)).square().mean()
    loss.backward()
    return loss


def order_of(model: nn.Module, steps: int = 2) -> list[str]:
    """The events of the last step, shortly: `g1` gathers block 1, `f0` computes it, `b0` its backward."""
    with noted() as events:
        for step in range(steps):
            events.clear()
            run(model, step)
        return [f"{what[0]}{number}" for what, number in events]


def refused(text: str, model: nn.Module, code: str, *said: str, runs: bool = False) -> None:
    def act() -> None:
        under(model, text)
        if runs:
            run(model, 0)

    with pytest.raises(policylang.PolicyMatchError) as found:
        act()
    message = str(found.value)
    assert code in message, message
    for each in said:
        assert each in message, message


def check_order(mesh: DeviceMesh) -> None:
    plain = order_of(shard(Model(), mesh))
    assert plain[:8] == ["g0", "f0", "g1", "f1", "g2", "f2", "g3", "f3"]
    ways: list[Callable[[str], nn.Module]] = [
        lambda text: under(shard(Model(), mesh), text),
        lambda text: shard(under(Model(), text), mesh),
    ]
    for way in ways:
        assert order_of(way(AHEAD))[:8] == ["g0", "g1", "f0", "g2", "f1", "g3", "f2", "f3"]
        two = order_of(way(f"prefetch ({WEIGHTS}) 2 blocks ahead"))
        assert two[:8] == ["g0", "g1", "g2", "f0", "g3", "f1", "f2", "f3"]
        assert [each for each in two[8:] if each[0] in "gb"] == ["g3", "g2", "g1", "b3", "g0", "b2", "b1", "b0"]
    some = order_of(under(shard(Model(), mesh), f"prefetch ({WEIGHTS} in last 2 blocks) 1 block ahead"))
    assert some[:8] == ["g0", "f0", "g1", "g2", "f1", "g3", "f2", "f3"]
    turned = under(shard(Model(order=(2, 0, 1, 3)), mesh), AHEAD)
    assert order_of(turned)[:8] == ["g2", "g0", "f2", "g1", "f0", "g3", "f1", "f3"], "as the blocks run"
    twice = under(under(shard(Model(), mesh), f"prefetch ({WEIGHTS}) 3 blocks ahead"), "recompute everything in block")
    assert order_of(twice)[:8] == plain[:8], "a second policy replaces the first"


def check_bits(mesh: DeviceMesh) -> None:
    expected = train(shard(Model(), mesh), run)
    two = f"prefetch ({WEIGHTS}) 2 blocks ahead"
    for text in (two, f"recompute everything in block; {two}", f"save first matmul per block; {AHEAD}"):
        for make in (lambda t: under(shard(Model(), mesh), t), lambda t: shard(under(Model(), t), mesh)):
            assert differences(expected, train(make(text), run)) == [], text
    kept = train(shard(Model(), mesh, reshard_after_forward=False), run)
    assert differences(kept, train(under(shard(Model(), mesh, reshard_after_forward=False), AHEAD), run)) == []


def check_report(mesh: DeviceMesh) -> None:
    left = f"optional bucket ({WEIGHTS}) per block; optional delay reduce_scatter 1 block"
    model = under(shard(Model(), mesh), f"{AHEAD}; {left}")
    assert not any("forward" in layer.__dict__ for layer in model.layers), "no checkpoint where nothing is decided"
    run(model, 0)
    report = policylang.report(model)
    (order,) = report.by_fsdp
    assert [each.said for each in order.lines] == [
        "left: an eager checkpoint has no order of collectives",
        "`fully_shard` gathers the weights of 4 blocks 1 block ahead",
        "left: an eager checkpoint has no order of collectives",
    ]
    assert "prefetch (all_gather where from parameter) 1 block ahead: `fully_shard` gathers" in str(report)
    assert "FSDP gathers as it was set" in str(report)
    assert report.to_dict()["by_fsdp"][0]["lines"][1]["text"] == AHEAD
    model.layers[1].set_modules_to_forward_prefetch([])
    audit = policylang.report(model).audit
    assert not audit.agrees
    assert (
        "`layers.1` was set to gather `layers.2` ahead in the forward, and is now set to gather nothing"
        in audit.differences[0]
    )
    (unsettled,) = policylang.report(under(Model(), AHEAD)).by_fsdp
    assert "is not set up: no forward" in unsettled.lines[0].said
    both = under(shard(Model(), mesh), f"save first matmul per block; {AHEAD}")
    run(both, 0)
    report = policylang.report(both)
    assert report.forward_nodes
    assert report.by_fsdp[0].lines[0].said.endswith("1 block ahead")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        under(shard(Model(), mesh), f"{AHEAD}; expect exposed <= 5%")
    assert ["APL391" in str(each.message) for each in found] == [True]


def check_refusals(mesh: DeviceMesh) -> None:
    for line in (
        "delay reduce_scatter 1 block",
        "keep order of collective",
        f"bucket ({WEIGHTS}) per block",
        f"bucket ({WEIGHTS}) per 2 blocks",
        f"bucket ({WEIGHTS}) per block up to 3 MiB",
        "bucket all_gather up to 3 MiB",
    ):
        refused(line, shard(Model(), mesh), "APL306", line)
    refused(AHEAD, Model(), "APL387", "has sharded none of the blocks", runs=True)
    alone = Model()
    for layer in alone.layers:
        fully_shard(layer, mesh=mesh)
    refused(AHEAD, alone, "APL387", "but not the model around the blocks", runs=True)
    whole = fully_shard(Model(), mesh=mesh)
    refused(AHEAD, whole, "APL388", "`Model` gathers more than one block at once")
    inside = Model()
    for layer in inside.layers:
        fully_shard(layer.up, mesh=mesh)
    shard(inside, mesh)
    assert order_of(under(inside, AHEAD))
    refused("prefetch (all_gather where bytes > 1 GiB) 1 block ahead", shard(Model(), mesh), "APL389", "no weight")
    refused(f"prefetch ({WEIGHTS} in layers.*.up) 1 block ahead", shard(Model(), mesh), "APL389", "a part of")
    refused(f"prefetch ({WEIGHTS} and time > 3 us) 1 block ahead", shard(Model(), mesh), "APL389")
    refused(AHEAD, DistributedDataParallel(Model()), "APL387", "`DistributedDataParallel` cannot")
    first = Model()
    first.layers[0] = FullyShardedDataParallel(first.layers[0], device_id=torch.device("cpu"))
    refused(AHEAD, first, "APL387", "`FullyShardedDataParallel` cannot")
    with pytest.raises(policylang.PolicyMatchError, match=r"made for the block \(Block\) alone"):
        policylang.context_fn(policylang.parse(AHEAD), Model().layers[0])
    under(shard(Model(), mesh), f"optional prefetch ({WEIGHTS} in layers.*.up) 1 block ahead")
    run(under(Model(), f"optional {AHEAD}"), 0)


def check_ranks(rank: int, mesh: DeviceMesh) -> None:
    for other in (f"prefetch ({WEIGHTS}) 2 blocks ahead", "recompute everything in block"):
        model = under(shard(Model(), mesh), other if rank else AHEAD)
        with pytest.raises(policylang.PolicyDivergenceError, match="ranks 0 and 1 have different"):
            run(model, 0)


def everything(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    check_order(mesh)
    check_bits(mesh)
    check_report(mesh)
    check_refusals(mesh)
    check_ranks(rank, mesh)


def test_what_a_policy_orders_fsdp_gathers() -> None:
    run_ranks(everything, 2)
