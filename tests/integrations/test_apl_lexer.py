"""Policies in colour: every word of the language has a kind, and no text is lost."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

pytest.importorskip("pygments")
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Punctuation, String, Token

from policylang.integrations.apl_lexer import PolicyLexer

ROOT = Path(__file__).resolve().parents[2]
POLICIES = sorted((ROOT / "policies").glob("*.apl"))


def kinds(text: str) -> list[tuple[object, str]]:
    return [(kind, value) for kind, value in PolicyLexer().get_tokens(text) if value.strip()]


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
        ("undecided → save", [Keyword.Declaration, Operator, Keyword]),
        ("save mm", [Keyword, Name]),
        ("save attention in layers.0.in", [Keyword, Name.Builtin, Operator.Word, Name.Namespace]),
        ("save mm in 3", [Keyword, Name, Operator.Word, Name.Namespace]),
        ("save mm in block 3", [Keyword, Name, Operator.Word, Operator.Word, Number]),
        ("save mm in first half of blocks", [Keyword, Name, *[Operator.Word] * 5]),
        ("half in half -> save", [Name, Operator.Word, Name.Namespace, Operator, Keyword]),
        ("expect peak <= 40 GiB", [Keyword.Declaration, Name.Attribute, Operator, Number, Number]),
        ("expect exactly 7 peak", [Keyword.Declaration, Operator.Word, Number, Name]),
        (
            "expect saved per block <= 30% of forward",
            [Keyword.Declaration, *[Operator.Word] * 3, Operator, Number, Number, Operator.Word, Name.Attribute],
        ),
        (
            "expect recomputed flops <= 3 TFLOP",
            [Keyword.Declaration, Operator.Word, Name.Attribute, Operator, *[Number] * 2],
        ),
        ("save every 2nd mm", [Keyword, Operator.Word, Number, Name]),
        ("device h100-sxm  # ours", [Keyword.Declaration, Name.Constant, Comment.Single]),
        ("device cpu; device cpu", [*[Keyword.Declaration, Name.Constant, Punctuation] * 2][:-1]),
        ('device "cluster.toml"', [Keyword.Declaration, String]),
        ("device -> save", [Name, Operator, Keyword]),
        ("save mm where time > 400 us", [Keyword, Name, Operator.Word, Name.Attribute, Operator, Number, Number]),
        ("save time where users > 4 parsecs", [Keyword, Name, Operator.Word, Name.Attribute, Operator, Number, Name]),
        ("save users of mm", [Keyword, Operator.Word, Operator.Word, Name]),
        ("save mm where shape[-1] == 3", [Keyword, Name, Operator.Word, Name.Attribute, Operator, Number]),
        ("save mm where dtype == bf16", [Keyword, Name, Operator.Word, Name.Attribute, Operator, Name.Constant]),
        ("save mm where is not view", [Keyword, Name, *[Operator.Word] * 3, Name.Attribute]),
        ("save mm where recorded saved", [Keyword, Name, Operator.Word, Name.Attribute, Operator.Word]),
        ("save mm where annotated mine", [Keyword, Name, Operator.Word, Name.Attribute, Name]),
        (
            "save mm where crosses cut per 2 GiB",
            [Keyword, Name, Operator.Word, Name.Attribute, Operator.Word, Operator.Word, Number, Number],
        ),
        (
            "save mm where crosses cut per auto",
            [Keyword, Name, Operator.Word, Name.Attribute, Operator.Word, Operator.Word, Keyword.Constant],
        ),
        ("expect step time <= 0.9ms", [Keyword.Declaration, *[Name.Attribute] * 2, Operator, Number]),
        ("blocks {layers,in}.*", [Keyword.Declaration, Name.Namespace]),
        (
            "optional bucket (all_gather) per 2 blocks up to 512 MiB",
            [
                *(Operator.Word, Keyword.Declaration, Punctuation, Name.Builtin, Punctuation),
                *(Operator.Word, Number, *[Operator.Word] * 3, Number, Number),
            ],
        ),
        (
            "prefetch all_gather 1 block ahead  # early",
            [Keyword.Declaration, Name.Builtin, Number, Operator.Word, Operator.Word, Comment.Single],
        ),
        (
            "overlap collective up to 2 GiB in flight within 5% of peak",
            [
                *(Keyword.Declaration, Name.Builtin, *[Operator.Word] * 2, Number, Number),
                *(*[Operator.Word] * 3, Number, Number, Operator.Word, Operator.Word),
            ],
        ),
        ("keep order of all_to_all", [*[Keyword.Declaration] * 2, Operator.Word, Name.Builtin]),
        ("prefetch -> save", [Name, Operator, Keyword]),
        ("delay in block, mm -> save", [Name, Operator.Word, Operator.Word, Punctuation, Name, Operator, Keyword]),
        (
            "fuse all_gather chains over dp, save",
            [Keyword.Declaration, Name.Builtin, *[Operator.Word] * 2, Name, Punctuation, Name],
        ),
        ("collapse round_trips", [Keyword.Declaration, Operator.Word]),
        ("offload mm up to 8GiB per rank", [Keyword, Name, *[Operator.Word] * 2, Number, *[Operator.Word] * 2]),
        (
            "(mm in first half  # a share\n of blocks) -> save",
            [
                *(Punctuation, Name, *[Operator.Word] * 3, Comment.Single, *[Operator.Word] * 2),
                *(Punctuation, Operator, Keyword),
            ],
        ),
        ("save ‘mm’", [Keyword, Token.Text, Name, Token.Text]),
        ('save (mm  # a; b\nsave "x', [Keyword, Punctuation, Name, Comment.Single, Keyword, Token.Text, Name]),
    ],
)
def test_kinds(text: str, expected: list[object]) -> None:
    assert [kind for kind, _ in kinds(text)] == expected


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
