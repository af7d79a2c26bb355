"""Values that are gathered and cut back to a rank's own part, and gradients scattered twice: by real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

import policylang
from tests.support.ranks import run_ranks
from tests.support.sharded import ALL_GATHER, REDUCE_SCATTER
from tests.support.versions import needs_groups_in_any_order

COLLAPSE = policylang.parse("collapse round_trips")
FUSE = policylang.parse("fuse reduce_scatter chains")
SHAPE = (4, 6)


def gathered(value: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    return functional.wait_tensor(functional.all_gather_tensor(value, dim, mesh))


def scattered(value: Tensor, mesh: DeviceMesh) -> Tensor:
    return functional.wait_tensor(REDUCE_SCATTER(value, "sum", mesh.size(), mesh.get_group().group_name))


def scattered_over(meshes: list[DeviceMesh], value: Tensor) -> Tensor:
    for mesh in meshes:
        value = scattered(value, mesh)
    return value * 2


def traced(function: Callable[[Tensor], Tensor], value: Tensor) -> fx.GraphModule:
    gm = make_fx(function)(value)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def count(gm: fx.GraphModule, target: object) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=target))


def own_value(rank: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))


def round_trips(mesh: DeviceMesh) -> dict[str, tuple[Callable[[Tensor], Tensor], int]]:
    """Functions, and how many gathers are left of each."""
    dp, tp = mesh["dp"], mesh["tp"]
    i, j = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    rows = SHAPE[0]

    def mine(whole: Tensor, dim: int, place: int) -> Tensor:
        return whole.narrow(dim, place * SHAPE[dim], SHAPE[dim])

    def by_dtensor(value: Tensor) -> Tensor:
        sharded = DTensor.from_local(value, tp, [Shard(1)])
        whole = sharded.redistribute(placements=[Replicate()])
        again = whole.redistribute(placements=[Shard(1)])
        return again.to_local().sin() + whole.to_local().sum()

    def for_some(value: Tensor) -> Tensor:
        whole = gathered(value, 0, tp)
        return torch.sin(mine(whole, 0, j)) * whole.sum()

    def two_steps(value: Tensor) -> Tensor:
        whole = gathered(gathered(value, 0, dp), 1, tp)
        return torch.cos(mine(mine(whole, 0, i), 1, j))

    return {
        "rows": (lambda value: torch.sin(mine(gathered(value, 0, tp), 0, j)), 0),
        "columns": (lambda value: torch.sin(mine(gathered(value, 1, tp), 1, j)) + 1, 0),
        "a piece": (lambda value: torch.sin(gathered(value, 1, tp).chunk(tp.size(), 1)[j]), 0),
        "turned": (lambda value: torch.sin(gathered(value, 0, dp).t()[:, i * rows : (i + 1) * rows]), 0),
        "viewed": (lambda value: torch.sin(gathered(value, 0, dp).view(-1, 3).chunk(dp.size())[i]), 0),
        "the outer one": (lambda value: torch.sin(gathered(gathered(value, 0, dp), 0, tp).chunk(tp.size())[j]), 1),
        "both": (two_steps, 0),
        "one after the other": (lambda value: mine(gathered(mine(gathered(value, 0, tp), 0, j), 1, dp), 1, i).sin(), 0),
        "for some": (for_some, 1),
        "DTensor": (by_dtensor, 1),
    }


def left_alone(mesh: DeviceMesh) -> dict[str, Callable[[Tensor], Tensor]]:
    tp, j = mesh["tp"], mesh.get_local_rank("tp")
    size = tp.size()
    return {
        "of the neighbour": lambda value: torch.sin(gathered(value, 0, tp).chunk(size)[(j + 1) % size]),
        "within the shards": lambda value: torch.sin(gathered(value, 0, tp)[:, :3]),
        "two shards": lambda value: torch.sin(gathered(value, 0, tp).chunk(size // 2)[j // 2]),
        "written": lambda value: torch.sin(gathered(value, 0, tp).chunk(size)[j].add_(1)),
        "returned": lambda value: gathered(value, 0, tp).chunk(size)[j],
        "computed": lambda value: (gathered(value, 0, tp) * 2).chunk(size)[j].sin(),
    }


def check_round_trips(rank: int, *shape: int) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    value = own_value(rank)
    for name, (function, gathers) in round_trips(mesh).items():
        gm = traced(function, value)
        policylang.apply(gm, COLLAPSE)
        gm.graph.lint()
        assert count(gm, ALL_GATHER) == gathers, (name, gm.code)
        found, expected = gm(value), function(value)
        assert torch.equal(found, expected), name
        assert found.stride() == expected.stride(), name
    for name, function in left_alone(mesh).items():
        gm = traced(function, value)
        before = gm.code
        policylang.apply(gm, policylang.parse("optional collapse round_trips"))
        assert gm.code == before, name


def check_scatters(rank: int, *shape: int) -> None:
    names = ("a", "b", "c")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    world = dist.get_world_size()
    for order in (names, names[::-1]):
        for dtype in (torch.float32, torch.int64):
            generator = torch.Generator().manual_seed(rank)
            value = torch.randn(2 * world, 3, generator=generator)
            value = value if dtype is torch.float32 else (value * 1000).to(dtype)
            function = partial(scattered_over, [mesh[name] for name in order])
            gm = traced(function, value)
            policylang.apply(gm, FUSE)
            assert count(gm, REDUCE_SCATTER) == 1
            found, expected = gm(value), function(value)
            if dtype is torch.int64:
                assert torch.equal(found, expected), "sums of integers are exact"
            else:
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            assert "not bitwise" in str(policylang.report(gm))


def accidents(mesh: DeviceMesh) -> dict[str, Callable[[Tensor], Tensor]]:
    """Parts that are this rank's own on some ranks only: left on all of them."""
    dp, tp = mesh["dp"], mesh["tp"]
    names = mesh.mesh_dim_names or ()
    i, j = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")

    def resharded(value: Tensor) -> Tensor:
        """``Shard`` on tp to ``Shard`` on dp: gathered over the one, cut at the place in the other."""
        placements = [[Replicate() for _ in names] for _ in range(2)]
        placements[0][names.index("tp")] = placements[1][names.index("dp")] = Shard(0)
        sharded = DTensor.from_local(value, mesh, placements[0])
        return sharded.redistribute(placements=placements[1]).to_local().sin()

    return {
        "the first part": lambda value: torch.sin(gathered(value, 0, tp)[: SHAPE[0]]),
        "DTensor": resharded,
        "over tp, at the place in dp": lambda value: torch.sin(gathered(value, 0, tp).chunk(tp.size())[i]),
        "over dp, at the place in tp": lambda value: torch.sin(gathered(value, 1, dp).chunk(dp.size(), 1)[j]),
    }


