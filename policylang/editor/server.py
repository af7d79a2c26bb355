"""The language server: the protocol's requests, each handed to a feature with the state of its document.

Text is sent whole with each change: pygls applies partial changes by Python's line ends, which are not only the
protocol's. A request is answered for the text that it was asked about, with the plan of that text, or not at all: if
the text changes in between, the client gets that error and asks again.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from lsprotocol import types
from pygls.exceptions import JsonRpcContentModified, JsonRpcInvalidParams

from policylang.editor import actions
from policylang.editor.completion import TRIGGERS, completion, uri_of_item, with_documentation
from policylang.editor.hover import hints, hover
from policylang.editor.open_documents import PolicyServer
from policylang.editor.state import State, changed_text
from policylang.editor.workspace import SETTINGS, path_of
from policylang.language.cancellation import Cancelled

_CHANGED = "the text changed while this was worked out"
_SWITCH = 0.0005
"""Seconds after which a thread that plans lets the one that answers run; Python's own are ten times that."""
T = TypeVar("T")
Placed = types.CompletionParams | types.DefinitionParams | types.ReferenceParams | types.DocumentHighlightParams
"""Requests about a place."""


def server() -> PolicyServer:
    """A server that answers, and waits for a connection."""
    made = PolicyServer()
    _register_documents(made)
    _register_answers(made)
    _register_commands(made)
    return made


def _register_documents(server: PolicyServer) -> None:
    """The messages about the connection, documents and settings."""
    documents = server.documents

    @server.feature(types.INITIALIZE)
    def begin(params: types.InitializeParams) -> None:
        server.begin(params)

    @server.feature(types.INITIALIZED)
    async def begun(params: types.InitializedParams) -> None:
        await server.begun()

    @server.feature(types.SHUTDOWN)
    def ended(params: None) -> None:
        server.ended = True

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: types.DidOpenTextDocumentParams) -> None:
        document = params.text_document
        documents.put(document.uri, document.version, document.text)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: types.DidChangeTextDocumentParams) -> None:
        document = params.text_document
        if (text := documents.text(document.uri)) is not None:  # a change to what was closed is late
            new = changed_text(text, params.content_changes, documents.encoding)
            documents.put(document.uri, document.version, new)

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def saved(params: types.DidSaveTextDocumentParams) -> None:
        documents.look_again()

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: types.DidCloseTextDocumentParams) -> None:
        documents.drop(params.text_document.uri)
        server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(params.text_document.uri, []))

    @server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
    async def configured(params: types.DidChangeConfigurationParams) -> None:
        await server.settings_changed(params.settings)

    @server.feature(types.WORKSPACE_DID_CHANGE_WORKSPACE_FOLDERS)
    async def folders_changed(params: types.DidChangeWorkspaceFoldersParams) -> None:
        server.change_folders(params.event.added, params.event.removed)
        await server.ask_for_settings()
        documents.look_again()


def _now(server: PolicyServer, uri: str) -> State:
    """The state of an open document, with a plan where that is ready."""
    found = server.documents.state(uri)
    if found is None:
        raise JsonRpcInvalidParams(f"{uri} is not open")
    return found


async def _settled(server: PolicyServer, uri: str) -> State:
    """The state with the plan of the text as it is now."""
    asked = _now(server, uri)
    await server.documents.settled(uri)
    found = _now(server, uri)
    if asked.document is not found.document:
        raise JsonRpcContentModified(_CHANGED)
    return found


