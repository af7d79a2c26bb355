"""How many gathers does a step of LLaMA-3 8B have on 128 ranks, before and after fusion, and what does each rank hold?

The model, its mesh (dp 16 × tp 8) and its sharding are those of ``examples/sharded_llama.py``, in the two layouts of
``examples/train_fsdp_tp.py``. One process plays rank 0 of a fake process group; the tensors are fake, so nothing is
allocated. The step is traced once a layout, and each policy gets a fresh copy of the graph. Two peaks stand beside each
other: policylang's estimate, and the graph run on fake tensors under PyTorch's ``MemTracker``.

    python -m benchmarks.llama3_8b_128_ranks --json benchmarks/results/llama3_8b_128_ranks.json
    python -m benchmarks.llama3_8b_128_ranks --layers 2          # seconds
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

import policylang
from benchmarks.common import seconds, table, write_results
from benchmarks.flat_graph import FlatGraph, peak_of_graph
from examples.sharded_llama import LLAMA3_8B, Llama, LlamaConfig, make_mesh, shard
from policylang.backends.applied_plans import AppliedPlan
from policylang.backends.flat import FlatPath
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Phase
from policylang.language.syntax import Policy
from policylang.planning.capabilities import FLAT
from policylang.planning.edits.proof import Prover
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.schedule import build_schedule
from policylang.simulation.memory import estimate_peak

DP, TP = 16, 8
GIB = 2**30
RESHARD = "include <fsdp_reshard_always>\n"
GATHERS = RESHARD + "fuse all_gather chains\n"
BOTH = GATHERS + "fuse reduce_scatter chains\n"
POLICIES = {
    "reshard": RESHARD,
    "reshard, gathers fused": GATHERS,
    "reshard, gathers and scatters fused": BOTH,
    "examples/fsdp_tp.apl": (Path(__file__).parents[1] / "examples" / "fsdp_tp.apl").read_text(),
}
LAYOUTS = {
    "tp": "tensor-parallel blocks",
    "fsdp": "every weight cut over all ranks",
}


@frozen(eq=False)
class Step:
    """A traced training step of one rank."""

    gm: fx.GraphModule
    seconds: float
    """Wall time of making the model and tracing it."""

    def fresh(self) -> fx.GraphModule:
        return FlatGraph(self.gm, {}).fresh()


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """One process that believes it is rank 0 of many: collectives return at once, with whatever is in memory."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trace(config: LlamaConfig, layout: str, device: str, dp: int = DP, tp: int = TP) -> Step:
    """One sequence for each of the ``dp`` replicas, or in the layout ``fsdp`` for each rank; bfloat16."""
    sequences = dp if layout == "tp" else dp * tp
    length = config.sequence // tp if layout == "tp" else config.sequence

    def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens).flatten(0, 1).float()
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / (sequences * config.sequence)

    start = time.perf_counter()
    mesh = make_mesh(device, dp, tp)
    with FakeTensorMode(), torch.device(device):
        model = shard(Llama(config), mesh, tensor_parallel=layout == "tp", dtype=torch.bfloat16)
        tokens = torch.zeros(1, length, dtype=torch.int64)
    gm = policylang.trace_step(model, loss, tokens, tokens).gm
    return Step(gm, time.perf_counter() - start)


# --- what is counted -------------------------------------------------------------------------------------------------


def counts(facts: Facts) -> dict[str, int]:
    """Gathers of the forward, also by the size of their group, of the backward, and scatters."""
    gathers = [row for row, target in enumerate(facts.targets) if "all_gather_into_tensor" in target]
    forward = [row for row in gathers if facts.phases[row] == Phase.FORWARD]
    by_size = Counter(facts.groups[facts.group_names[row]].size for row in forward)
    return {
        "forward gathers": len(forward),
        **{f"forward gathers over {size}": by_size[size] for size in sorted(by_size)},
        "backward gathers": len(gathers) - len(forward),
        "reduce-scatters": sum("reduce_scatter_tensor" in target for target in facts.targets),
    }


def measured(gm: fx.GraphModule) -> dict[str, Any]:
    facts = collect(gm)
    peak = estimate_peak(facts, build_schedule(facts, ()))
    return {
        "nodes": len(facts),
        **counts(facts),
        "peak GiB, forward": peak.forward / GIB,
        "backward": peak.backward / GIB,
        "MemTracker": (peak_of_graph(gm) + _inputs(facts)) / GIB,
    }


def _inputs(facts: Facts) -> int:
    """MemTracker sees what is allocated while it watches; parameters and the batch were there before."""
    return sum(size for op, size in zip(facts.ops, facts.bytes, strict=True) if op == "placeholder")


def refusals(outcome: AppliedPlan) -> dict[str, int]:
    """How many chains were left as they are, by reason."""
    found = Counter(refused.reason for refused in outcome.plan.edits.refused)
    return dict(sorted(found.items()))


def times(step: Step, policy: Policy, outcome: AppliedPlan) -> dict[str, float]:
    """Each stage's share of the time of tracing. Rewrites, and among them proofs, are part of the plan."""
    facts = collect(step.gm)
    with proofs_timed() as proofs:
        rewrites = seconds(lambda: plan_edits(policy, facts, FLAT))
    stages = {**outcome.seconds, "rewrites of the plan": rewrites, "proofs of these": sum(proofs)}
    return {stage: taken / step.seconds for stage, taken in stages.items()}


@contextmanager
def proofs_timed() -> Iterator[list[float]]:
    """Under it, each proof adds its wall seconds to the list."""
    found: list[float] = []
    prove = Prover.prove

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return prove(*args, **kwargs)
        finally:
            found.append(time.perf_counter() - start)

    with patch.object(Prover, "prove", timed):
        yield found


def measure(config: LlamaConfig, layout: str, device: str, dp: int = DP, tp: int = TP) -> dict[str, Any]:
    """One layout: a row for the graph as traced, and one for each policy."""
    step = trace(config, layout, device, dp, tp)
    rows = [{"policy": "as traced", **measured(step.gm)}]
    costs, left = [], {}
    for name, text in POLICIES.items():
        gm, policy = step.fresh(), policylang.parse(text)
        outcome = FlatPath().apply(gm, policy)
        rows.append({"policy": name, "fused": len(outcome.plan.edits.done), **measured(gm)})
        costs.append({"policy": name, **times(step, policy, outcome)})
        left[name] = refusals(outcome)
    return {"layout": LAYOUTS[layout], "tracing s": step.seconds, "graphs": rows, "of tracing": costs, "refused": left}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LLAMA3_8B.layers)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--device", default="cpu", help="cuda traces the attention kernel of a GPU, and needs one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    config = evolve(LLAMA3_8B, layers=options.layers)
    results = []
    with fake_ranks(DP * TP):
        for layout in options.layouts:
            results.append(measure(config, layout, options.device))
            show(results[-1])
    setup = {"layers": config.layers, "dp": DP, "tp": TP, "sequence": config.sequence, "device": options.device}
    write_results(options.json, {"setup": setup, "layouts": results})


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['layout']}: traced in {result['tracing s']:.1f} s\n")
    columns = dict.fromkeys(name for row in result["graphs"] for name in row)
    print(table([{name: row.get(name) for name in columns} for row in result["graphs"]]))
    print()
    print("seconds, as shares of those of tracing")
    print(table(result["of tracing"]))
    for policy, reasons in result["refused"].items():
        for reason, count in reasons.items():
            print(f"{policy}: {count} chains left as they are: {reason}")


if __name__ == "__main__":
    main()
