"""docs/coming-from.md: its right columns are policies, and those of its script recompute what the settings do."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from policylang.language.diagnostics import is_error
from policylang.language.loader import parse_policy

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
OPENERS = "save|recompute|offload|must_save|must_recompute|prefer_save|include|undecided|prefetch|delay"
LINES = [
    line
    for row in re.findall(r"^\| .* \| (.*) \|$", PAGE, flags=re.MULTILINE)
    for line in re.findall(rf"`((?:{OPENERS}) [^`]*)`", row)
]


def test_there_are_many() -> None:
    assert len(LINES) > 40


@pytest.mark.parametrize("line", sorted(set(LINES)))
def test_a_line_is_a_policy(line: str) -> None:
    assert [found.message for found in parse_policy(line).diagnostics if is_error(found)] == []


NAMES = ("torch", "accelerate", "transformers", "trl", "lightning")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_a_framework_with_its_setting_and_with_the_lines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same FLOPs, so the same is recomputed, and the same weights to the last bit."""
    pytest.importorskip(name)
    if name == "trl":
        pytest.importorskip("datasets")
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    example = importlib.import_module("coming_from")
    assert set(example.FRAMEWORKS) == set(NAMES)
    plain = example.trained(example.nothing, example.by_hand, False)[0]
    for what, setting, lines, train in example.FRAMEWORKS[name]:
        own, ours, equal = example.compared(setting, lines, train)
        assert own == ours, what
        assert ours > plain * 1.05, "something is recomputed"
        assert equal, what
        assert set(lines.split("; ")) - set("; ".join(LINES).split("; ")) <= {"save attention in block"}
