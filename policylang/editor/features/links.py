"""The files that a policy names: as links, and the lines that name a file which is about to move."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lsprotocol import types

from policylang.editor.features.definition import FileOfStatement, file_of
from policylang.editor.features.renaming import workspace_edit
from policylang.editor.locations import uri_of_path
from policylang.editor.names.occurrences import occurrences, target_of
from policylang.editor.names.policy_files import PolicyFiles, PolicyText
from policylang.editor.positions import Positions
from policylang.editor.state import State
from policylang.language.diagnostics import Source
from policylang.language.files import read_source
from policylang.language.syntax import Device, Include


def document_links(state: State, *, tooltips: bool = True) -> list[types.DocumentLink]:
    """The files of ``include`` and ``device`` lines, those that are there. ``tooltips``: whether the client has any."""
    found = (file_of(state, each) for each in occurrences(state.document.source).files)
    return [_link(state, file, tooltips) for file in found if file is not None]


def _link(state: State, file: FileOfStatement, tooltips: bool) -> types.DocumentLink:
    what = _about(file.path) if file.bundled else ""
    return types.DocumentLink(
        range=state.document.positions.range(file.span),
        target=uri_of_path(file.path),
        tooltip=f"{'bundled: ' if file.bundled else ''}{what or os.path.abspath(file.path)}" if tooltips else None,
    )


def _about(path: Path) -> str:
    """The first line of the comment that a bundled file begins with."""
    source = read_source(path, path.name)
    first = source.text.partition("\n")[0] if isinstance(source, Source) else ""
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def moved_files(
    around: PolicyFiles, moves: Sequence[tuple[Path, Path]], encoding: types.PositionEncodingKind, versions: bool
) -> types.WorkspaceEdit | None:
    """The edits after which each policy names the same files, when some files or folders are about to move."""
    found: dict[PolicyText, list[types.TextEdit]] = {}
    for text in around.texts.values():
        if text.path is None or text.bundled:
            continue
        positions = Positions(text.source.text, encoding)
        for statement in text.said.files:
            wanted = _target_after(text.path, statement, moves)
            if wanted is not None:
                edit = types.TextEdit(positions.range(target_of(statement)), wanted)
                found.setdefault(text, []).append(edit)
    return workspace_edit(found, versions) if found else None


def _target_after(policy: Path, statement: Include | Device, moves: Sequence[tuple[Path, Path]]) -> str | None:
    """What a line then calls its file, as its author does: from its own file on, or in full. None where it stays."""
    name = statement.target
    if isinstance(statement, Include) and statement.bundled:
        return None
    if isinstance(statement, Device) and f'"{name}"' not in statement.span.text:
        return None
    before = Path(os.path.abspath(policy.parent / name))
    after, home = _moved(before, moves), _moved(Path(os.path.abspath(policy)), moves).parent
    if not os.path.exists(before) or '"' in str(after):
        return None
    wanted = str(after) if os.path.isabs(name) else Path(os.path.relpath(after, home)).as_posix()
    return None if os.path.abspath(home / name) == str(after) else wanted


def _moved(path: Path, moves: Sequence[tuple[Path, Path]]) -> Path:
    for old, new in moves:
        if path.is_relative_to(old):
            return new / path.relative_to(old)
    return path
