"""Steps of sharded models, with DTensors: traced, compiled, cut in two, compiled again, under policies that fuse."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import policylang
from policylang import TracedStep, trace_step
from policylang.audit.report import Report
from policylang.backends.applied_plans import last_audited
from policylang.backends.joint import Partition, partitions
from tests.support.compiled import backend_for, fresh_dynamo
from tests.support.edited import assert_facts_hold
from tests.support.flat_graphs import assert_bitwise_equal
from tests.support.lines import Layers, device_mesh, gathers, placements_of, scatters
from tests.support.ranks import run_ranks
from tests.support.sharded import fake_ranks, shard_parameters, sharded_stack
from tests.support.twice import Once, partitioned_once
from tests.support.versions import needs_groups_in_any_order
from tests.tracing.test_against_eager import eager_step, mean_square, net, twin

pytestmark = pytest.mark.usefixtures("nothing_compiled")


GATHERS = "undecided -> save\nfuse all_gather chains\n"
BOTH = GATHERS + "fuse reduce_scatter chains\n"
RESHARD = BOTH + "must_recompute chain through all_gather where from parameter\n"
SCHEDULED = "bucket all_gather up to 1 MiB\nexpect saved <= 1 GiB\n"
LAYERS = 2


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()


def batch(rank: int) -> Tensor:
    return torch.randint(-2, 3, (4, 16), generator=torch.Generator().manual_seed(rank)).float()


def locals_of(model: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    return [gradient.to_local() for gradient in gradients if gradient is not None]  # type: ignore[attr-defined]


def check_traced(rank: int, model: Layers, text: str, expected: tuple[int, int], loss: Tensor, ours: Any) -> None:
    """``expected``: gathers and scatters that are left."""
    x = batch(rank)
    step = policylang.trace_step(model, loss_of, x)
    step.apply(policylang.parse(text), mesh=model.mesh)
    step.gm.graph.lint()
    found = len(gathers(step.gm)), len(scatters(step.gm))
    assert found == expected, (model.mesh.shape, next(iter(model.parameters())).placements, *step.report.rewrites)
    found_loss, gradients = step(x)
    assert torch.equal(found_loss, loss)
    for one, other in zip(gradients.values(), ours, strict=True):
        assert torch.equal(one.to_local(), other), text  # type: ignore[attr-defined]
    assert other.abs().sum() > 0


def check_compiled(rank: int, model: Layers, text: str, expected: tuple[int, int], loss: Tensor, ours: Any) -> None:
    """``expected``: gathers and scatters that are left in the backward; the forward has one gather a weight."""
    torch._dynamo.reset()
    model.zero_grad()
    backend = backend_for(text)
    compiled = torch.compile(model, backend=backend)
    more = torch.cat((batch(rank), batch(rank)))
    with partitions() as done, torch.no_grad():
        expected_more = model(more)
        assert torch.equal(compiled(more), expected_more)
    (alone,) = done
    assert sum(row.startswith("_c10d_functional.all_gather") for row in alone.applied.plan.facts.targets) == LAYERS
    with partitions() as done:
        found = compiled(batch(rank)).sum()
        found.backward()
    (partition,) = done
    assert isinstance(partition, Partition)
    assert len(gathers(partition.forward)) == LAYERS
    assert (len(gathers(partition.backward)), len(scatters(partition.backward))) == expected
    assert_bitwise_equal([found, *locals_of(model)], [loss, *ours])
    assert len(policylang.report(backend).rewrites) > 0


def steps(rank: int, *shapes: tuple[int, ...]) -> None:
    warnings.simplefilter("ignore")  # DTensor advises to flatten the mesh
    for shape in shapes:
        mesh = device_mesh(*shape)
        for kind in ("one", "both"):
            model = Layers(mesh, placements_of(len(shape), kind))
            loss = loss_of(model, batch(rank))
            loss.backward()
            ours = [gradient.clone() for gradient in locals_of(model)]
            loss = loss.detach()
            many = LAYERS * len(shape)
            left = LAYERS if kind == "one" else 2 * LAYERS  # one scatter for each dimension that is cut
            check_traced(rank, model, GATHERS, (LAYERS, many), loss, ours)
            check_traced(rank, model, RESHARD, (2 * LAYERS - 1, left), loss, ours)
            check_compiled(rank, model, RESHARD, (LAYERS - 1, left), loss, ours)


def sums_in_another_order(rank: int) -> None:
    """Not bitwise where the numbers are not whole: close, and the report says so."""
    warnings.simplefilter("ignore")
    mesh = device_mesh(2, 2)
    model = Layers(mesh, placements_of(2, "one"))
    with torch.no_grad():
        for parameter in model.parameters():
            shard = parameter.to_local()  # type: ignore[attr-defined]
            shard += 0.1 * torch.randn(shard.shape, generator=torch.Generator().manual_seed(1))
    x = batch(rank) + 0.3
    loss_of(model, x).backward()
    step = policylang.trace_step(model, loss_of, x)
    step.apply(policylang.parse(BOTH), mesh=mesh)
    assert len(scatters(step.gm)) == LAYERS
    _, gradients = step(x)
    for one, other in zip(gradients.values(), locals_of(model), strict=True):
        torch.testing.assert_close(one.to_local(), other)  # type: ignore[attr-defined]
    said = "\n".join(map(str, step.report.rewrites)) + "\n".join(step.report.notes)
    assert "round" in said, said


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(_four, 4)


@pytest.mark.slow
def test_eight_ranks() -> None:
    run_ranks(steps, 8, (2, 4), (2, 2, 2))


def _four(rank: int) -> None:
    steps(rank, (2, 2))
    sums_in_another_order(rank)


# --- pretended ranks ------------------------------------------------------------------------------------------------
class Gathered(nn.Module):
    """Weights that functional collectives gather over two mesh dimensions."""

    def __init__(self, mesh: DeviceMesh, layers: int = 3) -> None:
        super().__init__()
        self.mesh = mesh
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(2, 256)) for _ in range(layers))

    def whole(self, weight: Tensor) -> Tensor:
        half = funcol.all_gather_tensor_autograd(weight, 0, (self.mesh, 0))
        return funcol.all_gather_tensor_autograd(half, 0, (self.mesh, 1))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ self.whole(weight)).relu()
        return x


class ReadTwice(Gathered):
    """The forward also returns something of what the first gather gives, which the backward does not read."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for weight in self.weights:
            half = funcol.all_gather_tensor_autograd(weight, 0, (self.mesh, 0))
            whole = funcol.all_gather_tensor_autograd(half, 0, (self.mesh, 1))
            x = (x @ whole).relu()
            total = total + half.sum()
        return x + total


