"""Offloading in loops of other people: to the bit the losses, gradients and weights of the same loop without."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policylang
from policylang.backends.copies import pool
from tests.support import frameworks
from tests.support.late import Late, copied_over

CROSSING = "recompute everything in block\noffload everything in block where crosses block"
ALL = "offload everything in block"


def own_checkpoints(model: nn.Module, text: str) -> nn.Module:
    return policylang.checkpoint_model(model, policylang.parse(text), strict=True)


def wrapped_one_by_one(model: Any, text: str) -> nn.Module:
    """As Axolotl has each block of Transformers checkpointed under its offloading: by torch's wrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.modeling_layers import GradientCheckpointingLayer

    function = policylang.context_fn(policylang.parse(text), model, strict=True)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, context_fn=function),
        auto_wrap_policy=ModuleWrapPolicy({GradientCheckpointingLayer}),
    )
    return model


def the_switch(model: Any, text: str) -> nn.Module:
    function = policylang.context_fn(policylang.parse(text), model, strict=True)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": function})
    return model


def by_lightning(model: nn.Module, folder: Path) -> list[Tensor]:
    pytest.importorskip("lightning")
    import lightning.pytorch as library

    class Lit(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = model, list[Tensor]()

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            loss = frameworks.causal_loss(self.model, tokens)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=1e-2)

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lit = Lit()
    trainer = library.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=folder, **quiet)
    trainer.fit(lit, torch.utils.data.DataLoader(frameworks.batches(2), batch_size=None))
    return lit.losses


OF_TRL = {
    "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
    "gradient_accumulation_steps": 2, "max_steps": 2, "logging_steps": 1,
}  # fmt: skip


def by_sft(model: Any, folder: Path, **settings: Any) -> list[Tensor]:
    """Sequences of 500 tokens and fewer."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    given = {"gradient_checkpointing": False, "per_device_train_batch_size": 2, "max_length": 512, **settings}
    texts = [{"text": frameworks.sentence(number, 500 - 90 * (number % 3))} for number in range(8)]
    data = datasets.Dataset.from_list(texts)
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(str(folder), **OF_TRL, **given),
        train_dataset=data,
        processing_class=frameworks.tokenizer(),
    )
    trainer.train()
    return frameworks.losses_of(trainer)


def by_grpo(model: Any, folder: Path, **settings: Any) -> list[Tensor]:
    """It generates with the model, which stands aside meanwhile, and takes off checkpoints for that."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    sizes = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 24}
    arguments = trl.GRPOConfig(str(folder), **OF_TRL, **{"gradient_checkpointing": False, **sizes, **settings})
    data = datasets.Dataset.from_list([{"prompt": frameworks.sentence(number, 300)} for number in range(4)])

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(each.split()))) for each in completions]

    trainer = trl.GRPOTrainer(model, reward, arguments, train_dataset=data, processing_class=frameworks.tokenizer())
    trainer.train()
    return frameworks.losses_of(trainer)


LOOPS: dict[str, Callable[[Any, Path], list[Tensor]]] = {
    "by hand": lambda model, _: frameworks.by_hand(model),
    "Accelerate": lambda model, _: frameworks.accelerated(model),
    "Trainer": partial(frameworks.by_the_trainer, gradient_accumulation_steps=2),
    "Lightning": by_lightning,
    "TRL SFT": by_sft,
    "TRL GRPO": by_grpo,
}


@pytest.mark.slow
@pytest.mark.parametrize("text", [CROSSING, ALL], ids=["crossing", "all"])
@pytest.mark.parametrize("way", [own_checkpoints, the_switch, wrapped_one_by_one], ids=lambda each: each.__name__)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_bits_of_the_same_loop_without(loop, way, text, tmp_path) -> None:
    expected = frameworks.Trained.by(lambda model: LOOPS[loop](model, tmp_path / "plain"), frameworks.llama())
    model, late = way(frameworks.llama(), text), Late(1)
    taken_off = loop == "TRL GRPO" and way is the_switch  # to generate; the arguments have to ask for them again
    expect = pytest.warns(policylang.PolicyWarning, match="APL426") if taken_off else nullcontext()
    with copied_over(late), expect:
        found = frameworks.Trained.by(lambda model: LOOPS[loop](model, tmp_path / "offloaded"), model)
    assert frameworks.differences(expected, found) == []
    if taken_off:
        return
    assert late.out
    assert late.back
    assert (pool.in_use, late.pending) == (0, [])
    assert policylang.report(model).audit.agrees


@pytest.mark.slow
@pytest.mark.parametrize("loop", [by_sft, by_grpo], ids=["SFT", "GRPO"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_by_the_arguments_of_trl(loop: Any, tmp_path: Path) -> None:
    """The trainer asks Transformers for the checkpoints; GRPO takes them off and puts them on again for each batch."""
    expected = frameworks.Trained.by(lambda model: loop(model, tmp_path / "plain"), frameworks.llama())
    model, late = frameworks.llama(), Late(1)
    function = policylang.context_fn(policylang.parse(CROSSING), model, strict=True)
    asked = {"use_reentrant": False, "context_fn": function}

    def offloaded(model: nn.Module) -> Any:
        return loop(model, tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=asked)

    with copied_over(late):
        found = frameworks.Trained.by(offloaded, model)
    assert frameworks.differences(expected, found) == []
    assert late.out
    assert (pool.in_use, late.pending) == (0, [])
    assert policylang.report(model).audit.agrees
