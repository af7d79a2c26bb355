"""``[tool.policylang]`` of a project's pyproject.toml: what commands take from it, and what is wrong with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from textwrap import dedent

import pytest

import policylang as library
from policylang.api.load import ProjectSettings, project_settings

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
