"""Models that compile to more or fewer graphs than one, and policies under an active ``FakeTensorMode``."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import policylang
from policylang import PolicyGraphError, PolicyMatchError, PolicyWarning
from policylang.backends.applied_plans import CompiledGraph
from policylang.backends.torch_compile.backend import _warn_of_policies_never_applied, graph_uses_of
from policylang.graph.collect import collect
from tests.support import models
from tests.support.compiled import (
    WITHOUT,
    assert_bitwise_equal,
    assert_same_as_without,
    backend_for,
    fresh_dynamo,
    train,
)
from tests.support.models import Example, Function, llama, mlp, square_loss
from tests.support.sharded import ALL_GATHER, WIDTH, Meshed, fake_ranks
from tests.support.versions import needs_groups_in_any_order

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def graphs_of(subject: object) -> tuple[CompiledGraph, ...]:
    return tuple(use.graph for use in graph_uses_of(subject) or ())


def broken() -> Example:
    """What one graph has, the other lacks."""
    torch.manual_seed(0)
    model = models.broken(project=nn.Linear(8, 8, bias=False), convolve=nn.Conv1d(4, 4, 3))
    return Example(model, (torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),), square_loss)


def test_a_rule_may_match_in_either_graph_of_a_broken_model_and_its_report_has_both() -> None:
    backend = backend_for("save mm; save aten.convolution; undecided -> recompute")
    assert_same_as_without(broken, backend, steps=1)
    report = policylang.report(backend)
    assert [[rule.matched for rule in graph.rules] for graph in report.graphs] == [[1, 0], [0, 1]]
    assert [rule.matched for rule in report.rules] == [1, 1]
    assert report.saved.bytes == sum(graph.saved.bytes for graph in report.graphs) > 0
    assert {"0/mm", "1/convolution"} <= report.decisions.keys()
    assert "2 graphs" in str(report)


def test_a_rule_that_matches_in_no_graph_fails_the_first_backward() -> None:
    model, inputs, loss_fn = broken()
    backend = backend_for("save mm; save aten.embedding")
    loss = loss_fn(torch.compile(model, backend=backend)(*inputs))
    with pytest.raises(PolicyMatchError) as caught:
        loss.backward()
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "APL301"
    assert diagnostic.message == "`save aten.embedding` matches nothing in any of the 2 graphs of this model"
    assert diagnostic.span.text == "aten.embedding"
    assert "optional save aten.embedding" in diagnostic.help
    first, _, second, _ = diagnostic.details
    assert "graph 0" in first
    assert "project" in first
    assert "graph 1" in second
    assert "convolve" in second
    assert all(parameter.grad is None for parameter in model.parameters())


def test_check_tells_it_before_the_backward_and_every_backward_fails() -> None:
    model, inputs, loss_fn = broken()
    backend = backend_for("save aten.embedding")
    compiled = torch.compile(model, backend=backend)
    compiled(*inputs)
    with pytest.raises(PolicyMatchError, match="matches nothing in any of the 2 graphs"):
        backend.check()
    for _ in range(2):
        with pytest.raises(PolicyMatchError):
            loss_fn(compiled(*inputs)).backward()


def test_reset_forgets_what_was_seen() -> None:
    model, inputs, loss_fn = broken()
    backend = backend_for("save mm; save aten.convolution")
    compiled = torch.compile(model, backend=backend)
    loss_fn(compiled(*inputs)).backward()
    assert len(backend.graphs) == 2
    torch._dynamo.reset()
    assert backend.graphs == ()


def test_blocks_compiled_on_their_own_are_named_by_root() -> None:
    text = "blocks layers.*; recompute everything in block; save matmul in block"
    backend = backend_for(text, root="layers.0")

    def per_block(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            layer.compile(backend=backend)
        return model

    without = train(mlp(), steps=1)
    example = mlp()
    assert_bitwise_equal(train(example, per_block, steps=1), without)
    report = policylang.report(example.module)
    assert len(backend.graphs) == 2  # the first block's input needs no gradient
    assert [graph.blocks for graph in report.graphs] == [1, 1, 1]
    assert all(graph.rules[1].matched for graph in report.graphs)


def test_blocks_compiled_on_their_own_without_root_are_told_of_it() -> None:
    model, inputs, loss_fn = mlp()
    backend = backend_for("blocks layers.*; recompute everything in block")
    for layer in model.layers:
        layer.compile(backend=backend)
    loss = loss_fn(model(*inputs))
    with pytest.raises(PolicyMatchError) as caught:
        loss.backward()
    (blocks,) = caught.value.diagnostics
    (rule,) = blocks.related
    assert blocks.code == "APL302"
    assert 'root="layers.0"' in blocks.help
    assert "`recompute everything in block` matches nothing in any of the 2 graphs of this model" in rule.message


def test_one_backend_per_block_with_its_own_root() -> None:
    example = mlp(layers=3)
    text = "blocks layers.*; recompute everything in block; optional save matmul in blocks 0..0"

    def per_block(model: nn.Module) -> nn.Module:
        for number, layer in enumerate(model.layers):
            layer.compile(backend=backend_for(text, root=f"layers.{number}"))
        return model

    assert_bitwise_equal(train(example, per_block, steps=1), train(mlp(layers=3), steps=1))


def test_more_roots_than_dynamo_compiles_are_warned_of() -> None:
    limit = torch._dynamo.config.recompile_limit
    text = "save everything in layers.*"
    backends = [backend_for(text, root=f"layers.{number}") for number in range(limit)]
    with pytest.warns(PolicyWarning, match=f"{limit + 1} backends differ in `root` alone") as caught:
        backends.append(backend_for(text, root=f"layers.{limit}"))
    assert "recompile_limit" in str(caught[0].message)


@pytest.mark.parametrize("dynamic", [True, None])
def test_recompiles_for_other_shapes(dynamic: bool | None) -> None:
    model, (x,), loss_fn = mlp()
    backend = backend_for("recompute everything; save matmul")
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    plain, _, _ = mlp()
    for rows in (4, 6, 9):
        batch = x.repeat(3, 1)[:rows]
        loss_fn(compiled(batch)).backward()
        loss_fn(plain(batch)).backward()
    assert len(backend.graphs) == (1 if dynamic else 2)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Recurrent(nn.Module):
    """Dynamo traces no `nn.LSTM`, and a graph break in a loop makes it run the whole loop as it is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.layers = nn.ModuleList(nn.LSTM(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.inner(layer(x)[0])
        return x


def product() -> nn.Module:
    return Function(lambda model, x: (x @ model.weight).sin(), weight=nn.Parameter(torch.ones(8, 8)))


RUNS_AS_IT_IS = r"Dynamo runs `forward` \(test_compile_graphs.py:\d+\) as it is"


@pytest.mark.parametrize("by_name", [False, True])
def test_where_dynamo_compiles_nothing_that_is_said(by_name: bool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("policylang.backends.torch_compile.backend._never_applied", {})  # those of other tests
    (tmp_path / "mine.apl").write_text("save aten.embedding; expect saved <= 1 B")
    backend = policylang.backend(tmp_path / "mine.apl", inner="aot_eager")
    model = Recurrent(nn.Identity())
    options = {"policy": tmp_path / "mine.apl", "inner": "aot_eager"}
    more = {"backend": "policylang", "options": options} if by_name else {"backend": backend}
    compiled = torch.compile(model, **more)
    compiled(torch.ones(2, 3, 8)).sum().backward()
    checks = [partial(policylang.report, each) for each in (compiled, model, backend)]
    for check in (*checks, backend.check):
        with pytest.raises(PolicyGraphError, match="no graph with gradients was compiled") as caught:
            check()
        (found,) = caught.value.diagnostics
        assert found.code == "APL327"
        assert any(re.match(rf"{RUNS_AS_IT_IS}: .*LSTM", line) for line in found.details)
        assert "run the model" not in (found.help or "")
    with pytest.warns(PolicyWarning, match=rf"compiled under .*`mine`.*: {RUNS_AS_IT_IS}"):
        _warn_of_policies_never_applied()


def test_a_check_of_a_backend_that_compiled_nothing_says_so() -> None:
    with pytest.raises(PolicyGraphError, match="no policy has decided anything here yet"):
        backend_for("save mm").check()


def test_code_that_dynamo_leaves_beside_compiled_graphs_is_in_the_report() -> None:
    backend = backend_for("save mm; save aten.embedding")
    model = Recurrent(product())
    loss = torch.compile(model, backend=backend)(torch.ones(2, 3, 8)).sum()
    with pytest.raises(PolicyMatchError, match=r"save aten\.embedding") as caught:
        loss.backward()
    assert re.match(RUNS_AS_IT_IS, caught.value.diagnostics[0].details[-1])
    for subject in (backend, model):
        (warning,) = policylang.report(subject).warnings
        assert re.match(RUNS_AS_IT_IS, warning)
        assert warning.endswith("(APL425)")


def test_a_limit_on_recompilations_is_in_the_report() -> None:
    model = product()
    compiled = torch.compile(model, backend=backend_for("save mm"), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for rows in (2, 3):
            compiled(torch.ones(rows, 8)).sum().backward()
    (warning,) = policylang.report(compiled).warnings
    runs = RUNS_AS_IT_IS.replace("test_compile_graphs", "models")
    assert re.match(f"{runs}, and follows no policy: .*recompile.limit", warning)


@pytest.mark.parametrize("why", ["inference", "frozen parameters", "an output without gradient"])
def test_a_graph_without_gradients_decides_nothing(why: str) -> None:
    model, inputs, _ = mlp()
    model.requires_grad_(why != "frozen parameters")
    backend = backend_for("save aten.embedding")
    run = model if why != "an output without gradient" else lambda x: model(x).argmax()
    compiled = torch.compile(run, backend=backend)
    with torch.set_grad_enabled(why != "inference"):
        for _ in range(2):
            compiled(*inputs)
    backend.check()
    assert [(graph.kind, graph.reports) for graph in backend.graphs] == [("inference", ())]


def test_two_models_on_one_backend_are_told_apart_in_reports() -> None:
    backend = backend_for("recompute everything; save matmul")
    first, second = mlp(layers=1), mlp(layers=2)
    for model, inputs, loss_fn in (first, second):
        loss_fn(torch.compile(model, backend=backend)(*inputs)).backward()
    assert len(backend.graphs) == 2
    assert graphs_of(first.module) == backend.graphs[:1]
    assert graphs_of(second.module) == backend.graphs[1:]
    assert policylang.report(first.module).rules[1].matched < policylang.report(second.module).rules[1].matched


def test_a_model_that_is_compiled_again_is_reported_under_its_later_policy() -> None:
    module, inputs, loss_fn = mlp(layers=2)
    earlier, later = backend_for("recompute everything; save matmul"), backend_for("save everything")
    compiled = [torch.compile(module, backend=backend) for backend in (earlier, later)]
    for run in compiled:
        loss_fn(run(*inputs)).backward()
    assert graphs_of(module) == later.graphs
    assert graphs_of(compiled[0]) == earlier.graphs
    assert [len(policylang.report(subject).rules) for subject in (module, *compiled)] == [1, 2, 1]


def test_parts_of_a_model_may_follow_different_policies() -> None:
    module, inputs, loss_fn = mlp(layers=2)
    texts = ("recompute everything; save matmul", "save everything")
    backends = [backend_for(text) for text in texts]
    for layer, backend in zip(module.layers, backends, strict=True):
        layer.compile(backend=backend)
    loss_fn(module(*inputs)).backward()
    report = policylang.report(module)
    assert [rule.text for rule in report.rules] == ["recompute everything", "save matmul", "save everything"]
    assert report.audit.agrees


class Sum(nn.Module):
    """Reads the tensors of another module: its graphs are called with none of its own parameters."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [parameter * 1.0 for parameter in other.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() + sum(tensor.sin().sum() for tensor in self.others)


def test_a_graph_that_is_called_with_no_parameter_is_found_by_its_backend() -> None:
    backend = backend_for("save aten.sin")
    compiled = torch.compile(Sum(nn.Linear(2, 2)), backend=backend)
    compiled(torch.ones(2)).backward()
    assert graphs_of(compiled) == backend.graphs
    assert policylang.report(compiled).rules[0].matched == 2


def test_autocast() -> None:
    def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.inner(x)

    def example() -> Example:
        return mlp()._replace(module=Function(under_autocast, inner=mlp().module))

    assert_same_as_without(example, backend_for("recompute everything; save matmul"), steps=1)


def test_a_batch_norm_may_run_twice_before_the_backward() -> None:
    """The second forward writes the running statistics, which the recomputation of the first is given and not read."""

    def trained(backend: Any) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU())
        x = torch.randn(4, 8)
        step = torch.compile(model, backend=backend)
        (step(x).sum() + step(2 * x).square().sum()).backward()
        return [*(each.grad for each in model.parameters()), *model.buffers()]

    backend = backend_for("recompute everything")
    assert all(map(torch.equal, trained(WITHOUT), trained(backend)))


@pytest.mark.slow
@pytest.mark.parametrize("model", [mlp, pytest.param(partial(llama, layers=1), id="llama")])
def test_a_whole_training_step_of_inductor(model: Callable[[], Example]) -> None:
    """Inductor fuses a recomputed operator into other kernels than a saved one, and may round otherwise there; for the
    float32 kernels of these models it does not. Fast, `test_offload_joint.py` compares products."""
    backend = backend_for("recompute everything; optional save matmul or attention", "inductor")
    without = train(model(), torch.compile)
    assert_bitwise_equal(train(model(), lambda module: torch.compile(module, backend=backend)), without)
    assert policylang.report(backend).audit.agrees


FUSE = "fuse all_gather chains over dp, tp"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_ranks(4, rank=1):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def model(mesh: DeviceMesh) -> Meshed:
    return Meshed(mesh, (0, 1), linear=True)


def gathered_twice(mesh: DeviceMesh, mode: FakeTensorMode) -> fx.GraphModule:
    layer = model(mesh).layers[0]
    with mode:
        return make_fx(lambda x: layer(x) + 1)(torch.empty(2, WIDTH))


def gathers(gm: fx.GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=ALL_GATHER))


Way = Callable[[fx.GraphModule, DeviceMesh], object]
WAYS: dict[str, Way] = {
    "apply": lambda gm, mesh: policylang.apply(gm, policylang.parse(FUSE), mesh),
    "pass on a module": lambda gm, mesh: policylang.pass_(policylang.parse(FUSE), mesh=mesh)(gm),
    "pass on a graph": lambda gm, mesh: policylang.pass_(policylang.parse(FUSE), mesh=mesh)(gm.graph),
}


@needs_groups_in_any_order
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("same", [True, False], ids=["the graph's own mode", "another mode"])
def test_a_mesh_is_read_under_a_fake_mode(mesh: DeviceMesh, way: str, same: bool) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    gm = gathered_twice(mesh, mode)
    assert gathers(gm) == 2
    with mode if same else FakeTensorMode():
        WAYS[way](gm, mesh)
        facts = collect(gm, mesh=mesh)
    assert gathers(gm) == 1
    assert [(found.dims, found.shape, found.ranks) for found in facts.meshes] == [(("dp", "tp"), (2, 2), (0, 1, 2, 3))]


def partition_with(gm: fx.GraphModule, joint_inputs: object, **options: object) -> tuple[fx.GraphModule, ...]:
    with FakeTensorMode():
        policy = policylang.parse(f"undecided -> save\n{FUSE.removesuffix(' over dp, tp')}")
        return policylang.partition(gm, joint_inputs, policy=policy, **options)


@needs_groups_in_any_order
def test_a_joint_graph_is_partitioned_under_a_fake_mode(mesh: DeviceMesh) -> None:
    layer = model(mesh).layers[0]

    def loss(shard: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"shard": shard}, (x,))

    run = aot_function(loss, nop, partition_fn=partition_with)
    shard = layer.shard.detach().clone().requires_grad_()
    run(shard, torch.ones(2, WIDTH)).sum().backward()
    assert shard.grad is not None
    assert type(shard.grad) is Tensor


@needs_groups_in_any_order
def test_a_compiled_model_runs_on_a_mesh_under_a_fake_mode(mesh: DeviceMesh) -> None:
    backend = backend_for("undecided -> save\nfuse all_gather chains")

    def under_a_mode(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with detect_fake_mode(inputs) or FakeTensorMode():
            return backend(gm, inputs)

    with fresh_dynamo():
        torch.compile(model(mesh), backend=under_a_mode)(torch.ones(2, WIDTH)).sum().backward()
    assert sum(each.done for each in policylang.report(backend).rewrites) == 2
