"""What does planning cost beside PyTorch's own partitioners, and how does it grow?

The same joint graphs (a Hugging Face Llama of 2 to 128 layers under ``torch.compile``) go through PyTorch's min-cut
and default partitioners and through policylang with ``llama3_sac``; each gets a fresh copy. Then a synthetic joint
graph of a million nodes is planned and tagged, and its memory is counted.

    python -m benchmarks.plan_cost --json results.json
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from functorch.compile import default_partition, min_cut_rematerialization_partition

import policylang
from benchmarks.common import growth_exponent, seconds, table, write_results
from benchmarks.graphs import JointGraph, llama_joint, synthetic_joint

LAYERS = (2, 4, 8, 16, 32, 64, 128)
MANY_RULES = """
policy synthetic
blocks layers.*
let product = mm where inputs == 2
recompute everything in block
save product in block
recompute every 2nd mm per block
save first add per block
save last mul per block
recompute 3rd sigmoid per block
save everything in block where crosses block
recompute chain after last mm per block
save mm feeding sigmoid in every 2nd block
recompute users of first mm per block
save inputs of last add per block
recompute add where bytes >= 1 KiB in first 4 blocks
save sigmoid in blocks 0..99
recompute pointwise in last 2 blocks
save mul where users == 1 and numel > 16 in layers.1*
recompute sigmoid except first 2 sigmoid per block
save every 4th mm from 1st per block
recompute last 2 add per block
save mm in layers.{7,8,9}
optional save everything in block where is mutated
undecided -> recompute
"""


def median_time(graph: JointGraph, run: Callable[[torch.fx.GraphModule], Any], repeats: int) -> float:
    """Seconds of processor time: what else a shared machine runs does not count."""
    times = []
    for _ in range(repeats):
        module = graph.fresh()
        gc.collect()
        start = time.process_time()
        run(module)
        times.append(time.process_time() - start)
    return statistics.median(times)


def measure_layers(layers: int, policy: policylang.Policy, repeats: int) -> dict[str, Any]:
    graph = llama_joint(layers)
    arguments = graph.arguments
    tag = median_time(graph, lambda module: policylang.apply(module, policy), repeats)
    whole = median_time(
        graph, lambda module: policylang.partition(module, graph.inputs, policy=policy, **arguments), repeats
    )
    default = median_time(graph, lambda module: default_partition(module, graph.inputs, **arguments), repeats)
    min_cut = median_time(
        graph, lambda module: min_cut_rematerialization_partition(module, graph.inputs, **arguments), repeats
    )
    return {
        "layers": layers,
        "nodes": len(graph),
        "plan + tag s": tag,
        "plan + partition s": whole,
        "default s": default,
        "min-cut s": min_cut,
        "plan + tag / min-cut": tag / min_cut,
        "plan + partition / min-cut": whole / min_cut,
        "plan + tag us/node": tag / len(graph) * 1e6,
    }


def measure_million(nodes: int) -> dict[str, Any]:
    """Twenty rules of many forms on a graph of that size, and their memory on one a tenth of it."""
    policy = policylang.parse(MANY_RULES)
    policylang.apply(synthetic_joint(nodes // 100), policy)  # what is loaded once is not counted
    bytes_a_node = traced_bytes_a_node(synthetic_joint(nodes // 10), policy)
    module = synthetic_joint(nodes)
    gc.collect()
    elapsed = seconds(lambda: policylang.apply(module, policy))
    count = len(module.graph.nodes)
    return {
        "nodes": count,
        "plan + tag s": elapsed,
        "us/node": elapsed / count * 1e6,
        "peak bytes a node beyond the graph": bytes_a_node,
    }


def traced_bytes_a_node(module: torch.fx.GraphModule, policy: policylang.Policy) -> float:
    """The most that planning and tagging hold at once, the tags they leave on the nodes included."""
    gc.collect()
    tracemalloc.start()
    try:
        policylang.apply(module, policy)
        return tracemalloc.get_traced_memory()[1] / len(module.graph.nodes)
    finally:
        tracemalloc.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=list(LAYERS))
    parser.add_argument("--nodes", type=int, default=1_000_000, help="of the synthetic graph; 0 leaves it out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--policy", default="llama3_sac.apl")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    policy = policylang.load(options.policy)

    results: dict[str, Any] = {"benchmark": "plan_cost", "policy": options.policy}
    if options.nodes:
        print(f"measuring: {options.nodes:,} synthetic nodes", flush=True)
        results["synthetic"] = measure_million(options.nodes)
        print(table([results["synthetic"]]))
    rows = []
    for layers in options.layers:
        print(f"measuring: {layers} layers", flush=True)
        rows.append(measure_layers(layers, policy, options.repeats))
    results["rows"] = rows
    print(table(rows))
    if len(rows) > 2:
        sizes = [row["nodes"] for row in rows]
        results["exponent"] = {
            name: growth_exponent(sizes, [row[name] for row in rows])
            for name in ("plan + tag s", "plan + partition s", "default s", "min-cut s")
        }
        print(table([results["exponent"]]))
    write_results(options.json, results)


if __name__ == "__main__":
    main()
