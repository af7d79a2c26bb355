"""The benchmark of the language server: its texts are what they are taken for, and a short run measures all it says."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

from benchmarks import lsp
from policylang.language.loader import parse_policy

GRAPH = Path(__file__).resolve().parents[2] / "docs" / "graphs" / "tutorial.graph"


def test_the_policy_has_a_hundred_lines_and_all_edits_but_each_fifth_can_be_planned() -> None:
    text = lsp.policy_text()
    assert text.count("\n") == lsp.LINES
    found = [parse_policy(each).policy is not None for each in islice(lsp.policy_edits(text), 20)]
    assert found == [at % 5 != 3 for at in range(20)]


def test_of_a_hundred_values_the_ninety_fifth() -> None:
    found = lsp.row("it", [float(each) for each in range(100, 0, -1)], graph="g")
    assert found == {"graph": "g", "what": "it", "times": 100, "p50 ms": 50.5, "p95 ms": 96.0, "max ms": 100.0}


@pytest.mark.slow
def test_a_short_run(tmp_path) -> None:
    found = lsp.measure({"small": (GRAPH, 984)}, 8, tmp_path)
    assert {row["what"] for row in found["rows"]} >= {"diagnostics of the text", "hover", "completion"}
    assert all(
        0 < row["p50 ms"] <= row["p95 ms"] <= row["max ms"] for row in found["rows"] if "less" not in row["what"]
    )
    assert found["memory"][0]["most MiB"] >= found["memory"][0]["now MiB"] > 10
    assert all(row["ours / peer"] > 0 for row in found["peers"])
