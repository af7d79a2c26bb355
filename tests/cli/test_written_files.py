"""Where commands write: never over what they read, and whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from policylang.graph.snapshot import write
from policylang.language import files
from tests.cli.conftest import Outcome
from tests.cli.test_check_formats import GRAPH
from tests.support.textgraph import facts_of

PROFILE = 'name = "mine"\n[compute]\nfloat32 = 1e12\n[memory]\nbandwidth = 1e12\n'
FILES = {
    "my.apl": 'include "part.apl"\ndevice "d.toml"\nsave mm\n',
    "part.apl": "recompute everything\n",
    "other.apl": "save mm\n",
    "d.toml": PROFILE + '[network.dp]\nranks = 2\ntimes = "t.table"\n',
    "t.table": "kind,bytes\n",
    "own.py": "def graph(): ...\n",
    "r.json": json.dumps({"fields": [], "nodes": []}),
    "pyproject.toml": '[tool.policylang]\ngraph = "project.graph"\n',
}
PLAN = ("plan", "my.apl", "--graph", "g.graph")
TUNE = ("tune", "--graph", "g.graph", "--device", "d.toml", "--peak", "1 GiB")
SAVE_OPS = ("import-torchtitan", "layers.0::aten.mm.default", "--graph", "g.graph")
OVER = {
    "the policy": (*PLAN, "--html", "my.apl"),
    "the graph": (*PLAN, "--html", "g.graph"),
    "an include": (*PLAN, "--html", "./part.apl"),
    "the device of the policy": (*PLAN, "--html", "d.toml"),
    "a table of that": (*PLAN, "--html", "t.table"),
    "a symbolic link": (*PLAN, "--html", "link"),
    "a hard link": (*PLAN, "--html", "hard"),
    "the project": (*PLAN, "--trace", "pyproject.toml"),
    "the project's graph": ("plan", "my.apl", "--html", "project.graph"),
    "the recording": ("import", "r.json", "-o", "r.json"),
    "the graph of tune": (*TUNE, "-o", "g.graph"),
    "the profile of tune": (*TUNE, "-o", "d.toml"),
    "one of two": (*PLAN, "--html", "new.html", "--trace", "g.graph"),
    "the graph of the string": (*SAVE_OPS, "-o", "g.graph"),
    "the module": ("snapshot", "own:graph", "-o", "own.py"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    for name in ("g.graph", "project.graph"):
        write(facts_of(GRAPH), name)
    os.symlink("part.apl", "link")
    os.link("g.graph", "hard")
    return tmp_path


@pytest.mark.parametrize("case", OVER)
def test_an_output_that_is_an_input_is_refused(case: str, here: Path, policylang: Callable[..., Outcome]) -> None:
    before = {each.name: each.read_bytes() for each in here.iterdir()}
    *_, flag, out = arguments = OVER[case]
    outcome = policylang(*arguments)
    assert outcome.code == 2
    assert outcome.err == (
        f"policylang {arguments[0]}: `{flag} {out}` would replace a file that the command reads\n"
        "help: name another file\n"
    )
    assert {each.name: each.read_bytes() for each in here.iterdir()} == before


def test_two_outputs_are_two_files(here: Path, policylang: Callable[..., Outcome]) -> None:
    outcome = policylang(*PLAN, "--html", "new.html", "--trace", "./new.html")
    assert outcome.code == 2
    assert "`new.html` is written by `--html` and by `--trace`" in outcome.err
    assert not Path("new.html").exists()
    Path("one.html").write_text("kept")
    os.link("one.html", "other.html")
    linked = policylang(*PLAN, "--html", "one.html", "--trace", "other.html")
    assert linked.code == 2
    assert "`one.html` is written by `--html` and by `--trace`" in linked.err
    assert Path("one.html").read_text() == "kept"


def test_what_is_not_read_is_replaced(here: Path, policylang: Callable[..., Outcome]) -> None:
    Path("d.toml").write_text(PROFILE, encoding="utf-8")
    Path("old.html").write_text("old", encoding="utf-8")
    assert policylang(*PLAN, "--html", "old.html").code == 0
    assert Path("old.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("run", [(*PLAN, "--html", "out"), (*SAVE_OPS, "-o", "out")])
def test_what_cannot_be_written_whole_is_left(
    run: tuple[str, ...], here: Path, monkeypatch: pytest.MonkeyPatch, policylang: Callable[..., Outcome]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    Path("d.toml").write_text(PROFILE, encoding="utf-8")
    Path("out").write_text("old", encoding="utf-8")
    monkeypatch.setattr(files.os, "replace", full)
    outcome = policylang(*run)
    assert outcome.code == 2
    assert "cannot write `out`: no space left on device" in outcome.err
    assert Path("out").read_text(encoding="utf-8") == "old"
    with pytest.raises(Exception, match="cannot be written: no space left"):
        write(facts_of(GRAPH), "out")
    assert sorted(here.glob(".*")) == []
