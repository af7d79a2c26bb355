"""The bundled policies, and what each says of itself."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from policylang.language.files import bundled_file, bundled_names

_GROUPS = "prelude"
"""Always loaded, and no policy."""


@frozen
class BundledPolicy:
    name: str
    """As commands and ``policylang.load`` take it."""
    description: str
    """One sentence, from the comment with which its file begins."""
    file: Path


def bundled_policies() -> tuple[BundledPolicy, ...]:
    """The policies of the library by name."""
    found = []
    for name in bundled_names():
        file = bundled_file(name)
        if file is not None and name != _GROUPS:
            found.append(BundledPolicy(name, description_of(file.read_text(encoding="utf-8")), file))
    return tuple(found)


def description_of(text: str) -> str:
    """The first paragraph of the comment with which a policy begins, on one line and without its full stop."""
    said = []
    for line in text.splitlines():
        if not line.startswith("#") or not line.strip("# "):
            break
        said.append(line.lstrip("#").strip())
    return " ".join(said).removesuffix(".")
