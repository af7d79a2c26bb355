"""Names: what a word stands for. What is said where it stands for nothing is in ``mistakes.txt``."""

from __future__ import annotations

import pytest

from policylang.language.loader import parse_policy
from policylang.language.operators import OperatorTable, prelude_group
from policylang.language.syntax import Operator, Reference
from tests.language.told import Told, policy, selector, told


def test_a_let_stands_for_its_selector() -> None:
    found = policy("let big = mm where bytes > 64 MiB\nlet early = big in first 2 blocks\nsave early")
    assert found.rules[0].selector == Reference("early")
    assert list(found.lets) == ["big", "early"]
    assert found.lets["early"].selector.selector == Reference("big")  # type: ignore[union-attr]


def test_a_group_is_in_the_names_of_the_policy_that_uses_it() -> None:
    found = policy("save matmul in block")
    assert found.lets == {"matmul": prelude_group("matmul")}


def test_an_unknown_namespace_is_left_to_when_it_is_applied() -> None:
    loaded = parse_policy("save mylib.fused_mlp, mylib.fused_mlp.default")
    assert [each.code for each in loaded.diagnostics] == ["APL102"] * 2
    assert loaded.diagnostics[0].message.endswith("it is checked when applied")
    assert loaded.policy.rules[0].selector.parts == (  # type: ignore[union-attr]
        Operator("mylib", "fused_mlp", None),
        Operator("mylib", "fused_mlp", "default"),
    )


def test_a_loaded_torch_is_asked_for_what_the_manifest_lacks() -> None:
    asked: list[str] = []

    def registry() -> list[str]:
        asked.append("once")
        return ["mylib.fused_mlp.default"]

    table = OperatorTable.bundled(more=registry)
    assert parse_policy("save mm, aten.bmm", operators=table).diagnostics == ()
    assert not asked, "the manifest knows these"
    assert parse_policy("save fused_mlp, mylib.fused_mlp", operators=table).diagnostics == ()
    assert asked == ["once"]
    (found,) = parse_policy("save mylib.fused_mpl", operators=table).diagnostics
    assert (found.code, found.help) == ("APL101", "did you mean `mylib.fused_mlp`?")
    (found,) = parse_policy("save otherlib.fused", operators=table).diagnostics
    assert found.code == "APL101", "a torch that is loaded knows every namespace there is"


def test_a_bare_name_reaches_python_functions_only_where_no_operator_has_it() -> None:
    assert selector("getitem") == Operator("builtin", "getitem", None)
    assert selector("add") == Operator(None, "add", None)


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("let big = mm\nlet big = bmm\nsave big", "defined here before", 1),
        ("save big\nlet big = mm", "defined here", 2),
        ("blocks h.*\nblocks layers.*\nsave mm in block", "first written here", 1),
    ],
)
def test_related_places_are_shown(text: str, message: str, line: int) -> None:
    (found,) = parse_policy(text).diagnostics
    assert [(each.message, each.span and each.span.line) for each in found.related] == [(message, line)]


def test_a_let_that_hides_a_group_does_not_change_the_other_groups() -> None:
    loaded = parse_policy("let all_gather = mm\nsave collective, all_gather")
    assert loaded.policy.lets["collective"] == prelude_group("collective")


def test_mutual_recursion_is_a_use_before_definition() -> None:
    assert [each.code for each in told("let a = b\nlet b = a\nsave b")] == ["APL109"]


def test_a_library_of_names_is_not_told_that_nothing_uses_them() -> None:
    assert told("let big = mm where bytes > 64 MiB") == []


def test_a_text_without_a_statement_decides_nothing() -> None:
    assert told("") == [Told("APL207", "", "the policy decides nothing: it has no rule")]
