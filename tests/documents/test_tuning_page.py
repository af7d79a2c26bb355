"""The workflow of the page about tuning, step by step on a small graph."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import policylang
from policylang.commands.cli import main
from tests.support.tuned import written

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
WORKFLOW = (ROOT / "examples" / "tuned-policy.yml").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:        run: |          )(policylang [^\n>]*)", WORKFLOW, flags=re.MULTILINE)


def test_the_page_shows_the_steps_of_the_workflow():
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert WORKFLOW.endswith(shown)
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(WORKFLOW)["jobs"]["tuned"]["steps"][-1]["name"] == "it is what tuning gives today"


def test_the_workflow_passes_until_the_policy_is_another(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "model.graph")
    Path("policies").mkdir()
    tuned = policylang.tune("model.graph", peak="75 GiB", device="h100-sxm", optimizer="adamw", reserve="5%")
    path = tuned.save("policies/model_75g.apl")
    assert [words[1] for words in map(shlex.split, COMMANDS)] == ["check", "tune", "diff"]
    assert [main(shlex.split(command)[1:]) for command in COMMANDS] == [0, 0, 0]
    path.write_text("recompute everything in block\nundecided -> save\nexpect peak <= 300 MiB\n")
    assert [main(shlex.split(command)[1:]) for command in COMMANDS] == [1, 0, 1]
    assert "expect peak" in capsys.readouterr().out
