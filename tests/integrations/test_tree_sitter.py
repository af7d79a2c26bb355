"""The tree of a policy in an editor: of whatever the language reads, without an error, and of a mistake beside it."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.language.lexer import keywords
from policylang.language.selectors import format_selector
from policylang.language.statements import ACTIONS, format_statement
from tests.language import strategies
from tests.language.test_forms import BINDING, EXPECTATIONS, LLAMA3, ORDERING, SELECTORS
from tests.language.test_fuzz import WORDS
from tests.support import highlighters
from tests.support.drawn import drawn, examples

pytest.importorskip("tree_sitter")
CORPUS = sorted((highlighters.TREE_SITTER / "test" / "corpus").glob("*.txt"))


def tree_of(text: str) -> Any:
    return highlighters.tree_sitter_parser().parse(text.encode()).root_node


def test_every_policy_of_the_repository_has_a_tree_without_an_error() -> None:
    policies = highlighters.repository_policies()
    assert len(policies) > 200
    assert [name for name, text in policies.items() if tree_of(text).has_error] == []
    assert [text for text in highlighters.repository_statements() if tree_of(text).has_error] == []


def test_every_form_of_the_language_has_one() -> None:
    texts = [LLAMA3, *(f"save {text}" for text, _ in (*SELECTORS, *BINDING))]
    texts += [*(f"expect {text}" for text, _ in EXPECTATIONS), *(text for text, _ in ORDERING)]
    names = sorted({*filter(str.isidentifier, keywords()), *ACTIONS, "up", "to", "rank", "device"})
    texts += [f"policy {word}\nfuse all_gather chains over {word}, dp, {word}" for word in names]
    texts += ["save mm\r\n\r\nsave bmm\r\n", "\ufeffsave mm", "save\u00a0mm; ;; save größe", "# only this", "", ";\n;"]
    assert [text for text in texts if tree_of(text).has_error] == []


_statements = st.one_of(
    strategies.selectors.map(lambda tree: f"save {format_selector(tree)}"),
    strategies.selectors.map(lambda tree: f"{format_selector(tree)} -> offload up to 8 GiB per rank"),
    strategies.selectors.map(lambda tree: f"let drawn = {format_selector(tree)}"),
    strategies.expectations.map(format_statement),
    strategies.ordering.map(format_statement),
)


@drawn(100, 5000, _statements)
def test_what_the_language_writes_has_one(text: str) -> None:
    assert not highlighters.is_read(text) or not tree_of(text).has_error


@given(st.lists(st.sampled_from([*WORDS, "device", "keep", "half", "of", "(", ")", "->", "=", ","]), max_size=12))
@settings(max_examples=examples(150, 20_000))
def test_whatever_the_language_reads_has_one(words: list[str]) -> None:
    text = " ".join(words)
    assert not highlighters.is_read(text) or not tree_of(text).has_error


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_the_trees_of_the_corpus(file: Path) -> None:
    """The files of `tree-sitter test`, which reads them as well."""
    case = re.compile(r"^=+\n([^\n]+)\n=+\n\n(.*?)\n---\n\n(.*?)(?=^=+$|\Z)", re.DOTALL | re.MULTILINE)
    cases = case.findall(file.read_text(encoding="utf-8"))
    assert len(cases) >= 3
    for name, text, wanted in cases:
        assert str(tree_of(text)) == re.sub(r"\s+", " ", wanted).strip(), name


@pytest.mark.parametrize(
    ("text", "intact"),
    [
        ("save (mm\nsave bmm\nsave add", [1, 2]), ("save mm)\nsave bmm", [1]), ("save (mm # )\nsave bmm", [1]),
        ('save (mm ")"\nsave bmm', [1]), ("save (mm; save (bmm,\n add)", [1]), ("save mm “ bmm\nsave bmm", [1]),
        ("save\nsave bmm", [1]), ("sav mm bmm\nlet x = bmm\nexpect saved < 3", [1, 2]),
    ],
)  # fmt: skip
def test_a_mistake_stays_in_its_statement(text: str, intact: list[int]) -> None:
    root = tree_of(text)
    assert root.has_error
    lines = {each.start_point[0] for each in root.children if each.type == "statement" and not each.has_error}
    assert lines >= set(intact) - ({1} if ";" in text else set())


@drawn(60, 3000, st.data())
def test_a_tree_after_an_edit_is_the_tree_of_the_text(data: st.DataObject) -> None:
    """The scanner's count of parentheses is part of the tree, so that what is behind an edit is read anew."""
    parser = highlighters.tree_sitter_parser()
    pieces = st.sampled_from(["(", ")", "\n", ";", "mm", " ", "save ", "# ", '"', ",", "where "])
    lines = data.draw(st.lists(st.sampled_from(highlighters.repository_statements()), min_size=2, max_size=5))
    text = "\n".join(lines).encode()
    tree = parser.parse(text)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        end = min(len(text), at + data.draw(st.integers(0, 6)))
        put = data.draw(pieces).encode()
        changed = text[:at] + put + text[end:]
        tree.edit(
            start_byte=at,
            old_end_byte=end,
            new_end_byte=at + len(put),
            start_point=_point(text, at),
            old_end_point=_point(text, end),
            new_end_point=_point(changed, at + len(put)),
        )
        text, tree = changed, parser.parse(changed, tree)
    fresh = parser.parse(text).root_node
    if not fresh.has_error:  # what recovers from a mistake may depend on the tree before it
        assert str(tree.root_node) == str(fresh)


def _point(text: bytes, at: int) -> tuple[int, int]:
    return text.count(b"\n", 0, at), at - (text.rfind(b"\n", 0, at) + 1)


def test_a_parenthesis_for_each_line_is_read_in_time() -> None:
    assert tree_of("save (mm\n" * 500).has_error
    assert not tree_of("save " + "(" * 90 + "mm" + ")" * 90 + "\nsave mm").has_error


@pytest.mark.parametrize("name", ["highlights", "locals", "folds", "helix/highlights", "helix/textobjects"])
def test_a_query_is_one(name: str) -> None:
    assert highlighters.tree_sitter_query(name).pattern_count


def test_each_node_has_one_capture() -> None:
    """Editors differ in whether the first or the last of several counts."""
    binding, query = pytest.importorskip("tree_sitter"), highlighters.tree_sitter_query("highlights")
    for text in highlighters.repository_statements():
        captures = binding.QueryCursor(query).captures(tree_of(text))
        ranges = [each.byte_range for nodes in captures.values() for each in nodes]
        assert len(ranges) == len(set(ranges)), text


def test_editors_of_the_last_years_load_it() -> None:
    """Neovim from 0.7 on, Helix and Zed read version 14."""
    assert highlighters.tree_sitter_language().abi_version == 14
