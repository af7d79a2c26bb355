"""What does cutting the loss into slices free, and what does it cost, beside Inductor's auto-chunker?

One head over a vocabulary and its cross entropy, forward and backward, under Inductor on a CPU: whole, with
Inductor's ``auto_chunker`` where this torch has it, and under ``chunk loss into N``, which on a flat graph runs
without Inductor as well; and TRL's chunked log-probabilities in eager, where TRL is installed (Liger's fused linear
cross entropy is a Triton kernel, which a CPU does not run). Peak is what the allocator had alive at most beyond what
was there before, and beside it the peak of the plan; compile time is the first call.

    python -m benchmarks.chunk --slices 8 --json benchmarks/results/chunk.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import policylang
from benchmarks.allocations import peak_allocated
from benchmarks.common import table, write_results
from policylang.graph.collect import collect
from policylang.planning.capabilities import FLAT
from policylang.planning.planner import plan

MIB = 1 << 20


def loss_of(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


def measured(run: Callable[[], object]) -> tuple[float, float, float]:
    """Processor seconds of the first call without the compilers that it starts, the least of three more calls, and the
    peak in MiB."""
    start = time.process_time()
    run()
    first = time.process_time() - start
    times = []
    for _ in range(3):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return first, min(times), peak_allocated(run) / MIB


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--width", type=int, default=256)
    options.add_argument("--vocabulary", type=int, default=16384)
    options.add_argument("--slices", type=int, nargs="+", default=[8])
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    torch.manual_seed(0)
    layers = nn.Linear(asked.width, asked.width), nn.Tanh(), nn.Linear(asked.width, asked.vocabulary, bias=False)
    model = nn.Sequential(*layers)
    x, labels = torch.randn(asked.tokens, asked.width), torch.randint(asked.vocabulary, (asked.tokens,))

    def training(call: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Callable[[], object]:
        def run() -> object:
            found = call(model, x, labels)
            return found, torch.autograd.grad(found, list(model.parameters()))

        return run

    rows: list[dict[str, object]] = []

    def add(name: str, run: Callable[[], object], planned: float | None = None) -> None:
        torch._dynamo.reset()
        first, again, peak = measured(run)
        figures = {"first_s": round(first, 2), "step_ms": round(again * 1e3), "peak_mib": round(peak, 1)}
        rows.append({"name": name, **figures, "planned_mib": None if planned is None else round(planned, 1)})

    add("inductor", training(torch.compile(loss_of)))
    chunker = getattr(torch._inductor.config, "auto_chunker", None)
    if chunker is not None:
        with torch._inductor.config.patch({"auto_chunker.enable": True, "auto_chunker.num_chunk": asked.slices[0]}):
            add(f"inductor, auto_chunker, {asked.slices[0]}", training(torch.compile(loss_of)))
    try:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    except ImportError:
        print("TRL is not installed: without its chunked log-probabilities")
    else:

        def by_trl(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
            stem, head = model[:-1], model[-1]  # type: ignore[index]
            width = asked.vocabulary // asked.slices[0]
            return -ChunkedLogProbFunction.apply(stem(x), head.weight, None, labels, 1.0, width, None, 1.0, ())[
                0
            ].mean()

        add(f"eager, TRL, {asked.slices[0]}", training(by_trl))
    given = x.nbytes + labels.nbytes + sum(each.nbytes for each in model.parameters())
    for text in ("optional save convolution", *(f"chunk loss into {count}" for count in asked.slices)):
        name = "flat, " + ("whole" if "chunk" not in text else text)
        step = policylang.trace_step(model, loss_of, x, labels)
        step_policy = policylang.parse(text)
        planned = (plan(step_policy, collect(step.gm), FLAT).peak.bytes - given) / MIB
        policylang.apply(step.gm, step_policy)
        planned = (
            plan(step_policy, collect(policylang.trace_step(model, loss_of, x, labels).gm), FLAT).peak.bytes - given
        ) / MIB
        add(name, lambda step=step: step(x, labels), planned)  # type: ignore[misc]
        if "chunk" in text:
            add(f"inductor, {text}", training(torch.compile(loss_of, backend=policylang.backend(step_policy))))
    print(table(rows))
    if asked.json:
        write_results(asked.json, {"options": {key: str(value) for key, value in vars(asked).items()}, "rows": rows})


if __name__ == "__main__":
    main()
