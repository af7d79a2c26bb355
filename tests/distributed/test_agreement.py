"""Ranks that share a graph agree on a plan and settle what they rewrite, or say where they differ; none hangs."""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import policylang
from policylang import TracedStep, trace_step
from policylang.backends import joint
from policylang.errors import PolicyAuditError
from tests.support.compiled import backend_for
from tests.support.ranks import run_ranks
from tests.support.sharded import WIDTH, Meshed
from tests.support.versions import needs_cached_collectives, needs_groups_in_any_order, needs_traced_meshes

SAVE = "save mm\nundecided -> save\n"
RECOMPUTE = "save mm\nrecompute every 2nd mm per graph\nundecided -> save\n"
BATCH = torch.ones(2, WIDTH)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def traced(mesh: DeviceMesh, dims: tuple[int, ...] = (0, 1), layers: int = 2) -> TracedStep:
    return trace_step(Meshed(mesh, dims, layers), loss, BATCH)


def said(call: Callable[[], Any]) -> str:
    """What a rank is told: the class of the error and its text; empty where all is well."""
    try:
        call()
    except policylang.PolicyError as error:
        return f"{type(error).__name__}\n{error}"
    return ""


def whole(size: int) -> DeviceMesh:
    """The smallest mesh with two dimensions."""
    return init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))


