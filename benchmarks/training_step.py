"""Does a policy save what it says, and what does a step cost beside the alternatives?

One Llama, one batch, five ways to hold its activations, side by side in one run: nothing recomputed, eager selective
checkpointing (``torch.utils.checkpoint`` with a policy function that makes the same decisions by hand), PyTorch's
min-cut partitioner, its memory budget, and policylang with ``llama3_sac``. The compiled contenders share one inner
compiler, and a second eager-SAC row runs under it too, so that step times are compared like with like.

    python -m benchmarks.training_step --device cpu --inner aot_eager
    python -m benchmarks.training_step --device cuda --shape 8b --inner inductor

A contender that needs more memory than there is gets a row that says so. The results file is written again after each
contender, so that a run that is cut short leaves what it measured.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
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
from policylang.commands.small_llama import StepMemory, step_memory

MIB = 2**20


@frozen
class Shape:
    """The model and batch of a run."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    batch: int
    sequence: int
    vocabulary: int = 2048
    dtype: str = "float32"


LLAMA3 = {"heads": 32, "kv_heads": 8, "vocabulary": 128256, "dtype": "bfloat16"}
SHAPES = {
    "tiny": Shape(layers=2, hidden=64, intermediate=256, heads=4, kv_heads=4, batch=2, sequence=32),
    "small": Shape(layers=8, hidden=256, intermediate=1024, heads=8, kv_heads=8, batch=2, sequence=256),
    "1b": Shape(layers=16, hidden=2048, intermediate=8192, batch=2, sequence=2048, **LLAMA3),
    "8b": Shape(layers=32, hidden=4096, intermediate=14336, batch=1, sequence=4096, **LLAMA3),
}
"""Llama 3.2 1B and Llama 3 8B (their sizes, not their weights) for a GPU; the others for a CPU."""
DEFAULT_SHAPE = {"cpu": "small", "cuda": "1b"}


class StepModel(torch.nn.Module):
    """A causal language model and its loss, with decoder layers that may be checkpointed by hand."""

    def __init__(self, shape: Shape) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
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


EAGER_SAC = "eager SAC by hand"


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
        Contender(EAGER_SAC, checkpoint_layers),
        Contender(
            f"policylang, {inner}",
            lambda model: torch.compile(model, backend=policylang.backend(policy, inner=inner)),
        ),
        Contender(
            f"SAC by hand, {inner}", lambda model: torch.compile(checkpoint_layers(model), backend=_mincut(inner))
        ),
        Contender(f"min-cut, {inner}", lambda model: torch.compile(model, backend=_mincut(inner))),
        Contender(f"memory budget 0.5, {inner}", budget),
    ]


def _mincut(inner: str) -> str:
    return "aot_eager_decomp_partition" if inner == "aot_eager" else inner


def _memory(forward: Callable[[], torch.Tensor], device: torch.device) -> StepMemory:
    return step_memory(forward, (), device) if device.type == "cuda" else step_allocations(forward)


def example(shape: Shape, device: torch.device) -> tuple[StepModel, torch.Tensor]:
    """The model and one batch of tokens, the same at every call; nothing is compiled before."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, shape.dtype))  # a larger dtype first would need the memory of both
    try:
        with device:
            model = StepModel(shape)
    finally:
        torch.set_default_dtype(before)
    return model, torch.randint(shape.vocabulary, (shape.batch, shape.sequence), device=device)


def measure(contender: Contender, shape: Shape, device: torch.device, steps: int) -> dict[str, Any]:
    """A row for one contender; where the device has too little memory for it, a row that says so."""
    try:
        return _measured(contender, shape, device, steps)
    except torch.OutOfMemoryError:
        return {"contender": contender.name, "failed": "out of memory"}
    finally:
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(contender: Contender, shape: Shape, device: torch.device, steps: int) -> dict[str, Any]:
    model, tokens = example(shape, device)
    step = contender.prepare(model)

    def run() -> None:
        step(tokens).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    compile_and_first = seconds(run)
    run()
    memory = _memory(lambda: step(tokens), device)
    row = {
        "contender": contender.name,
        "saved MiB": memory.saved / MIB,
        "planned MiB": None,
        "peak MiB": memory.peak / MIB,
        **(_of_the_allocator(run) if device.type == "cuda" else {}),
        "step s": statistics.median(seconds(run) for _ in range(steps)),
        "first step s": compile_and_first,
        "audit": None,
        "loss": step(tokens).item(),
    }
    if contender.name.startswith("policylang"):
        report = policylang.report(step)
        row["planned MiB"] = report.saved.bytes / MIB
        row["audit"] = "agrees" if report.audit.agrees else "; ".join(report.audit.differences)
    return row


def _of_the_allocator(run: Callable[[], None]) -> dict[str, float]:
    """The most that the caching allocator handed out and held in a step; parameters and gradients included."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    return {
        "allocated MiB": torch.cuda.max_memory_allocated() / MIB,
        "reserved MiB": torch.cuda.max_memory_reserved() / MIB,
    }


RATIOS = (
    ("peak / eager SAC", "peak MiB", EAGER_SAC),
    ("allocated / eager SAC", "allocated MiB", EAGER_SAC),
    ("step / SAC, same inner", "step s", "SAC by hand"),
)
"""A column, what it divides, and the peer whose row it divides by."""


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of ``rows`` with their ratios to those peers that have been measured so far."""
    found = [dict(row) for row in rows]
    for column, of, peer_name in RATIOS:
        peer = next((row[of] for row in rows if row["contender"].startswith(peer_name) and row.get(of)), None)
        for row in found:
            if peer and row.get(of):
                row[column] = row[of] / peer
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), help="default: small on a CPU, 1b on a GPU")
    parser.add_argument("--inner", choices=("aot_eager", "inductor"), default="aot_eager")
    parser.add_argument("--policy", default="llama3_sac.apl")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    shape = SHAPES[options.shape or DEFAULT_SHAPE[options.device]]
    rows: list[dict[str, Any]] = []
    for contender in contenders(options.policy, options.inner):
        print(f"measuring: {contender.name}", flush=True)
        rows.append(measure(contender, shape, torch.device(options.device), options.steps))
        results = {"benchmark": "training_step", "shape": str(shape), "rows": with_ratios(rows)}
        write_results(options.json, results)
    print(table(with_ratios(rows)))


if __name__ == "__main__":
    main()
