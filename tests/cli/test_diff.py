"""`policylang diff`: what a changed policy changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policylang.graph.snapshot import write
from tests.support.textgraph import facts_of

BLOCKS = 4
GRAPH = "\n".join(
    [
        "%w = parameter",
        "%y = input",
        *(
            f"%mm_{n} = aten.mm.default(%{'y' if not n else f'sin_{n - 1}'}, %w) layers.{n} bytes=1024 flops=100\n"
            f"%sin_{n} = aten.sin.default(%mm_{n}) layers.{n} bytes=512 flops=7"
            for n in range(BLOCKS)
        ),
        "---",
        f"%b = aten.mul.Tensor(%sin_{BLOCKS - 1}, %mm_0)",
        *(f"%b_{n} = aten.mul.Tensor(%b, %mm_{n}, %sin_{n})" for n in range(BLOCKS)),
        f"output(%sin_{BLOCKS - 1}, %b)",
    ]
)
OLD = "blocks layers.*\nrecompute everything\nsave mm\n"


@pytest.fixture
def diff(policylang, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(facts_of(GRAPH), "g.graph")

    def run(old: str, new: str, *more: str):
        Path("old.apl").write_text(old)
        Path("new.apl").write_text(new)
        return policylang("diff", "old.apl", "new.apl", "--graph", "g.graph", *more)

    return run


def test_a_refactor_that_changes_nothing(diff):
    outcome = diff(OLD, "blocks layers.*\nlet products = mm\nsave products\nrecompute everything except mm\n")
    assert outcome.code == 0
    assert outcome.out.startswith("no decision changes: 8 decisions are the same\n")


def test_what_changes_by_rule_and_block(diff):
    outcome = diff(OLD, OLD + "recompute mm in every 2nd block\n")
    assert outcome.code == 1
    assert outcome.out.startswith("2 of 8 decisions change\n\n2: ")
    assert "save -> recompute, 1 each in layers.1 and 1 more block" in outcome.out
    assert "  before  old.apl:3: save mm\n  after   new.apl:4: recompute mm in every 2nd block\n" in outcome.out
    assert "  nodes   mm_1, mm_3\n" in outcome.out


def test_expectations_before_and_after(diff):
    old, new = (
        OLD + "expect saved <= 4 KiB\n",
        OLD + "recompute mm in layers.0\nexpect saved <= 4 KiB\nexpect peak <= 1 B\n",
    )
    lines = [" ".join(line.split()) for line in diff(old, new).out.splitlines()]
    at = lines.index("expectation before after")
    assert lines[at + 1] == "saved <= 4 KiB holds: 4 KiB holds: 3 KiB"
    assert lines[at + 2].startswith("peak <= 1 B does not hold: ")
    assert "| `saved <= 4 KiB` | holds: 4 KiB | holds: 3 KiB |" in diff(old, new, "--output-format", "markdown").out
    found = json.loads(diff(old, new, "--output-format", "json").out)
    assert [each["status"] for each in found["new"]["expectations"]] == ["held", "failed"]
    assert "expectation" not in diff(OLD, OLD).out


def test_the_standard_input_is_one_of_the_two(policylang, diff, standard_input):
    diff(OLD, OLD)
    standard_input(OLD + "recompute mm in every 2nd block\n")
    outcome = policylang("diff", "old.apl", "-", "--graph", "g.graph")
    assert outcome.code == 1
    assert "  after   <stdin>:4: recompute mm in every 2nd block\n" in outcome.out
    twice = policylang("diff", "-", "-", "--graph", "g.graph")
    assert (twice.code, twice.out) == (2, "")
    assert "can be read once" in twice.err


def test_as_a_path_decides(diff):
    """What a block hands on is kept by eager checkpoints whatever a rule says."""
    changes = "recompute sin\nsave sin\n", "recompute sin\n"
    assert diff(*changes).out.startswith("4 of 8 decisions change")
    assert diff(*changes, "--path", "eager").out.startswith("1 of 8 decisions change")


def test_what_it_comes_to(diff):
    outcome = diff(OLD, OLD + "recompute mm in every 2nd block\n", "--output-format", "json")
    found = json.loads(outcome.out)
    assert (found["same"], found["changed"], found["decisions"]) == (False, 2, 8)
    assert (found["old"]["saved_bytes"], found["new"]["saved_bytes"]) == (4 * 1024, 2 * 1024)
    assert found["new"]["recomputed_flops"] - found["old"]["recomputed_flops"] == 200
    assert found["old"]["peak_bytes"] > 0
    (change,) = found["changes"]
    assert change["names"] == ["mm_1", "mm_3"]
    assert change["blocks"] == {"layers.1": 1, "layers.3": 1}


def test_markdown_for_a_review(diff):
    outcome = diff(OLD, OLD + "save sin\n", "--output-format", "markdown")
    assert outcome.code == 1
    lines = outcome.out.splitlines()
    assert lines[0] == "**4 of 8 decisions change**"
    assert lines[-1] == (
        "| 4 | **recompute** old.apl:2 `recompute everything` | **save** new.apl:4 `save sin` "
        "| 1 each in layers.0 and 3 more blocks |"
    )
    assert "| saved | 4 KiB | 6 KiB | +2 KiB |" in lines


def test_what_is_left_to_the_partitioner_is_said(diff):
    outcome = diff("save mm\n", "save sin\n")
    assert "before and after: without what is left to PyTorch's partitioner" in outcome.out
    assert "after   undecided -> auto" in outcome.out


def test_a_policy_that_does_not_fit_the_graph_is_compared_with_a_warning(diff):
    outcome = diff(OLD, OLD + "save bmm\n")
    assert outcome.code == 0
    assert outcome.err == "warning: `new.apl` has an error on this graph; `policylang check` lists them\n"


def test_a_policy_that_cannot_be_read(diff):
    outcome = diff(OLD, "save mmm\n")
    assert outcome.code == 1
    assert "error[APL101]" in outcome.err
