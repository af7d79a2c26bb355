"""A server answers each of a hundred edits as the command line does: of the same text, the same diagnostics."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("pytest_lsp", reason="needs a client of the language server")

from lsprotocol import types
from pytest_lsp import ClientServerConfig, make_test_lsp_client

from policylang.api import check, planned_graphs
from policylang.commands.cli import main
from policylang.language.resolution.loader import parse_policy
from policylang.language.resolution.operator_names import OperatorTable
from tests.editor.conftest import GRAPHS, SERVER
from tests.editor.realistic_edits import edits

ROOT = GRAPHS.parents[1]
POLICIES = {
    file.stem: file.read_text() for file in sorted([*ROOT.glob("policies/*.apl"), *ROOT.glob("examples/*.apl")])
}
WITHOUT_PAUSE = [
    sys.executable,
    "-c",
    "from policylang.editor.server import server; made = server(); made.documents.pause = 0.0; made.start_io(); "
    "made.documents.close()",
]
_SEVERITIES = {"error": 1, "warning": 2, "note": 3}
_ON_A_GRAPH = "APL300"
"""Codes above it are of a policy on a graph: what has none below can be planned."""
_LONGEST = 60.0


def test_a_few_edits_on_a_small_graph(tmp_path, monkeypatch, capsys) -> None:
    edited(tmp_path, GRAPHS / "llama3_8b.graph", "llama3_sac", 25, WITHOUT_PAUSE, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_hundred_edits_on_a_recorded_step(tmp_path, monkeypatch, capsys, recorded_snapshot, name) -> None:
    edited(tmp_path, recorded_snapshot, name, 100, SERVER, monkeypatch, capsys)


@pytest.fixture(scope="module")
def recorded_snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The joint graph of 19,655 nodes."""
    from policylang.graph.files.snapshot import write
    from tests.support import shared_graphs

    if not (shared_graphs.FOLDER / f"{shared_graphs.JOINT}.json.gz").is_file():
        pytest.skip("the recorded step is not here")
    file = tmp_path_factory.mktemp("recorded") / "step.graph"
    write(shared_graphs.shared_facts(shared_graphs.JOINT), file)
    return file


def edited(
    folder: Path,
    graph: Path,
    name: str,
    count: int,
    command: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Edit a policy in a server, and ask the command line about each text, in a folder that holds what it includes."""
    monkeypatch.chdir(folder)
    for each, text in POLICIES.items():
        (folder / f"{each}.apl").write_text(text)
    as_a_process_without_torch(monkeypatch)
    others = [text for each, text in POLICIES.items() if each != name]
    texts = [POLICIES[name], *islice(edits(POLICIES[name], others, readable, Random(name)), count)]
    if command is SERVER and len(name) % 2:
        texts = [text.replace("\n", "\r\n") for text in texts]
    planned = 0
    for version, (text, found) in enumerate(zip(texts, answered(folder, graph, texts, command), strict=True), 1):
        said = asked(text, graph, monkeypatch, capsys)
        assert found.diagnostics == [of_protocol(each, text) for each in said], f"version {version}:\n{text}"
        planned += not any(each["severity"] == "error" and each["code"] < _ON_A_GRAPH for each in said)
    assert planned >= count // 3, "of many texts there is a plan"


def as_a_process_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line, here, where torch is loaded, looks operators up as a process of its own does; it reads a
    snapshot once for all texts."""
    monkeypatch.setattr(check, "operators_at_hand", lambda met=(): OperatorTable.bundled(met=met))
    monkeypatch.setattr(planned_graphs, "read_any", cache(planned_graphs.read_any))


def readable(text: str) -> bool:
    return parse_policy(text).policy is not None


class Answer:
    def __init__(self, diagnostics: list[dict[str, Any]], hints: Sequence[types.InlayHint] | None) -> None:
        self.diagnostics = diagnostics
        self.hints = hints


def answered(folder: Path, graph: Path, texts: Sequence[str], command: Sequence[str]) -> list[Answer]:
    """What a server says of each text, one after the other in one open document."""
    return asyncio.run(_answered(folder, graph, texts, command))


async def _answered(folder: Path, graph: Path, texts: Sequence[str], command: Sequence[str]) -> list[Answer]:
    published: dict[int | None, list[types.Diagnostic]] = {}
    client: Any = await ClientServerConfig(list(command), client_factory=make_test_lsp_client).start()
    notice = client.protocol.fm.features[types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS]

    def receive(params: types.PublishDiagnosticsParams) -> None:
        published[params.version] = list(params.diagnostics)

    client.protocol.fm.features[types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS] = receive
    assert notice is not None
    found = []
    document = (folder / "edited.apl").as_uri()
    async with asyncio.timeout(_LONGEST + 5 * len(texts)):
        await client.initialize_session(_begin(folder, graph))
        for version, text in enumerate(texts, 1):
            if version == 1:
                opened = types.TextDocumentItem(document, "policylang", version, text)
                client.text_document_did_open(types.DidOpenTextDocumentParams(opened))
            else:
                change = types.TextDocumentContentChangeWholeDocument(text)
                changed = types.VersionedTextDocumentIdentifier(version, document)
                client.text_document_did_change(types.DidChangeTextDocumentParams(changed, [change]))
            end = types.Position(text.count("\n") + 1, 0)
            whole = types.Range(types.Position(0, 0), end)
            asked = types.InlayHintParams(types.TextDocumentIdentifier(document), whole)
            hints = await client.text_document_inlay_hint_async(asked)  # waits for the plan of the text
            found.append(Answer([_plain(each) for each in published[version]], hints))
        await client.shutdown_session()
        await client.stop()
    return found


def _begin(folder: Path, graph: Path) -> types.InitializeParams:
    related = types.PublishDiagnosticsClientCapabilities(related_information=True, version_support=True)
    capabilities = types.ClientCapabilities(
        text_document=types.TextDocumentClientCapabilities(
            publish_diagnostics=related, inlay_hint=types.InlayHintClientCapabilities()
        )
    )
    place = types.WorkspaceFolder(folder.as_uri(), folder.name)
    options = {"graph": str(graph)}
    return types.InitializeParams(capabilities, workspace_folders=[place], initialization_options=options)


def asked(text: str, graph: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> list[dict[str, Any]]:
    """What the command line says of a text, with the name of the document in place of the standard input's."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    main(["check", "-", "--graph", str(graph), "--output-format", "json"])
    printed = capsys.readouterr().out.replace("<stdin>", "edited.apl")
    return list(json.loads(printed)["diagnostics"])


def of_protocol(said: dict[str, Any], text: str) -> dict[str, Any]:
    """A diagnostic of the command line as a server publishes it."""
    help = [f"help: {said['help']}"] if said["help"] else []
    here = said["location"] is not None and said["location"]["file"] == "edited.apl"
    start, end = (said["location"][each]["offset"] if here else 0 for each in ("start", "end"))
    return {
        "code": said["code"],
        "severity": _SEVERITIES[said["severity"]],
        "message": "\n".join([said["message"], *said["details"], *help]),
        "start": place(text, start),
        "end": place(text, end),
    }


def place(text: str, offset: int) -> tuple[int, int]:
    """Line and UTF-16 unit of a character, the slow way."""
    before = text[:offset].split("\n")
    return len(before) - 1, len(before[-1].encode("utf-16-le")) // 2


def _plain(found: types.Diagnostic) -> dict[str, Any]:
    return {
        "code": found.code,
        "severity": found.severity.value,
        "message": found.message,
        "start": (found.range.start.line, found.range.start.character),
        "end": (found.range.end.line, found.range.end.character),
    }
