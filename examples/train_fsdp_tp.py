"""Train a Llama on a mesh of FSDP and tensor parallelism under a policy: a start for your own script.

    torchrun --nproc-per-node 4 examples/train_fsdp_tp.py                  # dp 2 × tp 2, with examples/fsdp_tp.apl
    torchrun --nproc-per-node 4 examples/train_fsdp_tp.py --check          # and the loss curve of one process beside it
    torchrun --nproc-per-node 4 examples/train_fsdp_tp.py --how compile    # torch.compile in place of a traced step
    torchrun --nproc-per-node 4 examples/train_fsdp_tp.py --layout fsdp    # every weight cut over all ranks
    torchrun --nproc-per-node 4 examples/train_fsdp_tp.py --order fsdp_overlap  # gathers early, scatters awaited late

One GPU a rank and NCCL where there are as many GPUs as ranks, gloo and the CPU otherwise. Started without torchrun it
trains the same model in one process, without mesh and policy. The model and its sharding are in sharded_llama.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import field, frozen
from sharded_llama import Llama, LlamaConfig, make_mesh, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import policylang

POLICY = str(Path(__file__).with_name("fsdp_tp.apl"))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of the loss curve, relative: sums over ranks round in another order than sums in one process."""


@frozen
class Run:
    """What is trained, and how."""

    config: LlamaConfig = field(factory=LlamaConfig)
    policy: str | None = POLICY
    order: str | None = None
    """A bundled policy of when collectives run: ``fsdp_overlap``, or ``fsdp_tp_overlap``, which needs a device."""
    device: str | None = None
    """A device profile, for policies that decide by times."""
    how: str = "trace"
    layout: str = "tp"
    dtype: torch.dtype = torch.float32
    steps: int = 5
    batch: int = 8
    """Sequences in a step, over all ranks."""
    inner: str = "aot_eager"
    """What compiles the two graphs under ``--how compile``; ``inductor`` is torch.compile's own."""


# --- data and loss ---------------------------------------------------------------------------------------------------


def batch_of(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them: counting in steps of a few sizes. Put your data here."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(run.config.vocabulary, (run.batch, 1), generator=generator)
    stride = torch.randint(1, 4, (run.batch, 1), generator=generator)
    sequence = (start + stride * torch.arange(run.config.sequence + 1)) % run.config.vocabulary
    return sequence[:, :-1], sequence[:, 1:]


def share_of(batch: Tensor, mesh: DeviceMesh, layout: str) -> Tensor:
    """A rank's rows over ``dp``; of these, over ``tp``, its part of the sequence, or in the layout fsdp of the rows."""
    rows = batch.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]
    along = 1 if layout == "tp" else 0
    return rows.chunk(mesh["tp"].size(), dim=along)[mesh.get_local_rank("tp")].contiguous()


def loss_fn(run: Run) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """A rank's share of the loss: the sum over its tokens, divided by the number of all. Shares add up to the mean."""
    tokens = run.batch * run.config.sequence

    def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(inputs).flatten(0, 1).float()
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / tokens

    return loss


# --- the policy ------------------------------------------------------------------------------------------------------


def policy_of(run: Run) -> policylang.Policy:
    """The policy of a run, with the order of its collectives behind it."""
    assert run.policy is not None
    if run.order is None:
        return policylang.load(run.policy, device=run.device)
    own = f'"{Path(run.policy).resolve()}"' if Path(run.policy).exists() else f"<{run.policy}>"
    return policylang.parse(f"policy in_order\ninclude {own}\ninclude <{run.order}>", device=run.device)


# --- training --------------------------------------------------------------------------------------------------------

Step = Callable[[Tensor, Tensor], Tensor]
"""Runs forward and backward, leaves the gradients in ``.grad`` and returns the loss."""


def traced_step(
    run: Run, model: nn.Module, mesh: DeviceMesh, tokens: Tensor, labels: Tensor
) -> tuple[Step, Callable[[], object]]:
    """The step as one graph of forward, loss and backward, and its report."""
    traced = policylang.trace_step(model, loss_fn(run), tokens, labels)
    if run.policy is not None:
        traced.apply(policy_of(run), mesh)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss, gradients = traced(tokens, labels)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients.get(name)
        return loss

    return step, lambda: traced.report


