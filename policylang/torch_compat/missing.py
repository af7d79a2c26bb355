"""The error where a torch lacks a private name that policylang needs."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

import torch


def require(module: ModuleType, names: Iterable[str], why: str) -> None:
    """Raises ``ImportError`` where a module of torch lacks one of the names. ``why``: what policylang does with it."""
    if missing := [name for name in names if not hasattr(module, name)]:
        listed = "`, `".join(missing)
        raise ImportError(f"torch {torch.__version__} has no `{listed}` in {module.__name__}; policylang {why}")
