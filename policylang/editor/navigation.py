"""The requests about names, files and form, each handed to its feature with what the client can take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lsprotocol import types
from pygls.exceptions import JsonRpcContentModified, JsonRpcInvalidParams

from policylang.editor.client import PolicyServer
from policylang.editor.features import folding, layout, links, outline, references, renaming
from policylang.editor.features.definition import definition
from policylang.editor.names.policy_files import PolicyFiles, PolicyFolder
from policylang.editor.state import State
from policylang.editor.workspace import path_of

_POLICIES = types.FileOperationRegistrationOptions(
    [
        types.FileOperationFilter(types.FileOperationPattern("**/*.{apl,toml}", types.FileOperationPatternKind.File)),
        types.FileOperationFilter(types.FileOperationPattern("**", types.FileOperationPatternKind.Folder)),
    ]
)
_SHORT = 1 << 13
"""Characters of a text that is formatted in a tenth of a second."""
T = TypeVar("T")
_INCOMPLETE = "the workspace holds more policy files than are looked at: some may still have the old name"


def register_navigation(server: PolicyServer, now: Callable[[str], Awaitable[State]]) -> None:
    """Have a server answer them. ``now`` gives the state of an open document."""
    files, documents = PolicyFolder(), server.documents

    def around() -> PolicyFiles:
        return files.files(documents.workspace.folders.values(), [state.document for state in documents.states()])

    async def at(document: types.TextDocumentIdentifier, position: types.Position) -> tuple[State, int]:
        state = await now(document.uri)
        return state, state.document.positions.offset(position)

    async def aside(state: State, work: Callable[[], T]) -> T:
        """The result, of a long text in a thread of its own, so that typing goes on; it is of no use for a later
        text."""
        if len(state.document.source.text) <= _SHORT:
            return work()
        found = await asyncio.to_thread(work)
        latest = documents.state(state.document.uri)
        if latest is None or latest.document is not state.document:
            raise JsonRpcContentModified("the text changed while this was worked out")
        return found

    @server.feature(types.TEXT_DOCUMENT_DEFINITION)
    async def defined(params: types.DefinitionParams) -> list[types.LocationLink] | list[types.Location]:
        found = definition(*await at(params.text_document, params.position), around)
        client = server.client_capabilities.text_document
        if client is not None and client.definition is not None and client.definition.link_support:
            return found
        return [types.Location(each.target_uri, each.target_selection_range) for each in found]

    @server.feature(types.TEXT_DOCUMENT_REFERENCES)
    async def referred(params: types.ReferenceParams) -> list[types.Location]:
        state, offset = await at(params.text_document, params.position)
        return references.references(state, around(), offset, declaration=params.context.include_declaration)

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_HIGHLIGHT)
    async def highlighted(params: types.DocumentHighlightParams) -> list[types.DocumentHighlight]:
        return references.highlights(*await at(params.text_document, params.position))

    @server.feature(types.TEXT_DOCUMENT_PREPARE_RENAME)
    async def renameable(params: types.PrepareRenameParams) -> types.Range | None:
        state, offset = await at(params.text_document, params.position)
        try:
            return renaming.renameable(state, around(), offset)
        except renaming.RenameRefused as refused:
            raise JsonRpcInvalidParams(str(refused)) from None

    @server.feature(types.TEXT_DOCUMENT_RENAME, types.RenameOptions(prepare_provider=True))
    async def renamed(params: types.RenameParams) -> types.WorkspaceEdit:
        state, offset = await at(params.text_document, params.position)
        near = around()
        try:
            found = renaming.renamed(state, near, offset, params.new_name, versions=_takes_versions(server))
        except renaming.RenameRefused as refused:
            raise JsonRpcInvalidParams(str(refused)) from None
        if not near.complete:
            server.window_show_message(types.ShowMessageParams(types.MessageType.Warning, _INCOMPLETE))
        return found

    @server.feature(types.WORKSPACE_WILL_RENAME_FILES, _POLICIES)
    def moving(params: types.RenameFilesParams) -> types.WorkspaceEdit | None:
        paths = [(path_of(each.old_uri), path_of(each.new_uri)) for each in params.files]
        moves = [(old, new) for old, new in paths if old is not None and new is not None]
        return links.moved_files(around(), moves, documents.encoding, _takes_versions(server))

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_LINK)
    async def linked(params: types.DocumentLinkParams) -> list[types.DocumentLink]:
        client = server.client_capabilities.text_document
        link = None if client is None else client.document_link
        tooltips = link is not None and bool(link.tooltip_support)
        return links.document_links(await now(params.text_document.uri), tooltips=tooltips)

    @server.feature(types.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    async def outlined(
        params: types.DocumentSymbolParams,
    ) -> list[types.DocumentSymbol] | list[types.SymbolInformation]:
        state = await now(params.text_document.uri)
        found = await aside(state, lambda: outline.symbols(state))
        client = server.client_capabilities.text_document
        symbol = None if client is None else client.document_symbol
        tree = symbol is not None and symbol.hierarchical_document_symbol_support
        return found if tree else outline.flat(state, found)

    @server.feature(types.WORKSPACE_SYMBOL)
    def looked_for(params: types.WorkspaceSymbolParams) -> list[types.SymbolInformation]:
        return outline.workspace_symbols(around(), params.query, documents.encoding)

    @server.feature(types.TEXT_DOCUMENT_FOLDING_RANGE)
    async def folded(params: types.FoldingRangeParams) -> list[types.FoldingRange]:
        return folding.folding(await now(params.text_document.uri))

    @server.feature(types.TEXT_DOCUMENT_SELECTION_RANGE)
    async def grown(params: types.SelectionRangeParams) -> list[types.SelectionRange]:
        state = await now(params.text_document.uri)
        return [folding.selection(state, state.document.positions.offset(each)) for each in params.positions]

    @server.feature(types.TEXT_DOCUMENT_FORMATTING)
    async def formatted(params: types.DocumentFormattingParams) -> list[types.TextEdit] | None:
        state = await now(params.text_document.uri)
        return await aside(state, lambda: layout.formatted(state))

    @server.feature(types.TEXT_DOCUMENT_RANGE_FORMATTING)
    async def formatted_between(params: types.DocumentRangeFormattingParams) -> list[types.TextEdit]:
        state = await now(params.text_document.uri)
        start, end = (state.document.positions.offset(each) for each in (params.range.start, params.range.end))
        return await aside(state, lambda: layout.formatted_between(state, start, end))


def _takes_versions(server: PolicyServer) -> bool:
    workspace = server.client_capabilities.workspace
    edit = None if workspace is None else workspace.workspace_edit
    return edit is not None and bool(edit.document_changes)
