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

from tests.editor.conftest import SERVER

LIB = "let big = mm\r\n"
MAIN = 'include "lib.apl"\nsave   big\nrecompute matmul\nlet own = mm\nsave own\n'
CAN = types.ClientCapabilities(
    text_document=types.TextDocumentClientCapabilities(
        definition=types.DefinitionClientCapabilities(link_support=True),
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

    shown = await asked.ask("text_document_prepare_rename", types.PrepareRenameParams, line=3, character=5)
    assert shown == types.Range(types.Position(3, 4), types.Position(3, 7))
    edit = await asked.ask("text_document_rename", types.RenameParams, line=3, character=5, new_name="large")
    assert [(each.text_document.uri, each.text_document.version) for each in edit.document_changes] == [(asked.uri, 7)]
    with pytest.raises(JsonRpcException, match=r"`big` is used in lib.apl:1 too, and one file is renamed"):
        await asked.ask("text_document_rename", types.RenameParams, new_name="large")
    with pytest.raises(JsonRpcException, match="`matmul` is a group of the prelude"):
        await asked.ask("text_document_prepare_rename", types.PrepareRenameParams, line=2, character=12)
    with pytest.raises(JsonRpcException, match="`save` is a word of the language"):
        await asked.ask("text_document_rename", types.RenameParams, line=3, character=5, new_name="save")

    symbols = await client.text_document_document_symbol_async(types.DocumentSymbolParams(asked.document))
    assert [each.name for each in symbols] == ['include "lib.apl"', "save big", "recompute matmul", "own", "save own"]
    assert isinstance(symbols[0], types.DocumentSymbol)
    (name,) = await client.workspace_symbol_async(types.WorkspaceSymbolParams("bg"))
    assert (name.name, name.location.uri) == ("big", lib)

    options = types.FormattingOptions(tab_size=8, insert_spaces=False)
    blank = types.TextEdit(types.Range(types.Position(1, 4), types.Position(1, 7)), " ")
    (edit,) = await client.text_document_formatting_async(types.DocumentFormattingParams(asked.document, options))
    assert edit == blank
    third = types.Range(types.Position(2, 0), types.Position(2, 3))
    assert not await client.text_document_range_formatting_async(
        types.DocumentRangeFormattingParams(asked.document, third, options)
    )
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
    edit = await asked.ask("text_document_rename", types.RenameParams, line=3, character=5, new_name="large")
    assert edit.document_changes is None
    assert [each.new_text for each in edit.changes[asked.uri]] == ["large", "large"]
    symbols = await asked.client.text_document_document_symbol_async(types.DocumentSymbolParams(asked.document))
    assert [each.location.uri for each in symbols] == [asked.uri] * 5
    await asked.client.shutdown_session()
    await asked.client.stop()
