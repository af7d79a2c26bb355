"""Which settings hold for which document, and what is said of those that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

from policylang.editor.workspace import EditorSettings, Workspace, path_of, section_of


def made(**folders: Path) -> Workspace:
    return Workspace({f"file://{path}": path for path in folders.values()})


def project(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text(f"[tool.policylang]\n{text}\n")
    return folder


def test_each_folder_has_its_own_settings_and_a_document_outside_all_those_nearest_to_it(tmp_path: Path) -> None:
    one = project(tmp_path / "one", 'graph = "one.graph"')
    two = project(tmp_path / "two", 'graph = "two.graph"\npath = "flat"\ndevice = "h100"')
    out = project(tmp_path / "out", 'graph = "out.graph"')
    (out / "deep").mkdir()
    workspace = made(one=one, two=two)
    assert workspace.settings_of(one / "x.apl").graph == str(one / "one.graph")
    of_two = workspace.settings_of(two / "x.apl")
    assert (of_two.graph, of_two.path) == (str(two / "two.graph"), "flat")
    assert (of_two.device is not None and of_two.device.name == "NVIDIA H100 SXM") or of_two.device
    assert workspace.settings_of(out / "deep" / "x.apl").graph == str(out / "out.graph")
    assert workspace.settings_of(tmp_path / "x.apl") == EditorSettings()
    assert workspace.settings_of(None).graph == str(one / "one.graph"), "a text in no file belongs to the first folder"
    assert Workspace().settings_of(None) == Workspace().settings_of(Path("/x.apl")) == EditorSettings()


def test_what_the_client_says_wins_and_what_it_leaves_out_is_the_project_s(tmp_path: Path) -> None:
    folder = project(tmp_path / "one", 'graph = "one.graph"\npath = "flat"')
    workspace = made(one=folder)
    workspace.started_with = {"graph": "started.graph", "path": None, "device": ""}
    found = workspace.settings_of(folder / "x.apl")
    assert (found.graph, found.path, found.device) == (str(folder / "started.graph"), "flat", None)
    workspace.pushed = section_of({"policylang": {"graph": "${workspaceFolder}/pushed.graph"}, "other": 1})
    assert workspace.settings_of(folder / "x.apl").graph == str(folder / "pushed.graph")
    workspace.asked = {None: {"graph": "/all.graph"}, f"file://{folder}": {"graph": "of-folder.graph", "pause": 0}}
    assert workspace.settings_of(folder / "x.apl").graph == str(folder / "of-folder.graph")
    assert workspace.settings_of(folder / "x.apl").pause == 0
    assert workspace.settings_of(tmp_path / "x.apl").graph == "/all.graph"


@pytest.mark.parametrize(
    ("given", "code", "word"),
    [
        ({"path": "jiont"}, "APL640", "joint"),
        ({"path": ["joint"]}, "APL640", "['joint']"),
        ({"device": "h1000"}, "APL152", "h1000"),
        ({"device": "cuda"}, "APL416", "cuda"),
        ({"device": "./none.toml"}, "APL152", "none.toml"),
        ({"device": {"name": 1}}, "APL640", "no text"),
        ({"graph": 5}, "APL640", "no text"),
        ({"graph": "a\0b"}, "APL640", "no text"),
        ({"pause": "soon"}, "APL640", "soon"),
        ({"pause": -1}, "APL640", "-1"),
        ({"pause": float("nan")}, "APL640", "nan"),
    ],
)
def test_a_setting_that_is_none_is_a_diagnostic(tmp_path: Path, given: dict[str, object], code: str, word: str) -> None:
    workspace = made(one=tmp_path)
    workspace.started_with = given
    found = workspace.settings_of(tmp_path / "x.apl")
    (problem,) = found.problems
    assert problem.code == code
    assert word in f"{problem.message} {problem.help}"
    assert found.plans is ("pause" in given)


def test_a_user_that_there_is_not_has_no_folder(tmp_path: Path) -> None:
    workspace = made(one=tmp_path)
    workspace.started_with = {"graph": "~nobody-by-this-name/x.graph"}
    assert workspace.settings_of(tmp_path / "x.apl").graph == str(tmp_path / "~nobody-by-this-name" / "x.graph")


@pytest.mark.parametrize("settings", [None, [], "text", 5, {"policylang": None}, {"policylang": [1]}])
def test_settings_that_are_none_at_all_say_nothing(settings: object) -> None:
    workspace = Workspace(pushed=section_of(settings))
    assert workspace.settings_of(None) == EditorSettings()


def test_a_project_that_changes_is_read_again(tmp_path: Path) -> None:
    workspace = made(one=tmp_path)
    assert workspace.settings_of(tmp_path / "x.apl").graph is None
    project(tmp_path, 'graph = "one.graph"')
    assert workspace.settings_of(tmp_path / "x.apl").graph == str(tmp_path / "one.graph")
    project(tmp_path, "graph = 5")
    found = workspace.settings_of(tmp_path / "x.apl")
    assert [each.code for each in found.problems] == ["APL647"]
    assert not found.plans
    (tmp_path / "pyproject.toml").unlink()
    assert workspace.settings_of(tmp_path / "x.apl") == EditorSettings()


def test_a_document_is_called_as_its_innermost_folder_sees_it(tmp_path: Path) -> None:
    workspace = made(one=tmp_path, two=tmp_path / "sub")
    assert workspace.name_of(tmp_path / "x.apl", "") == "x.apl"
    assert workspace.name_of(tmp_path / "sub" / "deep" / "x.apl", "") == "deep/x.apl"
    assert workspace.name_of(Path("/elsewhere/x.apl"), "") == "/elsewhere/x.apl"
    assert workspace.name_of(None, "untitled:Untitled-1") == "untitled:Untitled-1"


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///a/b.apl", "/a/b.apl"),
        ("file:///a%20b/%C3%A9%F0%9D%94%98;x%23y%3F.apl", "/a b/é𝔘;x#y?.apl"),
        ("file:///a;b.apl", "/a;b.apl"),
        ("file://localhost/a.apl", "/a.apl"),
        ("file:///a%ffb.apl", "/a\udcffb.apl"),
        ("untitled:Untitled-1", None),
        ("vscode-notebook-cell:/a/b.ipynb#W0", None),
        ("file:///a%00b", None),
        ("http://[x/y.apl", None),
        ("", None),
        ("file://", None),
    ],
)
def test_an_address_names_a_file(uri: str, path: str | None) -> None:
    assert path_of(uri) == (None if path is None else Path(path))
