"""The stream of operators of a block, below autograd, where torch's own selective checkpoint sees it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from policylang._torch_eager import ignored_operators
from policylang._torch_graph import schema_of

_IGNORED = ignored_operators()


@cache
def is_ignored(operator: Any) -> bool:
    """Whether an operator is none of the block's: autograd asks for it as often as it likes, or it only marks a place
    in a profile."""
    return operator in _IGNORED or getattr(operator, "namespace", "") == "profiler"


def draws(operator: Any) -> bool:
    """Whether torch says of an operator that it draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


@cache
def writes(operator: Any) -> bool:
    """Whether an operator writes to one of its arguments and says so."""
    schema = schema_of(operator)
    return bool(schema is not None and schema.is_mutable)
