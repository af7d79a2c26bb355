"""Does a step on four ranks fall as far as the simulation of its order says?

A Llama of ``examples/sharded_llama.py``, every weight cut over four gloo ranks, its step traced and given one policy
after another. The step then runs with the times of a profile slept through (``benchmarks/slept_steps.py``): how long it
takes is measured and set beside what the simulation of the same profile says. Loss and gradients are those of the step
as traced, bit for bit, but for reductions that are bucketed.

    python -m benchmarks.schedule_on_ranks --json results.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn

import policylang
from benchmarks.common import table, write_results
from benchmarks.slept_steps import SleptGraph, simulated
from examples.sharded_llama import Llama, LlamaConfig, make_mesh, shard
from policylang.backends import runtime
from policylang.language.devices.profile import DeviceProfile, Network, Rate

RANKS = 4
CONFIG = LlamaConfig(layers=4)
SLOW = DeviceProfile(
    name="slow",
    compute={"float32": Rate.constant(0.1e9)},
    bandwidth=Rate.constant(1.6e9),
    pointwise=0.35,
    networks=(Network(bandwidth=4e6, latency=10e-3),),
)
"""On it the products of :data:`CONFIG` take about as long as the collectives, and both milliseconds each."""

_RESHARD = "blocks layers.*\ninclude <fsdp_reshard_always>\n"
POLICIES: Mapping[str, str] = {
    "as traced": _RESHARD,
    "prefetch": f"{_RESHARD}prefetch (all_gather where from parameter) 1 block ahead\n",
    "bucket + prefetch": (
        f"{_RESHARD}"
        "bucket (all_gather where from parameter) per block\n"
        "bucket reduce_scatter per block\n"
        "prefetch (all_gather where from parameter) 1 block ahead\n"
        "delay reduce_scatter 1 block\n"
    ),
    "overlap": f"{_RESHARD}overlap collective\n",
}
BY_HAND = "early starts, by hand"


def started_early(gm: fx.GraphModule, ahead: int = 4) -> fx.GraphModule:
    """The graph in an order that needs no policy: each collective that only reads inputs, with what it reads, stands
    before the ``ahead`` th such collective before it, and each wait of a scatter at the end."""
    graph = gm.graph
    lines = [line for node in graph.nodes if (line := _line_from_input(node)) is not None]
    for later, before in zip(lines[ahead:], lines, strict=False):
        for node in later:
            before[0].prepend(node)
    end = next(iter(reversed(graph.nodes)))
    for node in [each for each in graph.nodes if _waits_for_scatter(each)]:
        first = next((user for user in node.users if user is not end), None)
        if first is None:
            end.prepend(node)
    graph.lint()
    gm.recompile()
    return gm


def _line_from_input(node: fx.Node) -> list[fx.Node] | None:
    """What leads from one input to a gather, the gather included; None of anything else."""
    if "all_gather_into_tensor" not in str(node.target):
        return None
    line = [node]
    while True:
        reads = line[0].all_input_nodes
        if len(reads) != 1 or len(line[0].users) > 1:
            return None
        if reads[0].op == "placeholder":
            return line
        line.insert(0, reads[0])


def _waits_for_scatter(node: fx.Node) -> bool:
    return "wait_tensor" in str(node.target) and "reduce_scatter" in str(node.all_input_nodes[0].target)


# --- one rank --------------------------------------------------------------------------------------------------------


def on_rank(rank: int, policies: Mapping[str, str], repeats: int, config: LlamaConfig = CONFIG) -> list[dict[str, Any]]:
    """A row for each policy, with the seconds of this rank; the default group is there and has :data:`RANKS` ranks."""
    mesh = make_mesh("cpu", dist.get_world_size(), 1)
    torch.manual_seed(0)
    model = shard(Llama(config), mesh, tensor_parallel=False)
    tokens = torch.randint(config.vocabulary, (2, config.sequence), generator=torch.Generator().manual_seed(rank))
    first: tuple[Tensor, dict[str, Tensor]] | None = None
    rows = []
    for name, text in policies.items():
        step = policylang.trace_step(model, _loss, tokens, tokens)
        step.apply(policylang.parse(text), mesh, device=SLOW)
        if name == BY_HAND:
            step.gm = started_early(step.gm)
        result, seconds = _measured(step, tokens, repeats)
        first = first or result
        foreseen = simulated(step.gm, SLOW)
        rows.append(
            {
                "policy": name,
                "collectives": sum(
                    "_c10d" in str(node.target) and "wait" not in str(node.target) for node in step.gm.graph.nodes
                ),
                "simulated ms": 1e3 * foreseen.step,
                "exposed ms": 1e3 * foreseen.exposed,
                "measured ms": 1e3 * seconds,
                "bits": _compared(first, result),
            }
        )
    return rows


def _loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def _measured(step: Any, tokens: Tensor, repeats: int) -> tuple[tuple[Tensor, dict[str, Tensor]], float]:
    """What the step returns, and the median of its seconds. A first one is not counted."""
    slept = SleptGraph(step.gm, SLOW)
    taken: list[float] = []

    def run(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        dist.barrier()
        returned, seconds = slept.run(inputs)
        taken.append(seconds)
        return returned

    try:
        with patch.object(runtime, "run", run):
            for _ in range(1 + repeats):
                result = step(tokens, tokens)
    finally:
        slept.close()
    return result, statistics.median(taken[1:])


def _compared(first: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> str:
    """``equal``, or by how much gradients differ at most, of the largest of theirs."""
    pairs = [(first[0], other[0]), *((first[1][name], other[1][name]) for name in first[1])]
    local = [tuple(getattr(each, "_local_tensor", each) for each in pair) for pair in pairs]
    if all(torch.equal(one, two) for one, two in local):
        return "equal"
    apart = max(float((one - two).abs().max() / one.abs().max().clamp_min(1e-12)) for one, two in local)
    return f"{apart:.0e} apart"


# --- all ranks -------------------------------------------------------------------------------------------------------


def combined(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each policy: the slowest rank's seconds, beside those that were simulated."""
    rows = []
    for each in zip(*ranks, strict=True):
        row = dict(each[0])
        row["measured ms"] = max(rank["measured ms"] for rank in each)
        row["measured / simulated"] = row["measured ms"] / row["simulated ms"]
        row["bits"] = next((rank["bits"] for rank in each if rank["bits"] != "equal"), "equal")
        rows.append(row)
    before = rows[0]
    for row in rows:
        row["falls by, simulated"] = 1 - row["simulated ms"] / before["simulated ms"]
        row["falls by, measured"] = 1 - row["measured ms"] / before["measured ms"]
    return rows


def _process(rank: int, store: str, policies: Mapping[str, str], repeats: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.save(on_rank(rank, policies, repeats), f"{out}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=[*POLICIES, BY_HAND], default=list(POLICIES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    policies = {name: POLICIES.get(name, _RESHARD) for name in options.policies}
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rows"
        torch.multiprocessing.spawn(
            _process, (f"{folder}/store", policies, options.repeats, out), nprocs=RANKS, join=True
        )
        rows = combined([torch.load(f"{out}.{rank}") for rank in range(RANKS)])
    print(table(rows))
    write_results(options.json, {"ranks": RANKS, "rows": rows})


if __name__ == "__main__":
    main()
