"""``[tool.policylang]`` in a project's ``pyproject.toml``: the snapshot, the path and the device that policies are for.

Commands that are given none of their own, and the language server, read the same.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from attrs import frozen

from policylang.language.diagnostics import Diagnostic

_FILE = "pyproject.toml"


@frozen
class ProjectSettings:
    """Each is None where the project says nothing of it. Files are absolute, so that they mean the same wherever one
    stands."""

    graph: str | None = None
    """A snapshot, or another form of a graph that ``policylang check --graph`` takes."""
    path: str | None = None
    """The path that policies are carried out on."""
    device: str | None = None
    """A bundled device profile by its name, or a file of one."""


def project_settings(folder: Path) -> tuple[ProjectSettings, tuple[Diagnostic, ...]]:
    """Of the nearest ``pyproject.toml`` in a folder or above it that has the table, and what is wrong with it."""
    for each in (folder, *folder.resolve().parents):
        file = each / _FILE
        if file.is_file():
            table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("policylang")
            if table is not None:
                graph = table.get("graph")
                found = None if graph is None else str(each / graph)
                return ProjectSettings(found, table.get("path"), table.get("device")), ()
    return ProjectSettings(), ()
