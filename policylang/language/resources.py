"""The files that travel with the package: the grammar, the bundled policies and device profiles, the pages of codes.

In a wheel they lie inside the package; in a checkout they are the folders beside it.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def _folder(in_checkout: str) -> Path:
    beside = _PACKAGE.parent / in_checkout
    inside = _PACKAGE / beside.name
    return inside if inside.is_dir() else beside


def grammar_file() -> Path:
    return _folder("grammar") / "apl.lark"


def policies_folder() -> Path:
    return _folder("policies")


def devices_folder() -> Path:
    return _folder("devices")


def codes_folder() -> Path:
    return _folder("docs/codes")
