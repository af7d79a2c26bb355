"""Train with the Trainer of Hugging Face under a policy, eagerly: without `torch.compile`.

    python examples/hf_trainer.py                # with examples/mine.apl
    python examples/hf_trainer.py llama3_sac     # with a bundled policy
    python examples/hf_trainer.py none           # without any: the losses are the same, to the last bit

Needs `transformers` and `accelerate`. Nothing is downloaded: a small Llama with random weights learns to add.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import policylang

POLICY = Path(__file__).with_name("mine.apl")
LENGTH = 64


def sums() -> list[dict[str, torch.Tensor]]:
    """The data: sums in words, one byte a token."""
    texts = [f"{one} and {two} make {one + two}. " * 8 for one in range(16) for two in range(16)]
    rows = [torch.tensor(list(text.encode()[:LENGTH])) for text in texts]
    return [{"input_ids": row, "labels": row} for row in rows]


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, steps: int) -> list[float]:
    """The loss of every step."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            logging_steps=1,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=sums())
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(policy: str | Path, steps: int = 5) -> list[float]:
    model = make_model()
    if policy != "none":
        # One function for all blocks: it was given the model, and knows which of its blocks is about to run.
        context_fn = policylang.context_fn(policy, model)
        # In older versions of transformers its name is `gradient_checkpointing_enable`.
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": context_fn})
    losses = train(model, steps)
    if policy != "none":
        print()
        print(policylang.report(model))
    return losses


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else POLICY)
