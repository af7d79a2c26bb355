"""Names: what a word stands for, and what is said where it stands for nothing."""

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


def test_an_unknown_word_gets_the_nearest_operators_groups_and_names() -> None:
    assert told("save scaled_dot_product_attenton") == [
        Told(
            "APL101",
            "scaled_dot_product_attenton",
            "there is no operator, group or name `scaled_dot_product_attenton`",
            "did you mean `scaled_dot_product_attention`?",
        )
    ]
    assert told("save atention")[0].help == "did you mean `attention`?"
    assert told("let my_products = mm\nsave my_product, my_products")[0].help == "did you mean `my_products`?"
    assert "`mm`" in (told("save mn")[0].help or "")


@pytest.mark.parametrize(
    ("text", "message", "near"),
    [
        ("aten.mmm", "there is no operator `aten.mmm`", "`aten.mm`"),
        ("aten.mm.defalt", "there is no operator `aten.mm.defalt`", "`aten.mm.default`"),
        ("aten.add.tensor", "there is no operator `aten.add.tensor`", "`aten.add.Tensor`"),
        ("add.tensor", "there is no operator `add.tensor`", ""),
        ("aten.*atention*", "there is no operator `aten.*atention*`", ""),
    ],
)
def test_an_unknown_operator(text: str, message: str, near: str) -> None:
    (found,) = told(f"save {text}")
    assert (found.code, found.underlined, found.message) == ("APL101", text, message)
    assert near in (found.help or "")


def test_an_unknown_namespace_is_left_to_when_it_is_applied() -> None:
    loaded = parse_policy("save mylib.fused_mlp, mylib.fused_mlp.default")
    assert [each.code for each in loaded.diagnostics] == ["APL102"] * 2
    assert loaded.diagnostics[0].message.endswith("it is checked when applied")
    assert loaded.policy is not None
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
    ("text", "expected"),
    [
        ("let big = mm\nlet big = bmm\nsave big", Told("APL107", "big", "the name `big` is defined twice")),
        (
            "let add = add where numel > 3\nsave add",
            Told(
                "APL108", "add", "the name `add` is defined by itself", "an operator of that name is written `aten.add`"
            ),
        ),
        ("save big\nlet big = mm", Told("APL109", "big", "the name `big` is used before it is defined")),
        ("let big = mm\nsave mm", Told("APL110", "big", "the name `big` is never used")),
        (
            "let matmul = aten.mm\nsave matmul",
            Told(
                "APL111",
                "matmul",
                "the name `matmul` hides the group of that name",
                "choose another name, unless that is what you want",
            ),
        ),
        (
            "let bmm = aten.mm\nsave bmm",
            Told(
                "APL111",
                "bmm",
                "the name `bmm` hides the operator of that name",
                "choose another name; the operator is written with its namespace, `aten.bmm`",
            ),
        ),
    ],
)
def test_what_is_wrong_with_a_let(text: str, expected: Told) -> None:
    assert told(text) == [expected]


def test_related_places_are_shown() -> None:
    (twice,) = parse_policy("let big = mm\nlet big = bmm\nsave big").diagnostics
    assert [(each.message, each.span and each.span.line) for each in twice.related] == [("defined here before", 1)]
    (early,) = parse_policy("save big\nlet big = mm").diagnostics
    assert [(each.message, each.span and each.span.line) for each in early.related] == [("defined here", 2)]


def test_a_let_that_hides_a_group_does_not_change_the_other_groups() -> None:
    loaded = parse_policy("let all_gather = mm\nsave collective, all_gather")
    assert loaded.policy is not None
    assert loaded.policy.lets["collective"] == prelude_group("collective")


def test_mutual_recursion_is_a_use_before_definition() -> None:
    assert [each.code for each in told("let a = b\nlet b = a\nsave b")] == ["APL109"]


def test_a_library_of_names_is_not_told_that_nothing_uses_them() -> None:
    assert told("let big = mm where bytes > 64 MiB") == []


