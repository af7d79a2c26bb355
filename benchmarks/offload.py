"""What does moving saved values to the host cost, and what does it free, beside keeping them?

One Llama, one batch: everything kept in eager, PyTorch's ``save_on_cpu`` around the same model (each saved tensor
copied where it is saved and fetched where it is read), and a policy that saves everything or offloads the products of
the blocks, under ``torch.compile`` and on a flat graph. On a GPU the memory is that of the device. On a CPU host and
device are one: no memory falls, ``save_on_cpu`` copies nothing, and ``offload`` copies at once, beside nothing. The
step times there are the most that the copies can cost.

``--device counted`` is the device of the tests (``tests/support/device.py``): memory apart from the host's, a clock of
its own, copies that take their time beside computation. There the blocks of the model run in eager: kept, in
checkpoints, under ``save_on_cpu``, under the offloading checkpoints of Transformers, and under policies. Its figures
have the ratios of an H100 to Llama-3 8B, whose blocks compute more for each byte that crosses them than small ones do.
``save_on_cpu`` copies on the stream that computes, and so it does there. The classes of TRL and torchtune look for an
accelerator that PyTorch knows, and run on a GPU alone.

    python -m benchmarks.offload --device cpu --json benchmarks/results/offload.json
    python -m benchmarks.offload --device counted --json benchmarks/results/offload_eager.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import policylang
from benchmarks.common import seconds, table, write_results
from benchmarks.training_step import DEFAULT_SHAPE, MIB, SHAPES, Shape, StepModel, example
from policylang.backends import copies
from policylang.backends.copies import HOST
from policylang.language.devices.profile import DeviceProfile, Rate

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


RECOMPUTE = "recompute everything in block"
CROSSING = f"{RECOMPUTE}; offload everything in block where crosses block"
LAST = f"{CROSSING} outside last block"
ATTENTION = f"{CROSSING} outside last block; offload attention in block outside last block"
ALL = "offload everything in block where feeds backward outside last block"


def on_counted_device(shape: Shape) -> list[dict[str, Any]]:
    """A later step of each way to run the blocks in eager; all have the same gradients."""
    from tests.support.device import Device

    rows, expected = list[dict[str, Any]](), list[Tensor]()
    for name, prepare in _ways().items():
        print(f"measuring: {name}", flush=True)
        model, tokens = example(shape, torch.device("cpu"))
        device = Device(DeviceProfile("ratios", {"float32": Rate.constant(4e9)}, Rate.constant(7e8), host_bandwidth=H))
        step = prepare(model, device)
        step(tokens)
        model.zero_grad()
        found = device.step(partial(step, tokens), [*model.parameters(), *model.buffers(), tokens])
        gradients = [each.grad for each in model.parameters()]
        expected = expected or gradients
        rows.append(
            {
                "contender": name,
                "device MiB": found.peak / MIB,
                "host MiB": found.host / MIB,
                "step s": found.seconds,
                "exposed s": found.exposed,
                "same bits": all(map(torch.equal, gradients, expected)),
            }
        )
    for row in rows:
        row["step / kept"] = row["step s"] / rows[0]["step s"]
    return rows


H = 1.14e7
"""Bytes/s between the counted device and the host."""


def _ways() -> dict[str, Callable[[StepModel, Any], Step]]:
    texts = {
        "policy: recompute": RECOMPUTE,
        "policy: offload what crosses blocks": CROSSING,
        "policy: ... outside the last block": LAST,
        "policy: ... and attention": ATTENTION,
        "policy: offload everything": ALL,
    }
    return {
        "kept": lambda model, _: _backward_of(model),
        "save_on_cpu": lambda model, device: _within(model, device),
        "Transformers, offload": _by_transformers,
        **{name: lambda model, _, text=text: _under(model, text) for name, text in texts.items()},
    }


def _under(model: StepModel, text: str) -> Step:
    return _backward_of(policylang.checkpoint_model(model, policylang.parse(text)))


def _within(model: StepModel, device: Any) -> Step:
    def call(tokens: Tensor) -> Tensor:
        with _on_computing_stream(device):
            loss: Tensor = model(tokens)
        return loss

    return _backward_of(call)


def _by_transformers(model: StepModel, device: Any) -> Step:
    """The ``save_on_cpu`` that Transformers puts around each checkpoint is that of the counted device."""
    model.model.activation_checkpointing_enable(offload=False)
    for layer in model.model.model.layers:
        plain = layer._gradient_checkpointing_func

        def checkpoint(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            with _on_computing_stream(device):
                return plain(*args, **kwargs)

        layer._gradient_checkpointing_func = checkpoint
    return _backward_of(model.train())


def _on_computing_stream(device: Any) -> Any:
    """Each saved tensor is copied to the host where it is saved, and back where it is read, while nothing computes."""

    def pack(value: Tensor) -> Any:
        host = copies.pool.take(value.numel() * value.itemsize, HOST)
        source = value.detach().contiguous().flatten().view(torch.uint8)
        device.link(host, source)()
        return host, value.dtype, value.size()

    def unpack(packed: Any) -> Tensor:
        host, dtype, size = packed
        back = torch.empty(len(host), dtype=torch.uint8)
        device.link(back, host)()
        return back.view(dtype).view(size)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda", "counted"), default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), help="default: small on a CPU, 1b on a GPU")
    parser.add_argument("--inner", choices=("aot_eager", "inductor"), default="aot_eager")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    shape = SHAPES[options.shape or DEFAULT_SHAPE["cuda" if options.device == "cuda" else "cpu"]]
    rows = on_counted_device(shape) if options.device == "counted" else list[dict[str, Any]]()
    for contender in contenders(options.inner) if not rows else ():
        print(f"measuring: {contender.name}", flush=True)
        rows.append(measure(contender, shape, torch.device(options.device), options.steps))
    rows = rows if options.device == "counted" else with_ratios(rows)
    print(table(rows))
    write_results(options.json, {"benchmark": "offload", "shape": str(shape), "steps": options.steps, "rows": rows})


if __name__ == "__main__":
    main()
