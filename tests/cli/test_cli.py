"""The frame: usage, version, help, and what a bug looks like."""

from __future__ import annotations

from importlib.metadata import version

import pytest


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

    monkeypatch.setattr("policylang.api.check.check", broken)
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
