"""What an editor offers to do at a place of a policy, and what a client gets of it."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from attrs import evolve
from lsprotocol import types
from pytest_lsp import ClientServerConfig, make_test_lsp_client

import policylang
from policylang.editor.actions import (
    FIX_ALL,
    actions,
    explained_code,
    explained_line,
    explained_node,
    nodes_of_rule,
    published,
)
from policylang.editor.server import server
from policylang.editor.state import State
from policylang.editor.workspace import SETTINGS
from policylang.language.diagnostics import diagnose
from policylang.language.operators import OperatorTable
from tests.editor.conftest import GRAPHS, SERVER, with_edits


def place(found: types.Diagnostic) -> tuple[int, int, int, int]:
    start, end = found.range.start, found.range.end
    return start.line, start.character, end.line, end.character


def test_place_code_severity_page_and_mend(state_of) -> None:
    state = state_of("# 𝔘\r\nlet 𝔘nused = mm\r\nsave attenton\r\n")
    unused, wrong = published(state)
    assert (unused.code, unused.severity, unused.tags) == (
        "APL110",
        types.DiagnosticSeverity.Warning,
        [types.DiagnosticTag.Unnecessary],
    )
    assert place(wrong) == (2, 5, 2, 13)
    assert wrong.severity is types.DiagnosticSeverity.Error
    assert wrong.tags is None
    (help,) = wrong.message.splitlines()[1:]
    assert help.startswith("help: did you mean `attention`")
    page = Path(unquote(urlsplit(wrong.code_description.href).path))
    assert page.read_text().startswith("# APL101")


def test_what_lies_in_an_included_file_stands_at_the_include_and_leads_there(tmp_path: Path, state_of) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "outer.apl").write_text('include "inner.apl"\n')
    inner = tmp_path / "sub" / "inner.apl"
    inner.write_text("save mm\nsave attenton\nsave 5 5\n")
    state = state_of('# first\n  include "sub/outer.apl"\nsave bmm\n')
    found = published(state)
    assert [each.code for each in found][:1] == ["APL101"]
    assert {place(each) for each in found} == {(1, 2, 1, 25)}
    assert found[0].message.startswith("sub/inner.apl:2: there is no operator")
    (first, *_) = found[0].related_information or ()
    assert first.location.uri == inner.as_uri()
    assert first.location.range == types.Range(types.Position(1, 5), types.Position(1, 13))


def test_on_a_graph_too_and_in_the_library(tmp_path: Path, state_of) -> None:
    (tmp_path / "inner.apl").write_text("save everything in layers.99\nrecompute everything in layers.98\n")
    state = state_of('save mm\ninclude "inner.apl"\ninclude <replay>\n', "tutorial.graph")
    found = published(state)
    assert {place(each)[0] for each in found} <= {0, 1, 2}
    assert {
        each.related_information[0].location.uri for each in found if each.related_information and place(each)[0]
    } >= {(tmp_path / "inner.apl").as_uri()}


def test_what_has_no_place_stands_in_the_first_line(state_of) -> None:
    state = state_of("\nsave mm\n")
    problem = diagnose("APL355", "`x.graph` cannot be read", help="name another")
    (found,) = published(evolve(state, problems=(problem,)))
    assert place(found) == (0, 0, 0, 0)
    assert found.message == "`x.graph` cannot be read\nhelp: name another"


def test_a_client_that_shows_less_gets_it_in_the_message(state_of) -> None:
    state = state_of("let a = mm\nlet a = bmm\nsave a\n")
    (found,) = published(state, related=False)
    assert found.related_information is None
    assert "mine.apl:1" in found.message
    (full,) = published(state)
    assert full.related_information[0].location.range.start == types.Position(0, 0)
    assert "mine.apl:1" not in full.message


def test_the_order_is_that_of_check(tmp_path: Path, state_of) -> None:
    text = "save mm\nsave mm in layers.99\nrecompute mm\nsave linear\nexpect saved <= 1 B\n"
    (tmp_path / "mine.apl").write_text(text)
    said = policylang.check(tmp_path / "mine.apl", graph=GRAPHS / "llama3_8b.graph").diagnostics
    assert len(said) > 3
    assert [each.code for each in published(state_of(text, "llama3_8b.graph"))] == [each.code for each in said]


def test_a_wrong_project_leads_to_its_file(tmp_path: Path, state_of) -> None:
    from policylang.editor.workspace import Workspace

    (tmp_path / "pyproject.toml").write_text('[tool.policylang]\npath = "jiont"\n')
    settings = Workspace().settings_of(tmp_path / "mine.apl")
    (found,) = published(evolve(state_of("save mm\n"), problems=settings.problems))
    assert place(found) == (0, 0, 0, 0)
    assert found.message.startswith("pyproject.toml:2: there is no path `jiont`")
    assert found.related_information[0].location.uri == (tmp_path / "pyproject.toml").as_uri()
    assert found.related_information[0].location.range.start.line == 1


POLICY = """include "shared.apl"
save attention
recompute (
    everything
) in layers.0 except attention
"""


def test_a_line_has_the_nodes_of_its_rule_and_of_no_other(state_of, tmp_path):
    (tmp_path / "shared.apl").write_text("# one\nsave mm, addmm\n")
    state = state_of(POLICY, "vit.graph")
    plan = state.graph.plan
    shared, attention, layer = ([plan.facts.names[row] for row in rule.matched] for rule in plan.rules)
    assert shared
    assert attention
    assert layer
    assert nodes_of_rule(state, 0) == []  # not those of the included file, whose second line this is not
    assert nodes_of_rule(state, 1) == attention
    assert nodes_of_rule(state, 2) == nodes_of_rule(state, 3) == nodes_of_rule(state, 4) == layer
    assert nodes_of_rule(state, 5) == nodes_of_rule(state, 99) == []
    for without_a_plan in (state_of("save attention\n"), state_of("save attenton\n", "vit.graph")):
        assert nodes_of_rule(without_a_plan, 0) == []


def test_a_client_is_told_which_settings_hold(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.policylang]\ngraph = "a.graph"\ndevice = "h100-sxm"\n')
    in_use = server().protocol.fm.commands[SETTINGS]
    found = in_use((tmp_path / "mine.apl").as_uri())
    assert found == {"graph": str(tmp_path / "a.graph"), "path": None, "device": "h100-sxm"}
    assert in_use((tmp_path.parent / "mine.apl").as_uri()) == {"graph": None, "path": None, "device": None}


GRAPH = "llama3_8b.graph"
QUICK = [types.CodeActionKind.QuickFix]


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that another test has loaded has more names to suggest."""
    monkeypatch.setattr("policylang.editor.state.operators_at_hand", lambda met: OperatorTable.bundled())


