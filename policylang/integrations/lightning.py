"""A policy's report in the loggers of a Lightning ``Trainer``. Imports Lightning."""

from typing import Any

from lightning.pytorch import Callback

from policylang.integrations import ChangedScalars

__all__ = ["LightningCallback"]


class LightningCallback(Callback):  # type: ignore[misc]  # Lightning is optional, so its classes have no type here
    """``Trainer(callbacks=[LightningCallback()])`` gives ``report(module).scalars()`` to the trainer's loggers. At each
    ``log_every_n_steps``th step, if a number has changed. A ``PolicyWarning`` at the end if there was none."""

    def __init__(self, prefix: str = "policylang/") -> None:
        self._scalars = ChangedScalars(prefix)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step % trainer.log_every_n_steps == 0:
            self._log(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._log(trainer, pl_module)
        self._scalars.warn_if_none()

    def _log(self, trainer: Any, pl_module: Any) -> None:
        for logger in trainer.loggers if (new := self._scalars.of(pl_module)) else []:  # they write on rank 0 only
            logger.log_metrics(new, step=trainer.global_step)
