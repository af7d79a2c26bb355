"""``chunk loss`` on a model that several ranks share: a vocabulary sharded over ranks, and rows."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, loss_parallel, parallelize_module
from torch.nn import functional as F
from torch.profiler import profile

import policylang
from policylang.backends.rewriting import apply_edits
from policylang.errors import PolicyMatchError
from policylang.graph.collect import collect
from policylang.graph.facts import StepKind
from policylang.language.syntax import Action
from policylang.operators.names import WAIT
from policylang.planning.capabilities import FLAT
from policylang.planning.edits.edit_planner import SAME_GRAPH
from policylang.planning.edits.other_ranks import Proposal
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.inspection.worth import slowing_edits
from policylang.planning.planner import plan
from policylang.planning.value_outcome import Why
from tests.support.edited import AllAlike, assert_facts_hold
from tests.support.ranks import run_ranks
from tests.support.sharded import fake_ranks
from tests.support.titan import graph_trainer

CHUNK = policylang.parse("chunk loss into 3")
ROWS, WIDTH = 12, 8
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, vocabulary: int = 40) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Linear(WIDTH, WIDTH).double(), nn.LayerNorm(WIDTH).double()
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(self.stem(x).tanh())


def gathered(x: Tensor) -> Tensor:
    return all_gather_tensor_autograd(x, 0, dist.group.WORLD)


class GatheredBefore(Model):
    """Each rank has some tokens, and all of them at the head."""

    def hidden(self, x: Tensor) -> Tensor:
        return gathered(super().hidden(x))


class GatheredAfter(Model):
    """Each rank has the logits of some tokens, and then of all."""

    def forward(self, x: Tensor) -> Tensor:
        return gathered(super().forward(x))


class SummedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return reduced(gradient.contiguous(), "sum")


def reduced(value: Tensor, how: str) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(value, how, dist.group.WORLD))


class ParallelCrossEntropy(torch.autograd.Function):
    """Of tokens, by hand: the largest logit, the picked one and the sum are reduced over the ranks, and the gradient is
    made where each label's column is."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        width = logits.shape[-1]
        logits = logits - reduced(logits.amax(-1), "max").unsqueeze(-1)
        place = labels - dist.get_rank() * width
        elsewhere = (place < 0) | (place >= width)
        place = place.masked_fill(elsewhere, 0)
        picked = logits[torch.arange(len(place)), place].clone()
        picked[elsewhere] = 0.0
        exps = logits.exp()
        total = reduced(exps.sum(-1), "sum")
        ctx.save_for_backward(exps.div_(total.unsqueeze(-1)), elsewhere, place)
        return total.log() - reduced(picked, "sum")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        softmax, elsewhere, place = ctx.saved_tensors
        softmax = softmax.clone()
        softmax[torch.arange(len(place)), place] -= 1.0 - elsewhere.to(softmax.dtype)
        return softmax.mul_(gradient.unsqueeze(-1)), None


class ByHand(Model):
    def __init__(self) -> None:
        super().__init__()
        parts = self.lm_head.weight.detach().chunk(dist.get_world_size())
        self.lm_head.weight = nn.Parameter(parts[dist.get_rank()].clone())

    def hidden(self, x: Tensor) -> Tensor:
        return SummedBackward.apply(super().hidden(x))


