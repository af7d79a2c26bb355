"""``policylang demo``: a small Llama trained twice, without and with a policy, its memory, and what differs."""

from __future__ import annotations

import gc
import hashlib
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn

from policylang.audit.report import Report
from policylang.language.shown import format_quantity
from policylang.report.rendering import table
from policylang.torch_compat import eager


@frozen
class StepMemory:
    """Bytes beyond those that were there before the step: parameters, optimizer state, the batch."""

    saved: int
    """Alive between forward and backward, the loss left out: what the forward keeps for its backward."""
    peak: int
    """The most that was alive at once."""


def step_memory(forward: Callable[[], Tensor], resident: Iterable[Tensor], device: torch.device) -> StepMemory:
    """Run one forward and its backward. ``forward`` returns the loss; ``resident`` are the tensors not to count.

    On a CPU every operator's result is counted for as long as it lives, exact to the byte; on a GPU the caching
    allocator is asked, which rounds each tensor up.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = forward()
        saved = torch.cuda.memory_allocated() - before - loss.untyped_storage().nbytes()
        loss.backward()
        torch.cuda.synchronize()
        return StepMemory(saved, torch.cuda.max_memory_allocated() - before)
    ledger = _Ledger(resident)
    with eager.watching_results(ledger.count):
        loss = forward()
        saved = ledger.live - loss.untyped_storage().nbytes()
        loss.backward()
    return StepMemory(saved, ledger.peak)


class _Ledger:
    """The storages alive, by address, and the most bytes alive so far."""

    def __init__(self, resident: Iterable[Tensor]) -> None:
        self.live = 0
        self.peak = 0
        self._sizes = {tensor.untyped_storage().data_ptr(): 0 for tensor in resident}

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address in self._sizes:
            return
        self._sizes[address] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, address)

    def _release(self, address: int) -> None:
        self.live -= self._sizes.pop(address)


@frozen
class Settings:
    """The model (a Llama of Hugging Face with random weights), the batch and the run."""

    steps: int = 10
    device: str = "cpu"
    layers: int = 8
    hidden: int = 256
    heads: int = 8
    vocabulary: int = 1024
    batch: int = 4
    sequence: int = 256
    seed: int = 0

    @property
    def text(self) -> str:
        return (
            f"Llama, {self.layers} layers, hidden {self.hidden}, batch {self.batch} × {self.sequence} tokens, "
            f"float32 on {self.device}"
        )


@frozen
class MeasuredStep:
    loss: str
    """Every bit of it, as ``float.hex`` writes it."""
    seconds: float
    gradients: dict[str, str] = field(repr=False)
    """Parameter name to a digest of its gradient's bytes."""


@frozen
class TrainingRun:
    name: str
    steps: tuple[MeasuredStep, ...]
    memory: StepMemory
    compiled: Any = field(repr=False)
    """The compiled step, for :func:`policylang.report`."""

    @property
    def step_seconds(self) -> float:
        """The time of the fastest step, the one that the rest of the machine disturbed least."""
        return min(step.seconds for step in self.steps)


class TrainingStep(nn.Module):  # type: ignore[misc]  # torch is not followed by the type checker
    """Tokens to loss: the whole of what is compiled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(settings: Settings) -> TrainingStep:
    """Equal settings give equal weights. Nothing is downloaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=settings.hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.sequence,
        use_cache=False,
        attn_implementation="sdpa",
    )
    step = TrainingStep(LlamaForCausalLM(config).train())
    step.to(settings.device)
    return step