def after(state: State, action: types.CodeAction) -> str:
    (change,) = action.edit.document_changes
    assert (change.text_document.uri, change.text_document.version) == (state.document.uri, state.document.version)
    return with_edits(state.document.source.text, list(change.edits))  # type: ignore[arg-type]


def told(state: State, at: str, only: list[Any] | None = QUICK) -> list[tuple[str, str]]:
    """Each action at a word that has an edit, and the text with it."""
    place = state.document.source.text.index(at)
    found = actions(state, place, place, only)
    return [(each.title, after(state, each)) for each in found if each.edit is not None]


def test_a_mend_is_an_edit_of_the_version_that_was_read(state_of) -> None:
    state = state_of("save mm where bytes = 3\nsave attenton\n")
    assert told(state, "=") == [("write `==`", "save mm where bytes == 3\nsave attenton\n")]
    (action,) = actions(state, 19, 22, QUICK)
    assert action.is_preferred
    assert [each.code for each in action.diagnostics or ()] == ["APL010"]
    assert told(state, "attenton") == [("did you mean `attention`?", "save mm where bytes = 3\nsave attention\n")]
    assert told(state, "mm") == []
    several = state_of("save matmuls\n")
    assert [each.is_preferred for each in actions(several, 6, 6, QUICK)] == [None, None]
    assert told(several, "matmuls")[0] == ("did you mean `matmul`?", "save matmul\n")


def test_edits_count_in_the_units_of_the_client(state_of) -> None:
    state = state_of("# 🙂\r\nsave mm; save attenton # 🙂\r\nlet é = mm\r\n")
    assert told(state, "attenton")[0][1].endswith("\r\nsave mm; save attention # 🙂\r\nlet é = mm\r\n")


