"""What is a policy for each stage of a pipeline worth, against the same rules in all stages?

Simulated: Llama-3 70B and 405B as Transformers builds them, bfloat16, each product shared by 8 ranks that are not
there, one sequence of 8,192 tokens a microbatch, traced for an H100. ``policylang.tune`` is told what each rank may
take, and AdamW's state. Measured: a small Llama on four gloo ranks under torch's own 1F1B schedule, in eager, where
every product sleeps for its time on a slow device, so that a step takes as long as its schedule makes it wait.
Attention does not sleep: torch's table has no formula for a CPU's.

    python -m benchmarks.stages --json benchmarks/results/stages.json     # about ten minutes
    python -m benchmarks.stages --models slept                             # seconds
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import policylang
from benchmarks.common import table, write_results
from examples.sharded_llama import Llama, LlamaConfig
from policylang.api.planned_graphs import facts_of
from policylang.graph.facts import Facts
from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.tracing.configured import StepSizes, built, sharded
from policylang.tuning.tuned_policy import TunedPolicy

GIB = 2**30
DEVICE = "h100-sxm"


@frozen
class Case:
    """A pipeline of one of the two models, and what each of its ranks may take."""

    model: str
    schedule: str
    stages: int
    microbatches: int
    peaks: tuple[str, ...]


SIZES: Mapping[str, Mapping[str, int]] = {
    "70B": {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16_384, "intermediate_size": 53_248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
CASES = (
    Case("70B", "1f1b", 4, 16, ("40 GiB",)),
    Case("405B", "1f1b", 16, 32, ("75 GiB",)),
)


def traced(model: str, layers: int | None = None) -> Facts:
    """One microbatch through the whole model, on one of 8 ranks of tensor parallelism."""
    from transformers import LlamaConfig as Config

    sizes = {**SIZES[model], **({} if layers is None else {"num_hidden_layers": layers})}
    own = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    step = StepSizes(1, 8192, {"tp": 8}, "bfloat16", "bfloat16")
    with sharded(built(Config(**own, **sizes), step), step, "cuda") as ready:
        made = policylang.trace_step(ready.model, ready.loss_fn, *ready.batch, device="cuda", compute_capability=(9, 0))
        return facts_of(made)[0]


def simulated(facts: Facts, case: Case, peak: str, optimizer: str = "adamw") -> dict[str, Any]:
    """One row: the tuned stages, and the best policy with the same rules in all of them."""
    began = time.process_time()
    tuned = policylang.tune(
        facts,
        peak=peak,
        device=DEVICE,
        optimizer=optimizer,
        schedule=case.schedule,
        stages=case.stages,
        microbatches=case.microbatches,
    )
    seconds = time.process_time() - began
    return {
        **compared(tuned, case.model),
        "stages": case.stages,
        "microbatches": case.microbatches,
        "peak": peak,
        "tuning s": seconds,
    }


def compared(tuned: TunedPolicy, model: str) -> dict[str, Any]:
    found = tuned.tuned.stages
    assert found is not None
    alike = None if found.alike is None else found.alike.step
    return {
        "model": model,
        "step s": found.step,
        "same rules s": alike,
        "falls by %": None if alike is None else 100 * (1 - found.step / alike),
        "most GiB": max(each.peak for each in tuned.stages) / GIB,
        "lines": len(tuned.rules.splitlines()),
        "policy": tuned.text,
        "same rules": None if found.alike is None else found.alike.rules,
    }


# --- on four ranks, with times slept through -------------------------------------------------------------------------

RANKS, MICROBATCHES, LENGTH, SEQUENCES = 4, 8, 64, 4
SMALL = LlamaConfig(layers=8, sequence=LENGTH)
SLOW = DeviceProfile(name="slow", compute={"float32": Rate.constant(2.5e8)}, bandwidth=Rate.constant(1e15))
"""Products take tens of milliseconds there, and all else takes none."""


class SleptProducts(TorchDispatchMode):
    """Every product, in forward, recomputation and backward, sleeps for its time on the slow device."""

    def __init__(self) -> None:
        super().__init__()
        self.owed, self.computed = 0.0, time.thread_time()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            seconds = count(*args, **(kwargs or {}), out_val=result) / SLOW.compute["float32"].points[0][1]
            self.owed += seconds - (time.thread_time() - self.computed)  # what it computed meanwhile takes none there
            if self.owed > 0:
                began = time.perf_counter()
                time.sleep(self.owed)
                self.owed -= time.perf_counter() - began
            self.computed = time.thread_time()
        return result


class Stage(nn.Module):
    """Some blocks of a Llama, with the embedding in the first stage and the head in the last."""

    def __init__(self, model: Llama, rank: int) -> None:
        super().__init__()
        each = len(model.layers) // RANKS
        self.embedding = None if rank else model.embedding
        self.layers = model.layers[rank * each : (rank + 1) * each]
        self.norm, self.output = (model.norm, model.output) if rank == RANKS - 1 else (None, None)
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x if self.output is None else self.output(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tuned_small() -> TunedPolicy:
    """For a third of what the first stage takes if all save everything."""
    torch.manual_seed(0)
    tokens = torch.randint(SMALL.vocabulary, (SEQUENCES, LENGTH))
    step = policylang.trace_step(Llama(SMALL), lambda model, x, y: loss_of(model(x), y), tokens, tokens)
    facts = facts_of(step)[0]
    pipeline: dict[str, Any] = {"schedule": "1f1b", "stages": RANKS, "microbatches": MICROBATCHES}
    how: dict[str, Any] = {"device": SLOW, "path": "eager", "chunk": False, **pipeline}
    most = policylang.tune(facts, peak=1 << 40, **how)
    return policylang.tune(facts, peak=int(0.33 * most.stages[0].peak), **how)


def on_rank(rank: int, text: str, steps: int = 2) -> tuple[float, list[Tensor]]:
    """The least seconds of a step on the clock, and the gradients of this rank's stage after the last."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    stage = Stage(Llama(SMALL), rank)
    said = policylang.parse(text)
    policylang.checkpoint_model(stage, policylang.parse(text, stage=rank) if said.pipeline else said)
    schedule = Schedule1F1B(PipelineStage(stage, rank, RANKS, torch.device("cpu")), MICROBATCHES, loss_fn=loss_of)
    tokens = torch.randint(SMALL.vocabulary, (SEQUENCES * MICROBATCHES, LENGTH))
    given = [] if rank else [tokens]
    times = []
    for _ in range(steps + 1):  # the first one has to learn what each block keeps
        stage.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        with SleptProducts():
            schedule.step(*given, **({"target": tokens} if rank == RANKS - 1 else {}))
        dist.barrier()
        times.append(time.perf_counter() - began)
    return min(times[1:]), [each.grad for each in stage.parameters() if each.grad is not None]


