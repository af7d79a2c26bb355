"""The frame of all commands: usage, a project's settings, full streams, what is written where and how wide, and that
what stands in a graph reaches nobody as anything but text."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent
from unittest.mock import Mock

import pytest

import policylang as library
from policylang.api.load import ProjectSettings, project_settings
from policylang.commands import output
from policylang.commands.cli import COMMANDS
from policylang.commands.output import doing, text_width
from policylang.errors import PolicyGraphError
from policylang.graph import snapshot
from policylang.graph.snapshot import load
from policylang.graph.snapshot import write as write_graph
from policylang.language import files
from policylang.report.diagnostics import RENDERERS
from policylang.report.rendering import columns, fit, fitted, table
from tests.cli.conftest import Outcome
from tests.cli.test_check import TAGGED as SMALL
from tests.cli.test_plan import GRAPH as NARROW_GRAPH
from tests.support.drawn import slow
from tests.support.hostile import hostile_graph, raw_in
from tests.support.textgraph import facts_of


def test_version_and_help(policylang):
    assert policylang("--version").out == f"policylang {version('policylang')}\n"
    outcome = policylang("--help")
    assert outcome.code == 0
    for command in ("check", "explain", "demo"):
        assert f"\n    {command} " in outcome.out


@pytest.mark.parametrize("arguments", [(), ("chekc",), ("check",), ("check", "a.apl", "--output-format", "xml")])
def test_usage_errors_exit_with_2(policylang, arguments):
    outcome = policylang(*arguments)
    assert outcome.code == 2
    assert outcome.err.startswith("usage: policylang")
    assert outcome.out == ""


def test_a_bug_in_policylang_says_so(policylang, monkeypatch):
    broken = ZeroDivisionError("the planets are not aligned")
    monkeypatch.setattr("policylang.api.load.check", Mock(side_effect=broken))
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


FULL = "policylang: the output cannot be written: no space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("command", "code", "err"),
    [
        ("list > /dev/full", 2, FULL),
        slow("--version > /dev/full", 2, FULL),
        ("show nowhere.graph 2> /dev/full", 2, ""),
        ("list >&-", 2, "policylang: the standard output is closed\n"),
        slow("check llama3_sac 2>&-", 0, ""),
        slow("check - <&-", 0, ""),
    ],
)
def test_a_stream_that_is_full_or_closed(command: str, code: int, err: str) -> None:
    command = f"{sys.executable} -m policylang {command}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (code, err)


GRAPHS = Path(__file__).resolve().parents[2] / "docs" / "graphs"
POLICY = "recompute everything in block\nsave (attention, everything where crosses block) in block\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a snapshot and a policy; the current folder is a folder in it."""
    (tmp_path / "graphs").mkdir()
    (tmp_path / "train").mkdir()
    shutil.copy(GRAPHS / "tutorial.graph", tmp_path / "graphs" / "small.graph")
    (tmp_path / "train" / "mine.apl").write_text(POLICY)
    (tmp_path / "pyproject.toml").write_text('[tool.policylang]\ngraph = "graphs/small.graph"\npath = "joint"\n')
    monkeypatch.chdir(tmp_path / "train")
    return tmp_path


def write(folder: Path, text: str | bytes) -> None:
    content = text if isinstance(text, bytes) else dedent(text).encode()
    (folder / "pyproject.toml").write_bytes(content)


def said(folder: Path) -> list[str]:
    """``2:9 APL647 message`` of each problem with settings, as seen from a folder."""
    _, found = project_settings(folder)
    return [f"{d.span.line}:{d.span.column} {d.code} {d.message}{f'; {d.help}' if d.help else ''}" for d in found]


def test_the_nearest_file_with_the_table_counts(tmp_path):
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    write(tmp_path, '[tool.policylang]\ngraph = "x.graph"')
    write(tmp_path / "a" / "b", '[project]\nname = "policylang-user"')
    assert project_settings(deep)[0].graph == str(tmp_path / "x.graph")
    write(tmp_path / "a", "[tool.policylang]")
    assert project_settings(deep)[0] == ProjectSettings(file=tmp_path / "a" / "pyproject.toml")
    write(tmp_path / "a", '[tool]\npolicylang = {path = "eager", device = "h100"}')
    found, problems = project_settings(deep)
    assert (found.graph, found.path, found.device, problems) == (None, "eager", "h100", ())


