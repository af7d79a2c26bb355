"""Which block each node lies in."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from random import Random

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import policylang
from policylang.api.planned_graphs import read_any
from policylang.graph.blocks import OUTSIDE, blocks_of
from policylang.graph.facts import Facts, GraphKind, Phase
from policylang.planning.capabilities import HALF
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.planner import plan
from policylang.planning.selection.selectors import PathGlob
from tests.graph.captured import facts_of_model
from tests.support.bucketed import picking
from tests.support.shared_graphs import BACKWARD, FOLDER, shared_facts
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


LINE = "%x = input\n%a = aten.sin.default(%x) {}\n%b = aten.sin.default(%a) {}\n%c = aten.sin.default(%b) {}"


@pytest.mark.parametrize(
    ("said", "matcher", "names", "inside"),
    [
        (("layers.7.mlp", "layers.2", "layers.7"), Matcher(r"layers\.\d+"), ("layers.7", "layers.2"), [0, 1, 0]),
        (("layers.0 region=4", "layers.1 region=2", "head"), None, ("region 4", "region 2"), [0, 1, OUTSIDE]),
    ],
)
def test_each_matching_module_or_checkpoint_region_is_a_block_numbered_in_graph_order(
    said: tuple[str, ...], matcher: Matcher | None, names: tuple[str, ...], inside: list[int]
) -> None:
    blocks = blocks_of(facts_of(LINE.format(*said)), matcher)
    assert (blocks.names, [*blocks.block_of]) == (names, [OUTSIDE, *inside])


def test_the_default_is_the_layers_of_a_real_model() -> None:
    facts = facts_of_model("llama")
    blocks = blocks_of(facts)
    assert blocks.names == ("model.model.layers.0", "model.model.layers.1")
    for row in facts.forward:
        inside = facts.modules[row].startswith("model.model.layers.")
        assert (blocks.block_of[row] != OUTSIDE) == inside


EXPERTS = "\n".join(f"%e{i} = aten.sin.default(%x) layers.0.moe.experts.{i}" for i in range(8))
NESTED = "%a = aten.sin.default(%x) stages.0.layers.0\n%b = aten.sin.default(%a) stages.0.layers.1"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param(f"{EXPERTS}\n%y = aten.sin.default(%x) layers.1.mlp", ("layers.0", "layers.1"), id="many experts"),
        pytest.param(NESTED, ("stages.0.layers.0", "stages.0.layers.1"), id="a list of one gives way"),
        pytest.param("%a = aten.sin.default(%x) layers.0.mlp", ("layers.0",), id="one layer"),
        pytest.param("%a = aten.sin.default(%x) encoder.mlp", (), id="no numbered modules"),
    ],
)
def test_the_default_is_the_largest_list(text: str, names: tuple[str, ...]) -> None:
    facts = facts_of(f"%x = input\n{text}")
    blocks = blocks_of(facts)
    assert blocks.names == names
    assert names or set(blocks.block_of) == {OUTSIDE}


def test_a_getitem_without_a_path_lies_where_its_operator_does() -> None:
    lines = ("%x = input", "%s = aten.split.Tensor(%x) layers.0", "%g = builtin.getitem(%s)")
    facts = facts_of("\n".join((*lines, "%h = aten.sin.default(%g) layers.1")))
    assert blocks_of(facts).block_of[facts.index["g"]] == 0


POINTWISE = ("sin", "cos", "neg", "abs", "exp", "tanh", "sigmoid", "relu", "sqrt", "log", "floor", "ceil")


@cache
def recorded_forward() -> Facts:
    return read_any(FOLDER / "llama3_8b_fsdp64_forward.json.gz")


@cache
def stripped(facts: Facts) -> Facts:
    return evolve(facts, modules=[""] * len(facts), ac_regions=[None] * len(facts))


def test_the_layers_of_a_recorded_forward() -> None:
    facts = recorded_forward()
    blocks = blocks_of(facts)
    assert blocks.names == tuple(f"repeated stretch {number}" for number in range(32))
    gathers = [row for row in range(len(facts)) if facts.group_names[row]]
    assert Counter(blocks.block_of[row] for row in gathers) == {**dict.fromkeys(range(32), 9), -1: 3}
    assert [blocks.block_of[row] for row in (gathers[0], *gathers[-2:])] == [-1, -1, -1]  # embedding, last norm, head
    assert list(blocks.block_of) == list(blocks_of(facts, PathGlob("layers.*")).block_of)


def test_the_layers_of_a_recorded_backward_are_those_of_its_modules() -> None:
    facts = shared_facts(BACKWARD, True)
    blocks = blocks_of(stripped(facts))
    assert len(blocks.names) == 32
    right = wrong = 0
    for row, module in enumerate(facts.modules):
        if facts.phases[row] == Phase.FORWARD and module.startswith("layers."):  # what it computes again
            meant = 31 - int(module.split(".")[1])  # in the order in which a backward reaches them
            right += blocks.block_of[row] == meant
            wrong += blocks.block_of[row] != meant
    assert right > 30 * wrong


def test_a_gather_for_each_repeated_stretch() -> None:
    facts = recorded_forward()
    edits, after = plan_edits(policylang.parse("bucket all_gather per block"), facts, HALF, None, picking())
    assert Counter(len(edit.collectives) for edit in edits.done) == {9: 32}
    assert {edit.proof.ranks for edit in edits.done} == {64}
    assert sum(bool(name) for name in after.group_names) == 35
    assert [each.reason for each in edits.refused] == ["outside the blocks"] * 3
    # blocks of the graph that comes out are those of the graph that went in
    before = {facts.names[row]: block for row, block in enumerate(blocks_of(facts).block_of)}
    now = blocks_of(after)
    assert len(now.names) == 32
    moved = sum(before.get(name, block) != block for name, block in zip(after.names, now.block_of, strict=True))
    assert moved < len(after) // 20


def test_what_lies_outside_the_stretches_is_put_together_by_a_size_alone() -> None:
    line = "bucket (all_gather outside block) per block"
    said = plan(policylang.parse(line), recorded_forward(), HALF).diagnostics
    (found,) = (each for each in said if each.code.startswith("APL3"))
    assert found.code == "APL336"
    assert found.message.endswith("joins nothing: none of its 3 collectives belongs to a block")
    made = plan(policylang.parse("bucket (all_gather outside block) up to 2 GiB"), recorded_forward(), HALF)
    assert [len(edit.collectives) for edit in made.order.edits.done] == [3]


def test_a_graph_that_names_modules_or_regions_keeps_them() -> None:
    facts = recorded_forward()
    named = ["", *["layers.0"] * (len(facts) - 1)]
    assert blocks_of(evolve(facts, modules=named)).names == ("layers.0",)
    assert blocks_of(evolve(facts, ac_regions=[7] * len(facts))).names == ("region 7",)
    assert blocks_of(evolve(facts, kind=GraphKind.FLAT)).names == ()


@pytest.mark.parametrize("text", ["%x = input", "%x = input\n%y = aten.sin.default(%x)"])
def test_a_graph_in_which_nothing_repeats_has_none(text: str) -> None:
    assert blocks_of(facts_of(text)).names == ()


def layered(
    layer: list[str], layers: int, before: list[str], after: list[str], extra: dict[int, tuple[int, str]]
) -> str:
    """A graph of layers between what comes before and after; ``extra``: a node more in a layer, and where."""
    lines = ["%v0 = input"]

    def add(operator: str) -> None:
        at = len(lines)
        shape, work = ("8x8", " flops=2GFLOP") if operator == "mm" else ((operator[-1] == "n" and "8x8") or "4x16", "")
        target = "aten.mm.default" if operator == "mm" else f"aten.{operator}.default"
        reads = f"%v{at - 1}, %v{at - 1}" if operator == "mm" else f"%v{at - 1}"
        lines.append(f"%v{at} = {target}({reads}) shape={shape}{work}")

    for operator in before:
        add(operator)
    for number in range(layers):
        for place, operator in enumerate(layer):
            if number in extra and extra[number][0] == place:
                add(extra[number][1])
            add(operator)
    for operator in after:
        add(operator)
    return "\n".join(lines)


@settings(max_examples=25)
@given(
    st.integers(2, 9),
    st.integers(12, 30),
    st.integers(0, 6),
    st.sampled_from((GraphKind.FORWARD, GraphKind.BACKWARD)),
    st.integers(0, 10**6),
)
def test_layers_are_found_whatever_stands_beside_them(
    layers: int, length: int, beside: int, kind: GraphKind, seed: int
) -> None:
    """Random layers with one product each, some with a node more than the others."""
    draw = Random(seed)
    layer = [draw.choice(POINTWISE) for _ in range(length)]
    layer[draw.randrange(length)] = "mm"
    before, after = (["erf", *[draw.choice(POINTWISE) for _ in range(beside)], "erf"] for _ in range(2))
    extra = {number: (draw.randrange(length), "acos") for number in range(layers) if draw.random() < 0.2}
    facts = evolve(facts_of(layered(layer, layers, before, after, extra)), kind=kind)
    blocks = blocks_of(facts)
    assert len(blocks.names) == layers
    products = [row for row, target in enumerate(facts.targets) if target == "aten.mm.default"]
    assert [blocks.block_of[row] for row in products] == list(range(layers))
    inside = [row for row in range(len(facts)) if blocks.block_of[row] >= 0]
    assert inside == list(range(inside[0], inside[-1] + 1))
    assert [blocks.block_of[row] for row in inside] == sorted(blocks.block_of[row] for row in inside)
    edges = len(before) + 1, len(facts) - len(after)
    if not extra:  # what stands beside the layers is told from them
        assert (inside[0], inside[-1] + 1) == edges
