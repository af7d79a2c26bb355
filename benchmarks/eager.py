"""What does replaying a plan cost in eager beside the same decisions by a hand-written policy function?

A Hugging Face Llama whose layers run under ``torch.utils.checkpoint``, three times: as they are recomputed whole, with
torch's ``create_selective_checkpoint_contexts`` and a function that counts products, and with ``checkpoint_model`` and
two rules that say the same. Forward and backward in turns, in one process; times are processor time on a CPU, and those
of the clock, up to the end of the last kernel, on a GPU.

    python -m benchmarks.eager --json benchmarks/results/eager.json
    python -m benchmarks.eager --device cuda
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import policylang
from benchmarks.common import table, write_results
from policylang.commands.small_llama import StepMemory, step_memory

POLICY = """
blocks layers.*
recompute everything in block
save mm in block
recompute every 2nd mm per block
save attention in block
"""
ATTENTION = "scaled_dot_product"
SIZES = {"cpu": {"small": (64, 64), "medium": (256, 256)}, "cuda": {"medium": (256, 256), "large": (4096, 4096)}}
"""Hidden size and tokens of a batch of two, on a device."""


def by_hand() -> tuple[Any, Any]:
    """The same decisions, as a user of torch would write them."""
    products = 0

    def decide(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        nonlocal products
        if operator is torch.ops.aten.mm.default:
            products += 1
            return CheckpointPolicy.MUST_SAVE if products % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        if ATTENTION in operator._schema.name:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(decide)
    return contexts


def llama(hidden: int, layers: int, device: torch.device) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(4, hidden // 128),
        use_cache=False,
    )
    with device:
        model: nn.Module = LlamaForCausalLM(config).train()
    return model


def checkpointed(model: nn.Module, **options: Any) -> nn.Module:
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)
    return model


def step(model: nn.Module, tokens: Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()
    model.zero_grad(set_to_none=True)


def clock(device: torch.device) -> float:
    """Seconds: of this process on a CPU, which others share; of the clock once a GPU is done."""
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def medians(runs: dict[str, Callable[[], None]], repeats: int, device: torch.device) -> dict[str, float]:
    """Seconds of each. In turns, so that what else the machine does meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            start = clock(device)
            run()
            times[name].append(clock(device) - start)
    return {name: statistics.median(found) for name, found in times.items()}


def measure(size: str, layers: int, repeats: int, device: torch.device) -> dict[str, Any]:
    hidden, length = SIZES[device.type][size]
    model = llama(hidden, layers, device)
    tokens = torch.randint(256, (2, length), device=device)
    contenders = {
        "no checkpoint": copy.deepcopy(model),
        "recompute all": checkpointed(model),
        "by hand": checkpointed(model, context_fn=by_hand),
        "policylang": policylang.checkpoint_model(copy.deepcopy(model), policylang.parse(POLICY), strict=True),
    }
    found = medians({name: partial(step, each, tokens) for name, each in contenders.items()}, repeats, device)
    return {
        "model": size,
        **{f"{name} s": value for name, value in found.items()},
        "policylang / by hand": found["policylang"] / found["by hand"],
    }


def first_steps(layers: int, device: torch.device) -> list[dict[str, Any]]:
    """What the first step costs, in which each block is watched as it runs, beside a later one and beside PyTorch's
    own checkpoint. Memory is counted on the tensors, or by a GPU's allocator, beyond parameters and batch."""
    hidden, length = SIZES[device.type]["medium"]
    model = llama(hidden, layers, device)
    tokens = torch.randint(256, (2, length), device=device)
    contenders = {
        "no checkpoint": copy.deepcopy(model),
        "recompute all": checkpointed(model),
        "policylang, recompute all": policylang.checkpoint_model(
            copy.deepcopy(model), policylang.parse("recompute everything in block")
        ),
        "policylang": policylang.checkpoint_model(copy.deepcopy(model), policylang.parse(POLICY)),
    }
    step(model, tokens)  # whatever happens once in a process
    rows = []
    for name, each in contenders.items():
        start = clock(device)
        first = memory_of(each, tokens)
        seconds = clock(device) - start
        start = clock(device)
        later = memory_of(each, tokens)
        rows.append(
            {
                "checkpoint": name,
                "peak of the first step MiB": first.peak / 2**20,
                "peak of a later one MiB": later.peak / 2**20,
                "first / later peak": first.peak / later.peak,
                "first / later time": seconds / (clock(device) - start),
            }
        )
    return rows


def memory_of(model: nn.Module, tokens: Tensor) -> StepMemory:
    resident = [*model.parameters(), *model.buffers(), tokens]
    found = step_memory(lambda: model(input_ids=tokens, labels=tokens).loss, resident, tokens.device)
    model.zero_grad(set_to_none=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    rows = [measure(size, options.layers, options.repeats, device) for size in SIZES[options.device]]
    firsts = first_steps(options.layers, device)
    print(table(rows))
    print(table(firsts))
    results = {"layers": options.layers, "repeats": options.repeats, "steps": rows, "first steps": firsts}
    write_results(options.json, results)


if __name__ == "__main__":
    main()
