"""Where a name is defined: in this file, in one that it includes, in the prelude. And the files that a text names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from attrs import frozen
from lsprotocol import types

from policylang.editor.locations import location, positions_of, uri_of_path
from policylang.editor.names.occurrences import Occurrence, occurrences, target_of
from policylang.editor.names.policy_files import PolicyFiles
from policylang.editor.positions import Positions
from policylang.editor.state import State
from policylang.language.devices.lookup import bundled_devices, find_device
from policylang.language.diagnostics import Span
from policylang.language.files import bundled_file
from policylang.language.operators import prelude_group
from policylang.language.syntax import Device, Include, Let

_START = types.Range(types.Position(0, 0), types.Position(0, 0))


@frozen
class FileOfStatement:
    """The file that an ``include`` or ``device`` line names."""

    span: Span
    """Of its name in the line."""
    path: Path
    bundled: bool


def definition(state: State, offset: int, around: Callable[[], PolicyFiles] | None = None) -> list[types.LocationLink]:
    """Of the ``let`` name, the group or the file at a character offset. A name that its own policy does not define is
    looked for in the policies ``around`` that include it."""
    part = occurrences(state.document.source).at(offset)
    if isinstance(part, Include | Device):
        file = file_of(state, part)
        return [] if file is None else [_link(state, file.span, types.Location(uri_of_path(file.path), _START))]
    if part is None:
        return []
    found = definitions_of(state, part, around)
    return [_link(state, part.span, *each) for each in found]


def definitions_of(
    state: State, used: Occurrence, around: Callable[[], PolicyFiles] | None = None
) -> list[tuple[types.Location, types.Range]]:
    """The place of the name in each definition that counts, with the range of its ``let``."""
    let = own_definition(state, used.name)
    let = let or _group(used.name)
    if let is None and around is not None:
        return _in_other_policies(state, used, around())
    where = None if let is None or let.statement is None else location(state, let.span)
    if let is None or let.statement is None or where is None:
        return []
    return [(where, positions_of(state, let.span.source).range(let.statement))]


def own_definition(state: State, name: str) -> Occurrence | None:
    """The ``let`` that counts in the document's own policy: the first, one that can be read before others."""
    for placed in state.text.expansion.statements:
        if isinstance(placed.statement, Let) and placed.statement.name == name:
            return _defined_by(placed.statement)
    here = occurrences(state.document.source).of(name)
    return next((each for each in here if each.defines), None)


def file_of(state: State, statement: Include | Device) -> FileOfStatement | None:
    """The file that a line of the document names; None where there is none such."""
    folder = Path() if state.document.path is None else state.document.path.parent
    if isinstance(statement, Device):
        found = find_device(statement.target, folder)
        path = found[0] if isinstance(found, tuple) else None
        bundled = path is not None and path.stem in bundled_devices() and path.parent != folder
    else:
        path = bundled_file(statement.target) if statement.bundled else folder / statement.target
        bundled = statement.bundled
    try:
        there = path is not None and os.path.isfile(path)
    except (OSError, ValueError):
        there = False
    return FileOfStatement(target_of(statement), path, bundled) if path is not None and there else None


def _defined_by(let: Let) -> Occurrence:
    said = occurrences(let.span.source).names
    return next(each for each in said if each.statement is not None and each.statement.start == let.span.start)


def _group(name: str) -> Occurrence | None:
    let = prelude_group(name)
    return None if let is None else _defined_by(let)


def _in_other_policies(state: State, used: Occurrence, around: PolicyFiles) -> list[tuple[types.Location, types.Range]]:
    """In those that include the document."""
    found: dict[tuple[str, int], tuple[types.Location, types.Range]] = {}
    for root in around.policies_with([around.of(state.document).key]):
        counting = around.first_definition(root, used.name)
        if counting is not None and counting[1].statement is not None:
            text, let = counting
            positions = Positions(text.source.text, state.document.encoding)
            place = types.Location(text.uri, positions.range(let.span)), positions.range(counting[1].statement)
            found.setdefault((text.key, let.span.start), place)
    return list(found.values())


def _link(state: State, origin: Span, place: types.Location, whole: types.Range | None = None) -> types.LocationLink:
    return types.LocationLink(
        target_uri=place.uri,
        target_range=whole or place.range,
        target_selection_range=place.range,
        origin_selection_range=state.document.positions.range(origin),
    )
