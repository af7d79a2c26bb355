"""Equal nodes are merged, and what was decided about them is not lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import default_partition
from torch import Tensor, nn

from policylang.api.load import parse
from policylang.backends import finalize
from policylang.backends.joint import JointPartitioner
from policylang.errors import PolicyMatchError
from policylang.graph import marks
from tests.backends.test_partition_cases import names, traced
from tests.support.run_partition import Traced, assert_same_result, trace


def twins(x: Tensor) -> Tensor:
    """Two equal sines, read by two different operators."""
    return x.sin().cos() * x.sin().exp()


@pytest.fixture(scope="module")
def graph() -> Traced:
    return traced(twins, torch.randn(4))


def eliminate(graph: Traced, policy: str) -> tuple[Any, finalize.Merged]:
    gm = graph.fresh()
    made = JointPartitioner(parse(policy)).plan(gm, num_fwd_outputs=graph.num_fwd_outputs)
    merged = finalize.eliminate(gm.graph, made)
    gm.graph.lint()
    return gm, merged


def test_the_first_of_two_equal_nodes_stays(graph: Traced) -> None:
    gm, merged = eliminate(graph, "save everything")
    assert "sin" in names(gm.graph)
    assert "sin_1" not in names(gm.graph)
    assert len(merged.kept_for) >= 1


@pytest.mark.parametrize(
    ("policy", "fate"),
    [
        ("recompute everything; save last sin", "saved"),
        ("recompute everything; save first sin", "saved"),
        ("recompute everything", "recomputed"),
    ],
)
def test_the_stronger_decision_of_the_two_holds(graph: Traced, policy: str, fate: str) -> None:
    result = graph.run(policy)
    assert_same_result(graph.run(default_partition), result)
    assert ("sin" in result.audit.saved) == (fate == "saved")
    assert ("sin" in result.audit.recomputed) == (fate == "recomputed")


def test_a_save_that_the_backward_has_no_use_for_does_not_save_its_twin() -> None:
    graph = traced(lambda x: x.sin() + x.sin().cos(), torch.randn(4))
    result = graph.run("recompute everything; save first sin")
    assert_same_result(graph.run(default_partition), result)
    assert result.audit.saved == ()
    assert result.audit.recomputed == ("sin",)
    assert graph.run("recompute everything; save last sin").audit.saved == ("sin",)


class Twins(nn.Module):
    """Two equal values of a buffer that is then written; the backward needs the second alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.scale.exp() + self.weight * self.scale.exp() * x
        self.scale.add_(1)
        return y


UNSEEN = ["recompute first exp", "recompute first exp; leave last exp", "optional recompute first exp"]


@pytest.mark.parametrize("policy", UNSEEN)
def test_a_recomputation_that_nothing_needed_does_not_bind_its_twin(policy: str) -> None:
    """Planning refuses what would be wrong of what is needed. The twin would have read the buffer after its update."""
    graph = trace(Twins(), (torch.randn(4, 8),), lambda output: output.sum())
    result = graph.run(policy)
    assert_same_result(graph.run("save everything"), result)
    assert result.audit.recomputed == ()


@pytest.mark.parametrize("policy", UNSEEN)
def test_what_planning_could_not_see_is_refused_before_the_graph_is_split(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finalize, "_used_by_backward", lambda plan: frozenset(range(len(plan.facts))))
    graph = trace(Twins(), (torch.randn(4, 8),), lambda output: output.sum())
    with pytest.raises(PolicyMatchError, match="reads memory that the graph changes") as caught:
        graph.run(policy)
    assert [found.code for found in caught.value.diagnostics] == ["APL304"]


def test_recompute_beats_undecided(graph: Traced) -> None:
    result = graph.run("recompute last sin; undecided -> auto")
    assert "sin" not in result.audit.saved


def test_the_tag_names_the_rule_of_the_dropped_twin(graph: Traced) -> None:
    gm = graph.fresh()
    graph.partition("recompute everything\nsave last sin", gm)
    (kept,) = (node for node in gm.graph.nodes if node.name == "sin")
    assert marks.custom(kept.meta)[marks.PROVENANCE] == "<policy>:2"
    assert kept.meta["recompute"].name == "MUST_SAVE"


def test_nothing_is_merged_where_the_configuration_says_so(graph: Traced) -> None:
    with torch._functorch.config.patch(cse=False):
        partition = graph.partition("save everything")
    assert {"sin", "sin_1"} <= set(names(partition.forward.graph))


def test_random_operators_stay_apart() -> None:
    graph = traced(lambda x: torch.rand_like(x) * x + torch.rand_like(x), torch.randn(4))
    gm, _ = eliminate(graph, "save everything")
    assert len([name for name in names(gm.graph) if name.startswith("rand")]) == 2


def test_results_that_are_separate_tensors_stay_so() -> None:
    graph = traced(lambda x: x.sin() + 0 * x.cos(), torch.randn(4))
    copies = traced(lambda x: (x.sin(), x.sin())[0] * (x + 1).cos(), torch.randn(4))
    for each in (graph, copies):
        assert_same_result(each.run(default_partition), each.run("save everything"))


def test_arguments_that_compare_equal_and_are_not() -> None:
    graph = traced(lambda x: (x * 1).sin() + (x * 1.0).sin() + (x * 0.0).cos() + (x * -0.0).cos(), torch.randn(4))
    gm, _ = eliminate(graph, "save everything")
    factors = [node.args[1] for node in gm.graph.nodes if node.name.startswith("mul") and len(node.args) == 2]
    assert {repr(factor) for factor in factors} >= {"1", "1.0", "0.0", "-0.0"}


def test_a_write_between_keeps_twins_apart() -> None:
    graph = traced(twins, torch.randn(4))
    gm = graph.fresh()
    second = next(node for node in gm.graph.nodes if node.name == "sin_1")
    first = next(node for node in gm.graph.nodes if node.name == "sin")
    with gm.graph.inserting_before(second):
        write = gm.graph.call_function(torch.ops.aten.add_.Tensor, (first.args[0], 1))
        write.meta = dict(first.meta)
    made = JointPartitioner(parse("save everything")).plan(gm, num_fwd_outputs=graph.num_fwd_outputs)
    finalize.eliminate(gm.graph, made)
    assert "sin_1" in names(gm.graph)


class _RecomputesItself(torch.autograd.Function):
    """Saves its input and computes the sine again in its backward, as memory-saving kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin() * x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.sin() * x.cos() * 2


def test_a_backward_node_does_not_make_a_decided_forward_value_its_own() -> None:
    graph = traced(lambda x: _RecomputesItself.apply(x), torch.randn(4))
    result = graph.run("save everything")
    assert_same_result(graph.run(default_partition), result)
    assert result.audit.saved == ()
    assert {"sin_2", "cos"} <= set(names(result.partition.backward.graph))


def test_min_cut_may_share_a_value_that_no_rule_decided() -> None:
    graph = traced(lambda x: _RecomputesItself.apply(x), torch.randn(4))
    gm, merged = eliminate(graph, "undecided -> auto")
    assert len([name for name in names(gm.graph) if name.startswith("sin")]) == 1
    assert_same_result(graph.run(default_partition), graph.run("undecided -> auto"))
    assert merged.kept_for
