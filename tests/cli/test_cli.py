"""The frame: usage, version, help, and what a bug looks like."""

from __future__ import annotations

import json
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from policylang.commands import output
from policylang.commands.cli import COMMANDS
from policylang.commands.output import doing


def test_version(policylang):
    assert policylang("--version").out == f"policylang {version('policylang')}\n"


@pytest.mark.parametrize("arguments", [(), ("chekc",), ("check",), ("check", "a.apl", "--output-format", "xml")])
def test_usage_errors_exit_with_2(policylang, arguments):
    outcome = policylang(*arguments)
    assert outcome.code == 2
    assert outcome.err.startswith("usage: policylang")
    assert outcome.out == ""


def test_help_lists_every_command(policylang):
    outcome = policylang("--help")
    assert outcome.code == 0
    for command in ("check", "explain", "demo"):
        assert f"\n    {command} " in outcome.out


def test_a_bug_in_policylang_says_so(policylang, monkeypatch):
    def broken(*paths, **options):
        raise ZeroDivisionError("the planets are not aligned")

    monkeypatch.setattr("policylang.api.load.check", broken)
    outcome = policylang("check", "any.apl")
    assert outcome.code == 101
    assert outcome.out == ""
    assert "ZeroDivisionError: the planets are not aligned" in outcome.err
    assert outcome.err.endswith(
        "policylang: this is a bug in policylang, not in what you gave it\n"
        "help: please report it with the traceback above and, if you can, the file that caused it\n"
    )


def test_names_that_the_terminal_cannot_show(process, tmp_path):
    path = tmp_path / "naïve.apl"
    path.write_text("save größe\n")
    outcome = process("-m", "policylang", "check", str(path), env={"PYTHONIOENCODING": "ascii"})
    assert outcome.code == 1
    assert "Traceback" not in outcome.err
    assert "APL101" in outcome.out


def test_graphs_and_policies_need_no_torch(process, tmp_path):
    """All commands in one process."""
    shutil.copy(Path(__file__).parents[2] / "docs" / "graphs" / "tutorial.graph", tmp_path / "a.graph")
    (tmp_path / "a.apl").write_text("save matmul, attention\nrecompute every 2nd mm per block\n")
    (tmp_path / "a.md").write_text("```apl graph=a.graph\nsave mm  # matches: 0\n```\n")
    on, device = ("a.apl", "--graph", "a.graph"), ("--device", "h100-sxm")
    commands = [("list",), ("fmt", "a.apl"), ("check", "a.apl"), ("check", *on, *device), ("test", "a.md")]
    commands += [("show", "a.graph", *device), ("plan", *on, *device, "--html", "a.html", "--trace", "a.json")]
    commands += [("diff", "llama3_sac", *on), ("explain", *on, "--rule", "1")]
    script = (
        "import json, sys; from policylang.commands.cli import main; codes = list(map(main, json.loads(sys.argv[1]))); "
        "print(codes, 'torch' in sys.modules, file=sys.stderr)"
    )
    outcome = process("-c", script, json.dumps(commands), cwd=str(tmp_path))
    assert outcome.code == 0, outcome.err
    codes, _, torch = outcome.err.splitlines()[-1].rpartition(" ")
    assert torch == "False"
    assert 2 not in json.loads(codes)
    assert 101 not in json.loads(codes)


def test_alone_it_lists_its_commands(policylang):
    outcome = policylang()
    assert (outcome.code, outcome.out) == (2, "")
    listed = [line.split()[0] for line in outcome.err.splitlines() if line.startswith("  ")]
    assert listed == list(COMMANDS)
    assert max(map(len, outcome.err.splitlines())) <= 80


def test_a_terminal_says_what_takes_long(monkeypatch, capsys):
    with doing("nothing"):
        pass
    assert capsys.readouterr().err == "", "no terminal here"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(output, "_TICK", 0.001)
    with doing("tracing my.models:\x1bllama"):
        time.sleep(0.1)
    shown = capsys.readouterr().err
    assert "\r\x1b[Ktracing my.models:\ufffdllama: 0 s" in shown
    assert shown.endswith("\r\x1b[K"), "it is gone at the end"
