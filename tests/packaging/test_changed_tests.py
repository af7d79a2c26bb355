"""``scripts/test --changed``: which test files a change can break."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grimp", reason="import-linter brings it, with the extra dev")

ROOT = Path(__file__).resolve().parents[2]
PRINT = """
import sys
sys.path.insert(0, "scripts")
import changed_tests
graph = changed_tests.import_graph()
changed_tests.import_graph = lambda: graph
for change in sys.argv[1:]:
    print(*changed_tests.tests_of({change} if change else set()))
"""


@pytest.mark.slow
def test_a_change_runs_what_imports_it() -> None:
    changes = ["policylang/language/syntax.py", "policylang/editor/server.py", "docs/faq.md", "policies/fsdp.apl", ""]
    done = subprocess.run(
        [sys.executable, "-c", PRINT, *changes], cwd=ROOT, text=True, capture_output=True, check=True, timeout=300
    )
    syntax, editor, page, policy, nothing = (set(line.split()) for line in done.stdout.split("\n")[:-1])
    assert {
        "tests/language/test_formatter.py",
        "tests/planning/test_planner.py",
        "tests/editor/test_server.py",
    } <= syntax
    assert "tests/editor/test_server.py" in editor
    assert not {"tests/language/test_formatter.py", "tests/planning/test_planner.py"} & editor
    assert "tests/documents/test_python_blocks.py" in page
    assert not any(each.startswith("tests/planning") for each in page)
    assert policy == {"tests"}
    assert not nothing
