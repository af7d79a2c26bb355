"""A framework's own setting and the lines that docs/coming-from.md puts beside it: two trainings, compared.

    python examples/coming_from.py                       # every framework that is installed
    python examples/coming_from.py trl lightning         # some of them

Each trains a small Llama with random weights on a CPU, once with the setting and once with the policy, and prints the
FLOPs of both, recomputation included, and whether the weights are equal to the last bit. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import policylang

FULL = "recompute everything in block; save everything in block where crosses block"
SELECTIVE = f"{FULL}; save attention in block; save mm in block; recompute every 2nd mm per block"
STEPS = 2
QUIET = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}

Change = Callable[[Any], None]
Train = Callable[[Any, bool], None]
"""Trains a model; True says that the framework's own setting is on."""


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))


def batches() -> list[Tensor]:
    return list(torch.randint(3, 128, (STEPS, 2, 32), generator=torch.Generator().manual_seed(1)))


def rows() -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row} for row in torch.cat(batches())]


def by_hand(model: Any, own: bool = False, backward: Callable[[Tensor], None] = Tensor.backward) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for tokens in batches():
        optimizer.zero_grad()
        backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()


# --- the settings ---


def each_block(context_fn: Callable[[], Any] | None = None) -> Change:
    """``torch.utils.checkpoint`` around each block, with contexts or without."""

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        options = {} if context_fn is None else {"context_fn": context_fn}
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    def change(model: Any) -> None:
        for block in model.model.layers:
            block.forward = wrap(block.forward)

    return change


def every_second() -> Any:
    """Saves attention and, by a counter, the first ``mm`` of two."""
    seen = {True: 0, False: 0}

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if "attention" in str(operator):
            return CheckpointPolicy.MUST_SAVE
        if operator == torch.ops.aten.mm.default:
            seen[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if seen[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def switch(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def nothing(model: Any) -> None:
    """The framework's own argument says it."""


# --- the trainings ---


def by_transformers(model: Any, own: bool) -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        Trainer(model, TrainingArguments(folder, **QUIET, gradient_checkpointing=own), train_dataset=rows()).train()


def by_trl(model: Any, own: bool) -> None:
    """TRL checkpoints by default: with a policy, turn that off."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(128)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w0")
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(folder, **QUIET, bf16=False, gradient_checkpointing=own)
        SFTTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer).train()


def by_accelerate(model: Any, own: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    by_hand(accelerator.prepare(model), backward=accelerator.backward)


def by_lightning(model: Any, own: bool) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, tokens: Tensor, number: int) -> Tensor:
            return self.model(input_ids=tokens, labels=tokens).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, **dict.fromkeys(quiet, False))
    trainer.fit(Module(), torch.utils.data.DataLoader(batches(), batch_size=None))


FRAMEWORKS: dict[str, list[tuple[str, Change, str, Train]]] = {
    "torch": [
        ("checkpoint(block, x)", each_block(), FULL, by_hand),
        ("context_fn with a counter", each_block(every_second), SELECTIVE, by_hand),
    ],
    "accelerate": [("gradient_checkpointing_enable()", switch, FULL, by_accelerate)],
    "transformers": [("gradient_checkpointing=True", nothing, FULL, by_transformers)],
    "trl": [("gradient_checkpointing=True", nothing, FULL, by_trl)],
    "lightning": [("gradient_checkpointing_enable()", switch, FULL, by_lightning)],
}
"""For each setting: how the model gets it, the lines of the page, and the training."""


def trained(change: Change, train: Train, own: bool) -> tuple[int, dict[str, Tensor]]:
    """FLOPs of the training, and the weights behind it."""
    model = make_model()
    change(model)
    with FlopCounterMode(display=False) as counted:
        train(model, own)
    return counted.get_total_flops(), dict(model.named_parameters())


def compared(setting: Change, lines: str, train: Train) -> tuple[int, int, bool]:
    """FLOPs with the setting and with the policy, and whether the weights are equal."""
    policy = policylang.parse(lines.replace("; ", "\n") + "\n")
    own, weights = trained(setting, train, own=True)
    ours, found = trained(lambda model: policylang.checkpoint_model(model, policy, strict=True), train, own=False)
    return own, ours, all(torch.equal(weight, found[name]) for name, weight in weights.items())


def main(names: list[str]) -> None:
    for name in names or [name for name in FRAMEWORKS if importlib.util.find_spec(name)]:
        for what, setting, lines, train in FRAMEWORKS[name]:
            own, ours, equal = compared(setting, lines, train)
            print(f"{name:12} {what:32} {own:,} FLOPs, policy {ours:,} FLOPs, weights {'equal' if equal else 'DIFFER'}")


if __name__ == "__main__":
    main(sys.argv[1:])
