"""The server as a process, with a real client, and in the editors that are installed here, as docs/editor.md says."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lsprotocol import types
from pygls.exceptions import JsonRpcException

from policylang.commands.cli import main
from policylang.editor.server import server
from tests.editor.conftest import GRAPHS, SERVER, Editor


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

    def answer(self, method: str, **params: object) -> Any:
        self.send(f"textDocument/{method}", {"textDocument": {"uri": "untitled:1"}, **params}, number=method)
        return self.sent[-1]["result"]


def test_names_the_outline_and_the_form_of_a_document() -> None:
    async def test() -> None:
        connection = Connection()
        document = {"uri": "untitled:1", "languageId": "apl", "version": 7, "text": "let big = mm\nsave   big\n"}
        connection.send("textDocument/didOpen", {"textDocument": document})
        use = {"line": 1, "character": 8}
        defines = {"start": {"line": 0, "character": 4}, "end": {"line": 0, "character": 7}}
        assert connection.answer("definition", position=use)["range"] == defines
        both = connection.answer("references", position=use, context={"includeDeclaration": True})
        assert [each["range"]["start"]["line"] for each in both] == [0, 1]
        assert [each["kind"] for each in connection.answer("documentHighlight", position=use)] == [3, 2]
        assert [each["name"] for each in connection.answer("documentSymbol")] == ["big", "save big"]
        (edit,) = connection.answer("formatting", options={"tabSize": 8, "insertSpaces": False})
        assert edit["newText"] == "save big\n"

    asyncio.run(test())


RULES = "recompute everything\nsave mm\nsave everything in layers.99\n"


def test_a_day_in_an_editor(tmp_path: Path) -> None:
    """Several folders with their own settings, files of any name, texts of any kind: one process answers all along."""
    asyncio.run(_a_day(tmp_path))


async def _completes(editor: Editor, uri: str) -> None:
    """What may stand behind `save `, from the snapshot of the folder; an item says what it means when it is asked."""
    params = types.CompletionParams(types.TextDocumentIdentifier(uri), types.Position(1, 5))
    found = await editor.client.text_document_completion_async(params)
    (item,) = (each for each in found.items if each.label == "matmul")
    assert item.detail.endswith(" forward")
    assert item.documentation is None
    asked = await editor.client.completion_item_resolve_async(item)
    assert "aten.{mm,addmm" in asked.documentation
    params.context = types.CompletionContext(types.CompletionTriggerKind.TriggerCharacter, " ")
    params.position = types.Position(1, 8)  # where the statement may end
    assert not (await editor.client.text_document_completion_async(params)).items


async def _a_day(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two é 𝔘 %41;#"
    for folder in (one, two):
        folder.mkdir()
    shutil.copy(GRAPHS / "tutorial.graph", one / "ours.graph")
    (one / "pyproject.toml").write_text('[tool.policylang]\ngraph = "ours.graph"\n')
    editor = await Editor.start()
    editor.client.set_configuration({"pause": 0}, section="policylang")
    found = await editor.begin(one, two)
    assert found.capabilities.text_document_sync.change is types.TextDocumentSyncKind.Full
    await editor.until(lambda: editor.registered == ["workspace/didChangeConfiguration"])

    # A document of a folder whose project names a snapshot, and one of a folder without; one outside both.
    first, second, outside = ((each / "x 1.apl").as_uri() for each in (one, two, tmp_path))
    for uri in (first, second, outside):
        editor.open(uri, RULES)
    assert [await editor.codes(uri) for uri in (first, second, outside)] == [["APL301"], [], []]
    assert all(each.version == 1 for uri in (first, second) for each in editor.said[uri])
    await editor.until(lambda: editor.refreshed > 0)
    await _completes(editor, first)

    # The client's settings of the second folder; then of all.
    editor.client.set_configuration({"pause": 0, "graph": str(GRAPHS / "gpt2.graph")}, section="policylang")
    editor.client.workspace_did_change_configuration(types.DidChangeConfigurationParams(None))
    await editor.until(lambda: any(said.diagnostics for said in editor.said[outside]))
    assert await editor.codes(second) == ["APL301"]
    editor.client.set_configuration({"pause": 0, "graph": "nothing.graph", "device": "h1000"}, section="policylang")
    editor.client.workspace_did_change_configuration(types.DidChangeConfigurationParams({"policylang": {}}))
    await editor.until(lambda: [each.code for each in editor.said[first][-1].diagnostics] == ["APL152", "APL355"])
    editor.client.set_configuration({"pause": 0}, section="policylang")
    editor.client.workspace_did_change_configuration(types.DidChangeConfigurationParams(None))
    await editor.until(lambda: not editor.said[outside][-1].diagnostics)
    assert await editor.codes(first) == ["APL301"]

    # What changes on the disk, as the editor saves or in its absence.
    names = (one / "names.apl").as_uri()
    shutil.copy(GRAPHS / "gpt2.graph", one / "ours.graph")
    (one / "names.apl").write_text("let wide = mm\n")
    editor.change(first, 'include "names.apl"\nsave wide\nsave nonsuch\n', 2)
    assert await editor.codes(first) == ["APL101"]
    (one / "names.apl").write_text("let broad = mm\n")
    editor.saved(names)
    assert (await editor.codes(first)).count("APL101") == 2

    # Two files open, one including the other, neither saved.
    editor.open(names, "let wide = mm\nlet nonsuch = bmm\n")
    assert "APL101" not in await editor.codes(first)
    editor.close(names)
    await editor.until(lambda: not editor.said[names][-1].diagnostics and editor.said[names][-1].version is None)
    assert (await editor.codes(first)).count("APL101") == 2

    # A folder is added, and goes.
    added = types.WorkspaceFolder(tmp_path.as_uri(), "all")
    (tmp_path / "pyproject.toml").write_text(f'[tool.policylang]\ngraph = "{GRAPHS / "gpt2.graph"}"\n')
    changed = types.WorkspaceFoldersChangeEvent([added], [])
    editor.client.workspace_did_change_workspace_folders(types.DidChangeWorkspaceFoldersParams(changed))
    await editor.until(lambda: bool(editor.said[outside][-1].diagnostics))
    changed = types.WorkspaceFoldersChangeEvent([], [added])
    editor.client.workspace_did_change_workspace_folders(types.DidChangeWorkspaceFoldersParams(changed))

    # Texts that are no policies, and addresses that are no files.
    untitled = "untitled:Untitled-1"
    editor.open(untitled, "save 𝔘\r\nsave mm\r\nsave é\u0301𝔘x 5\r")
    await editor.hints(untitled)
    wrong = editor.said[untitled][-1].diagnostics
    assert (wrong[0].range.start, wrong[0].range.end) == (types.Position(0, 5), types.Position(0, 7))
    for version, text in enumerate(("", "\0", "\ud800", "(" * 200, "PK\x03\x04\0", "save mm"), 2):
        editor.change(untitled, text, version)
        await editor.hints(untitled)
        assert editor.said[untitled][-1].version == version
    assert [each.code for each in editor.said[untitled][-1].diagnostics] == ["APL309"], "on the first folder's snapshot"

    # A change to what is closed, and requests about what is not open, or not there.
    editor.close(untitled)
    editor.change(untitled, "late", 99)
    with pytest.raises(JsonRpcException, match="not open"):
        await editor.hints(untitled)
    assert editor.said[untitled][-1].version is None
    with pytest.raises(JsonRpcException):
        await editor.client.workspace_execute_command_async(types.ExecuteCommandParams("no.such"))

    # A request about a text that changes meanwhile, and one that is cancelled: there is time for both before the plan.
    editor.client.set_configuration({"pause": 200}, section="policylang")
    editor.client.workspace_did_change_configuration(types.DidChangeConfigurationParams(None))
    await editor.hints(first)  # by then the server has the settings
    editor.change(first, "save mm # changes", 6)
    asked = asyncio.ensure_future(editor.hints(first))
    await asyncio.sleep(0)
    editor.change(first, "save mm # 𝔘", 7)
    with pytest.raises(JsonRpcException) as modified:
        await asked
    assert modified.value.code == types.LSPErrorCodes.ContentModified
    whole = types.Range(types.Position(0, 0), types.Position(9, 0))
    editor.change(first, "save mm # once more", 8)
    asked = types.InlayHintParams(types.TextDocumentIdentifier(first), whole)
    editor.client.protocol.send_request(types.TEXT_DOCUMENT_INLAY_HINT, asked, msg_id="mine")
    cancelled = editor.client.protocol._request_futures["mine"]
    editor.client.protocol.notify(types.CANCEL_REQUEST, types.CancelParams("mine"))
    with pytest.raises(JsonRpcException) as refused:
        await asyncio.wrap_future(cancelled)
    assert refused.value.code == types.LSPErrorCodes.RequestCancelled
    assert await editor.codes(first) == ["APL309"]
    assert editor.client.log_messages == [], "nothing that a client does is an error of the server"
    assert await editor.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize("encoding", types.PositionEncodingKind)
@pytest.mark.parametrize("root", ["uri", "path", "none"])
def test_any_client_may_begin(tmp_path: Path, encoding: types.PositionEncodingKind, root: str) -> None:
    """Without folders, with deprecated ones, in an encoding of its own, without a capability or with all."""
    (tmp_path / "pyproject.toml").write_text(f'[tool.policylang]\ngraph = "{GRAPHS / "gpt2.graph"}"\n')

    async def test() -> None:
        editor = await Editor.start()
        general = types.GeneralClientCapabilities(position_encodings=[encoding])
        roots = {"uri": {"root_uri": tmp_path.as_uri()}, "path": {"root_path": str(tmp_path)}}
        more: dict[str, Any] = roots.get(root, {})
        found = await editor.begin(capabilities=types.ClientCapabilities(general=general), **more)
        assert found.capabilities.position_encoding == encoding
        uri = (tmp_path / "x.apl").as_uri()
        editor.open(uri, "# 𝔘\nlet 𝔘 = mm\nsave 𝔘 in layers.99\n")
        assert await editor.codes(uri) == ["APL301"]
        wide = {
            types.PositionEncodingKind.Utf8: 4,
            types.PositionEncodingKind.Utf16: 2,
            types.PositionEncodingKind.Utf32: 1,
        }
        assert editor.said[uri][-1].diagnostics[0].range.end.character == 5 + wide[encoding] + 13
        assert await editor.end() == 0

    asyncio.run(test())


@pytest.mark.slow
def test_a_client_that_watches_nothing_sees_what_changes_on_the_disk(tmp_path: Path) -> None:
    async def test() -> None:
        editor = await Editor.start()
        await editor.begin(tmp_path, capabilities=types.ClientCapabilities())
        uri = (tmp_path / "x.apl").as_uri()
        editor.open(uri, 'include "names.apl"\nsave mm')
        assert await editor.codes(uri) == ["APL103"]
        (tmp_path / "names.apl").write_text("let never = mm\nsave never\n")
        await editor.until(lambda: not editor.said[uri][-1].diagnostics)
        assert await editor.end() == 0

    asyncio.run(test())


@pytest.mark.slow
def test_reading_a_recorded_graph_holds_nothing_up(tmp_path: Path) -> None:
    """It takes torch and seconds; the text is answered meanwhile."""
    from tests.support import shared_graphs

    recorded = shared_graphs.FOLDER / f"{shared_graphs.JOINT}.json.gz"
    if not recorded.is_file():
        pytest.skip("the recorded step is not here")

    async def test() -> None:
        editor = await Editor.start()
        await editor.begin(tmp_path, options={"graph": str(recorded)})
        uri = (tmp_path / "x.apl").as_uri()
        editor.open(uri, RULES)
        asked = asyncio.ensure_future(editor.hints(uri))
        await asyncio.sleep(1.0)
        assert not asked.done()
        params = types.DocumentSymbolParams(types.TextDocumentIdentifier(uri))
        await asyncio.wait_for(editor.client.text_document_document_symbol_async(params), 5)
        await asked
        assert "APL301" in [each.code for each in editor.said[uri][-1].diagnostics]
        assert await editor.end() == 0

    asyncio.run(test())


@pytest.mark.slow
def test_an_error_inside_a_feature_is_answered_and_logged_and_the_server_lives_on(tmp_path: Path) -> None:
    broken = (
        "import sys; from policylang.editor import server\n"
        "def fails(*of, **more): raise IndexError('of our own')\n"
        "server.hover = fails; server.symbols = lambda state: print('noise') or []\n"
        "sys.exit(server.serve())"
    )

    async def test() -> None:
        editor = await Editor.start([sys.executable, "-c", broken])
        await editor.begin(tmp_path)
        uri = (tmp_path / "x.apl").as_uri()
        editor.open(uri, "save mm")
        document = types.TextDocumentIdentifier(uri)
        with pytest.raises(JsonRpcException, match="IndexError: of our own"):
            await editor.client.text_document_hover_async(types.HoverParams(document, types.Position(0, 0)))
        found = await editor.client.text_document_document_symbol_async(types.DocumentSymbolParams(document))
        assert [each.name for each in found or ()] == ["save mm"]
        assert "of our own" in editor.client.log_messages[0].message
        assert await editor.codes(uri) == []
        assert await editor.end() == 0

    asyncio.run(test())


def message(method: str, number: int | None = None, params: str = "{}") -> bytes:
    which = "" if number is None else f'"id":{number},'
    body = f'{{"jsonrpc":"2.0",{which}"method":"{method}","params":{params}}}'.encode()
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


BEGUN = message("initialize", 1, '{"capabilities":{},"processId":null,"rootUri":null}') + message("initialized")
OPENED = message(
    "textDocument/didOpen",
    params='{"textDocument":{"uri":"untitled:1","languageId":"policylang","version":1,"text":"save mm"}}',
)


def ended(given: bytes) -> tuple[int, bytes, str]:
    """The exit code of a server that reads this and no more, what stands in its output, and what it says besides."""
    found = subprocess.run(SERVER, input=given, capture_output=True, timeout=60, check=False)
    return found.returncode, found.stdout, found.stderr.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "code"),
    [
        (BEGUN + OPENED + message("shutdown", 2) + message("exit"), 0), (BEGUN + OPENED + message("exit"), 1),
        (BEGUN + OPENED, 1), (BEGUN + message("shutdown", 2), 0), (b"", 1), (b"Content-Length: 5\r\n\r\n", 1),
        (b"nothing of the kind\n" * 100, 1),
        (BEGUN + b"Content-Length: 9\r\n\r\n{nothing}" + message("shutdown", 2) + message("exit"), 0),
        (message("textDocument/hover", 1, '{"textDocument":5}') + BEGUN + message("shutdown", 2) + message("exit"), 0),
    ],
)  # fmt: skip
def test_a_connection_that_ends_ends_the_process(given: bytes, code: int) -> None:
    """Without a traceback, and with nothing but messages in the output."""
    found, out, said = ended(given)
    assert found == code
    assert "Traceback" not in said or "nothing" in given.decode()
    while out:
        head, _, rest = out.partition(b"\r\n\r\n")
        assert head.startswith(b"Content-Length: ")
        length = int(head.split(b"\r\n")[0].split(b":")[1])
        assert rest[:length].startswith(b'{"')
        out = rest[length:]


@pytest.mark.slow
def test_a_client_that_dies_while_a_policy_is_planned_leaves_no_process(tmp_path: Path) -> None:
    from tests.support import shared_graphs

    if not (shared_graphs.FOLDER / f"{shared_graphs.JOINT}.json.gz").is_file():
        pytest.skip("the recorded step is not here")
    from policylang.graph.snapshot import write

    write(shared_graphs.shared_facts(shared_graphs.JOINT), tmp_path / "step.graph")
    options = f'{{"graph":"{tmp_path / "step.graph"}","pause":0}}'
    params = f'{{"capabilities":{{}},"processId":null,"rootUri":null,"initializationOptions":{options}}}'
    text = (GRAPHS.parents[1] / "policies" / "fsdp_overlap.apl").read_text()
    opened = {"textDocument": {"uri": "untitled:1", "languageId": "policylang", "version": 1, "text": text}}
    server = subprocess.Popen(SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    server.stdin.write(message("initialize", 1, params) + message("textDocument/didOpen", params=json.dumps(opened)))
    server.stdin.flush()
    with suppress(subprocess.TimeoutExpired):
        server.wait(2.0)
    _, said = server.communicate(timeout=20)
    assert server.returncode == 1
    assert b"Traceback" not in said


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "pygls", None)
    assert main(["lsp"]) == 2
    assert "pip install pygls" in capsys.readouterr().err


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "editor.md").read_text(encoding="utf-8")
GRAPH = Path(__file__).resolve().parents[2] / "docs" / "graphs" / "tutorial.graph"
MAIN = 'include "lib.apl"\nrecompute everything\nsave   big; save matmul\nsave everything in layers.9\nlet small = mm\n'
LIB = "# \N{MATHEMATICAL ITALIC SMALL ALPHA}\nlet big = mm\n"
FORMATTED = MAIN.replace("save   big; ", "save big\n")

NEOVIM = """
vim.cmd('edit main.apl')
local function clients() return (vim.lsp.get_clients or vim.lsp.get_active_clients)() end
vim.wait(20000, function() return #vim.diagnostic.get(0) > 0 end, 50)
local said = { filetype = vim.bo.filetype, comments = vim.bo.commentstring, codes = {} }
for _, each in ipairs(vim.diagnostic.get(0)) do table.insert(said.codes, each.code) end
local client = clients()[1]
said.root = client.config.root_dir or client.root_dir
vim.api.nvim_win_set_cursor(0, { 3, 7 })
vim.lsp.buf.definition()
vim.wait(10000, function() return vim.fn.expand('%:t') == 'lib.apl' end, 50)
said.definition = { vim.fn.expand('%:t'), vim.api.nvim_win_get_cursor(0) }
vim.cmd('edit main.apl')
if vim.lsp.buf.format then vim.lsp.buf.format({ timeout_ms = 10000 }) else vim.lsp.buf.formatting_sync(nil, 10000) end
vim.cmd('silent wall')
local out = io.open('said.json', 'w')
out:write(vim.fn.json_encode(said))
out:close()
vim.cmd('qa!')
"""

EMACS = """
(package-initialize)
(load (expand-file-name "init.el"))
(setq eglot-sync-connect 20 eglot-confirm-server-initiated-edits nil)
(find-file "main.apl")
(call-interactively #'eglot)
(with-timeout (20) (while (not (flymake-diagnostics)) (accept-process-output nil 0.1)))
(let ((mode (symbol-name major-mode)) (comments comment-start) place
      (texts (mapcar #'flymake-diagnostic-text (flymake-diagnostics))))
  (goto-char (point-min)) (search-forward "big") (backward-char 2)
  (call-interactively #'xref-find-definitions)
  (setq place (list (buffer-name) (line-number-at-pos) (current-column)))
  (switch-to-buffer "main.apl")
  (eglot-format-buffer)
  (save-some-buffers t)
  (with-temp-file "said.json"
    (insert (json-serialize (list :mode mode :comments comments :place (vconcat place) :texts (vconcat texts))))))
(eglot-shutdown (eglot-current-server))
"""


def settings_for(editor: str) -> str:
    found = re.search(rf"<!-- editor: {re.escape(editor)} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, editor
    return found[1]


def neovims() -> list[str]:
    """The settings that are for the Neovim that is installed."""
    if shutil.which("nvim") is None:
        return []
    said = subprocess.run(["nvim", "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"v0\.(\d+)", said)
    minor = int(found[1]) if found else 99
    return ["0.11"] if minor >= 11 else []


def project(folder: Path) -> dict[str, str]:
    """Two policies and a snapshot, and an environment in which ``policylang`` is this one."""
    (folder / "main.apl").write_text(MAIN)
    (folder / "lib.apl").write_text(LIB, encoding="utf-8")
    shutil.copy(GRAPH, folder / "ours.graph")
    (folder / "pyproject.toml").write_text('[tool.policylang]\ngraph = "ours.graph"\n')
    command = folder / "bin" / "policylang"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m policylang.commands.cli "$@"\n')
    command.chmod(0o755)
    homes = {name: str(folder / name) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")}
    path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, **homes, "PATH": path, "PYTHONPATH": root}


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["0.11"])
def test_neovim(tmp_path: Path, settings: str) -> None:
    if settings not in neovims():
        pytest.skip(f"no Neovim that takes the settings of {settings}")
    environment = project(tmp_path)
    init = tmp_path / "XDG_CONFIG_HOME" / "nvim" / "init.lua"
    init.parent.mkdir(parents=True)
    init.write_text(settings_for(f"nvim {settings}"))
    (tmp_path / "try.lua").write_text(NEOVIM)
    command = ["nvim", "--headless", "-n", "-c", "luafile try.lua"]
    subprocess.run(command, cwd=tmp_path, env=environment, timeout=120, check=True, stdin=subprocess.DEVNULL)
    said = json.loads((tmp_path / "said.json").read_text())
    said["codes"].sort()
    assert said == {
        "filetype": "policylang",
        "comments": "# %s",
        "codes": ["APL110", "APL301", "APL303"],
        "root": str(tmp_path),
        "definition": ["lib.apl", [2, 4]],
    }
    assert (tmp_path / "main.apl").read_text(encoding="utf-8") == FORMATTED


@pytest.mark.slow
def test_emacs(tmp_path: Path) -> None:
    if shutil.which("emacs") is None:
        pytest.skip("no Emacs")
    has_eglot = ["emacs", "--batch", "--eval", "(progn (package-initialize) (require 'eglot))"]
    if subprocess.run(has_eglot, capture_output=True, check=False).returncode:
        pytest.skip("no eglot")
    environment = project(tmp_path)
    (tmp_path / "init.el").write_text(settings_for("emacs"))
    (tmp_path / "try.el").write_text(EMACS)
    subprocess.run(["emacs", "--batch", "-l", "try.el"], cwd=tmp_path, env=environment, timeout=120, check=False)
    said = json.loads((tmp_path / "said.json").read_text())
    assert (said["mode"], said["comments"], said["place"]) == ("policylang-mode", "# ", ["lib.apl", 2, 4])
    assert any("[APL301]" in text for text in said["texts"])
    assert (tmp_path / "main.apl").read_text(encoding="utf-8") == FORMATTED
