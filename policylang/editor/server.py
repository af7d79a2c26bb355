"""The language server: the protocol's requests, each handed to a feature with the state of its document.

Text is sent whole with each change: pygls applies partial changes by Python's line ends, of which there are more than
the protocol's. A request is answered for the text that it was asked about, with the plan of that text, or not at all:
where the text changes in between, the client is told so and asks again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lsprotocol import types
from pygls.exceptions import JsonRpcContentModified, JsonRpcException, JsonRpcInvalidParams

from policylang.editor.client import PolicyServer
from policylang.editor.connection import serve_stdio
from policylang.editor.features import actions as acting
from policylang.editor.features import completion, hints, hover
from policylang.editor.features import on_request as asked
from policylang.editor.features.rule_nodes import NODES_OF_RULE, nodes_of_rule
from policylang.editor.navigation import register_navigation
from policylang.editor.positions import changed_text
from policylang.editor.state import State
from policylang.editor.workspace import SETTINGS, path_of
from policylang.language.cancellation import Cancelled

_CHANGED = "the text changed while this was worked out"
_REFUSED = types.LSPErrorCodes.RequestFailed.value
_LONGEST = 1 << 17
"""Characters of a text that is answered for on the event loop: half a second for its outline."""
T = TypeVar("T")


def server() -> PolicyServer:
    """A server that answers, and waits for a connection."""
    made = PolicyServer()
    documents = made.documents

    def still(uri: str, asked: State | None, found: State | None) -> State:
        """What was found, if it is of the text that was asked about."""
        if found is None:
            raise JsonRpcInvalidParams(f"{uri} is not open")
        if asked is not None and asked.document is not found.document:
            raise JsonRpcContentModified(_CHANGED)
        return found

    async def now(uri: str) -> State:
        state = still(uri, documents.state(uri), await documents.read(uri))
        if len(state.document.source.text) > _LONGEST:
            raise JsonRpcException(f"a text of more than {_LONGEST // 1024} KiB has diagnostics only", _REFUSED)
        return state

    async def settled(uri: str) -> State:
        return still(uri, await documents.read(uri), await documents.settled(uri))

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
        return hover.hover(state, state.document.positions.offset(params.position), markdown=made.markdown)

    @made.feature(types.TEXT_DOCUMENT_INLAY_HINT)
    async def hinted(params: types.InlayHintParams) -> list[types.InlayHint]:
        state = await settled(params.text_document.uri)
        return hints.hints(state, *_offsets(state, params.range), markdown=made.markdown)

    @made.feature(
        types.TEXT_DOCUMENT_COMPLETION,
        types.CompletionOptions(trigger_characters=completion.TRIGGERS, resolve_provider=True),
    )
    async def completed(params: types.CompletionParams) -> types.CompletionList:
        state = await now(params.text_document.uri)
        trigger = None if params.context is None else params.context.trigger_character
        return completion.completion(
            state, state.document.positions.offset(params.position), snippets=made.snippets, trigger=trigger
        )

    @made.feature(types.COMPLETION_ITEM_RESOLVE)
    def completion_resolved(item: types.CompletionItem) -> types.CompletionItem:
        return completion.resolved(documents.state(completion.uri_of(item)), item, made.item_formats)

    @made.feature(types.TEXT_DOCUMENT_CODE_ACTION, types.CodeActionOptions(code_action_kinds=acting.KINDS))
    async def acted(params: types.CodeActionParams) -> list[types.CodeAction]:
        state = await settled(params.text_document.uri)
        found = _offsets(state, params.range)
        return acting.actions(state, *found, params.context.only, shown=made.shown, versioned=made.versioned)

    @made.command(asked.EXPLAIN_NODE)
    async def explained(uri: str, node: str | None, *more: Any) -> str:
        """``more``: a line to choose a node from where none is named, and whether to show the answer."""
        line, show = (*more, *(0, False)[len(more) :])[:2]
        state = await settled(uri)
        if node is None and (names := nodes_of_rule(state, line)):
            node = await made.choose(f"Which of the {len(names):,} nodes of line {line + 1}?", names)
            if node is None:
                return ""
        text = "" if node is None else await in_worker(lambda: asked.explained_node(state, str(node)), state)
        return made.show(f"{node}.md", uri, text) if show else text

    @made.command(asked.EXPLAIN_RULE)
    async def explained_rule(uri: str, line: int, *show: bool) -> str:
        state = await settled(uri)
        text = await in_worker(lambda: asked.explained_line(state, line), state)
        return made.show(f"line {line + 1}.md", uri, text) if any(show) else text

    @made.command(asked.EXPLAIN_CODE)
    def explained_code(code: str, *show: bool) -> str:
        text = asked.explained_code(code)
        return made.show(f"{code}.md", "", text) if any(show) else text

    @made.command(asked.SHOW_PLAN)
    async def plan_shown(uri: str, *show: bool) -> dict[str, str] | None:
        state = await settled(uri)
        page = await in_worker(lambda: asked.page_of(state), state)
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

    register_navigation(made, now)
    return made


def serve() -> int:
    """Serve one client over standard input and output until it ends the connection; returns the exit code."""
    return serve_stdio(server())


def _offsets(state: State, range: types.Range) -> tuple[int, int]:
    positions = state.document.positions
    return positions.offset(range.start), positions.offset(range.end)
