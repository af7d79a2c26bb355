"""A real client of a server process, as an editor is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytest_lsp", reason="needs a client of the language server")

from lsprotocol import types
from pytest_lsp import ClientServerConfig, make_test_lsp_client

from tests.editor.conftest import SERVER

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
