"""Where names are defined and used, and the files that a policy names."""

from __future__ import annotations

from pathlib import Path

import pytest
from lsprotocol import types

from policylang.editor import names
from policylang.editor.names import PolicyFolder
from policylang.editor.navigation import definition, highlights, references
from policylang.editor.state import Document, State, read_text
from policylang.language.diagnostics import Source
from policylang.language.files import read_source
from tests.editor.policies import PoliciesAtHand

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
