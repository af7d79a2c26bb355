"""What ranks may do and order differently: every row is told to every rank, in time and in words; its control passes.

The rows are read top to bottom by the same processes, so each control is also the next equal model after an error.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch.distributed.device_mesh import DeviceMesh

from tests.support import order_cases as order
from tests.support import rank_cases as case
from tests.support.order_cases import AHEAD, DEVICE, HIDDEN, JOINED, LATER
from tests.support.rank_cases import LARGE, RECOMPUTE, SAVE, Net, Place, Reduced, nets
from tests.support.rank_faults import Fault, column, report, run_alone, run_column
from tests.support.versions import VERSION

DECIDED = "APL601"
GRAPHS = "APL602"
POLICIES = "APL603"
MISSING = "APL604"
STOPPED = "APL605"
MESH = "APL606"
WAITING = "APL607"
COLLECTIVES = "APL609"
SETTING = "APL610"
ALONE = "APL611"
UNCOMPARED = "APL612"
ORDERED = "APL620"
UNREADABLE = "APL621"

DIFFERENT = (GRAPHS, COLLECTIVES)
"""A graph with other collectives has other operators or the same ones over other things, whichever is seen first."""
UNLIKE = (ORDERED, *DIFFERENT)
FAILS = ("RuntimeError", "DistBackendError")
"""A collective that nobody else runs."""
SAYS_SAVE, SAYS_RECOMPUTE = "rank 0 saves it", "rank 1 recomputes it"
BOTH = ("rank", "0", "1")
EVERY_2ND = SAVE + "recompute every 2nd mm per graph\n"
NEVER, TIMED = (
    f"device {{}}\n{SAVE}recompute mm\noptional save mm where time > {limit}\n" for limit in ("1 s", "2 us")
)
DEVICES = "rank 0 has `device cpu`", "rank 1 has `device h100-sxm`"
NOTHING = "recompute everything in block\n"
PRODUCTS = NOTHING + "save matmul in block\n"
MORE = PRODUCTS + "save relu in block\n"
FURTHER = "prefetch all_gather 2 blocks ahead\n"


def swapped(at: Place) -> Net:
    """Gathers over ``tp`` first."""
    return Net([[at.mesh.get_group("tp"), at.mesh.get_group("dp")]] * 2)


def straight(at: Place) -> Net:
    return Net([[at.mesh.get_group("dp"), at.mesh.get_group("tp")]] * 2)


def over(two: str, others: str) -> Callable[[Place], Net]:
    """Gathers of ranks 0 and 3 over the one dimension, of the others over the other."""
    return lambda at: Net([at.mesh.get_group(others if at.rank in (1, 2) else two)])


def whole(at: Place) -> DeviceMesh:
    return at.mesh


# fmt: off
TWO = [
    # --- what the policy says ---
    Fault("a value is saved, and recomputed", case.policies(SAVE + "save mm\n", SAVE + "recompute mm\n"),
          (DECIDED,), ("`mm", SAYS_SAVE, SAYS_RECOMPUTE, "`save mm`", "`recompute mm`"), fast=True),
    Fault("a value is offloaded", case.policies(SAVE + "save mm\n", SAVE + "offload mm\n"),
          (DECIDED,), ("`mm", SAYS_SAVE, "rank 1 offloads it")),
    Fault("two rules are swapped", case.policies("save mm\nsave everything\n", "save everything\nsave mm\n"),
          (POLICIES, DECIDED), BOTH, never=("rank 0 saves it, rank 1 saves it",)),
    Fault("another text that comes to the same", case.policies(SAVE, SAVE + "optional save bmm\n"),
          (POLICIES,), (*BOTH, "optional save bmm", "decide the same")),
    Fault("a rule goes by a size of its own", case.batches(nets, case.batch(2), case.batch(64), RECOMPUTE + LARGE),
          (DECIDED,), ("`mm", "rank 0 recomputes it", "rank 1 saves it", "bytes > 1KiB")),
    Fault("an expectation fails", case.policies(SAVE, SAVE + "expect saved <= 1 B\n"),
          (STOPPED,), ("rank 1", "`expect saved <= 1 B` does not hold"), own=("APL305",)),
    # --- what the model is ---
    Fault("one layer more", case.models(nets, lambda at: Net([at.group] * 3)), DIFFERENT, BOTH),
    Fault("another width", case.of_widths(8, 16), (COLLECTIVES,), (*BOTH, "8", "16")),
    Fault("one weight is frozen", case.frozen_weight, DIFFERENT, BOTH),
    Fault("one rank evaluates", case.evaluated, (GRAPHS, DECIDED), BOTH),
    Fault("a break in the graph", case.models(lambda at: case.Broken(nets(at)),
                                              lambda at: case.Broken(nets(at), graph_break=True)),
          (*DIFFERENT, WAITING), BOTH),
    Fault("two models in another order", case.in_another_order, (*DIFFERENT, WAITING), BOTH),
    # --- what the collectives are ---
    Fault("two groups in another order", case.models(lambda at: Net(at.groups), lambda at: Net(at.groups[::-1])),
          (COLLECTIVES,), (*BOTH, "group")),
    Fault("another of two equal groups", case.models(nets, lambda at: Net([at.groups[1]] * 2)),
          (COLLECTIVES, GRAPHS, WAITING), (*BOTH, "group")),
    Fault("bfloat16 and float16", case.of_dtypes(torch.bfloat16, torch.float16),
          (COLLECTIVES,), (*BOTH, "bf16|bfloat16", "fp16|f16|float16")),
    Fault("a sum and a maximum", case.models(lambda at: Reduced(at.group, "sum"), lambda at: Reduced(at.group, "max")),
          (COLLECTIVES,), (*BOTH, "sum", "max", "all_reduce")),
    # --- again ---
    Fault("training after evaluation", case.after_evaluation, (DECIDED, POLICIES), BOTH),
    Fault("the same backend again after an error", case.same_backend_again, (DECIDED,), (SAYS_SAVE, SAYS_RECOMPUTE)),
    Fault("mended after an error", case.mended_in_between, ()),
    Fault("after an error of one rank's own", case.after_ones_own_error, ()),
    Fault("a second backend for the same code", case.second_backend, (DECIDED,), (SAYS_SAVE, SAYS_RECOMPUTE)),
    Fault("a block under another root", case.block_by_block("undecided -> save\noptional recompute mm in layers.1\n",
                                                            "layers.1", "layers.2"),
          (WAITING,), ("layers.1", "layers.2")),
    Fault("another size moves a threshold", case.another_shape(nets, RECOMPUTE + LARGE, 3, 64),
          (*FAILS, STOPPED, ALONE), own=(ALONE,), gives_up=2.0),
    Fault("another size moves one, of dynamic shapes", case.another_shape(nets, RECOMPUTE + LARGE, 3, 64, dynamic=None),
          (*FAILS, STOPPED, ALONE), own=(ALONE,), gives_up=2.0),
    Fault("another size has one layer more", case.another_shape(lambda at: case.Branching(at.group), SAVE, 3, 64),
          (*FAILS, MISSING), own=(MISSING,), gives_up=2.0, patience=2.0),
    Fault("of which is heard at the next", case.told_at_the_next, (STOPPED,), ("rank 1", "alone")),
    Fault("another size on one rank alone", case.another_shape(nets, RECOMPUTE + LARGE, 2, 3), ()),
    # --- settings of torch's ---
    Fault("no elimination of common subexpressions",
          case.settings(lambda at: case.Twice(at.group), lambda: torch._functorch.config.patch(cse=False)),
          (SETTING, *DIFFERENT), (*BOTH, "cse")),
    Fault("Inductor moves collectives",
          case.settings(lambda at: case.Products(at.group), inner="inductor",
                        change=lambda: torch._inductor.config.patch(reorder_for_compute_comm_overlap=True)),
          (SETTING,), (*BOTH, "reorder_for_compute_comm_overlap")),
    # --- graphs at hand ---
    Fault("a traced step, saved and recomputed", case.flat(SAVE + "save mm\n", EVERY_2ND),
          (DECIDED,), ("ranks decided differently about `mm", f"{SAYS_SAVE}, {SAYS_RECOMPUTE}",
                       f"{SAYS_SAVE}: `save mm` (even.apl:2)",
                       f"{SAYS_RECOMPUTE}: `recompute every 2nd mm per graph` (odd.apl:2)"), fast=True),
    Fault("another device that decides the same", case.flat(NEVER.format("cpu"), NEVER.format("h100-sxm")),
          (POLICIES,), ("ranks 0 and 1 have different policies", *DEVICES)),
    Fault("a device that decides otherwise", case.flat(TIMED.format("cpu"), TIMED.format("h100-sxm")),
          (DECIDED,), (f"{SAYS_SAVE}: `optional save mm where time > 2 us`", *DEVICES), fast=True),
    Fault("a rule matches nothing", case.flat(SAVE, SAVE + "save attention\n"),
          (STOPPED,), ("rank 1", "`save attention` matches nothing"), own=("APL301",), fast=True),
    Fault("another flat graph", case.flat(SAVE, SAVE, other=lambda at: Net([at.group] * 3)), DIFFERENT, BOTH),
    Fault("gathers moved by a pass", case.reordered, DIFFERENT, BOTH),
    Fault("a partition", case.partitioned, (DECIDED,), (SAYS_SAVE, SAYS_RECOMPUTE), fast=True),
    Fault("a mesh on one rank", case.meshed(lambda at: None, whole),
          (SETTING,), (*BOTH, "mesh"), fast=True),
    Fault("no graph at all", case.not_a_graph, (STOPPED,), ("rank 1", "Net"), own=("APL328",), fast=True),
    Fault("a second policy on one graph", case.a_second_policy, (STOPPED,), ("rank 1",), own=("APL382",)),
    # --- eager ---
    Fault("a checkpoint", case.eager(nets, NOTHING, PRODUCTS),
          (DECIDED,), ("rank 0 recomputes it", "rank 1 saves it"), fast=True),
    Fault("a checkpoint that keeps what is gathered", case.eager(nets, RECOMPUTE, SAVE),
          (DECIDED,), ("rank 0 recomputes it", "rank 1 saves it")),
    Fault("a tensor-parallel checkpoint", case.eager(case.tensor_parallel, NOTHING, PRODUCTS), (DECIDED,), BOTH),
    Fault("FSDP inside a checkpoint", case.eager(case.sharded_inside, PRODUCTS, MORE),
          (DECIDED,), BOTH, fast=True),
    Fault("FSDP put inside a checkpoint", case.checkpointed_and_sharded(PRODUCTS, MORE),
          (DECIDED,), BOTH),
    # --- ranks that compare nothing ---
    Fault("`agree=False` on one rank", case.left_out("agree"),
          (UNCOMPARED,), ("rank 1", "agree=False"), own=(UNCOMPARED, *FAILS), gives_up=2.0, fast=True),
    Fault("`POLICYLANG_AGREE=0` on one rank", case.left_out("environment"),
          (UNCOMPARED,), ("rank 1", "POLICYLANG_AGREE"), own=(UNCOMPARED, *FAILS), gives_up=2.0),
    Fault("nobody compares", case.nobody_compares, ()),
    Fault("an error before there is a graph", case.fails_in_the_forward,
          (MISSING,), ("rank 1",), own=("ValueError",), patience=3.0),
    Fault("an error in a block's first forward", case.fails_in_a_block(ValueError),
          (STOPPED,), ("rank 1", "another batch"), own=("ValueError",), fast=True),
    Fault("a block's first forward is interrupted", case.fails_in_a_block(KeyboardInterrupt),
          (STOPPED,), ("rank 1", "KeyboardInterrupt"), own=("ValueError",), since=(2, 12)),  # torch 2.11: GeneratorExit
    # --- what has to pass ---
    Fault("one text in two files", case.under_other_names, ()),
    Fault("a view on one rank, a copy on the other", case.models(lambda at: case.OwnPart(at, False),
                                                                 lambda at: case.OwnPart(at, True)), ()),
    Fault("two threads train", case.trains_in_two_threads, ()),
    Fault("two threads, in another order", case.in_two_threads, ()),
    Fault("few keys in the store", case.keys_stay_few, ()),
    Fault("no thread", case.no_thread_runs, (), fast=True),
    # --- last: what it leaves in the store is read while a rank waits ---
    Fault("garbage in the store", case.writes_garbage, (UNREADABLE,), ("foreign entry", "policylang"), fast=True),
]

ORDERS = [
    # --- what the policy says ---
    Fault("a prefetch on one rank", order.scheduled(LATER, LATER + FURTHER), (ORDERED,), (*BOTH, "all_gather")),
    Fault("a prefetch further ahead", order.scheduled(AHEAD, FURTHER),
          (ORDERED,), (*BOTH, "1 block ahead", "2 blocks ahead"), fast=True),
    Fault("a delay on one rank", order.scheduled(AHEAD, AHEAD + LATER), (POLICIES,), (*BOTH, "reduce_scatter")),
    Fault("a bucket on one rank", order.scheduled(AHEAD, JOINED + AHEAD), (POLICIES,), (*BOTH, "bucket all_gather")),
    Fault("buckets of other sizes", order.scheduled(JOINED, "bucket all_gather up to 1 MiB\n"),
          (POLICIES,), (*BOTH, "per 2 blocks", "1 MiB")),
    Fault("an overlap on one rank", order.scheduled(DEVICE + AHEAD, DEVICE + HIDDEN),
          (ORDERED,), (*BOTH, "collective|overlap")),
    Fault("another limit", order.scheduled(DEVICE + HIDDEN, DEVICE + "overlap collective up to 300 B in flight\n"),
          (ORDERED, POLICIES), (*BOTH, "in flight")),
    Fault("another device", order.scheduled(DEVICE + HIDDEN, "device cpu\n" + HIDDEN),
          (ORDERED, POLICIES), (*BOTH, "device h100-sxm", "device cpu")),
    Fault("other estimates", order.scheduled(DEVICE + HIDDEN, DEVICE + HIDDEN, device="a100-sxm"),
          (ORDERED, POLICIES), BOTH),
    Fault("an order is kept on one rank", order.scheduled(LATER, "optional keep order of reduce_scatter\n" + LATER),
          (ORDERED, POLICIES, STOPPED), ("rank",), own=(ORDERED, POLICIES, "APL376")),
    Fault("a line that cannot be carried out", order.scheduled(AHEAD, AHEAD + "prefetch all_to_all 1 block ahead\n"),
          (STOPPED,), ("rank 1", "all_to_all"), own=("APL301", "APL371", "APL373", "APL374")),
    # --- what the graph is, or what somebody else has made of it ---
    Fault("another scheduler ran before", order.scheduled(LATER, LATER, change=order.starts_early), UNLIKE, BOTH),
    Fault("a collective more", order.scheduled(AHEAD, AHEAD, change=order.one_more), UNLIKE, BOTH),
    Fault("an unknown communication operator", order.scheduled(AHEAD, AHEAD, change=order.unknown_in_between),
          UNLIKE, BOTH),
    # --- programs ---
    Fault("two models are interleaved", order.interleaved, (*UNLIKE, WAITING), BOTH),
    Fault("halves under two orders", order.compiled_order(AHEAD, AHEAD + LATER), (POLICIES,), BOTH),
    Fault("halves with other buckets", order.compiled_order(JOINED, AHEAD), (POLICIES, *UNLIKE), BOTH),
    Fault("a half by itself", order.half(AHEAD, FURTHER), UNLIKE, BOTH),
    Fault("traced, and compiled", order.both_paths, (*UNLIKE, WAITING), BOTH),
    Fault("nothing is compared on one rank", order.compiled_order(AHEAD, AHEAD, agree=False),
          (UNCOMPARED,), ("rank 1", "agree=False"), own=(UNCOMPARED, *FAILS), gives_up=2.0),
    Fault("an order after an error", order.another_after_an_error, ()),
    # the order is the policy's whatever is set: nobody is at fault
    Fault("Inductor schedules by itself",
          case.settings(lambda at: case.Products(at.group), inner="inductor", policy=DEVICE + HIDDEN,
                   change=lambda: torch._inductor.config.patch(
                       {"aten_distributed_optimizations.enable_overlap_scheduling": True})), ()),
]

FOUR = [
    Fault("the rank in the opposite corner", case.flat(SAVE + "save mm\n", EVERY_2ND, straight, straight),
          (DECIDED,), ("rank 0 saves it, rank 3 recomputes it", "ranks 0-2: a flat graph of"), world=4, odd=(3,)),
    Fault("a circle", case.flat(SAVE, SAVE, over("dp", "dp"), over("dp", "tp")),
          (WAITING,), ("has a flat graph of", "(apply)"), world=4, odd=(0, 1, 2, 3)),
    Fault("no mesh on one rank", case.meshed(whole, lambda at: None),
          (GRAPHS,), ("the graph of rank 3 has no collective over it",), world=4, odd=(3,)),
    Fault("dimensions are swapped", case.models(straight, swapped),
          (*DIFFERENT, WAITING), ("rank", "3"), world=4, odd=(3,)),
    Fault("dimensions are swapped in a flat graph", case.flat(SAVE, SAVE, straight, swapped),
          (*DIFFERENT, WAITING), ("rank", "3"), world=4, odd=(3,)),
    Fault("names of dimensions are swapped", case.meshed(whole, case.swapped_names, dims=2),
          (SETTING,), ("rank", "3", "mesh"), world=4, odd=(3,)),
    Fault("chains are fused on all but one", case.flat(SAVE + "fuse all_gather chains\n", SAVE, straight, straight),
          (POLICIES, DECIDED), ("rank 0", "rank 3", "fuse all_gather chains"), world=4, odd=(3,), since=(2, 12)),
    Fault("a small mesh on one rank", case.meshed(whole, case.row_of, dims=2),
          (STOPPED,), ("rank 3", "mesh"), own=(MESH,), world=4, odd=(3,), since=(2, 12)),
    Fault("a small mesh on all ranks", case.meshed(whole, case.row_of, dims=2),
          (MESH,), ("mesh",), world=4, odd=(0, 1, 2, 3), since=(2, 12)),
    Fault("pairs that share nothing", case.models(lambda at: Net([at.mesh.get_group("tp")]),
                                                  lambda at: Net([at.mesh.get_group("tp")] * 3)),
          (), world=4, odd=(2, 3)),
    Fault("one of a pair", case.models(lambda at: Net([at.mesh.get_group("tp")]),
                                       lambda at: Net([at.mesh.get_group("tp")] * 3)),
          DIFFERENT, ("ranks 2 and 3",), world=4, odd=(3,), spared=(0, 1)),
    Fault("an order in the opposite corner", order.scheduled(AHEAD, FURTHER), (ORDERED,), ("rank 0", "3"),
          world=4, odd=(3,)),
    Fault("a bucket in the opposite corner", order.scheduled(AHEAD, JOINED + AHEAD), (POLICIES,), ("rank 0", "3"),
          world=4, odd=(3,)),
]

ALONE_ROWS = [
    Fault("is killed", case.is_killed, (MISSING,), ("rank 1",), gone=True, patience=3.0),
    Fault("is killed with a plan", case.is_killed_with_a_plan,
          (MISSING,), ("rank 1 sent no plan for a graph that rank", "rank 1 has not come in 3 s"), gone=True,
          patience=3.0),
    Fault("is stopped for a while", case.is_stopped(6), (MISSING,), ("rank 1",), own=(MISSING, STOPPED), patience=3.0),
    Fault("never comes", case.never_comes, (MISSING,), ("rank 1",), own=("",), gives_up=5.0, patience=None),
    Fault("is late", case.is_late(5, noticed=2), (), logged=("rank 1",), patience=None),
    Fault("holds the interpreter's lock", case.holds_the_lock(6), (), patience=None),
    Fault("reads its policy early", case.policies(SAVE, SAVE), (), before=case.reads_its_policy, patience=None),
]
# fmt: on


def rows(rank: int, names: list[str], folder: str, controls: bool = True) -> None:
    by_name = {row.name: row for row in (*TWO, *ORDERS, *FOUR, *ALONE_ROWS)}
    column(rank, [by_name[name] for name in names], folder, controls)


def faults_of_some(rank: int, names: list[str], folder: str) -> None:
    rows(rank, names, folder, controls=False)


@pytest.mark.slow
def test_some_faults_of_two_ranks(tmp_path: Path) -> None:
    """Without the controls of what is an error: the next row shows that the ranks can go on."""
    known = [row for row in (*ORDERS, *TWO) if row.fast]
    found = run_column(faults_of_some, known, tmp_path)
    assert not (wrong := report(known, found)), wrong


@pytest.mark.slow
@pytest.mark.parametrize("known", [TWO, ORDERS, FOUR], ids=["two ranks", "orders", "four ranks"])
def test_every_fault_and_its_control(known: list[Fault], tmp_path: Path) -> None:
    known = [row for row in known if row.since <= VERSION]
    found = run_column(rows, known, tmp_path)
    assert not (wrong := report(known, found)), wrong


@pytest.mark.slow
def test_a_rank_that_does_not_come_or_is_late(tmp_path: Path) -> None:
    found = run_alone(rows, ALONE_ROWS, tmp_path)
    assert not (wrong := report(ALONE_ROWS, found)), wrong
