"""The open documents and what is known of each: read at once as text, and on the snapshot in a thread beside.

A change makes what is under way for its document unwanted. Everything but planning happens on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from attrs import define, evolve, field
from lsprotocol import types
from pygls.uris import to_fs_path

from policylang.api.devices import device_of
from policylang.api.planned_graphs import PathName, read_graphs
from policylang.api.project.settings import ProjectSettings
from policylang.editor.state import Document, GraphState, State, read_graph, read_text
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic
from policylang.language.files import read_source
from policylang.language.source import Source

PAUSE = 0.15
"""Seconds without a change after which a policy is planned on the snapshot."""

Publish = Callable[[State], None]


@define(eq=False)
class OpenDocuments:
    """``publish`` is called with each new state of a document: once for its text, once for its plan."""

    publish: Publish
    settings: ProjectSettings = field(factory=ProjectSettings)
    folder: Path | None = None
    """Of the workspace, where there is one."""
    encoding: types.PositionEncodingKind = types.PositionEncodingKind.Utf16
    pause: float = PAUSE
    _states: dict[str, State] = field(factory=dict)
    _planning: dict[str, asyncio.Task[State]] = field(factory=dict)
    _workers: ThreadPoolExecutor = field(factory=lambda: ThreadPoolExecutor(1, "planning"))
    _graph: tuple[object, Facts | None, tuple[Diagnostic, ...]] = (None, None, ())

    def put(self, uri: str, version: int, text: str) -> None:
        """A document is open, with this text."""
        path = Path(found) if urlsplit(uri).scheme == "file" and (found := to_fs_path(uri)) else None
        document = Document(uri, version, Source(self._name(path, uri), text), path, self.encoding)
        facts, problems = self._snapshot()
        self._states[uri] = state = State(document, read_text(document, facts, self._read), None, facts, problems)
        self._stop(uri)
        self.publish(state)
        if facts is not None:
            self._planning[uri] = asyncio.ensure_future(self._plan(state, facts))

    def drop(self, uri: str) -> None:
        """A document is closed."""
        self._stop(uri)
        self._states.pop(uri, None)

    def state(self, uri: str) -> State | None:
        """Of the text as it is now, with a plan where that is ready. None for a document that is not open."""
        return self._states.get(uri)

    async def settled(self, uri: str) -> State | None:
        """With the plan of the text as it is now; a later text where there was a change while it was made."""
        while (task := self._planning.get(uri)) is not None and not task.done():
            await asyncio.wait([task])
        return self._states.get(uri)

    def states(self) -> list[State]:
        """Of all open documents."""
        return list(self._states.values())

    def close(self) -> None:
        """Nothing is planned any more."""
        for uri in list(self._planning):
            self._stop(uri)
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _stop(self, uri: str) -> None:
        task = self._planning.pop(uri, None)
        if task is not None:
            task.cancel()

    async def _plan(self, state: State, facts: Facts) -> State:
        uri, settings = state.document.uri, self.settings
        await asyncio.sleep(self.pause)

        def wanted() -> bool:
            return self._states.get(uri) is state

        def work() -> GraphState | None:
            path = cast("PathName | None", settings.path)
            return read_graph(state.text, facts, str(settings.graph), path, device_of(settings.device), wanted)

        made = await cast(
            "Awaitable[GraphState | None]", asyncio.get_running_loop().run_in_executor(self._workers, work)
        )
        if made is not None and wanted():
            state = evolve(state, graph=made)
            self._states[uri] = state
            self.publish(state)
        return state

    def _snapshot(self) -> tuple[Facts | None, tuple[Diagnostic, ...]]:
        """Of the settings, read again where its file has changed."""
        if self.settings.graph is None:
            return None, ()
        try:
            found = os.stat(self.settings.graph)
            key: object = (self.settings.graph, found.st_mtime_ns, found.st_size)
        except OSError:
            key = (self.settings.graph, None)
        if self._graph[0] != key:
            graphs, problems = read_graphs([self.settings.graph])
            self._graph = key, next(iter(graphs.values()), None), problems
        return self._graph[1:]

    def _read(self, path: Path, name: str) -> Source | Diagnostic:
        """An included file: the text of the document where it is open."""
        for state in self._states.values():
            if state.document.path is not None and _same(state.document.path, path):
                return Source(name, state.document.source.text)
        return read_source(path, name)

    def _name(self, path: Path | None, uri: str) -> str:
        if path is None:
            return uri
        if self.folder is not None and path.is_relative_to(self.folder):
            return str(path.relative_to(self.folder))
        return str(path)


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