def train(name: str, settings: Settings, backend: Any, advance: Callable[[], None]) -> TrainingRun:
    """Train for ``settings.steps`` steps and measure one more. ``advance`` is called after each of them."""
    torch.compiler.reset()
    module = build(settings)
    step = torch.compile(module, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    tokens = batch_of(settings)
    steps = []
    for _ in range(settings.steps):
        start = time.perf_counter()
        loss = step(tokens)
        loss.backward()
        if tokens.device.type == "cuda":
            torch.cuda.synchronize()
        steps.append(MeasuredStep(loss.item().hex(), time.perf_counter() - start, _digests(module)))
        optimizer.step()
        optimizer.zero_grad()
        advance()
    resident = [*module.parameters(), *module.buffers(), tokens]
    memory = step_memory(lambda: step(tokens), resident, tokens.device)
    advance()
    return TrainingRun(name, tuple(steps), memory, step)


def differences(one: TrainingRun, other: TrainingRun) -> list[str]:
    """Losses and gradients that are not bitwise equal between two runs, one phrase each, the first steps first."""
    found = []
    for number, (a, b) in enumerate(zip(one.steps, other.steps, strict=True), start=1):
        if a.loss != b.loss:
            found.append(f"step {number}: the loss, {float.fromhex(a.loss)!r} and {float.fromhex(b.loss)!r}")
        names = a.gradients | b.gradients
        differing = [name for name in names if a.gradients.get(name) != b.gradients.get(name)]
        found += [f"step {number}: the gradient of {name}" for name in differing]
    return found


def batch_of(settings: Settings) -> Tensor:
    """The one batch that is trained on: random tokens, the same for the same settings."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    shape = (settings.batch, settings.sequence)
    return torch.randint(settings.vocabulary, shape, generator=generator).to(settings.device)


def _digests(module: nn.Module) -> dict[str, str]:
    def digest(tensor: Tensor) -> str:
        return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()

    return {name: digest(p.grad) for name, p in module.named_parameters() if p.grad is not None}


_MOST_DIFFERENCES = 10


@frozen
class RunComparison:
    settings: Settings
    without: TrainingRun
    with_policy: TrainingRun
    report: Report
    torch_version: str

    @property
    def differences(self) -> list[str]:
        """Empty if all is bitwise equal."""
        return differences(self.without, self.with_policy)

    @property
    def agrees(self) -> bool:
        """Bitwise equal, and the compiled graphs follow the plan."""
        return not self.differences and self.report.audit is not None and self.report.audit.agrees

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.settings.text,
            "torch": self.torch_version,
            "steps": self.settings.steps,
            "without": _run(self.without),
            "with": _run(self.with_policy),
            "bitwise_equal": not self.differences,
            "differences": self.differences,
            "report": self.report.to_dict(),
        }

    def __str__(self) -> str:
        a, b = self.without, self.with_policy
        rows = [("", f"without ({a.name})", f"with {b.name}", "ratio")]
        sizes = (
            ("kept for the backward", a.memory.saved, b.memory.saved),
            ("peak of a step", a.memory.peak, b.memory.peak),
        )
        for label, old, new in sizes:
            rows.append((label, format_quantity(old, "bytes"), format_quantity(new, "bytes"), f"{new / old:.2f}×"))
        took, takes = a.step_seconds, b.step_seconds
        rows.append(("the fastest step", f"{took * 1000:.0f} ms", f"{takes * 1000:.0f} ms", f"{takes / took:.2f}×"))
        head = f"measured on a {self.settings.text}, torch {self.torch_version}"
        return "\n\n".join((str(self.report), head, table(rows, right=range(1, 4)), self._verdict()))

    def _verdict(self) -> str:
        losses = [float.fromhex(step.loss) for step in self.with_policy.steps]
        gradients = len(self.with_policy.steps[0].gradients)
        if not self.differences:
            return (
                f"{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}: "
                f"every loss and all {gradients} gradients of every step are bitwise equal"
            )
        rest = len(self.differences) - _MOST_DIFFERENCES
        lines = [*self.differences[:_MOST_DIFFERENCES], *([f"and {rest} more"] if rest > 0 else [])]
        return "\n  ".join(["NOT bitwise equal:", *lines])


def _run(run: TrainingRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "saved_bytes": run.memory.saved,
        "peak_bytes": run.memory.peak,
        "step_seconds": run.step_seconds,
        "losses": [float.fromhex(step.loss) for step in run.steps],
    }