def cross_entropy(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


def by_hand(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    kept = (labels != -100).double()
    return (ParallelCrossEntropy.apply(model(x), labels.clamp(min=0)) * kept).sum() / kept.sum()


def of_row_shards(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The loss of logits whose rows are sharded, as a DTensor."""
    mesh = model.mesh
    mine = DTensor.from_local(labels.chunk(mesh.size())[mesh.get_local_rank()], mesh, [Shard(0)])
    return F.cross_entropy(model(x), mine).full_tensor()


def bundle(
    mesh: DeviceMesh, takes: Placement, gives: Placement, vocabulary: int = 40, local: bool = False
) -> nn.Module:
    head = ColwiseParallel(input_layouts=takes, output_layouts=gives, use_local_output=local)
    plans: dict[str, Any] = {"lm_head": head}
    if takes == Shard(0):
        plans["norm"] = SequenceParallel(sequence_dim=0)
    return parallelize_module(Model(vocabulary), mesh, plans)


def row_shards(mesh: DeviceMesh) -> nn.Module:
    style = SequenceParallel(sequence_dim=0, use_local_output=False)
    model = parallelize_module(Model(), mesh, {"norm": style, "lm_head": style})
    model.mesh = mesh
    return model


Kind = tuple[Callable[[DeviceMesh], nn.Module], Loss, bool, str]
MADE = "made in the forward, scaled"
KINDS: dict[str, Kind] = {
    "loss_parallel": (lambda mesh: bundle(mesh, Replicate(), Shard(-1)), cross_entropy, False, MADE),
    "uneven loss_parallel": (lambda mesh: bundle(mesh, Replicate(), Shard(-1), 41), cross_entropy, False, MADE),
    "gathered logits": (lambda mesh: bundle(mesh, Replicate(), Replicate(), local=True), cross_entropy, False, MADE),
    "uneven gathered logits": (
        lambda mesh: bundle(mesh, Replicate(), Replicate(), 41, local=True), cross_entropy, False, MADE
    ),
    "by hand": (lambda mesh: ByHand(), by_hand, False, MADE),
    "sequence parallel": (lambda mesh: bundle(mesh, Shard(0), Shard(-1)), cross_entropy, True, MADE),
    "rows gathered before the head": (lambda mesh: GatheredBefore(), cross_entropy, True, MADE),
    "rows gathered after the head": (
        lambda mesh: GatheredAfter(), cross_entropy, True,
        "other ranks' incoming gradients are in reduce_scatter_tensor",
    ),
    "rows as shards": (row_shards, of_row_shards, True, MADE),
}  # fmt: skip
"""By name: the model, its loss, whether a rank is given some of the rows, and what the report says."""


def context(kind: str) -> AbstractContextManager[None]:
    return loss_parallel() if "parallel" in kind else nullcontext()


def data(kind: str, rank: int, world: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(ROWS, WIDTH, generator=generator).double(), torch.randint(40, (ROWS,), generator=generator)
    labels[2] = -100
    return x.chunk(world)[rank] if KINDS[kind][2] else x, labels


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def gradients(loss: Tensor, model: nn.Module, scale: float) -> dict[str, Tensor]:
    (whole(loss) * scale).backward()
    return {"loss": whole(loss.detach()), **{name: whole(each.grad) for name, each in model.named_parameters()}}


def communicated(run: Any) -> list[str]:
    """The collectives that a compiled step ran, in order."""
    events = sorted(run.events(), key=lambda event: event.time_range.start)
    found = [event.name.removeprefix("_c10d_functional::") for event in events if "_c10d_functional::" in event.name]
    return [name for name in found if name != "wait_tensor"]


def compiled_step(rank: int, kind: str, inner: str) -> tuple[list[str], list[str]]:
    """Compares a compiled step, cut and whole; the notes of the report, and the collectives that ran."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    make, loss, _, _ = KINDS[kind]
    one, other = make(mesh), make(mesh)
    scale = rank + 1.5 if isinstance(one, GatheredAfter) else 1.5  # each rank may count its loss otherwise
    step = torch.compile(loss, backend=policylang.backend(CHUNK, inner=inner))
    with context(kind):
        want = gradients(loss(one, *data(kind, rank, world)), one, scale)
        step(other, *data(kind, rank, world))
        with profile() as run:
            found = gradients(step(other, *data(kind, rank, world)), other, scale)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
    return [note for line in policylang.report(step).rewrites for note in line.notes], communicated(run)


def slices_that_fit(rank: int) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, policy = KINDS["uneven loss_parallel"][0](mesh), policylang.parse("chunk loss up to 1000 B")
    step = torch.compile(cross_entropy, backend=policylang.backend(policy, inner="aot_eager"))
    with pytest.raises(PolicyMatchError) as raised, loss_parallel():
        step(model, *data("uneven loss_parallel", rank, 2)).backward()
    return raised.value.diagnostics[0].message


@pytest.mark.slow
def test_ranks_that_would_take_different_slices_take_none() -> None:
    assert set(run_ranks(slices_that_fit, 2)) == {
        "`chunk loss up to 1000 B` cuts nothing: not on every rank: otherwise on rank 1; what fits differs by rank, "
        "write `into`"
    }


ISSUED = {
    "loss_parallel": "they issue 6 all_reduce in place of 2",
    "gathered logits": "they issue 3 all_gather_into_tensor in place of 1",
    "by hand": "they issue 6 all_reduce in place of 2",
    "sequence parallel": "they issue 6 all_reduce in place of 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_step_gives_the_gradients_of_the_whole_one_on_every_rank(kind: str) -> None:
    (notes, first), (_, second) = run_ranks(compiled_step, 2, kind, "aot_eager")
    assert first
    assert first == second
    said = " ".join(notes)
    assert KINDS[kind][3] in said
    assert ISSUED.get(kind, "") in said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loss_parallel", "gathered logits", "rows gathered after the head"])
def test_inductor_compiles_the_slices_of_a_sharded_head(kind: str) -> None:
    (notes, first), (_, second) = run_ranks(compiled_step, 2, kind, "inductor")
    assert first == second
    assert KINDS[kind][3] in " ".join(notes)


def flat_step(rank: int, kind: str) -> tuple[list[str], list[str]]:
    """Compares a flat graph before and after; the collectives of its nodes, and what is planned of each gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    make, loss, _, _ = KINDS[kind]
    model, given = make(mesh), data(kind, rank, dist.get_world_size())
    with context(kind):
        step = policylang.trace_step(model, loss, *given)
        want = step(*given)
        policylang.apply(step.gm, CHUNK)
        found = step(*given)
    torch.testing.assert_close(whole(found[0]), whole(want[0]), rtol=1e-12, atol=1e-12)
    for name, value in want[1].items():
        torch.testing.assert_close(whole(found[1][name]), whole(value), rtol=1e-12, atol=1e-12, msg=name)
    return names_of(step.gm), [note for line in policylang.report(step.gm).rewrites for note in line.notes]


def names_of(gm: torch.fx.GraphModule) -> list[str]:
    targets = [str(node.target) for node in gm.graph.nodes if "_c10d_functional." in str(node.target)]
    return [each.split(".")[1] for each in targets if "wait" not in each]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loss_parallel", "by hand"])
def test_a_flat_graph_gives_the_gradients_of_the_whole_one_on_every_rank(kind: str) -> None:
    (first, notes), (second, _) = run_ranks(flat_step, 2, kind)
    assert first == second == ["all_reduce"] * 8  # two a slice, one of the picked logits, one of the hidden gradient
    assert "they issue 6 all_reduce in place of 2; 1 sum is split" in " ".join(notes)


@pytest.mark.slow
def test_four_ranks_add_a_slice_in_another_order_and_the_plan_says_so() -> None:
    for names, notes in run_ranks(flat_step, 4, "loss_parallel"):
        assert names == ["all_reduce"] * 8
        assert "2 sums are split (all_reduce_1, mm_" in " ".join(notes)


def titan(mesh: DeviceMesh) -> tuple[nn.Module, Loss]:
    """TorchTitan's debugging Llama 3 of one layer, with its tensor and sequence parallelism and its own loss."""
    torch._utils._get_available_device_type = lambda: "cpu"  # it looks for one when it is imported
    common = graph_trainer("common_utils")
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.llama3 import Llama3Model, llama3_configs
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    set_spmd_backend("partial_dtensor")
    dims = ParallelDims(1, 1, 1, mesh.size(), 1, 1, mesh.size(), "partial_dtensor")
    dims.build_mesh()
    settings = common.build_decoder_config_for_backend(llama3_configs["debugmodel"], "sdpa")
    settings.layers = settings.layers[:1]
    set_llama3_sharding_config(settings, enable_sp=True)
    torch.manual_seed(0)
    model = Llama3Model(settings)
    model.init_states(buffer_device=None)
    model.parallelize(dims)
    return model, lambda model, tokens, labels: cross_entropy_loss(model(tokens), labels) / 8


def hugging_face(mesh: DeviceMesh) -> tuple[nn.Module, Loss]:
    """Its Llama with the plan for tensor parallelism that it ships."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config)
    model = apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))
    return model, lambda model, tokens, labels: F.cross_entropy(model(tokens).logits[0], labels[0])


def real_model(rank: int, make: Callable[[DeviceMesh], tuple[nn.Module, Loss]]) -> tuple[str, list[str]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    (one, loss), (other, _) = make(mesh), make(mesh)
    tokens = torch.randint(3, 64, (1, ROWS), generator=torch.Generator().manual_seed(1))
    step = torch.compile(loss, backend=policylang.backend(CHUNK, inner="aot_eager"))
    want, found = gradients(loss(one, tokens, tokens), one, 1.5), gradients(step(other, tokens, tokens), other, 1.5)
    for name, value in want.items():
        # sums of 12 rows in slices, and gradients that round once more
        torch.testing.assert_close(found[name], value, rtol=0, atol=16 * 2.0**-23 * value.abs().max().item(), msg=name)
    flat = policylang.trace_step(other, loss, tokens, tokens)
    before = flat(tokens, tokens)
    policylang.apply(flat.gm, CHUNK)
    torch.testing.assert_close(whole(flat(tokens, tokens)[0]), whole(before[0]))
    said = " ".join(note for line in policylang.report(step).rewrites for note in line.notes)
    return said, names_of(flat.gm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (titan, "they issue 6 all_reduce in place of 2"),
        (hugging_face, "they issue 3 all_gather_into_tensor in place of 1"),
    ],
)
def test_sharded_heads_of_torchtitan_and_hugging_face(make, said) -> None:
    (notes, first), (_, second) = run_ranks(real_model, 2, make)
    assert first == second
    assert said in notes
    assert MADE in notes


# --- what is planned, for ranks that are imagined ---
class Lacking:
    """Other ranks, one of which makes no cut."""

    def unshared(self, offers: Sequence[Proposal]) -> Mapping[str, str]:
        return {offer.name: "not on rank 1" for offer in offers}


def traced(loss: Loss) -> policylang.TracedStep:
    """A step of a sharded head for two ranks, with 512 rows and a vocabulary of 4,096."""
    mesh = init_device_mesh("cpu", (2,))
    model = bundle(mesh, Replicate(), Shard(-1), 4096)
    with loss_parallel():
        return policylang.trace_step(model, loss, torch.randn(512, WIDTH).double(), torch.randint(4096, (512,)))


@pytest.fixture
def sharded() -> Iterator[policylang.TracedStep]:
    with fake_ranks(2):
        yield traced(cross_entropy)


def test_the_facts_of_slices_are_those_of_the_graph_that_comes_out(sharded: policylang.TracedStep) -> None:
    gm = copy.deepcopy(sharded.gm)
    made = plan(policylang.parse("chunk loss into 4"), collect(gm), FLAT, ranks=AllAlike())
    assert not made.diagnostics
    apply_edits(gm, made)
    assert_facts_hold(gm, made)


def test_the_peak_is_that_of_a_slice(sharded: policylang.TracedStep) -> None:
    facts, logits = collect(sharded.gm), 512 * 2048 * 8
    policies = map(policylang.parse, ("optional save convolution", "chunk loss into 8"))
    before, after = (plan(policy, facts, FLAT) for policy in policies)
    assert before.peak.bytes > 3 * logits
    assert after.peak.bytes < before.peak.bytes - 2 * logits
    assert sum(edit.fewer_collectives for edit in after.edits.done) == 2 - 16
    assert {edit.proof.assumed for edit in after.edits.done} == {SAME_GRAPH}


def test_a_step_that_waits_longer_is_told_with_what_the_slices_issue(sharded: policylang.TracedStep) -> None:
    made = plan(policylang.parse("chunk loss into 64\ndevice h100-sxm"), collect(sharded.gm), FLAT)
    (found,) = slowing_edits(made, FLAT)
    assert (found.code, found.help) == ("APL380", "cut into fewer slices")
    assert "they issue 128 all_reduce in place of 2" in found.details[0]


def test_a_cut_that_another_rank_lacks_is_made_nowhere(sharded: policylang.TracedStep) -> None:
    edits, _ = plan_edits(CHUNK, collect(sharded.gm), FLAT, Lacking())
    assert not edits.done
    assert [each.reason for each in edits.refused] == ["not on every rank: not on rank 1"]


def likelihood(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The gradient of each row needs the sum over all."""
    return F.cross_entropy(model(x), labels, reduction="sum").exp()


def test_what_ranks_have_reduced_is_kept_where_the_backward_computes_slices_again() -> None:
    """A number for each row in place of a second collective."""
    with fake_ranks(2):
        made = plan(CHUNK, collect(traced(likelihood).gm), FLAT)
    facts, decided = made.facts, [each.action for each in made.decisions if each is not None]
    assert made.edits.done
    assert Action.RECOMPUTE in decided
    waits = [made.decisions[row] for row, target in enumerate(facts.targets) if target == WAIT]
    kept = [each.action for each in waits if each is not None and each.why is Why.CHUNKED]
    assert kept == [Action.SAVE] * 6
    assert not [facts.names[row] for row in made.schedule.rows_of(StepKind.SECOND_RUN) if facts.group_names[row]]
