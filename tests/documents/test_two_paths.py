"""The page about the two paths shows the example's policy, and its rules come to the same on both.

That its programs print what the page shows is asked in ``test_outputs.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "two-paths.md").read_text(encoding="utf-8")
REPORTS = re.findall(r"^```\n(policy .*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_the_policy_of_the_page_is_the_example():
    (shown,) = re.findall(r"^```apl\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert (ROOT / "examples" / "mine.apl").read_text(encoding="utf-8").endswith(shown)


def test_the_rules_come_to_the_same_on_both_paths():
    rules = [[line for line in report.splitlines() if line.startswith("mine.apl:")] for report in REPORTS]
    assert rules[0] == rules[1]
    assert len(rules[0]) == 5