@pytest.mark.parametrize(
    ("text", "underlined", "message"),
    [
        ("save mm in layers..0", "layers..0", "the module path `layers..0` has an empty component"),
        (
            "save mm in layers.a**",
            "layers.a**",
            "the module path `layers.a**` has a `**` that does not stand alone between dots",
        ),
        (
            "save mm in layers.[9-0]",
            "layers.[9-0]",
            "the module path `layers.[9-0]` has a range `[9-0]` that holds nothing",
        ),
        ("save mm in layers.{a,}", "layers.{a,}", "the module path `layers.{a,}` has an empty choice in its braces"),
        ("save mm in a/b", "a/b", "the module path `a/b` has a `/` inside it"),
        ("blocks /\nsave mm", "/", "the module path `/` names no module"),
        ("save mm where module == a..b", "a..b", "the module path `a..b` has an empty component"),
        ("save aten.{a.b,c}", "aten.{a.b,c}", "the name `aten.{a.b,c}` has dots or globs inside its braces"),
    ],
)
def test_a_malformed_glob(text: str, underlined: str, message: str) -> None:
    (found,) = told(text)
    assert (found.code, found.underlined, found.message) == ("APL112", underlined, message)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "save mm where dtype == bf17",
            Told("APL115", "bf17", "there is no tensor type `bf17`", "did you mean `bf16`?"),
        ),
        (
            "save mm where bytes > 2 GFLOP",
            Told(
                "APL201",
                "2 GFLOP",
                "`bytes` is compared with bytes, not with operations",
                "write a figure such as `64 MiB`",
            ),
        ),
        (
            "save mm where users > 3 MiB",
            Told(
                "APL201",
                "3 MiB",
                "`users` is compared with plain numbers, not with bytes",
                "write a figure such as `16`",
            ),
        ),
        (
            "save mm where crosses cut per 2 GFLOP",
            Told(
                "APL201",
                "2 GFLOP",
                "a stage of `crosses cut` is counted in bytes, not in operations",
                "write a figure such as `64 MiB`",
            ),
        ),
        (
            "save mm where crosses cut per 0 GiB",
            Told("APL210", "0 GiB", "a stage of less than a byte holds nothing", "write a size such as `2 GiB`"),
        ),
        (
            "save mm where closes cut per 2 GiB",
            Told(
                "APL114", "closes cut", "nodes have no property `closes cut`", "did you mean `crosses cut per 2 GiB`?"
            ),
        ),
        (
            "save mm where crosses cuts",
            Told(
                "APL114",
                "crosses cuts",
                "nodes have no property `crosses cuts`",
                "did you mean `crosses cut per 2 GiB`?",
            ),
        ),
        (
            "save mm where crosses cut",
            Told(
                "APL011",
                "",
                "the statement ends where `per` and a size has to follow",
                "such as `crosses cut per 2 GiB`",
            ),
        ),
        (
            "save mm where crosses cut per block",
            Told(
                "APL010",
                "block",
                "`block` cannot follow `per`, a size or `auto` has to",
                "such as `crosses cut per 2 GiB`",
            ),
        ),
        (
            "save mm where crosses cut per atuo",
            Told("APL116", "atuo", "stages cannot be cut per `atuo`", "write `auto`, or a size such as `2 GiB`"),
        ),
        (
            "save mm where anotated ap_must_save",
            Told(
                "APL114",
                "anotated ap_must_save",
                "nodes have no property `anotated ap_must_save`",
                "did you mean `annotated NAME`?",
            ),
        ),
        (
            "save mm where anotated a.b",
            Told("APL114", "anotated a.b", "nodes have no property `anotated a.b`", "did you mean `annotated NAME`?"),
        ),
        (
            "save mm where annotated",
            Told("APL011", "", "a comparison is missing after `annotated`", "did you mean `annotated NAME`?"),
        ),
        (
            "save mm where crosses",
            Told(
                "APL011",
                "",
                "a comparison is missing after `crosses`",
                "did you mean `crosses block` or `crosses cut per 2 GiB`?",
            ),
        ),
        ("expect saved <= 20%", Told("APL201", "20%", "`20%` does not say of what", "write `20% of forward`")),
        (
            "expect peak <= 20% of forward",
            Told(
                "APL201", "20%", "`peak` is compared with bytes, not with per cent", "write a figure such as `64 MiB`"
            ),
        ),
        (
            "expect saved <= 2 GFLOP",
            Told(
                "APL201",
                "2 GFLOP",
                "`saved` is compared with bytes or per cent, not with operations",
                "write a figure such as `64 MiB` or `20% of forward`",
            ),
        ),
        (
            "expect saved <= 2 GiB of forward",
            Told(
                "APL201",
                "2 GiB",
                "a share of the forward is per cent, and `2 GiB` is not",
                "write a share such as `30% of forward`",
            ),
        ),
        (
            "expect saved <= 20% of backward",
            Told("APL116", "backward", "a share is one of `forward`, not of `backward`", "write `of forward`"),
        ),
        (
            "save mm in first 0% of blocks",
            Told("APL205", "0%", "a share of the blocks is more than 0% and at most 100%"),
        ),
        (
            "save mm in last 100.1% of blocks",
            Told("APL205", "100.1%", "a share of the blocks is more than 0% and at most 100%"),
        ),
        (
            "save mm in last 1234567890.123456789% of blocks",
            Told(
                "APL016",
                "1234567890.123456789%",
                "`1234567890.123456789` is not a share",
                "a share is written as `25%`",
            ),
        ),
        (
            "expect recomputed flops <= 3 GiB",
            Told(
                "APL201",
                "3 GiB",
                "`recomputed flops` is compared with operations or per cent, not with bytes",
                "write a figure such as `2 GFLOP` or `20%`",
            ),
        ),
        ("save mm\npolicy late", Told("APL202", "policy late", "`policy` has to be the first statement")),
        (
            "blocks h.*\nblocks layers.*\nsave mm in block",
            Told("APL203", "blocks layers.*", "a policy says `blocks` once"),
        ),
        ("undecided -> save\nundecided -> auto", Told("APL203", "undecided -> auto", "a policy says `undecided` once")),
        (
            "requires policylang >= 99.1\nsave mm",
            Told(
                "APL204",
                "requires policylang >= 99.1",
                "the policy requires language version >= 99.1, and this is 0.2",
                "install a newer policylang",
            ),
        ),
        (
            "requires policylang < 0.2\nsave mm",
            Told(
                "APL204",
                "requires policylang < 0.2",
                "the policy requires language version < 0.2, and this is 0.2",
                "adapt the policy, or install an older policylang",
            ),
        ),
        (
            "requires policylang >= 0.x\nsave mm",
            Told("APL016", "0.x", "`0.x` is not a version", "a version is written as `0.2`"),
        ),
        ("policy empty", Told("APL207", "policy empty", "the policy decides nothing: it has no rule")),
        ("", Told("APL207", "", "the policy decides nothing: it has no rule")),
    ],
)
def test_what_means_nothing(text: str, expected: Told) -> None:
    assert told(text) == [expected]


def test_the_first_of_two_is_shown() -> None:
    (found,) = parse_policy("blocks h.*\nblocks layers.*\nsave mm in block").diagnostics
    assert [(each.message, each.span and each.span.line) for each in found.related] == [("said here before", 1)]
