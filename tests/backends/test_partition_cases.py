"""The cases in which partitioners go wrong, one by one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.utils.checkpoint import checkpoint

import policylang
from policylang.errors import PolicyGraphError, PolicyMatchError
from policylang.graph import marks
from tests.support.models import llama as llama_of
from tests.support.models import square_loss
from tests.support.run_partition import Traced, assert_same_result, partitioner, trace
from tests.support.run_partition import traced as zoo_traced


def traced(forward: Any, *inputs: Tensor) -> Traced:
    """A function of tensors that need gradients, with a loss."""
    return trace(_Function(forward), tuple(value.clone().requires_grad_() for value in inputs), square_loss)


class _Function(nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.function = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


@pytest.fixture(scope="module")
def llama() -> Traced:
    return trace(*llama_of(1))


@pytest.fixture(scope="module")
def chain() -> Traced:
    return traced(lambda x: x.sin().cos().sin().cos(), torch.randn(4, 4))


def read_whole_in_the_backward(gm: fx.GraphModule, *, with_tangent: bool = False) -> fx.Node:
    """Adds a node to the backward that reads the tuple of `topk` as a whole, and is returned."""
    (topk,) = (node for node in gm.graph.nodes if node.name == "topk")
    tangent = next(node for node in gm.graph.nodes if "tangents" in node.name)
    reader = next(iter(tangent.users))
    with gm.graph.inserting_after(reader):
        whole = gm.graph.call_function(torch.ops.aten.cat.default, (topk, tangent) if with_tangent else (topk,))
        whole.meta = {**reader.meta}
    (output,) = gm.graph.find_nodes(op="output")
    output.args = ([*output.args[0], whole],)
    output.meta["desc"] = [*output.meta["desc"], output.meta["desc"][-1]]
    return whole


def names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op == "call_function"]


def returned(gm: fx.GraphModule) -> list[str]:
    (output,) = gm.graph.find_nodes(op="output")
    return [str(value) for value in output.args[0]]


# --- what is saved ------------------------------------------------------------------------------------------------


def test_saves_exactly_what_the_policy_says(chain: Traced) -> None:
    partition = chain.partition("recompute everything; save first sin")
    assert partition.audit.saved == ("sin",)
    assert returned(partition.forward)[chain.num_fwd_outputs :] == ["primals_1", "sin"]
    assert partition.audit.recomputed == ("cos", "sin_1")
    assert partition.audit.saved_bytes == 64


def test_a_recomputation_stops_at_what_is_saved_and_what_no_backward_needs_is_not_kept(chain: Traced) -> None:
    partition = chain.partition("recompute everything; save first cos")
    assert partition.audit.saved == ("cos",)
    assert partition.audit.recomputed == ("sin", "sin_1")
    assert chain.partition("recompute everything; save last cos").audit.saved == ()


def test_one_output_of_several_is_kept_where_the_operator_is_saved() -> None:
    graph = traced(lambda x: torch.topk(x.sin(), 2)[0].sin(), torch.randn(4, 4))
    partition = graph.partition("recompute everything; save topk")
    kept = [node for node in partition.forward.graph.nodes if node.name in partition.audit.saved]
    assert {str(node.args[0]) for node in kept} == {"topk"}
    assert "topk" not in names(partition.backward.graph)
    assert_same_result(graph.run(default_partition), graph.run("recompute everything; save topk"))


def test_recomputation_stands_just_before_its_first_use(chain: Traced) -> None:
    order = names(chain.partition("recompute everything; save first cos").backward.graph)
    assert order.index("sin_1") < order.index("sin"), "the forward's later value is needed first"
    assert order.index("sin") > order.index(next(name for name in order if name.startswith("mul")))


def test_no_policy_at_all_is_what_min_cut_does(llama: Traced) -> None:
    ours = llama.partition("undecided -> auto")
    forward, backward = llama.split(min_cut_rematerialization_partition)
    assert sorted(returned(ours.forward)) == sorted(returned(forward))
    assert sorted(names(ours.backward.graph)) == sorted(names(backward.graph))


def test_min_cut_does_not_undo_a_rule(llama: Traced) -> None:
    """Views are what PyTorch's partitioner recomputes even where they are tagged, and PREFER_SAVE it does not know."""
    for action in ("save", "prefer_save"):
        partition = llama.partition(f"{action} view; {action} mul; recompute cos, sin; undecided -> auto")
        facts, decisions = partition.plan.facts, partition.plan.decisions
        ruled = {facts.names[row]: d.action for row, d in enumerate(decisions) if d is not None and d.rule is not None}
        assert not [name for name in partition.audit.recomputed if name in ruled and ruled[name].saves]
        assert not [name for name in partition.audit.saved if name in ruled and ruled[name].recomputes]
        assert set(partition.audit.saved) & ruled.keys()
        assert set(partition.audit.saved) - ruled.keys()


