"""The audit has to fail where a partition is not what was planned: each test spoils one by hand."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from attrs import evolve
from torch import fx

from policylang.audit.graphs import audit, is_random_state, read_halves
from policylang.audit.outcome import Audit
from policylang.backends import finalize
from policylang.backends import joint as module
from policylang.backends.joint import Partition
from policylang.errors import PolicyAuditError
from policylang.planning.liveness import backward_needs
from policylang.planning.value_outcome import RECOMPUTED
from tests.backends.test_partition_cases import traced
from tests.support.run_partition import Traced
from tests.support.sharded import fake_ranks

POLICY = "recompute everything\nsave first cos"


@pytest.fixture
def graph() -> Traced:
    return traced(lambda x: x.sin().cos().sin().cos(), torch.randn(4, 4))


@pytest.fixture
def partition(graph: Traced) -> Partition:
    return graph.partition(POLICY)


def again(graph: Traced, partition: Partition) -> Audit:
    """Audit the two graphs as they are now."""
    gradients = finalize.gradient_rows(graph.gm.graph, partition.plan.facts, graph.num_fwd_outputs)
    plan = finalize.fit(partition.plan, gradients)
    needs = backward_needs(plan.facts, plan.decisions)
    forward, backward = partition.forward.graph, partition.backward.graph
    halves = read_halves(plan, needs, forward, backward, num_fwd_outputs=graph.num_fwd_outputs)
    return audit(plan, needs, halves)


def node(graph: fx.Graph, name: str) -> fx.Node:
    return next(each for each in graph.nodes if each.name == name)


def keep(graph: fx.Graph, *values: fx.Node) -> None:
    (output,) = graph.find_nodes(op="output")
    output.args = ((*output.args[0], *values),)


def test_agrees_with_a_partition_as_it_came_out(graph: Traced, partition: Partition) -> None:
    result = again(graph, partition)
    assert result.agrees
    assert result.saved == ("cos",)
    assert result.recomputed == ("sin", "sin_1")
    assert result.saved_bytes == 64
    assert result.recomputed_bytes == 128


def test_notices_a_value_that_is_kept_beyond_the_plan(graph: Traced, partition: Partition) -> None:
    keep(partition.forward.graph, node(partition.forward.graph, "sin"))
    first = next(iter(partition.backward.graph.nodes))
    recomputed = node(partition.backward.graph, "sin")
    with partition.backward.graph.inserting_before(first):
        arrived = partition.backward.graph.placeholder("arrived")
    recomputed.replace_all_uses_with(arrived)
    partition.backward.graph.erase_node(recomputed)
    arrived.name = "sin"
    found = again(graph, partition).differences
    assert [each.code for each in found] == ["APL401", "APL404"]
    assert "`sin` (aten.sin.default) was saved" in found[0].message
    assert "recompute (`recompute everything`, <policy>:1)" in found[0].message
    assert found[0].span is not None
    assert found[0].span.text == "recompute everything"
    assert "`sin` (aten.sin.default) was not recomputed" in found[1].message


def test_notices_a_value_that_is_computed_again_instead(graph: Traced, partition: Partition) -> None:
    forward, backward = partition.forward.graph, partition.backward.graph
    (output,) = forward.find_nodes(op="output")
    output.args = (tuple(value for value in output.args[0] if value.name != "cos"),)
    arrives = node(backward, "cos")
    sine = node(backward, "sin")
    arrives.append(sine)
    with backward.inserting_after(sine):
        recomputed = backward.call_function(torch.ops.aten.cos.default, (sine,))
    arrives.replace_all_uses_with(recomputed)
    backward.erase_node(arrives)
    recomputed.name = "cos"
    found = again(graph, partition).differences
    assert [each.code for each in found] == ["APL402", "APL403"]
    assert "planned: save (`save first cos`, <policy>:2)" in found[0].message


def test_notices_what_was_never_planned(graph: Traced, partition: Partition) -> None:
    forward = partition.forward.graph
    with forward.inserting_after(node(forward, "sin")):
        stranger = forward.call_function(torch.ops.aten.exp.default, (node(forward, "sin"),))
    keep(forward, stranger)
    (found,) = again(graph, partition).differences
    assert found.code == "APL405"
    assert "`exp_default`" in found.message


def test_notices_a_dropout_that_is_not_replayed() -> None:
    graph = traced(lambda x: torch.nn.functional.dropout(x.sin(), 0.5, training=True).sin(), torch.randn(8))
    partition = graph.partition("recompute everything")
    assert again(graph, partition).agrees
    backward = partition.backward.graph
    wrapper = next(each for each in backward.nodes if getattr(each.target, "__name__", "") == "run_with_rng_state")
    with backward.inserting_before(wrapper):
        other = backward.call_function(torch.ops.aten.native_dropout.default, wrapper.args[2:])
    other.name = "some_dropout"
    wrapper.replace_all_uses_with(other)
    backward.erase_node(wrapper)
    assert [each.code for each in again(graph, partition).differences] == ["APL404"]


def two_dropouts(x: torch.Tensor) -> torch.Tensor:
    first = torch.nn.functional.dropout(x.sin(), 0.5, training=True)
    return torch.nn.functional.dropout(first.cos(), 0.5, training=True).sin()


def one_input(x: torch.Tensor) -> torch.Tensor:
    """Alike in all they read: only who reads them tells them apart."""
    return torch.rand_like(x).mul(x).sin() + torch.rand_like(x).add(x).cos()


@pytest.mark.parametrize("forward", [two_dropouts, one_input])
def test_notices_that_two_draws_were_exchanged(forward: Callable[..., torch.Tensor]) -> None:
    graph = traced(forward, torch.randn(8))
    partition = graph.partition("recompute everything")
    assert partition.audit.random_states == 2
    assert again(graph, partition).agrees
    wrappers = [
        each for each in partition.backward.graph.nodes if getattr(each.target, "__name__", "") == "run_with_rng_state"
    ]
    states = [wrapper.args[0] for wrapper in wrappers]
    for wrapper, state in zip(wrappers, reversed(states), strict=True):
        wrapper.update_arg(0, state)
    assert [each.code for each in again(graph, partition).differences] == ["APL404", "APL404"]


@pytest.mark.parametrize("forward", [two_dropouts, one_input])
def test_notices_that_two_states_were_handed_over_in_the_wrong_order(forward: Callable[..., torch.Tensor]) -> None:
    graph = traced(forward, torch.randn(8))
    partition = graph.partition("recompute everything")
    (output,) = partition.forward.graph.find_nodes(op="output")
    values = list(output.args[0])
    places = [place for place, value in enumerate(values) if is_random_state(value)]
    values[places[0]], values[places[1]] = values[places[1]], values[places[0]]
    output.args = (tuple(values),)
    assert [each.code for each in again(graph, partition).differences] == ["APL404", "APL404"]


def test_a_difference_stops_the_compilation(graph: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = module.split

    def dishonest(joint, plan, needs, **options):  # type: ignore[no-untyped-def]
        return honest(joint, plan, evolve(needs, rows={RECOMPUTED: needs.recomputed + needs.saved}), **options)

    monkeypatch.setattr(module, "split", dishonest)
    with pytest.raises(PolicyAuditError) as caught:
        graph.partition(POLICY)
    assert {each.code for each in caught.value.diagnostics} == {"APL402", "APL403"}


def test_is_plain_data(partition: Partition) -> None:
    assert pickle.loads(pickle.dumps(partition.audit)) == partition.audit


def said(graph: Traced, partition: Partition) -> list[tuple[str, str]]:
    return [(each.code, each.message) for each in again(graph, partition).differences]


def test_notices_a_random_operator_that_stands_in_the_backward_as_it_is() -> None:
    graph = traced(lambda x: torch.rand_like(x).mul(x).sin(), torch.randn(8))
    partition = graph.partition("recompute everything")
    draw_in_the_backward(partition.backward.graph)
    (found,) = again(graph, partition).differences
    assert found.code == "APL407"
    assert found.message.startswith("`rand_like` (aten.rand_like.default) draws new random numbers; planned: rec")


def test_a_draw_that_the_forward_does_without_is_made_in_the_backward_alone() -> None:
    """torch wraps no random operator that its dead-code elimination took out of the forward."""
    graph = traced(lambda x: torch.rand_like(x).mul(x).sin(), torch.randn(8))
    partition = graph.partition("recompute everything")
    draw_in_the_backward(partition.backward.graph)
    forward = partition.forward.graph
    keeper = next(each for each in forward.nodes if "run_and_save" in str(each.target))
    state, drawn = sorted(keeper.users, key=is_random_state, reverse=True)
    (output,) = forward.find_nodes(op="output")
    output.args = (tuple(value for value in output.args[0] if value is not state),)
    drawn.replace_all_uses_with(forward.find_nodes(op="placeholder")[0])
    for each in (state, drawn, keeper):
        forward.erase_node(each)
    assert again(graph, partition).agrees


def draw_in_the_backward(backward: fx.Graph) -> None:
    wrapper = next(each for each in backward.nodes if getattr(each.target, "__name__", "") == "run_with_rng_state")
    (called, *arguments) = wrapper.args[1:]
    with backward.inserting_before(wrapper):
        anew = backward.call_function(called, tuple(arguments), wrapper.kwargs)
    wrapper.replace_all_uses_with(anew)
    backward.erase_node(wrapper)
    anew.name = "rand_like"


def test_notices_that_two_draws_changed_places() -> None:
    graph = traced(one_input, torch.randn(8))
    partition = graph.partition("undecided -> save")
    forward = partition.forward.graph
    node(forward, "rand_like").prepend(node(forward, "rand_like_1"))
    assert said(graph, partition) == [
        ("APL410", "`rand_like` runs after `rand_like_1`, which is not the order of the plan")
    ]


def test_notices_that_two_replayed_draws_changed_places() -> None:
    """Their states change with them, so the gradients are right, and every number is another than without a policy."""
    graph = traced(one_input, torch.randn(8))
    partition = graph.partition("recompute everything")
    keepers = [each for each in partition.forward.graph.nodes if "run_and_save" in str(each.target)]
    keepers[0].prepend(keepers[1])
    assert said(graph, partition) == [
        ("APL410", "`rand_like` runs after `rand_like_1`, which is not the order of the plan")
    ]


def test_notices_what_runs_before_its_argument(graph: Traced, partition: Partition) -> None:
    forward = partition.forward.graph
    node(forward, "sin").prepend(node(forward, "cos"))
    assert said(graph, partition) == [
        ("APL410", "`cos` runs before `sin`, which it reads, which is not the order of the plan")
    ]


@pytest.fixture
def gathered() -> Iterator[tuple[Traced, Partition]]:
    with fake_ranks(2):
        gather = functional.all_gather_tensor_autograd
        graph = traced(lambda x: gather(x.sin(), 0, dist.group.WORLD).cos(), torch.randn(8))
        yield graph, graph.partition("undecided -> save")


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "once_more"])
def test_notices_a_collective_that_runs_twice(gathered: tuple[Traced, Partition], name: str) -> None:
    graph, partition = gathered
    assert again(graph, partition).agrees
    backward = partition.backward.graph
    gather = node(partition.forward.graph, "all_gather_into_tensor")
    arrives = backward.find_nodes(op="placeholder")
    first = next(each for each in backward.nodes if each.op == "call_function")
    with backward.inserting_before(first):
        more = backward.call_function(gather.target, (arrives[0], *gather.args[1:]))
    more.name = name
    (found,) = said(graph, partition)
    if name == "once_more":
        said_of_it = "the graph has a node `once_more`, which the graph that was planned does not have"
        assert found == ("APL405", said_of_it)
    else:
        assert found[0] == "APL403"
        assert found[1].startswith("`all_gather_into_tensor` (_c10d_functional.all_gather_into_tensor.default)")
        assert "was recomputed; planned:" in found[1]
