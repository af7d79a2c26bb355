"""The peak that is planned for checkpoints in eager beside the one that a step comes to, tensor by tensor."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
import transformers
from torch import Tensor, nn

import policylang
from policylang.api.planned_graphs import facts_of
from policylang.commands.small_llama import step_memory
from policylang.graph.facts import Facts
from policylang.language.devices.reading import read_device
from policylang.planning.capabilities import EAGER
from policylang.planning.planner import plan
from policylang.simulation.memory import simulate
from policylang.simulation.node_times import node_times
from policylang.torch_compat.distributed import pretended_ranks
from policylang.tuning.evaluation import Budget
from policylang.tuning.tuner import Tuner
from tests.support import models
from tests.support.drawn import slow

CPU = torch.device("cpu")
POLICIES = {
    "recompute": "recompute everything in block\n",
    "half": "recompute everything in first half of blocks\nundecided -> save\n",
    "with a rule": "recompute everything in first 2 blocks\noptional save matmul in block\nundecided -> save\n",
    "save": "undecided -> save\n",
    "last": "save everything in last block\n",
}

Step = Callable[[nn.Module], Tensor]
Made = tuple[nn.Module, Step, tuple[Tensor, ...]]


def of_example(example: models.Example) -> Made:
    return example.module, lambda module: example.loss_fn(module(*example.inputs)), example.inputs


def hugging_face(config: str, model: str, image: int = 0, **settings: Any) -> Made:
    torch.manual_seed(0)
    module = getattr(transformers, model)(getattr(transformers, config)(**settings)).train()
    if image:
        pixels, labels = torch.randn(4, 3, image, image), torch.randint(10, (4,))
        return module, lambda made: made(pixels, labels=labels).loss, (pixels, labels)
    tokens = torch.randint(256, (4, 128))
    return module, lambda made, ids=tokens: made(input_ids=ids, labels=ids).loss, (tokens,)


def cubes() -> Made:
    """Whose backward makes twice the squares of what it multiplies by, before it reads a gradient."""
    torch.manual_seed(0)
    ups = [nn.Linear(64, 64, bias=False) for _ in range(3)]
    module = nn.Sequential(*(models.Function(lambda cube, x: cube.up(x).pow(3), up=up) for up in ups))
    x = torch.randn(256, 64)
    return module, lambda made: made(x).sum(), (x,)


class Written(nn.Module):
    """Writes in place wherever it may: the normalized values, what they are added to, the mask of its dropout. Autograd
    saves what it picks from for its size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 128), nn.Linear(128, 64), nn.BatchNorm1d(64)
        self.relu, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.1)
        self.register_buffer("order", torch.randperm(128).expand(256, 128).contiguous()[:, :64])

    def forward(self, x: Tensor) -> Tensor:
        picked = self.up(x).mul(2).gather(1, self.order)
        y = self.norm(self.down(self.relu(self.up(picked))))
        y += x
        return self.dropout(self.relu(y))


def written() -> Made:
    module = models.Layers(*(Written() for _ in range(4)))
    return module, lambda made: made(x).sum(), (x := torch.randn(256, 64),)


SMALL = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
GPT2 = {"vocab_size": 256, "n_embd": 64, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
MODELS: dict[str, Callable[[], Made]] = {
    "cubes": cubes,
    "in place": written,
    "mlp": lambda: of_example(models.mlp(4, 64)),
    "resnet": lambda: of_example(models.resnet(4, 16)._replace(inputs=(torch.randn(2, 3, 24, 24),))),
    "opt": lambda: hugging_face(
        *("OPTConfig", "OPTForCausalLM"), **SMALL, ffn_dim=256, dropout=0.0, word_embed_proj_dim=64, use_cache=False,
    ),
    "gpt2": lambda: hugging_face(
        *("GPT2Config", "GPT2LMHeadModel"), **GPT2, use_cache=False,
    ),
    "llama": lambda: hugging_face(
        *("LlamaConfig", "LlamaForCausalLM"), **SMALL, intermediate_size=176, num_key_value_heads=2, use_cache=False,
    ),
    "vit": lambda: hugging_face(
        *("ViTConfig", "ViTForImageClassification"), image=64, **SMALL, intermediate_size=256, image_size=64,
        patch_size=8, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "hf_resnet": lambda: hugging_face(
        *("ResNetConfig", "ResNetForImageClassification"), image=64, embedding_size=16, layer_type="basic",
        hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2], num_labels=10,
    ),
    "t5": lambda: hugging_face(
        *("T5Config", "T5ForConditionalGeneration"), vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=3,
        num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    ),
}  # fmt: skip
BLOCKS = {"cubes": "blocks *\n", "hf_resnet": "blocks stages.*.layers.*\n", "t5": "blocks block.*\n"}


@cache
def traced(name: str) -> Facts:
    module, step, inputs = MODELS[name]()
    batch = inputs if name == "t5" else ()  # it writes to what it makes of its labels
    return facts_of(policylang.trace_step(module, step, *batch, path="eager"))[0]


def compared(name: str, text: str) -> tuple[int, int]:
    """What is planned, and what a later step takes: bytes beside parameters and inputs."""
    made = plan(policylang.parse(text), traced(name), EAGER)
    assert not made.diagnostics
    timeline = simulate(made.facts, made.schedule)
    module, step, inputs = MODELS[name]()
    policylang.checkpoint_model(module, policylang.parse(text))
    step(module).backward()
    module.zero_grad(set_to_none=True)
    resident = (*module.parameters(), *module.buffers(), *inputs)
    return max(timeline.live) - timeline.resident, step_memory(partial(step, module), resident, CPU).peak


def assert_close(name: str, text: str) -> None:
    planned, found = compared(name, text)
    assert found * 0.985 <= planned <= found * 1.05, text


LARGE = [slow(name) for name in [*MODELS][4:]]
FITTING = ("resnet", "opt", "gpt2", "llama", "vit", "hf_resnet")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["cubes", "in place", "mlp", "resnet", *LARGE])
def test_a_peak_is_planned_as_it_comes_out(name: str, policy: str) -> None:
    assert_close(name, BLOCKS.get(name, "") + POLICIES[policy])


QUICK = [("mlp", (0.3,)), ("in place", (0.2,))]


@pytest.mark.parametrize(("name", "shares"), [*QUICK, *(slow(each, (0.0, 0.3, 0.6)) for each in FITTING)])
def test_a_tuned_policy_keeps_its_budget(name: str, shares: tuple[float, ...]) -> None:
    facts = traced(name)
    profile = read_device("h100-sxm")
    tuner = Tuner(facts, node_times(facts, profile), EAGER)
    smallest, most = tuner.smallest(Budget("peak", 0)).peak, tuner.save_all
    for share in shares:
        budget = Budget("peak", smallest + share * (most.peak - smallest))
        found = tuner.tuned(budget)
        assert found.chosen.peak <= budget.limit
        assert_close(name, found.chosen.rules)


class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return functional.all_reduce(x, "sum", torch.distributed.group.WORLD)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_a_result_that_is_still_awaited_counts_as_its_memory():
    weight = torch.randn(64, 64, requires_grad=True)
    with pretended_ranks(2):
        found = step_memory(lambda: (Reduced.apply(weight @ weight).sin() @ weight).sum(), [weight], CPU)
    assert found.saved == 2 * weight.nbytes
