"""Open documents without a client: what is published when, which settings hold, what is read again and freed."""

import asyncio
import gc
import json
import logging
import os
import shutil
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import policylang
from policylang.editor import open_documents, statements
from policylang.editor.completion import completion
from policylang.editor.hover import hints
from policylang.editor.open_documents import OpenDocuments
from policylang.editor.server import server
from policylang.editor.state import GraphState, State, read_graph
from policylang.editor.workspace import EditorSettings, Workspace, path_of, section_of
from policylang.language.cancellation import check_cancelled
from tests.editor.conftest import GRAPHS, weighed

GRAPH = GRAPHS / "tutorial.graph"


class Session:
    """Documents with what they published, in a folder with a snapshot of its own."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.published = folder, list[State]()
        self.documents = OpenDocuments(self.published.append)
        self.documents.workspace.folders[folder.as_uri()] = folder
        self.documents.workspace.started_with = {"pause": 0, **settings}
        self.version = 0

    def put(self, text: str, name: str = "mine.apl") -> str:
        self.version += 1
        uri = (self.folder / name).as_uri()
        self.documents.put(uri, self.version, text)
        return uri

    async def codes(self, uri: str) -> list[str]:
        state = await self.documents.settled(uri)
        return [each.code for each in state.diagnostics]


def session(folder: Path, test: Callable[[Session], Awaitable[None]], **settings: Any) -> None:
    """Run a test in a session, and end it."""

    async def run() -> None:
        made = Session(folder, **settings)
        try:
            await test(made)
        finally:
            made.documents.close()

    asyncio.run(run())


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    return Path(shutil.copy(GRAPH, tmp_path / "tutorial.graph"))


def test_a_text_is_published_before_anything_else_happens_and_its_plan_as_check_says_it(tmp_path, graph) -> None:
    (tmp_path / "mine.apl").write_text("save mm\nsave attention\nsave rsqrt in layers.99\n")

    async def test(it: Session) -> None:
        uri = it.put((tmp_path / "mine.apl").read_text())
        assert [state.graph for state in it.published] == [None]
        await it.documents.settled(uri)
        said = policylang.check(tmp_path / "mine.apl", graph=graph).diagnostics
        published, expected = ([(e.code, e.message) for e in each] for each in (it.published[-1].diagnostics, said))
        assert published == expected
        assert "APL301" in {each.code for each in said}

    session(tmp_path, test, graph="tutorial.graph")


def test_of_many_quick_changes_the_last_is_planned(tmp_path, graph, monkeypatch) -> None:
    planned = []
    monkeypatch.setattr(
        open_documents, "read_graph", lambda text, *more: planned.append(text) or read_graph(text, *more)
    )

    async def test(it: Session) -> None:
        for number in range(30):
            uri = it.put(f"save mm\n# {number}\n")
            await asyncio.sleep(0.001)
        state = await it.documents.settled(uri)
        assert [text.source.text for text in planned] == ["save mm\n# 29\n"]
        assert state.graph is not None
        assert state.document.version == 30

    session(tmp_path, test, graph=str(graph), pause=60)


def test_a_change_ends_what_is_under_way(tmp_path, graph, monkeypatch) -> None:
    begun, ended = [], []

    def endless(text: Any, *more: Any) -> Any:
        if "endless" not in text.source.text:
            return read_graph(text, *more)
        begun.append(text)
        try:
            while True:
                time.sleep(0.001)
                check_cancelled()
        finally:
            ended.append(text)

    monkeypatch.setattr(open_documents, "read_graph", endless)

    async def test(it: Session) -> None:
        uri = it.put("save mm # endless")
        waiting = asyncio.ensure_future(it.documents.settled(uri))
        while not begun:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not ended
        assert not waiting.done()
        it.put("save mm # short")
        state = await waiting
        assert state.graph is not None
        assert state.document.source.text == "save mm # short"
        assert len(ended) == 1

    session(tmp_path, test, graph=str(graph))


def test_a_document_that_is_closed_while_it_is_planned_says_no_more(tmp_path, graph) -> None:
    async def test(it: Session) -> None:
        uri = it.put("save mm")
        it.documents.drop(uri)
        count = len(it.published)
        assert await it.documents.settled(uri) is None
        await asyncio.sleep(0.1)
        assert len(it.published) == count

    session(tmp_path, test, graph=str(graph))


def test_what_an_answer_needs_is_worked_out_beside(tmp_path, graph) -> None:
    async def test(it: Session) -> None:
        uri = it.put("recompute everything\nsave mm\n")
        state = await it.documents.settled(uri)
        assert state.graph.knows("selections", "breakdown")
        state = await weighed(it.documents, uri)
        assert state.graph.knows("worth")

    session(tmp_path, test, graph=str(graph))


def test_documents_that_include_one_that_changes_are_read_again(tmp_path) -> None:
    (tmp_path / "names.apl").write_text("let wide = mm\n")

    async def test(it: Session) -> None:
        outer = it.put('include "names.apl"\nsave wide\n', "outer.apl")
        assert await it.codes(outer) == []
        inner = it.put("let broad = mm\n", "names.apl")  # not saved
        assert "APL101" in await it.codes(outer)
        it.put("let wide = bmm\n", "names.apl")
        assert await it.codes(outer) == []
        it.put("let wide = nope_nope\n", "names.apl")
        assert await it.codes(outer) == ["APL101"]
        it.documents.drop(inner)  # what stands on the disk counts again
        assert await it.codes(outer) == []
        (tmp_path / "names.apl").unlink()
        it.documents.look_again()
        assert "APL103" in await it.codes(outer)
        (tmp_path / "names.apl").write_text("let wide = mm\n")
        it.documents.look_again()
        assert await it.codes(outer) == []
        count = len(it.published)
        it.documents.look_again()
        assert len(it.published) == count, "nothing changed"

    session(tmp_path, test)


def test_a_snapshot_that_disappears_is_half_written_or_is_none(tmp_path, graph) -> None:
    whole = graph.read_bytes()

    async def test(it: Session) -> None:
        uri = it.put("save mm\nsave everything in layers.99\n")

        async def after(change: Callable[[], object]) -> list[str]:
            change()
            it.documents.look_again()
            return await it.codes(uri)

        assert await it.codes(uri) == ["APL301"]
        assert await after(graph.unlink) == ["APL355"]
        assert await after(lambda: graph.write_bytes(whole[: len(whole) // 2])) == ["APL353"]
        assert await after(lambda: graph.write_bytes(whole)) == ["APL301"]
        assert await after(lambda: graph.write_text("nothing of the kind")) == ["APL351"]
        assert await after(lambda: graph.write_bytes(b"")) == ["APL353"]
        assert await after(lambda: (graph.unlink(), graph.mkdir())) == ["APL355"]
        assert await after(lambda: (graph.rmdir(), graph.write_bytes(whole))) == ["APL301"]

    session(tmp_path, test, graph="tutorial.graph")


def test_a_change_of_the_project_or_of_a_device_profile_counts(tmp_path, graph) -> None:
    profile = tmp_path / "ours.toml"
    profile.write_text("[compute]\nbfloat16 = 6e14\nfloat32 = 6e13\n[memory]\nbandwidth = 2e12\n")

    async def test(it: Session) -> None:
        uri = it.put("save mm where time > 1 us\nexpect step time <= 1 h\n".replace("1 h", "9 s"))
        assert await it.codes(uri) == []
        (tmp_path / "pyproject.toml").write_text('[tool.policylang]\ngraph = "tutorial.graph"\n')
        it.documents.look_again()
        assert "APL370" in await it.codes(uri)
        (tmp_path / "pyproject.toml").write_text('[tool.policylang]\ngraph = "tutorial.graph"\ndevice = "ours.toml"\n')
        it.documents.look_again()
        assert "APL370" not in await it.codes(uri)
        profile.write_text("[compute]\n")
        it.documents.look_again()
        state = await it.documents.settled(uri)
        assert state.graph is None
        assert {"APL156"} & {each.code for each in state.diagnostics}
        (tmp_path / "pyproject.toml").write_text("[tool.policylang\n")
        it.documents.look_again()
        assert (await it.codes(uri))[:1] == ["APL645"]

    session(tmp_path, test)


def test_an_error_of_our_own_is_said_in_the_policy_and_the_next_change_is_planned(tmp_path, graph, monkeypatch) -> None:
    def fails(text: Any, *more: Any) -> Any:
        if "fails" in text.source.text:
            raise IndexError("of our own")
        return read_graph(text, *more)

    monkeypatch.setattr(open_documents, "read_graph", fails)

    async def test(it: Session) -> None:
        failures: list[Exception] = []
        it.documents.failed = failures.append
        assert await it.codes(it.put("save mm # fails")) == ["APL641"]
        assert [str(each) for each in failures] == ["of our own"]
        assert await it.codes(it.put("save mm")) == []

    session(tmp_path, test, graph=str(graph))


def test_a_graph_that_is_still_read_may_know_operators(tmp_path) -> None:
    async def test(it: Session) -> None:
        uri = it.put("save swiglu, mylab.swiglu\nsave mm mm\n")
        first = [each.code for each in it.published[0].diagnostics]
        assert first == ["APL010"], "the text alone would add that there is no `swiglu`"
        assert await it.codes(uri) == first

    session(tmp_path, test, graph=str(GRAPHS / "custom_operator.graph"))


@pytest.mark.parametrize(
    "text",
    [
        "", "\0", "save mm\0", "\ud800 save mm", "save " + "(" * 100 + "mm" + ")" * 100, "\ufeffsave mm",
        "𝔘𝔫𝔦 save e\u0301", "save mm\r\nsave bmm\r", "\u2028save\fmm", "#\ud83d\nsave mm # \udc00",
        'include "\0"\nsave mm', 'device "\0"', "let \ud800 = mm", 'save mm in "\ud800"', "PK\x03\x04\x00\x00 binary",
    ],
)  # fmt: skip
def test_any_text_has_a_state(text: str, tmp_path, graph) -> None:
    async def test(it: Session) -> None:
        uri = it.put(text)
        state = await it.documents.settled(uri)
        assert "APL641" not in [each.code for each in state.diagnostics]
        for each in it.published:
            published_in_text(each)

    session(tmp_path, test, graph=str(graph))


def published_in_text(state: State) -> None:
    from policylang.editor.actions import published

    lines = state.document.positions.text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for each in published(state):
        assert each.range.end.line < len(lines)
        assert (each.range.start.line, each.range.start.character) <= (each.range.end.line, each.range.end.character)


def test_a_text_in_no_file_is_planned_too(graph, tmp_path) -> None:
    async def test(it: Session) -> None:
        it.documents.put("untitled:Untitled-1", 1, "save everything in layers.99\n")
        assert await it.codes("untitled:Untitled-1") == ["APL301"]
        assert it.published[-1].document.path is None

    session(tmp_path, test, graph=str(graph))


def test_reading_a_text_gives_the_same_as_reading_its_file(tmp_path) -> None:
    """A text that is being written and one that was saved say the same."""
    for number, text in enumerate(("save mm\n", "sve mm\n", "\ufeffsave mm\n", "save mm\r\nsave (\r\n")):
        file = tmp_path / f"{number}.apl"
        file.write_bytes(text.encode())

        async def test(it: Session, file: Path = file, text: str = text) -> None:
            found = await it.codes(it.put(text, file.name))
            assert found == [each.code for each in policylang.check(file).diagnostics]

        session(tmp_path, test)


PLANNED = "save mm\nsave attention\n"


def labels(state: State | None) -> list[str]:
    return [str(each.label) for each in hints(state, 0, len(state.document.source.text))]


def test_while_a_text_has_mistakes_its_last_figures_stay_and_are_called_stale(tmp_path, graph) -> None:
    async def test(it: Session) -> None:
        uri = it.put(PLANNED)
        await weighed(it.documents, uri)
        fresh = labels(it.documents.state(uri))
        assert len(fresh) == 3
        for text in (f"{PLANNED}sav", f"{PLANNED}save", f"{PLANNED}save m"):
            it.put(text)
            assert labels(await it.documents.settled(uri)) == [f"{each} · stale" for each in fresh]
        it.put(f"{PLANNED}save add\n")
        assert labels(it.documents.state(uri)) == [], "a plan is under way"
        it.put(f"{PLANNED}save ad")
        assert len(labels(await it.documents.settled(uri))) == 3, "it was given up"
        it.put(f"{PLANNED}save add\n")
        assert not any("stale" in each for each in labels(await it.documents.settled(uri)))
        assert it.documents.state(uri).stale == ()  # type: ignore[union-attr]

    session(tmp_path, test, graph=str(graph))


def test_figures_of_another_snapshot_are_not_kept(tmp_path, graph) -> None:
    other = shutil.copy(GRAPHS / "gpt2.graph", tmp_path / "gpt2.graph")

    async def test(it: Session) -> None:
        uri = it.put(PLANNED)
        await it.documents.settled(uri)
        it.documents.workspace.started_with = {"pause": 0, "graph": str(other)}
        it.put("save mmm\nsave attention\n")
        assert labels(await it.documents.settled(uri)) == []

    session(tmp_path, test, graph=str(graph))


MEMORY_POLICY = "let heavy = mm, attention where bytes > 1 MiB\nrecompute everything\nsave heavy\noptional save add\n"
WORDS = ("save", "optional recompute", "wrong")


@pytest.fixture
def planned(monkeypatch) -> list[weakref.ref[GraphState]]:
    """All plans that are made."""
    found: list[weakref.ref[GraphState]] = []

    def noted(*arguments: Any) -> GraphState | None:
        made = read_graph(*arguments)
        found.extend(() if made is None else (weakref.ref(made), weakref.ref(made.plan)))  # type: ignore[arg-type]
        return made

    monkeypatch.setattr(open_documents, "read_graph", noted)
    return found


def _alive(found: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(each() is not None for each in found)


def _edits(count: int) -> Iterator[str]:
    for at in range(count):
        yield f"{MEMORY_POLICY}{WORDS[at % len(WORDS)]} mul where bytes > {at} KiB\n"


@pytest.mark.slow
def test_after_many_edits_the_last_plan_is_there_and_no_other(tmp_path, planned) -> None:
    states: list[weakref.ref[Any]] = []

    async def test() -> None:
        documents = OpenDocuments(lambda state: states.append(weakref.ref(state)))
        documents.workspace.started_with = {"graph": str(GRAPHS / "tutorial.graph"), "pause": 0}
        uri = (tmp_path / "mine.apl").as_uri()
        for at, text in enumerate(_edits(32)):
            documents.put(uri, at, text)
            if at % 4 == 3:
                await asyncio.sleep(0.003)  # the next edit ends what is under way
            elif at % 16:
                await documents.settled(uri)
            else:
                await weighed(documents, uri)
        await weighed(documents, uri)
        await asyncio.sleep(0.05)
        assert len(planned) > 2 * 8
        assert _alive(planned) <= 2, "the plan that is shown, and its state"
        assert _alive(states) <= 2
        documents.drop(uri)
        await asyncio.sleep(0.05)
        assert _alive(planned) == _alive(states) == 0
        documents.close()

    asyncio.run(test())


def test_requests_that_a_change_ends_hold_nothing(tmp_path, planned, caplog) -> None:
    caplog.set_level(logging.CRITICAL, logger="pygls")  # as the server does: a record of an error keeps its frames

    async def test() -> None:
        made = server()
        made.protocol.set_writer(SimpleNamespace(write=lambda data: None, close=lambda: None))

        def send(method: str, params: Any, **more: Any) -> None:
            text = json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more})
            made.protocol.handle_message(json.loads(text, object_hook=made.protocol.structure_message))

        options = {"graph": str(GRAPHS / "tutorial.graph"), "pause": 0}
        send("initialize", {"processId": None, "capabilities": {}, "initializationOptions": options}, id=1)
        uri = (tmp_path / "mine.apl").as_uri()
        opened = {"uri": uri, "languageId": "policylang", "version": 0, "text": MEMORY_POLICY}
        send("textDocument/didOpen", {"textDocument": opened})
        place = {"textDocument": {"uri": uri}, "position": {"line": 1, "character": 2}}
        for at, text in enumerate(_edits(16)):
            number = 10 * (at + 1)
            send("textDocument/hover", place, id=number)
            send("textDocument/hover", place, id=number + 1)
            await asyncio.sleep(0)
            send("$/cancelRequest", {"id": number})
            changed = {"textDocument": {"uri": uri, "version": at + 1}, "contentChanges": [{"text": text}]}
            send("textDocument/didChange", changed)
            await asyncio.sleep(0.003)
            if at % 2:
                await made.documents.settled(uri)
                send("textDocument/hover", place, id=number + 2)
                await asyncio.sleep(0)
        await weighed(made.documents, uri)
        await asyncio.sleep(0.05)
        assert len(planned) > 5
        assert _alive(planned) <= 2
        made.documents.close()

    asyncio.run(test())


def test_a_snapshot_that_another_one_replaces_is_freed(tmp_path) -> None:
    async def test() -> None:
        documents = OpenDocuments(lambda state: None)
        graph = tmp_path / "mine.graph"
        documents.workspace.started_with = {"graph": str(graph), "pause": 0}
        uri = (tmp_path / "mine.apl").as_uri()
        found: list[weakref.ref[Any]] = []
        for at, name in enumerate(("tutorial", "gpt2", "tutorial")):
            shutil.copy(GRAPHS / f"{name}.graph", graph)
            os.utime(graph, (at, at))
            documents.put(uri, at, f"recompute everything # {at}\nsave mm")
            state = await weighed(documents, uri)
            assert state.facts is not None
            completion(state, len("recompute "))  # it counts what the graph has, and keeps the figures
            statements.backward_counts(state.facts)
            found.append(weakref.ref(state.facts))
            del state
        await asyncio.sleep(0.05)
        gc.collect()
        assert [each() is not None for each in found] == [False, False, True]
        documents.close()

    asyncio.run(test())


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
        ({"path": "jiont"}, "APL640", "joint"), ({"path": ["joint"]}, "APL640", "['joint']"),
        ({"device": "h1000"}, "APL152", "h1000"), ({"device": "cuda"}, "APL416", "cuda"),
        ({"device": "./none.toml"}, "APL152", "none.toml"), ({"device": {"name": 1}}, "APL640", "no text"),
        ({"graph": 5}, "APL640", "no text"), ({"graph": "a\0b"}, "APL640", "no text"),
        ({"pause": "soon"}, "APL640", "soon"), ({"pause": -1}, "APL640", "-1"),
        ({"pause": float("nan")}, "APL640", "nan"),
    ],
)  # fmt: skip
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
        ("file:///a/b.apl", "/a/b.apl"), ("file:///a%20b/%C3%A9%F0%9D%94%98;x%23y%3F.apl", "/a b/é𝔘;x#y?.apl"),
        ("file:///a;b.apl", "/a;b.apl"), ("file://localhost/a.apl", "/a.apl"), ("file:///a%ffb.apl", "/a\udcffb.apl"),
        ("untitled:Untitled-1", None), ("vscode-notebook-cell:/a/b.ipynb#W0", None), ("file:///a%00b", None),
        ("http://[x/y.apl", None), ("", None), ("file://", None),
    ],
)  # fmt: skip
def test_an_address_names_a_file(uri: str, path: str | None) -> None:
    assert path_of(uri) == (None if path is None else Path(path))
