"""Trainers under a policy: that of Transformers and those of TRL, each where it installs. To the bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policylang
from tests.support import frameworks
from tests.support.frameworks import POLICY, QUIET, WAYS, Trained, check, differences, llama, rows, sentence, tokenizer

pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error::policylang.errors.PolicyWarning")]

BOTH = pytest.mark.parametrize("way", list(WAYS))


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"label_smoothing_factor": 0.1},
        {"neftune_noise_alpha": 5.0},
        {"bf16": True},
        {"optim": "adafactor"},
    ],
    ids=lambda settings: next(iter(settings)),
)
@BOTH
def test_the_trainer(settings: dict[str, Any], way: str, tmp_path: Path) -> None:
    check(llama, partial(frameworks.by_the_trainer, folder=tmp_path, **settings), way)


@BOTH
def test_the_trainer_goes_on_where_it_stopped(way: str, tmp_path: Path) -> None:
    """In another process it would be another model object: here, too."""
    from transformers import Trainer, TrainingArguments

    def trained(change: Callable[[nn.Module], nn.Module], folder: Path) -> Trained:
        def trainer(model: nn.Module, steps: int) -> Any:
            settings = QUIET | {"save_strategy": "steps", "save_steps": 2, "max_steps": steps}
            return Trainer(model, TrainingArguments(str(folder), **settings), train_dataset=rows(16))

        def both_halves(model: nn.Module) -> list[Tensor]:
            trainer(change(llama()), 2).train()
            second = trainer(model, 4)
            second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
            return frameworks.losses_of(second)

        return Trained.by(both_halves, change(llama()))

    expected = trained(lambda model: model, tmp_path / "without")
    assert differences(expected, trained(WAYS[way], tmp_path / "with")) == []


@pytest.fixture
def trl() -> Any:
    pytest.importorskip("datasets")
    return pytest.importorskip("trl")


OURS = {"gradient_checkpointing": False, "bf16": False}
"""TRL turns checkpoints and bfloat16 on by itself; a policy is given to the model instead."""


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "LoRA"])
@BOTH
def test_supervised_fine_tuning(trl: Any, adapters: bool, way: str, tmp_path: Path) -> None:
    from datasets import Dataset

    data = Dataset.from_list([{"text": sentence(number, 6 + number % 3)} for number in range(16)])

    def make() -> Any:
        if not adapters:
            return llama()
        peft = pytest.importorskip("peft")
        model = llama()
        torch.manual_seed(2)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))

    def loop(model: Any) -> list[Tensor]:
        settings = trl.SFTConfig(str(tmp_path), **QUIET | OURS, max_length=16)
        trainer = trl.SFTTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer())
        trainer.train()
        return frameworks.losses_of(trainer)

    check(make, loop, way)


@BOTH
def test_preferences(trl: Any, way: str, tmp_path: Path) -> None:
    """DPO: the reference model is another one, and is frozen."""
    from datasets import Dataset

    data = Dataset.from_list(
        [
            {"prompt": sentence(at, 3), "chosen": " " + sentence(at + 1, 4), "rejected": " " + sentence(at + 2, 5)}
            for at in range(16)
        ]
    )

    def loop(model: Any) -> list[Tensor]:
        settings = trl.DPOConfig(str(tmp_path), **QUIET | OURS, max_length=16)
        given = {"args": settings, "train_dataset": data, "processing_class": tokenizer()}
        trainer = trl.DPOTrainer(model, ref_model=llama(), **given)
        trainer.train()
        return frameworks.losses_of(trainer)

    check(llama, loop, way)


@pytest.mark.parametrize("inside", [None, *WAYS], ids=str)
def test_the_trainer_over_our_compiler(inside: str | None, tmp_path: Path) -> None:
    """What it is handed is compiled already. Compared with PyTorch's compiler, which has bits of its own."""

    def compiled(backend: Any) -> tuple[Trained, nn.Module]:
        torch._dynamo.reset()
        model = llama(attention_dropout=0.0)
        if inside is not None and backend != "aot_eager":
            model = WAYS[inside](model)
        model.compile(backend=backend)
        return Trained.by(partial(frameworks.by_the_trainer, folder=tmp_path), model), model

    expected, _ = compiled("aot_eager")
    found, model = compiled(policylang.backend(POLICY, inner="aot_eager"))
    assert differences(expected, found) == []
    report = policylang.report(model)
    assert report.audit.agrees
    assert "3 blocks" in str(report)


def test_the_trainer_takes_no_name_of_a_compiler_that_it_does_not_know(tmp_path: Path) -> None:
    """What the documentation says of it."""
    with pytest.raises(ValueError, match="not a valid DynamoBackend"):
        frameworks.by_the_trainer(llama(), tmp_path, torch_compile=True, torch_compile_backend="policylang")


def test_the_trainer_over_blocks_that_are_compiled(tmp_path: Path) -> None:
    def blocks_compiled(model: nn.Module) -> nn.Module:
        inner: Any = policylang.checkpoint_model(model, POLICY)
        backend = policylang.backend(POLICY, inner="aot_eager")
        for block in inner.model.layers:
            block.compile(backend=backend)
        return model

    check(
        lambda: llama(attention_dropout=0.0),
        partial(frameworks.by_the_trainer, folder=tmp_path),
        blocks_compiled,
        blocks=0,
    )
