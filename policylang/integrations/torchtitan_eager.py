"""A policy as the activation checkpointing of TorchTitan's eager trainer (TorchTitan 0.3.0). Imports TorchTitan."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from policylang.api.apply import checkpoint_model
from policylang.errors import PolicyMeaningError
from policylang.language.diagnostics import Diagnostic

__all__ = ["PolicyAC"]

BAD_OPTION = "APL250"
_ONLY = {"determinism_check": "default", "debug": False}
"""Options of TorchTitan's checkpoints that have one meaning here: a policy checks the order of operators itself."""


class PolicyAC(ActivationCheckpointing):  # type: ignore[misc]  # TorchTitan is optional, so its classes have no type here
    """Made by ``PolicyAC.Config(policy=…).build()``; TorchTitan calls its ``apply`` with the model."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc]
        """``config.activation_checkpoint = PolicyAC.Config(policy="llama3_sac.apl")``."""

        policy: str
        """The path of a policy, or the name of a bundled one."""
        strict: bool = False
        """True makes an error of a block that runs other operators than were recorded, as in ``checkpoint_model``."""

    def apply(self, model: nn.Module) -> None:
        """Put a checkpoint that follows the policy around every block. Raises ``PolicyError`` for a policy that cannot
        be read or has errors, for a model without blocks, and for options of TorchTitan that would have no effect."""
        config = self.config
        problems = [_without_effect(name) for name, only in _ONLY.items() if getattr(config, name) != only]
        if problems:
            raise PolicyMeaningError(problems)
        checkpoint_model(model, config.policy, strict=config.strict, preserve_rng_state=config.preserve_rng_state)


def _without_effect(name: str) -> Diagnostic:
    help = "leave it out; `strict=True` makes an error of a block that runs other operators than before"
    return Diagnostic(BAD_OPTION, f"the option `{name}` has no effect on a checkpoint that follows a policy", help=help)
