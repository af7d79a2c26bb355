"""The documents say what is so: their policies are the bundled ones, their outputs are printed, their links lead on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import policylang

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)


def fenced(page: Path, kind: str) -> list[str]:
    """The fenced blocks of a page whose fence names ``kind``; with "", those that name nothing."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [text for named, text in blocks if named == kind]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    """As the repository's own view of Markdown resolves them; ``test_site.py`` does the same for the site."""
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            missing.append(link)
    assert missing == []


def without_blocks(page: Path) -> str:
    return re.sub(r"^(```+).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchor of each heading: lowercase, without marks and punctuation, with hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("command", ["scripts/demo", "scripts/docs", "scripts/test", ".ci/run"])
def test_the_commands_are_there(command):
    assert os.access(ROOT / command, os.X_OK)


@pytest.mark.parametrize("version", ["", "9.8.7"])
def test_the_tests_run_under_another_torch_in_an_environment_of_its_own(tmp_path, version):
    for name in ("scripts/environment.sh", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / (f".venv-{version}" if version else ".venv") / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nwhile [ $1 != --constraint ]; do shift; done; cat $2\n")
    python.chmod(0o755)
    told = ["bash", "-c", "source scripts/environment.sh; use_environment test"]
    environment = {**os.environ, "POLICYLANG_TORCH": version}
    run = subprocess.run(told, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    pinned = (ROOT / "constraints.txt").read_text()
    assert run.stdout == (re.sub(r"(?m)^torch==.*", f"torch=={version}", pinned) if version else pinned)


def test_ci_runs_the_test_command_of_the_readme():
    assert "./scripts/test " in (ROOT / "README.md").read_text()
    assert 'exec "$(dirname "${BASH_SOURCE[0]}")/../scripts/test" "$@"' in (ROOT / ".ci" / "run").read_text()


def test_the_policy_that_the_tutorial_arrives_at_is_clean():
    assert policylang.check(ROOT / "examples" / "mine.apl").diagnostics == ()


def test_every_policy_of_the_tutorial_loads():
    for text in fenced(ROOT / "docs" / "tutorial.md", "apl"):
        policylang.parse(text)
