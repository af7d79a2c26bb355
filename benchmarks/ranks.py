"""What does it cost ranks to compare what they are about to run?

In gloo processes on this machine, one comparison of a plan (settings, plan) beside the collective that would carry the
same digests, ``torch.distributed.all_gather_object``; and what a rank works out for it on a graph of many collectives.

    python -m benchmarks.ranks --json results.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.fx.experimental.proxy_tensor import make_fx

import policylang
from benchmarks.common import table, write_results
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind
from policylang.planning.capabilities import JOINT
from policylang.planning.planner import plan as make_plan
from policylang.ranks.comparison import agree_on_plan, comparing, ranks_of
from policylang.ranks.rank_account import GraphRun, account_of, collectives_of, plan_step

POLICY = "save mm\nundecided -> save\n"
RANKS = (2, 4, 8)
GATHERS = 2000


def gathered(count: int) -> Facts:
    """Of a graph of products with weights, each gathered first."""

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            whole = functional.all_gather_tensor(weight, 0, dist.group.WORLD)
            x = x @ functional.wait_tensor(whole)[:8]
        return x

    return collect(make_fx(function)(torch.ones(2, 8), torch.ones(8, 8)), kind=GraphKind.FORWARD)


def median(run: Callable[[], Any], repeats: int) -> float:
    """Seconds on the clock: ranks wait for each other."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def on_a_rank(rank: int, world: int, store: str, repeats: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    policy = policylang.parse(POLICY)
    facts = gathered(4)
    plan = make_plan(policy, facts, JOINT)

    def compare() -> None:
        with comparing("a benchmark"):
            ranks_of(facts, policy, "flat")
            agree_on_plan(plan)

    def gather() -> None:
        found: list[Any] = [None] * world
        for _ in range(2):
            dist.all_gather_object(found, plan.digest)

    rows: dict[str, Any] = {"ranks": world}
    for name, run in (("compare_ms", compare), ("all_gather_object_ms", gather)):
        run()
        dist.barrier()
        rows[name] = 1e3 * median(run, repeats)
    rows["ratio"] = rows["compare_ms"] / rows["all_gather_object_ms"]
    if world == RANKS[0]:
        large = gathered(GATHERS)
        made = make_plan(policy, large, JOINT)
        rows["nodes"], rows["plan_s"] = len(large), median(lambda: make_plan(policy, large, JOINT), 3)

        def account() -> None:
            collectives = collectives_of(GraphRun("", large))
            account_of(large, collectives)
            plan_step(made, collectives)

        rows["account_s"] = median(account, 3)
    if rank == 0:
        torch.save(rows, out)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for world in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/rows"
            torch.multiprocessing.spawn(
                on_a_rank, (world, f"{folder}/store", arguments.repeats, out), nprocs=world, join=True
            )
            rows.append(torch.load(out))
    large = {key: rows[0].pop(key) for key in ("nodes", "plan_s", "account_s")}
    large["account / plan"] = large["account_s"] / large["plan_s"]
    print(table(rows), table([large]), sep="\n\n")
    write_results(arguments.json, {"comparisons": rows, "account": large})


if __name__ == "__main__":
    main()
