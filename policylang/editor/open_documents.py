"""The client, its settings and folders, and its open documents: read at once, planned on the snapshot in a thread."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, TypeVar

from attrs import define, evolve, field, frozen
from lsprotocol import types
from pygls.exceptions import JsonRpcContentModified, JsonRpcException, JsonRpcInvalidParams, JsonRpcRequestCancelled
from pygls.lsp.server import LanguageServer

from policylang.api.planned_graphs import read_graphs
from policylang.editor.actions import published
from policylang.editor.hover import stale_hints
from policylang.editor.state import (
    Document,
    GraphState,
    StaleHint,
    State,
    TextState,
    index_of,
    read_graph,
    read_text,
    unsettled,
)
from policylang.editor.statements import forget_snapshots
from policylang.editor.workspace import SECTION, EditorSettings, Stamp, Workspace, path_of, section_of, stamp_of
from policylang.graph.facts import Facts
from policylang.language.cancellation import Cancelled, cancellable, check_cancelled
from policylang.language.devices.reading import find_device
from policylang.language.diagnostics import Diagnostic, Source, diagnose
from policylang.language.files import read_source
from policylang.language.resources import installed_version
from policylang.language.syntax import Device

_POLL = 2.0  # seconds between two looks at the files that open documents depend on
_KEPT_HERE = (types.TEXT_DOCUMENT_DID_OPEN, types.TEXT_DOCUMENT_DID_CHANGE, types.TEXT_DOCUMENT_DID_CLOSE)
"""Texts are held once: pygls would hold them too, and fail on a change to a document that was closed."""
_EXPECTED = (JsonRpcContentModified, JsonRpcInvalidParams, JsonRpcRequestCancelled, BrokenPipeError)

_UNSAFE = re.compile(r"[^\w.-]+")


class PolicyServer(LanguageServer):
    def __init__(self) -> None:
        super().__init__("policylang", installed_version(), types.TextDocumentSyncKind.Full)
        for method in _KEPT_HERE:
            self.protocol.fm.builtin_features.pop(method, None)
        self.documents = OpenDocuments(self._publish, settled_now=self._refresh, failed=self._failed)
        self.related = True
        """True if the client shows further places of a diagnostic."""
        self.markdown = False
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
        found = published(state, related=self.related)
        params = types.PublishDiagnosticsParams(document.uri, found, version=document.version)
        self.text_document_publish_diagnostics(params)

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


_IDLE = 0.1  # seconds after which interrupted work is tried once more
T = TypeVar("T")


class Worker:
    """Runs one job after the other, in the order in which they are asked for."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "planning")
        self._goes_on = Event()
        self._goes_on.set()
        self._asked: set[Future[Any]] = set()

    async def do(self, work: Callable[[], T], wanted: Callable[[], bool]) -> T:
        """The result of some work. Raises :class:`Cancelled` once it is not ``wanted`` any more."""
        job = self._submitted(work, wanted)
        self._asked.add(job)
        job.add_done_callback(self._asked.discard)
        return await asyncio.wrap_future(job)

    async def do_when_idle(self, work: Callable[[], T], wanted: Callable[[], bool]) -> T:
        """Like :meth:`do`, for work that any other interrupts and that is restarted afterwards."""
        while True:
            try:
                return await asyncio.wrap_future(self._submitted(work, lambda: wanted() and not self._asked))
            except Cancelled:
                if not wanted():
                    raise
                await asyncio.sleep(_IDLE)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Pauses the work in the thread meanwhile, at its next cancellation point."""
        self._goes_on.clear()
        try:
            yield
        finally:
            self._goes_on.set()

    def close(self) -> None:
        """Nothing is begun any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _submitted(self, work: Callable[[], T], wanted: Callable[[], bool]) -> Future[T]:
        def goes_on() -> bool:
            if not self._goes_on.is_set():
                self._goes_on.wait()
            return wanted()

        def run() -> T:
            with cancellable(goes_on):
                check_cancelled()
                found = work()
                check_cancelled()
                return found

        return self._thread.submit(run)


UNREADABLE = "APL355"
_MOST = 4


@frozen
class ReadGraph:
    """A graph as it was read, or why it could not be."""

    facts: Facts | None = None
    problems: tuple[Diagnostic, ...] = ()
    stamp: Stamp = None


NO_GRAPH = ReadGraph()


@define(eq=False)
class Snapshots:
    """The last few that were asked for. Reading takes a tenth of a second, of a recorded graph in JSON several."""

    _read: dict[str, ReadGraph] = field(factory=dict)

    def known(self, name: str | None) -> ReadGraph:
        """The graph as it was read last, whatever has become of its file; empty where it was never read."""
        return NO_GRAPH if name is None else self._read.get(name, NO_GRAPH)

    def is_read(self, name: str | None) -> bool:
        """True if :meth:`known` is what the file holds now."""
        return name is None or (name in self._read and self._read[name].stamp == stamp_of(name))

    def read(self, name: str) -> ReadGraph:
        """Read the file as it is now. To be called in one thread at a time."""
        if self.is_read(name):
            return self._read[name]
        stamp = stamp_of(name)
        irregular = _irregular(name)
        graphs, problems = read_graphs([name]) if irregular is None else ({}, (irregular,))
        found = ReadGraph(next(iter(graphs.values()), None), problems, stamp)
        self._read = {**{key: each for key, each in [*self._read.items()][1 - _MOST :] if key != name}, name: found}
        forget_snapshots()
        if (index := index_of(found.facts)) is not None:
            index.prepare()  # here nobody waits for it, and who completes a word does
        return found


