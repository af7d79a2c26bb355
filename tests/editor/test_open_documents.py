"""Open documents without a client: what is published when, what is given up, and what is read again."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

import policylang
from policylang.editor import open_documents
from policylang.editor.hover import hints
from policylang.editor.open_documents import OpenDocuments
from policylang.editor.state import State, read_graph
from policylang.language.cancellation import check_cancelled
from tests.editor.conftest import GRAPHS
from tests.editor.weighed import weighed

GRAPH = GRAPHS / "tutorial.graph"
POLICY = "save mm\nsave flash_attention\n"


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
        assert [(each.code, each.message) for each in it.published[-1].diagnostics] == [
            (each.code, each.message) for each in said
        ]
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
        "",
        "\0",
        "save mm\0",
        "\ud800 save mm",
        "save " + "(" * 100 + "mm" + ")" * 100,
        "\ufeffsave mm",
        "𝔘𝔫𝔦 save e\u0301",
        "save mm\r\nsave bmm\r",
        "\u2028save\fmm",
        "#\ud83d\nsave mm # \udc00",
        'include "\0"\nsave mm',
        'device "\0"',
        "let \ud800 = mm",
        'save mm in "\ud800"',
        "PK\x03\x04\x00\x00 binary",
    ],
)
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
    assert state is not None
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
