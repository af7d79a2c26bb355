"""Policy tests: Markdown files whose policies say in comments what is to come of them (``docs/policy-tests.md``).

``fences`` finds the fenced blocks of a file, ``claims`` reads what the comments of a policy claim, ``graphs`` finds the
graph a policy is planned on, ``cases`` runs one policy, ``suites`` runs files of them, and ``coverage`` says which
rules no test has exercised. None of it needs torch, but for :func:`agree`, for a test of one's own (``docs/agree.md``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policylang.testing.agreement import Agreement
    from policylang.testing.path_runs import agree

_PUBLIC = {
    "Agreement": "policylang.testing.agreement",
    "agree": "policylang.testing.path_runs",
}

__all__ = ["Agreement", "agree"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
