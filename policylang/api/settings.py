"""``[tool.policylang]`` in a project's ``pyproject.toml``: the snapshot, the path and the device that policies are for.

Commands that are given none of their own, and the language server, read the same; ``policylang.check`` and the other
functions do not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from policylang.language.devices.reading import find_device
from policylang.language.devices.toml_text import KeyPlace, place_of, tables_of
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
    """Each is None where the project says nothing of it. Files are absolute, so that they mean the same wherever one
    stands."""

    graph: str | None = None
    """A snapshot, or another form of a graph that ``policylang check --graph`` takes."""
    path: str | None = None
    """The path that policies are carried out on."""
    device: str | None = None
    """A bundled device profile by its name, or a file of one."""
    file: Path | None = None
    """The ``pyproject.toml`` with the table."""
    places: Mapping[str, Span] = field(factory=dict, repr=False, eq=False)
    """The location of each in the file."""


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
    """A file as one would type it in the current folder, never to be taken for a bundled name; other words stay."""
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
    if _TABLE[-1].encode() not in content.replace(b"\0", b""):  # most projects: nothing to parse, nor to say of UTF-16
        return None
    try:
        source = Source(name, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return ProjectSettings(file=file), (_no_text(content, name, error),)
    table: Any = tables_of(source, UNREADABLE)
    if isinstance(table, Diagnostic):
        return ProjectSettings(file=file), (table,)
    for key in _TABLE:
        table = table.get(key) if isinstance(table, dict) else None
    return None if table is None else _SettingsReader(file, source).settings(table)


def _no_text(content: bytes, name: str, error: UnicodeDecodeError) -> Diagnostic:
    at = len(content[: error.start].decode("utf-8-sig"))
    span = Span(Source(name, content.decode("utf-8-sig", errors="replace")), at, at + 1)
    message = f"the file is not text: byte 0x{content[error.start]:02x} is not UTF-8"
    return diagnose(UNREADABLE, message, span, help="TOML is UTF-8 text")


class _SettingsReader:
    def __init__(self, file: Path, source: Source) -> None:
        self.file, self.source = file, source
        self.found: list[Diagnostic] = []

    def settings(self, table: Any) -> tuple[ProjectSettings, tuple[Diagnostic, ...]]:
        if not isinstance(table, dict):
            message = f"`policylang` is {_kind(table)}, and should be a table"
            self._wrong(WRONG_VALUE, message, self._place().key, "write `[tool.policylang]`, and below it the settings")
            return ProjectSettings(file=self.file), tuple(self.found)
        for key in table:
            if key not in KEYS:
                help = did_you_mean(nearest(key, KEYS)) or f"there are {', '.join(f'`{each}`' for each in KEYS)}"
                message = f"`{shortened(key, _LONGEST)}` means nothing in `[tool.policylang]`"
                self._wrong(UNKNOWN_KEY, message, self._place(key).key, help)
        given = {key: value for key in KEYS if (value := self._text(table, key)) is not None}
        if "graph" in given:
            given["graph"] = str(self._in_folder(given["graph"]))
        if "path" in given and given["path"] not in PLANNED:
            help = did_you_mean(nearest(given["path"], PLANNED)) or f"there are {', '.join(f'`{e}`' for e in PLANNED)}"
            name = shortened(given.pop("path"), _LONGEST)
            self._wrong(WRONG_VALUE, f"there is no path `{name}`", self._place("path").value, help)
        if "device" in given and (device := self._device(given.pop("device"))) is not None:
            given["device"] = device
        places = {key: self._place(key).value for key in given}
        found = tuple(sorted(self.found, key=lambda each: each.span.start if each.span else 0))
        return ProjectSettings(**given, file=self.file, places=places), found

    def _text(self, table: Mapping[str, Any], key: str) -> str | None:
        value = table.get(key)
        if value is None:
            return None
        if isinstance(value, str) and value.strip() and "\0" not in value:
            return value
        is_ = f"is {_kind(value)}" if not isinstance(value, str) else "is empty" if not value.strip() else "has a NUL"
        self._wrong(WRONG_VALUE, f"`{key}` {is_}, and should be {_WHAT[key]}", self._place(key).value)
        return None

    def _device(self, name: str) -> str | None:
        """A file becomes absolute; the name of a bundled profile stays."""
        found = find_device(name, self.file.parent)
        if isinstance(found, Diagnostic):
            self._wrong(WRONG_VALUE, found.message, self._place("device").value, found.help)
            return None
        path, shown = found
        return name if shown.startswith("<") else str(self._in_folder(str(path)))

    def _in_folder(self, path: str) -> Path:
        return Path(os.path.normpath(self.file.parent / path))

    def _place(self, key: str | None = None) -> KeyPlace:
        return place_of(self.source, _TABLE, key)

    def _wrong(self, code: str, message: str, span: Span, help: str | None = None) -> None:
        self.found.append(diagnose(code, message, span, help=help))


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "a date or a time")
