"""Facts of real models against what running the graph, or PyTorch itself, says of it; lines of data flow and blocks."""

import re
from collections import Counter
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._functorch.partitioners import classify_nodes
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

import policylang
from policylang.api.planned_graphs import read_any
from policylang.errors import PolicyGraphError
from policylang.graph.blocks import OUTSIDE, Chains, blocks_of
from policylang.graph.collect import collect
from policylang.graph.facts import COLUMNS, Facts, Flag, GraphKind, InputKind, Mesh, Phase, uncounted_operators
from policylang.planning.capabilities import HALF
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.planner import plan
from policylang.planning.selection.selectors import PathGlob
from tests.graph.captured import executed, facts_of_model, joint_of
from tests.support.drawn import drawn, slow
from tests.support.lines import NAMES, Chain, device_mesh, picking, shard_of, traced
from tests.support.models import ZOO
from tests.support.sharded import fake_ranks
from tests.support.shared_graphs import BACKWARD, FOLDER, shared_facts
from tests.support.textgraph import facts_of as facts_of_text

LARGE = {"bart", "flex", "gpt2", "mixtral", "qwen3"}
MODELS = {name: slow(name) if name in LARGE else name for name in sorted(ZOO)}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, (tuple, list)) else []


STILL = [slow(name, False) if name in LARGE else (name, False) for name in sorted(ZOO)]


@pytest.mark.parametrize(("name", "dynamic"), [*STILL, ("mlp", True), slow("llama", True), slow("gpt2", True)])
def test_sizes_are_those_of_the_tensors_that_a_run_produces(name: str, dynamic: bool) -> None:
    joint, facts = joint_of(name, dynamic), facts_of_model(name, dynamic)
    ran = executed(joint.gm)
    checked = 0
    for node, value in ran.items():
        if node.op == "output":
            continue
        row = facts.index[node.name]
        tensors = tensors_in(value)
        assert facts.bytes[row] == sum(tensor.numel() * tensor.element_size() for tensor in tensors), node.name
        assert facts.numel[row] == sum(tensor.numel() for tensor in tensors), node.name
        if isinstance(value, Tensor):
            assert facts.shapes[row] == tuple(value.shape)
            assert facts.dtypes[row] == str(value.dtype).removeprefix("torch.")
            assert facts.devices[row] == "cpu"
            checked += 1
        else:
            assert facts.shapes[row] is None
    assert checked > 15


@pytest.mark.parametrize("name", MODELS.values())
def test_phases_and_edges_are_those_of_the_graph_and_of_pytorch(name: str) -> None:
    joint, facts = joint_of(name), facts_of_model(name)
    info = classify_nodes(joint.gm, joint.static_lifetime_input_indices or [], joint.num_fwd_outputs)
    forward = {facts.names[row] for row in facts.forward}
    needed = {node.name for node in info.required_fw_nodes if node.op == "call_function"}
    late = {node.name for node in info.required_bw_nodes if node.op == "call_function"}
    assert needed <= forward
    assert not late & forward
    tagged = {node.name for node in joint.gm.graph.nodes if node.meta.get("partitioner_tag") == "is_forward"}
    assert forward <= tagged | needed
    assert facts.kind is GraphKind.JOINT
    for row, node in enumerate(joint.gm.graph.nodes):
        assert facts.names[row] == node.name
        assert [facts.names[read] for read in facts.inputs[row]] == [read.name for read in node.all_input_nodes]
        assert sorted(facts.names[user] for user in facts.users[row]) == sorted(user.name for user in node.users)
        assert list(facts.users[row]) == sorted(facts.users[row])
    output = next(iter(reversed(joint.gm.graph.nodes)))
    returned = output.args[0][: joint.num_fwd_outputs]
    expected = {node.name for node in returned if isinstance(node, fx.Node) and node.op == "call_function"}
    assert expected == {facts.names[row] for row in range(len(facts)) if facts.has(row, Flag.FORWARD_OUTPUT)}
    for row in range(len(facts)):
        if facts.phases[row] == Phase.BACKWARD:
            continue
        group = [row, *facts.followers.get(row, ())]
        read = any(facts.phases[user] == Phase.BACKWARD for member in group for user in facts.users[member])
        assert facts.has(row, Flag.FEEDS_BACKWARD) == read, facts.names[row]


