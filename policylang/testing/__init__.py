"""Policy tests: Markdown files whose policies claim their effects in comments (``docs/policy-tests.md``).

``suites`` runs files of them and needs no torch; ``agreement`` does, which compares the paths (``docs/agree.md``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policylang.testing.agreement import Agreement, agree

__all__ = ["Agreement", "agree"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("policylang.testing.agreement"), name)
