"""The language server: the protocol's requests, each handed to a feature with the state of its document.

Text is sent whole with each change: pygls applies partial changes by Python's line ends, of which there are more than
the protocol's. A request is answered for the text that it was asked about, with the plan of that text, or not at all:
where the text changes in between, the client is told so and asks again.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from lsprotocol import types
from pygls.exceptions import JsonRpcContentModified, JsonRpcInvalidParams

from policylang.editor.actions import (
    EXPLAIN_CODE,
    EXPLAIN_NODE,
    EXPLAIN_RULE,
    KINDS,
    NODES_OF_RULE,
    SHOW_PLAN,
    actions,
    edit_of,
    explained_code,
    explained_line,
    explained_node,
    nodes_of_rule,
    page_of,
)
from policylang.editor.client import PolicyServer
from policylang.editor.completion import TRIGGERS, completion, uri_of_item, with_documentation
from policylang.editor.hover import hints, hover
from policylang.editor.names import PolicyFiles, PolicyFolder
from policylang.editor.navigation import (
    RenameRefused,
    definition,
    highlights,
    references,
    renameable,
    renamed,
)
from policylang.editor.outline import flat, formatted, formatted_between, symbols, workspace_symbols
from policylang.editor.state import State, changed_text
from policylang.editor.workspace import SETTINGS, path_of
from policylang.language.cancellation import Cancelled

_CHANGED = "the text changed while this was worked out"
_SWITCH = 0.0005
"""Seconds after which a thread that plans lets the one that answers run; Python's own are ten times that."""
T = TypeVar("T")