def attention_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


def attention_backward_flops(_grad: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any):
    """The products with key and value, and one for the gradient of each of the four that are multiplied."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (3 * width + 2 * value[-1])


def grouped_flops(left: Any, right: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[-1]


NOT_COUNTED_BY_EVERY_TORCH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
    torch.ops.aten._grouped_mm: grouped_flops,
}


@pytest.mark.parametrize("name", [each for name, each in MODELS.items() if name != "flex"])
def test_flops_add_up_to_what_pytorch_counts_in_a_run(name: str) -> None:
    joint, facts = joint_of(name), facts_of_model(name)
    mapping = dict(NOT_COUNTED_BY_EVERY_TORCH)
    if name == "mixtral":  # which Transformers registers once one of its models is made
        theirs = torch.ops.transformers
        mapping[theirs.grouped_mm_fallback] = grouped_flops
        mapping[theirs.grouped_mm_fallback_backward] = lambda *read, **more: 2 * grouped_flops(*read, **more)
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with counter:
        executed(joint.gm)
    assert sum(facts.flops) == counter.get_total_flops() > 0
    assert uncounted_operators(facts, range(len(facts))) == {}


def test_flex_attention_counts_its_matrix_products_and_its_subgraphs_have_no_size() -> None:
    facts = facts_of_model("flex")
    (row, *_) = facts.by_target["higher_order.flex_attention"]
    batch, heads, length, head = 2, 2, 16, 16
    assert facts.flops[row] == 2 * (2 * batch * heads * length * length * head)
    subgraphs = [row for row in range(len(facts)) if facts.ops[row] == "get_attr"]
    assert subgraphs
    assert {facts.phases[row] for row in subgraphs} == {Phase.INPUT}
    assert sum(facts.bytes[row] for row in subgraphs) == 0


def test_flops_views_compute_and_blocks_of_a_llama() -> None:
    facts = facts_of_model("llama")
    attention = facts.by_target["aten._scaled_dot_product_flash_attention_for_cpu.default"]
    batch, heads, length, head = facts.shapes[attention[0] + 1] or ()
    assert [facts.flops[row] for row in attention] == [2 * (2 * batch * heads * length * length * head)] * 2
    views = {facts.targets[row] for row in facts.forward if facts.has(row, Flag.VIEW)}
    assert {"aten.t.default", "aten.view.default", "aten.transpose.int"} <= views
    assert not views & {"aten.mm.default", "aten.clone.default", "aten.mul.Tensor", "aten._unsafe_view.default"}
    compute = {facts.targets[row] for row in facts.forward if facts.has(row, Flag.COMPUTE)}
    assert compute <= {"aten.mm.default", "aten.bmm.default", "aten.addmm.default"}
    assert "aten.mm.default" in compute
    blocks = blocks_of(facts)
    assert blocks.names == ("model.model.layers.0", "model.model.layers.1")
    for row in facts.forward:
        inside = facts.modules[row].startswith("model.model.layers.")
        assert (blocks.block_of[row] != OUTSIDE) == inside


@pytest.mark.slow
def test_flops_of_symbolic_shapes_are_those_of_the_traced_sizes() -> None:
    still, moving = facts_of_model("llama"), facts_of_model("llama", True)
    assert sum(moving.flops) == sum(still.flops) > 0


def test_symbolic_sizes_are_marked_and_collecting_adds_no_guard() -> None:
    joint, facts = joint_of("mlp", True), facts_of_model("mlp", True)
    nodes = [node for node in joint.gm.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    symbolic = {facts.names[row] for row in range(len(facts)) if facts.has(row, Flag.SYMBOLIC)}
    assert symbolic == {node.name for node in nodes}
    env = nodes[0].meta["val"].node.shape_env
    before = len(env.guards)
    collect(joint.gm)
    assert len(env.guards) == before


def test_getitem_is_owned_by_the_operator_whose_result_it_takes() -> None:
    facts = facts_of_model("gpt2")
    pieces = [row for row in facts.forward if facts.targets[row] == "builtin.getitem"]
    assert pieces
    for row in pieces:
        assert facts.owners[row] == facts.inputs[row][0]
        assert facts.has(facts.owners[row], Flag.MULTI_OUTPUT)


def test_dropout_draws_and_attention_without_dropout_does_not() -> None:
    gpt2, llama = facts_of_model("gpt2"), facts_of_model("llama")
    assert {gpt2.targets[row] for row in gpt2.forward if gpt2.has(row, Flag.RANDOM)} == {"aten.native_dropout.default"}
    attention = [row for row in llama.forward if "scaled_dot_product" in llama.targets[row]]
    assert attention
    assert not any(llama.has(row, Flag.RANDOM) for row in attention)


def test_user_tags_are_the_users_and_ours_are_not() -> None:
    joint = joint_of("mlp")
    graph = fx.Graph()
    graph.graph_copy(joint.gm.graph, {})
    first, second = [node for node in graph.nodes if node.op == "call_function"][:2]
    for node in (first, second):
        node.meta.update(recompute=CheckpointPolicy.MUST_SAVE, ac_graph_id=3)
    second.meta["custom"] = {"policylang": "a.apl:1"}
    facts = collect(graph)
    rows = [facts.index[node.name] for node in (first, second)]
    assert [(facts.user_tags[row], facts.ac_regions[row]) for row in rows] == [("MUST_SAVE", 3), (None, None)]


def test_a_graph_of_modules_is_refused_with_the_node_named() -> None:
    with pytest.raises(PolicyGraphError, match="`_0` calls the module `0`") as caught:
        collect(fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2))))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "APL341"
    assert "policylang.backend" in (diagnostic.help or "")


def test_two_nodes_of_one_name_are_refused_before_anything_changes() -> None:
    graph = fx.Graph()
    first = graph.call_function(torch.ops.aten.cos.default, (graph.placeholder("x"),))
    second = graph.call_function(torch.ops.aten.sin.default, (first,))
    graph.output(second)
    second.name = first.name
    with pytest.raises(PolicyGraphError, match=rf"APL300.*two nodes of the graph have the name `{first.name}`"):
        collect(graph)


def test_annotations_that_are_none_of_torchs_are_passed_over() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),))
    node.meta.update(custom=7, nn_module_stack="layers.0", stack_trace=3, seq_nr="q")
    graph.output(node)
    facts = collect(graph)
    assert facts.modules[facts.index[node.name]] == ""


def test_an_empty_graph_has_facts() -> None:
    graph = fx.Graph()
    graph.output(())
    facts = collect(graph)
    assert len(facts) == 1
    assert facts.kind is GraphKind.FORWARD


def facts_of(mesh: DeviceMesh, given: DeviceMesh | None = None) -> Facts:
    return collect(traced(partial(Chain((0, 1), "direct"), mesh), shard_of(0)), mesh=given)


def test_a_mesh_that_nobody_passed_is_found_and_one_that_was_passed_is_the_only_one() -> None:
    with fake_ranks(8):
        mesh = device_mesh(2, 4)
        renamed = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        expected = Mesh(("dp", "tp"), (2, 4), tuple(range(8)))
        assert expected in facts_of(mesh).meshes
        assert facts_of(mesh, given=mesh).meshes == (expected,)
        assert renamed.ndim == 2


def test_a_mesh_that_has_none_of_the_groups_is_not_looked_at() -> None:
    with fake_ranks(8):
        mesh = device_mesh(2, 4)
        cube = device_mesh(2, 2, 2)
        others = DeviceMesh("cpu", torch.tensor([[4, 5], [6, 7]]))
        pairs = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]))
        found = facts_of(mesh).meshes
        assert Mesh(NAMES, (2, 2, 2), tuple(range(8))) in found, "the pairs of dp are groups of both"
        assert cube.ndim == 3
        assert others.get_coordinate() is None
        assert pairs.get_coordinate() is not None
        assert not [each for each in found if len(each.ranks) == 4 and len(each.shape) == 2]


def test_a_mesh_of_a_world_that_is_gone_does_not_count() -> None:
    """Its groups have the names of others now."""
    with fake_ranks(8):
        gone = init_device_mesh("cpu", (4, 2), mesh_dim_names=("old", "older"))
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2))
        found = facts_of(mesh).meshes
        assert Mesh(("dim_0", "dim_1"), (2, 2), (0, 1, 2, 3)) in found
        assert not [each for each in found if "old" in each.dims]
    assert gone.ndim == 2


def test_a_graph_without_collectives_has_no_mesh() -> None:
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2))
        assert collect(traced(torch.sin, shard_of(0)), mesh=mesh).meshes == ()


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
def test_each_matching_module_or_checkpoint_region_is_a_block_numbered_in_graph_order(said, matcher, names, inside):
    blocks = blocks_of(facts_of_text(LINE.format(*said)), matcher)
    assert (blocks.names, [*blocks.block_of]) == (names, [OUTSIDE, *inside])


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
    facts = facts_of_text(f"%x = input\n{text}")
    blocks = blocks_of(facts)
    assert blocks.names == names
    assert names or set(blocks.block_of) == {OUTSIDE}


def test_a_getitem_without_a_path_lies_where_its_operator_does() -> None:
    lines = ("%x = input", "%s = aten.split.Tensor(%x) layers.0", "%g = builtin.getitem(%s)")
    facts = facts_of_text("\n".join((*lines, "%h = aten.sin.default(%g) layers.1")))
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
    named = ["", *["layers.0"] * (len(facts) - 1)]
    assert blocks_of(evolve(facts, modules=named)).names == ("layers.0",)
    assert blocks_of(evolve(facts, ac_regions=[7] * len(facts))).names == ("region 7",)
    assert blocks_of(evolve(facts, kind=GraphKind.FLAT)).names == ()


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


@pytest.mark.parametrize("text", ["%x = input", "%x = input\n%y = aten.sin.default(%x)"])
def test_a_graph_in_which_nothing_repeats_has_none(text: str) -> None:
    assert blocks_of(facts_of_text(text)).names == ()


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
def test_layers_are_found_whatever_stands_beside_them(layers, length, beside, kind, seed) -> None:
    """Random layers with one product each, some with a node more than the others."""
    draw = Random(seed)
    layer = [draw.choice(POINTWISE) for _ in range(length)]
    layer[draw.randrange(length)] = "mm"
    before, after = (["erf", *[draw.choice(POINTWISE) for _ in range(beside)], "erf"] for _ in range(2))
    extra = {number: (draw.randrange(length), "acos") for number in range(layers) if draw.random() < 0.2}
    facts = evolve(facts_of_text(layered(layer, layers, before, after, extra)), kind=kind)
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


SPLIT, GETITEM, CAT = "aten.split.Tensor", "builtin.getitem", "aten.cat.default"


class Naive:
    """The language page's words, word by word, with no thought for time."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def users(self, row: int) -> list[int]:
        return [user for user in self.facts.users[row] if user in self.facts.forward]

    def inputs(self, row: int) -> list[int]:
        return [read for read in self.facts.inputs[row] if not self.facts.flags[read] & Flag.SYMBOLIC]

    def fan_out(self, row: int) -> list[int]:
        """The split, pieces and cat that a row belongs to, if it belongs to any."""
        for split in self.facts.forward:
            if self.facts.targets[split] != SPLIT:
                continue
            pieces = self.users(split)
            joins = {user for piece in pieces for user in self.users(piece)}
            if any(self.facts.targets[piece] != GETITEM for piece in pieces) or len(joins) != 1:
                continue
            (join,) = joins
            line = [split, *pieces, join]
            if self.facts.targets[join] == CAT and sorted(self.inputs(join)) == pieces and row in line:
                return line
        return []

    def next(self, row: int) -> int | None:
        line = self.fan_out(row)
        if line and row != line[-1]:
            return line[line.index(row) + 1]
        users = self.users(row)
        return users[0] if len(users) == 1 and self.inputs(users[0]) == [row] else None

    def previous(self, row: int) -> int | None:
        line = self.fan_out(row)
        if line and row != line[0]:
            return line[line.index(row) - 1]
        inputs = self.inputs(row)
        return inputs[0] if len(inputs) == 1 and inputs[0] in self.facts.forward else None

    def line(self, row: int | None) -> list[int]:
        found = []
        while row is not None:
            found.append(row)
            row = self.next(row)
        return found

    def after(self, rows: list[int]) -> list[int]:
        return sorted({later for row in rows for later in self.line(row)[1:]})

    def before(self, rows: list[int]) -> list[int]:
        found = set()
        for row in rows:
            earlier = self.previous(row)
            while earlier is not None:
                found.add(earlier)
                earlier = self.previous(earlier)
        return sorted(found)

    def cut(self, rows: list[int], markers: list[int], *, keep_after: bool) -> list[int]:
        found = set()
        for row in rows:
            line = self.line(row)
            at = next((place for place, here in enumerate(line) if here in markers), None)
            if at is not None:
                found.update(line[at + 1 :] if keep_after else line[:at])
        return sorted(found)

    def from_parameter(self, row: int) -> bool:
        line = self.fan_out(row)
        inputs = [line[0]] if line and row == line[-1] else self.inputs(row)
        if row not in self.facts.forward or len(inputs) != 1:
            return False
        return self.facts.input_kinds[inputs[0]] == InputKind.PARAMETER or self.from_parameter(inputs[0])


