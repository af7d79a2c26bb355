"""Does a policy save what it says, and what does a step cost beside the alternatives?

One Llama, one batch, five ways to hold its activations, side by side in one run: nothing recomputed, eager selective
checkpointing (``torch.utils.checkpoint`` with a policy function that makes the same decisions by hand), PyTorch's
min-cut partitioner, its memory budget, and policylang with ``llama3_sac``. The compiled contenders share one inner
compiler, and a second eager-SAC row runs under it too, so that step times are compared like with like.

    python -m benchmarks.training_step --device cpu --inner aot_eager
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import policylang
from benchmarks.allocations import step_allocations
from benchmarks.common import seconds, table, write_results
from policylang.commands.small_llama.memory import StepMemory, step_memory

MIB = 2**20


@frozen
class Shape:
    """The model and batch of a run."""

    layers: int
    hidden: int
    heads: int
    batch: int
    sequence: int
    vocabulary: int = 2048
    dtype: str = "float32"


CPU = Shape(layers=8, hidden=256, heads=8, batch=2, sequence=256)
CUDA = Shape(layers=16, hidden=2048, heads=32, batch=2, sequence=2048, vocabulary=32768, dtype="bfloat16")


class StepModel(torch.nn.Module):
    """A causal language model and its loss, with decoder layers that may be checkpointed by hand."""

    def __init__(self, shape: Shape) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.hidden * 4,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            max_position_embeddings=shape.sequence,
            use_cache=False,
            attn_implementation="sdpa",
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def sac_by_hand() -> tuple[Any, Any]:
    """The decisions of ``llama3_sac`` as a checkpoint policy function: what users write today."""
    matmuls = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
    attention = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
    counts: dict[tuple[str, bool], int] = defaultdict(int)

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in attention:
            return CheckpointPolicy.MUST_SAVE
        if op in matmuls:
            counts["matmul", ctx.is_recompute] += 1
            odd = counts["matmul", ctx.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.PREFER_RECOMPUTE
        if op is torch.ops.aten.add.Tensor and _is_residual(args):
            counts["add", ctx.is_recompute] += 1
            if counts["add", ctx.is_recompute] == 1:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def _is_residual(args: tuple[Any, ...]) -> bool:
    """An add of two hidden states; rotary embeddings add tensors with a head dimension, norms add a scalar."""
    return all(isinstance(arg, torch.Tensor) and arg.ndim == 3 for arg in args[:2])


def checkpoint_layers(model: StepModel) -> StepModel:
    for layer in model.model.model.layers:
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, context_fn=sac_by_hand, preserve_rng_state=False
        )
    return model


@frozen
class Contender:
    name: str
    prepare: Callable[[StepModel], Callable[[torch.Tensor], torch.Tensor]]


def contenders(policy: str, inner: str) -> list[Contender]:
    def budget(model: StepModel) -> Any:
        import torch._functorch.config as functorch_config

        compiled = torch.compile(model, backend=_mincut(inner))

        def call(tokens: torch.Tensor) -> torch.Tensor:
            with functorch_config.patch(activation_memory_budget=0.5):
                return compiled(tokens)

        return call

    return [
        Contender("eager, no checkpointing", lambda model: model),
        Contender("eager SAC by hand", checkpoint_layers),
        Contender(f"min-cut, {inner}", lambda model: torch.compile(model, backend=_mincut(inner))),
        Contender(f"memory budget 0.5, {inner}", budget),
        Contender(
            f"SAC by hand, {inner}", lambda model: torch.compile(checkpoint_layers(model), backend=_mincut(inner))
        ),
        Contender(
            f"policylang, {inner}",
            lambda model: torch.compile(model, backend=policylang.backend(policy, inner=inner)),
        ),
    ]


def _mincut(inner: str) -> str:
    return "aot_eager_decomp_partition" if inner == "aot_eager" else inner


def _memory(forward: Callable[[], torch.Tensor], device: torch.device) -> StepMemory:
    return step_memory(forward, (), device) if device.type == "cuda" else step_allocations(forward)


def example(shape: Shape, device: torch.device) -> tuple[StepModel, torch.Tensor]:
    """The model and one batch of tokens, the same at every call; nothing is compiled before."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = StepModel(shape).to(device=device, dtype=getattr(torch, shape.dtype))
    return model, torch.randint(shape.vocabulary, (shape.batch, shape.sequence), device=device)


def measure(contender: Contender, shape: Shape, device: torch.device, steps: int) -> dict[str, Any]:
    model, tokens = example(shape, device)
    step = contender.prepare(model)

    def run() -> None:
        step(tokens).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    compile_and_first = seconds(run)
    run()
    memory = _memory(lambda: step(tokens), device)
    times = [seconds(run) for _ in range(steps)]
    loss = step(tokens)
    planned = policylang.report(step).saved.bytes if contender.name.startswith("policylang") else None
    return {
        "contender": contender.name,
        "saved MiB": memory.saved / MIB,
        "planned MiB": None if planned is None else planned / MIB,
        "peak MiB": memory.peak / MIB,
        "step s": statistics.median(times),
        "first step s": compile_and_first,
        "loss": loss.item(),
    }


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sac = next(row for row in rows if row["contender"] == "eager SAC by hand")
    same_inner = next(row for row in rows if row["contender"].startswith("SAC by hand"))
    for row in rows:
        row["peak / eager SAC"] = row["peak MiB"] / sac["peak MiB"]
        row["step / SAC, same inner"] = row["step s"] / same_inner["step s"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--inner", choices=("aot_eager", "inductor"), default="aot_eager")
    parser.add_argument("--policy", default="llama3_sac.apl")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = CUDA if options.device == "cuda" else CPU
    rows = []
    for contender in contenders(options.policy, options.inner):
        print(f"measuring: {contender.name}", flush=True)
        rows.append(measure(contender, shape, torch.device(options.device), options.steps))
    rows = with_ratios(rows)
    print(table(rows))
    write_results(options.json, {"benchmark": "training_step", "shape": str(shape), "rows": rows})


if __name__ == "__main__":
    main()
