"""An audit borrows nothing from those it audits, and they do not decide by it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import policylang

PACKAGE = Path(policylang.__file__).parent
AUDITED = ("policylang.backends", "policylang.tracing", "policylang.simulation")
REPORTS = {"Audit", "partition_report", "plan_report"}
WHO_CALLS_IT = {
    "backends/records.py": {"CodeAudit"},
    "backends/eager/region.py": {"audit_eager"},
    "backends/flat.py": {"audit_flat"},
    "backends/joint.py": {"audit", "audit_copies", "audit_order", "read_halves"},
    "backends/path.py": {"audit_order"},
    "backends/torch_compile/inductor.py": {"CodeAudit"},
}
"""By file what it calls, beside the class of what an audit comes to and the functions that make reports."""


def imports(file: Path) -> set[tuple[str, str]]:
    """Module and name of every import of a file, those within functions included."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", name.name) for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {(name.name, "") for name in node.names}
    return found


def test_it_imports_nothing_that_it_audits() -> None:
    files = sorted((PACKAGE / "audit").glob("*.py"))
    assert len(files) > 3
    for file in files:
        assert not [module for module, _ in imports(file) if module.startswith(AUDITED)], file.name


def test_nothing_that_it_imports_does() -> None:
    modules = [f"policylang.audit.{file.stem}" for file in (PACKAGE / "audit").glob("*.py") if file.stem[0] != "_"]
    program = f"import importlib, sys; [importlib.import_module(name) for name in {modules}]; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [name for name in done.stdout.split() if name.startswith(AUDITED)] == []


def test_backends_call_it_at_the_end_and_take_nothing_else_from_it() -> None:
    found = {
        file.relative_to(PACKAGE).as_posix(): {
            name
            for module, name in imports(file)
            if module.startswith("policylang.audit") and module != "policylang.audit.report"
        }
        - REPORTS
        for file in (PACKAGE / "backends").rglob("*.py")
    }
    assert {file: names for file, names in found.items() if names} == WHO_CALLS_IT
