"""Reports and plans at a prompt and in a metrics logger."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

from attrs import evolve

import policylang
from policylang.audit.outcome import combined
from policylang.audit.report import AuditReport, Report, RuleReport, ValuesReport
from policylang.language.diagnostics import Source
from policylang.planning.capabilities import capabilities_for
from policylang.planning.planner import plan
from tests.support.textgraph import CHAIN, facts_of

REPORT = Report(
    policy="mine",
    forward_nodes=675,
    blocks=8,
    rules=(
        RuleReport("dir/mine.apl:3", "save mm where bytes < 2 MiB", 8, 8, 0, saved_bytes=8 << 20),
        RuleReport("dir/mine.apl:4", "recompute <b>everything</b>", 4, 4, 0, recomputed_flops=3_900_000_000),
    ),
    saved=ValuesReport(("a", "b"), 8 << 20),
    recomputed=ValuesReport(("c",), 1 << 20, 3_900_000_000),
    forward_flops=15_600_000_000,
    undecided=2,
    undecided_saved_bytes=0,
    uncounted={"mylib.fused.default": 2},
    audit=AuditReport(True),
    digest="0" * 64,
)


def test_a_report_at_a_prompt_is_one_line() -> None:
    assert repr(REPORT) == "<policylang.Report mine: 675 forward values, 8 MiB saved, 1 MiB recomputed, audit agrees>"
    both = combined([REPORT, evolve(REPORT, audit=AuditReport(False, ("a difference",)))])
    assert repr(both).startswith("<policylang.Report mine: 2 graphs, 1,350 forward values, 16 MiB saved")
    assert repr(both).endswith("audit DIFFERS>")
    assert repr(Report("p")) == "<policylang.Report p: 0 forward values, no audit>"


def test_a_plan_at_a_prompt_is_one_line() -> None:
    facts = facts_of(CHAIN)
    planned = plan(policylang.parse("recompute everything"), facts, capabilities_for(facts.kind))
    assert repr(planned).startswith("<policylang.Plan: policy policy on a joint graph of 10 nodes: 4 forward values")


def test_facts_and_the_result_of_a_check_at_a_prompt_are_one_line() -> None:
    assert repr(facts_of(CHAIN)).startswith("<policylang.Facts: joint graph of 10 nodes, torch ")
    found = policylang.check(policylang.parse("recompute everything"), Source("more.apl", "save attenton"))
    assert repr(found) == "<policylang.CheckResult: 2 files, 1 error, 0 warnings>"
    assert str(found).startswith("error[APL101]: there is no operator, group or name `attenton`\n --> more.apl:1:6\n")
    assert str(found).endswith(f"\n\n{found!r}")


def test_scalars_for_a_metrics_logger() -> None:
    found = REPORT.scalars()
    assert all(name.startswith("policylang/") for name in found)
    assert all(type(value) in (int, float) for value in found.values())
    assert found["policylang/saved_bytes"] == 8 << 20
    assert found["policylang/recomputed_share"] == 0.25
    assert found["policylang/uncounted_calls"] == 2
    assert found["policylang/audit_differences"] == 0
    both = combined([REPORT, REPORT]).scalars(prefix="train/")
    assert both["train/saved_bytes"] == 2 * (8 << 20)
    assert both["train/recomputed_share"] == 0.25
    assert (both["train/graphs"], both["train/blocks"]) == (2, 16)
    assert "policylang/saved_bytes" not in Report("p").scalars()  # not known before a partition


def test_the_version_is_that_of_the_package_and_needs_no_torch() -> None:
    assert policylang.__version__ == version("policylang")
    assert "__version__" in dir(policylang)
    code = "import sys, policylang; policylang.__version__; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
