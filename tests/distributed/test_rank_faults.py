"""What ranks may do differently: every row is told to every rank, in time and in words, and its control passes.

The rows are read top to bottom by the same processes, so each control is also the next equal model after an error.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch.distributed.device_mesh import DeviceMesh

from tests.support import rank_cases as case
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
UNREADABLE = "APL621"

DIFFERENT = (GRAPHS, COLLECTIVES)
"""A graph with other collectives has other operators or the same ones over other things, whichever is seen first."""
FAILS = ("RuntimeError", "DistBackendError")
"""A collective that nobody else runs."""
SAYS_SAVE, SAYS_RECOMPUTE = "rank 0 saves it", "rank 1 recomputes it"
BOTH = ("rank", "0", "1")
NOTHING = "recompute everything in block\n"
PRODUCTS = NOTHING + "save matmul in block\n"
MORE = PRODUCTS + "save relu in block\n"
SEQUENCE = case.SequenceParallel


def swapped(at: Place) -> Net:
    """Gathers over ``tp`` first."""
    return Net([[at.mesh.get_group("tp"), at.mesh.get_group("dp")]] * 2)


def straight(at: Place) -> Net:
    return Net([[at.mesh.get_group("dp"), at.mesh.get_group("tp")]] * 2)


def whole(at: Place) -> DeviceMesh:
    return at.mesh


# fmt: off
TWO = [
    # --- what the policy says ---
    Fault("a value is saved, and recomputed", case.policies(SAVE + "save mm\n", SAVE + "recompute mm\n"),
          (DECIDED,), ("`mm", SAYS_SAVE, SAYS_RECOMPUTE, "`save mm`", "`recompute mm`")),
    Fault("what is undecided", case.policies(SAVE, RECOMPUTE), (DECIDED,), (SAYS_SAVE, SAYS_RECOMPUTE)),
    Fault("a value is offloaded", case.policies(SAVE + "save mm\n", SAVE + "offload mm\n"),
          (DECIDED,), ("`mm", SAYS_SAVE, "rank 1 offloads it")),
    Fault("two rules are swapped", case.policies("save mm\nsave everything\n", "save everything\nsave mm\n"),
          (POLICIES, DECIDED), BOTH, never=("rank 0 saves it, rank 1 saves it",)),
    Fault("another text that comes to the same", case.policies(SAVE, SAVE + "optional save bmm\n"),
          (POLICIES,), (*BOTH, "optional save bmm", "come to the same")),
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
    Fault("a reduction and a gather", case.models(lambda at: Reduced(at.group, "sum"),
                                                  lambda at: Reduced(at.group, "gather")), DIFFERENT, BOTH),
    Fault("another length of a sequence", case.batches(lambda at: SEQUENCE(at.group), case.batch(4), case.batch(6)),
          (COLLECTIVES,), (*BOTH, "4", "6")),
    # --- again ---
    Fault("training after evaluation", case.after_evaluation, (DECIDED, POLICIES), BOTH),
    Fault("the same backend again after an error", case.same_backend_again, (DECIDED,), (SAYS_SAVE, SAYS_RECOMPUTE)),
    Fault("mended after an error", case.mended_in_between, ()),
    Fault("another model after an error", case.another_model_afterwards, ()),
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
    Fault("another size, of dynamic shapes", case.another_shape(nets, RECOMPUTE + LARGE, 2, 3, dynamic=None), ()),
    # --- settings of torch's ---
    Fault("no elimination of common subexpressions",
          case.settings(lambda at: case.Twice(at.group), lambda: torch._functorch.config.patch(cse=False)),
          (SETTING, *DIFFERENT), (*BOTH, "cse")),
    Fault("Inductor moves collectives",
          case.settings(lambda at: case.Products(at.group), inner="inductor",
                        change=lambda: torch._inductor.config.patch(reorder_for_compute_comm_overlap=True)),
          (SETTING,), (*BOTH, "reorder_for_compute_comm_overlap")),
    Fault("Inductor gathers in buckets",
          case.settings(lambda at: case.Products(at.group), inner="inductor",
                        change=lambda: torch._inductor.config.patch(bucket_all_gathers_fx="all")),
          (SETTING,), (*BOTH, "bucket_all_gathers_fx")),
    # --- graphs at hand ---
    Fault("a traced step, saved and recomputed", case.flat(SAVE, RECOMPUTE), (DECIDED,), (SAYS_SAVE, SAYS_RECOMPUTE)),
    Fault("a rule matches nothing", case.flat(SAVE, SAVE + "save attention\n"),
          (STOPPED,), ("rank 1", "`save attention` matches nothing"), own=("APL301",)),
    Fault("another flat graph", case.flat(SAVE, SAVE, other=lambda at: Net([at.group] * 3)), DIFFERENT, BOTH),
    Fault("a flat graph over another group", case.flat(SAVE, SAVE, other=lambda at: Net(at.groups)),
          (COLLECTIVES, GRAPHS, WAITING), BOTH),
    Fault("gathers moved by a pass", case.reordered, DIFFERENT, BOTH),
    Fault("gathers put in buckets by a pass", case.bucketed, DIFFERENT, BOTH),
    Fault("a partition", case.partitioned, (DECIDED,), (SAYS_SAVE, SAYS_RECOMPUTE)),
    Fault("a mesh on one rank", case.meshed(lambda at: None, whole),
          (SETTING,), (*BOTH, "mesh")),
    Fault("no graph at all", case.not_a_graph, (STOPPED,), ("rank 1", "Net"), own=("APL328",)),
    Fault("a graph of modules", case.a_graph_of_modules, (STOPPED,), ("rank 1",), own=("APL341", "APL324")),
    Fault("half of a partition", case.half_of_a_partition, (STOPPED,), ("rank 1", "half"), own=("APL324",)),
    Fault("a second policy on one graph", case.a_second_policy, (STOPPED,), ("rank 1",), own=("APL382",)),
    # --- eager ---
    Fault("a checkpoint", case.eager(nets, NOTHING, PRODUCTS), (DECIDED,), ("rank 0 recomputes it", "rank 1 saves it")),
    Fault("a checkpoint that keeps what is gathered", case.eager(nets, RECOMPUTE, SAVE),
          (DECIDED,), ("rank 0 recomputes it", "rank 1 saves it")),
    Fault("a tensor-parallel checkpoint", case.eager(case.tensor_parallel, NOTHING, PRODUCTS), (DECIDED,), BOTH),
    Fault("FSDP inside a checkpoint", case.eager(case.sharded_inside, PRODUCTS, MORE),
          (DECIDED,), BOTH),
    Fault("FSDP put inside a checkpoint", case.checkpointed_and_sharded(PRODUCTS, MORE),
          (DECIDED,), BOTH),
    # --- ranks that compare nothing ---
    Fault("`agree=False` on one rank", case.left_out("agree"),
          (UNCOMPARED,), ("rank 1", "agree=False"), own=(UNCOMPARED, *FAILS), gives_up=2.0),
    Fault("`POLICYLANG_AGREE=0` on one rank", case.left_out("environment"),
          (UNCOMPARED,), ("rank 1", "POLICYLANG_AGREE"), own=(UNCOMPARED, *FAILS), gives_up=2.0),
    Fault("nobody compares", case.nobody_compares, ()),
    Fault("an error before there is a graph", case.fails_in_the_forward,
          (MISSING,), ("rank 1",), own=("ValueError",), patience=3.0),
    Fault("an error in a block's first forward", case.fails_in_a_block(ValueError),
          (STOPPED,), ("rank 1", "another batch"), own=("ValueError",)),
    Fault("a block's first forward exits", case.fails_in_a_block(SystemExit),
          (STOPPED,), ("rank 1", "SystemExit"), own=("ValueError",)),
    Fault("a block's first forward is interrupted", case.fails_in_a_block(KeyboardInterrupt),
          (STOPPED,), ("rank 1", "KeyboardInterrupt"), own=("ValueError",)),
    Fault("garbage in the store", case.writes_garbage, (UNREADABLE,), ("message", "policylang")),
    # --- what has to pass ---
    Fault("one text in two files", case.under_other_names, ()),
    Fault("a view on one rank, a copy on the other", case.models(lambda at: case.OwnPart(at, False),
                                                                 lambda at: case.OwnPart(at, True)), ()),
    Fault("two threads train", case.trains_in_two_threads, ()),
    Fault("two threads", case.in_two_threads(swap=False), ()),
    Fault("two threads, in another order", case.in_two_threads(swap=True), ()),
    Fault("few keys in the store", case.keys_stay_few, ()),
    Fault("few keys of compiled models", case.keys_of_compiled, ()),
    Fault("no thread", case.no_thread_runs, ()),
]

FOUR = [
    Fault("the rank in the opposite corner", case.flat(SAVE, RECOMPUTE, straight, straight),
          (DECIDED,), ("rank 0 saves it", "rank 3 recomputes it", "ranks 0-2|ranks 0, 1 and 2"), world=4, odd=(3,)),
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
]

ALONE_ROWS = [
    Fault("is killed", case.is_killed, (MISSING,), ("rank 1",), gone=True, patience=3.0),
    Fault("is stopped for a while", case.is_stopped(6), (MISSING,), ("rank 1",), own=(MISSING, STOPPED), patience=3.0),
    Fault("never comes", case.never_comes, (MISSING,), ("rank 1",), own=("",), gives_up=5.0, patience=None),
    Fault("is late", case.is_late(5, noticed=2), (), logged=("rank 1",), patience=None),
    Fault("holds the interpreter's lock", case.holds_the_lock(6), (), patience=None),
    Fault("reads its policy early", case.policies(SAVE, SAVE), (), before=case.reads_its_policy, patience=None),
]
# fmt: on

VARIANTS = {
    "two rules are swapped",
    "one layer more",
    "two models in another order",
    "bfloat16 and float16",
    "the same backend again after an error",
    "a second backend for the same code",
    "of which is heard at the next",
    "a checkpoint that keeps what is gathered",
    "a tensor-parallel checkpoint",
    "gathers moved by a pass",
    "another flat graph",
    "what is undecided",
    "a value is offloaded",
    "another text that comes to the same",
    "an expectation fails",
    "one weight is frozen",
    "one rank evaluates",
    "a break in the graph",
    "another of two equal groups",
    "a reduction and a gather",
    "another length of a sequence",
    "another model after an error",
    "another size moves one, of dynamic shapes",
    "another size, of dynamic shapes",
    "Inductor gathers in buckets",
    "a flat graph over another group",
    "gathers put in buckets by a pass",
    "a graph of modules",
    "half of a partition",
    "a second policy on one graph",
    "FSDP put inside a checkpoint",
    "`POLICYLANG_AGREE=0` on one rank",
    "an error before there is a graph",
    "two threads, in another order",
    "few keys of compiled models",
    "a block's first forward exits",
}
"""Of two ranks, rows beside one of their kind."""


def rows(rank: int, names: list[str], folder: str) -> None:
    by_name = {row.name: row for row in (*TWO, *FOUR, *ALONE_ROWS)}
    column(rank, [by_name[name] for name in names], folder)


def test_two_ranks(tmp_path: Path) -> None:
    known = [row for row in TWO if row.name not in VARIANTS]
    found = run_column(rows, known, tmp_path)
    assert not (wrong := report(known, found)), wrong


@pytest.mark.slow
def test_two_ranks_in_every_variant(tmp_path: Path) -> None:
    found = run_column(rows, TWO, tmp_path)
    assert not (wrong := report(TWO, found)), wrong


def test_the_variants_are_rows() -> None:
    assert {row.name for row in TWO} >= VARIANTS


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    known = [row for row in FOUR if row.since <= VERSION]
    found = run_column(rows, known, tmp_path)
    assert not (wrong := report(known, found)), wrong


@pytest.mark.slow
def test_a_rank_that_does_not_come_or_is_late(tmp_path: Path) -> None:
    found = run_alone(rows, ALONE_ROWS, tmp_path)
    assert not (wrong := report(ALONE_ROWS, found)), wrong
