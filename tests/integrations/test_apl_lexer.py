"""Policies in colour: every word of the language has a kind, and no text is lost."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

pytest.importorskip("pygments")
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Punctuation, String, Token

from policylang.integrations.apl_lexer import PolicyLexer

ROOT = Path(__file__).resolve().parents[2]
POLICIES = sorted((ROOT / "policies").glob("*.apl"))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.stem)
def test_a_policy_is_told_whole(policy: Path) -> None:
    text = policy.read_text(encoding="utf-8")
    tokens = [*PolicyLexer(stripnl=False).get_tokens(text)]
    assert "".join(value for _, value in tokens) == text
    assert not [value for kind, value in tokens if kind in Error]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("policy save", [Keyword.Declaration, Name.Class]),
        ("requires policylang >= 0.2", [Keyword.Declaration, Name.Namespace, Operator, Number]),
        ("include <fsdp>", [Keyword.Declaration, String.Other]),
        ("let save_me = mm", [Keyword.Declaration, Name.Variable, Operator, Name]),
        ("undecided -> auto", [Keyword.Declaration, Operator, Keyword.Constant]),
        ("save attention in layers.0.in", [Keyword, Name.Builtin, Operator.Word, Name.Namespace]),
        ("save mm in block 3", [Keyword, Name, Operator.Word, Operator.Word, Number]),
        ("half in half -> save", [Name, Operator.Word, Name.Namespace, Operator, Keyword]),
        ("expect exactly 7 peak", [Keyword.Declaration, Operator.Word, Number, Name]),
        ("save every 2nd mm", [Keyword, Operator.Word, Number, Name]),
        ("device h100-sxm  # ours", [Keyword.Declaration, Name.Constant, Comment.Single]),
        ("device cpu; device cpu", [*[Keyword.Declaration, Name.Constant, Punctuation] * 2][:-1]),
        ("device -> save", [Name, Operator, Keyword]),
        ("save time where users > 4 parsecs", [Keyword, Name, Operator.Word, Name.Attribute, Operator, Number, Name]),
        ("save mm where shape[-1] == 3", [Keyword, Name, Operator.Word, Name.Attribute, Operator, Number]),
        ("save mm where dtype == bf16", [Keyword, Name, Operator.Word, Name.Attribute, Operator, Name.Constant]),
        (
            "save mm where crosses cut per auto",
            [Keyword, Name, Operator.Word, Name.Attribute, Operator.Word, Operator.Word, Keyword.Constant],
        ),
        ("expect step time <= 0.9ms", [Keyword.Declaration, *[Name.Attribute] * 2, Operator, Number]),
        ("keep order of all_to_all", [*[Keyword.Declaration] * 2, Operator.Word, Name.Builtin]),
        ("delay in block, mm -> save", [Name, Operator.Word, Operator.Word, Punctuation, Name, Operator, Keyword]),
        ("fuse all_gather chains over dp", [Keyword.Declaration, Name.Builtin, *[Operator.Word] * 2, Name]),
        ("save ‘mm’", [Keyword, Token.Text, Name, Token.Text]),
        ('save (mm  # a; b\nsave "x', [Keyword, Punctuation, Name, Comment.Single, Keyword, Token.Text, Name]),
    ],
)
def test_kinds(text: str, expected: list[object]) -> None:
    assert [kind for kind, value in PolicyLexer().get_tokens(text) if value.strip()] == expected


def test_a_policy_looks_like_one_and_other_files_do_not() -> None:
    assert all(PolicyLexer.analyse_text(policy.read_text(encoding="utf-8")) > 0.5 for policy in POLICIES)
    assert PolicyLexer.analyse_text("⍳10\n+/⍳10\n") == 0
    assert PolicyLexer.analyse_text("# nothing\n") == 0


def test_a_file_is_a_policy_by_what_it_holds_and_else_of_the_array_language(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lexer registered, as that of an installed policylang is."""
    from pygments.lexers import guess_lexer_for_filename

    ours = EntryPoint("policylang", "policylang.integrations.apl_lexer:PolicyLexer", "pygments.lexers")
    monkeypatch.setattr("pygments.plugin.iter_entry_points", lambda group: [ours] if group == ours.group else [])
    texts = [policy.read_text(encoding="utf-8") for policy in POLICIES]
    assert {type(guess_lexer_for_filename("mine.apl", text)) for text in texts} == {PolicyLexer}
    assert guess_lexer_for_filename("life.apl", "life←{↑1 ⍵∨.∧3 4=+/,¯1 0 1∘.⊖¯1 0 1∘.⌽⊂⍵}\n").name == "APL"
