"""Trains a small Llama for a few steps; losses and digests of gradients tell two compilations apart."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn

from policylang.commands.small_llama.memory import StepMemory, step_memory


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
    """One training run."""

    name: str
    steps: tuple[MeasuredStep, ...]
    memory: StepMemory
    compiled: Any = field(repr=False)
    """The compiled step, for :func:`policylang.report`."""

    @property
    def step_seconds(self) -> float:
        """Of the fastest step: the one that the rest of the machine disturbed least."""
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
    """The same settings give the same weights. Nothing is downloaded."""
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
        _synchronize(tokens)
        seconds = time.perf_counter() - start
        steps.append(MeasuredStep(loss.item().hex(), seconds, _digests(module)))
        optimizer.step()
        optimizer.zero_grad()
        advance()
    resident = [*module.parameters(), *module.buffers(), tokens]
    memory = step_memory(lambda: step(tokens), resident, tokens.device)
    advance()
    return TrainingRun(name, tuple(steps), memory, step)


def differences(one: TrainingRun, other: TrainingRun) -> list[str]:
    """What is not bitwise equal between two runs, one phrase each, the first steps first."""
    found = []
    for number, (a, b) in enumerate(zip(one.steps, other.steps, strict=True), start=1):
        if a.loss != b.loss:
            found.append(f"step {number}: the loss, {float.fromhex(a.loss)!r} and {float.fromhex(b.loss)!r}")
        found += [
            f"step {number}: the gradient of {name}"
            for name in a.gradients | b.gradients
            if a.gradients.get(name) != b.gradients.get(name)
        ]
    return found


def batch_of(settings: Settings) -> Tensor:
    """The one batch that is trained on: random tokens, the same for the same settings."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    shape = (settings.batch, settings.sequence)
    return torch.randint(settings.vocabulary, shape, generator=generator).to(settings.device)


def _digests(module: nn.Module) -> dict[str, str]:
    return {name: _digest(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def _synchronize(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize()
