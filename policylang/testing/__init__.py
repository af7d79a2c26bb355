"""Policy tests: Markdown files whose policies claim their effects in comments (``docs/policy-tests.md``).

``claims`` reads the blocks of a file and what the comments of a policy claim, ``suites`` runs files of them. Neither
needs torch. :func:`agree` does (``docs/agree.md``): ``path_runs`` takes the steps, ``agreement`` compares them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policylang.testing.agreement import Agreement
    from policylang.testing.path_runs import agree

_PUBLIC = {"Agreement": "policylang.testing.agreement", "agree": "policylang.testing.path_runs"}

__all__ = ["Agreement", "agree"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
