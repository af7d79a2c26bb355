"""``fuse reduce_scatter chains`` as it is planned on one of eight pretended ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed._functional_collectives as functional
from attrs import evolve
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import policylang
from policylang.backends.records import plan_of
from policylang.graph.collect import collect
from policylang.planning.capabilities import HALF
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from tests.support.edited import assert_facts_hold
from tests.support.sharded import REDUCE_SCATTER, fake_ranks
from tests.support.versions import needs_traced_meshes

FUSE = "optional fuse reduce_scatter chains"


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_ranks(8):
        yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


def scattered(value: Tensor, mesh: DeviceMesh, op: str = "sum") -> Tensor:
    return functional.wait_tensor(REDUCE_SCATTER(value, op, mesh.size(), mesh.get_group().group_name))


def planned(function: Callable[[Tensor], Tensor], text: str = FUSE) -> Plan:
    gm = make_fx(function)(torch.ones(16, 4))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    policylang.apply(gm, policylang.parse(text))
    made = plan_of(gm)
    assert made is not None
    assert_facts_hold(gm, made)
    return made


@pytest.mark.parametrize("order", ["dp tp", "tp dp", "pp dp tp", "tp dp pp", "dp pp tp"])
@pytest.mark.parametrize("op", ["sum", "avg"])
@needs_traced_meshes
def test_the_first_scatter_is_slowest(mesh: DeviceMesh, order: str, op: str) -> None:
    def chain(value: Tensor) -> Tensor:
        for name in order.split():
            value = scattered(value, mesh[name], op)
        return value.sin()

    (edit,) = planned(chain).edits.done
    weights = {"pp": 4, "dp": 2, "tp": 1}
    ranks = [0]
    for name in order.split():
        ranks = [rank + place * weights[name] for rank in ranks for place in range(2)]
    (group,) = edit.groups
    assert list(group.ranks) == ranks
    assert edit.nodes[0].arguments[1:3] == (op, len(ranks))
    assert edit.proof.ranks == len(ranks)
    assert not edit.proof.exact


@needs_traced_meshes
def test_views_between_that_cancel_are_no_obstacle(mesh: DeviceMesh) -> None:
    made = planned(
        lambda value: scattered(scattered(value, mesh["dp"]).t().t().view(4, 8).view(8, 4), mesh["tp"]).sin()
    )
    assert list(made.facts.targets)[1:3] == [
        "_c10d_functional.reduce_scatter_tensor.default",
        "_c10d_functional.wait_tensor.default",
    ]


@needs_traced_meshes
def test_candidates_that_are_left_say_why(mesh: DeviceMesh) -> None:
    dp, tp = mesh["dp"], mesh["tp"]

    def read_twice(value: Tensor) -> Tensor:
        half = scattered(value, dp)
        return scattered(half, tp).sum() + half.sum()

    def other_dimension(value: Tensor) -> Tensor:
        half = scattered(value, dp)
        return scattered(torch.cat(half.split(2, 1)), tp).sin()

    cases: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (read_twice, "other consumer: sum_"),
        (other_dimension, "scatters several dimensions"),
        (lambda value: scattered(scattered(value, dp), tp, "avg").sin(), "reduces with sum, then with avg"),
        (lambda value: scattered(scattered(value, dp, "max"), tp, "max").sin(), "reduces with max"),
        (lambda value: scattered(scattered(value, dp).double(), tp).sin(), "dtype changes: _to_copy"),
        (lambda value: scattered(scattered(value, dp), dp).sin(), "groups "),
    ]
    for function, reason in cases:
        made = planned(function)
        assert not made.edits.done
        (refused,) = made.edits.refused
        assert refused.reason.startswith(reason), refused


@needs_traced_meshes
def test_over_names_the_dimensions(mesh: DeviceMesh) -> None:
    def chain(value: Tensor) -> Tensor:
        return scattered(scattered(value, mesh["dp"]), mesh["tp"]).sin()

    assert planned(chain, "fuse reduce_scatter chains over dp, tp").edits.done
    made = planned(chain, "optional fuse reduce_scatter chains over pp, tp")
    assert [refused.reason for refused in made.edits.refused] == ["over dp: reduce_scatter_tensor"]


@needs_traced_meshes
def test_a_torch_that_sorts_ranks_is_refused_the_order_that_it_would_lose(mesh: DeviceMesh) -> None:
    gm = make_fx(lambda value: scattered(scattered(value, mesh["tp"]), mesh["dp"]).sin())(torch.ones(16, 4))
    older = evolve(HALF, unsorted_groups=False)
    made = plan(policylang.parse(FUSE), collect(gm), older)
    assert [refused.reason for refused in made.edits.refused] == ["rank order 0, 2, 1, 3 needs `sort_ranks`"]
