"""The callbacks that log a policy's report, in the trainers that they are for."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

import policylang
from policylang.errors import PolicyWarning
from policylang.integrations import ChangedScalars
from tests.support.frameworks import POLICY, batches, causal_loss, llama, rows

pytest.importorskip("transformers", reason="the models are its own")


def checkpointed() -> Any:
    model = llama()
    policylang.checkpoint_model(model, POLICY)
    return model


def reported(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name.startswith("policylang/")}


def test_scalars_are_given_once_they_are_there_and_when_they_change() -> None:
    model, scalars = checkpointed(), ChangedScalars("policylang/")
    assert scalars.of(model) == {}
    for length in (8, 12):
        causal_loss(model, batches(1, length=length)[0]).backward()
        new = scalars.of(model)
        assert new == policylang.report(model).scalars() != {}
        assert scalars.of(model) == {}
        policylang.checkpoint_model(model, None)
        policylang.checkpoint_model(model, POLICY)


def hugging_face(folder: Path, model: Any, **settings: Any) -> Any:
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
    from transformers import Trainer, TrainingArguments

    from policylang.integrations.transformers import TransformersCallback

    quiet = {"max_steps": 4, "logging_steps": 1, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(str(folder), **{**quiet, "report_to": "none", **settings})
    trainer = Trainer(model, arguments, train_dataset=rows(16))
    trainer.add_callback(TransformersCallback(trainer))
    return trainer


def test_the_trainer_of_transformers_logs_the_report_once(tmp_path: Path) -> None:
    trainer = hugging_face(tmp_path, checkpointed())
    trainer.train()
    (entry,) = filter(reported, trainer.state.log_history)
    assert reported(entry) == policylang.report(trainer.model).scalars()
    assert entry["step"] == 1
    assert sum("loss" in each for each in trainer.state.log_history) == 4


def test_the_report_is_in_what_tensorboard_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    trainer = hugging_face(tmp_path, checkpointed(), report_to="tensorboard")
    trainer.train()
    (events,) = (tmp_path / "runs").rglob("events.*")
    accumulator = accumulators.EventAccumulator(str(events))
    accumulator.Reload()
    (found,) = accumulator.Scalars("train/policylang/saved_bytes")
    assert found.value == policylang.report(trainer.model).saved.bytes


def test_a_training_without_a_report_says_so(tmp_path: Path) -> None:
    with pytest.warns(PolicyWarning, match="no report was logged"):
        hugging_face(tmp_path, llama()).train()


@pytest.mark.filterwarnings("ignore:.*:UserWarning:lightning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("policy", "steps"), [(True, 2), (True, 50), (False, 2)])
def test_lightning_logs_the_report_once(policy: bool, steps: int, tmp_path: Path) -> None:
    """Also of a training that is over before the first logging step."""
    library: Any = pytest.importorskip("lightning.pytorch", reason="the callback is one of Lightning's")
    from lightning.pytorch.loggers import CSVLogger

    from policylang.integrations.lightning import LightningCallback

    class Lit(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = checkpointed() if policy else llama()

        def training_step(self, tokens: torch.Tensor, number: int) -> torch.Tensor:
            return causal_loss(self.model, tokens)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    logger, module = CSVLogger(tmp_path), Lit()
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = library.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=logger,
        log_every_n_steps=steps,
        callbacks=[LightningCallback()],
        **quiet,
    )
    data = torch.utils.data.DataLoader(batches(4), batch_size=None)
    if not policy:
        with pytest.warns(PolicyWarning, match="no report was logged"):
            trainer.fit(module, data)
        return
    trainer.fit(module, data)
    with open(Path(logger.log_dir) / "metrics.csv", encoding="utf-8") as file:
        (entry,) = csv.DictReader(file)
    assert int(entry.pop("step")) == (8 if steps == 50 else steps)
    assert {name: float(value) for name, value in entry.items()} == policylang.report(module).scalars()