@pytest.fixture
def many() -> Iterator[DeviceMesh]:
    with fake_ranks(128):
        yield device_mesh(16, 8)


def split(model: nn.Module, x: Tensor, text: str) -> Once:
    def step(backend: Callable[..., Any]) -> None:
        torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()

    return partitioned_once(step, text)


@needs_groups_in_any_order
def test_the_second_of_two_compilations_gathers_as_often_as_the_first(many: DeviceMesh) -> None:
    """And neither gathers twice what one gather brings."""
    model = Gathered(many)
    policy = "recompute everything\nsave mm\nfuse all_gather chains\nfuse reduce_scatter chains\n"
    first, count, arguments = split(model, torch.randn(4, 256), policy)
    assert (len(gathers(first.forward)), len(gathers(first.backward)), len(scatters(first.backward))) == (3, 2, 3)
    module = policylang.recompilable(first.forward, num_fwd_outputs=count)
    with partitions() as done:
        compiled = torch.compile(module, backend=policylang.backend("replay", inner="aot_eager"), fullgraph=True)
        compiled(*arguments)[0].sum().backward()
    (second,) = done
    assert len(gathers(second.forward)) == len(gathers(first.forward))
    assert len(gathers(second.backward)) == len(gathers(first.backward))
    assert len(scatters(second.backward)) == len(scatters(first.backward))
    assert len(second.audit.saved) == len(first.audit.saved)