def test_files_are_relative_to_the_folder_of_the_file(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "our.toml").write_text("")
    write(tmp_path, '[tool.policylang]\ngraph = "../x.graph"\ndevice = "our.toml"')
    found, problems = project_settings(tmp_path / "in")
    assert not problems
    assert (found.graph, found.device) == (str(tmp_path.parent / "x.graph"), str(tmp_path / "our.toml"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('graphs = "a"', "2:1 APL646 `graphs` means nothing in `[tool.policylang]`; did you mean `graph`?"),
        ("colour = 1", "2:1 APL646 `colour` means nothing in `[tool.policylang]`; there are `graph`, `path`, `device`"),
        ('path = "jiont"', "2:8 APL647 there is no path `jiont`; did you mean `joint`?"),
        ('device = "h1000"', "2:10 APL647 there is no device profile `h1000`; did you mean `h100-sxm`?"),
        ('device = "no.toml"', "2:10 APL647 there is no device profile `no.toml`; bundled are"),
        ("graph = 3", "2:9 APL647 `graph` is a number, and should be the path of a snapshot"),
        ('graph = ["a", "b"]', "2:9 APL647 `graph` is a list, and should be"),
        ('graph = " "', "2:9 APL647 `graph` is empty, and should be"),
        ('graph = "a\\u0000b"', "2:9 APL647 `graph` has a NUL, and should be"),
        ("path = 2026-11-22", "2:8 APL647 `path` is a date or a time, and should be"),
        ("graph = {a = 1}", "2:9 APL647 `graph` is a table"),
        ('graph = "a', "2:11 APL645 the file is not TOML: "),
        ('graph = "a"\ngraph = "b"', "3:12 APL645 the file is not TOML: cannot overwrite a value"),
        ("graph = " + "[" * 5000, "1:1 APL645 the file nests lists or tables too deep"),
        ("graph = " + "9" * 5000, "1:1 APL645 the file is not TOML: a number has too many digits"),
    ],
)
def test_what_is_wrong_is_said_at_its_place(tmp_path, text, expected):
    write(tmp_path, f"[tool.policylang]\n{text}")
    (found,) = said(tmp_path)
    assert found.startswith(expected)


def test_other_texts_that_are_no_settings(tmp_path):
    write(tmp_path, "[tool]\npolicylang = 3")
    assert said(tmp_path) == [
        "2:1 APL647 `policylang` is a number, and should be a table; "
        "write `[tool.policylang]`, and below it the settings"
    ]
    write(tmp_path, 'tool = "policylang"')
    assert said(tmp_path) == []
    write(tmp_path, b'[tool.policylang]\r\ngraph = "\xe9t\xe9.graph"\r\n')
    assert said(tmp_path) == ["2:10 APL645 the file is not text: byte 0xe9 is not UTF-8; TOML is UTF-8 text"]
    write(tmp_path, "[tool.policylang]\r\n".encode("utf-16"))  # as some shells write it
    assert said(tmp_path) == ["1:1 APL645 the file is not text: byte 0xff is not UTF-8; TOML is UTF-8 text"]
    write(tmp_path, b'\xef\xbb\xbf[tool.policylang]\r\ngraphs = "\xf0\x9f\x98\x80"\r\n')
    assert said(tmp_path) == ["2:1 APL646 `graphs` means nothing in `[tool.policylang]`; did you mean `graph`?"]
    write(tmp_path, "[project\nthis is not TOML and says nothing of the table")
    assert said(tmp_path) == []
    (tmp_path / "pyproject.toml").unlink()
    (tmp_path / "pyproject.toml").mkdir()
    assert said(tmp_path) == []


def test_several_mistakes_are_all_said_and_the_rest_still_counts(tmp_path):
    write(tmp_path, '[tool.policylang]\ndevice = 1\ngraph = "a.graph"\nfast = true\n')
    assert [each.split()[1] for each in said(tmp_path)] == ["APL647", "APL646"]
    assert project_settings(tmp_path)[0].graph == str(tmp_path / "a.graph")


def test_check_plans_on_the_graph_of_the_project_and_says_so(project, policylang):
    done = policylang("check", ".")
    taken = "(graph ../graphs/small.graph and path joint from ../pyproject.toml)"
    assert (done.code, done.err) == (0, "")
    assert done.out == f"checked 1 file on 1 graph {taken}: clean\n"
    (project / "train" / "mine.apl").write_text("save topk in block\n")
    done = policylang("check", "mine.apl")
    assert done.code == 1
    assert "`save topk in block` matches nothing in this graph" in done.out
    done = policylang("check", "mine.apl", "--output-format", "json")
    assert json.loads(done.out)["diagnostics"][0]["code"] == "APL301"
    assert done.err == f"policylang check: {taken.strip('()')}\n"


