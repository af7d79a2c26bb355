"""What torch says of its operators, from the manifest that travels with the package: read once, without torch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("operator_facts.json")


@cache
def tagged(tag: str) -> frozenset[str]:
    """The operators, ``aten.mul``, that are ``pointwise``, a ``reduction``, ``random``, a ``view`` or ``compute``."""
    return frozenset(_tags()[tag])


@cache
def _tags() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(_FILE.read_text(encoding="utf-8"))["facts"]
    return found
