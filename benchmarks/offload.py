"""What does moving saved values to the host cost, and what does it free, beside keeping them?

One Llama, one batch: everything kept in eager, PyTorch's ``save_on_cpu`` around the same model (each saved tensor
copied where it is saved and fetched where it is read), and a policy that saves everything or offloads the products of
the blocks, under ``torch.compile`` and on a flat graph. On a GPU the memory is that of the device. On a CPU host and
device are one: no memory falls, ``save_on_cpu`` copies nothing, and ``offload`` copies at once, beside nothing. The
step times there are the most that the copies can cost.

    python -m benchmarks.offload --device cpu --json benchmarks/results/offload.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import policylang
from benchmarks.common import seconds, table, write_results
from benchmarks.training_step import DEFAULT_SHAPE, MIB, SHAPES, Shape, StepModel, example

SAVE = "undecided -> save"
OFFLOAD = "undecided -> save; offload matmul in block"

Step = Callable[[Tensor], Any]
"""Forward and backward of a batch."""


@frozen
class Contender:
    name: str
    prepare: Callable[[StepModel, Tensor], tuple[Step, Any]]
    """The step, and what has a report of it; None where no policy is at work."""


def contenders(inner: str) -> list[Contender]:
    texts = (("saved", SAVE), ("offloaded", OFFLOAD))
    return [
        Contender("eager", lambda model, _: (_backward_of(model), None)),
        Contender("save_on_cpu, eager", lambda model, _: (_backward_of(_on_cpu(model)), None)),
        *(
            Contender(f"{name}, {inner}", lambda model, _, text=text: _compiled(model, text, inner))
            for name, text in texts
        ),
        *(
            Contender(f"{name}, flat", lambda model, tokens, text=text: _traced(model, tokens, text))
            for name, text in texts
        ),
    ]


def _backward_of(model: Step) -> Step:
    return lambda tokens: model(tokens).backward()


def _on_cpu(model: StepModel) -> Step:
    def call(tokens: Tensor) -> Tensor:
        with save_on_cpu(pin_memory=tokens.is_cuda):
            loss: Tensor = model(tokens)
        return loss

    return call


def _compiled(model: StepModel, text: str, inner: Any) -> tuple[Step, Any]:
    backend = policylang.backend(policylang.parse(text), inner=inner)
    return _backward_of(torch.compile(model, backend=backend)), backend


def _traced(model: StepModel, tokens: Tensor, text: str) -> tuple[Step, Any]:
    step = policylang.trace_step(model, lambda model, tokens: model(tokens), tokens)
    step.apply(policylang.parse(text))
    return step, step.gm


def measure(contender: Contender, shape: Shape, device: torch.device, steps: int) -> dict[str, Any]:
    model, tokens = example(shape, device)
    step, reported = contender.prepare(model, tokens)

    def run() -> None:
        step(tokens)
        if device.type == "cuda":
            torch.cuda.synchronize()

    run()
    run()
    offloaded = None if reported is None else policylang.report(reported).offloaded
    return {
        "contender": contender.name,
        "peak MiB": _peak(run) / MIB if device.type == "cuda" else None,
        "step s": statistics.median(seconds(run) for _ in range(steps)),
        "offloaded MiB": offloaded.bytes / MIB if offloaded else None,
    }


def _peak(run: Callable[[], None]) -> int:
    """Bytes of the device beyond those that stay between steps."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beside what keeps everything on the same path."""
    keeps = {_path(row): row for row in rows if row["contender"].startswith(("eager", "saved"))}
    for row in rows:
        peer = keeps[_path(row)]
        row["step / saved"] = row["step s"] / peer["step s"]
        row["peak / saved"] = row["peak MiB"] / peer["peak MiB"] if row["peak MiB"] else None
    return rows


def _path(row: dict[str, Any]) -> str:
    return str(row["contender"]).rpartition(" ")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), help="default: small on a CPU, 1b on a GPU")
    parser.add_argument("--inner", choices=("aot_eager", "inductor"), default="aot_eager")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    shape = SHAPES[options.shape or DEFAULT_SHAPE[options.device]]
    rows = []
    for contender in contenders(options.inner):
        print(f"measuring: {contender.name}", flush=True)
        rows.append(measure(contender, shape, torch.device(options.device), options.steps))
    rows = with_ratios(rows)
    print(table(rows))
    write_results(options.json, {"benchmark": "offload", "shape": str(shape), "steps": options.steps, "rows": rows})


if __name__ == "__main__":
    main()