def compiled_step(run: Run, model: nn.Module) -> tuple[Step, Callable[[], object]]:
    """The step with the model under torch.compile, and its report."""
    backend = run.inner if run.policy is None else policylang.backend(policy_of(run), inner=run.inner)
    compiled, loss_of = torch.compile(model, backend=backend, fullgraph=True), loss_fn(run)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(compiled, tokens, labels)
        loss.backward()
        return loss.detach()

    return step, lambda: policylang.report(compiled)


def train(run: Run, mesh: DeviceMesh) -> tuple[list[float], object]:
    """The loss curve, the same on every rank, and the report of the policy."""
    whole = new_model(run).to(mesh.device_type)
    model = shard(whole, mesh, tensor_parallel=run.layout == "tp", dtype=run.dtype)
    optimizer = new_optimizer(model)
    step, report = None, None
    losses = []
    for number in range(run.steps):
        tokens, labels = (share_of(each, mesh, run.layout).to(mesh.device_type) for each in batch_of(run, number))
        if step is None:
            traced = run.how == "trace"
            step, report = traced_step(run, model, mesh, tokens, labels) if traced else compiled_step(run, model)
        loss = step(tokens, labels)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses, report() if run.policy is not None and report is not None else None


def train_alone(run: Run, device: str = "cpu") -> list[float]:
    """The loss curve of one process, without mesh and policy."""
    model = new_model(run).to(device)
    optimizer, loss_of = new_optimizer(model), loss_fn(run)
    losses = []
    for number in range(run.steps):
        with torch.autocast(device, run.dtype, enabled=run.dtype != torch.float32):
            loss = loss_of(model, *(each.to(device) for each in batch_of(run, number)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def new_model(run: Run) -> Llama:
    """The same on every rank."""
    torch.manual_seed(0)
    return Llama(run.config)


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# --- the command line ------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    run = Run(
        config=LlamaConfig(layers=options.layers),
        policy=None if options.policy == "none" else options.policy,
        order=options.order,
        device=options.device,
        how=options.how,
        layout=options.layout,
        dtype=getattr(torch, options.dtype),
        steps=options.steps,
        inner=options.inner,
    )
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if world == 1:
        show(train_alone(run))
        return
    device = "cuda" if torch.cuda.device_count() >= world else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    tp = options.tp or (2 if world % 2 == 0 else 1)
    losses, report = train(run, make_mesh(device, world // tp, tp))
    if dist.get_rank() == 0:
        alone = train_alone(run, device) if options.check else None
        show(losses, alone)
        if report is not None:
            print(f"\n{report}")
        if alone is not None:
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=TOLERANCE[run.dtype], atol=0)
            print(f"\nthe curves agree within {TOLERANCE[run.dtype]:g}")
    dist.barrier()
    dist.destroy_process_group()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, help="ranks that are tensor-parallel to each other (default 2)")
    parser.add_argument("--policy", default=POLICY, help="a file, the name of a bundled policy, or none")
    parser.add_argument("--order", help="a bundled policy to include: fsdp_overlap, fsdp_tp_overlap")
    parser.add_argument("--device", help="a device profile, for policies that decide by times: h100-sxm, cpu or a file")
    parser.add_argument("--how", choices=["trace", "compile"], default="trace")
    parser.add_argument("--layout", choices=["tp", "fsdp"], default="tp")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the computation")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--inner", default="aot_eager", help="with --how compile: aot_eager or inductor")
    parser.add_argument("--check", action="store_true", help="compare with the loss curve of one process")
    return parser.parse_args(arguments)


def show(losses: Sequence[float], alone: Sequence[float] | None = None) -> None:
    for number, loss in enumerate(losses):
        beside = "" if alone is None else f", in one process {alone[number]:.6f}"
        print(f"step {number}: loss {loss:.6f}{beside}")


if __name__ == "__main__":
    main()
