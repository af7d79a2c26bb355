"""A ``let`` with another name: every policy means what it did, or the name stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.editor.features.renaming import RenameRefused, renameable, renamed
from policylang.language.resolution.loader import load_policy
from policylang.language.syntax import Policy, Reference, Selector
from policylang.language.walk import rebuild
from tests.editor.policies import Editor
from tests.editor.test_definition import FILES, at

NO_NAME = "is no name: one is made of letters, digits and `_`, and starts with no digit"
NAMES = ("big", "small", "matmul", "mm", "device", "up", "half", "all_gather", "𝛼", "later")


def rename(editor: Editor, name: str, word: str, new: str, nth: int = 0, *, versions: bool = True) -> dict[str, str]:
    state, offset = at(editor, name, word, nth)
    return editor.after(renamed(state, editor.around(name), offset, new, versions=versions))


def refused(editor: Editor, name: str, word: str, new: str, nth: int = 0) -> str:
    with pytest.raises(RenameRefused) as caught:
        rename(editor, name, word, new, nth)
    return str(caught.value)


def test_every_file_that_means_it_changes_and_no_string_or_comment(tmp_path: Path) -> None:
    editor = Editor.on(tmp_path, FILES)
    expected = {
        "main.apl": FILES["main.apl"].replace("𝛼𝛽, big ", "𝛼𝛽, 𝛾large ").replace("recompute big", "recompute 𝛾large"),
        "lib/names.apl": FILES["lib/names.apl"].replace("big", "𝛾large"),
        "other.apl": FILES["other.apl"].replace("big", "𝛾large"),
    }
    for name, nth in (("main.apl", 0), ("lib/names.apl", 1), ("other.apl", 0)):
        for versions in (True, False):
            assert rename(editor, name, "big", "𝛾large", nth, versions=versions) == expected
    assert rename(editor, "apart.apl", "big", "large") == {
        "apart.apl": "let large = bmm\nsave large\nsave matmul, mm\n"
    }


def test_edits_of_open_files_name_their_version(tmp_path: Path) -> None:
    editor = Editor.on(tmp_path, FILES, {"lib/names.apl": "let big = addmm # in the editor\n"})
    state, offset = at(editor, "main.apl", "big")
    edit = renamed(state, editor.around("main.apl"), offset, "large")
    versions = {each.text_document.uri.rpartition("/")[2]: each.text_document.version for each in edit.document_changes}
    assert versions == {"main.apl": 1, "names.apl": 1, "other.apl": None}
    assert editor.after(edit)["lib/names.apl"] == "let large = addmm # in the editor\n"


def test_the_name_that_can_be_changed_is_shown(tmp_path: Path) -> None:
    editor = Editor.on(tmp_path, FILES)
    state, offset = at(editor, "main.apl", "big")
    found = renameable(state, editor.around("main.apl"), offset + 3)
    assert found is not None
    assert editor.shown(state.document.uri, found) == "main.apl:3:big"
    assert renameable(state, editor.around("main.apl"), state.document.source.text.index("# big") + 3) is None
    assert rename(editor, "main.apl", "big", "big") == {}


@pytest.mark.parametrize(
    ("name", "word", "new", "reason"),
    [
        ("main.apl", "matmul", "x", "`matmul` is a group of the prelude, which every policy knows by this name"),
        ("main.apl", "mm\n", "x", "`mm` is not a name that a `let` defines"),
        ("main.apl", "save", "x", "`save` is a word of the language"),
        ("main.apl", "# big", "x", "nothing here has a name that can be changed"),
        ("main.apl", "big", "where", "`where` is a word of the language, which cannot be a name"),
        ("main.apl", "big", "two words", f"`two words` {NO_NAME}"),
        ("main.apl", "big", "2nd", f"`2nd` {NO_NAME}"),
        ("main.apl", "big", "x = mm\nlet y", f"`x = mm\nlet y` {NO_NAME}"),
        ("main.apl", "big", "", f"`` {NO_NAME}"),
        ("main.apl", "big", "𝛼𝛽", "`𝛼𝛽` is defined already, in PLACElib/names.apl:3"),
        ("main.apl", "big", "matmul", "`matmul` is a group that main.apl:5 uses, and would mean something else there"),
        ("main.apl", "big", "bmm", "`bmm` is a word that PLACElib/names.apl:3 uses, and would mean something else "
         "there"),
        ("uses.apl", "residual", "x", "`residual` is a name of the bundled policy <llama3_sac>, which stays as it is"),
        ("bare.apl", "topk", "x", "`topk` is the operator where PLACElib/rules.apl is loaded, which uses it without "
         "this `let`"),
    ],
)  # fmt: skip
def test_it_is_said_why_a_name_stays(tmp_path: Path, name: str, word: str, new: str, reason: str) -> None:
    more = {
        "uses.apl": "include <llama3_sac>\nsave residual\n",
        "bare.apl": 'let topk = mm\ninclude "lib/rules.apl"\n',
        "lib/rules.apl": "save topk\n",
    }
    editor = Editor.on(tmp_path, {**FILES, **more})
    assert refused(editor, name, word, new).replace(f"{tmp_path}/", "PLACE") == reason


def test_a_name_that_hides_what_nothing_uses_is_the_users_own_choice(tmp_path: Path) -> None:
    editor = Editor.on(tmp_path, {"a.apl": "let big = mm\nsave big\n"})
    assert rename(editor, "a.apl", "big", "norm") == {"a.apl": "let norm = mm\nsave norm\n"}


def test_names_that_are_words_beside_others_are_refused_there(tmp_path: Path) -> None:
    editor = Editor.on(
        tmp_path, {"a.apl": "let big = mm\nbig -> save\nsave first 2 big\noffload big up to 3 GiB per rank\n"}
    )
    assert rename(editor, "a.apl", "big", "device")["a.apl"].startswith("let device = mm\ndevice -> save\n")
    editor = Editor.on(tmp_path, {"a.apl": "let big = mm\n((big)) to -> save\noverlap big\nbig\n"})
    assert rename(editor, "a.apl", "big", "overlap")["a.apl"].endswith("overlap overlap\noverlap\n")
    editor = Editor.on(
        tmp_path, {"a.apl": "let big = mm\nbig per block -> save\nsave first big\nfirst 2 big -> save\n"}
    )
    assert "first 2 up ->" in rename(editor, "a.apl", "big", "up")["a.apl"]


def test_what_cannot_be_read_takes_part(tmp_path: Path) -> None:
    editor = Editor.on(tmp_path, {"a.apl": "let big = mm\nsav (big or\nsave big\nsave mm in big\n"})
    assert rename(editor, "a.apl", "big", "x") == {"a.apl": "let x = mm\nsav (x or\nsave x\nsave mm in big\n"}


def test_a_use_that_two_policies_define_differently_takes_both_along(tmp_path: Path) -> None:
    files = {
        "one.apl": 'let big = mm\ninclude "rules.apl"\n',
        "two.apl": 'let big = bmm\ninclude "rules.apl"\n',
        "rules.apl": "save big\n",
    }
    editor = Editor.on(tmp_path, files)
    assert rename(editor, "one.apl", "big", "x") == {name: text.replace("big", "x") for name, text in files.items()}


SELECTORS = st.recursive(
    st.sampled_from(NAMES),
    lambda inner: st.one_of(
        st.builds("first {} per block".format, inner),
        st.builds("({}) in big".format, inner),
        st.builds("({} where device == up)".format, inner),
        st.builds("({} or {})".format, inner, inner),
        st.builds("({} feeding ({}))".format, inner, inner),
    ),
    max_leaves=4,
)
STATEMENTS = st.one_of(
    st.builds("let {} = {}".format, st.sampled_from(NAMES), SELECTORS),
    st.builds("save {}".format, SELECTORS),
    st.builds("{} -> save  # big, mm".format, SELECTORS),
    st.builds("offload {} up to 2 GiB per rank".format, SELECTORS),
    st.builds("bucket {} up to 2 GiB".format, SELECTORS),
    st.builds("overlap {} up to 1 GiB in flight".format, SELECTORS),
    st.builds("expect exactly 2 {}".format, SELECTORS),
    st.builds("expect no {} saved".format, SELECTORS),
    st.sampled_from(['include "lib.apl"', 'include "lib.apl"', "sav (big or", "policy big",
                     "fuse all_gather chains over big"]),
)  # fmt: skip
TEXTS = st.lists(STATEMENTS, min_size=1, max_size=5).map("\n".join)


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


def check_that_policies_mean_what_they_did(
    folder: Path, texts: tuple[str, str, str], new: str, data: st.DataObject
) -> None:
    main, lib, other = texts
    files = {
        "main.apl": f"let small = mm\n{main}\n",
        "lib.apl": f"{lib}\n",
        "other.apl": f'include "lib.apl"\n{other}\n',
    }
    editor = Editor.on(folder, files)
    old = data.draw(st.sampled_from([name for name in NAMES if name in files["main.apl"]]))
    state = editor.state("main.apl")
    offset = state.document.source.text.find(old)
    before = {name: load_policy(folder / name) for name in files}
    try:
        edit = renamed(state, editor.around("main.apl"), offset, new)
    except RenameRefused:
        return
    made = editor.after(edit)
    for name, text in made.items():
        (folder / name).write_text(text)
    for name, loaded in before.items():
        again = load_policy(folder / name)
        held = {name, "lib.apl"} if "lib.apl" in files[name] else {name}
        assert [each.code for each in again.errors] == [each.code for each in loaded.errors]
        assert meaning(again.policy) == meaning(loaded.policy, *((old, new) if held & made.keys() else ()))


@given(st.tuples(TEXTS, TEXTS, TEXTS), st.sampled_from(NAMES), st.data())
@settings(max_examples=12, deadline=None)
def test_every_policy_means_what_it_did(
    tmp_path_factory: pytest.TempPathFactory, texts: tuple[str, str, str], new: str, data: st.DataObject
) -> None:
    check_that_policies_mean_what_they_did(tmp_path_factory.mktemp("policies"), texts, new, data)


@pytest.mark.slow
@given(st.tuples(TEXTS, TEXTS, TEXTS), st.sampled_from(NAMES), st.data())
@settings(max_examples=400, deadline=None)
def test_every_one_of_many_policies_means_what_it_did(
    tmp_path_factory: pytest.TempPathFactory, texts: tuple[str, str, str], new: str, data: st.DataObject
) -> None:
    check_that_policies_mean_what_they_did(tmp_path_factory.mktemp("policies"), texts, new, data)
