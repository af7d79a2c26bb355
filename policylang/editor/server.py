"""The language server: the protocol's requests, each handed to a feature with the state of its document.

Text is sent whole with each change: pygls applies partial changes by Python's line ends, of which there are more than
the protocol's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls.exceptions import JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.uris import to_fs_path

from policylang.api.project.settings import ProjectSettings, project_settings
from policylang.editor.features import actions as acting
from policylang.editor.features import completion, definition, hints, hover, layout, outline
from policylang.editor.features.published import published
from policylang.editor.open_documents import OpenDocuments
from policylang.editor.state import State
from policylang.language.version import installed_version


class PolicyServer(LanguageServer):
    """One connection."""

    def __init__(self) -> None:
        super().__init__("policylang", installed_version(), types.TextDocumentSyncKind.Full)
        self.documents = OpenDocuments(self._publish)

    def _publish(self, state: State) -> None:
        document = state.document
        self.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(document.uri, published(state), version=document.version)
        )
        if state.graph is not None:
            self._refresh()

    def _refresh(self) -> None:
        workspace = self.client_capabilities.workspace
        if workspace is not None and workspace.inlay_hint is not None and workspace.inlay_hint.refresh_support:
            self.workspace_inlay_hint_refresh(None)

    @property
    def has_snippets(self) -> bool:
        """Whether the client steps through the placeholders of what it completes."""
        document = self.client_capabilities.text_document
        item = None if document is None or document.completion is None else document.completion.completion_item
        return item is not None and bool(item.snippet_support)

    def begin(self, params: types.InitializeParams) -> None:
        """Settings of the workspace, and over them those that the client starts the server with."""
        uri = params.workspace_folders[0].uri if params.workspace_folders else params.root_uri
        folder = Path(found) if uri is not None and (found := to_fs_path(uri)) else None
        self.documents.folder = folder
        if folder is not None:
            self.documents.settings = project_settings(folder)[0]
        given = params.initialization_options
        if isinstance(given, dict):
            self.configure(given)

    def configure(self, given: dict[str, Any]) -> None:
        from attrs import evolve

        named = {key: given[key] for key in ("graph", "path", "device") if given.get(key) is not None}
        graph = named.get("graph")
        if graph is not None and self.documents.folder is not None:
            named["graph"] = str(self.documents.folder / graph)
        self.documents.settings = evolve(self.documents.settings or ProjectSettings(), **named)


def server() -> PolicyServer:
    """A server that answers, and waits for a connection."""
    made = PolicyServer()
    documents = made.documents

    def now(uri: str) -> State:
        state = documents.state(uri)
        if state is None:
            raise JsonRpcInvalidParams(f"{uri} is not open")
        return state

    async def settled(uri: str) -> State:
        state = await documents.settled(uri)
        if state is None:
            raise JsonRpcInvalidParams(f"{uri} is not open")
        return state

    @made.feature(types.INITIALIZE)
    def begin(params: types.InitializeParams) -> None:
        made.begin(params)

    @made.feature(types.TEXT_DOCUMENT_DID_OPEN)
    async def opened(params: types.DidOpenTextDocumentParams) -> None:
        document = params.text_document
        documents.put(document.uri, document.version, document.text)

    @made.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    async def changed(params: types.DidChangeTextDocumentParams) -> None:
        document = made.workspace.get_text_document(params.text_document.uri)
        documents.put(document.uri, params.text_document.version, document.source)

    @made.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    async def closed(params: types.DidCloseTextDocumentParams) -> None:
        documents.drop(params.text_document.uri)
        made.text_document_publish_diagnostics(types.PublishDiagnosticsParams(params.text_document.uri, []))

    @made.feature(types.TEXT_DOCUMENT_HOVER)
    async def hovered(params: types.HoverParams) -> types.Hover | None:
        state = await settled(params.text_document.uri)
        return hover.hover(state, state.document.positions.offset(params.position))

    @made.feature(types.TEXT_DOCUMENT_INLAY_HINT)
    async def hinted(params: types.InlayHintParams) -> list[types.InlayHint]:
        state = await settled(params.text_document.uri)
        return hints.hints(state, *_offsets(state, params.range))

    @made.feature(
        types.TEXT_DOCUMENT_COMPLETION,
        types.CompletionOptions(trigger_characters=completion.TRIGGERS, resolve_provider=True),
    )
    def completed(params: types.CompletionParams) -> types.CompletionList:
        state = now(params.text_document.uri)
        trigger = None if params.context is None else params.context.trigger_character
        return completion.completion(
            state, state.document.positions.offset(params.position), snippets=made.has_snippets, trigger=trigger
        )

    @made.feature(types.COMPLETION_ITEM_RESOLVE)
    def completion_resolved(item: types.CompletionItem) -> types.CompletionItem:
        return completion.resolved(documents.state(completion.uri_of(item)), item)

    @made.feature(types.TEXT_DOCUMENT_DEFINITION)
    def defined(params: types.DefinitionParams) -> list[types.Location]:
        state = now(params.text_document.uri)
        return definition.definition(state, state.document.positions.offset(params.position))

    @made.feature(types.TEXT_DOCUMENT_REFERENCES)
    def referred(params: types.ReferenceParams) -> list[types.Location]:
        state = now(params.text_document.uri)
        offset = state.document.positions.offset(params.position)
        return definition.references(state, documents.states(), offset, declaration=params.context.include_declaration)

    @made.feature(types.TEXT_DOCUMENT_PREPARE_RENAME)
    def renameable(params: types.PrepareRenameParams) -> types.Range | None:
        state = now(params.text_document.uri)
        return definition.renameable(state, state.document.positions.offset(params.position))

    @made.feature(types.TEXT_DOCUMENT_RENAME, types.RenameOptions(prepare_provider=True))
    def renamed(params: types.RenameParams) -> types.WorkspaceEdit:
        state = now(params.text_document.uri)
        offset = state.document.positions.offset(params.position)
        found = definition.renamed(state, documents.states(), offset, params.new_name)
        if isinstance(found, str):
            raise JsonRpcInvalidParams(found)
        return found

    @made.feature(types.TEXT_DOCUMENT_DOCUMENT_LINK)
    def linked(params: types.DocumentLinkParams) -> list[types.DocumentLink]:
        return definition.document_links(now(params.text_document.uri))

    @made.feature(types.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    def outlined(params: types.DocumentSymbolParams) -> list[types.DocumentSymbol]:
        return outline.symbols(now(params.text_document.uri))

    @made.feature(types.TEXT_DOCUMENT_FOLDING_RANGE)
    def folded(params: types.FoldingRangeParams) -> list[types.FoldingRange]:
        return outline.folding(now(params.text_document.uri))

    @made.feature(types.TEXT_DOCUMENT_FORMATTING)
    def formatted(params: types.DocumentFormattingParams) -> list[types.TextEdit] | None:
        state = now(params.text_document.uri)
        return layout.formatted(state)

    @made.feature(types.TEXT_DOCUMENT_RANGE_FORMATTING)
    def formatted_between(params: types.DocumentRangeFormattingParams) -> list[types.TextEdit]:
        state = now(params.text_document.uri)
        return layout.formatted_between(state, *_offsets(state, params.range))

    @made.feature(types.TEXT_DOCUMENT_CODE_ACTION)
    async def acted(params: types.CodeActionParams) -> list[types.CodeAction]:
        state = now(params.text_document.uri)
        return acting.actions(state, *_offsets(state, params.range), params.context.only)

    @made.command(acting.EXPLAIN_NODE)
    async def explained(uri: str, node: str) -> str:
        return acting.explained(await settled(uri), node)

    @made.command(acting.SHOW_PLAN)
    async def shown(uri: str) -> str | None:
        return acting.page_of(await settled(uri))

    return made


def serve() -> int:
    """Serve one client over standard input and output until it ends the connection; returns the exit code."""
    made = server()
    made.start_io()
    made.documents.close()
    return 0


def _offsets(state: State, range: types.Range) -> tuple[int, int]:
    positions = state.document.positions
    return positions.offset(range.start), positions.offset(range.end)
