"""The wheel works where the checkout is not: it carries the grammar, the policies, the codes' pages and the operator
manifest."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, lent: bool = False) -> str:
    """``lent``: with torch and what else is installed here."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # may name the checkout
    if lent:
        environment["PYTHONPATH"] = sysconfig.get_path("purelib")
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """What `python -m build` makes: the sdist, and the wheel out of the sdist."""
    pytest.importorskip("build", reason="scripts/test installs it")
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    (built,) = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel, lark and attrs, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in ("lark", "attr", "attrs"):
        package = Path(importlib.util.find_spec(name).origin).parent
        shutil.copytree(package, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    return python


def test_both_are_fit_for_an_index(dist):
    pytest.importorskip("twine", reason="scripts/test installs it")
    said = run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()), cwd=dist)
    assert said.count("PASSED") == 2


def test_the_sdist_has_what_its_wheel_and_its_tests_are_made_of_and_nothing_else(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    if not tracked:
        pytest.skip("this is no checkout")
    here = {name for name in names if (ROOT / name).is_file()}
    assert names - here == {"PKG-INFO"}
    assert {name for name in here - set(tracked) if "/" not in name} == set()  # what lies about in the checkout
    left_out = {name for name in tracked if (ROOT / name).is_file() and not name.startswith(".github/")} - names
    assert left_out == {".gitattributes"}
    made = re.compile(r"(^|/)(\.venv|build|dist|\.git|__pycache__|\.\w+_cache)(/|$)")
    assert not [name for name in names if made.search(name)]


def test_every_file_that_the_package_reads_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    policies = {f"policylang/policies/{path.name}" for path in (ROOT / "policies").glob("*.apl")}
    assert len(policies) >= 8
    pages = {f"policylang/codes/{path.name}" for path in (ROOT / "docs" / "codes").glob("APL*.md")}
    assert len(pages) >= 140
    devices = {f"policylang/devices/{path.name}" for path in (ROOT / "devices").glob("*.toml")}
    assert len(devices) >= 6
    assert names >= policies | pages | devices | {"policylang/grammar/apl.lark", "policylang/py.typed"}
    in_package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "policylang").rglob("*")
        if path.suffix in (".py", ".json", ".gz", ".html", ".css", ".js")
    }
    assert names >= in_package
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_the_wheel_out_of_the_sdist_holds_the_files_of_the_checkout_as_they_are(wheel):
    beside = {"grammar": "grammar", "policies": "policies", "devices": "devices", "codes": "docs/codes"}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            package, _, rest = name.partition("/")
            folder, _, file = rest.partition("/")
            source = ROOT / beside[folder] / file if folder in beside else ROOT / name
            assert package.endswith(".dist-info") or archive.read(name) == source.read_bytes(), name


def test_it_checks_a_policy_in_an_environment_with_nothing_else(bare, tmp_path):
    command = bare.with_name("policylang")
    (tmp_path / "mine.apl").write_text("include <fsdp>\nsave attention\n")
    assert run(command, "check", "llama3_sac", "mine.apl", cwd=tmp_path) == "checked 2 files: clean\n"
    assert run(bare, "-c", "import importlib.util as u; print(u.find_spec('torch'))", cwd=tmp_path) == "None\n"
    listed = run(command, "explain", cwd=tmp_path).splitlines()
    assert len(listed) == len(list((ROOT / "docs" / "codes").glob("APL*.md")))


def test_what_an_extra_brings_is_asked_for_by_its_name(bare, tmp_path):
    command = [bare.with_name("policylang"), "lsp"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert said.returncode == 2
    assert said.stderr.endswith("pip install pygls\n")
    asked = run(bare, "-c", "import importlib.metadata as m; print(*m.requires('policylang'), sep='|')", cwd=tmp_path)
    assert [each.split(">")[0] for each in asked.split("|") if re.search(r"extra == .lsp.", each)] == ["pygls"]


def test_pygments_finds_the_lexer_of_the_installed_package(bare, tmp_path):
    pytest.importorskip("pygments")
    (tmp_path / "mine.apl").write_text("save attention  # worth it\n")
    script = """
from pygments.lexers import get_lexer_by_name, guess_lexer_for_filename
text = open("mine.apl").read()
lexer = get_lexer_by_name("policylang")
print([str(kind) for kind, value in lexer.get_tokens(text) if value.strip()])
print(guess_lexer_for_filename("mine.apl", text).name)
"""
    kinds = "['Token.Keyword', 'Token.Name.Builtin', 'Token.Comment.Single']"
    assert run(bare, "-c", script, cwd=tmp_path, lent=True) == f"{kinds}\nAPL policy language\n"


@pytest.mark.slow
def test_the_wheel_is_installed_with_what_it_asks_for(wheel, tmp_path):
    """As a user does: into an empty environment, with torch and the rest from the index under the constraints."""
    venv.create(tmp_path / "new")
    python = tmp_path / "new" / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "-c", ROOT / "constraints.txt")
    run(*install, "--retries", "1", "--timeout", "60", wheel, cwd=tmp_path)
    assert run(python.with_name("policylang"), "check", "llama3_sac", cwd=tmp_path) == "checked 1 file: clean\n"
    said = run(
        python, "-c", "import torch, policylang; print(policylang.backend('llama3_sac').policy.name)", cwd=tmp_path
    )
    assert said == "llama3_sac\n"


@pytest.mark.slow
def test_the_installed_package_makes_a_backend(bare, tmp_path):
    script = """
import torch, policylang
assert "site-packages" in policylang.__file__, policylang.__file__
policy = policylang.load("save_all")
print(policylang.backend(policy).policy.name)
"""
    assert run(bare, "-c", script, cwd=tmp_path, lent=True) == "save_all\n"
