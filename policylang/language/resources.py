"""The files that travel with the package: grammar, bundled policies, device profiles, pages of codes, operators.

In a wheel they are inside the package; in a checkout they are the folders beside it. The lists of operators are read
without torch; ``scripts/make_operator_manifest.py`` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from attrs import frozen

_PACKAGE = Path(__file__).resolve().parents[1]


def _folder(in_checkout: str) -> Path:
    beside = _PACKAGE.parent / in_checkout
    inside = _PACKAGE / beside.name
    return inside if inside.is_dir() else beside


def data_file(name: str) -> Path:
    """A generated or written table of the language."""
    return Path(__file__).parent / "data" / name


def grammar_file() -> Path:
    return _folder("grammar") / "apl.lark"


def policies_folder() -> Path:
    return _folder("policies")


def devices_folder() -> Path:
    return _folder("devices")


def codes_folder() -> Path:
    return _folder("docs/codes")


def installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and seldom asked for

    try:
        return version("policylang")
    except PackageNotFoundError:
        return "(not installed)"


Overloads = Mapping[str, tuple[str, ...]]
"""Operator name to its overloads, within one namespace."""

_FORMAT = 1


@frozen
class Manifest:
    torch_version: str
    namespaces: Mapping[str, Overloads]


@cache
def manifest() -> Manifest:
    content = json.loads(data_file("operators.json").read_text(encoding="utf-8"))
    if content["format"] != _FORMAT:
        raise RuntimeError(f"the operator manifest has format {content['format']}, this policylang reads {_FORMAT}")
    namespaces = {
        namespace: {name: tuple(overloads.split()) for name, overloads in names.items()}
        for namespace, names in content["operators"].items()
    }
    return Manifest(content["torch"], namespaces)


@cache
def tagged(tag: str) -> frozenset[str]:
    """The operators, ``aten.mul``, that are ``pointwise``, a ``reduction``, ``random``, a ``view`` or ``compute``."""
    return frozenset(json.loads(data_file("operator_facts.json").read_text(encoding="utf-8"))["facts"][tag])