@st.composite
def graphs(draw: st.DrawFn) -> Facts:
    """Forward graphs with long lines, forks, symbolic sizes, some backward readers and some fan-outs."""
    kinds: list[int] = [InputKind.PARAMETER, InputKind.USER, InputKind.USER]
    flags: list[int] = [0, 0, int(Flag.SYMBOLIC)]
    ops, targets, inputs, phases = ["placeholder"] * 3, [""] * 3, [()] * 3, [int(Phase.INPUT)] * 3

    def add(target: str, reads: list[int], phase: Phase = Phase.FORWARD) -> int:
        ops.append("call_function")
        targets.append(target)
        inputs.append(tuple(dict.fromkeys(reads)))
        phases.append(int(phase))
        kinds.append(0)
        flags.append(0)
        return len(ops) - 1

    for _ in range(draw(st.integers(1, 14))):
        newest = len(ops) - 1
        source = draw(st.sampled_from([newest, newest, newest, *range(len(ops))]))
        step = draw(st.sampled_from(["unary", "unary", "binary", "sized", "fan", "broken fan", "backward"]))
        if phases[source] == Phase.BACKWARD and step != "backward":
            source = draw(st.sampled_from([row for row in range(len(ops)) if phases[row] != Phase.BACKWARD]))
        if step == "binary":
            add("aten.add.Tensor", [source, draw(st.sampled_from([0, 1, source]))])
        elif step == "sized":
            add("aten.view.default", [source, 2])
        elif step == "backward":
            add("aten.sin.default", [source], Phase.BACKWARD)
        elif step.endswith("fan"):
            split = add(SPLIT, [source])
            pieces = [add(GETITEM, [split]) for _ in range(draw(st.integers(1, 3)))]
            if step == "broken fan":
                add("aten.sin.default", [draw(st.sampled_from(pieces))])
            add(CAT, pieces)
        else:
            add("aten.sin.default", [source])
    count = len(ops)
    users = [tuple(row for row in range(count) if read in inputs[row]) for read in range(count)]
    own = {
        "names": [f"n{row}" for row in range(count)], "ops": ops, "targets": targets, "phases": phases, "flags": flags,
        "inputs": inputs, "users": users, "owners": range(count), "input_kinds": kinds,
    }  # fmt: skip
    return Facts(kind=GraphKind.JOINT, **{name: [said.blank] * count for name, said in COLUMNS.items()} | own)