def check_accidents(rank: int, *shape: int) -> list[str]:
    """Every rank goes on with the graph that it had, and says why."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "cp")[: len(shape)])
    said = []
    for name, function in accidents(mesh).items():
        value = own_value(rank)
        gm = traced(function, value)
        before = gm.code
        policylang.apply(gm, policylang.parse("optional collapse round_trips"), mesh)
        assert gm.code == before, name
        assert torch.equal(gm(value), function(value)), name
        said += [line for line in str(policylang.report(gm)).splitlines() if "left: " in line]
    return said


def check_compiled(rank: int) -> dict[str, list[int]]:
    """How many rewrites each graph of a compiled function has, by where a rank cuts; two ranks see a second shape."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for name, place in (("own", mesh.get_local_rank("tp")), ("other", mesh.get_local_rank("dp"))):

        def function(value: Tensor, place: int = place) -> Tensor:
            part = functional.all_gather_tensor_autograd(value.sin(), 0, mesh["tp"]).chunk(2)[place]
            return torch.sin(part) * torch.cos(part)

        torch._dynamo.reset()
        policy = policylang.parse("undecided -> save\noptional collapse round_trips")
        backend = policylang.backend(policy, inner="aot_eager")
        compiled = torch.compile(function, backend=backend, dynamic=False)
        for rows in (4, 6) if rank < 2 else (4,):  # ranks 0 and 1 share the group; the others see no second shape
            value = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rank))
            one, other = (value.clone().requires_grad_() for _ in range(2))
            results = [step(each) for step, each in ((function, one), (compiled, other))]
            for result in results:
                result.sum().backward()
            assert torch.equal(*results)
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
        report = policylang.report(backend)
        found[name] = [sum(each.done for each in graph.rewrites) for graph in report.graphs or (report,)]
    return found


def four(rank: int) -> None:
    check_round_trips(rank, 2, 2)
    check_scatters(rank, 2, 2)


def accidents_of_four(rank: int) -> tuple[list[str], dict[str, list[int]]]:
    return check_accidents(rank, 2, 2), check_compiled(rank)


def accidents_of_eight(rank: int) -> list[str]:
    return check_accidents(rank, 2, 2, 2)


def eight(rank: int) -> None:
    check_round_trips(rank, 2, 4)
    check_round_trips(rank, 4, 2)
    check_scatters(rank, 2, 4)
    check_scatters(rank, 2, 2, 2)


@pytest.mark.slow
@needs_groups_in_any_order
def test_four_ranks() -> None:
    run_ranks(four, 4)


@pytest.mark.slow
@needs_groups_in_any_order
def test_eight_ranks() -> None:
    run_ranks(eight, 8)


def test_what_is_own_on_some_ranks_only_is_left_on_all_four() -> None:
    every = run_ranks(accidents_of_four, 4)
    for rank, (said, rewritten) in enumerate(every):
        assert len(said) == 4
        elsewhere = "(not on ranks 1, 2)" if rank in (0, 3) else ""
        for line in said[1:]:
            assert (f"not every rank's own part {elsewhere} of" in line) == bool(elsewhere), line
            assert ("not this rank's own part of" in line) != bool(elsewhere), line
        assert rewritten["other"] == [0] * (1 + (rank < 2))
        assert all(count > 0 for count in rewritten["own"])


@pytest.mark.slow
def test_what_is_own_on_some_ranks_only_is_left_on_all_eight() -> None:
    for said in run_ranks(accidents_of_eight, 8):
        assert all("own part" in line for line in said)
        assert len(said) == 4
