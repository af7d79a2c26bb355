"""A policy's report in the logs of the Transformers ``Trainer``. Imports Transformers."""

from typing import Any

from transformers import TrainerCallback

from policylang.integrations import ChangedScalars

__all__ = ["TransformersCallback"]


class TransformersCallback(TrainerCallback):  # type: ignore[misc]  # Transformers is optional, so its classes have no type here
    """``trainer.add_callback(TransformersCallback(trainer))`` logs ``report(model).scalars()`` where the trainer logs.
    Once a policy has acted, and when a number changes. A ``PolicyWarning`` at the end if there was none."""

    def __init__(self, trainer: Any, prefix: str = "policylang/") -> None:
        self._trainer, self._scalars = trainer, ChangedScalars(prefix)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer; the log made here calls it once more, with nothing new by then."""
        if new := self._scalars.of(self._trainer.model):
            self._trainer.log(new)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._scalars.warn_if_none()