def test_a_client_without_versions_gets_plain_changes(state_of) -> None:
    state = state_of("save attenton\n")
    (action,) = actions(state, 6, 6, QUICK, versioned=False)
    assert action.edit.document_changes is None
    ((uri, edits),) = (action.edit.changes or {}).items()
    assert (uri, with_edits("save attenton\n", list(edits))) == (state.document.uri, "save attention\n")


def test_a_rule_that_matches_nothing_is_made_optional(state_of) -> None:
    text = "recompute everything\nsave topk\nsave mm in encoder.*\nsave mm\n"
    found = dict(told(state_of(text, GRAPH), "topk"))
    assert found["write `optional` before it"] == text.replace("save topk", "optional save topk")


@pytest.mark.slow
def test_a_module_path_is_one_with_which_the_rule_matches(state_of) -> None:
    text = "recompute everything\nsave mm in layer.*.attn\n"
    found = told(state_of(text, GRAPH), "layer")
    assert found[0][0].startswith("did you mean `")
    for title, better in found:
        state = state_of(better, GRAPH)
        assert not [each for each in state.diagnostics if each.code == "APL301"], title


def test_what_can_only_be_meant_in_one_way_is_mended_at_once_and_nothing_else(state_of) -> None:
    text = "save mm where bytes = 3\nsave atention, aten::mm\nsave matmuls\nlet a = mm\n// why\n"
    state = state_of(text)
    ((title, better),) = told(state, "save", ["source.fixAll"])
    assert title == "fix 4 mistakes that have one fix"
    assert better == "save mm where bytes == 3\nsave attention, aten.mm\nsave matmuls\nlet a = mm\n# why\n"
    assert [each.kind for each in actions(state, 0, 0, [FIX_ALL])] == [FIX_ALL]
    assert actions(state, 0, 0, ["refactor"]) == []


def test_a_line_of_an_included_file_is_mended_there(state_of, tmp_path: Path) -> None:
    (tmp_path / "shared.apl").write_text("save attenton\n")
    state = state_of('include "shared.apl"\nsave mm\n')
    (action,) = actions(state, 3, 3, QUICK)
    (change,) = action.edit.document_changes or ()
    assert change.text_document.uri == (tmp_path / "shared.apl").as_uri()
    assert change.text_document.version is None
    assert with_edits("save attenton\n", list(change.edits)) == "save attention\n"  # type: ignore[arg-type]


def test_a_line_of_a_bundled_policy_is_not_mended(state_of) -> None:
    state = state_of("include <fsdp>\nsave mm\n", GRAPH)
    assert state.diagnostics
    assert told(state, "include") == []


def test_a_rule_and_the_plan_can_be_shown_where_there_is_one(state_of) -> None:
    text = "recompute everything\n\nsave topk\n"
    commands = [each.command for each in actions(state_of(text, GRAPH), 27, 27) if each.command is not None]
    uri = state_of(text).document.uri
    assert [(each.title, each.command, each.arguments) for each in commands] == [
        ("explain this rule", "policylang.explainRule", [uri, 2, True]),
        ("show this plan", "policylang.showPlan", [uri, True]),
        ("explain APL301", "policylang.explainCode", ["APL301", True]),
    ]
    assert actions(state_of(text), 27, 27) == []


def test_explained_as_the_command_line_explains(state_of, tmp_path: Path, capsys) -> None:
    from policylang.commands.cli import main

    file = tmp_path / "mine.apl"
    file.write_text("recompute everything\nsave mm in block\n")
    state = state_of(file.read_text(), GRAPH)
    said = {}
    for what, name in (("--node", "mm_3"), ("--node", "*mm_1?"), ("--rule", "2")):
        assert main(["explain", str(file), "--graph", str(GRAPHS / GRAPH), what, name]) == 0
        said[name] = capsys.readouterr().out.replace(str(file), "mine.apl").rstrip()
    for name in ("mm_3", "*mm_1?"):
        _, _, rest = explained_node(state, name).partition("```text\n")
        assert rest.removesuffix("\n```\n").split() == said[name].partition("\n")[2].split()
    _, _, rest = explained_line(state, 1).partition("```text\n")
    assert rest.removesuffix("\n```\n").split() == said["2"].partition("\n")[2].split()
    assert "did you mean" in explained_node(state, "mm_3333")
    assert explained_line(state, 7) == ""
    assert explained_node(state_of("save mm"), "mm_3") == ""
    assert explained_code("APL301").startswith("# APL301: matches nothing")
    assert explained_code("../README") == ""