def _register_answers(server: PolicyServer) -> None:
    """The requests about a place of a document."""

    def at(params: Placed) -> tuple[State, int]:
        state = _now(server, params.text_document.uri)
        return state, state.document.positions.offset(params.position)

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    async def hovered(params: types.HoverParams) -> types.Hover | None:
        state = await _settled(server, params.text_document.uri)
        return hover(state, state.document.positions.offset(params.position), markdown=server.markdown)

    @server.feature(types.TEXT_DOCUMENT_INLAY_HINT)
    async def hinted(params: types.InlayHintParams) -> list[types.InlayHint]:
        state = await _settled(server, params.text_document.uri)
        return hints(state, *_offsets(state, params.range), markdown=server.markdown)

    completing = types.CompletionOptions(trigger_characters=TRIGGERS, resolve_provider=True)

    @server.feature(types.TEXT_DOCUMENT_COMPLETION, completing)
    def completed(params: types.CompletionParams) -> types.CompletionList:
        trigger = None if params.context is None else params.context.trigger_character
        return completion(*at(params), trigger=trigger)

    @server.feature(types.COMPLETION_ITEM_RESOLVE)
    def completion_resolved(item: types.CompletionItem) -> types.CompletionItem:
        return with_documentation(server.documents.state(uri_of_item(item)), item, markdown=server.markdown)

    @server.feature(types.TEXT_DOCUMENT_CODE_ACTION, types.CodeActionOptions(code_action_kinds=actions.KINDS))
    async def acted(params: types.CodeActionParams) -> list[types.CodeAction]:
        state = await _settled(server, params.text_document.uri)
        found = _offsets(state, params.range)
        return actions.actions(state, *found, params.context.only, related=server.related, versioned=server.versioned)

    @server.feature(types.TEXT_DOCUMENT_DEFINITION)
    def defined(params: types.DefinitionParams) -> types.Location | None:
        return actions.definition(*at(params))

    @server.feature(types.TEXT_DOCUMENT_REFERENCES)
    def referred(params: types.ReferenceParams) -> list[types.Location]:
        return actions.references(*at(params), declaration=params.context.include_declaration)

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_HIGHLIGHT)
    def highlighted(params: types.DocumentHighlightParams) -> list[types.DocumentHighlight]:
        return actions.highlights(*at(params))

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    def outlined(params: types.DocumentSymbolParams) -> list[types.SymbolInformation]:
        return actions.symbols(_now(server, params.text_document.uri))

    @server.feature(types.TEXT_DOCUMENT_FORMATTING)
    def format_asked(params: types.DocumentFormattingParams) -> list[types.TextEdit] | None:
        return actions.formatted(_now(server, params.text_document.uri))


def _offsets(state: State, range: types.Range) -> tuple[int, int]:
    positions = state.document.positions
    return positions.offset(range.start), positions.offset(range.end)


def _register_commands(server: PolicyServer) -> None:
    """The commands: each returns its answer, and with ``True`` behind its arguments shows it as well."""

    def answer(name: str, uri: str, text: str, show: tuple[bool, ...]) -> str:
        if any(show):
            server.show(server.write(name, uri, text or "there is no rule here, or no plan on a snapshot\n"))
        return text

    async def worked_out(uri: str, work: Callable[[State], T]) -> T:
        state = await _settled(server, uri)
        try:
            return await server.documents.in_worker(lambda: work(state), state)
        except Cancelled:
            raise JsonRpcContentModified(_CHANGED) from None

    @server.command(actions.EXPLAIN_NODE)
    async def node_explained(uri: str, node: str, *show: bool) -> str:
        return answer(f"{node}.md", uri, await worked_out(uri, lambda state: actions.explained_node(state, node)), show)

    @server.command(actions.EXPLAIN_RULE)
    async def rule_explained(uri: str, line: int, *show: bool) -> str:
        text = await worked_out(uri, lambda state: actions.explained_line(state, line))
        return answer(f"line {line + 1}.md", uri, text, show)

    @server.command(actions.EXPLAIN_CODE)
    def code_explained(code: str, *show: bool) -> str:
        return answer(f"{code}.md", "", actions.explained_code(code), show)

    @server.command(actions.SHOW_PLAN)
    async def plan_shown(uri: str, *show: bool) -> dict[str, str] | None:
        page = await worked_out(uri, actions.page_of)
        if page is None:
            answer("no plan.md", uri, "", show)
            return None
        address = server.write(f"{_now(server, uri).document.source.name}.html", uri, page)
        if any(show):
            server.show(address)
        return {"uri": address}

    @server.command(actions.NODES_OF_RULE)
    async def named(uri: str, line: int) -> list[str]:
        return actions.nodes_of_rule(await _settled(server, uri), line)

    @server.command(SETTINGS)
    def in_use(uri: str) -> dict[str, str | None]:
        settings = server.documents.workspace.settings_of(path_of(uri))
        device = None if settings.device is None else settings.device.name
        return {"graph": settings.graph, "path": settings.path, "device": device}


def serve() -> int:
    """Serve one client over standard input and output until it ends the connection; returns the exit code. Whatever
    prints meanwhile, torch's warnings and libraries written in C among it, prints to the standard error."""
    sys.setswitchinterval(_SWITCH)
    logging.getLogger("pygls").setLevel(logging.CRITICAL)  # the server itself reports failures
    sys.stdout.flush()
    taken, given = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    made = server()
    made.start_io(taken, given)
    made.documents.close()
    with suppress(OSError):
        given.close()
    return 0 if made.ended else 1
