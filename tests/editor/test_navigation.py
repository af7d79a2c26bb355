"""Names: where they are defined and used, and another name for them; over a real connection too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytest_lsp", reason="needs a client of the language server")

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from lsprotocol import types
from pygls.exceptions import JsonRpcException
from pytest_lsp import ClientServerConfig, make_test_lsp_client

from policylang.editor import names
from policylang.editor.names import PolicyFolder, occurrences
from policylang.editor.navigation import RenameRefused, definition, highlights, references, renameable, renamed
from policylang.editor.state import Document, State, read_text
from policylang.language.diagnostics import Source
from policylang.language.files import read_source
from policylang.language.loader import load_policy
from policylang.language.syntax import Policy, Reference, Selector
from policylang.language.walk import rebuild
from tests.editor.conftest import SERVER
from tests.editor.policies import PoliciesAtHand, with_edits

LIB = "# 𝛼 names\r\nlet big = mm where bytes > 64 MiB\r\nlet 𝛼𝛽 = big or bmm\r\n"
FILES = {
    "lib/names.apl": LIB,
    "lib/all.apl": 'include "names.apl"\n',
    "main.apl": (
        'policy main\ninclude "lib/all.apl"\nsave 𝛼𝛽, big  # big\nrecompute big in "big"\nsave matmul\nsave mm\n'
    ),
    "other.apl": 'include "lib/names.apl"\nsave first 2 big per block\n',
    "apart.apl": "let big = bmm\nsave big\nsave matmul, mm\n",
}


def at(editor: PoliciesAtHand, name: str, word: str, nth: int = 0) -> tuple[State, int]:
    state = editor.state(name)
    offset = -1
    for _ in range(nth + 1):
        offset = state.document.source.text.index(word, offset + 1)
    return state, offset


def defined(editor: PoliciesAtHand, name: str, word: str, nth: int = 0) -> list[str]:
    state, offset = at(editor, name, word, nth)
    found = definition(state, offset, lambda: editor.around(name))
    return [editor.shown(each.target_uri, each.target_selection_range) for each in found]


def used(
    editor: PoliciesAtHand, name: str, word: str, nth: int = 0, *, declaration: bool = True, workspace=True
) -> list[str]:
    state, offset = at(editor, name, word, nth)
    found = references(state, editor.around(name, workspace=workspace), offset, declaration=declaration)
    return [editor.shown(each.uri, each.range) for each in found]


# --- definitions ---


def test_a_name_leads_to_its_let_in_a_file_that_is_included_by_an_included_one(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, FILES)
    assert defined(editor, "main.apl", "𝛼𝛽") == ["lib/names.apl:3:𝛼𝛽"]
    assert defined(editor, "main.apl", "big in") == ["lib/names.apl:2:big"]
    state, offset = at(editor, "main.apl", "𝛼𝛽")
    (link,) = definition(state, offset + 2, lambda: editor.around("main.apl"))
    assert link.origin_selection_range == types.Range(types.Position(2, 5), types.Position(2, 9))
    assert link.target_range == types.Range(types.Position(2, 0), types.Position(2, 21))


def test_it_is_the_text_of_an_open_buffer_that_counts(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, FILES, {"lib/names.apl": "\n\n\nlet big = mm\n"})
    assert defined(editor, "main.apl", "big in") == ["lib/names.apl:4:big"]


def test_a_definition_leads_to_itself_and_comments_and_modules_nowhere(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, FILES)
    assert defined(editor, "apart.apl", "big") == ["apart.apl:1:big"]
    assert defined(editor, "main.apl", "# big") == []
    assert defined(editor, "main.apl", '"big"') == []
    assert defined(editor, "main.apl", "save mm") == []
    assert defined(editor, "main.apl", "mm\n") == []


def test_groups_are_in_the_prelude_and_bundled_names_in_the_library(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(
        tmp_path, {"a.apl": "include <llama3_sac>\nsave residual\nsave attention\ninclude <prelude>\n"}
    )
    (group,) = defined(editor, "a.apl", "attention")
    assert group.startswith("<prelude>:")
    assert group.endswith(":attention")
    (residual,) = defined(editor, "a.apl", "residual")
    assert residual.startswith("<llama3_sac>:")
    assert defined(editor, "a.apl", "llama3") == ["<llama3_sac>:1:"]
    assert defined(editor, "a.apl", "prelude") == ["<prelude>:1:"]


@pytest.mark.parametrize("name", ["prelude", "llama3_sac"])
def test_a_bundled_file_that_is_open_works_as_any(name: str) -> None:
    from policylang.language.resources import policies_folder

    path = policies_folder() / f"{name}.apl"
    document = Document(path.as_uri(), 1, Source(str(path), path.read_text()), path)
    state = State(document, read_text(document, None, read_source))
    word = {"prelude": "all_gather, reduce_scatter", "llama3_sac": "residual per"}[name]
    around = PolicyFolder().files([], [document])
    (link,) = definition(state, document.source.text.index(word), lambda: around)
    assert link.target_uri == document.uri
    assert len(references(state, around, document.source.text.index(word), declaration=True)) >= 2


def test_a_group_that_a_let_hides_is_the_let(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, {"a.apl": "save matmul\nlet matmul = mm\nsave matmul\n"})
    assert defined(editor, "a.apl", "matmul") == defined(editor, "a.apl", "matmul", 2) == ["a.apl:2:matmul"]


def test_mistakes_leave_the_definition_where_it_is(tmp_path: Path) -> None:
    text = "save later\nlet later = mm\nlet later = bmm\nsav (later or\nsave mm - later\nlet own = own\n"
    editor = PoliciesAtHand.on(tmp_path, {"a.apl": f"{text}let torn = mm or\nsave torn\n"})
    for nth in range(5):
        assert defined(editor, "a.apl", "later", nth) == ["a.apl:2:later"]
    assert defined(editor, "a.apl", "own", 1) == ["a.apl:6:own"]
    assert defined(editor, "a.apl", "torn", 1) == ["a.apl:7:torn"]


def test_a_name_of_the_file_that_includes_this_one_is_found_there(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, {"rules.apl": "save big\n", "main.apl": 'let big = mm\ninclude "rules.apl"\n'})
    assert defined(editor, "rules.apl", "big") == ["main.apl:1:big"]


def test_files_are_definitions_too(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("")
    text = (
        'include "lib.apl"\ninclude "none.apl"\ndevice "cluster.toml"; device h100\ndevice "nowhere.toml"\ninclude "\n'
    )
    editor = PoliciesAtHand.on(tmp_path, {"a.apl": text, "lib.apl": ""})
    assert defined(editor, "a.apl", "lib") == defined(editor, "a.apl", "include") == ["lib.apl:1:"]
    assert defined(editor, "a.apl", "cluster") == ["cluster.toml:1:"]
    assert defined(editor, "a.apl", "h100") == ["<h100-sxm>:1:"]
    assert defined(editor, "a.apl", "none") == defined(editor, "a.apl", "nowhere") == []


def test_a_text_in_no_file_knows_its_own_names() -> None:
    document = Document("untitled:1", 1, Source("untitled:1", "let big = mm\r\nsave big\r\n"))
    state = State(document, read_text(document, None, read_source))
    around = PolicyFolder().files([], [document])
    (link,) = definition(state, document.source.text.rindex("big") + 3, lambda: around)
    assert link.target_uri == "untitled:1"
    assert len(references(state, around, 5, declaration=True)) == 2


# --- references ---


def test_a_name_is_used_wherever_its_definition_is_included(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, FILES)
    own = ["main.apl:3:big", "main.apl:4:big"]
    elsewhere = ["lib/names.apl:2:big", "lib/names.apl:3:big", "other.apl:2:big"]
    assert sorted(used(editor, "main.apl", "big")) == sorted([*own, *elsewhere])
    assert used(editor, "main.apl", "big")[:2] == own
    assert "lib/names.apl:2:big" not in used(editor, "main.apl", "big", declaration=False)
    assert used(editor, "apart.apl", "big") == ["apart.apl:1:big", "apart.apl:2:big"]
    assert sorted(used(editor, "main.apl", "big", workspace=False)) == sorted([*own, *elsewhere[:2]])


def test_groups_and_operators_are_used_in_every_policy(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, {**FILES, "hides.apl": "let matmul = mm\nsave matmul\n"})
    assert used(editor, "main.apl", "matmul")[:2] == ["main.apl:5:matmul", "apart.apl:3:matmul"]
    assert [each.partition(":")[0] for each in used(editor, "main.apl", "matmul")[2:]] == ["<prelude>"]
    assert {"main.apl:6:mm", "apart.apl:3:mm", "lib/names.apl:2:mm"} < set(used(editor, "main.apl", "mm\n"))
    assert used(editor, "hides.apl", "matmul") == ["hides.apl:1:matmul", "hides.apl:2:matmul"]


def test_includes_in_a_circle_end(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(
        tmp_path, {"a.apl": 'include "b.apl"\nlet big = mm\n', "b.apl": 'include "a.apl"\nsave big\n'}
    )
    assert used(editor, "b.apl", "big") == ["b.apl:2:big", "a.apl:2:big"]
    assert defined(editor, "b.apl", "big") == ["a.apl:2:big"]


def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, FILES)
    folder = PolicyFolder()
    state, offset = at(editor, "main.apl", "big")
    before = references(state, folder.files([tmp_path], [state.document]), offset, declaration=True)
    (tmp_path / "other.apl").write_text('include "lib/names.apl"\nsave big, big\n')
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "more.apl").write_text('include "../lib/names.apl"\nsave big\n')
    after = references(state, folder.files([tmp_path], [state.document]), offset, declaration=True)
    assert len(after) == len(before) + 1


def test_of_a_large_workspace_the_first_files_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = PoliciesAtHand.on(tmp_path, FILES)
    monkeypatch.setattr(names, "MOST_FILES", 2)
    found = editor.around("main.apl")
    assert [Path(root).name for root in found.roots] == ["main.apl", "apart.apl"]


def test_highlights_are_the_places_in_the_document(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, FILES)
    found = highlights(*at(editor, "lib/names.apl", "big", 1))
    write, read = types.DocumentHighlightKind.Write, types.DocumentHighlightKind.Read
    assert [(each.range.start.line, each.kind) for each in found] == [(1, write), (2, read)]
    assert highlights(*at(editor, "main.apl", "recompute")) == []


ROOT = Path(__file__).resolve().parents[2]
REAL = [
    path
    for path in sorted((*ROOT.glob("policies/*.apl"), *ROOT.glob("examples/*.apl")))
    if path.stem != "prelude" and "\nlet " in path.read_text(encoding="utf-8")
]
NO_NAME = "is no name: one is made of letters, digits and `_`, and starts with no digit"
NAMES = ("big", "small", "matmul", "mm", "device", "up", "half", "all_gather", "𝛼", "later")


def rename(editor: PoliciesAtHand, name: str, word: str, new: str, nth: int = 0) -> str:
    return rename_at(editor, name, at(editor, name, word, nth)[1], new)


def rename_at(editor: PoliciesAtHand, name: str, offset: int, new: str) -> str:
    """The text with another name in it."""
    state = editor.state(name)
    return with_edits(state.document.source.text, renamed(state, editor.around(name), offset, new))


def refused(editor: PoliciesAtHand, name: str, word: str, new: str, nth: int = 0) -> str:
    with pytest.raises(RenameRefused) as caught:
        rename(editor, name, word, new, nth)
    return str(caught.value)


def test_every_use_changes_and_no_string_or_comment(tmp_path: Path) -> None:
    text = 'let big = mm or bmm\nsave first 2 big per block  # big\nrecompute big in "big"\n'
    editor = PoliciesAtHand.on(tmp_path, {**FILES, "mine.apl": text})
    for nth in (0, 1):
        assert rename(editor, "mine.apl", "big", "𝛾large", nth) == (
            'let 𝛾large = mm or bmm\nsave first 2 𝛾large per block  # big\nrecompute 𝛾large in "big"\n'
        )
    assert rename(editor, "apart.apl", "big", "large") == "let large = bmm\nsave large\nsave matmul, mm\n"


def test_a_name_that_another_file_uses_or_defines_stays(tmp_path: Path) -> None:
    """A use that two policies define differently is a use of both."""
    files = {
        "one.apl": 'let big = mm\ninclude "rules.apl"\n',
        "two.apl": 'let big = bmm\ninclude "rules.apl"\n',
        "rules.apl": "save big\n",
    }
    editor = PoliciesAtHand.on(tmp_path, files)
    for name, other in (("one.apl", "rules.apl:1"), ("two.apl", "rules.apl:1"), ("rules.apl", "one.apl:1")):
        said = f"`big` is used in {other} too, and one file is renamed: change each use by hand"
        assert refused(editor, name, "big", "x") == said


def test_the_name_that_can_be_changed_is_shown(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, FILES)
    state, offset = at(editor, "apart.apl", "big", 1)
    found = renameable(state, editor.around("apart.apl"), offset + 3)
    assert found is not None
    assert editor.shown(state.document.uri, found) == "apart.apl:2:big"
    assert renameable(state, editor.around("apart.apl"), len(state.document.source.text)) is None
    assert rename(editor, "apart.apl", "big", "big") == FILES["apart.apl"]


@pytest.mark.parametrize(
    ("name", "word", "new", "reason"),
    [
        ("main.apl", "matmul", "x", "`matmul` is a group of the prelude, which every policy knows by this name"),
        ("main.apl", "mm\n", "x", "`mm` is not a name that a `let` defines"),
        ("main.apl", "save", "x", "`save` is a word of the language"),
        ("main.apl", "# big", "x", "nothing here has a name that can be changed"),
        ("own.apl", "mine", "where", "`where` is a word of the language, which cannot be a name"),
        ("own.apl", "mine", "two words", f"`two words` {NO_NAME}"),
        ("own.apl", "mine", "2nd", f"`2nd` {NO_NAME}"),
        ("own.apl", "mine", "x = mm\nlet y", f"`x = mm\nlet y` {NO_NAME}"),
        ("own.apl", "mine", "", f"`` {NO_NAME}"),
        ("own.apl", "mine", "small", "`small` is defined already, in own.apl:2"),
        ("own.apl", "mine", "matmul", "`matmul` is a group that main.apl:5 uses, and would mean something else there"),
        ("own.apl", "mine", "bmm", "`bmm` is a word that own.apl:2 uses, and would mean something else there"),
        ("own.apl", "𝛼𝛽", "x", "`𝛼𝛽` is used in main.apl:3 too, and one file is renamed: change each use by hand"),
        ("uses.apl", "residual", "x", "`residual` is a name of the bundled policy <llama3_sac>, which stays as it is"),
    ],
)  # fmt: skip
def test_it_is_said_why_a_name_stays(tmp_path: Path, name: str, word: str, new: str, reason: str) -> None:
    own = 'let mine = mm\nlet small = mine or bmm\nsave small\nsave 𝛼𝛽\ninclude "main.apl"\n'
    files = {**FILES, "own.apl": own, "uses.apl": "include <llama3_sac>\nsave residual\n"}
    editor = PoliciesAtHand.on(tmp_path, files)
    assert refused(editor, name, word, new) == reason


def test_a_name_that_hides_what_nothing_uses_is_the_users_own_choice(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, {"a.apl": "let big = mm\nsave big\n"})
    assert rename(editor, "a.apl", "big", "norm") == "let norm = mm\nsave norm\n"


def test_names_that_are_words_beside_others_are_refused_there(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(
        tmp_path, {"a.apl": "let big = mm\nbig -> save\nsave first 2 big\noffload big up to 3 GiB per rank\n"}
    )
    assert rename(editor, "a.apl", "big", "device").startswith("let device = mm\ndevice -> save\n")
    editor = PoliciesAtHand.on(tmp_path, {"a.apl": "let big = mm\n((big)) to -> save\noverlap big\nbig\n"})
    assert rename(editor, "a.apl", "big", "overlap").endswith("overlap overlap\noverlap\n")
    editor = PoliciesAtHand.on(
        tmp_path, {"a.apl": "let big = mm\nbig per block -> save\nsave first big\nfirst 2 big -> save\n"}
    )
    assert "first 2 up ->" in rename(editor, "a.apl", "big", "up")


def test_what_cannot_be_read_takes_part(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, {"a.apl": "let big = mm\nsav (big or\nsave big\nsave mm in big\n"})
    assert rename(editor, "a.apl", "big", "x") == "let x = mm\nsav (x or\nsave x\nsave mm in big\n"


OPERATORS = ("mm", "bmm", "matmul", "all_gather", "topk")
BROKEN = ("sav (big or", "let small = big small", "save bigg", "save later")


@st.composite
def selectors(draw: st.DrawFn, known: list[str]) -> str:
    """Of names that are known there, mostly."""
    names = st.sampled_from([*known, *known, *OPERATORS])
    form = st.sampled_from(
        ["{}", "{}", "first {} per block", "{} in big", "({} where device == up)", "({} or {})", "{} feeding ({})"]
    )
    return draw(form).format(draw(names), draw(names))


@st.composite
def texts(draw: st.DrawFn, known: list[str], free: list[str]) -> str:
    """A policy; takes the names that it defines from those that are free, and adds them to those that are known."""
    lines = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.integers(0, 9))
        if kind < 4 and free:
            lines.append(f"let {free[-1]} = {draw(selectors(known))}")
            known.append(free.pop())
        elif kind == 9 and draw(st.booleans()):
            lines.append(draw(st.sampled_from(BROKEN)))
        else:
            forms = [
                "save {}",
                "({}) -> save  # big, mm",
                "expect exactly 2 {}",
                "expect no {} saved",
                "bucket {} up to 2 GiB",
            ]
            lines.append(draw(st.sampled_from(forms)).format(draw(selectors(known))))
    return "\n".join(lines) + "\n"


@st.composite
def folders(draw: st.DrawFn) -> dict[str, str]:
    """A policy, and a file that it may include and that may use what is defined before."""
    free = draw(st.permutations(NAMES))
    known: list[str] = []
    first = draw(texts(known, free)) if draw(st.booleans()) else ""
    included = draw(texts(list(known) if draw(st.booleans()) else [], free))
    return {"main.apl": first + 'include "lib.apl"\n' + draw(texts(known, free)), "lib.apl": included}


def meaning(policy: Policy | None, old: str = "", new: str = "") -> object:
    """What a policy means, with one of its names as another."""
    if policy is None:
        return None

    def change(part: Selector) -> Selector:
        return evolve(part, name=new) if isinstance(part, Reference) and part.name == old else part

    def changed(statement: object) -> object:
        selector = getattr(statement, "selector", None)
        return statement if selector is None else evolve(statement, selector=rebuild(selector, change))  # type: ignore

    lets = {new if name == old else name: rebuild(let.selector, change) for name, let in policy.lets.items()}
    parts = (*policy.rules, *policy.rewrites, *policy.scheduling, *policy.expectations)
    return lets, [changed(part) for part in parts]


def check_that_policies_mean_what_they_did(folder: Path, files: dict[str, str], data: st.DataObject) -> None:
    editor = PoliciesAtHand.on(folder, files)
    said = [each for each in occurrences(Source("", files["main.apl"])).names if each.name not in OPERATORS]
    if not said:
        return
    chosen = data.draw(st.sampled_from(said))
    old, new = chosen.name, data.draw(st.sampled_from([*NAMES, "fresh"]))
    before = load_policy(folder / "main.apl")
    try:
        made = rename_at(editor, "main.apl", chosen.span.start, new)
    except RenameRefused:
        return
    (folder / "main.apl").write_text(made)
    again = load_policy(folder / "main.apl")
    assert [each.code for each in again.errors] == [each.code for each in before.errors]
    assert meaning(again.policy) == meaning(before.policy, old, new)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_policies_mean_what_they_did(tmp_path: Path, path: Path) -> None:
    before = load_policy(path)
    text = path.read_text(encoding="utf-8").replace("\n", "\r\n")
    for each in dict.fromkeys(it.name for it in occurrences(Source("", text)).names if it.defines):
        editor = PoliciesAtHand.on(tmp_path, {path.name: text})
        offset = text.index(f"let {each}") + len("let ")
        made = rename_at(editor, path.name, offset, "𝛼_")
        (tmp_path / path.name).write_bytes(made.encode())
        assert meaning(load_policy(tmp_path / path.name).policy) == meaning(before.policy, each, "𝛼_")
        assert made.count("\r\n") == text.count("\n")


@given(folders(), st.data())
@settings(max_examples=8, deadline=None)
def test_every_policy_means_what_it_did(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, str], data: st.DataObject
) -> None:
    check_that_policies_mean_what_they_did(tmp_path_factory.mktemp("policies"), files, data)


@pytest.mark.slow
@given(folders(), st.data())
@settings(max_examples=250, deadline=None)
def test_every_one_of_many_policies_means_what_it_did(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, str], data: st.DataObject
) -> None:
    check_that_policies_mean_what_they_did(tmp_path_factory.mktemp("policies"), files, data)


LIBRARY = "let big = mm\r\n"
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
    (folder / "lib.apl").write_bytes(LIBRARY.encode())
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
