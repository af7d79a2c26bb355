"""The settings of each document: the client's before the project's.

A client sends them when it starts the server, pushes them, or is asked for those of each of its folders. The project's
are ``[tool.policylang]`` of the ``pyproject.toml`` nearest to the document.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote_to_bytes, urlsplit

from attrs import define, field, frozen

from policylang.api.load import ProjectSettings, load_device, project_settings
from policylang.errors import PolicyError
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic, diagnose, is_error
from policylang.language.shown import did_you_mean, nearest, shortened
from policylang.planning.capabilities import PLANNED, PathName

SECTION = "policylang"
SETTINGS = "policylang.settings"
"""The command with which a client asks what holds for a document, to show it."""
WRONG_SETTING = "APL640"
PAUSE = 0.15
_FOLDER = "${workspaceFolder}"
_LONGEST_PAUSE = 10_000

Stamp = tuple[int, int, int] | None
"""Identifies the content of a file; None where there is no file."""


@frozen
class EditorSettings:
    """The settings of one document, with what is wrong with them."""

    graph: str | None = None
    path: PathName | None = None
    device: DeviceProfile | None = None
    pause: float = PAUSE
    """Seconds without a change after which a policy is planned on the snapshot."""
    problems: tuple[Diagnostic, ...] = ()
    plans: bool = True
    """False where a setting is wrong, so that nothing can be planned under it."""


@define(eq=False)
class Workspace:
    """The folders that are open in an editor, and their settings. Nothing here raises for a wrong setting."""

    folders: dict[str, Path] = field(factory=dict)
    """Paths by their addresses, in the order of the editor."""
    started_with: Mapping[str, Any] = field(factory=dict)
    """The settings that the server was started with."""
    pushed: Mapping[str, Any] = field(factory=dict)
    asked: dict[str | None, Mapping[str, Any]] = field(factory=dict)
    """The client's answers, by the address of a folder; None for no folder."""
    _projects: dict[Path, tuple[tuple[Stamp, ...], ProjectSettings, tuple[Diagnostic, ...]]] = field(factory=dict)
    _devices: dict[str, tuple[Stamp, DeviceProfile | Diagnostic]] = field(factory=dict)

    def folder_of(self, path: Path | None) -> Path | None:
        """The innermost folder that holds a file; the first one for a text that is in no file."""
        if path is None:
            return next(iter(self.folders.values()), None)
        around = [each for each in self.folders.values() if path.is_relative_to(each)]
        return max(around, key=lambda each: len(each.parts), default=None)

    def name_of(self, path: Path | None, uri: str) -> str:
        """The name of a document in messages: its path from its folder on."""
        if path is None:
            return uri
        folder = self.folder_of(path)
        return str(path if folder is None else path.relative_to(folder))

    def settings_of(self, path: Path | None) -> EditorSettings:
        """The settings of the document in a file, or in none."""
        folder = self.folder_of(path)
        base = folder or next(iter(self.folders.values()), None) or (Path() if path is None else path.parent)
        project, problems = self._project(path.parent if path is not None else base)
        client = {**_said(self.started_with), **_said(self._from_client(folder))}
        found = list(problems)
        graph, device = project.graph, project.device
        if "graph" in client and (given := _text("graph", client["graph"], found)) is not None:
            graph = str(_file(given, base))
        if "device" in client and (given := _text("device", client["device"], found)) is not None:
            is_file = os.path.basename(given) != given or given.endswith(".toml")
            device = str(_file(given, base)) if is_file else given
        taken = _path(client.get("path", project.path), found)
        profile = None if device is None else self._device(device)
        if isinstance(profile, Diagnostic):
            found.append(profile)
            profile = None
        plans = not any(map(is_error, found))
        pause = _pause(client, found)
        return EditorSettings(graph, taken, profile, pause, tuple(found), plans)

    def _from_client(self, folder: Path | None) -> Mapping[str, Any]:
        uri = next((uri for uri, each in self.folders.items() if each == folder), None)
        found = self.asked.get(uri, self.asked.get(None))
        return self.pushed if found is None else found

    def _project(self, folder: Path) -> tuple[ProjectSettings, tuple[Diagnostic, ...]]:
        """Read anew if one of the files that may set something has changed."""
        there = folder.absolute()
        stamps = tuple(stamp_of(each / "pyproject.toml") for each in (there, *there.parents))
        if there not in self._projects or self._projects[there][0] != stamps:
            self._projects[there] = stamps, *project_settings(there)
        return self._projects[there][1:]

    def _device(self, name: str) -> DeviceProfile | Diagnostic:
        stamp = stamp_of(name) if os.path.basename(name) != name else None
        if name not in self._devices or self._devices[name][0] != stamp:
            found: DeviceProfile | Diagnostic
            try:
                found = load_device(name)
            except PolicyError as error:
                found = error.diagnostics[0]
            self._devices[name] = stamp, found
        return self._devices[name][1]


def path_of(uri: str) -> Path | None:
    """The file that an address names, whatever bytes its name has; None for an address of anything else."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # a `[` that no address of a machine begins
        return None
    if parts.scheme != "file":
        return None
    found = os.fsdecode(unquote_to_bytes(uri.partition("://")[2].removeprefix(parts.netloc)))
    return None if "\0" in found or not found.startswith("/") else Path(found)


def stamp_of(path: str | os.PathLike[str]) -> Stamp:
    """The stamp of the content that a file has now."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def section_of(settings: object) -> Mapping[str, Any]:
    """Ours of what a client sends: some send all sections, some only the one that was asked for."""
    if not isinstance(settings, Mapping):
        return {}
    mine = settings.get(SECTION, settings)
    return mine if isinstance(mine, Mapping) else {}


def _said(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that nobody gave, which editors send as null or empty texts."""
    return {key: value for key, value in settings.items() if value is not None and value != ""}


def _text(key: str, value: object, problems: list[Diagnostic]) -> str | None:
    if isinstance(value, str) and "\0" not in value:
        return value
    problems.append(diagnose(WRONG_SETTING, f"the editor's setting `{key}` is `{_shown(value)}`, which is no text"))
    return None


def _file(given: str, base: Path) -> Path:
    return base / os.path.expanduser(given.replace(_FOLDER, str(base)))  # of a user that there is not it stays `~name`


def _pause(client: Mapping[str, Any], problems: list[Diagnostic]) -> float:
    given = client.get("pause")
    if given is None:
        return PAUSE
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given <= _LONGEST_PAUSE:
        return given / 1000
    message = f"the editor's setting `pause` is `{_shown(given)}`, which is no time"
    help = f"a number of milliseconds, at most {_LONGEST_PAUSE}"
    problems.append(diagnose(WRONG_SETTING, message, help=help))
    return PAUSE


def _path(given: object, problems: list[Diagnostic]) -> PathName | None:
    if given is None or given in PLANNED:
        return cast("PathName | None", given)
    help = did_you_mean(nearest(str(given), PLANNED)) or f"one of {', '.join(PLANNED)}"
    problems.append(diagnose(WRONG_SETTING, f"`{_shown(given)}` is no path that policies are planned for", help=help))
    return None


def _shown(value: object) -> str:
    return shortened(str(value).partition("\n")[0], 61)
