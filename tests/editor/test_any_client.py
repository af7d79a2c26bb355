"""What clients send that keep less to the protocol than ours: each request is answered, and no text is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

from pygls.exceptions import JsonRpcInvalidParams

from policylang.editor.server import server

URI = "untitled:1"


class Connection:
    """A server without a process: messages are handed to it, and what it sends is kept."""

    def __init__(self) -> None:
        self.server = server()
        self.sent: list[dict[str, Any]] = []
        self.server.protocol.set_writer(self, include_headers=False)
        self.send("initialize", {"capabilities": {}, "processId": None, "rootUri": None}, number=0)
        self.sent.clear()

    def write(self, data: bytes | str) -> None:
        self.sent.append(json.loads(data))

    def close(self) -> None: ...

    def send(self, method: str, params: object = None, number: object = None) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        text = json.dumps(message if number is None else {**message, "id": number})
        protocol = self.server.protocol
        protocol.handle_message(json.loads(text, object_hook=protocol.structure_message))

    def text(self) -> str | None:
        return self.server.documents.text(URI)


@pytest.mark.parametrize(
    "params",
    [None, [1, 2], {}, {"textDocument": {"uri": URI}, "position": {"line": "x", "character": 0}}],
)
def test_a_request_that_cannot_be_read_is_answered(params: object) -> None:
    connection = Connection()
    with pytest.raises(JsonRpcInvalidParams):
        connection.send("textDocument/hover", params, number="mine")
    (answer,) = connection.sent
    assert answer["id"] == "mine"
    assert answer["error"]["code"] == JsonRpcInvalidParams.CODE
    assert answer["error"]["message"].startswith("textDocument/hover is not understood: ")
    assert "message.params" in answer["error"]["message"]


def test_a_notification_that_cannot_be_read_is_told() -> None:
    connection = Connection()
    with pytest.raises(JsonRpcInvalidParams):
        connection.send("textDocument/didChange", {"contentChanges": []})
    (said,) = connection.sent
    assert said["method"] == "window/logMessage"
    assert "textDocument/didChange is not understood" in said["params"]["message"]


def test_a_client_without_versions_loses_no_change() -> None:
    connection = Connection()
    connection.send("textDocument/didOpen", {"textDocument": {"uri": URI, "languageId": "apl", "text": "save mm"}})
    assert connection.text() == "save mm"
    given: list[dict[str, Any]] = [{"version": None}, {}, {"version": "5"}]
    for version in given:
        changes = [{"text": f"save {len(version)}"}]
        connection.send("textDocument/didChange", {"textDocument": {"uri": URI, **version}, "contentChanges": changes})
        assert connection.text() == changes[0]["text"]
    assert {each["method"] for each in connection.sent} == {"textDocument/publishDiagnostics"}


@pytest.mark.parametrize("params", [None, {}])
def test_a_client_that_pushes_no_settings_is_understood(params: object) -> None:
    connection = Connection()
    message = {"jsonrpc": "2.0", "method": "workspace/didChangeConfiguration", "params": params}
    for given in (message, {key: each for key, each in message.items() if key != "params"}):
        read = connection.server.protocol.structure_message(given)
        assert read.params.settings is None
    assert connection.sent == []