@needs_groups_in_any_order
def test_a_chain_that_only_the_backward_can_fuse_is_fused_there(many: DeviceMesh) -> None:
    first, _, _ = split(ReadTwice(many), torch.randn(4, 256), "recompute everything\nsave mm\nfuse all_gather chains\n")
    assert len(gathers(first.forward)) == 6
    assert len(gathers(first.backward)) == 2, "of the two weights that the backward reads, one gather each"
    reasons = [refused.reason for refused in first.plan.edits.refused]
    assert len(reasons) == 3
    assert all("sum" in reason for reason in reasons)
    report = policylang.report(first.backward)
    assert [(rewrite.half, rewrite.done) for rewrite in report.rewrites] == [("", 0), ("backward", 2)]
    assert not report.warnings, "the line did something in the end"


@needs_groups_in_any_order
def test_a_joint_graph_is_rewritten_first_and_tagged_then(many: DeviceMesh) -> None:
    """What ``apply`` leaves is what its plan says, and ``partition`` goes on from there."""
    from tests.support.joint import capture_joint

    joint = capture_joint(Gathered(many), (torch.randn(4, 256),))
    policylang.apply(joint.gm, policylang.parse("recompute everything\nsave mm\nfuse all_gather chains\n"))
    assert len(gathers(joint.gm)) == 3
    for node in gathers(joint.gm):
        assert node.meta["recompute"].name == "PREFER_RECOMPUTE"
        assert node.meta["custom"]["policylang"].endswith(":1")
        assert node.meta["custom"]["policylang_rewritten"].endswith(":3")
    forward, backward = policylang.partition(joint.gm, joint.joint_inputs, num_fwd_outputs=joint.num_fwd_outputs)
    assert (len(gathers(forward)), len(gathers(backward))) == (3, 2)


@needs_groups_in_any_order
def test_of_a_half_the_rewrites_are_carried_out_and_the_rest_is_said(many: DeviceMesh) -> None:
    whole, _, _ = split(Gathered(many), torch.randn(4, 256), "recompute everything\nsave mm\n")
    backward = copy.deepcopy(whole.backward)
    assert len(gathers(backward)) == 4
    policylang.apply(backward, policylang.parse("save everything\nfuse all_gather chains\n"))
    assert len(gathers(backward)) == 2
    (note,) = policylang.report(backward).notes
    assert "1 line decides nothing here: a backward graph of a partition has its saved values decided already" in note
    with pytest.raises(policylang.PolicyGraphError, match="no line that acts on one"):
        policylang.apply(whole.forward, policylang.parse("save everything"))


@needs_groups_in_any_order
def test_the_facts_of_a_rewritten_joint_graph_are_those_that_were_planned(many: DeviceMesh) -> None:
    from policylang.backends.applied_plans import plan_of
    from tests.support.joint import capture_joint

    joint = capture_joint(Gathered(many), (torch.randn(4, 256),))
    policylang.apply(joint.gm, policylang.parse(BOTH + "save everything\n"))
    plan = plan_of(joint.gm)
    assert plan.edits.done
    assert_facts_hold(joint.gm, plan)
    assert last_audited(joint.gm) is None


@pytest.mark.slow
@needs_groups_in_any_order
def test_a_compiled_graph_without_gradients_is_rewritten_too(many: DeviceMesh, tmp_path: Path) -> None:
    """Nothing is decided about its values, and none of its lines has to find something."""
    text = f"{GATHERS}recompute relu\noptional fuse reduce_scatter chains\n{SCHEDULED}"
    model = Gathered(many)
    with partitions() as done:
        backend = backend_for(text)
        compiled = torch.compile(model, backend=backend)
        with torch.no_grad():
            compiled(torch.ones(2, 256))
        backend.check()
        evaluated = policylang.report(backend)
        assert str(evaluated).startswith("policy policy: graph without gradients, 9 operators\n")
        assert [each.done for each in evaluated.rewrites] == [3, 0]
        (note,) = evaluated.notes
        assert note.startswith("<policy>:3: 3 lines say nothing here: no gradient is computed through this graph")
        with pytest.raises(policylang.PolicyError, match="no graph was planned yet"):
            policylang.snapshot(backend, tmp_path / "a.graph")
        compiled(torch.ones(2, 256)).sum().backward()
    assert [graph.kind for graph in backend.graphs] == ["inference", "training"]
    report = policylang.report(backend)
    assert [graph.half for graph in report.graphs] == ["inference", ""]
    assert report.audit.agrees
    assert policylang.snapshot(backend, tmp_path / "a.graph") == (tmp_path / "a.graph",)
    assert len(done) == 2


