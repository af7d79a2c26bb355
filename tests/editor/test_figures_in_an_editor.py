"""Hovers and hints as a client gets them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import attrs
import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

from lsprotocol import types

from tests.editor.conftest import GRAPHS
from tests.editor.real_client import CAPABILITIES, Editor

TEXT = "policy mine\nrecompute everything in block\nsave mm  # 𝔘\n"


@pytest.mark.slow
@pytest.mark.parametrize("markdown", [True, False])
def test_figures_come_and_are_refreshed_once_rules_are_weighed(tmp_path: Path, markdown: bool) -> None:
    asyncio.run(_session(tmp_path, markdown=markdown))


async def _session(folder: Path, *, markdown: bool) -> None:
    editor, uri = await Editor.start(), (folder / "mine.apl").as_uri()
    formats = [types.MarkupKind.Markdown, types.MarkupKind.PlainText] if markdown else []
    hover = types.HoverClientCapabilities(content_format=formats)
    text = attrs.evolve(CAPABILITIES.text_document, hover=hover, inlay_hint=types.InlayHintClientCapabilities())
    options = {"graph": str(GRAPHS / "tutorial.graph"), "pause": 0}
    await editor.begin(folder, options=options, capabilities=attrs.evolve(CAPABILITIES, text_document=text))
    editor.open(uri, TEXT)
    first = await editor.hints(uri)
    assert first is not None
    assert [each.position.line for each in first] == [0, 1, 2]
    assert [each.label for each in first][1].startswith("276 values")
    await editor.until(lambda: editor.refreshed > 1)
    labels = [each.label for each in await editor.hints(uri) or ()]
    assert all(" · " in str(each) for each in labels)
    document, place = types.TextDocumentIdentifier(uri), types.Position(2, 5)
    found = await editor.client.text_document_hover_async(types.HoverParams(document, place))
    assert found.range == types.Range(place, types.Position(2, 7))
    assert found.contents.kind == ("markdown" if markdown else "plaintext")
    assert ("`aten.mm.default`" in found.contents.value) is markdown
    behind = types.HoverParams(document, types.Position(2, 12))
    assert await editor.client.text_document_hover_async(behind) is None
    await editor.end()
