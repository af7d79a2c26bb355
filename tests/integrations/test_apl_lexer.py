"""Policies in colour: every word of the language has a kind, and no text is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from policylang.language.parsing.parser import keywords
from policylang.language.parsing.predicate_tree import FLAGS, MEASURES, PROPERTIES
from policylang.language.parsing.statement_tree import ACTIONS
from policylang.language.resolution.prelude import group_names

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


def test_every_word_of_the_language_is_more_than_a_name() -> None:
    words = {word for word in keywords() if word.isidentifier()} | {*ACTIONS, *group_names()}
    words |= {part for name in (*FLAGS, *MEASURES, *PROPERTIES) for part in name.split()}
    assert [word for word in sorted(words) if kinds(word)[0][0] is Name] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("save mm", [Keyword, Name]),
        ("save attention in layers.0.in", [Keyword, Name.Builtin, Operator.Word, Name]),
        ("expect peak <= 40 GiB", [Keyword.Declaration, Name, Operator, Number]),
        ("save every 2nd mm", [Keyword, Operator.Word, Number, Name]),
        ("device h100-sxm  # ours", [Keyword.Declaration, Name, Comment.Single]),
        ("device cpu; device cpu", [Keyword.Declaration, Name, Punctuation, Keyword.Declaration, Name]),
        ('device "cluster.toml"', [Keyword.Declaration, String]),
        ("device -> save", [Name.Attribute, Operator, Keyword]),
        ("save mm where time > 400 us", [Keyword, Name, Operator.Word, Name.Attribute, Operator, Number]),
        ("expect step time <= 0.9ms", [Keyword.Declaration, Name, Name.Attribute, Operator, Number]),
        ("blocks {layers,in}.*", [Keyword.Declaration, Name]),
        (
            "optional bucket (all_gather) per 2 blocks up to 512 MiB",
            [
                *(Operator.Word, Keyword.Declaration, Punctuation, Name.Builtin, Punctuation),
                *(Operator.Word, Number, Keyword.Declaration, Operator.Word, Number),
            ],
        ),
        (
            "prefetch all_gather 1 block ahead  # early",
            [Keyword.Declaration, Name.Builtin, Number, Operator.Word, Operator.Word, Comment.Single],
        ),
        (
            "overlap collective up to 2 GiB in flight within 5% of peak",
            [
                *(Keyword.Declaration, Name.Builtin, Operator.Word, Number, Operator.Word),
                *(Operator.Word, Number, Operator.Word, Operator.Word),
            ],
        ),
        ("keep order of all_to_all", [Keyword.Declaration, Operator.Word, Name.Builtin]),
        ("prefetch -> save", [Name, Operator, Keyword]),
        ("delay in block, mm -> save", [Name, Operator.Word, Operator.Word, Punctuation, Name, Operator, Keyword]),
        ("save ‘mm’", [Keyword, Token.Text, Name, Token.Text]),
    ],
)
def test_kinds(text: str, expected: list[object]) -> None:
    assert [kind for kind, _ in kinds(text)] == expected


def test_a_policy_looks_like_one_and_other_files_do_not() -> None:
    assert all(PolicyLexer.analyse_text(policy.read_text(encoding="utf-8")) > 0.5 for policy in POLICIES)
    assert PolicyLexer.analyse_text("⍳10\n+/⍳10\n") == 0
    assert PolicyLexer.analyse_text("# nothing\n") == 0
