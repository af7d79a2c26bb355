"""Steps whose collectives were joined and moved: real ranks, the same loss, bitwise the same gradients."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from functorch.compile import default_partition, make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import policylang
from policylang import TracedStep, trace_step
from policylang.audit.report import Report
from policylang.graph.collect import collect
from tests.distributed.test_setups import imported
from tests.support.compiled import backend_for, fresh_dynamo
from tests.support.models import llama
from tests.support.orders import in_hand_order
from tests.support.ranks import run_ranks
from tests.support.sharded import ALL_GATHER, REDUCE_SCATTER, WIDTH, Meshed, shard_parameters, sharded_stack
from tests.support.versions import needs_traced_meshes

RANKS = 2
"""A sum of two is the same in either order, so that buckets of scatters give the same bits."""
LAYERS = 3
KEEP = "undecided -> save"
AGAIN = "undecided -> save; must_recompute chain through all_gather where from parameter"
BUCKETS = "bucket (all_gather where from parameter) per block; bucket reduce_scatter per block"
AHEAD = f"{BUCKETS}; prefetch (all_gather where from parameter) 1 block ahead; delay reduce_scatter 1 block"
OVERLAP = f"{BUCKETS}; overlap collective up to 1 GiB in flight; device h100-sxm"
ORDERS = (
    "prefetch (all_gather where from parameter) 1 block ahead", "delay reduce_scatter 1 block",
    "overlap collective; device h100-sxm", BUCKETS, AHEAD, OVERLAP,
)  # fmt: skip


def loss(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


def count(gm: fx.GraphModule, *targets: Any) -> int:
    return sum(node.target in targets for node in gm.graph.nodes)


def assert_same(ours: Sequence[Any], theirs: Sequence[Any], what: str) -> None:
    for one, other in zip(ours, theirs, strict=True):
        local = [each.to_local() if isinstance(each, DTensor) else each for each in (one, other)]
        assert torch.equal(*local), what


def steps_alike(
    make: Callable[[], nn.Module], loss: Callable[..., Tensor], inputs: Sequence[Tensor], orders: Sequence[str]
) -> Iterator[tuple[str, str, TracedStep, TracedStep]]:
    """Rules, an order, and the steps with and without it, which have given the same bits."""
    for values in (KEEP, AGAIN):
        plain = trace_step(make(), loss, *inputs)
        plain.apply(policylang.parse(values))
        loss_value, gradients = plain(*inputs)
        for text in orders:
            step = trace_step(make(), loss, *inputs)
            step.apply(policylang.parse(f"{values}; {text}"))
            found, others = step(*inputs)
            assert_same([found, *others.values()], [loss_value, *gradients.values()], text)
            yield values, text, step, plain


def flat_steps(rank: int, orders: Sequence[str]) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    for values, text, step, plain in steps_alike(lambda: sharded_stack(RANKS, LAYERS, width=8), loss, [x], orders):
        assert [node.name for node in step.gm.graph.nodes] != [node.name for node in plain.gm.graph.nodes], text
        report = policylang.report(step.gm)
        assert report.audit.agrees
        (account,) = report.orders
        again = LAYERS if values == AGAIN else 0
        if "bucket" in text:
            assert count(step.gm, REDUCE_SCATTER) == LAYERS
            assert account.planned.collectives == count(step.gm, ALL_GATHER, REDUCE_SCATTER) <= 2 * LAYERS + again
        if "overlap" in text:
            assert account.planned.exposed < account.traced.exposed


def compiled(text: str, x: Tensor) -> tuple[list[Tensor], Report]:
    model = sharded_stack(RANKS, LAYERS, width=8)
    with fresh_dynamo():
        step = torch.compile(model, backend=backend_for(text))
        found = step(x).square().mean()
        found.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(each is not None for each in gradients)
        return [found.detach(), *gradients], policylang.report(step)  # type: ignore[list-item]


def compiled_steps(rank: int, orders: Sequence[str]) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    for values in (KEEP, AGAIN):
        plain, _ = compiled(values, x)
        for text in orders:
            found, report = compiled(f"{values}; {text}", x)
            assert_same(found, plain, text)
            assert [account.half for account in report.orders] == ["", "forward", "backward"]
            assert report.audit.agrees
            _, forward, backward = report.orders
            if "all_gather" in text or "overlap" in text:
                assert sum(line.moved for line in forward.lines)
            if "bucket" in text:
                assert forward.planned.collectives == LAYERS
                assert backward.planned.collectives <= 2 * LAYERS
            assert sum(line.moved for line in backward.lines) or "delay" not in text


def applied(text: str | None, x: Tensor) -> tuple[list[Any], list[fx.GraphModule]]:
    """The step that a trainer takes which cuts a graph itself, and applies an order to the halves."""
    halves: list[fx.GraphModule] = []

    def compile(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        if text is not None:
            policylang.apply(gm, policylang.parse(text))
        halves.append(gm)
        return make_boxed_func(gm.forward)

    model = sharded_stack(RANKS, LAYERS, width=8)
    with fresh_dynamo():
        backend = aot_autograd(fw_compiler=compile, bw_compiler=compile, partition_fn=default_partition)
        found = torch.compile(model, backend=backend)(x).square().mean()
        found.backward()
    return [found.detach(), *(parameter.grad for parameter in model.parameters())], halves


def halves_of_others(rank: int, orders: Sequence[str]) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    plain, (forward, backward) = applied(None, x)
    for text in orders:
        found, halves = applied(f"optional {'; optional '.join(text.split('; '))}; device h100-sxm", x)
        assert_same(found, plain, text)
        assert [node.name for node in halves[0].graph.nodes] != [node.name for node in forward.graph.nodes]
        assert [node.name for node in halves[1].graph.nodes] != [node.name for node in backward.graph.nodes]


def every(rank: int) -> None:
    flat_steps(rank, ORDERS)
    compiled_steps(rank, ORDERS)
    halves_of_others(rank, [AHEAD, "overlap collective"])


@pytest.mark.slow
def test_an_order_gives_the_same_bits() -> None:
    run_ranks(flat_steps, RANKS, [AHEAD])


@pytest.mark.slow
def test_every_order_gives_the_same_bits() -> None:
    run_ranks(every, RANKS, timeout=900.0)


def tuned_steps(rank: int) -> str:
    """The policy that is tuned for a step in three quarters of the memory that saving everything takes."""
    model, x = sharded_stack(RANKS, LAYERS, width=256), torch.randn(512, 256)
    plain, step = (trace_step(model, loss, x) for _ in range(2))
    facts = collect(step.gm)
    most = policylang.tune(facts, peak="1 TiB", device="h100-sxm", order=False).peak
    tuned = policylang.tune(facts, peak=3 * most // 4, device="h100-sxm")
    step.apply(policylang.parse(tuned.text))
    (loss_value, gradients), (found, others) = plain(x), step(x)
    assert_same([found, *others.values()], [loss_value, *gradients.values()], tuned.text)
    report = policylang.report(step.gm)
    assert report.audit.agrees
    (account,) = report.orders
    assert account.planned.exposed < account.traced.exposed
    return tuned.text


@pytest.mark.slow
def test_a_step_is_tuned_with_its_order_and_gives_the_same_bits() -> None:
    first, second = run_ranks(tuned_steps, RANKS)
    assert first == second
    assert "recompute " in first


def sharded_llama() -> nn.Module:
    torch.manual_seed(0)
    return shard_parameters(llama(layers=3).module, RANKS)


def llama_steps(rank: int) -> dict[str, tuple[int, int]]:
    """The gathers and scatters of each step."""
    example = llama(layers=3)

    def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
        return example.loss_fn(model(tokens))

    return {
        f"{values}; {text}": (count(step.gm, ALL_GATHER), count(step.gm, REDUCE_SCATTER))
        for values, text, step, _ in steps_alike(sharded_llama, next_token, example.inputs, ["", *ORDERS])
    }


@pytest.mark.slow
def test_a_llama_takes_the_same_step_in_every_order() -> None:
    first, second = run_ranks(llama_steps, RANKS, timeout=900.0)
    assert first == second
    for values in (KEEP, AGAIN):
        traced, bucketed = first[f"{values}; "], first[f"{values}; {BUCKETS}"]
        assert all(few < many for few, many in zip(bucketed, traced, strict=True))


PLAIN = "undecided -> save\n"
POLICY = f"{PLAIN}keep order of (all_gather or reduce_scatter)\n"
SCHEDULES = "prefetch all_gather 1 block ahead\ndelay reduce_scatter 1 block\n"
RECOMPUTES = "recompute everything\nkeep order of (all_gather or reduce_scatter)\n"


def stack() -> nn.Module:
    return sharded_stack(dist.get_world_size(), 3, width=16)


def meshed() -> nn.Module:
    return Meshed(init_device_mesh("cpu", (2,)), (0,), layers=3)


def trained(model: nn.Module, width: int, backend: Any, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    torch._dynamo.reset()
    run = model if backend is None else torch.compile(model, backend=backend, **options)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        loss = run(torch.randn(6, width)).square().mean()
        loss.backward()
        losses.append(loss.item())
    gradients = [parameter.grad for parameter in model.parameters()]
    return losses, [getattr(gradient, "_local_tensor", gradient) for gradient in gradients if gradient is not None]


def compared(rank: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, make, width in (("DTensors", stack, 16), ("gathers", meshed, WIDTH)):
        torch.manual_seed(0)
        plain = trained(make(), width, backend_for(PLAIN, "inductor"))
        eager = trained(make(), width, None)
        for text in (POLICY, RECOMPUTES):
            backend = in_hand_order(backend_for(text, "inductor"))
            losses, gradients = trained(make(), width, backend)
            report = policylang.report(backend)
            told[f"{name}, {text.split()[0]}"] = {
                "orders": [(each.status, each.starts, each.waits) for each in report.code],
                "beside": [len(each.kernels) for each in report.code],
                "like traced": losses == plain[0] and all(map(torch.equal, gradients, plain[1])),
                "like eager": all(
                    torch.allclose(*pair, rtol=1e-5, atol=1e-7) for pair in zip(gradients, eager[1], strict=True)
                ),
                "gradients": len(gradients),
            }
    return told


@pytest.mark.slow
def test_gradients_are_bitwise_those_of_the_traced_order() -> None:
    for told in run_ranks(compared, 2):
        assert len(told) == 4
        for name, case in told.items():
            assert case["like traced"], name
            assert case["like eager"], name
            assert case["gradients"] >= 3
            assert {status for status, *_ in case["orders"]} == {"as planned"}, name
            assert all(starts and starts == waits for _, starts, waits in case["orders"]), name
            assert min(case["beside"]) >= 1, name


LLAMA = f"""{PLAIN}
prefetch (all_gather where from parameter) 1 block ahead
delay reduce_scatter 1 block
"""


def scheduled(rank: int, policies: list[str]) -> dict[str, Any]:
    """The halves as a policy orders them, of a stack of DTensors and of a Llama under data and tensor parallelism."""
    told: dict[str, Any] = {}
    torch.manual_seed(0)
    plain = trained(stack(), 16, backend_for(PLAIN, "inductor"))
    backend = backend_for(f"{PLAIN}{SCHEDULES}", "inductor")
    losses, gradients = trained(stack(), 16, backend)
    told["stack"] = losses == plain[0] and all(map(torch.equal, gradients, plain[1])), read(backend)
    example = imported()
    mesh = example.make_mesh("cpu", 2, 2)
    run = example.Run(steps=2, config=example.LlamaConfig(layers=2), how="compile", inner="inductor")
    curves, reports = [], []
    for policy in policies:
        torch._dynamo.reset()
        curve, report = example.train(evolve(run, policy=policy), mesh)
        curves.append(curve)
        reports.append(report)
    told["llama"] = curves[0] == curves[1], [(each.status, len(each.kernels)) for each in reports[1].code]
    return told


def read(backend: Any) -> list[tuple[str, int]]:
    return [(each.status, len(each.kernels)) for each in policylang.report(backend).code]


@pytest.mark.slow
@needs_traced_meshes
def test_what_a_policy_schedules_is_what_inductor_runs_on_four_ranks(tmp_path: Path) -> None:
    files = [tmp_path / "plain.apl", tmp_path / "llama.apl"]
    for file, text in zip(files, (PLAIN, LLAMA), strict=True):
        file.write_text(text)
    for told in run_ranks(scheduled, 4, [str(file) for file in files], timeout=500):
        for name, (alike, halves) in told.items():
            assert alike, name
            assert {status for status, _ in halves} == {"as planned"}, name
            assert min(beside for _, beside in halves) >= 1, (name, halves)
