"""Train under FSDP2 (`fully_shard`) with each block compiled: the compiler carries the policy out.

    torchrun --nproc-per-node 2 examples/fsdp2_compiled_blocks.py                    # with examples/sac_fsdp.apl
    torchrun --nproc-per-node 2 examples/fsdp2_compiled_blocks.py --inner inductor   # with generated code
    torchrun --nproc-per-node 2 examples/fsdp2_compiled_blocks.py none               # compiled, without a policy

`torch.compile` breaks the graph at the hooks in which `fully_shard` gathers a block's weights, so what it compiles of a
model is a block at a time, and does not know where in the model it lies. `checkpoint_model` says so. The model, its
sharding and its batches are those of fsdp2_eager.py.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from fsdp2_eager import POLICY, batch_of, make_model, shard, start
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaForCausalLM

import policylang


def compile_blocks(model: LlamaForCausalLM, policy: str | None, inner: str) -> None:
    """In place: names of modules and parameters stay what they are, and blocks share what is compiled of them."""
    if policy is None:
        backend = inner
    else:
        policylang.checkpoint_model(model, policy)  # says which modules are the blocks, and what they are called
        backend = policylang.backend(policy, inner=inner)
    for block in model.model.layers:
        block.compile(backend=backend)


def train(
    mesh: DeviceMesh, policy: str | None = POLICY, steps: int = 5, inner: str = "aot_eager"
) -> tuple[list[float], LlamaForCausalLM]:
    """The losses of this rank, and the model."""
    model = make_model().to(mesh.device_type)
    compile_blocks(model, policy, inner)
    shard(model, mesh)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", nargs="?", default=POLICY, help="a file, the name of a bundled policy, or none")
    parser.add_argument("--inner", default="aot_eager", help="what compiles the graphs: aot_eager or inductor")
    options = parser.parse_args()
    policy = None if options.policy == "none" else options.policy
    losses, model = train(start(), policy, inner=options.inner)
    if dist.get_rank() == 0:
        print("\n".join(f"step {step}: loss {loss:.6f}" for step, loss in enumerate(losses)))
        if policy is not None:
            print(f"\n{policylang.report(model)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
