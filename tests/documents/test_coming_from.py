"""The right columns of docs/coming-from.md are policies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policylang.language.diagnostics import is_error
from policylang.language.loader import parse_policy

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
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
