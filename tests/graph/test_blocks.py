"""Which block each node lies in."""

from __future__ import annotations

import re

from policylang.graph.blocks import OUTSIDE, blocks_of
from tests.graph.captured import facts_of_model
from tests.support.textgraph import facts_of


class Matcher:
    """The module whose path ends in a pattern's match, outermost first."""

    def __init__(self, pattern: str) -> None:
        self.pattern = re.compile(pattern)

    def outermost(self, path: str) -> str | None:
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            if self.pattern.fullmatch(prefix := ".".join(parts[:end])):
                return prefix
        return None


def test_each_matching_module_is_a_block_numbered_in_graph_order() -> None:
    facts = facts_of(
        """
        %x = input
        %embed = aten.sin.default(%x) embed
        %b = aten.sin.default(%embed) layers.7.mlp
        %a = aten.sin.default(%b) layers.2
        %c = aten.sin.default(%a) layers.7
        """
    )
    blocks = blocks_of(facts, Matcher(r"layers\.\d+"))
    assert blocks.names == ("layers.7", "layers.2")
    assert [blocks.block_of[facts.index[name]] for name in ("embed", "b", "a", "c")] == [OUTSIDE, 0, 1, 0]


def test_the_default_is_the_layers_of_a_real_model() -> None:
    facts = facts_of_model("llama")
    blocks = blocks_of(facts)
    assert blocks.names == ("model.model.layers.0", "model.model.layers.1")
    for row in facts.forward:
        inside = facts.modules[row].startswith("model.model.layers.")
        assert (blocks.block_of[row] != OUTSIDE) == inside


def test_the_default_prefers_checkpoint_regions() -> None:
    facts = facts_of(
        """
        %x = input
        %a = aten.sin.default(%x) layers.0 region=4
        %b = aten.sin.default(%a) layers.1 region=2
        %c = aten.sin.default(%b) head
        """
    )
    blocks = blocks_of(facts)
    assert blocks.names == ("region 4", "region 2")
    assert [blocks.block_of[facts.index[name]] for name in "abc"] == [0, 1, OUTSIDE]


def test_many_experts_do_not_make_a_layer_list() -> None:
    experts = [f"%e{i} = aten.sin.default(%x) layers.0.moe.experts.{i}" for i in range(8)]
    facts = facts_of("\n".join(["%x = input", *experts, "%y = aten.sin.default(%x) layers.1.mlp"]))
    assert blocks_of(facts).names == ("layers.0", "layers.1")


def test_a_list_of_one_gives_way_to_the_list_inside_it() -> None:
    facts = facts_of(
        """
        %x = input
        %a = aten.sin.default(%x) stages.0.layers.0
        %b = aten.sin.default(%a) stages.0.layers.1
        """
    )
    assert blocks_of(facts).names == ("stages.0.layers.0", "stages.0.layers.1")


def test_a_model_of_one_layer_has_one_block() -> None:
    facts = facts_of("%x = input\n%a = aten.sin.default(%x) layers.0.mlp")
    assert blocks_of(facts).names == ("layers.0",)


def test_without_numbered_modules_there_are_no_blocks() -> None:
    facts = facts_of("%x = input\n%a = aten.sin.default(%x) encoder.mlp")
    blocks = blocks_of(facts)
    assert blocks.names == ()
    assert set(blocks.block_of) == {OUTSIDE}


def test_a_getitem_without_a_path_lies_where_its_operator_does() -> None:
    facts = facts_of(
        """
        %x = input
        %s = aten.split.Tensor(%x) layers.0
        %g = builtin.getitem(%s)
        %h = aten.sin.default(%g) layers.1
        """
    )
    blocks = blocks_of(facts)
    assert blocks.block_of[facts.index["g"]] == 0
