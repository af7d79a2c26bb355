"""Train under FSDP2 (`fully_shard`) in eager, with a policy in the checkpoints of the blocks.

    torchrun --nproc-per-node 2 examples/fsdp2_eager.py                 # with examples/sac_fsdp.apl
    torchrun --nproc-per-node 2 examples/fsdp2_eager.py llama3_sac      # with a bundled policy
    torchrun --nproc-per-node 2 examples/fsdp2_eager.py none            # without any: the same losses, to the last bit

One GPU a rank and NCCL where there are as many GPUs as ranks, gloo and the CPU otherwise. `include <fsdp>` in the
policy is compared with `reshard_after_forward`: `fully_shard` gathers the weights itself, in forward and backward.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import policylang

POLICY = str(Path(__file__).with_name("sac_fsdp.apl"))
VOCABULARY, BATCH, LENGTH = 512, 2, 64


def make_model() -> LlamaForCausalLM:
    """The same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def shard(model: LlamaForCausalLM, mesh: DeviceMesh, reshard: bool | None = None) -> None:
    """Each block by itself, then what is left. By default all but the outermost weights are gathered again."""
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)


def batch_of(step: int, mesh: DeviceMesh) -> torch.Tensor:
    """Tokens that differ from step to step and from rank to rank: counting, from anywhere."""
    generator = torch.Generator().manual_seed(1000 * step + mesh.get_rank())
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    return ((start + torch.arange(LENGTH)) % VOCABULARY).to(mesh.device_type)


def train(
    mesh: DeviceMesh, policy: str | None = POLICY, steps: int = 5, reshard: bool | None = None
) -> tuple[list[float], LlamaForCausalLM]:
    """The losses of this rank, and the model."""
    model = make_model().to(mesh.device_type)
    if policy is not None:
        policylang.checkpoint_model(model, policy)  # before `fully_shard` or after it
    shard(model, mesh, reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        tokens = batch_of(step, mesh)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def start() -> DeviceMesh:
    """One dimension over all ranks that torchrun has started."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    device = "cuda" if torch.cuda.device_count() >= world else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return init_device_mesh(device, (world,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", nargs="?", default=POLICY, help="a file, the name of a bundled policy, or none")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    policy = None if options.policy == "none" else options.policy
    losses, model = train(start(), policy, options.steps)
    if dist.get_rank() == 0:
        print("\n".join(f"step {step}: loss {loss:.6f}" for step, loss in enumerate(losses)))
        if policy is not None:
            print(f"\n{policylang.report(model)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
