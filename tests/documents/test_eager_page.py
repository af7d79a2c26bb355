"""The rules of the page about eager checkpoints come to what they do on the other paths.

That its program prints what the page shows is asked in ``test_outputs.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "eager.md").read_text(encoding="utf-8")
OTHER = (ROOT / "docs" / "two-paths.md").read_text(encoding="utf-8")
(REPORT,) = re.findall(r"^```\n(policy .*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_save_rules_save_the_same_bytes_as_on_the_other_paths():
    def saved(page: str) -> set[str]:
        return set(re.findall(r"^mine\.apl:\d+ +save (?:attention|matmul) .*$", page, flags=re.MULTILINE))

    assert saved(REPORT) == saved(OTHER)
    assert len(saved(REPORT)) == 2
