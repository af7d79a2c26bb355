"""The states of texts, as features get them, policies in files, and a server behind a real client."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytest_lsp", reason="needs a client of the language server")

from attrs import frozen
from lsprotocol import types
from pytest_lsp import ClientServerConfig, make_test_lsp_client

from policylang.api.planned_graphs import read_any
from policylang.editor.open_documents import OpenDocuments
from policylang.editor.state import Document, Positions, State, read_graph, read_text
from policylang.language.cancellation import Cancelled
from policylang.language.diagnostics import Diagnostic, Source
from policylang.language.files import read_source

SERVER = [sys.executable, "-m", "policylang.commands.cli", "lsp"]
GRAPHS = Path(__file__).resolve().parents[2] / "docs" / "graphs"


@pytest.fixture
def state_of(tmp_path: Path) -> Callable[..., State]:
    """The state of a text in a file that needs not exist; ``graph`` names a snapshot of docs/graphs, or is a file."""

    def made(text: str, graph: str | Path | None = None, *, name: str = "mine.apl", device=None) -> State:
        file = tmp_path / name
        document = Document(file.as_uri(), 1, Source(name, text), file)
        facts = None if graph is None else read_any(GRAPHS / graph)
        text_state = read_text(document, facts, read_source)
        planned = None if facts is None else read_graph(text_state, facts, str(graph), None, device)
        return State(document, text_state, planned, facts)

    return made


async def weighed(documents: OpenDocuments, uri: str) -> State | None:
    """The state of the text as it is, with the worth of each rule, worked out in the worker."""
    while (state := await documents.settled(uri)) is not None:
        with suppress(Cancelled):
            if state.graph is not None:
                await documents.in_worker(state.graph.weigh, state)
            break
    return state


@frozen
class PoliciesAtHand:
    """A folder with policies, some of them open with other texts than on disk."""

    folder: Path
    unsaved: Mapping[str, str] = {}

    @classmethod
    def on(cls, folder: Path, files: Mapping[str, str], unsaved: Mapping[str, str] | None = None) -> PoliciesAtHand:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode())
        return cls(folder, unsaved or {})

    def state(self, name: str) -> State:
        document = self._document(name)
        return State(document, read_text(document, None, self._read))

    def text(self, name: str) -> str:
        return self.unsaved.get(name) or (self.folder / name).read_bytes().decode()

    def shown(self, place: types.Location) -> str:
        """``file:line:text`` of a place."""
        path = Path(place.uri.removeprefix("file://"))
        own = path.is_relative_to(self.folder)
        name = os.path.relpath(path, self.folder) if own else f"<{path.stem}>"
        text = self.text(name) if own else path.read_text(encoding="utf-8")
        positions, range = Positions(text), place.range
        found = text[positions.offset(range.start) : positions.offset(range.end)]
        return f"{name}:{range.start.line + 1}:{found}"

    def _document(self, name: str) -> Document:
        path = self.folder / name
        return Document(path.as_uri(), 1, Source(name, self.text(name)), path)

    def _read(self, path: Path, name: str) -> Source | Diagnostic:
        for each, text in self.unsaved.items():
            if os.path.realpath(self.folder / each) == os.path.realpath(path):
                return Source(name, text)
        return read_source(path, name)


def with_edits(text: str, edits: Sequence[types.TextEdit]) -> str:
    """A text after edits of it."""
    positions = Positions(text)
    places = [(positions.offset(each.range.start), positions.offset(each.range.end), each.new_text) for each in edits]
    for start, end, new in sorted(places, reverse=True):
        text = text[:start] + new + text[end:]
    return text


PATIENCE = 30.0


class Editor:
    """One connection. What the server says of a document is kept by address, with the version it is about."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.said: dict[str, list[types.PublishDiagnosticsParams]] = {}
        self.registered: list[str] = []
        self.refreshed = 0
        self._news = asyncio.Event()
        features = client.protocol.fm.features
        features[types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS] = self._published
        features[types.CLIENT_REGISTER_CAPABILITY] = self._registered
        features[types.WORKSPACE_INLAY_HINT_REFRESH] = self._refreshed

    @classmethod
    async def start(cls, command: Sequence[str] = SERVER) -> Editor:
        client = await ClientServerConfig(list(command), client_factory=make_test_lsp_client).start()
        return cls(client)

    async def begin(
        self, *folders: Path, options: object = None, capabilities: types.ClientCapabilities | None = None, **more: Any
    ) -> types.InitializeResult:
        params = types.InitializeParams(
            capabilities or CAPABILITIES,
            workspace_folders=[types.WorkspaceFolder(each.as_uri(), each.name) for each in folders] or None,
            initialization_options=options,
            **more,
        )
        found: types.InitializeResult = await self.client.initialize_session(params)
        return found

    def open(self, uri: str, text: str, version: int = 1) -> None:
        item = types.TextDocumentItem(uri, "policylang", version, text)
        self.client.text_document_did_open(types.DidOpenTextDocumentParams(item))

    def change(self, uri: str, text: str, version: int) -> None:
        document = types.VersionedTextDocumentIdentifier(version, uri)
        whole = types.TextDocumentContentChangeWholeDocument(text)
        self.client.text_document_did_change(types.DidChangeTextDocumentParams(document, [whole]))

    def close(self, uri: str) -> None:
        self.client.text_document_did_close(types.DidCloseTextDocumentParams(types.TextDocumentIdentifier(uri)))

    def saved(self, uri: str) -> None:
        self.client.text_document_did_save(types.DidSaveTextDocumentParams(types.TextDocumentIdentifier(uri)))

    async def hints(self, uri: str) -> Sequence[types.InlayHint] | None:
        """Waits for the plan of the text as it is."""
        whole = types.Range(types.Position(0, 0), types.Position(100_000, 0))
        params = types.InlayHintParams(types.TextDocumentIdentifier(uri), whole)
        found: Sequence[types.InlayHint] | None = await self.client.text_document_inlay_hint_async(params)
        return found

    async def codes(self, uri: str) -> list[str]:
        """The codes of the text as it is, once nothing more is under way for it."""
        await self.hints(uri)
        return [str(each.code) for each in self.said[uri][-1].diagnostics]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not holds():
                self._news.clear()
                await self._news.wait()

    async def end(self) -> int | None:
        await self.client.shutdown_session()
        server = self.client._server
        await self.client.stop()
        return None if server is None else server.returncode

    def _published(self, params: types.PublishDiagnosticsParams) -> None:
        self.said.setdefault(params.uri, []).append(params)
        self._news.set()

    def _registered(self, params: types.RegistrationParams) -> None:
        self.registered.extend(each.method for each in params.registrations)
        self._news.set()

    def _refreshed(self, params: None) -> None:
        self.refreshed += 1
        self._news.set()


CAPABILITIES = types.ClientCapabilities(
    text_document=types.TextDocumentClientCapabilities(
        publish_diagnostics=types.PublishDiagnosticsClientCapabilities(
            related_information=True,
            version_support=True,
            code_description_support=True,
            tag_support=types.ClientDiagnosticsTagOptions([types.DiagnosticTag.Unnecessary]),
        )
    ),
    workspace=types.WorkspaceClientCapabilities(
        configuration=True,
        workspace_folders=True,
        did_change_configuration=types.DidChangeConfigurationClientCapabilities(dynamic_registration=True),
        inlay_hint=types.InlayHintWorkspaceClientCapabilities(refresh_support=True),
    ),
)
