"""``[tool.policylang]`` in a project's ``pyproject.toml``: the snapshot, the path and the device that policies are for.

Commands without these options, and the language server, read them; ``policylang.check`` and the other functions do not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from policylang.language.devices.reading import find_device, place_of, tables_of
from policylang.language.diagnostics import Diagnostic, Source, Span, diagnose
from policylang.language.files import reason_of
from policylang.language.shown import did_you_mean, nearest, shortened
from policylang.planning.capabilities import PLANNED

UNREADABLE, UNKNOWN_KEY, WRONG_VALUE = "APL645", "APL646", "APL647"
PROBLEMS = frozenset({UNREADABLE, UNKNOWN_KEY, WRONG_VALUE})
"""The codes of all that can be wrong with settings."""

KEYS = ("graph", "path", "device")
_FILE = "pyproject.toml"
_TABLE = ("tool", "policylang")
_LONGEST = 60
_WHAT = {
    "graph": 'the path of a snapshot, as a text: `graph = "llama3_8b.graph"`',
    "path": 'the name of a path, as a text: `path = "joint"`',
    "device": 'a bundled device profile or the path of one, as a text: `device = "h100-sxm"`',
}
_KINDS = {dict: "a table", list: "a list", bool: "true or false", int: "a number", float: "a number"}


@frozen
class ProjectSettings:
    """Each is None if the project does not set it. Files are absolute, so that they mean the same in every folder."""

    graph: str | None = None
    """A snapshot, or another form of a graph that ``policylang check --graph`` takes."""
    path: str | None = None
    """The path that policies are applied on."""
    device: str | None = None
    """A bundled device profile by its name, or a file of one."""
    file: Path | None = None
    """The ``pyproject.toml`` with the table."""
    places: Mapping[str, Span] = field(factory=dict, repr=False, eq=False)


def project_settings(folder: Path) -> tuple[ProjectSettings, tuple[Diagnostic, ...]]:
    """Read the nearest ``pyproject.toml`` in a folder or above it that has the table, and find what is wrong with it.

    An empty table is one too: nothing above it counts. A file that cannot be read, and may have the table, is an error.
    Diagnostics name the file as seen from the folder.
    """
    try:
        start = Path(os.path.abspath(folder))
    except OSError:  # the current folder, which has gone
        return ProjectSettings(), ()
    for each in (start, *start.parents):
        file = each / _FILE
        if os.path.isfile(file):
            found = _of_file(file, os.path.relpath(file, start))
            if found is not None:
                return found
    return ProjectSettings(), ()


def as_typed(value: str) -> str:
    """A file as typed in the current folder, distinct from bundled names; other words stay."""
    if not os.path.isabs(value):
        return value
    try:
        found = os.path.relpath(value)
    except ValueError:  # on another drive
        return value
    found = found if os.sep in found or "." in found else os.path.join(os.curdir, found)
    return min(found, value, key=len)


def _of_file(file: Path, name: str) -> tuple[ProjectSettings, tuple[Diagnostic, ...]] | None:
    """None for a file without the table."""
    try:
        content = file.read_bytes()
    except OSError as error:
        message = f"`{name}` cannot be read: {reason_of(error)}"
        return ProjectSettings(file=file), (diagnose(UNREADABLE, message, Span(Source(name, ""), 0, 0)),)
    if _TABLE[-1].encode() not in content.replace(b"\0", b""):  # most projects: nothing to parse
        return None
    try:
        source = Source(name, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        at = len(content[: error.start].decode("utf-8-sig"))
        span = Span(Source(name, content.decode("utf-8-sig", errors="replace")), at, at + 1)
        message = f"the file is not text: byte 0x{content[error.start]:02x} is not UTF-8"
        return ProjectSettings(file=file), (diagnose(UNREADABLE, message, span, help="TOML is UTF-8 text"),)
    table: Any = tables_of(source, UNREADABLE)
    if isinstance(table, Diagnostic):
        return ProjectSettings(file=file), (table,)
    for key in _TABLE:
        table = table.get(key) if isinstance(table, dict) else None
    return None if table is None else _settings(file, source, table)


def _settings(file: Path, source: Source, table: Any) -> tuple[ProjectSettings, tuple[Diagnostic, ...]]:
    problems: list[Diagnostic] = []

    def value_of(key: str) -> Span:
        return place_of(source, _TABLE, key).value

    def wrong(message: str, span: Span, help: str | None = None, code: str = WRONG_VALUE) -> None:
        problems.append(diagnose(code, message, span, help=help))

    if not isinstance(table, dict):
        message = f"`policylang` is {_kind(table)}, and should be a table"
        help = "write `[tool.policylang]`, and below it the settings"
        wrong(message, place_of(source, _TABLE, None).key, help)
        return ProjectSettings(file=file), tuple(problems)
    for key in table:
        if key not in KEYS:
            message = f"`{shortened(key, _LONGEST)}` means nothing in `[tool.policylang]`"
            wrong(message, place_of(source, _TABLE, key).key, _near(key, KEYS), UNKNOWN_KEY)
    given: dict[str, str] = {}
    for key in filter(table.__contains__, KEYS):
        value = table[key]
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            what = f"is {_kind(value)}" if not isinstance(value, str) else "has a NUL" if value.strip() else "is empty"
            wrong(f"`{key}` {what}, and should be {_WHAT[key]}", value_of(key))
        elif key == "path" and value not in PLANNED:
            wrong(f"there is no path `{shortened(value, _LONGEST)}`", value_of(key), _near(value, PLANNED))
        elif key == "device":
            found = find_device(value, file.parent)
            if isinstance(found, Diagnostic):
                wrong(found.message, value_of(key), found.help)
            else:
                device, shown = found
                given[key] = value if shown.startswith("<") else os.path.normpath(file.parent / device)
        else:
            given[key] = os.path.normpath(file.parent / value) if key == "graph" else value
    places = {key: value_of(key) for key in given}
    problems.sort(key=lambda each: each.span.start if each.span else 0)
    return ProjectSettings(**given, file=file, places=places), tuple(problems)


def _near(word: str, known: Sequence[str]) -> str:
    return did_you_mean(nearest(word, known)) or f"there are {', '.join(f'`{each}`' for each in known)}"


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "a date or a time")