def test_what_is_given_wins_and_the_project_can_be_left_out(project, policylang):
    done = policylang("check", "mine.apl", "--graph", str(GRAPHS / "gpt2.graph"), "--path", "flat")
    assert done.out == "checked 1 file on 1 graph: clean\n"
    assert policylang("check", "mine.apl", "--no-project").out == "checked 1 file: clean\n"
    done = policylang("plan", "mine.apl", "--no-project")
    assert done.code == 2
    assert "no graph is given\nhelp: name one with `--graph GRAPH`, or in pyproject.toml" in done.err
    assert library.check("mine.apl").graphs == (), "from Python nothing is taken"


def test_a_graph_of_the_project_that_is_not_there(project, policylang):
    (project / "graphs" / "small.graph").unlink()
    done = policylang("check", "mine.apl")
    assert done.code == 2
    assert "error[APL355]: `../graphs/small.graph` cannot be read: no such file" in done.out
    assert "named here\n    --> ../pyproject.toml:2:9" in done.out
    for command in (["plan", "mine.apl"], ["diff", "mine.apl", "mine.apl"], ["show"]):
        done = policylang(*command)
        assert done.code == 2
        assert "../pyproject.toml:2:9" in done.out + done.err


def test_other_commands_take_the_settings_and_say_so(project, policylang):
    write(project, '[tool.policylang]\ngraph = "graphs/small.graph"\ndevice = "./our.toml"\n')
    ours = '[compute]\nfloat32 = 1e12\nbfloat16 = 2e12\n[memory]\nbandwidth = 1e12\ncapacity = "8 GiB"\n'
    (project / "our.toml").write_text(ours)
    said = "graph ../graphs/small.graph and device ../our.toml from ../pyproject.toml\n"
    shown = {
        "plan": (["mine.apl"], "step time"),
        "diff": (["mine.apl", "mine.apl"], "no decision changes"),
        "explain": (["mine.apl", "--rule", "2"], "save (attention, everything where crosses block) in block"),
        "show": ([], "../graphs/small.graph: "),
    }
    for command, (arguments, text) in shown.items():
        done = policylang(command, *arguments)
        assert done.err.startswith(f"policylang {command}: {said}")
        assert (done.code, text in done.out) == (0, True), command
    assert policylang("explain", "APL301").err == ""
    assert policylang("tune", "--peak", "none").err.startswith(f"policylang tune: {said}")


def test_wrong_settings_end_a_command_that_would_take_them(project, policylang):
    write(project, "[tool.policylang]\ngraphs = 1\n")
    for command in (["check", "mine.apl"], ["plan", "mine.apl"], ["explain", "mine.apl", "--node", "mm"]):
        done = policylang(*command)
        assert (done.code, done.out) == (2, "")
        assert "error[APL646]" in done.err
        assert "--> ../pyproject.toml:2:1" in done.err
        assert "`--no-project` leaves the project's settings out" in done.err
    assert policylang("check", "mine.apl", "--no-project").code == 0
    assert policylang("explain", "APL646").code == 0


def test_a_path_alone_changes_nothing_for_a_check_without_a_graph(project, policylang):
    write(project, '[tool.policylang]\npath = "eager"\ndevice = "h100"\n')
    assert policylang("check", "mine.apl").out == "checked 1 file: clean\n"
    small = str(project / "graphs" / "small.graph")
    done = policylang("check", "mine.apl", "--graph", small)
    assert done.out.endswith(" (path eager and device h100 from ../pyproject.toml): clean\n")