WEIGHTS = 2 * LAYERS


@pytest.fixture
def four_ranks() -> Iterator[None]:
    with fake_ranks(4):
        yield


def trained(text: str) -> tuple[nn.Module, Report]:
    model = sharded_stack(4, LAYERS, width=8)
    with fresh_dynamo():
        compiled = torch.compile(model, backend=backend_for(text))
        compiled(torch.ones(4, 8)).sum().backward()
        return model, policylang.report(compiled)


@pytest.mark.usefixtures("four_ranks")
def test_a_gradient_is_a_dtensor_on_the_mesh_of_its_parameter() -> None:
    """The backward returns the mesh, an input of the forward, with every gradient."""
    model, report = trained("save everything")
    assert report.audit.agrees
    for parameter in model.parameters():
        assert parameter.grad.device_mesh == parameter.device_mesh  # type: ignore[attr-defined]
        assert parameter.grad.placements == parameter.placements  # type: ignore[attr-defined]


@pytest.mark.usefixtures("four_ranks")
def test_the_shard_that_a_gather_starts_from_is_known_as_the_parameter() -> None:
    _, report = trained(
        "save everything; must_recompute chain through all_gather where from parameter\n"
        f"expect exactly {WEIGHTS} (all_gather where from parameter) per graph\n"
    )
    assert len([name for name in report.recomputed.names if name.startswith("all_gather")]) == WEIGHTS - 1
    assert not [name for name in report.saved.names if "gather" in name or "wait" in name]


RANKS = 2
c10d = torch.ops._c10d_functional


def count(step: TracedStep, target: Any) -> int:
    return sum(node.target is target for node in step.gm.graph.nodes)


def check_training(rank: int) -> None:
    model, x = net()
    x = x + rank
    model = shard_parameters(model, RANKS)
    other = twin(model)
    step = trace_step(model, mean_square, x)
    assert count(step, c10d.all_gather_into_tensor.default) == 4
    assert count(step, c10d.reduce_scatter_tensor.default) == 4
    for _ in range(2):
        loss, gradients = step(x)
        eager_loss, eager_gradients = eager_step(other, mean_square, x)
        torch.testing.assert_close(loss, eager_loss)
        assert gradients.keys() == eager_gradients.keys()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert gradients[name].placements == eager_gradients[name].placements == (Shard(0),)
                torch.testing.assert_close(gradients[name].to_local(), eager_gradients[name].to_local())
                parameter.sub_(gradients[name], alpha=0.1)
            for name, parameter in other.named_parameters():
                parameter.sub_(eager_gradients[name], alpha=0.1)


def check_reshard_after_forward(rank: int) -> None:
    model, x = net()
    model = shard_parameters(model, RANKS)
    step = trace_step(model, mean_square, x + rank)
    loss, gradients = step(x + rank)
    step.apply(policylang.parse("undecided -> save; must_recompute chain through all_gather where from parameter"))
    assert count(step, c10d.all_gather_into_tensor.default) == 5, "the second weight is gathered again, nothing else"
    again, gradients_again = step(x + rank)
    assert torch.equal(again, loss)
    for name, gradient in gradients.items():
        assert torch.equal(gradients_again[name].to_local(), gradient.to_local()), name


def check_optimizer(rank: int) -> None:
    model, x = net()
    model = shard_parameters(model, RANKS)
    other = twin(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, other)]
    for each, optimizer in zip((model, other), optimizers, strict=True):
        eager_step(each, mean_square, x + rank)
        optimizer.step()
    step = trace_step(model, mean_square, x + rank, optimizer=optimizers[0])
    step(x + rank)
    eager_step(other, mean_square, x + rank)
    optimizers[1].step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.to_local(), two.to_local())


def check_all(rank: int) -> None:
    check_training(rank)
    check_reshard_after_forward(rank)
    check_optimizer(rank)


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(check_all, RANKS)