def test_a_graph_without_a_backward_is_split_into_all_and_nothing() -> None:
    graph = traced(lambda x: x.sin().cos(), torch.randn(4))
    gm = graph.fresh()
    (output,) = gm.graph.find_nodes(op="output")
    output.args = ((output.args[0][0],),)
    output.meta["desc"] = [output.meta["desc"][0]]
    gm.graph.eliminate_dead_code()
    for node in gm.graph.find_nodes(op="placeholder"):
        if not node.users:
            gm.graph.erase_node(node)
    forward, backward = policylang.partition(gm, (), num_fwd_outputs=1, policy=partitioner("save everything").policy)
    assert names(forward.graph) == ["sin", "cos"]
    assert names(backward.graph) == []


# --- what must not be -------------------------------------------------------------------------------------------------


def test_a_read_of_memory_that_is_written_later_is_not_recomputed() -> None:
    graph = zoo_traced("counter")
    gm = graph.fresh()
    before = str(gm.graph)
    with pytest.raises(PolicyMatchError) as caught:
        graph.split("recompute everything", gm)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "APL304"
    assert diagnostic.span.text == "recompute everything"
    assert "reads memory" in diagnostic.message
    assert str(gm.graph) == before
    assert not any(marks.is_ours(node.meta) for node in gm.graph.nodes), "nothing is written before all is well"


def test_min_cut_is_not_let_loose_on_memory_that_is_written_later() -> None:
    graph = zoo_traced("counter")
    result = graph.run("optional recompute mul; undecided -> auto")
    assert_same_result(graph.run(default_partition), result)
    assert "sin" not in result.audit.recomputed


def test_an_effect_is_not_had_twice() -> None:
    tally = _tally()
    graph = traced(lambda x: tally(x.sin()).cos(), torch.randn(4))
    base = graph.run(default_partition)
    for policy in ("save everything", "optional recompute everything", "undecided -> auto"):
        result = graph.run(policy)
        assert_same_result(base, result)
        assert "with_effects" not in result.audit.recomputed
    with pytest.raises(PolicyMatchError, match="has an effect beyond its result"):
        graph.run("recompute everything")


@cache
def _tally() -> Any:
    @torch.library.custom_op("policylang_tests::tally", mutates_args=())
    def tally(x: Tensor) -> Tensor:
        return x.clone()

    tally.register_fake(lambda x: torch.empty_like(x))
    tally.register_autograd(lambda ctx, gradient: gradient)
    _register_effectful_op(torch.ops.policylang_tests.tally.default, _EffectType.ORDERED)
    return tally


def test_a_tuple_that_the_backward_reads_whole_cannot_be_saved() -> None:
    graph = traced(lambda x: torch.topk(x.sin(), 2)[0].sin(), torch.randn(4, 4))
    gm = graph.fresh()
    whole = read_whole_in_the_backward(gm)
    with pytest.raises(PolicyMatchError) as caught:
        graph.split("recompute everything; save topk", gm)
    (found,) = caught.value.diagnostics
    assert found.code == "APL321"
    assert "`save topk` cannot save `topk`" in found.message
    assert whole.name in found.message
    assert found.help == "recompute it with a later rule"


