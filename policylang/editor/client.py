"""The other end of the connection: what it can do, its settings and folders, and what it is told unasked."""

from __future__ import annotations

import asyncio
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cattrs import transform_error
from lsprotocol import types
from pygls.exceptions import JsonRpcContentModified, JsonRpcException, JsonRpcInvalidParams, JsonRpcRequestCancelled
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol

from policylang.editor.actions import Shown, published
from policylang.editor.open_documents import OpenDocuments
from policylang.editor.state import State
from policylang.editor.workspace import SECTION, path_of, section_of
from policylang.language.resources import installed_version

_WATCHED = ("**/*.apl", "**/pyproject.toml", "**/*.toml", "**/*.graph", "**/*.json", "**/*.json.gz")
_POLL = 2.0
"""Seconds between two looks at the files that open documents depend on: some clients watch none, and others only those
of their folders."""
_AT_ONCE = 0.3
"""Seconds that reading a graph may take without a word to the user."""
_MOST_CHOICES = 8
"""Names that a message offers; a client with a list of its own asks for all of them."""
_KEPT_HERE = (types.TEXT_DOCUMENT_DID_OPEN, types.TEXT_DOCUMENT_DID_CHANGE, types.TEXT_DOCUMENT_DID_CLOSE)
"""Texts are held once: pygls would hold them too, and fail on a change to a document that was closed."""
_EXPECTED = (JsonRpcContentModified, JsonRpcInvalidParams, JsonRpcRequestCancelled, BrokenPipeError)

_VERSIONED = (types.TEXT_DOCUMENT_DID_OPEN, types.TEXT_DOCUMENT_DID_CHANGE)
_UNSAFE = re.compile(r"[^\w.-]+")
_MARKS = re.compile(r"^(?:```.*\n|#+ )|\\(?=[^\w\s])", re.MULTILINE)
"""Markdown that a message would show literally: fences, headings, and escapes."""


def _plain_text(markdown: str) -> str:
    """Markdown without its marks, for a message."""
    return _MARKS.sub("", markdown).strip()


class ShownFiles:
    """The answers that were shown, each in a file of its own; one of the same name is overwritten."""

    @cached_property
    def _folder(self) -> TemporaryDirectory[str]:
        return TemporaryDirectory(prefix="policylang-", ignore_cleanup_errors=True)  # 0700, and gone at exit

    def write(self, name: str, uri: str, text: str) -> str:
        """The address of a file with this text. ``name``: with its ending; ``uri``: of what it is about."""
        stem, dot, ending = _UNSAFE.sub("-", name).rpartition(".")
        own = sha256(uri.encode(errors="surrogatepass")).hexdigest()[:8]
        file = Path(self._folder.name) / f"{stem[-60:]}-{own}{dot}{ending}"
        file.write_text(text, encoding="utf-8", errors="replace")
        return file.as_uri()


class PatientProtocol(LanguageServerProtocol):
    """Takes what some clients leave out, and answers each request: pygls drops one that it cannot read, and the client
    waits."""

    def structure_message(self, data: dict[str, Any]) -> Any:
        """A message of the protocol's types. Raises :class:`JsonRpcInvalidParams`; the client knows by then."""
        if data.get("jsonrpc"):
            _complete(data)
        try:
            return super().structure_message(data)
        except JsonRpcException as error:
            wrong = "; ".join(transform_error(error.__cause__ or error, path="message")[:3])
            refused = JsonRpcInvalidParams(f"{data.get('method', 'a response')} is not understood: {wrong}")
            if "method" in data and "id" in data:
                self._send_response(data["id"], error=refused.to_response_error())
            elif isinstance(self._server, PolicyServer):
                self._server.tell(refused.message, types.MessageType.Warning)
            raise refused from None


def _complete(message: dict[str, Any]) -> None:
    """Add what some clients leave out: the version of a text, without which its changes would be lost, and settings
    that they want to be asked for."""
    method, params = message.get("method"), message.get("params")
    document = params.get("textDocument") if isinstance(params, dict) else None
    if method in _VERSIONED and isinstance(document, dict) and not isinstance(document.get("version"), int):
        document["version"] = 0
    if method == types.WORKSPACE_DID_CHANGE_CONFIGURATION and (params is None or isinstance(params, dict)):
        message["params"] = {"settings": None, **(params or {})}


