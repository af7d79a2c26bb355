"""Train a Llama that AutoParallel has sharded, with a policy in the place of what it saves and gathers again by itself.

    torchrun --nproc-per-node 2 examples/autoparallel_llama.py                # with examples/sac_fsdp.apl
    torchrun --nproc-per-node 2 examples/autoparallel_llama.py llama3_sac     # with a bundled policy
    torchrun --nproc-per-node 2 examples/autoparallel_llama.py none           # with AutoParallel's own decisions

Needs `autoparallel` (https://github.com/meta-pytorch/autoparallel). One GPU a rank and NCCL where there are as many
GPUs as ranks, gloo and the CPU otherwise. The model is that of sharded_llama.py, the batches those of fsdp2_eager.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp2_eager import BATCH, LENGTH, POLICY, VOCABULARY, batch_of, start
from sharded_llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import policylang

CONFIG = LlamaConfig(vocabulary=VOCABULARY, sequence=LENGTH, layers=2)


@contextmanager
def deciding(policy: str | None, mesh: DeviceMesh) -> Iterator[list[torch.fx.GraphModule]]:
    """Under it, a policy decides on the joint graph that AutoParallel has sharded, and it is split as the policy says.

    AutoParallel has no setting for either: it tags FSDP's gathers with one function of its own and hands the graph to
    torch's partitioner with another. Yields the graph, once it is there.
    """
    from autoparallel import api

    graphs: list[torch.fx.GraphModule] = []
    if policy is None:
        yield graphs
        return

    def apply(graph: torch.fx.Graph, _reshard_after_forward: bool) -> None:
        graphs.append(policylang.apply(graph.owning_module, policy, mesh))

    compile_joint = partial(api.aot_compile_joint_with_descriptors, partition_fn=policylang.partition)
    with (
        mock.patch.object(api, "mark_fsdp_all_gather_recomputation", apply),
        mock.patch.object(api, "aot_compile_joint_with_descriptors", compile_joint),
    ):
        yield graphs


def parallelize(mesh: DeviceMesh, policy: str | None) -> tuple[nn.Module, list[torch.fx.GraphModule]]:
    """The model with the sharding that AutoParallel finds best, without weights; and the graph that a policy was
    applied to."""
    from autoparallel.api import AutoParallel

    def inputs() -> Tensor:  # of all ranks together
        return torch.randint(VOCABULARY, (BATCH * mesh.size(), LENGTH), device=mesh.device_type)

    with torch.device("meta"):
        model = Llama(CONFIG)
    precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    with AutoParallel(model, inputs, mesh, precision) as planner, deciding(policy, mesh) as graphs:
        planner.add_parameter_memory_constraint(low=None, high=None)
        planner.add_input_constraints([(Shard(0),)])
        planner.add_output_constraints([(Shard(0),)])
        return planner.apply_placement(planner.optimize_placement(verbose=False)), graphs


def fill(parallel: nn.Module, device: str) -> None:
    """With the weights of the same model in one process."""
    torch.manual_seed(0)
    whole = dict(Llama(CONFIG).state_dict(keep_vars=True)) | dict(Llama(CONFIG).named_buffers())
    parallel.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in [*parallel.named_parameters(), *parallel.named_buffers()]:
            assert isinstance(tensor, DTensor)
            value = distribute_tensor(whole[name].to(device), tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(value.to_local())


def train(mesh: DeviceMesh, policy: str | None = POLICY, steps: int = 5) -> tuple[list[float], object]:
    """The losses of this rank, and the report of the policy."""
    model, graphs = parallelize(mesh, policy)
    fill(model, mesh.device_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        tokens = batch_of(step, mesh)
        logits = model(tokens)[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten()) / mesh.size()  # ranks add up their gradients
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() * mesh.size())
    return losses, policylang.report(graphs[0]) if graphs else None


def as_if_on_h100() -> None:
    """AutoParallel weighs shardings by what they cost on a GPU that it knows; a CPU is called one."""
    torch.cpu.get_device_name = torch.cuda.get_device_name = lambda *_: "NVIDIA H100"
    torch.cpu.get_device_capability = lambda *_: (9, 0)


def main() -> None:
    given = sys.argv[1] if len(sys.argv) > 1 else POLICY
    mesh = start()
    if mesh.device_type == "cpu":
        as_if_on_h100()
    losses, report = train(mesh, None if given == "none" else given)
    if dist.get_rank() == 0:
        print("\n".join(f"step {step}: loss {loss:.6f}" for step, loss in enumerate(losses)))
        if report is not None:
            print(f"\n{report}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
