"""A ``let`` with another name: every policy means what it did, or the name stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.editor.features.renaming import RenameRefused, renameable, renamed
from policylang.editor.names.occurrences import occurrences
from policylang.language.diagnostics import Source
from policylang.language.loader import load_policy
from policylang.language.syntax import Policy, Reference, Selector
from policylang.language.walk import rebuild
from tests.editor.policies import PoliciesAtHand
from tests.editor.test_definition import FILES, at

ROOT = Path(__file__).resolve().parents[2]
REAL = [
    path
    for path in sorted((*ROOT.glob("policies/*.apl"), *ROOT.glob("examples/*.apl")))
    if path.stem != "prelude" and "\nlet " in path.read_text(encoding="utf-8")
]
NO_NAME = "is no name: one is made of letters, digits and `_`, and starts with no digit"
NAMES = ("big", "small", "matmul", "mm", "device", "up", "half", "all_gather", "𝛼", "later")


def rename(
    editor: PoliciesAtHand, name: str, word: str, new: str, nth: int = 0, *, versions: bool = True
) -> dict[str, str]:
    state, offset = at(editor, name, word, nth)
    return editor.after(renamed(state, editor.around(name), offset, new, versions=versions))


def refused(editor: PoliciesAtHand, name: str, word: str, new: str, nth: int = 0) -> str:
    with pytest.raises(RenameRefused) as caught:
        rename(editor, name, word, new, nth)
    return str(caught.value)


def test_every_file_that_means_it_changes_and_no_string_or_comment(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, FILES)
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
    editor = PoliciesAtHand.on(tmp_path, FILES, {"lib/names.apl": "let big = addmm # in the editor\n"})
    state, offset = at(editor, "main.apl", "big")
    edit = renamed(state, editor.around("main.apl"), offset, "large")
    versions = {each.text_document.uri.rpartition("/")[2]: each.text_document.version for each in edit.document_changes}
    assert versions == {"main.apl": 1, "names.apl": 1, "other.apl": None}
    assert editor.after(edit)["lib/names.apl"] == "let large = addmm # in the editor\n"


def test_the_name_that_can_be_changed_is_shown(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, FILES)
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
        ("main.apl", "big", "𝛼𝛽", "`𝛼𝛽` is defined already, in lib/names.apl:3"),
        ("main.apl", "big", "matmul", "`matmul` is a group that main.apl:5 uses, and would mean something else there"),
        ("main.apl", "big", "bmm", "`bmm` is a word that lib/names.apl:3 uses, and would mean something else "
         "there"),
        ("uses.apl", "residual", "x", "`residual` is a name of the bundled policy <llama3_sac>, which stays as it is"),
        ("bare.apl", "topk", "x", "`topk` is a known operator where lib/rules.apl is loaded by itself, without "
         "this `let`"),
        ("own.apl", "mine", "norm", "`norm` is a known group where lib/more.apl is loaded by itself, without this "
         "`let`"),
    ],
)  # fmt: skip
def test_it_is_said_why_a_name_stays(tmp_path: Path, name: str, word: str, new: str, reason: str) -> None:
    more = {
        "uses.apl": "include <llama3_sac>\nsave residual\n",
        "bare.apl": 'let topk = mm\ninclude "lib/rules.apl"\n',
        "lib/rules.apl": "save topk\n",
        "own.apl": 'let mine = mm\ninclude "lib/more.apl"\n',
        "lib/more.apl": "save mine\n",
    }
    editor = PoliciesAtHand.on(tmp_path, {**FILES, **more})
    assert refused(editor, name, word, new) == reason


def test_a_name_that_hides_what_nothing_uses_is_the_users_own_choice(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, {"a.apl": "let big = mm\nsave big\n"})
    assert rename(editor, "a.apl", "big", "norm") == {"a.apl": "let norm = mm\nsave norm\n"}


def test_names_that_are_words_beside_others_are_refused_there(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(
        tmp_path, {"a.apl": "let big = mm\nbig -> save\nsave first 2 big\noffload big up to 3 GiB per rank\n"}
    )
    assert rename(editor, "a.apl", "big", "device")["a.apl"].startswith("let device = mm\ndevice -> save\n")
    editor = PoliciesAtHand.on(tmp_path, {"a.apl": "let big = mm\n((big)) to -> save\noverlap big\nbig\n"})
    assert rename(editor, "a.apl", "big", "overlap")["a.apl"].endswith("overlap overlap\noverlap\n")
    editor = PoliciesAtHand.on(
        tmp_path, {"a.apl": "let big = mm\nbig per block -> save\nsave first big\nfirst 2 big -> save\n"}
    )
    assert "first 2 up ->" in rename(editor, "a.apl", "big", "up")["a.apl"]


def test_what_cannot_be_read_takes_part(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, {"a.apl": "let big = mm\nsav (big or\nsave big\nsave mm in big\n"})
    assert rename(editor, "a.apl", "big", "x") == {"a.apl": "let x = mm\nsav (x or\nsave x\nsave mm in big\n"}


def test_a_use_that_two_policies_define_differently_takes_both_along(tmp_path: Path) -> None:
    files = {
        "one.apl": 'let big = mm\ninclude "rules.apl"\n',
        "two.apl": 'let big = bmm\ninclude "rules.apl"\n',
        "rules.apl": "save big\n",
    }
    editor = PoliciesAtHand.on(tmp_path, files)
    assert rename(editor, "one.apl", "big", "x") == {name: text.replace("big", "x") for name, text in files.items()}


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
    """Two policies with a file in common, which may use what one of them defines before."""
    free = draw(st.permutations(NAMES))
    before: list[str] = []
    first = draw(texts(before, free)) if draw(st.booleans()) else ""
    shared = list(before) if draw(st.booleans()) else []
    in_common = draw(texts(shared, free))
    main = first + 'include "lib.apl"\n' + draw(texts([*before, *shared], list(free)))
    return {
        "main.apl": main,
        "lib.apl": in_common,
        "other.apl": 'include "lib.apl"\n' + draw(texts(list(shared), list(free))),
    }


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
    before = {name: load_policy(folder / name) for name in files}
    try:
        edit = renamed(editor.state("main.apl"), editor.around("main.apl"), chosen.span.start, new)
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


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_policies_mean_what_they_did(tmp_path: Path, path: Path) -> None:
    before = load_policy(path)
    text = path.read_text(encoding="utf-8").replace("\n", "\r\n")
    for each in dict.fromkeys(it.name for it in occurrences(Source("", text)).names if it.defines):
        editor = PoliciesAtHand.on(tmp_path, {path.name: text})
        state, offset = at(editor, path.name, f"let {each}")
        made = editor.after(renamed(state, editor.around(path.name), offset + len("let "), "𝛼_"))[path.name]
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
