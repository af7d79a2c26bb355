"""What programs and commands print that a page shows whole."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.documents.outputs.pages import ROOT, Shown

DOCS = ROOT / "docs"
_PYTHON = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def programs(page: Path) -> list[str]:
    return _PYTHON.findall(page.read_text(encoding="utf-8"))


@cache
def printed(program: str) -> str:
    """What a program of a page prints in the folder of the examples, where its policy lies."""
    import torch

    torch.compiler.reset()
    out = io.StringIO()
    with contextlib.chdir(ROOT / "examples"), contextlib.redirect_stdout(out):
        exec(program, {})
    return out.getvalue()


def two_paths(shown: Shown) -> str:
    model, compiled, flat = programs(DOCS / "two-paths.md")
    return printed(model + {"compiled": compiled, "flat": flat}[shown.words[1]])


def eager(shown: Shown) -> str:
    (program,) = programs(DOCS / "eager.md")
    return printed(program)


def tutorial_report(shown: Shown) -> str:
    """The tutorial's example is the model of the page about the two paths: one run serves both pages. That the example
    itself prints it is a slow test."""
    model, compiled, _ = programs(DOCS / "two-paths.md")
    return printed(model + compiled)


def command(*words: str, cwd: Path = ROOT) -> str:
    """The standard output of ``policylang …`` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "policylang", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert run.returncode in (0, 1), run.stderr
    return run.stdout


def tutorial_mistake(shown: Shown) -> str:
    """In a process that has no torch."""
    text = (ROOT / "examples" / "mine.apl").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.apl").write_text(text.replace("save attention", "save attenton"))
        return "$ policylang check mine.apl\n" + command("check", "mine.apl", cwd=Path(folder))


def agree(shown: Shown) -> str:
    return command("agree", "llama3_sac")


def demo(shown: Shown) -> str:
    return command("demo", "--steps", "6")


def example() -> str:
    """``examples/train.py`` itself, what it prints behind the losses."""
    run = subprocess.run(
        [sys.executable, "examples/train.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=True,
    )
    return run.stdout[run.stdout.index("policy ") :]


def policy_tests(shown: Shown) -> str:
    from policylang.commands.cli import main

    out = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out):
        main(["test", "docs/policy-tests.md"])
    return f"$ policylang test docs/policy-tests.md\n{out.getvalue()}"


PRODUCERS = {
    "two-paths": two_paths,
    "eager": eager,
    "tutorial-report": tutorial_report,
    "tutorial-mistake": tutorial_mistake,
    "agree": agree,
    "demo": demo,
    "policy-tests": policy_tests,
}
SLOW = ("agree", "demo")
