"""The operators of one torch version by name, from the manifest that travels with the package: read without torch.

``scripts/make_operator_manifest.py`` writes it (``operators.json``): namespace, name and overloads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from attrs import frozen

Overloads = Mapping[str, tuple[str, ...]]
"""Operator name to its overloads, within one namespace."""

_FILE = Path(__file__).with_name("operators.json")
_FORMAT = 1


@frozen
class Manifest:
    torch_version: str
    namespaces: Mapping[str, Overloads]


@cache
def manifest() -> Manifest:
    """The bundled manifest."""
    content = json.loads(_FILE.read_text(encoding="utf-8"))
    if content["format"] != _FORMAT:
        raise RuntimeError(f"the operator manifest has format {content['format']}, this policylang reads {_FORMAT}")
    return Manifest(
        content["torch"],
        {
            namespace: {name: tuple(overloads.split()) for name, overloads in names.items()}
            for namespace, names in content["operators"].items()
        },
    )