@drawn(60, 3000, graphs(), st.data())
def test_lines_are_what_a_walk_from_every_row_finds(facts: Facts, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.sampled_from(facts.forward), unique=True)) if facts.forward else []
    markers = data.draw(st.lists(st.sampled_from(facts.forward), unique=True)) if facts.forward else []
    naive, chains = Naive(facts), Chains(facts)
    assert chains.after(rows) == naive.after(rows)
    assert chains.before(rows) == naive.before(rows)
    assert chains.after_marker(rows, markers) == naive.cut(rows, markers, keep_after=True)
    assert chains.before_marker(rows, markers) == naive.cut(rows, markers, keep_after=False)
    found = [chains.from_parameter_mask[row] for row in facts.forward]
    assert found == [naive.from_parameter(row) for row in facts.forward]


FSDP = """
    %w = parameter
    %x = input
    %cast = prims.convert_element_type.default(%w)
    %gather = _c10d_functional.all_gather_into_tensor.default(%cast)
    %wait = _c10d_functional.wait_tensor.default(%gather)
    %split = aten.split.Tensor(%wait)
    %p0 = builtin.getitem(%split)
    %p1 = builtin.getitem(%split)
    %cat = aten.cat.default(%p0, %p1)
    %view = aten.view.default(%cat)
    %mm = aten.mm.default(%x, %view)
    ---
    %t = tangent
    %bw = aten.mm.default(%t, %view)
"""


