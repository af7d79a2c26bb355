"""What does it cost ranks to compare what they are about to run?

In gloo processes on this machine, one comparison of a plan (settings, plan) beside the collective that would carry the
same digests, ``torch.distributed.all_gather_object``, on the clock and in the processor time of a rank; and what a rank
works out for it on a graph of many collectives.

Then up to 1,024 simulated ranks over one TCP store, whose server is another process: threads that take turns where they
wait, over one connection. The figures are processor time, of a rank and of the server, the only part that all ranks
share. In the first comparison of ranks whose groups overlap, each reads the messages of all; in later ones they count.

    python -m benchmarks.ranks --json results.json
    python -m benchmarks.ranks --simulated --json results.json
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from attrs import define, evolve, field
from torch.fx.experimental.proxy_tensor import make_fx

import policylang
from benchmarks.common import table, write_results
from benchmarks.llama3_8b_128_ranks import fake_ranks
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind, Group
from policylang.planning.capabilities import JOINT
from policylang.planning.planner import plan as make_plan
from policylang.ranks import meeting
from policylang.ranks.comparison import agree_on_plan, comparing, ranks_of
from policylang.ranks.meeting import MessageStore
from policylang.ranks.rank_account import GraphRun, account_of, collectives_of, plan_step
from policylang.torch_compat import distributed

POLICY = "save mm\nundecided -> save\n"
RANKS = (2, 4, 8)
GATHERS = 2000
SIMULATED = ((128,), (16, 8), (1024,), (128, 8))
"""The sizes of meshes; each dimension has groups of its own."""
TIMES = 3
"""Comparisons one after the other."""


def gathered(count: int) -> Facts:
    """Of a graph of products with weights, each gathered first."""

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            whole = functional.all_gather_tensor(weight, 0, dist.group.WORLD)
            x = x @ functional.wait_tensor(whole)[:8]
        return x

    return collect(make_fx(function)(torch.ones(2, 8), torch.ones(8, 8)), kind=GraphKind.FORWARD)


def median(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Seconds on the clock, in which ranks wait for each other, and seconds of the processor."""
    times = []
    for _ in range(repeats):
        start, computed = time.perf_counter(), time.process_time()
        run()
        times.append((time.perf_counter() - start, time.process_time() - computed))
    clock, processor = map(statistics.median, zip(*times, strict=True))
    return clock, processor


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
    for name, run in (("compare", compare), ("all_gather_object", gather)):
        run()
        dist.barrier()
        clock, processor = median(run, repeats)
        rows |= {f"{name}_ms": 1e3 * clock, f"{name}_processor_ms": 1e3 * processor}
    if rank == 0:
        torch.save(rows, out)
    dist.barrier()
    dist.destroy_process_group()


def account() -> dict[str, Any]:
    """What a rank of many collectives works out for a comparison, beside its plan."""
    policy = policylang.parse(POLICY)
    with fake_ranks(RANKS[0]):
        facts = gathered(GATHERS)
    made = make_plan(policy, facts, JOINT)

    def compare() -> None:
        collectives = collectives_of(GraphRun("", facts))
        account_of(facts, collectives)
        plan_step(made, collectives)

    plan_s, account_s = (median(run, 3)[1] for run in (lambda: make_plan(policy, facts, JOINT), compare))
    return {"nodes": len(facts), "plan_s": plan_s, "account_s": account_s, "account / plan": account_s / plan_s}


# --- a thousand ranks ------------------------------------------------------------------------------------------------


@define
class Turns:
    """Threads of which one runs at a time: the next is whoever has slept longest, and nobody waits for the clock."""

    now: float = 0.0
    asleep: list[tuple[float, int]] = field(factory=list)
    called: dict[int, threading.Semaphore] = field(factory=dict)
    own: threading.local = field(factory=threading.local)

    def sleep(self, seconds: float) -> None:
        heapq.heappush(self.asleep, (self.now + seconds, self.own.rank))
        self.give_way()
        self.called[self.own.rank].acquire()

    def give_way(self) -> None:
        if self.asleep:
            self.now, rank = heapq.heappop(self.asleep)
            self.called[rank].release()

    def run(self, world: int, run: Callable[[int], None]) -> None:
        """On each of so many ranks. Raises the first error of one."""
        errors: list[BaseException] = []

        def in_turn(rank: int) -> None:
            self.own.rank = rank
            self.called[rank].acquire()
            try:
                run(rank)
            except BaseException as error:
                errors.append(error)
            self.give_way()

        self.called = {rank: threading.Semaphore(0) for rank in range(world)}
        self.asleep = [(0.0, rank) for rank in range(world)]
        threads = [threading.Thread(target=in_turn, args=(rank,), daemon=True) for rank in range(world)]
        for each in threads:
            each.start()
        self.give_way()
        for each in threads:
            each.join()
        for error in errors:
            raise error


def serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while True:
        pipe.recv()
        # ru_maxrss would be the parent's, from before exec
        own = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        pipe.send((time.process_time(), int(own[1]) / 1024 if own else None))


@contextmanager
def server() -> Iterator[tuple[int, Callable[[], tuple[float, float]]]]:
    """A store's port, and its process's seconds and MiB so far."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()

    def figures() -> tuple[float, float]:
        here.send(None)
        return here.recv()  # type: ignore[no-any-return]

    yield here.recv(), figures
    process.kill()


def groups_of(rank: int, mesh: Sequence[int]) -> list[Group]:
    """A group for each dimension, with the ranks that differ in this one alone."""
    ranks = torch.arange(prod(mesh)).reshape(*mesh)
    at = [int(each) for each in torch.unravel_index(torch.tensor(rank), tuple(mesh))]
    found = [ranks[tuple(slice(None) if of == dim else at[of] for of in range(len(mesh)))] for dim in range(len(mesh))]
    return [Group(f"{dim}", tuple(map(int, each)), len(each)) for dim, each in enumerate(found)]


def simulated(mesh: Sequence[int]) -> list[dict[str, Any]]:
    """What each of some comparisons takes: the first, and later ones."""
    world, turns, own, policy = prod(mesh), Turns(), threading.local(), policylang.parse(POLICY)
    with fake_ranks(world):
        facts = gathered(4)
    gathers = [row for row, name in enumerate(facts.group_names) if name]

    def of_rank(rank: int) -> Facts:
        groups, names = groups_of(rank, mesh), list(facts.group_names)
        for number, row in enumerate(gathers):
            names[row] = groups[number % len(groups)].name
        return evolve(facts, groups={group.name: group for group in groups}, group_names=tuple(names))

    made = [of_rank(rank) for rank in range(world)]
    plans = [make_plan(policy, each, JOINT) for each in made]
    times: list[list[float]] = [[] for _ in range(TIMES)]
    stores: dict[int, MessageStore] = {}

    def compare(rank: int) -> None:
        own.store = stores[rank]
        start = time.thread_time()
        with comparing("a benchmark"):
            ranks_of(made[rank], policy, "flat")
            agree_on_plan(plans[rank])
        times[-1].append(time.thread_time() - start)

    rows: list[dict[str, Any]] = []
    with (
        server() as (port, figures),
        mock.patch.object(distributed, "own_connection", side_effect=lambda store: store),
        mock.patch.object(meeting, "message_store", side_effect=lambda: own.store),
        mock.patch.object(meeting, "time", mock.Mock(sleep=turns.sleep, monotonic=lambda: turns.now)),
    ):
        connection = dist.TCPStore("127.0.0.1", port, is_master=False)
        for rank in range(world):
            stores[rank] = MessageStore(rank, lambda: connection, threads=True)
        for number in range(TIMES):
            before, times[:] = figures()[0], [[]]
            turns.run(world, compare)
            seconds, memory = figures()
            rows.append({
                "mesh": " × ".join(map(str, mesh)), "ranks": world, "comparison": number + 1,
                "rank_ms": 1e3 * statistics.median(times[-1]), "slowest_rank_ms": 1e3 * max(times[-1]),
                "server_s": seconds - before, "server_MiB": memory,
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--simulated", action="store_true", help="compare simulated ranks, and no processes")
    arguments = parser.parse_args()
    if arguments.simulated:
        thousand = [row for mesh in SIMULATED for row in simulated(mesh)]
        print(table(thousand))
        write_results(arguments.json, {"simulated": thousand})
        return
    rows = []
    for world in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/rows"
            torch.multiprocessing.start_processes(  # which need not import torch each
                on_a_rank, (world, f"{folder}/store", arguments.repeats, out), nprocs=world, start_method="fork"
            )
            rows.append(torch.load(out))
    large = account()
    print(table(rows), table([large]), sep="\n\n")
    write_results(arguments.json, {"comparisons": rows, "account": large})


if __name__ == "__main__":
    main()