# --- stages ---------------------------------------------------------------------------------------------------------
def in_two_stages(rank: int, odd: int, given: bool) -> str:
    """Two stages of two ranks, of other layers and under other lines; one rank may have another policy."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = rank // 2
    text = "schedule 1f1b into 2 stages of 4 microbatches; undecided -> save; recompute mm in last stage"
    policy = policylang.parse(f"{text}; recompute mm" if rank == odd else text, stage=stage)
    step = traced(mesh, dims=(1,), layers=2 + stage)
    return said(lambda: policylang.apply(step.gm, policy, **({"mesh": mesh} if given else {})))


@pytest.mark.slow
@needs_groups_in_any_order
@pytest.mark.parametrize("given", [False, True], ids=["groups", "mesh"])
def test_ranks_of_a_stage_are_compared_and_stages_are_not(given: bool) -> None:
    first, second, *last = run_ranks(in_two_stages, 4, 1, given)
    assert last == ["", ""]
    for found in (first, second):
        assert found.startswith("PolicyDivergenceError\nerror[APL601]: ranks decided differently about `mm")
        assert "rank 1 recomputes it" in found


# --- under torch.compile --------------------------------------------------------------------------------------------
def compiled(rank: int, folder: str) -> dict[str, Any]:
    """One rank finds the graph in its caches, and the other partitions it."""
    mesh = whole(2)
    found: dict[str, Any] = {}

    def run(name: str, policy: str, cache: str, batch: int = 2, **options: Any) -> None:
        torch._dynamo.reset()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{cache}"
        backend = policylang.backend(policylang.parse(policy), **options)
        model = Meshed(mesh, (1,), layers=3, linear=True)
        step = torch.compile(model, backend=backend)
        found[name] = said(lambda: step(torch.ones(batch, WIDTH)).sum().backward())
        found[f"{name}, cached"] = [graph.from_cache for graph in backend.graphs]
        if not found[name]:
            found[f"{name}, gradient"] = model.layers[0].shard.grad.sum().item()

    run("cold", SAVE, f"{rank}")
    run("warm", SAVE, f"{rank}")
    run("mixed", SAVE, f"{rank} new" if rank else f"{rank}")
    run("mixed, another policy", RECOMPUTE if rank else SAVE, f"{rank}")
    run("not compared", RECOMPUTE if rank else SAVE, f"{rank}", agree=False)
    return found


@pytest.mark.slow
@needs_cached_collectives
def test_a_rank_with_a_warm_cache_compares_with_one_that_partitions(tmp_path: Any) -> None:
    first, second = run_ranks(compiled, 2, str(tmp_path))
    for found in (first, second):
        assert found["cold"] == found["warm"] == found["mixed"] == found["not compared"] == ""
        assert len({found[f"{name}, gradient"] for name in ("cold", "warm", "mixed", "not compared")}) == 1
        assert found["cold, cached"] == [False]
        assert found["warm, cached"] == [True]
        error = found["mixed, another policy"]
        assert error.startswith("PolicyDivergenceError\nerror[APL601]: ranks decided differently about `mm")
        assert "rank 0 saves it, rank 1 recomputes it" in error
    assert (first["mixed, cached"], second["mixed, cached"]) == ([True], [False])
    assert (first["mixed, another policy, cached"], second["mixed, another policy, cached"]) == ([], [])


COLLAPSE = "undecided -> save\noptional collapse round_trips\n"


class Sharded(nn.Module):
    """A product with this rank's part of what is gathered; with two readers, so that only the halves have round trips.

    ``turned``: by how many places the part is off on every rank but the first.
    """

    def __init__(self, mesh: DeviceMesh, turned: int = 0) -> None:
        super().__init__()
        self.mesh = mesh
        rank = mesh.get_local_rank()
        self.part = (rank + turned) % mesh.size() if rank else 0
        self.shard = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1 + rank))

    def forward(self, x: Tensor) -> Tensor:
        whole = functional.all_gather_tensor_autograd(self.shard, 0, self.mesh)
        return x @ whole[self.part * WIDTH : (self.part + 1) * WIDTH].t()


# --- errors ---------------------------------------------------------------------------------------------------------
def flat(mesh: DeviceMesh, place: int | None) -> fx.GraphModule:
    """``None``: nothing is cut."""

    def function(value: Tensor) -> Tensor:
        whole = functional.wait_tensor(functional.all_gather_tensor(value, 0, mesh["tp"]))
        return (whole if place is None else whole[place * 4 : (place + 1) * 4]).sin()

    gm = make_fx(function)(torch.ones(4, 3))
    gm.graph.eliminate_dead_code()
    return gm


def errors(rank: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    odd = rank == 3
    own = mesh.get_local_rank("tp")
    strict = policylang.parse("collapse round_trips")
    found = {
        "no candidate on one": said(lambda: policylang.apply(flat(mesh, 0 if rank < 3 else 1), strict, mesh)),
        "nothing on one": said(lambda: policylang.apply(flat(mesh, None if odd else own), strict, mesh)),
        "another policy on one": said(
            lambda: policylang.apply(flat(mesh, own), policylang.parse("undecided -> save") if odd else strict, mesh)
        ),
        "well again": said(lambda: policylang.apply(flat(mesh, own), strict, mesh)),
    }
    diagnostic = policylang.language.diagnostics.diagnose("APL405", "it came out otherwise", help="none")
    broken = PolicyAuditError([diagnostic])
    rewrite_graph = mock.Mock(side_effect=broken) if rank == 1 else joint.rewrite_graph
    with mock.patch("policylang.backends.joint.rewrite_graph", rewrite_graph):
        compiled = torch.compile(Sharded(mesh["tp"]), backend=backend_for(COLLAPSE))
        if rank < 2:
            found["an error before the halves"] = said(lambda: compiled(torch.ones(2, WIDTH)))
    return found


@needs_traced_meshes
def test_an_error_of_one_rank_stops_all_and_none_hangs() -> None:
    every = run_ranks(errors, 4, timeout=60)
    for rank, found in enumerate(every):
        assert found["no candidate on one"] == ""
        nothing = "PolicyMatchError\nerror[APL31" if rank == 3 else "PolicyDivergenceError\nerror[APL60"
        assert found["nothing on one"].startswith(nothing)
        assert found["another policy on one"].startswith("PolicyGraphError" if rank == 3 else "PolicyDivergenceError")
        assert found["well again"] == ""
    assert every[1]["an error before the halves"].startswith("PolicyAuditError\nerror[APL405]: it came out otherwise")
    stopped = every[0]["an error before the halves"]
    assert stopped.startswith("PolicyDivergenceError\nerror[APL605]: rank 1, which shares this graph, stopped: it came")


# --- caches ---------------------------------------------------------------------------------------------------------
def cached(rank: int, folder: str) -> dict[str, Any]:
    """One rank finds the graph in its caches, and the other partitions it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found: dict[str, Any] = {}

    def run(name: str, cache: str, turned: int = 0) -> None:
        torch._dynamo.reset()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{cache}"
        backend = backend_for(COLLAPSE, "inductor")
        model = Sharded(mesh, turned)
        step = torch.compile(model, backend=backend)
        found[name] = said(lambda: step(torch.ones(2, WIDTH)).sum().backward())
        found[f"{name}, cached"] = [graph.from_cache for graph in backend.graphs]
        if not found[name]:
            found[f"{name}, rewritten"] = sum(each.done for each in policylang.report(backend).rewrites)
            found[f"{name}, gradient"] = model.shard.grad.sum().item()

    run("cold", f"{rank}")
    run("warm", f"{rank}")
    run("mixed", f"{rank}-new" if rank else f"{rank}")
    run("turned", f"{rank}-turned", turned=1)
    run("turned, warm on one", f"{rank}-turned" if rank else f"{rank}-turned-again", turned=1)
    run("warm where others cannot", f"{rank}", turned=1)
    return found


@pytest.mark.slow
@needs_cached_collectives
def test_a_cached_graph_takes_part_with_what_was_settled_when_it_was_made(tmp_path: Any) -> None:
    first, second = run_ranks(cached, 2, str(tmp_path))
    for found in (first, second):
        for name in ("cold", "warm", "mixed"):
            assert found[name] == ""
            assert found[f"{name}, rewritten"] > 0
        assert len({found[f"{name}, gradient"] for name in ("cold", "warm", "mixed")}) == 1
        for name in ("turned", "turned, warm on one"):
            assert found[name] == ""
            assert found[f"{name}, rewritten"] == 0
        assert len({found[f"{name}, gradient"] for name in ("turned", "turned, warm on one")}) == 1
        assert found["warm where others cannot"].startswith("PolicyDivergenceError\nerror[APL60")
    assert (first["mixed, cached"], second["mixed, cached"]) == ([True], [False])
    assert (first["turned, warm on one, cached"], second["turned, warm on one, cached"]) == ([False], [True])
    assert "APL608" in second["warm where others cannot"]