def _irregular(name: str) -> Diagnostic | None:
    """For a pipe or the like, which would block."""
    try:
        mode = os.stat(name).st_mode
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return diagnose(UNREADABLE, f"`{name}` is not a regular file", help="name a snapshot")


FAILED = "APL641"
_BYTE_ORDER_MARK = "\ufeff"

Publish = Callable[[State], None]


@define(eq=False, slots=False)
class OpenDocument:
    """One version of a text, with what it was read under."""

    document: Document
    settings: EditorSettings
    graph: ReadGraph
    """The graph that was known when the text was read last."""
    reads: dict[Path, object] = field(factory=dict)
    """The files that the text names, and the state of their contents."""
    current: bool = True
    """False while the graph's file is still to be read."""
    stale: tuple[StaleHint, ...] = ()
    """The hints of the last plan of an earlier text."""
    state: State | None = None
    """None only while the text is read."""
    task: asyncio.Task[None] | None = None
    """Reads the graph, plans, and publishes."""
    weighing: asyncio.Task[None] | None = None
    """Works out what rules are worth when nothing else is asked for."""

    @cached_property
    def real(self) -> str | None:
        """The path of its file without links."""
        return None if self.document.path is None else os.path.realpath(self.document.path)

    @property
    def pending(self) -> bool:
        return self.task is not None and not self.task.done()


