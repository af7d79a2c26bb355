"""What is replaced is freed: old states, their plans, and old snapshots."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shutil
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")


from policylang.editor import open_documents, statements
from policylang.editor.completion import completion
from policylang.editor.open_documents import OpenDocuments
from policylang.editor.server import server
from policylang.editor.state import GraphState, read_graph
from tests.editor.conftest import GRAPHS
from tests.editor.weighed import weighed

POLICY = "let heavy = mm, attention where bytes > 1 MiB\nrecompute everything\nsave heavy\noptional save add\n"
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
        yield f"{POLICY}{WORDS[at % len(WORDS)]} mul where bytes > {at} KiB\n"


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
        made.protocol.set_writer(_Nowhere())

        def send(method: str, params: Any, **more: Any) -> None:
            text = json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more})
            made.protocol.handle_message(json.loads(text, object_hook=made.protocol.structure_message))

        options = {"graph": str(GRAPHS / "tutorial.graph"), "pause": 0}
        send("initialize", {"processId": None, "capabilities": {}, "initializationOptions": options}, id=1)
        uri = (tmp_path / "mine.apl").as_uri()
        opened = {"uri": uri, "languageId": "policylang", "version": 0, "text": POLICY}
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


class _Nowhere:
    def write(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        pass
