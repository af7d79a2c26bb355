"""What ranks may order differently: every row is told to every rank, in time and in words, and its control passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._inductor.config

from tests.support import order_cases as case
from tests.support.order_cases import AHEAD, DEVICE, HIDDEN, JOINED, LATER
from tests.support.rank_cases import Products, settings
from tests.support.rank_faults import Fault, column, report, run_column

ORDERED = "APL620"
DECIDED, GRAPHS, POLICIES, STOPPED = "APL601", "APL602", "APL603", "APL605"
WAITING, COLLECTIVES, UNCOMPARED = "APL607", "APL609", "APL612"
DIFFERENT = (GRAPHS, COLLECTIVES)
UNLIKE = (ORDERED, *DIFFERENT)
BOTH = ("rank", "0", "1")
FURTHER = "prefetch all_gather 2 blocks ahead\n"
FITTING = "bucket all_gather up to 1 MiB\n"
FAILS = ("RuntimeError", "DistBackendError")

# fmt: off
TWO = [
    # --- what the policy says ---
    Fault("a prefetch on one rank", case.scheduled(LATER, LATER + FURTHER), (ORDERED,), (*BOTH, "all_gather")),
    Fault("a prefetch further ahead", case.scheduled(AHEAD, FURTHER),
          (ORDERED,), (*BOTH, "1 block ahead", "2 blocks ahead")),
    Fault("a delay on one rank", case.scheduled(AHEAD, AHEAD + LATER), (POLICIES,), (*BOTH, "reduce_scatter")),
    Fault("a bucket on one rank", case.scheduled(AHEAD, JOINED + AHEAD), (POLICIES,), (*BOTH, "bucket all_gather")),
    Fault("buckets of other sizes", case.scheduled(JOINED, "bucket all_gather up to 1 MiB\n"),
          (POLICIES,), (*BOTH, "per 2 blocks", "1 MiB")),
    Fault("an overlap on one rank", case.scheduled(DEVICE + AHEAD, DEVICE + HIDDEN),
          (ORDERED,), (*BOTH, "collective|overlap")),
    Fault("another limit", case.scheduled(DEVICE + HIDDEN, DEVICE + "overlap collective up to 300 B in flight\n"),
          (ORDERED, POLICIES), (*BOTH, "in flight")),
    Fault("another device", case.scheduled(DEVICE + HIDDEN, "device cpu\n" + HIDDEN),
          (ORDERED, POLICIES), (*BOTH, "device h100-sxm", "device cpu")),
    Fault("other estimates", case.scheduled(DEVICE + HIDDEN, DEVICE + HIDDEN, device="a100-sxm"),
          (ORDERED, POLICIES), BOTH),
    Fault("an order is kept on one rank", case.scheduled(LATER, "optional keep order of reduce_scatter\n" + LATER),
          (ORDERED, POLICIES, STOPPED), ("rank",), own=(ORDERED, POLICIES, "APL376")),
    Fault("a line that cannot be carried out", case.scheduled(AHEAD, AHEAD + "prefetch all_to_all 1 block ahead\n"),
          (STOPPED,), ("rank 1", "all_to_all"), own=("APL301", "APL371", "APL373", "APL374")),
    # --- what the graph is, or what somebody else has made of it ---
    Fault("another scheduler ran before", case.scheduled(LATER, LATER, change=case.starts_early), UNLIKE, BOTH),
    Fault("two gathers are swapped before", case.scheduled(LATER, LATER, change=case.swapped_gathers), UNLIKE, BOTH),
    Fault("a collective more", case.scheduled(AHEAD, AHEAD, change=case.one_more), UNLIKE, BOTH),
    Fault("a collective less", case.scheduled(AHEAD, AHEAD, change=case.one_less), UNLIKE, BOTH),
    Fault("an unknown communication operator", case.scheduled(AHEAD, AHEAD, change=case.unknown_in_between),
          UNLIKE, BOTH),
    Fault("point-to-point in between", case.scheduled(AHEAD, AHEAD, change=case.point_to_point_in_between),
          UNLIKE, BOTH),
    Fault("a member of another type",
          case.scheduled(FITTING, FITTING, case.mixed(torch.float32), case.mixed(torch.bfloat16)),
          (*UNLIKE, STOPPED), BOTH),
    # --- programs ---
    Fault("two models are interleaved", case.interleaved, (*UNLIKE, WAITING), BOTH),
    Fault("two compiled models are interleaved", case.run_interleaved, (*UNLIKE, WAITING), BOTH),
    Fault("halves under two orders", case.compiled_order(AHEAD, AHEAD + LATER), (POLICIES,), BOTH),
    Fault("halves with other buckets", case.compiled_order(JOINED, AHEAD), (POLICIES, *UNLIKE), BOTH),
    Fault("a half by itself", case.half(AHEAD, FURTHER), UNLIKE, BOTH),
    Fault("traced, and compiled", case.both_paths, (*UNLIKE, WAITING), BOTH),
    Fault("nothing is compared on one rank", case.compiled_order(AHEAD, AHEAD, agree=False),
          (UNCOMPARED,), ("rank 1", "agree=False"), own=(UNCOMPARED, *FAILS), gives_up=2.0),
    Fault("an order after an error", case.another_after_an_error, ()),
    # the order is the policy's whatever is set: nobody is at fault
    Fault("Inductor schedules by itself",
          settings(lambda at: Products(at.group), inner="inductor", policy=DEVICE + HIDDEN,
                   change=lambda: torch._inductor.config.patch(
                       {"aten_distributed_optimizations.enable_overlap_scheduling": True})), ()),
]

FOUR = [
    Fault("an order in the opposite corner", case.scheduled(AHEAD, FURTHER), (ORDERED,), ("rank 0", "3"),
          world=4, odd=(3,)),
    Fault("a bucket in the opposite corner", case.scheduled(AHEAD, JOINED + AHEAD), (POLICIES,), ("rank 0", "3"),
          world=4, odd=(3,)),
]
# fmt: on

VARIANTS = {
    "Inductor schedules by itself",
    "a prefetch on one rank",
    "a delay on one rank",
    "an order is kept on one rank",
    "a collective less",
    "two gathers are swapped before",
    "point-to-point in between",
    "buckets of other sizes",
    "halves with other buckets",
    "halves under two orders",
    "two compiled models are interleaved",
    "nothing is compared on one rank",
    "other estimates",
    "another limit",
    "a bucket on one rank",
    "a member of another type",
    "two models are interleaved",
    "a half by itself",
    "a line that cannot be carried out",
}
"""Rows beside one of their kind, or that take long."""


def rows(rank: int, names: list[str], folder: str) -> None:
    by_name = {row.name: row for row in (*TWO, *FOUR)}
    column(rank, [by_name[name] for name in names], folder)


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    known = [row for row in TWO if row.name not in VARIANTS]
    found = run_column(rows, known, tmp_path)
    assert not (wrong := report(known, found)), wrong


@pytest.mark.slow
def test_two_ranks_in_every_variant(tmp_path: Path) -> None:
    known = [row for row in TWO if row.name in VARIANTS]
    found = run_column(rows, known, tmp_path)
    assert not (wrong := report(known, found)), wrong


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    found = run_column(rows, FOUR, tmp_path)
    assert not (wrong := report(FOUR, found)), wrong


def test_the_variants_are_rows() -> None:
    assert {row.name for row in TWO} >= VARIANTS