@define(eq=False)
class OpenDocuments:
    """``publish`` is called with each new state of a document: once for its text, once for its plan. ``settled_now`` is
    called when no work is left, ``failed`` with an error that is a bug."""

    publish: Publish
    workspace: Workspace = field(factory=Workspace)
    settled_now: Publish = lambda state: None
    failed: Callable[[Exception], None] = lambda error: None
    encoding: types.PositionEncodingKind = types.PositionEncodingKind.Utf16
    _open: dict[str, OpenDocument] = field(factory=dict)
    _snapshots: Snapshots = field(factory=Snapshots)
    _worker: Worker = field(factory=Worker)

    # --- texts ---

    def put(self, uri: str, version: int, text: str) -> None:
        """A document is open, with this text."""
        path = path_of(uri)
        if text.startswith(_BYTE_ORDER_MARK):  # a file's is no text either; a space keeps all places
            text = f" {text[1:]}"
        source = Source(self.workspace.name_of(path, uri), text)
        self._begin(Document(uri, version, source, path, self.encoding))
        self.look_again()

    def drop(self, uri: str) -> None:
        self._stop(uri)
        self.look_again()

    def look_again(self) -> None:
        """Read the documents whose settings, snapshot or included files have changed."""
        for opened in list(self._open.values()):
            if self._is_outdated(opened):
                self._begin(opened.document)

    def close(self) -> None:
        """Nothing is worked out any more."""
        for uri in list(self._open):
            self._stop(uri)
        self._worker.close()

    # --- states ---

    def text(self, uri: str) -> str | None:
        """The text of an open document."""
        return self._open[uri].document.source.text if uri in self._open else None

    def state(self, uri: str) -> State | None:
        """The state of the text as it is now, with a plan where that is ready. None for a document that is not open."""
        opened = self._open.get(uri)
        return None if opened is None else opened.state

    async def settled(self, uri: str) -> State | None:
        """The state with the plan, selections and breakdown of the text as it is now, or has become meanwhile."""
        while (opened := self._open.get(uri)) is not None and opened.task is not None and opened.pending:
            await asyncio.wait([opened.task])
        return self.state(uri)

    async def in_worker(self, work: Callable[[], T], state: State) -> T:
        """The result of what takes long. Raises :class:`Cancelled` where the document changed before it was there."""
        uri, document = state.document.uri, state.document
        return await self._worker.do(work, lambda: uri in self._open and self._open[uri].document is document)

    # --- one document ---

    def _begin(self, document: Document) -> None:
        before = self._open.get(document.uri)
        self._stop(document.uri)
        settings = self.workspace.settings_of(document.path)
        opened = OpenDocument(document, settings, self._snapshots.known(settings.graph))
        self._open[document.uri] = opened
        opened.current = self._snapshots.is_read(settings.graph)
        is_same = before is not None and (before.settings, before.graph.facts) == (settings, opened.graph.facts)
        try:
            if before is not None and before.state is not None and is_same:
                opened.stale = stale_hints(before.state, document.positions)
            state = self._read(opened)
        except Exception as error:
            self._say_failure(opened, error)
            return
        if state.can_plan or not opened.current:
            opened.task = asyncio.ensure_future(self._go_on(opened))

    def _read(self, opened: OpenDocument) -> State:
        """Publish the findings in a text. Before its graph is read, without those that the graph may change."""
        graph, settings = opened.graph, opened.settings
        problems = (*settings.problems, *(graph.problems if opened.current else ()))
        with self._worker.waiting():
            text = self._text(opened)
        if not opened.current:
            text = unsettled(text)
        opened.state = state = State(opened.document, text, None, graph.facts, problems, settings.plans, opened.stale)
        self._note_devices(opened, text)
        self.publish(state)
        return state

    async def _go_on(self, opened: OpenDocument) -> None:
        """Read the graph and plan, each of which is cancelled once its result is not wanted."""
        name, state = opened.settings.graph, opened.state
        try:
            await asyncio.sleep(opened.settings.pause)
            if not opened.current and name is not None:
                opened.graph = await self._work(opened, lambda: self._snapshots.read(name))
                opened.current = True
                state = self._read(opened)
            if state is not None and state.facts is not None and state.can_plan:
                await self._plan(opened, state, state.facts)
        except Cancelled:
            return
        except Exception as error:
            self._say_failure(opened, error)

    async def _plan(self, opened: OpenDocument, state: State, facts: Facts) -> None:
        settings = opened.settings
        assert settings.graph is not None
        arguments = (state.text, facts, settings.graph, settings.path, settings.device)
        made = await self._work(opened, lambda: read_graph(*arguments))
        opened.state = state = evolve(state, graph=made, stale=())
        self.publish(state)
        if made is not None:
            await self._work(opened, made.look)
            opened.weighing = asyncio.ensure_future(self._weigh(opened, state, made))
        self.settled_now(state)

    async def _weigh(self, opened: OpenDocument, state: State, graph: GraphState) -> None:
        """Weigh rules and scheduling lines, a plan a line, when nothing else is to do. Each step gives more to show."""
        try:
            for step in graph.steps_of_weighing():
                await self._worker.do_when_idle(step, lambda: self._is_current(opened))
                self.settled_now(state)
        except Cancelled:
            return
        except Exception as error:
            self.failed(error)

    async def _work(self, opened: OpenDocument, work: Callable[[], T]) -> T:
        return await self._worker.do(work, lambda: self._is_current(opened))

    def _is_current(self, opened: OpenDocument) -> bool:
        return self._open.get(opened.document.uri) is opened

    def _stop(self, uri: str) -> None:
        opened = self._open.pop(uri, None)
        if opened is None:
            return
        for task in (opened.task, opened.weighing):
            if task is not None:
                task.cancel()

    def _say_failure(self, opened: OpenDocument, error: Exception) -> None:
        """Publish a bug of ours as a diagnostic, so that the author knows that nothing was planned."""
        self.failed(error)
        if not self._is_current(opened):
            return
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        help = "it is a bug in policylang: please report it, with the policy and the snapshot if you can"
        problem = diagnose(FAILED, f"nothing could be planned: {said}", help=help)
        if opened.state is None:
            empty = evolve(opened.document, source=Source(opened.document.source.name, ""))
            opened.state = State(opened.document, read_text(empty, None, read_source))
        opened.state = evolve(opened.state, problems=(*opened.state.problems, problem))
        self.publish(opened.state)

    # --- what a document depends on ---

    def _is_outdated(self, opened: OpenDocument) -> bool:
        if any(self._stamp(path) != stamp for path, stamp in list(opened.reads.items())):
            return True
        if self.workspace.settings_of(opened.document.path) != opened.settings:
            return True
        graph = opened.settings.graph
        return opened.current and graph is not None and opened.graph.stamp != stamp_of(graph)

    def _text(self, opened: OpenDocument) -> TextState:
        def read(path: Path, name: str) -> Source | Diagnostic:
            """An included file: the text of the document where it is open."""
            opened.reads[path] = self._stamp(path)
            other = self._at(path)
            return read_source(path, name) if other is None else Source(name, other.document.source.text)

        return read_text(opened.document, opened.graph.facts, read)

    def _stamp(self, path: Path) -> object:
        other = self._at(path)
        return stamp_of(path) if other is None else (other.document.uri, other.document.source.text)

    def _at(self, path: Path) -> OpenDocument | None:
        """The open document of a file, however its path is spelled."""
        real = os.path.realpath(path)
        return next((each for each in list(self._open.values()) if each.real == real), None)

    def _note_devices(self, opened: OpenDocument, text: TextState) -> None:
        """A profile that a ``device`` line names is a file that the policy depends on."""
        for placed in text.expansion.statements:
            if isinstance(placed.statement, Device):
                found = find_device(placed.statement.target, placed.folder)
                path = found[0] if isinstance(found, tuple) else placed.folder / placed.statement.target
                opened.reads[path] = stamp_of(path)
