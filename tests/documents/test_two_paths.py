"""The page about the two paths prints what it says: its programs are run as they stand there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "two-paths.md").read_text(encoding="utf-8")
MODEL, COMPILED, FLAT = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
REPORTS = re.findall(r"^```\n(policy .*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def printed(program: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(MODEL + program, {})
    return out.getvalue()


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page shows the figures of torch 2.13")
@pytest.mark.parametrize(
    ("program", "report"), list(zip((COMPILED, FLAT), REPORTS, strict=True)), ids=["compiled", "flat"]
)
def test_a_program_of_the_page_prints_its_report(program, report, monkeypatch):
    monkeypatch.chdir(ROOT / "examples")
    torch.compiler.reset()
    assert printed(program) == report


def test_the_policy_of_the_page_is_the_example():
    (shown,) = re.findall(r"^```apl\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert (ROOT / "examples" / "mine.apl").read_text(encoding="utf-8").endswith(shown)


def test_the_rules_come_to_the_same_on_both_paths():
    rules = [[line for line in report.splitlines() if line.startswith("mine.apl:")] for report in REPORTS]
    assert rules[0] == rules[1]
    assert len(rules[0]) == 5
