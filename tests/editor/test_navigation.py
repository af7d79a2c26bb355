"""Names and form over a real connection: a client that can do everything, and one that can do little."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytest_lsp", reason="needs a client of the language server")

from lsprotocol import types
from pygls.exceptions import JsonRpcException
from pytest_lsp import ClientServerConfig, make_test_lsp_client

from policylang.editor.open_documents import LONG
from tests.editor.conftest import SERVER
from tests.editor.real_client import Editor

LIB = "let big = mm\r\n"
MAIN = 'include "lib.apl"\nsave   big\nrecompute matmul\n'
CAN = types.ClientCapabilities(
    text_document=types.TextDocumentClientCapabilities(
        definition=types.DefinitionClientCapabilities(link_support=True),
        document_link=types.DocumentLinkClientCapabilities(tooltip_support=True),
        document_symbol=types.DocumentSymbolClientCapabilities(hierarchical_document_symbol_support=True),
    ),
    workspace=types.WorkspaceClientCapabilities(
        workspace_edit=types.WorkspaceEditClientCapabilities(document_changes=True)
    ),
)


class Session:
    """A client with one open document, and requests about it."""

    def __init__(self, client: Any, uri: str) -> None:
        self.client, self.uri = client, uri
        self.document = types.TextDocumentIdentifier(uri)

    async def ask(self, method: str, params: type, line: int = 1, character: int = 8, **more: Any) -> Any:
        made = params(text_document=self.document, position=types.Position(line, character), **more)
        return await getattr(self.client, f"{method}_async")(made)


async def session(folder: Path, capabilities: types.ClientCapabilities) -> Session:
    (folder / "lib.apl").write_bytes(LIB.encode())
    client = await ClientServerConfig(SERVER, client_factory=make_test_lsp_client).start()
    folders = [types.WorkspaceFolder(folder.as_uri(), "policies")]
    await client.initialize_session(types.InitializeParams(capabilities, workspace_folders=folders))
    uri = (folder / "main.apl").as_uri()
    client.text_document_did_open(types.DidOpenTextDocumentParams(types.TextDocumentItem(uri, "policylang", 7, MAIN)))
    return Session(client, uri)


def test_a_client_that_can_do_everything(tmp_path: Path) -> None:
    asyncio.run(_everything(tmp_path))


async def _everything(folder: Path) -> None:
    asked = await session(folder, CAN)
    client, lib = asked.client, (folder / "lib.apl").as_uri()

    (link,) = await asked.ask("text_document_definition", types.DefinitionParams)
    assert isinstance(link, types.LocationLink)
    assert (link.target_uri, link.target_selection_range.start) == (lib, types.Position(0, 4))
    context = types.ReferenceContext(include_declaration=True)
    found = await asked.ask("text_document_references", types.ReferenceParams, context=context)
    assert [each.uri for each in found] == [asked.uri, lib]
    assert len(await asked.ask("text_document_document_highlight", types.DocumentHighlightParams)) == 1

    shown = await asked.ask("text_document_prepare_rename", types.PrepareRenameParams)
    assert shown == types.Range(types.Position(1, 7), types.Position(1, 10))
    edit = await asked.ask("text_document_rename", types.RenameParams, new_name="large")
    assert [(each.text_document.uri, each.text_document.version) for each in edit.document_changes] == [
        (asked.uri, 7),
        (lib, None),
    ]
    with pytest.raises(JsonRpcException, match="`matmul` is a group of the prelude"):
        await asked.ask("text_document_prepare_rename", types.PrepareRenameParams, line=2, character=12)
    with pytest.raises(JsonRpcException, match="`save` is a word of the language"):
        await asked.ask("text_document_rename", types.RenameParams, new_name="save")

    symbols = await client.text_document_document_symbol_async(types.DocumentSymbolParams(asked.document))
    assert [each.name for each in symbols] == ['include "lib.apl"', "save big", "recompute matmul"]
    assert isinstance(symbols[0], types.DocumentSymbol)
    (name,) = await client.workspace_symbol_async(types.WorkspaceSymbolParams("bg"))
    assert (name.name, name.location.uri) == ("big", lib)
    assert not await client.text_document_folding_range_async(types.FoldingRangeParams(asked.document))
    places = [types.Position(1, 8), types.Position(2, 0)]
    grown = await client.text_document_selection_range_async(types.SelectionRangeParams(asked.document, places))
    assert [each.range.end.character for each in grown] == [10, 9]

    options = types.FormattingOptions(tab_size=8, insert_spaces=False)
    blank = types.TextEdit(types.Range(types.Position(1, 4), types.Position(1, 7)), " ")
    (edit,) = await client.text_document_formatting_async(types.DocumentFormattingParams(asked.document, options))
    assert edit == blank
    third = types.Range(types.Position(2, 0), types.Position(2, 3))
    assert not await client.text_document_range_formatting_async(
        types.DocumentRangeFormattingParams(asked.document, third, options)
    )
    (file,) = await client.text_document_document_link_async(types.DocumentLinkParams(asked.document))
    assert (file.target, file.tooltip) == (lib, str(folder / "lib.apl"))
    moved = types.FileRename(lib, (folder / "names.apl").as_uri())
    edit = await client.workspace_will_rename_files_async(types.RenameFilesParams([moved]))
    assert [each.new_text for change in edit.document_changes for each in change.edits] == ["names.apl"]
    await client.shutdown_session()
    await client.stop()


@pytest.mark.slow
def test_a_client_that_can_do_little(tmp_path: Path) -> None:
    asyncio.run(_little(tmp_path))


async def _little(folder: Path) -> None:
    asked = await session(folder, types.ClientCapabilities())
    lib = (folder / "lib.apl").as_uri()
    (place,) = await asked.ask("text_document_definition", types.DefinitionParams)
    assert place == types.Location(lib, types.Range(types.Position(0, 4), types.Position(0, 7)))
    edit = await asked.ask("text_document_rename", types.RenameParams, new_name="large")
    assert edit.document_changes is None
    assert set(edit.changes) == {asked.uri, lib}
    symbols = await asked.client.text_document_document_symbol_async(types.DocumentSymbolParams(asked.document))
    assert [each.location.uri for each in symbols] == [asked.uri] * 3
    await asked.client.shutdown_session()
    await asked.client.stop()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_who_types_does_not_wait_for_a_long_text_to_be_formatted(tmp_path) -> None:
    editor = await Editor.start()
    await editor.begin(tmp_path)
    uri = (tmp_path / "long.apl").as_uri()
    text = "save   mm where bytes  > 3 MiB\n" * 1_000
    assert len(text) < LONG
    editor.open(uri, text)
    options = types.FormattingOptions(tab_size=8, insert_spaces=False)
    params = types.DocumentFormattingParams(types.TextDocumentIdentifier(uri), options)
    assert len(await editor.client.text_document_formatting_async(params)) == 2_000

    formatted = asyncio.ensure_future(editor.client.text_document_formatting_async(params))
    await asyncio.sleep(0)  # the request is sent
    editor.change(uri, "save  mm\n", 2)
    await editor.until(lambda: editor.said[uri][-1].version == 2)
    assert not formatted.done(), "the short text is read while the long one is formatted"
    with pytest.raises(JsonRpcException, match="the text changed"):
        await formatted
    assert await editor.end() == 0
