"""The wheel works where the checkout is not: it carries the grammar, the policies, the codes' pages and the operator
manifest."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # it may name the checkout
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling", reason="building a wheel needs hatchling, which scripts/test installs")
    out = tmp_path_factory.mktemp("dist")
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out)
    run(*command, cwd=ROOT)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """A new environment with nothing but the wheel, and torch, lark and attrs lent by this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_every_file_that_the_package_reads_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    policies = {f"policylang/policies/{path.name}" for path in (ROOT / "policies").glob("*.apl")}
    assert len(policies) >= 8
    pages = {f"policylang/codes/{path.name}" for path in (ROOT / "docs" / "codes").glob("APL*.md")}
    assert len(pages) >= 140
    assert names >= policies | pages | {"policylang/grammar/apl.lark", "policylang/py.typed"}
    in_package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "policylang").rglob("*")
        if path.suffix in (".py", ".json", ".gz", ".html", ".css", ".js")
    }
    assert names >= in_package
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_the_installed_command_checks_a_bundled_policy(python, tmp_path):
    assert run(python.with_name("policylang"), "check", "llama3_sac", cwd=tmp_path) == "checked 1 file: clean\n"


def test_the_installed_command_lists_the_codes_and_explains_one(python, tmp_path):
    listed = run(python.with_name("policylang"), "explain", cwd=tmp_path).splitlines()
    assert len(listed) == len(list((ROOT / "docs" / "codes").glob("APL*.md")))
    explained = run(python.with_name("policylang"), "explain", "APL301", cwd=tmp_path)
    assert explained.startswith("APL301: matches nothing (error)\n")
    assert explained.endswith("Right:\n\n    optional save mm in encoder.*\n")


def test_the_installed_package_loads_and_plans(python, tmp_path):
    script = """
import torch, policylang
assert "site-packages" in policylang.__file__, policylang.__file__
policy = policylang.load("save_all")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
compiled = torch.compile(model, backend="policylang", options={"policy": "save_all", "inner": "aot_eager"})
compiled(torch.ones(2, 4)).sum().backward()
print(policy.name, policylang.report(compiled).audit.agrees)
"""
    assert run(python, "-c", script, cwd=tmp_path) == "save_all True\n"
