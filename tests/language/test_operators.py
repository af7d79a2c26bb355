"""The operator manifest and the groups of the prelude, held against the torch that is installed."""

from __future__ import annotations

import json

import pytest
import torch
import torch._inductor.inductor_prims
import torch.nn.attention.flex_attention
import torch.nn.attention.varlen

from policylang.api.load import operators_at_hand
from policylang.language.operators import OperatorTable, group_names, prelude_group
from policylang.language.resources import data_file, manifest
from policylang.language.selectors import parts
from policylang.language.syntax import Difference, Operator, Selector, Union
from policylang.torch_compat.graphs import operator_facts, operator_names
from tests.language.told import policy

TABLE = OperatorTable.bundled()
FACTS = data_file("operator_facts.json")
same_torch = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != manifest().torch_version, reason="the manifest was made from another torch"
)


def names(selector: Selector) -> set[str]:
    """``namespace.name`` of the known operators that a group denotes."""
    if isinstance(selector, Operator):
        found = TABLE.matches(selector.namespace, selector.name, selector.overload)
        return {".".join(full.split(".")[:2]) for full in found}
    if isinstance(selector, Union):
        return set().union(*map(names, selector.parts))
    assert isinstance(selector, Difference)
    return names(selector.left) - names(selector.right)


def group(name: str) -> set[str]:
    found = prelude_group(name)
    return names(found.selector)


@same_torch
def test_the_manifest_holds_the_operators_of_its_torch() -> None:
    kept = {"aten", "prims", "_c10d_functional", "higher_order", "torch", "builtin", "torch_attn"}
    for full in operator_names():
        namespace, _, rest = full.partition(".")
        name, _, overload = rest.partition(".")
        if namespace in kept:
            assert TABLE.matches(namespace, name, overload or None), full


@same_torch
def test_the_facts_are_those_of_its_torch() -> None:
    assert json.loads(FACTS.read_text(encoding="utf-8"))["facts"] == operator_facts()


def test_the_library_has_the_groups_of_the_language() -> None:
    assert list(group_names()) == [
        *("matmul", "attention", "compute", "all_gather", "allgather", "reduce_scatter", "all_reduce", "all_to_all"),
        *("collective", "wait", "cast", "view", "random", "pointwise", "activation", "reduction", "norm"),
    ]


@pytest.mark.parametrize("name", group_names())
def test_every_word_of_a_group_means_something_here(name: str) -> None:
    found = prelude_group(name)
    pending: list[Selector] = [found.selector]
    while pending:
        part = pending.pop()
        if isinstance(part, Operator):
            assert names(part), part.text
        else:
            pending.extend(parts(part))
    assert policy(f"save {name}").lets[name] == found


def test_attention_is_every_forward_form() -> None:
    found = group("attention")
    assert {
        "aten.scaled_dot_product_attention",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._flash_attention_forward",
        "aten._efficient_attention_forward",
        "higher_order.flex_attention",
        "torch_attn._varlen_attn",
    } <= found
    assert not [name for name in found if "backward" in name]


def test_compute_is_pytorchs_own_list() -> None:
    assert group("compute") == set(operator_facts()["compute"]) | {"higher_order.flex_attention"}


def test_pointwise_reduction_view_and_random_are_what_torch_says() -> None:
    facts = operator_facts()
    assert group("reduction") - {"aten.max", "aten.min", "prims.sum", "prims.prod"} <= set(facts["reduction"])
    untagged = {"aten.hardswish", "aten.leaky_relu"}  # the second in 2.11
    assert group("pointwise") - set(facts["pointwise"]) <= untagged
    not_aliasing = {"aten._unsafe_view", "aten.detach", "aten.expand"}
    assert group("view") - set(facts["view"]) <= not_aliasing
    drawing = {"prims.inductor_random", "rngprims.philox_rand", "aten.uniform", "aten.random"}
    out_of_place = {name.removesuffix("_") for name in group("random")}  # the facts leave in-place forms out
    assert out_of_place - set(facts["random"]) <= drawing


def test_groups_that_share_nothing_do_not_overlap() -> None:
    assert not group("matmul") & group("pointwise")
    assert not group("attention") & group("matmul")
    assert not group("view") & group("pointwise")
    assert not group("wait") & group("collective")


def test_a_loaded_torch_is_asked_for_custom_operators() -> None:
    with torch.library._scoped_library("policylang_test", "DEF") as library:
        library.define("fused_mlp(Tensor x) -> Tensor")
        assert operators_at_hand().matches("policylang_test", "fused_mlp", None) == (
            "policylang_test.fused_mlp.default",
        )
    assert not operators_at_hand().matches("policylang_test", "fused_mlp", None)


def test_nearest_names_have_as_many_parts_as_the_misspelt_one() -> None:
    assert "scaled_dot_product_attention" in TABLE.nearest("scaled_dot_product_atention")
    assert "aten.addmm" in TABLE.nearest("aten.admm")
    assert TABLE.nearest("aten.add.Tensr")[0] == "aten.add.Tensor"
    assert "_scaled_dot_product_flash_attention" in TABLE.nearest("dot_product_flash_attention")
