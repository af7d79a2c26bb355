"""The register of paths: its entries and their classes agree, and everyone goes by it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
from torch import fx

import policylang
from policylang.backends.path import BackendPath, path_named
from policylang.commands.agree import agree_arguments
from policylang.commands.plan import plan_arguments
from policylang.graph.facts import Facts, GraphKind
from policylang.language.syntax import Policy
from policylang.planning import capabilities
from policylang.planning.capabilities import (
    COMPARED,
    HALF,
    PATHS,
    PLANNED,
    PathEntry,
    PathName,
    capabilities_for,
    path_taking,
)
from policylang.testing.agreement import STEPS

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"


@pytest.mark.parametrize("entry", PATHS, ids=lambda entry: entry.name)
def test_an_entry_and_its_class_agree(entry: PathEntry) -> None:
    path = path_named(entry.name)
    assert isinstance(path, BackendPath)
    assert type(path).__module__ + ":" + type(path).__name__ == entry.implementation
    assert (path.name, path.entry, path.capabilities) == (entry.name, entry, entry.capabilities)
    assert path.report(object()) is None


def test_a_graph_of_every_kind_has_a_path() -> None:
    assert {kind: path_taking(kind).name for kind in GraphKind} == {
        GraphKind.JOINT: "joint",
        GraphKind.FLAT: "flat",
        GraphKind.FORWARD: "half",
        GraphKind.BACKWARD: "half",
    }


def test_what_a_snapshot_is_planned_for() -> None:
    found = {kind: capabilities_for(kind).name for kind in GraphKind}
    assert found.pop(GraphKind.FLAT) == "a flat graph"
    assert set(found.values()) == {"the joint-graph partitioner"}
    assert capabilities_for(GraphKind.FLAT, "joint").name == "the joint-graph partitioner"


def test_the_commands_and_the_comparison_offer_what_is_registered() -> None:
    assert get_args(PathName) == PLANNED
    assert tuple(STEPS) == COMPARED
    for arguments, offered in ((plan_arguments, PLANNED), (agree_arguments, COMPARED)):
        parser = argparse.ArgumentParser()
        arguments(parser)
        (option,) = (action for action in parser._actions if action.dest == "path")
        assert option.choices == offered


def test_the_register_needs_no_torch() -> None:
    program = "import sys, policylang.planning.capabilities; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_the_page_has_the_table_of_the_register() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


def table() -> str:
    head = ("path", "applied by", "`undecided -> auto`", "recomputed random numbers", "`offload`")
    rows = [(*head, "`fuse`, `collapse`", "[order](order.md)")]
    for path in PATHS:
        can = path.capabilities
        word = "min-cut" if can.undecided == "auto" else str(can.undecided)
        yes = ["yes" if each else "no" for each in (can.replays_random, can.offloads, can.rewrites)]
        order = "yes" if can.orders else "[by FSDP2](order.md#eager-fsdp2)" if can.orders_weights else "no"
        rows.append((f"`{path.name}`", can.name, word, *yes, order))
    first, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join((first, "|---" * len(rows[0]) + "|", *others))


class Noting(BackendPath):
    """A path of somebody's: it counts the nodes."""

    name: ClassVar[str] = "noting"
    noted: ClassVar[list[int]] = []

    def check(self, gm: fx.GraphModule, policy: Policy, facts: Facts) -> None:
        self.noted.append(len(facts))

    def lower(self, gm: fx.GraphModule, plan: Any, seconds: dict[str, float]) -> None:
        gm.meta["noted"] = plan.digest


def test_one_entry_makes_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """``apply`` carries a policy out on it, and ``report`` finds what was done."""
    entry = PathEntry("noting", HALF, f"{__name__}:Noting", (GraphKind.FORWARD,))
    monkeypatch.setattr(capabilities, "PATHS", (entry, *PATHS))
    gm = fx.symbolic_trace(lambda x: x + 1)
    policylang.apply(gm, policylang.parse("optional save mm"))
    assert Noting.noted == [3]
    assert gm.meta["noted"]
    assert policylang.report(gm).policy == "policy"