def test_a_gathered_weight_is_one_line_to_the_matrix_product_though_the_backward_reads_it() -> None:
    facts = facts_of_text(FSDP)
    row, chains = facts.index, Chains(facts)

    def names(rows: list[int]) -> list[str]:
        return [facts.names[each] for each in rows]

    gather, line = [row["gather"]], ["wait", "split", "p0", "p1", "cat", "view"]
    assert facts.users[row["view"]] == (row["mm"], row["bw"])
    assert names(chains.after(gather)) == line
    assert names(chains.before(gather)) == ["cast"]
    assert names(chains.after_marker(gather, [row["wait"]])) == line[1:]
    assert names(chains.before_marker(gather, [row["wait"]])) == ["gather"]
    assert chains.after_marker(gather, [row["mm"]]) == []
    of_parameter = [each for each, inside in enumerate(chains.from_parameter_mask) if inside]
    assert names(of_parameter) == ["cast", "gather", *line]


@pytest.mark.slow
def test_a_line_of_a_hundred_thousand_nodes_is_walked_once() -> None:
    length = 100_000
    lines = ["%x = input", "%n0 = aten.sin.default(%x)"]
    lines += [f"%n{row} = aten.sin.default(%n{row - 1})" for row in range(1, length)]
    facts = facts_of_text("\n".join(lines))
    chains = Chains(facts)
    assert len(chains.after(facts.forward)) == length - 1
    assert len(chains.before(facts.forward)) == length - 1
    assert len(chains.after_marker(facts.forward, facts.forward[-1:])) == 0
    assert len(chains.before_marker(facts.forward, facts.forward[-1:])) == length - 1