@pytest.mark.slow
def test_a_client_mends_a_policy_and_is_shown_what_it_asks_for(tmp_path: Path) -> None:
    """One server: the edit of an action is applied, and what was wrong is wrong no more; commands open files."""
    (tmp_path / "pyproject.toml").write_text(f"[tool.policylang]\ngraph = {json.dumps(str(GRAPHS / GRAPH))}\n")
    text = "recompute everything  # allow: APL701\nsave topk\n"
    uri = (tmp_path / "mine.apl").as_uri()
    asyncio.run(_session(tmp_path, uri, text))


async def _session(folder: Path, uri: str, text: str) -> None:
    config = ClientServerConfig(server_command=SERVER, client_factory=make_test_lsp_client)
    client = await config.start()
    opened = client.shown_documents

    capabilities = types.ClientCapabilities(
        workspace=types.WorkspaceClientCapabilities(
            workspace_edit=types.WorkspaceEditClientCapabilities(document_changes=True)
        ),
        window=types.WindowClientCapabilities(show_document=types.ShowDocumentClientCapabilities(True)),
    )
    folders = [types.WorkspaceFolder(folder.as_uri(), "here")]
    began = await client.initialize_session(types.InitializeParams(capabilities, workspace_folders=folders))
    kinds = began.capabilities.code_action_provider
    assert isinstance(kinds, types.CodeActionOptions)
    assert FIX_ALL in (kinds.code_action_kinds or ())

    async def command(name: str, *arguments: object) -> Any:
        return await client.workspace_execute_command_async(types.ExecuteCommandParams(name, arguments=arguments))

    def there(params: types.ShowDocumentParams) -> Path:
        return Path(unquote(urlsplit(params.uri).path))

    document = types.TextDocumentItem(uri, "policylang", 1, text)
    client.text_document_did_open(types.DidOpenTextDocumentParams(document))
    at = types.Range(types.Position(1, 6), types.Position(1, 6))
    found = await client.text_document_code_action_async(
        types.CodeActionParams(types.TextDocumentIdentifier(uri), at, types.CodeActionContext([], only=QUICK))
    )
    (action,) = found
    assert isinstance(action, types.CodeAction)
    assert [each.code for each in client.diagnostics[uri]] == ["APL301"]
    (change,) = action.edit.document_changes or ()
    better = with_edits(text, list(change.edits))  # type: ignore[arg-type]
    assert better == "recompute everything  # allow: APL701\noptional save topk\n"
    identifier = types.VersionedTextDocumentIdentifier(2, uri)
    changes = [types.TextDocumentContentChangeWholeDocument(better)]
    client.text_document_did_change(types.DidChangeTextDocumentParams(identifier, changes))
    page = await command("policylang.showPlan", uri)  # once the changed text is planned
    assert list(client.diagnostics[uri]) == []
    assert not opened
    written = there(types.ShowDocumentParams(page["uri"]))
    assert "<html" in written.read_text()[:200]
    assert written.parent.stat().st_mode & 0o777 == 0o700

    assert (await command("policylang.explainRule", uri, 0)).startswith("## mine.apl:1: recompute everything")
    assert not opened
    await command("policylang.explainRule", uri, 0, True)
    await command("policylang.explainNode", uri, "mm_3", True)
    await command("policylang.explainCode", "APL301", True)
    await command("policylang.showPlan", uri, True)
    texts = [there(each).read_text() for each in opened]
    assert [each.external for each in opened] == [False, False, False, True]
    assert texts[0].startswith("## mine.apl:1: recompute everything")
    assert texts[1].startswith("## mm\\_3:")
    assert texts[2].startswith("# APL301: ")

    await client.shutdown_session()
    await client.stop()
    for _ in range(50):
        if not os.path.exists(written.parent):
            break
        await asyncio.sleep(0.1)
    assert not os.path.exists(written.parent)
