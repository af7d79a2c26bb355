"""What programs and commands print that a page shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from policylang.commands.cli import main
from tests.documents.outputs.pages import ROOT, Shown

_PYTHON = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"^<!-- file: (\S+) -->\n```[^\n]*\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (?P<words>[^\n]*)$", flags=re.MULTILINE)
_GRAPH = "llama3_8b.graph"
_FIRST, _LAST = 10, 3


# --- programs ---


@cache
def printed(page: str, *blocks: int) -> str:
    """What some blocks of a page, as one program, print in the folder of the examples, where its policy lies."""
    import torch

    torch.compiler.reset()
    programs = _PYTHON.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    out = io.StringIO()
    with contextlib.chdir(ROOT / "examples"), contextlib.redirect_stdout(out):
        exec("".join(programs[at] for at in blocks), {})
    return out.getvalue()


def two_paths(shown: Shown) -> str:
    """The report of the compiled model, and what the report of the flat graph has in place of its lines."""
    compiled, flat = printed("two-paths.md", 0, 1), printed("two-paths.md", 0, 2)
    if shown.words[1] == "compiled":
        return compiled
    return "\n".join(line for line in flat.splitlines() if line not in compiled.splitlines())


def demo(shown: Shown) -> str:
    """What the demo prints behind the report."""
    found = in_process("-m", "policylang", "demo", "--steps", "6")
    return found[found.index("measured on") :]


def in_process(*words: str, cwd: Path = ROOT) -> str:
    """The standard output of Python in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = {"cwd": cwd, "env": environment, "capture_output": True, "text": True, "timeout": 580}
    run = subprocess.run([sys.executable, *words], **options)  # type: ignore[call-overload]
    assert run.returncode in (0, 1), run.stderr
    return str(run.stdout)


def tutorial_mistake(shown: Shown) -> str:
    """In a process that has no torch."""
    text = (ROOT / "examples" / "mine.apl").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.apl").write_text(text.replace("save attention", "save attenton"))
        found = in_process("-m", "policylang", "check", "mine.apl", cwd=Path(folder))
    return f"$ policylang check mine.apl\n{found}"


def example() -> str:
    """``examples/train.py`` itself, what it prints behind the losses."""
    found = in_process("examples/train.py")
    return found[found.index("policy ") :]


# --- commands in this process ---


def _command(*words: str) -> tuple[str, str]:
    """Both outputs of ``policylang …``."""
    out, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
        main(list(words))
    return out.getvalue(), told.getvalue()


def policy_tests(shown: Shown) -> str:
    with contextlib.chdir(ROOT):
        return f"$ policylang test docs/policy-tests.md\n{_command('test', 'docs/policy-tests.md')[0]}"


def console(shown: Shown) -> str:
    """Each command of the block with what it prints; ``console 12`` shows the first 12 lines of each.

    The folder has the files of the page's ``<!-- file: NAME -->`` blocks above, and the snapshots, in ``docs/graphs``.
    """
    most = int(shown.words[1]) if len(shown.words) > 1 else None
    found: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "docs").mkdir()
        (folder / "docs" / "graphs").symlink_to(ROOT / "docs" / "graphs")
        for file, text in _FILE.findall(shown.above):
            (folder / file).write_text(text, encoding="utf-8")
        with contextlib.chdir(folder):
            for match in _COMMAND.finditer(shown.text):
                words = shlex.split(match["words"], comments=True)
                assert words[0] == "policylang"
                lines = _command(*words[1:])[0].rstrip("\n").split("\n")
                kept = lines if most is None or len(lines) <= most else [*lines[:most], "…"]
                found += [f"$ {match['words']}", *kept]
    return "\n".join(found)


@cache
def _tuned(words: tuple[str, ...]) -> str:
    """``policylang tune`` in a folder that has the graph, with both of its outputs; of a policy the text alone."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.symlink(ROOT / "docs" / "graphs" / _GRAPH, _GRAPH)
        out, told = _command("tune", "--graph", _GRAPH, *words)
    return out if out.startswith("#") else "\n".join(filter(None, (out.rstrip(), told.rstrip())))


def tune(shown: Shown) -> str:
    _, given = shown.name.split(maxsplit=1)
    return f"$ policylang tune --graph {_GRAPH} {given}\n{_tuned(tuple(shlex.split(given)))}"


def tune_rows(shown: Shown) -> str:
    """The same with the middle of a long table left out."""
    lines = tune(shown).splitlines()
    left = lines[_FIRST:-_LAST]
    return "\n".join([*lines[:_FIRST], f"… {len(left)} more …", *lines[-_LAST:]])


PRODUCERS = {
    "two-paths": two_paths,
    "eager": lambda shown: printed("eager.md", 0),
    # The tutorial's example is the model of the page about the two paths: one run serves both pages.
    "tutorial-report": lambda shown: printed("two-paths.md", 0, 1),
    "tutorial-mistake": tutorial_mistake,
    "agree": lambda shown: in_process("-m", "policylang", "agree", "llama3_sac"),
    "demo": demo,
    "policy-tests": policy_tests,
    "console": console,
    "tune": tune,
    "tune-rows": tune_rows,
}
SLOW = {"agree", "architectures", "demo", "tune", "tune-rows"}
"""First words of outputs that take more than a second or two."""
