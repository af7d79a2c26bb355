"""The page about eager checkpoints prints what it says, and its rules come to what they do on the other paths."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "eager.md").read_text(encoding="utf-8")
OTHER = (ROOT / "docs" / "two-paths.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
(REPORT,) = re.findall(r"^```\n(policy .*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page shows the figures of torch 2.13")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_program_of_the_page_prints_its_report(monkeypatch):
    monkeypatch.chdir(ROOT / "examples")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(PROGRAM, {})
    assert out.getvalue() == REPORT


def test_save_rules_save_the_same_bytes_as_on_the_other_paths():
    def saved(page: str) -> set[str]:
        return set(re.findall(r"^mine\.apl:\d+ +save (?:attention|matmul) .*$", page, flags=re.MULTILINE))

    assert saved(REPORT) == saved(OTHER)
    assert len(saved(REPORT)) == 2
