"""What a loss has to be."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from policylang.errors import PolicyGraphError
from policylang.tracing.problems import LOSS, NO_GRADIENT, problem


def check_loss(loss: object, parameters: Mapping[str, Tensor]) -> None:
    """Raises PolicyGraphError unless it is a scalar that can be differentiated with respect to the parameters."""
    if not isinstance(loss, Tensor):
        raise problem(
            LOSS,
            f"`loss_fn` returns {_article(type(loss).__name__)}, not a scalar tensor",
            help="return `output.loss`" if hasattr(loss, "loss") else "return the loss alone, as a tensor",
        )
    if loss.numel() != 1:
        raise problem(
            LOSS,
            f"`loss_fn` returns a tensor of shape {list(loss.shape)}, not a scalar",
            help="reduce it, for example with `.mean()`",
        )
    if not parameters:
        raise problem(
            NO_GRADIENT,
            "no parameter of the model requires a gradient",
            help="call `requires_grad_()` on what is to be trained",
        )
    if not loss.requires_grad:
        raise no_gradient(parameters)


def no_gradient(parameters: Mapping[str, Tensor]) -> PolicyGraphError:
    some = ", ".join(f"`{name}`" for name in list(parameters)[:3])
    return problem(
        NO_GRADIENT,
        "the loss does not depend on any parameter that requires a gradient",
        help="look for a `detach()`, a `no_grad()` or an integer cast between the parameters and the loss",
        details=[f"parameters that require one: {some}{', …' if len(parameters) > 3 else ''}"],
    )


def _article(noun: str) -> str:
    return f"an `{noun}`" if noun[:1].lower() in "aeiou" else f"a `{noun}`"
