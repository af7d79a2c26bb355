"""``full_recompute_save_ops`` as a policy: what it says, and what is wrong with a string that TorchTitan would take."""

from __future__ import annotations

import pytest

from policylang.commands.snapshot import import_save_ops
from policylang.graph.textual import read_graph
from policylang.language.diagnostics import Source
from policylang.language.layout import format_source
from policylang.language.loader import parse_policy
from policylang.planning.capabilities import FLAT
from policylang.planning.planner import plan

GATE = "layers.*.moe.router.gate::aten.mm.default"
BOTH = f"{GATE} | layers.*.attention.wo :: aten.mm.default"
GRAPH = """
%x = input
%gate = aten.mm.default(%x) layers.0.moe.router.gate
%within = aten.mm.default(%gate) layers.0.moe.router.gate.inner
%wo = aten.mm.default(%within) layers.0.attention.wo
%typed = aten.mm.dtype(%wo) layers.0.attention.wo
%sdpa = aten._scaled_dot_product_flash_attention.default(%typed) layers.0.attention
%last = aten.sin.default(%sdpa) layers.0
%next = aten.sin.default(%last) layers.1
%norm = aten.sin.default(%next) norm
---
%g = aten.cos.default(%gate, %within, %wo, %typed, %sdpa, %last, %next)
"""


def said(string: str) -> list[tuple[str, str]]:
    made = import_save_ops(string)
    return [(each.code, each.span.text) for each in made.diagnostics]


def saved(string: str) -> list[str]:
    made = import_save_ops(string)
    assert made.diagnostics == ()
    policy = parse_policy(made.text).policy
    facts, _ = read_graph(Source("graph", GRAPH))
    decisions = plan(policy, facts, FLAT).decisions
    return [facts.names[row] for row in facts.forward if decisions[row].action.saves and facts.modules[row] != "norm"]


def test_what_the_string_selects_is_saved_and_the_rest_of_the_layers_is_not():
    assert saved(GATE) == ["gate", "sdpa", "last", "next"]
    assert saved(BOTH) == ["gate", "wo", "sdpa", "last", "next"]
    assert saved("layers.[0-3].attention.w?::aten.mm.dtype") == ["typed", "sdpa", "last", "next"]


def test_the_text_is_a_policy_in_canonical_form_that_tells_where_it_is_from():
    text = import_save_ops(BOTH, "mine").text
    assert f"#     {BOTH}\n" in text
    assert "policy mine\n" in text
    assert text.endswith(
        "save aten.mm.default where module == layers.*.moe.router.gate\n"
        "save aten.mm.default where module == layers.*.attention.wo\n"
    )
    assert format_source(Source("mine.apl", text)).text == text


def test_a_selector_that_stands_twice_is_one_rule():
    assert import_save_ops(f"{GATE}|{GATE}").text.count("\nsave aten.mm") == 1


@pytest.mark.parametrize(
    ("string", "code", "underlined"),
    [
        ("", "APL530", ""),
        (f"{GATE} |", "APL530", ""),
        ("layers.*.wo", "APL530", "layers.*.wo"),
        ("layers.*.wo:aten.mm.default", "APL530", "layers.*.wo:aten.mm.default"),
        ("::aten.mm.default", "APL530", "::aten.mm.default"),
        ("layers.*.wo::", "APL530", "layers.*.wo::"),
        ("a::aten.mm.default::b", "APL530", "a::aten.mm.default::b"),
        ("layers.*.wo::mm", "APL530", "mm"),
        ("layers.*.wo::aten.mm", "APL530", "aten.mm"),
        ("layers.*.wo::aten.*.default", "APL530", "aten.*.default"),
        ("layers.*.wo::aten.mn.default", "APL101", "aten.mn.default"),
        ("layers.*.wo::aten.mm.defualt", "APL101", "aten.mm.defualt"),
        ("layers..wo::aten.mm.default", "APL112", "layers..wo"),
        ("layers.**.wo::aten.mm.default", "APL531", "layers.**.wo"),
        ("layers.{0,1}.wo::aten.mm.default", "APL531", "layers.{0,1}.wo"),
        ("/layers.0::aten.mm.default", "APL531", "/layers.0"),
        ("layers 0::aten.mm.default", "APL531", "layers 0"),
    ],
)
def test_what_is_wrong_with_a_string(string, code, underlined):
    assert said(string) == [(code, underlined)]
    assert import_save_ops(string).text is None


def test_all_that_is_wrong_comes_in_one_run():
    assert [code for code, _ in said("a | layers..wo::aten.mm | b::aten.mn.default")] == [
        "APL530",
        "APL112",
        "APL530",
        "APL101",
    ]


def test_an_operator_of_a_library_nobody_knows_here():
    made = import_save_ops("layers.*::deepep.dispatch.default")
    assert made.text is not None
    assert made.diagnostics[0].code == "APL102"


def test_a_block_as_the_module():
    assert import_save_ops("block::aten.mm.default").text.endswith('where module == "block"\n')
