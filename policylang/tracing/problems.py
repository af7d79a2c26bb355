"""What can be wrong with a step, as errors with a code and a mend."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from policylang.errors import PolicyGraphError
from policylang.language.diagnostics import Diagnostic
from policylang.torch_compat.tracing import data_dependence_errors

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
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_LIBRARIES, "<")):
            return f"{frame.filename}:{frame.lineno}: `{(frame.line or '').strip()}`"
    return ""