PROFILE = 'name = "mine"\n[compute]\nfloat32 = 1e12\n[memory]\nbandwidth = 1e12\n'
FILES = {
    "my.apl": 'include "part.apl"\ndevice "d.toml"\nsave mm\n', "part.apl": "recompute everything\n",
    "other.apl": "save mm\n", "d.toml": PROFILE + '[network.dp]\nranks = 2\ntimes = "t.table"\n',
    "t.table": "kind,bytes\n", "own.py": "def graph(): ...\n", "r.json": json.dumps({"fields": [], "nodes": []}),
    "pyproject.toml": '[tool.policylang]\ngraph = "project.graph"\n',
}  # fmt: skip
PLAN = ("plan", "my.apl", "--graph", "g.graph")
TUNE = ("tune", "--graph", "g.graph", "--device", "d.toml", "--peak", "1 GiB")
SAVE_OPS = ("import-torchtitan", "layers.0::aten.mm.default", "--graph", "g.graph")
OVER = {
    "the policy": (*PLAN, "--html", "my.apl"), "the graph": (*PLAN, "--html", "g.graph"),
    "an include": (*PLAN, "--html", "./part.apl"), "the device of the policy": (*PLAN, "--html", "d.toml"),
    "a table of that": (*PLAN, "--html", "t.table"), "a symbolic link": (*PLAN, "--html", "link"),
    "a hard link": (*PLAN, "--html", "hard"), "the project": (*PLAN, "--trace", "pyproject.toml"),
    "the project's graph": ("plan", "my.apl", "--html", "project.graph"),
    "the recording": ("import", "r.json", "-o", "r.json"), "the graph of tune": (*TUNE, "-o", "g.graph"),
    "the profile of tune": (*TUNE, "-o", "d.toml"), "one of two": (*PLAN, "--html", "new.html", "--trace", "g.graph"),
    "the graph of the string": (*SAVE_OPS, "-o", "g.graph"), "the module": ("snapshot", "own:graph", "-o", "own.py"),
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    for name in ("g.graph", "project.graph"):
        write_graph(facts_of(SMALL), name)
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
def test_what_cannot_be_written_whole_is_left(run, here, monkeypatch, policylang) -> None:
    Path("d.toml").write_text(PROFILE, encoding="utf-8")
    Path("out").write_text("old", encoding="utf-8")
    monkeypatch.setattr(files.os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    outcome = policylang(*run)
    assert outcome.code == 2
    assert "cannot write `out`: no space left on device" in outcome.err
    assert Path("out").read_text(encoding="utf-8") == "old"
    with pytest.raises(Exception, match="cannot be written: no space left"):
        write_graph(facts_of(SMALL), "out")
    assert sorted(here.glob(".*")) == []


ROOT = Path(__file__).resolve().parents[2]
HOSTILE_POLICY = """blocks layers.*
undecided -> auto
recompute everything in block
save mm where ndim == 7
save everything in "nosuch.*"
save add in layers.*.norm
expect saved <= 1 B
"""
HOSTILE_GRAPH = ("--graph", "hostile.graph")
HOSTILE_TUNE = ("tune", *HOSTILE_GRAPH, "--device", "h100-sxm")
RUNS = {
    **{f"check {form}": ("check", "mine.apl", *HOSTILE_GRAPH, "--output-format", form) for form in RENDERERS},
    **{f"test {form}": ("test", "a.md", "--output-format", form) for form in RENDERERS},
    "show text": ("show", "hostile.graph"),
    "show json": ("show", "hostile.graph", "--output-format", "json"),
    "show nodes": ("show", "hostile.graph", "--operator", "*", "--module", "*", "--device", "h100-sxm"),
    "show nothing": ("show", "hostile.graph", "--operator", "madd", "--module", "layers.9.atention"),
    "plan text": ("plan", "llama3_sac", *HOSTILE_GRAPH, "--html", "out.html"),
    "plan trace": ("plan", "llama3_sac", *HOSTILE_GRAPH, "--trace", "out.json", "--device", "h100-sxm"),
    "plan json": ("plan", "llama3_sac", *HOSTILE_GRAPH, "--output-format", "json", "--device", "h100-sxm"),
    "plan mine": ("plan", "mine.apl", *HOSTILE_GRAPH),
    "explain node": ("explain", "llama3_sac", *HOSTILE_GRAPH, "--node", "*mm*"),
    "explain none": ("explain", "llama3_sac", *HOSTILE_GRAPH, "--node", "nm"),
    "explain rule": ("explain", "mine.apl", *HOSTILE_GRAPH, "--rule", "3"),
    "explain json": ("explain", "mine.apl", *HOSTILE_GRAPH, "--rule", "3", "--output-format", "json"),
    "diff text": ("diff", "llama3_sac", "other.apl", *HOSTILE_GRAPH, "--device", "h100-sxm"),
    "diff markdown": ("diff", "llama3_sac", "other.apl", *HOSTILE_GRAPH, "--output-format", "markdown"),
    "diff json": ("diff", "llama3_sac", "other.apl", *HOSTILE_GRAPH, "--output-format", "json"),
    "tune text": (*HOSTILE_TUNE, "--peak", "1 TiB", "-o", "out.apl"),
    "tune policy": (*HOSTILE_TUNE, "--saved", "1 TiB"),
    "tune table": (*HOSTILE_TUNE, "--table"),
    "tune json": (*HOSTILE_TUNE, "--table", "--output-format", "json"),
}
HOSTILE_GRAPHS = {"fsdp": load(ROOT / "docs" / "graphs" / "fsdp.graph"), "small": facts_of(SMALL)}


@pytest.fixture(scope="module", params=[slow("fsdp"), "small"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hostile")
    hostile_graph(HOSTILE_GRAPHS[request.param], made, dtypes=request.param == "fsdp")
    (made / "mine.apl").write_text(HOSTILE_POLICY, encoding="utf-8")
    (made / "other.apl").write_text("undecided -> recompute\n", encoding="utf-8")
    (made / "a.md").write_text(f"```apl graph=hostile.graph\n{HOSTILE_POLICY}```\n", encoding="utf-8")
    return made


@pytest.mark.parametrize("run", RUNS)
def test_nothing_of_a_graph_is_acted_on(run: str, folder: Path, policylang: Callable[..., Outcome]) -> None:
    arguments = RUNS[run]
    with chdir(folder):
        outcome = policylang(*arguments)
    assert outcome.code in (0, 1, 2)
    assert outcome.out or outcome.err
    form = arguments[-1] if "--output-format" in arguments else "text"
    assert raw_in(outcome.out, form) == ""
    assert raw_in(outcome.err) == ""
    for written in (each for each in folder.glob("out.*") if each.name in arguments):
        assert raw_in(written.read_text(encoding="utf-8"), written.suffix[1:]) == ""
        written.unlink()


def test_a_snapshot_that_was_not_written_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "one_line", str)
    path = hostile_graph(HOSTILE_GRAPHS["small"], tmp_path)
    with pytest.raises(PolicyGraphError, match="is damaged: its column `names` holds what cannot be there"):
        load(path)


NARROW_POLICY = """blocks layers.*
recompute everything in block where bytes > 1 KiB or numel > 12345 or bytes > 3 KiB or numel > 4 or numel > 5
save mm in block where bytes > 1 KiB
must_recompute sin in block
save sin in block
expect saved <= 10 GiB
expect recomputed flops per block <= 1%
"""
NARROW_COMMANDS = {
    "check": ("check", "a_policy_with_a_long_name.apl", "--graph", "small.graph"),
    "plan": ("plan", "a_policy_with_a_long_name.apl", "--graph", "small.graph"),
    "values": ("plan", "a_policy_with_a_long_name.apl", "--graph", "small.graph", "--values"),
    "summary": ("plan", "a_policy_with_a_long_name.apl", "--graph", "small.graph", "--summary"),
    "diff": ("diff", "a_policy_with_a_long_name.apl", "save_all", "--graph", "small.graph"),
    "node": ("explain", "a_policy_with_a_long_name.apl", "--graph", "small.graph", "--node", "a0"),
    "nodes": ("explain", "a_policy_with_a_long_name.apl", "--graph", "small.graph", "--node", "layers.*"),
    "rule": ("explain", "a_policy_with_a_long_name.apl", "--graph", "small.graph", "--rule", "2"),
    "code": ("explain", "APL304"),
    "codes": ("explain",),
    "show": ("show", "small.graph"),
    "module": ("show", "small.graph", "--module", "layers.*"),
    "list": ("list",),
}


@pytest.fixture
def narrow_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_policy_with_a_long_name.apl").write_text(NARROW_POLICY)
    write_graph(facts_of(NARROW_GRAPH), "small.graph")
    return tmp_path


@pytest.mark.parametrize("name", NARROW_COMMANDS)
@pytest.mark.parametrize("width", [60, 80])
def test_no_line_is_longer(policylang, narrow_folder, name, width):
    full = policylang(*NARROW_COMMANDS[name], "--width", "0")
    fits = policylang(*NARROW_COMMANDS[name], "--width", str(width))
    assert fits.code == full.code
    assert max(map(len, fits.out.splitlines())) <= width
    assert policylang(*NARROW_COMMANDS[name]).out == full.out, "in a pipe there is room for all"


@pytest.fixture
def long_names(narrow_folder):
    """Names, modules and operators as long as those of real models."""
    deep = "model.language_model.model.layers.0.self_attn.attention_interface"
    text = NARROW_GRAPH.replace("layers.0", deep)
    text = text.replace("aten.sin.default", "aten._scaled_dot_product_flash_attention.default")
    for name in ("a0", "b0", "a1", "b1"):
        text = text.replace(f"%{name}", f"%{name}_scaled_dot_product_flash_attention_for_a_device")
    write_graph(facts_of(text), "long.graph")
    (narrow_folder / "all.apl").write_text("blocks layers.*\nsave everything in block\n")
    return "plan", "all.apl", "--graph", "long.graph", "--values"


def test_what_is_alive_at_the_peak_fits_a_page_in_a_pipe(policylang, long_names):
    def tables(*width):
        out = policylang(*long_names, *width).out
        return out[out.index("alive at the peak") :].split("\n\n")[1:4:2]

    by_line, by_value = tables()
    assert max(map(len, (*by_value.splitlines(), *by_line.splitlines()))) <= 120
    assert "…" in by_value
    assert re.search(r" \d–end\n", by_value), "the steps stay"
    _, whole = tables("--width", "0")
    assert "…" not in whole
    assert max(map(len, whole.splitlines())) > 120
    assert max(map(len, tables("--width", "80")[1].splitlines())) <= 80
    assert tables("--width", "250")[1] == whole, "who says how wide it may be is believed"


def test_figures_stay_whole_and_machine_forms_do_not_care(policylang, narrow_folder):
    for form in ("json", "concise", "sarif", "github"):
        asked = (*NARROW_COMMANDS["check"], "--output-format", form, "--width")
        assert policylang(*asked, "0").out == policylang(*asked, "20").out
    assert json.loads(policylang(*NARROW_COMMANDS["plan"], "--width", "20", "--output-format", "json").out)["rules"]
    out = policylang(*NARROW_COMMANDS["values"], "--width", "80").out
    assert re.search(r"\nsaved +4 GiB +4 GiB\n", out)
    assert "(no room for " in out
    assert re.search(r"…\w+_name.apl:3\n", out), "of the place of a rule the line stays"


def test_a_terminal_has_its_own_width(policylang, monkeypatch):
    outcome = policylang("list", "--width", "wide")
    assert outcome.code == 2
    assert "`wide` is no number of columns" in outcome.err
    assert text_width(None) is None, "no terminal here"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "71")
    assert (text_width(None), text_width(0), text_width(90)) == (71, 0, 90)


def test_tables():
    rows = [("place", "words", "n"), ("folder/file.apl:12", "recompute everything in block", "1,234")]
    assert "recompute everything in block" in table(rows, right=range(2, 3))
    with fitted(40):
        assert table(rows, right=range(2, 3), ends=(0,)).splitlines()[1] == "…er/file.apl:12  recompute every…  1,234"
        assert table(rows, right=range(2, 3), spare=(0,)).splitlines() == [
            "words                              n",
            "recompute everything in block  1,234",
            "(no room for `place`: --width 0)",
        ]
    with fitted(3):
        assert columns() == 20
        assert max(map(len, table(rows, right=range(2, 3)).splitlines())) <= 20
    assert columns() is None


def test_sentences():
    long = "error[APL301]: one two three four five six\n  = help: seven eight nine ten eleven twelve\n12 | " + "x" * 50
    assert fit(long) == long
    with fitted(24):
        assert fit(long).splitlines() == [
            "error[APL301]: one two", "  three four five six", "  = help: seven eight", "    nine ten eleven",
            "    twelve", "12 | " + "x" * 18 + "…",
        ]  # fmt: skip


@pytest.mark.parametrize("command", ["plan bad.apl --graph g.graph", "diff mine.apl bad.apl --graph g.graph",
                                     "diff mine.apl none.apl --graph g.graph", "show none.graph",
                                     "explain bad.apl --graph g.graph --rule 1", "compare mine.apl --run none.json",
                                     "tune --graph none.graph --device h100-sxm --peak 1GiB"])  # fmt: skip
def test_an_error_that_ends_a_command_is_json_for_programs(command, tmp_path, monkeypatch, policylang):
    monkeypatch.chdir(tmp_path)
    for name, text in (("mine.apl", "save mm\n"), ("bad.apl", "sav mm\n")):
        Path(name).write_text(text)
    Path("gone.apl").symlink_to("nowhere.apl")
    write_graph(facts_of(SMALL), "g.graph")
    done = policylang(*command.split(), "--output-format", "json")
    (found,) = json.loads(done.out)["diagnostics"]
    assert (done.code, done.err) == (1 if found["code"] in ("APL012", "APL654") else 2, "")
    assert "did you mean `gone.apl`" not in policylang("check", "gone.apl").out