class _ReadsBuffer(nn.Module):
    """Chooses by a buffer that the step then changes: what was chosen cannot be chosen again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin() * torch.topk(self.scale, 2)[0].sum()
        self.scale.add_(1)
        return y


def test_what_min_cut_can_neither_save_nor_recompute_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # torch writes the graph it failed on there
    graph = trace(_ReadsBuffer(), (torch.randn(4, requires_grad=True),), square_loss)
    gm = graph.fresh()
    read_whole_in_the_backward(gm, with_tangent=True)
    with pytest.raises(PolicyMatchError) as caught:
        graph.split("leave everything", gm)
    (found,) = caught.value.diagnostics
    assert found.code == "APL322"
    assert any("topk" in line for line in found.details)
    assert found.help == "write `undecided -> save` or `undecided -> recompute`"


# --- the user's own checkpoint regions -----------------------------------------------------------------------------


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda value, layer=layer: layer(value.sin()).cos(), x, use_reentrant=False)
        return x.exp()


@pytest.fixture(scope="module")
def checkpointed() -> Traced:
    torch.manual_seed(0)
    return trace(_Checkpointed(), (torch.randn(4, 8),), square_loss)


def test_regions_are_respected_with_their_borders(checkpointed: Traced) -> None:
    result = checkpointed.run("save everything")
    assert_same_result(checkpointed.run(default_partition), result)
    assert "cos" in result.audit.saved
    assert "cos_1" in result.audit.saved
    assert "sin" in result.audit.recomputed
    assert not [name for name in result.audit.saved if name.startswith(("sin", "addmm"))]


def test_a_regions_result_with_a_backward_hook_is_saved(checkpointed: Traced) -> None:
    """Otherwise FSDP's hook would wait for a gradient that waits for the hook."""
    gm = checkpointed.fresh()
    assert "cos_2" not in checkpointed.partition("recompute everything").audit.saved
    next(node for node in gm.graph.nodes if node.name == "cos_2").meta["has_backward_hook"] = True
    assert "cos_2" in checkpointed.partition("recompute everything", gm).audit.saved


def test_regions_are_overridden_where_the_policy_says_so(checkpointed: Traced) -> None:
    result = checkpointed.run("override save everything")
    assert_same_result(checkpointed.run(default_partition), result)
    assert result.audit.recomputed == ()


def test_the_users_tags_come_back_when_another_policy_is_applied(checkpointed: Traced) -> None:
    gm = checkpointed.fresh()
    before = {node.name: (node.meta.get("recompute"), node.meta.get("ac_graph_id")) for node in gm.graph.nodes}
    assert any(tag is not None for tag, _ in before.values())
    policylang.apply(gm, policylang.parse("override save everything"))
    assert gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)[0].meta["ac_graph_id"] == 2**30
    policylang.apply(gm, policylang.parse("undecided -> auto"))
    after = {node.name: (node.meta.get("recompute"), node.meta.get("ac_graph_id")) for node in gm.graph.nodes}
    border = {name for name in before if before[name] != after[name]}
    assert border == {"cos", "cos_1"}, "torch's border rule, as the plan has it, and nothing else"


# --- applying, partitioning, recording ------------------------------------------------------------------------------


def test_apply_tags_forward_nodes_with_who_decided(llama: Traced) -> None:
    gm = llama.fresh()
    policy = policylang.parse("recompute everything\nsave mm", name="two.apl")
    assert policylang.apply(gm, policy) is gm
    for node in gm.graph.nodes:
        backward = node.meta.get("partitioner_tag") == "is_backward"
        if node.op != "call_function" or backward:
            assert not marks.is_ours(node.meta)
        elif node.target is torch.ops.aten.mm.default:
            assert node.meta["custom"]["policylang"] == "two.apl:2"
            assert node.meta["recompute"].name == "MUST_SAVE"
        else:
            assert node.meta["custom"]["policylang"] == "two.apl:1"
            assert node.meta["recompute"].name == "PREFER_RECOMPUTE"


def test_applying_again_changes_nothing(llama: Traced) -> None:
    gm = llama.fresh()
    policy = policylang.parse("recompute everything; save mm")

    def tags() -> list[tuple[Any, ...]]:
        return [(node.name, node.meta.get("recompute"), str(node.meta.get("custom"))) for node in gm.graph.nodes]

    policylang.apply(gm, policy)
    once = tags()
    policylang.apply(gm, policy)
    assert tags() == once