def server() -> PolicyServer:
    """A server that answers, and waits for a connection."""
    made = PolicyServer()
    documents = made.documents

    def now(uri: str) -> State:
        """The state of an open document, with a plan where that is ready."""
        found = documents.state(uri)
        if found is None:
            raise JsonRpcInvalidParams(f"{uri} is not open")
        return found

    async def settled(uri: str) -> State:
        """The state with the plan of the text as it is now."""
        asked = now(uri)
        await documents.settled(uri)
        found = now(uri)
        if asked.document is not found.document:
            raise JsonRpcContentModified(_CHANGED)
        return found

    async def in_worker(work: Callable[[], T], state: State) -> T:
        try:
            return await documents.in_worker(work, state)
        except Cancelled:
            raise JsonRpcContentModified(_CHANGED) from None

    @made.feature(types.INITIALIZE)
    def begin(params: types.InitializeParams) -> None:
        made.begin(params)

    @made.feature(types.INITIALIZED)
    async def begun(params: types.InitializedParams) -> None:
        await made.begun()

    @made.feature(types.SHUTDOWN)
    def ended(params: None) -> None:
        made.ended = True

    @made.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: types.DidOpenTextDocumentParams) -> None:
        document = params.text_document
        documents.put(document.uri, document.version, document.text)

    @made.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: types.DidChangeTextDocumentParams) -> None:
        uri = params.text_document.uri
        if (text := documents.text(uri)) is not None:  # a change to what was closed is late
            documents.put(
                uri, params.text_document.version, changed_text(text, params.content_changes, documents.encoding)
            )

    @made.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def saved(params: types.DidSaveTextDocumentParams) -> None:
        documents.look_again()

    @made.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: types.DidCloseTextDocumentParams) -> None:
        documents.drop(params.text_document.uri)
        made.text_document_publish_diagnostics(types.PublishDiagnosticsParams(params.text_document.uri, []))

    @made.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
    async def configured(params: types.DidChangeConfigurationParams) -> None:
        await made.settings_changed(params.settings)

    @made.feature(types.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def changed_on_disk(params: types.DidChangeWatchedFilesParams) -> None:
        documents.look_again()

    @made.feature(types.WORKSPACE_DID_CHANGE_WORKSPACE_FOLDERS)
    async def folders_changed(params: types.DidChangeWorkspaceFoldersParams) -> None:
        made.change_folders(params.event.added, params.event.removed)
        await made.ask_for_settings()
        documents.look_again()

    @made.feature(types.TEXT_DOCUMENT_HOVER)
    async def hovered(params: types.HoverParams) -> types.Hover | None:
        state = await settled(params.text_document.uri)
        return hover(state, state.document.positions.offset(params.position), markdown=made.markdown)

    @made.feature(types.TEXT_DOCUMENT_INLAY_HINT)
    async def hinted(params: types.InlayHintParams) -> list[types.InlayHint]:
        state = await settled(params.text_document.uri)
        return hints(state, *_offsets(state, params.range), markdown=made.markdown)

    @made.feature(
        types.TEXT_DOCUMENT_COMPLETION,
        types.CompletionOptions(trigger_characters=TRIGGERS, resolve_provider=True),
    )
    def completed(params: types.CompletionParams) -> types.CompletionList:
        state = now(params.text_document.uri)
        trigger = None if params.context is None else params.context.trigger_character
        return completion(
            state, state.document.positions.offset(params.position), snippets=made.snippets, trigger=trigger
        )

    @made.feature(types.COMPLETION_ITEM_RESOLVE)
    def completion_resolved(item: types.CompletionItem) -> types.CompletionItem:
        return with_documentation(documents.state(uri_of_item(item)), item, made.item_formats)

    @made.feature(types.TEXT_DOCUMENT_CODE_ACTION, types.CodeActionOptions(code_action_kinds=KINDS))
    async def acted(params: types.CodeActionParams) -> list[types.CodeAction]:
        state = await settled(params.text_document.uri)
        found = _offsets(state, params.range)
        return actions(state, *found, params.context.only, shown=made.shown, versioned=made.versioned)

    @made.command(EXPLAIN_NODE)
    async def node_explained(uri: str, node: str | None, *more: Any) -> str:
        """``more``: a line to choose a node from where none is named, and whether to show the answer."""
        line, show = (*more, *(0, False)[len(more) :])[:2]
        state = await settled(uri)
        if node is None and (names := nodes_of_rule(state, line)):
            node = await made.choose(f"Which of the {len(names):,} nodes of line {line + 1}?", names)
            if node is None:
                return ""
        text = "" if node is None else await in_worker(lambda: explained_node(state, str(node)), state)
        return made.show(f"{node}.md", uri, text) if show else text

    @made.command(EXPLAIN_RULE)
    async def rule_explained(uri: str, line: int, *show: bool) -> str:
        state = await settled(uri)
        text = await in_worker(lambda: explained_line(state, line), state)
        return made.show(f"line {line + 1}.md", uri, text) if any(show) else text

    @made.command(EXPLAIN_CODE)
    def code_explained(code: str, *show: bool) -> str:
        text = explained_code(code)
        return made.show(f"{code}.md", "", text) if any(show) else text

    @made.command(SHOW_PLAN)
    async def plan_shown(uri: str, *show: bool) -> dict[str, str] | None:
        state = await settled(uri)
        page = await in_worker(lambda: page_of(state), state)
        if page is None and any(show):
            made.show("", uri, "")
        if page is None:
            return None
        return {"uri": made.show_page(f"{state.document.source.name}.html", uri, page, ask=any(show))}

    @made.command(NODES_OF_RULE)
    async def named(uri: str, line: int) -> list[str]:
        return nodes_of_rule(await settled(uri), line)

    @made.command(SETTINGS)
    def in_use(uri: str) -> dict[str, str | None]:
        settings = documents.workspace.settings_of(path_of(uri))
        device = None if settings.device is None else settings.device.name
        return {"graph": settings.graph, "path": settings.path, "device": device}

    _register_navigation(made, now)
    return made


def _register_navigation(server: PolicyServer, now: Callable[[str], State]) -> None:
    """The requests about names and form."""
    files, documents = PolicyFolder(), server.documents

    def around() -> PolicyFiles:
        return files.files(documents.workspace.folders.values(), [state.document for state in documents.states()])

    def at(document: types.TextDocumentIdentifier, position: types.Position) -> tuple[State, int]:
        state = now(document.uri)
        return state, state.document.positions.offset(position)

    @server.feature(types.TEXT_DOCUMENT_DEFINITION)
    def defined(params: types.DefinitionParams) -> list[types.LocationLink] | list[types.Location]:
        found = definition(*at(params.text_document, params.position), around)
        client = server.client_capabilities.text_document
        if client is not None and client.definition is not None and client.definition.link_support:
            return found
        return [types.Location(each.target_uri, each.target_selection_range) for each in found]

    @server.feature(types.TEXT_DOCUMENT_REFERENCES)
    def referred(params: types.ReferenceParams) -> list[types.Location]:
        state, offset = at(params.text_document, params.position)
        return references(state, around(), offset, declaration=params.context.include_declaration)

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_HIGHLIGHT)
    def highlighted(params: types.DocumentHighlightParams) -> list[types.DocumentHighlight]:
        return highlights(*at(params.text_document, params.position))

    @server.feature(types.TEXT_DOCUMENT_PREPARE_RENAME)
    def rename_asked(params: types.PrepareRenameParams) -> types.Range | None:
        state, offset = at(params.text_document, params.position)
        try:
            return renameable(state, around(), offset)
        except RenameRefused as refused:
            raise JsonRpcInvalidParams(str(refused)) from None

    @server.feature(types.TEXT_DOCUMENT_RENAME, types.RenameOptions(prepare_provider=True))
    def rename_made(params: types.RenameParams) -> types.WorkspaceEdit:
        state, offset = at(params.text_document, params.position)
        try:
            found = renamed(state, around(), offset, params.new_name)
        except RenameRefused as refused:
            raise JsonRpcInvalidParams(str(refused)) from None
        return edit_of(state.document, {state.document.uri: found}, server.versioned)

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    def outlined(params: types.DocumentSymbolParams) -> list[types.DocumentSymbol] | list[types.SymbolInformation]:
        state = now(params.text_document.uri)
        found = symbols(state)
        client = server.client_capabilities.text_document
        symbol = None if client is None else client.document_symbol
        tree = symbol is not None and symbol.hierarchical_document_symbol_support
        return found if tree else flat(state, found)

    @server.feature(types.WORKSPACE_SYMBOL)
    def looked_for(params: types.WorkspaceSymbolParams) -> list[types.SymbolInformation]:
        return workspace_symbols(around(), params.query, documents.encoding)

    @server.feature(types.TEXT_DOCUMENT_FORMATTING)
    def format_asked(params: types.DocumentFormattingParams) -> list[types.TextEdit] | None:
        return formatted(now(params.text_document.uri))

    @server.feature(types.TEXT_DOCUMENT_RANGE_FORMATTING)
    def format_asked_between(params: types.DocumentRangeFormattingParams) -> list[types.TextEdit]:
        state = now(params.text_document.uri)
        return formatted_between(state, *_offsets(state, params.range))


def serve() -> int:
    """Serve one client over standard input and output until it ends the connection; returns the exit code.

    Whatever prints meanwhile, torch's warnings and libraries written in C among it, prints to the standard error.
    """
    sys.setswitchinterval(_SWITCH)
    logging.getLogger("pygls").setLevel(logging.CRITICAL)  # the server itself tells what goes wrong
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


def _offsets(state: State, range: types.Range) -> tuple[int, int]:
    positions = state.document.positions
    return positions.offset(range.start), positions.offset(range.end)
