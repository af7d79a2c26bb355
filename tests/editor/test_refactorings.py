"""A selector gets a name, and a name is written out: the policy means what it meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

from policylang.editor.refactorings.inlined_let import inlined_let
from policylang.editor.refactorings.named_selector import named_selector
from policylang.editor.state import Document, State, read_text
from policylang.language.diagnostics import Source
from policylang.language.files import read_source
from policylang.language.operators import PRELUDE_NAME
from policylang.language.resources import policies_folder
from policylang.language.syntax import Let, Policy, Reference, Selector, Word
from policylang.language.walk import rebuild, selector_of, walk

LIBRARY = sorted(policies_folder().glob("*.apl"))
MORE = [
    "let a = mm, bmm where bytes > 3  # both\nlet b = first a per block\nsave b, a in block\nexpect every a saved\n",
    "policy p\nsave every 2nd (\n  mm,  # one\n  bmm\n) per block from 1st; save (mm or bmm) except add\r\n",
    "bucket (all_gather where from parameter) per 2 blocks up to 3 MiB\nsave users of (mm in layers.*)\n",
]


def state_of(text: str, path: Path) -> State:
    document = Document(path.as_uri(), 1, Source(path.name, text), path)
    return State(document, read_text(document, None, read_source))


STATES = [state_of(each.read_text(), each) for each in LIBRARY] + [state_of(each, Path("/m.apl")) for each in MORE]
SELECTORS = [
    (state, part.span.start, part.span.end)
    for state in STATES
    for statement in state.text.file.statements
    if (own := selector_of(statement)) is not None
    for part in walk(own)
    if not isinstance(part, Word)
]
LETS = [(state, each) for state in STATES for each in state.text.file.statements if isinstance(each, Let)]


def meaning(text: str, state: State) -> list[Any]:
    """All that decides, with every name written out."""
    path = state.document.path
    assert path is not None
    policy = state_of(text, path).text.loaded.policy
    assert policy is not None, text

    def out(part: Selector) -> Selector:
        named = isinstance(part, Reference) and policy.lets[part.name].span.source.name != PRELUDE_NAME
        return expanded(policy.lets[part.name].selector) if named else part  # type: ignore[union-attr]

    def expanded(selector: Selector) -> Selector:
        return rebuild(selector, out)

    return [_with(each, expanded) for each in _deciding(policy)]


def _deciding(policy: Policy) -> list[Any]:
    return [*policy.rules, *policy.rewrites, *policy.scheduling, *policy.expectations, policy.blocks, policy.undecided]


def _with(statement: Any, expanded: Any) -> Any:
    own = None if statement is None else selector_of(statement)
    return statement if own is None else evolve(statement, selector=expanded(own))


@given(st.sampled_from(SELECTORS))
@settings(max_examples=12, deadline=None)
def test_a_selector_that_gets_a_name_is_the_same(at: tuple[State, int, int]) -> None:
    state, start, end = at
    mend = named_selector(state, start, end)
    assert mend is not None, state.document.source.text[start:end]
    source = state.document.source
    better = mend.applied(source)
    assert "let picked = " in better
    assert meaning(better, state) == meaning(source.text, state)
    path = state.document.path
    assert path is not None
    named = state_of(better, path)
    back = inlined_let(named, better.index("let picked") + 4)
    if back is not None:  # a library of names for others may have uses elsewhere
        assert meaning(back.applied(named.document.source), state) == meaning(source.text, state)


def test_a_let_that_is_written_out_is_the_same() -> None:
    """Of every name of every policy, which are few."""
    done = 0
    for state, let in LETS:
        mend = inlined_let(state, let.span.start + 4)
        if mend is not None:
            source = state.document.source
            assert meaning(mend.applied(source), state) == meaning(source.text, state)
            done += 1
    assert done >= 5


def test_what_is_written() -> None:
    state = state_of("let a = mm, bmm # both\nsave first a per block\nsave a\n", Path("/m.apl"))
    mend = inlined_let(state, 4)
    assert mend is not None
    assert mend.title == "write out `a`"
    assert mend.applied(state.document.source) == "save first (mm, bmm) per block\nsave (mm, bmm)\n"
    text = "# on top\nsave mm where bytes > 3 in block  # why\n"
    state = state_of(text, Path("/m.apl"))
    start = text.index("mm where")
    mend = named_selector(state, start, start + len("mm where bytes > 3 "))
    assert mend is not None
    better = "# on top\nlet picked = mm where bytes > 3\nsave picked in block  # why\n"
    assert mend.applied(state.document.source) == better


@pytest.mark.parametrize("chosen", ["mm", "save mm in block", "block where", "bytes > 3", " "])
def test_what_is_no_selector_of_its_own_gets_no_name(chosen: str) -> None:
    text = "save mm in block where bytes > 3\n"
    start = text.index(chosen)
    assert named_selector(state_of(text, Path("/m.apl")), start, start + len(chosen)) is None


def test_a_name_that_another_file_uses_stays(tmp_path: Path) -> None:
    (tmp_path / "shared.apl").write_text("save a\n")
    state = state_of('let a = mm\ninclude "shared.apl"\nsave a\n', tmp_path / "mine.apl")
    assert inlined_let(state, 4) is None
    assert inlined_let(state_of("let a = mm\n", tmp_path / "mine.apl"), 4) is None
