"""Facts of real models against what running the graph, or PyTorch itself, says of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._functorch.partitioners import classify_nodes
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from policylang.errors import PolicyGraphError
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Flag, GraphKind, Mesh, Phase, uncounted_operators
from tests.graph.captured import executed, facts_of_model, joint_of
from tests.support.chains import NAMES, Chain, shard_of, traced
from tests.support.models import ZOO
from tests.support.sharded import fake_ranks

LARGE = {"bart", "mixtral", "qwen3"}
MODELS = [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in sorted(ZOO)]


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, (tuple, list)) else []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_symbolic_sizes_are_those_of_the_tensors_that_a_run_produces(name: str) -> None:
    check_sizes(name, True)


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_the_tensors_that_a_run_produces(name: str) -> None:
    check_sizes(name, False)
    if name == "mlp":
        check_sizes(name, True)


def check_sizes(name: str, dynamic: bool) -> None:
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


@pytest.mark.parametrize("name", MODELS)
def test_phases_agree_with_what_pytorch_needs_forward_and_backward(name: str) -> None:
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


def attention_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


def attention_backward_flops(_grad: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any):
    """The products with key and value, and one for the gradient of each of the four that are multiplied."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (3 * width + 2 * value[-1])


def grouped_flops(left: Any, right: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * left[0] * left[1] * right[-1]


def grouped_backward_flops(left: Any, right: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * grouped_flops(left, right)


NOT_COUNTED_BY_EVERY_TORCH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
    torch.ops.aten._grouped_mm: grouped_flops,
}


@pytest.mark.parametrize("name", [each for each in MODELS if each != "flex"])
def test_flops_add_up_to_what_pytorch_counts_in_a_run(name: str) -> None:
    joint, facts = joint_of(name), facts_of_model(name)
    mapping = dict(NOT_COUNTED_BY_EVERY_TORCH)
    if name == "mixtral":  # which Transformers registers once one of its models is made
        theirs = torch.ops.transformers
        mapping[theirs.grouped_mm_fallback] = grouped_flops
        mapping[theirs.grouped_mm_fallback_backward] = grouped_backward_flops
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with counter:
        executed(joint.gm)
    assert sum(facts.flops) == counter.get_total_flops() > 0
    assert uncounted_operators(facts, range(len(facts))) == {}


def test_flops_of_flex_attention_are_those_of_its_matrix_products() -> None:
    facts = facts_of_model("flex")
    (row, *_) = facts.by_target["higher_order.flex_attention"]
    batch, heads, length, head = 2, 2, 16, 16
    assert facts.flops[row] == 2 * (2 * batch * heads * length * length * head)


def test_flops_of_attention_on_the_cpu_are_those_of_the_other_kernels() -> None:
    facts = facts_of_model("llama")
    attention = facts.by_target["aten._scaled_dot_product_flash_attention_for_cpu.default"]
    batch, heads, length, head = facts.shapes[attention[0] + 1] or ()
    assert [facts.flops[row] for row in attention] == [2 * (2 * batch * heads * length * length * head)] * 2


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


@pytest.mark.parametrize("name", MODELS)
def test_edges_are_those_of_the_graph(name: str) -> None:
    joint, facts = joint_of(name), facts_of_model(name)
    for row, node in enumerate(joint.gm.graph.nodes):
        assert facts.names[row] == node.name
        assert [facts.names[read] for read in facts.inputs[row]] == [read.name for read in node.all_input_nodes]
        assert sorted(facts.names[user] for user in facts.users[row]) == sorted(user.name for user in node.users)
        assert list(facts.users[row]) == sorted(facts.users[row])


@pytest.mark.parametrize("name", MODELS)
def test_what_backward_reads_and_forward_returns_is_what_the_graph_says(name: str) -> None:
    joint, facts = joint_of(name), facts_of_model(name)
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


def test_subgraphs_of_higher_order_operators_are_constants_without_size() -> None:
    facts = facts_of_model("flex")
    subgraphs = [row for row in range(len(facts)) if facts.ops[row] == "get_attr"]
    assert subgraphs
    assert {facts.phases[row] for row in subgraphs} == {Phase.INPUT}
    assert sum(facts.bytes[row] for row in subgraphs) == 0


def test_views_share_memory_and_others_do_not() -> None:
    facts = facts_of_model("llama")
    views = {facts.targets[row] for row in facts.forward if facts.has(row, Flag.VIEW)}
    assert {"aten.t.default", "aten.view.default", "aten.transpose.int"} <= views
    assert not views & {"aten.mm.default", "aten.clone.default", "aten.mul.Tensor", "aten._unsafe_view.default"}


def test_compute_is_pytorchs_list() -> None:
    facts = facts_of_model("llama")
    compute = {facts.targets[row] for row in facts.forward if facts.has(row, Flag.COMPUTE)}
    assert compute <= {"aten.mm.default", "aten.bmm.default", "aten.addmm.default"}
    assert "aten.mm.default" in compute


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
    with pytest.raises(PolicyGraphError, match="`fc` calls the module `fc`") as caught:
        collect(fx.symbolic_trace(_Holder()))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "APL341"
    assert "policylang.backend" in (diagnostic.help or "")


class _Holder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


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
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES[:2])
        renamed = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        expected = Mesh(("dp", "tp"), (2, 4), tuple(range(8)))
        assert expected in facts_of(mesh).meshes
        assert facts_of(mesh, given=mesh).meshes == (expected,)
        assert renamed.ndim == 2


def test_a_mesh_that_has_none_of_the_groups_is_not_looked_at() -> None:
    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES[:2])
        cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
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
