"""The files that travel with the package: the grammar and the bundled policies.

In a wheel they lie inside the package; in a checkout they are the folders beside it.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def _folder(name: str) -> Path:
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def grammar_file() -> Path:
    return _folder("grammar") / "apl.lark"


def policies_folder() -> Path:
    return _folder("policies")
