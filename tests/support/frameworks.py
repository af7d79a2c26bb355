"""Training by somebody else's loop, as bits: without checkpoints, and under a policy in each of the ways to ask for it.

A loop takes a model, trains it, and returns its losses. Compared are these losses, the gradients that it leaves behind,
and all weights and buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor, nn

import policylang
from tests.support import models

POLICY = "llama3_sac"
_WRAPPED = "_checkpoint_wrapped_module."
LAYERS = 3

Loop = Callable[[nn.Module], Sequence[Any]]
Way = Callable[[nn.Module], nn.Module]


def llama(**settings: Any) -> Any:
    """A causal language model of Hugging Face, the same weights each time."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    given = {"attention_dropout": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **settings}
    return models.hugging_face("LlamaConfig", "LlamaForCausalLM", **sizes, **heads, **given)


def batches(count: int, size: int = 2, length: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, models.VOCABULARY, (size, length), generator=generator) for _ in range(count)]


def rows(count: int) -> list[dict[str, Tensor]]:
    """A dataset of sequences, as trainers take it."""
    return [{"input_ids": row, "labels": row} for row in torch.cat(batches(count, size=1))]


def tokenizer() -> Any:
    """One word a token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(models.VOCABULARY - 4))]
    tokenizer = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def sentence(first: int, length: int) -> str:
    return " ".join(f"w{(first * 5 + at * at) % 60}" for at in range(length))


def causal_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = 3) -> list[Tensor]:
    """The plainest loop: a step is two batches."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step, tokens in enumerate(batches(steps)):
        torch.manual_seed(step)
        optimizer.zero_grad()
        for micro in tokens.split(1):
            loss = causal_loss(model, micro)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    return losses


def accelerated(model: nn.Module, precision: str = "no") -> list[Tensor]:
    """Accelerate's: a step is two batches."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    loader = torch.utils.data.DataLoader(batches(6), batch_size=None)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    try:
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = causal_loss(model, tokens)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
    return losses


QUIET: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1, "use_cpu": True, "report_to": "none",
    "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2,
}  # fmt: skip


def by_the_trainer(model: nn.Module, folder: Path, **settings: Any) -> list[Tensor]:
    """That of Transformers."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    trainer = Trainer(model, TrainingArguments(str(folder), **QUIET | settings), train_dataset=rows(16))
    trainer.train()
    return losses_of(trainer)


def losses_of(trainer: Any) -> list[Tensor]:
    return [torch.tensor(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def own_checkpoints(model: nn.Module) -> nn.Module:
    return policylang.checkpoint_model(model, POLICY, strict=True)


def the_switch(model: nn.Module) -> nn.Module:
    """The checkpoints that Transformers has itself, through whatever stands around its model."""
    function = policylang.context_fn(POLICY, model, strict=True)
    inner: Any = model
    inner.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": function})
    return model


WAYS: dict[str, Way] = {"own checkpoints": own_checkpoints, "the switch": the_switch}


@frozen(eq=False)
class Trained:
    losses: list[Tensor]
    tensors: dict[str, Tensor]

    @classmethod
    def by(cls, loop: Loop, model: nn.Module) -> Trained:
        torch.manual_seed(1)
        losses = [torch.as_tensor(loss).detach().clone() for loss in loop(model)]
        parameters = dict(model.named_parameters())
        tensors = {f"gradient of {name}": each.grad for name, each in parameters.items() if each.grad is not None}
        tensors |= {f"weight {name}": each for name, each in (*parameters.items(), *model.named_buffers())}
        return cls(losses, {name.replace(_WRAPPED, ""): plain(each) for name, each in tensors.items()})


def plain(tensor: Tensor) -> Tensor:
    """What a tensor of a quantizing library stands for."""
    tensor = tensor.detach()
    return (tensor.dequantize() if hasattr(tensor, "tensor_data_names") else tensor).clone()


def differences(one: Trained, other: Trained) -> list[str]:
    """The names of what is not the same to the last bit."""
    assert one.losses
    assert len(one.losses) == len(other.losses)
    assert one.tensors.keys() == other.tensors.keys()
    found = [f"loss {at}" for at, pair in enumerate(zip(one.losses, other.losses, strict=True)) if not _equal(*pair)]
    return found + [name for name, tensor in one.tensors.items() if not _equal(tensor, other.tensors[name])]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def check(make: Callable[[], nn.Module], loop: Loop, way: str | Way, blocks: int = LAYERS) -> None:
    """The same bits with and without, in the blocks that were to be found, and the audit agrees."""
    expected = Trained.by(loop, make())
    model = (WAYS[way] if isinstance(way, str) else way)(make())
    assert differences(expected, Trained.by(loop, model)) == []
    report = policylang.report(model)
    assert len(report.graphs) >= blocks, "a block simply ran"
    assert report.audit.differences == ()