def test_annotations_that_nodes_share_are_not_written_to(chain: Traced) -> None:
    gm = chain.fresh()
    shared = {"mine": 1}
    for node in gm.graph.nodes:
        node.meta["custom"] = shared
    policylang.apply(gm, policylang.parse("save sin; recompute cos"))
    chain.partition("recompute everything", gm)
    assert shared == {"mine": 1}
    assert all(node.meta["custom"]["mine"] == 1 for node in gm.graph.nodes)


def test_partition_follows_what_was_applied(chain: Traced) -> None:
    gm = chain.fresh()
    policylang.apply(gm, policylang.parse("recompute everything; save first sin"))
    forward, _ = policylang.partition(gm, (), num_fwd_outputs=chain.num_fwd_outputs, compiler="inductor")
    assert returned(forward)[chain.num_fwd_outputs :] == ["primals_1", "sin"]


def test_partition_plans_again_where_a_pass_has_changed_the_graph(chain: Traced) -> None:
    gm = chain.fresh()
    policylang.apply(gm, policylang.parse("recompute everything; save first sin"))
    first = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)[0]
    with gm.graph.inserting_before(first):
        earlier = gm.graph.call_function(torch.ops.aten.sin.default, first.args)
        earlier.meta = dict(first.meta)
    first.args = (earlier,)
    forward, _ = policylang.partition(gm, (), num_fwd_outputs=chain.num_fwd_outputs)
    assert earlier.name in returned(forward)
    assert first.name not in returned(forward)


def test_what_was_saved_is_recorded_and_can_be_replayed(llama: Traced) -> None:
    gm = llama.fresh()
    first = llama.partition("recompute everything; save attention; save mm; recompute every 2nd mm", gm)
    recorded = {node.name for node in first.forward.graph.nodes if marks.recorded(node.meta)}
    assert set(first.audit.saved) <= recorded

    replayed = llama.fresh()
    for node in replayed.graph.nodes:
        if node.name in recorded and node.op == "call_function":
            node.meta["custom"] = {**marks.custom(node.meta), marks.SAVED: True}
    second = llama.partition("recompute everything; save everything where recorded saved", replayed)
    assert second.audit.saved == first.audit.saved
    assert second.audit.recomputed == first.audit.recomputed


def test_a_record_of_an_earlier_partition_is_replaced(chain: Traced) -> None:
    gm = chain.fresh()
    stale = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)[0]
    stale.meta["custom"] = {marks.SAVED: True}
    partition = chain.partition("recompute everything; save first sin", gm)
    assert [node.name for node in partition.forward.graph.nodes if marks.recorded(node.meta)] == ["sin"]


@pytest.mark.parametrize("given", [None, "a graph", torch.nn.Linear(2, 2), fx.Graph()])
def test_what_is_no_graph_module_is_refused_by_name(given: Any) -> None:
    for act in (
        lambda: policylang.apply(given, "save_all"),
        lambda: policylang.partition(given, (), num_fwd_outputs=1, policy="save_all"),
    ):
        with pytest.raises(policylang.PolicyGraphError, match=f"this is a `{type(given).__name__}`") as caught:
            act()
        assert [found.code for found in caught.value.diagnostics] == ["APL328"]


def test_a_flat_graph_has_no_halves() -> None:
    step = policylang.trace_step(torch.nn.Linear(2, 1), lambda model, x: model(x).sum(), torch.randn(3, 2))
    with pytest.raises(policylang.PolicyGraphError, match="none of its inputs is a tangent") as caught:
        policylang.partition(step.gm, (), num_fwd_outputs=1, policy="save_all")
    assert [found.code for found in caught.value.diagnostics] == ["APL323"]


def test_a_partition_without_a_policy_is_told_how_to_have_one(chain: Traced) -> None:
    help = r"no policy was applied.*call `policylang\.apply\(gm, policy\)` first"
    with pytest.raises(PolicyGraphError, match=f"(?s){help}") as caught:
        policylang.partition(chain.fresh(), (), num_fwd_outputs=chain.num_fwd_outputs)
    assert [found.code for found in caught.value.diagnostics] == ["APL325"]