def slept(rank_results: Mapping[str, Sequence[tuple[float, list[Tensor]]]], tuned: TunedPolicy) -> dict[str, Any]:
    """The row of what ranks measured under both policies."""
    row = compared(tuned, "small, slept")
    took = {name: max(seconds for seconds, _ in ranks) for name, ranks in rank_results.items()}
    one, other = ([each for _, gradients in ranks for each in gradients] for ranks in rank_results.values())
    same = all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
    return {
        **row,
        "measured s": took["tuned"],
        "same rules measured s": took["alike"],
        "measured falls by %": 100 * (1 - took["tuned"] / took["alike"]),
        "gradients": "equal" if same else "differ",
    }


def run_slept(steps: int = 2) -> dict[str, Any]:
    from tests.support.ranks import run_ranks

    tuned = tuned_small()
    alike = tuned.tuned.stages and tuned.tuned.stages.alike
    assert alike is not None
    texts = {"tuned": tuned.text, "alike": alike.rules}
    return slept({name: run_ranks(on_rank, RANKS, text, steps) for name, text in texts.items()}, tuned)


SHOWN = ("model", "stages", "microbatches", "peak", "step s", "same rules s", "falls by %", "most GiB", "tuning s")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*SIZES, "slept"], default=[*SIZES, "slept"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for case in CASES:
        if case.model in options.models:
            facts = traced(case.model)
            rows += [simulated(facts, case, peak) for peak in case.peaks]
    if rows:
        print(table([{name: row[name] for name in SHOWN} for row in rows]))
    measured = run_slept() if "slept" in options.models else None
    if measured is not None:
        print(table([{name: each for name, each in measured.items() if name not in ("policy", "same rules")}]))
    for row in (*rows, *([] if measured is None else [measured])):
        print(f"\n{row['policy']}")
    write_results(options.json, {"setup": {"device": DEVICE}, "simulated": rows, "slept": measured})


if __name__ == "__main__":
    main()
