"""The other end of the connection: its capabilities, settings and folders, and the notifications to it."""

from __future__ import annotations

import asyncio
import re
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from lsprotocol import types
from pygls.exceptions import JsonRpcContentModified, JsonRpcException, JsonRpcInvalidParams, JsonRpcRequestCancelled
from pygls.lsp.server import LanguageServer

from policylang.editor.actions import published
from policylang.editor.open_documents import OpenDocuments
from policylang.editor.state import State
from policylang.editor.workspace import SECTION, path_of, section_of
from policylang.language.resources import installed_version

_POLL = 2.0
"""Seconds between two looks at the files that open documents depend on."""
_KEPT_HERE = (types.TEXT_DOCUMENT_DID_OPEN, types.TEXT_DOCUMENT_DID_CHANGE, types.TEXT_DOCUMENT_DID_CLOSE)
"""Texts are held once: pygls would hold them too, and fail on a change to a document that was closed."""
_EXPECTED = (JsonRpcContentModified, JsonRpcInvalidParams, JsonRpcRequestCancelled, BrokenPipeError)

_UNSAFE = re.compile(r"[^\w.-]+")


class PolicyServer(LanguageServer):
    """One connection."""

    def __init__(self) -> None:
        super().__init__("policylang", installed_version(), types.TextDocumentSyncKind.Full)
        for method in _KEPT_HERE:
            self.protocol.fm.builtin_features.pop(method, None)
        self.documents = OpenDocuments(self._publish, settled_now=self._refresh, failed=self._failed)
        self.related = True
        """True if the client shows further places of a diagnostic."""
        self.markdown = False
        """True if it shows Markdown."""
        self.versioned = False
        """True if it takes edits of a version of a document."""
        self.ended = False
        """True once the client has asked to shut down."""
        self._polling: asyncio.Task[None] | None = None

    # --- the beginning ---

    def begin(self, params: types.InitializeParams) -> None:
        """Take a client's capabilities. Anything may be missing."""
        documents, workspace = self.documents, self.documents.workspace
        root = params.root_uri or (f"file://{params.root_path}" if params.root_path else None)
        folders = params.workspace_folders or ([types.WorkspaceFolder(root, "")] if root else [])
        self.change_folders(folders, ())
        workspace.started_with = section_of(params.initialization_options)
        documents.encoding = types.PositionEncodingKind(self.workspace.position_encoding)
        text = self.client_capabilities.text_document or types.TextDocumentClientCapabilities()
        self.markdown = text.hover is not None and types.MarkupKind.Markdown in (text.hover.content_format or ())
        diagnostics = text.publish_diagnostics
        self.related = diagnostics is not None and bool(diagnostics.related_information)
        its_workspace = self.client_capabilities.workspace or types.WorkspaceClientCapabilities()
        edit = its_workspace.workspace_edit
        self.versioned = edit is not None and bool(edit.document_changes)

    async def begun(self) -> None:
        """The client is ready: ask for its settings, and for notifications of changes."""
        workspace = self.client_capabilities.workspace
        self._polling = asyncio.ensure_future(self._poll())
        if workspace is not None and (each := workspace.did_change_configuration) and each.dynamic_registration:
            method, options = types.WORKSPACE_DID_CHANGE_CONFIGURATION, {"section": SECTION}
            registration = types.Registration(f"policylang-{method}", method, options)
            self.client_register_capability(types.RegistrationParams([registration]))
        await self.ask_for_settings()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(_POLL)
            with suppress(OSError):  # of the folder that it runs in, which may be gone for a while
                self.documents.look_again()

    # --- settings and folders ---

    def change_folders(self, added: Iterable[types.WorkspaceFolder], removed: Iterable[types.WorkspaceFolder]) -> None:
        folders = self.documents.workspace.folders
        for gone in removed:
            folders.pop(gone.uri, None)
            self.documents.workspace.asked.pop(gone.uri, None)
        for new in added:
            if (path := path_of(new.uri)) is not None:
                folders[new.uri] = path

    async def ask_for_settings(self) -> None:
        """Ask for the settings of each folder, and those of no folder, where the client answers."""
        workspace = self.client_capabilities.workspace
        if workspace is None or not workspace.configuration:
            return
        known = self.documents.workspace
        scopes = [*known.folders, None]
        items = [types.ConfigurationItem(scope, SECTION) for scope in scopes]
        try:
            found = await self.workspace_configuration_async(types.ConfigurationParams(items))
        except JsonRpcException as error:
            self.tell(f"the client does not send its settings: {error}", types.MessageType.Warning)
            return
        answers = [*(found or ()), *[None] * len(scopes)]
        known.asked = {scope: section_of(answer) for scope, answer in zip(scopes, answers, strict=False)}
        self.documents.look_again()

    async def settings_changed(self, settings: object) -> None:
        """Settings that a client pushes; one that sends none wants to be asked."""
        self.documents.workspace.pushed = section_of(settings)
        await self.ask_for_settings()
        self.documents.look_again()

    # --- notifications to the client ---

    def _publish(self, state: State) -> None:
        document = state.document
        self.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(
                document.uri, published(state, related=self.related), version=document.version
            )
        )

    def _refresh(self, state: State) -> None:
        """Figures are there that were not when the client asked for them last."""
        workspace = self.client_capabilities.workspace
        if workspace is not None and workspace.inlay_hint is not None and workspace.inlay_hint.refresh_support:
            self.workspace_inlay_hint_refresh(None)

    def write(self, name: str, uri: str, text: str) -> str:
        """The address of a file of this name with a text about what ``uri`` names; one that is there is overwritten."""
        stem, dot, ending = _UNSAFE.sub("-", name).rpartition(".")
        own = sha256(uri.encode(errors="surrogatepass")).hexdigest()[:8]
        file = Path(self._folder.name) / f"{stem[-60:]}-{own}{dot}{ending}"
        file.write_text(text, encoding="utf-8", errors="replace")
        return file.as_uri()

    def show(self, address: str) -> None:
        """Ask the client to open a file, a page in a browser; if it opens no files, show the file's address."""
        window = self.client_capabilities.window
        if window is not None and window.show_document is not None and window.show_document.support:
            external = address.endswith(".html")
            self.window_show_document(types.ShowDocumentParams(address, external=external, take_focus=True))
        else:
            self.window_show_message(types.ShowMessageParams(types.MessageType.Info, f"the answer is in {address}"))

    @cached_property
    def _folder(self) -> TemporaryDirectory[str]:
        return TemporaryDirectory(prefix="policylang-", ignore_cleanup_errors=True)  # 0700, and gone at exit

    # --- errors ---

    def tell(self, message: str, kind: types.MessageType = types.MessageType.Error) -> None:
        """A line in the client's log."""
        self.window_log_message(types.LogMessageParams(kind, f"policylang: {message}"))

    def _failed(self, error: Exception) -> None:
        traceback.print_exception(error)
        self.tell(f"this is a bug in policylang: {type(error).__name__}: {error}")

    def report_server_error(self, error: Exception, source: object) -> None:
        """Log an error of a request in the client's log and on the standard error, beside its answer."""
        if isinstance(error, _EXPECTED):
            return
        data = error.data if isinstance(error, JsonRpcException) else None
        if isinstance(data, dict) and "traceback" in data:
            print(*data["traceback"], error, sep="", file=sys.stderr)
        self.tell(str(error) or type(error).__name__)
