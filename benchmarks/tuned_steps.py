"""Does a step under a tuned policy take the memory that its comment promises, on real tensors?

Three Hugging Face models with random weights train for a step on the CPU, float32, under policies tuned for budgets
from the smallest peak that can be met to the one that saves everything: as a flat graph, under ``torch.compile`` over
``aot_eager``, and over Inductor. The peak that the allocator reports to PyTorch's profiler stands beside the simulated
one, both with parameters and batch, which are there before.

    python -m benchmarks.tuned_steps --json benchmarks/results/tuned_steps.json
    python -m benchmarks.tuned_steps --models llama --paths flat --budgets 2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

import policylang
from benchmarks.allocations import peak_allocated
from benchmarks.common import table, write_results
from benchmarks.graphs import joint_of
from benchmarks.tuning_graphs import next_token
from policylang.api.load import load_device
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, InputKind
from policylang.planning.capabilities import FLAT, JOINT
from policylang.simulation.node_times import node_times
from policylang.tuning.evaluation import Budget, Candidate, Infeasible
from policylang.tuning.tuner import Tuner

MIB = 2**20
DEVICE = "cpu"
BUDGETS = 5
PATHS = ("flat", "aot_eager", "inductor")


@frozen
class Size:
    layers: int = 6
    hidden: int = 512
    batch: int = 4
    length: int = 256
    vocabulary: int = 2048


SIZE = Size()
TINY = Size(layers=2, hidden=64, batch=2, length=32, vocabulary=256)


class Training(nn.Module):
    """A model and its loss."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Tensor) -> Tensor:
        return self.loss(self.model, batch)


def _of_images(model: nn.Module, images: Tensor) -> Tensor:
    loss: Tensor = model(pixel_values=images).logits.square().mean()
    return loss


def llama(size: Size) -> tuple[Training, Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32,
        num_key_value_heads=size.hidden // 64,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return Training(LlamaForCausalLM(config), next_token), _tokens(size)


def gpt2(size: Size) -> tuple[Training, Tensor]:
    """With its dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocabulary,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.hidden // 32,
        n_positions=size.length,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return Training(GPT2LMHeadModel(config), next_token), _tokens(size)


def vit(size: Size) -> tuple[Training, Tensor]:
    from transformers import ViTConfig, ViTForImageClassification

    side = 16 * round(size.length**0.5)
    config = ViTConfig(
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32,
        image_size=side,
        attn_implementation="sdpa",
    )
    return Training(ViTForImageClassification(config), _of_images), torch.randn(size.batch, 3, side, side)


def _tokens(size: Size) -> Tensor:
    return torch.randint(size.vocabulary, (size.batch, size.length))


MODELS: dict[str, Callable[[Size], tuple[Training, Tensor]]] = {"llama": llama, "gpt2": gpt2, "vit": vit}


def made(name: str, size: Size) -> tuple[Training, Tensor]:
    torch.manual_seed(0)
    training, batch = MODELS[name](size)
    return training.train(), batch


# --- what is measured ------------------------------------------------------------------------------------------------


def resident(facts: Facts) -> int:
    """Bytes of what is there before the step: parameters, buffers, the batch."""
    return sum(
        facts.bytes[row]
        for row, op in enumerate(facts.ops)
        if op == "placeholder" and facts.input_kinds[row] != InputKind.TANGENT
    )


def tuned(facts: Facts, joint: bool, count: int) -> list[Candidate]:
    """For budgets from the smallest peak to that of saving everything."""
    tuner = Tuner(facts, node_times(facts, load_device(DEVICE)), JOINT if joint else FLAT)
    assert tuner.save_all is not None
    low, high = tuner.smallest(Budget("peak", inf)).peak, tuner.save_all.peak
    found = []
    for step in range(count):
        choice = tuner.tuned(Budget("peak", low + (high - low) * step / max(1, count - 1)))
        assert not isinstance(choice, Infeasible)
        found.append(choice.chosen)
    return found


def flat_peak(name: str, size: Size, rules: str) -> int:
    """Beyond what was there before, of a step of the traced graph."""
    training, batch = made(name, size)
    step = policylang.trace_step(training, lambda model, images: model(images), batch)
    step.apply(policylang.parse(rules))
    step(batch)
    return peak_allocated(lambda: step(batch))


def compiled_peak(name: str, size: Size, rules: str, inner: Any) -> int:
    """The same of a step under ``torch.compile``."""
    torch._dynamo.reset()
    training, batch = made(name, size)
    compiled = torch.compile(training, backend=policylang.backend(policylang.parse(rules), inner=inner))

    def step() -> None:
        compiled(batch).backward()

    step()
    training.zero_grad(set_to_none=True)
    return peak_allocated(step)


def facts_of(name: str, size: Size, joint: bool) -> Facts:
    training, batch = made(name, size)
    if joint:
        return collect(joint_of(lambda: training(batch)).module)
    return collect(policylang.trace_step(training, lambda model, images: model(images), batch).gm)


def measure(name: str, paths: Sequence[str], size: Size = SIZE, count: int = BUDGETS) -> list[dict[str, Any]]:
    """A row for each path and budget."""
    rows = []
    for joint in (False, True):
        here = [path for path in paths if (path != "flat") == joint]
        if not here:
            continue
        facts = facts_of(name, size, joint)
        before = resident(facts)
        for candidate in tuned(facts, joint, count):
            for path in here:
                run = flat_peak(name, size, candidate.rules) if path == "flat" else None
                beyond = compiled_peak(name, size, candidate.rules, path) if run is None else run
                rows.append(
                    {
                        "model": name,
                        "path": path,
                        "rules": candidate.rules.count("\n"),
                        "simulated MiB": candidate.peak / MIB,
                        "measured MiB": (beyond + before) / MIB,
                        "measured / simulated": (beyond + before) / candidate.peak,
                        "there before MiB": before / MIB,
                    }
                )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--budgets", type=int, default=BUDGETS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        found = measure(name, options.paths, SIZE, options.budgets)
        print(table(found), flush=True)
        rows += found
        write_results(options.json, {"device": DEVICE, "rows": rows})


if __name__ == "__main__":
    main()
