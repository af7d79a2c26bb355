"""Checks of a traced step: its loss, its writes, and what a failed trace means; errors with a code and a mend."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from traceback import extract_tb

import torch
from torch import Tensor, fx

from policylang.errors import PolicyGraphError
from policylang.language.diagnostics import Diagnostic
from policylang.torch_compat.eager import storage_address
from policylang.torch_compat.graphs import OpOverload, schema_of
from policylang.torch_compat.tracing import data_dependence_errors, is_device_mismatch, unknown_size_errors

LOSS = "APL360"
NO_GRADIENT = "APL361"
DATA_DEPENDENT = "APL362"
UNTRACEABLE = "APL363"
BATCH_CHANGED = "APL364"
MODEL_CHANGED = "APL365"
ALIASED_MUTATION = "APL366"
OPTIMIZER = "APL367"
OUTSIDE_WRITE = "APL368"

_TORCH, _OURS = Path(str(torch.__file__)).parent, Path(__file__).parents[1]  # as tracebacks name them
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (_TORCH, _OURS))


def problem(code: str, message: str, help: str | None = None, details: Sequence[str] = ()) -> PolicyGraphError:
    return PolicyGraphError([Diagnostic(code, message, help=help, details=tuple(details))])


def trace_failure(error: Exception) -> PolicyGraphError:
    """What a failed trace means to the user, and where in his code; the cause is to be chained."""
    where = _user_frame(error)
    details = [f"at {where}"] if where else []
    if isinstance(error, data_dependence_errors()) or "get value out of a tracing tensor" in str(error):
        return problem(
            DATA_DEPENDENT,
            "the step decides by the values of a tensor what it does next, and a graph cannot",
            help="replace `.item()`, `if tensor` and loops over data by tensor operators such as `torch.where`, "
            "or leave that part out of the traced step",
            details=details,
        )
    if is_device_mismatch(error):
        return problem(
            UNTRACEABLE,
            f"the step cannot be traced: {str(error).strip().splitlines()[0]}",
            help='trace a model on `meta` for the device that it trains on: `device="cuda"`'
            if "meta" in str(error)
            else "a tensor that is no parameter, buffer, attribute or input stays where it was made: make it a buffer, "
            "or make it on the device of an input (`torch.arange(n, device=ids.device)`)",
            details=details,
        )
    if isinstance(error, unknown_size_errors()):
        return problem(
            UNTRACEABLE,
            f"the step cannot be traced: torch does not tell the sizes of what `{str(error).strip()}` returns",
            help="trace the step where it runs, or register a kernel for shapes (`torch.library.register_fake`)",
            details=details,
        )
    reason = str(error).strip().splitlines()
    summary = f"{type(error).__name__}: {reason[0]}" if reason else type(error).__name__
    return problem(
        UNTRACEABLE,
        f"the step cannot be traced: {summary}",
        help="call `loss_fn(model, *batch)` once without tracing to see whether it runs at all",
        details=details,
    )


def _user_frame(error: Exception) -> str:
    """The innermost line of the traceback that is neither torch's nor ours."""
    for frame in reversed(extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_LIBRARIES, "<")):
            return f"{frame.filename}:{frame.lineno}: `{(frame.line or '').strip()}`"
    return ""


# --- the loss -------------------------------------------------------------------------------------------------------


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


# --- what the step writes -------------------------------------------------------------------------------------------


def check_writes(
    graph: fx.Graph,
    plain: Sequence[Tensor],
    mutated: Sequence[int],
    outgrown: Sequence[tuple[int, str]],
    buffers: Collection[str],
) -> None:
    """Raises PolicyGraphError where a second run of the graph would not see what a second eager step sees.

    Args:
        mutated: positions of the inputs that the graph writes.
        outgrown: positions and names of the inputs that the forward replaces by something of another kind.
    """
    _refuse_outside_writes(graph)
    _refuse_outgrown(graph, outgrown, buffers)
    _refuse_aliased(plain, mutated)


def _refuse_outside_writes(graph: fx.Graph) -> None:
    """A functional trace writes to its inputs, at its end; any other write is to a tensor that the trace ran into."""
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, OpOverload) or not schema_of(target).is_mutable:
            continue
        if target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            continue
        raise problem(
            OUTSIDE_WRITE,
            f"the step writes (`{target}`) to a tensor that is no parameter, buffer, attribute or input",
            help="register it as a buffer of the model, or pass it as an input; tracing may have changed it once",
        )


def _refuse_outgrown(graph: fx.Graph, outgrown: Sequence[tuple[int, str]], buffers: Collection[str]) -> None:
    """A plain attribute that the forward replaces and the loss does not depend on is a note to the reader, of any
    shape."""
    inputs = graph.find_nodes(op="placeholder")
    for position, name in outgrown:
        if name in buffers or inputs[position].users:
            raise problem(
                UNTRACEABLE,
                f"the forward replaces `{name}` by a tensor of another shape or type",
                help="write to it in place (`self.buffer.copy_(...)`), or keep it outside the traced step",
            )


def _refuse_aliased(plain: Sequence[Tensor], mutated: Sequence[int]) -> None:
    """A write to one of two inputs that share memory is not seen by a read of the other in the graph."""
    if not mutated:
        return
    owners = Counter(_memory(value) for value in plain)
    if any(owners[_memory(plain[position])] > 1 and _memory(plain[position]) for position in mutated):
        raise problem(
            ALIASED_MUTATION,
            "the step writes to a buffer or input that shares its memory with another one",
            help="give each its own memory (`.clone()`), or share one buffer under two names",
        )


def _memory(value: Tensor) -> int:
    """The address of its data, or of the storage where there is none: a fake tensor's, or one's on ``meta``."""
    try:
        storage = value.untyped_storage()
        return storage_address(value) or 0 if storage.device.type == "meta" else int(storage.data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0
