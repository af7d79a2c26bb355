"""A ``let`` with another name: every policy means what it did, or the name stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.editor.names import occurrences
from policylang.editor.navigation import RenameRefused, renameable, renamed
from policylang.language.diagnostics import Source
from policylang.language.loader import load_policy
from policylang.language.syntax import Policy, Reference, Selector
from policylang.language.walk import rebuild
from tests.editor.policies import PoliciesAtHand, with_edits
from tests.editor.test_definition import FILES, at

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