class PolicyServer(LanguageServer):
    """One connection."""

    def __init__(self) -> None:
        super().__init__(
            "policylang", installed_version(), types.TextDocumentSyncKind.Full, protocol_cls=PatientProtocol
        )
        for method in _KEPT_HERE:
            self.protocol.fm.builtin_features.pop(method, None)
        self.documents = OpenDocuments(
            self._publish, settled_now=self._refresh, loading=self._loading, failed=self._failed
        )
        self.shown = Shown()
        self.markdown = False
        """True if the client shows Markdown in hovers."""
        self.snippets = False
        """True if it steps through the placeholders of completions."""
        self.item_formats: tuple[str, ...] = ()
        """The formats of the documentation that it shows beside completions; may be empty."""
        self.ended = False
        """True once the client has asked to shut down."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._files = ShownFiles()

    # --- the beginning ---

    def begin(self, params: types.InitializeParams) -> None:
        """Take what a client says of itself. Whatever it leaves out is fine."""
        documents, workspace = self.documents, self.documents.workspace
        root = params.root_uri or (f"file://{params.root_path}" if params.root_path else None)
        folders = params.workspace_folders or ([types.WorkspaceFolder(root, "")] if root else [])
        self.change_folders(folders, ())
        workspace.started_with = section_of(params.initialization_options)
        documents.encoding = types.PositionEncodingKind(self.workspace.position_encoding)
        text = self.client_capabilities.text_document
        hover = None if text is None else text.hover
        self.markdown = hover is not None and types.MarkupKind.Markdown in (hover.content_format or ())
        completed = None if text is None or text.completion is None else text.completion.completion_item
        self.snippets = completed is not None and bool(completed.snippet_support)
        formats = None if completed is None else completed.documentation_format
        self.item_formats = tuple(formats or ())
        diagnostics = None if text is None else text.publish_diagnostics
        self.shown = Shown(
            related=diagnostics is not None and bool(diagnostics.related_information),
            links=diagnostics is not None and bool(diagnostics.code_description_support),
            tags=diagnostics is not None and diagnostics.tag_support is not None,
        )

    async def begun(self) -> None:
        """The client is ready: ask for its settings, and to be told of changes."""
        workspace = self.client_capabilities.workspace
        registrations: list[types.Registration] = []
        if workspace is not None and (each := workspace.did_change_configuration) and each.dynamic_registration:
            options: Any = types.DidChangeConfigurationRegistrationOptions(section=SECTION)
            registrations.append(_registration(types.WORKSPACE_DID_CHANGE_CONFIGURATION, options))
        watches = workspace is not None and workspace.did_change_watched_files
        if watches and watches.dynamic_registration:
            options = types.DidChangeWatchedFilesRegistrationOptions([types.FileSystemWatcher(it) for it in _WATCHED])
            registrations.append(_registration(types.WORKSPACE_DID_CHANGE_WATCHED_FILES, options))
        self._start(self._poll())
        if registrations:
            self.client_register_capability(types.RegistrationParams(registrations))
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
            self.tell(f"the client does not say its settings: {error}", types.MessageType.Warning)
            return
        answers = [*(found or ()), *[None] * len(scopes)]
        known.asked = {scope: section_of(answer) for scope, answer in zip(scopes, answers, strict=False)}
        self.documents.look_again()

    async def settings_changed(self, settings: object) -> None:
        """Settings that a client pushes; one that sends none wants to be asked."""
        self.documents.workspace.pushed = section_of(settings)
        await self.ask_for_settings()
        self.documents.look_again()

    # --- what a client is told ---

    def _publish(self, state: State) -> None:
        document = state.document
        self.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(document.uri, published(state, self.shown), version=document.version)
        )

    def _refresh(self, state: State) -> None:
        """Figures are there that were not when the client asked for them last."""
        workspace = self.client_capabilities.workspace
        if workspace is not None and workspace.inlay_hint is not None and workspace.inlay_hint.refresh_support:
            self.workspace_inlay_hint_refresh(None)

    def _loading(self, name: str) -> Callable[[], None]:
        """Show that a graph is read, where that takes longer than a moment."""
        window = self.client_capabilities.window
        if window is None or not window.work_done_progress:
            return lambda: None
        token = str(uuid.uuid4())
        asked = begun = over = False

        async def show() -> None:
            nonlocal asked, begun
            await asyncio.sleep(_AT_ONCE)
            asked = True
            await self.work_done_progress.create_async(token)
            if not over:
                message = types.WorkDoneProgressBegin("policylang: reading the graph", cancellable=False, message=name)
                self.work_done_progress.begin(token, message)
                begun = True

        task = self._start(show())

        def done() -> None:
            nonlocal over
            over = True
            if not asked:
                task.cancel()  # later the client's answer would find nobody
            elif begun:
                self.work_done_progress.end(token, types.WorkDoneProgressEnd())

        return done

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- what a command answers ---

    @property
    def versioned(self) -> bool:
        """True if the client takes edits of a version of a document."""
        workspace = self.client_capabilities.workspace
        edit = None if workspace is None else workspace.workspace_edit
        return edit is not None and bool(edit.document_changes)

    def show(self, name: str, uri: str, text: str) -> str:
        """Ask the client to open a text as a file of this name, or to show it as a message; returns the text."""
        if text and self._opens_files:
            self._open(self._files.write(name, uri, text))
        else:
            said = _plain_text(text) or "there is nothing to show: no rule here, or no plan on a snapshot"
            self.window_show_message(types.ShowMessageParams(types.MessageType.Info, said))
        return text

    def show_page(self, name: str, uri: str, page: str, *, ask: bool) -> str:
        """The address of a page in a file; ``ask``: and ask the client to open it in a browser."""
        address = self._files.write(name, uri, page)
        if ask and self._opens_files:
            self._open(address, external=True)
        elif ask:
            self.window_show_message(types.ShowMessageParams(types.MessageType.Info, f"the page is {address}"))
        return address

    async def choose(self, question: str, names: Sequence[str]) -> str | None:
        """The one of the first names that the user picks; None where there is none, and where nobody picks one."""
        if not names:
            return None
        actions = [types.MessageActionItem(name) for name in names[:_MOST_CHOICES]]
        params = types.ShowMessageRequestParams(types.MessageType.Info, question, actions)
        picked = await self.window_show_message_request_async(params)
        return None if picked is None else picked.title

    @property
    def _opens_files(self) -> bool:
        window = self.client_capabilities.window
        return window is not None and window.show_document is not None and window.show_document.support

    def _open(self, uri: str, *, external: bool = False) -> None:
        self.window_show_document(types.ShowDocumentParams(uri, external=external, take_focus=True))

    # --- errors ---

    def tell(self, message: str, kind: types.MessageType = types.MessageType.Error) -> None:
        """A line in the client's log."""
        self.window_log_message(types.LogMessageParams(kind, f"policylang: {message}"))

    def _failed(self, error: Exception) -> None:
        import traceback

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


def _registration(method: str, options: Any) -> types.Registration:
    return types.Registration(id=f"policylang-{method}", method=method, register_options=options)
