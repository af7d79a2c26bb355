"""What commands that are given no graph, path or device take from ``[tool.policylang]`` in the project's file."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from policylang.commands.shared.exit import UsageError
from policylang.language.wording import joined

if TYPE_CHECKING:
    from policylang.language.diagnostics import Diagnostic, Span

_IN_PROJECT = 'or in pyproject.toml below `[tool.policylang]`: `graph = "model.graph"`'


def add_project(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-project",
        action="store_false",
        dest="project",
        help="take nothing from `[tool.policylang]` of the pyproject.toml in the current folder or above it",
    )


@frozen
class Taken:
    """What came from the project's settings."""

    values: Mapping[str, str] = field(factory=dict)
    file: str = ""
    """As seen from the current folder."""
    places: Mapping[str, Span] = field(factory=dict)

    def __str__(self) -> str:
        """``graph llama3_8b.graph and path joint from pyproject.toml``; empty where nothing was taken."""
        named = joined([f"{key} {value}" for key, value in self.values.items()])
        return f"{named} from {self.file}" if named else ""

    def placed(self, diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
        """Those that say why a graph or a profile cannot be read, with a note of where the project names it."""
        return tuple(map(self._placed, diagnostics))

    def _placed(self, found: Diagnostic) -> Diagnostic:
        from policylang.language.diagnostics import Related

        for key, value in self.values.items():
            if found.span is None and key in self.places and f"`{value}`" in found.message:
                return evolve(found, related=(*found.related, Related("named here", self.places[key])))
        return found


def take_settings(options: argparse.Namespace, *keys: str) -> Taken:
    """Fill in those of a command's options that were not given; what was taken, also as ``options.taken``.

    A path and a device are those of a graph: where there is none, they are not taken. Raises ``PolicyError`` where the
    settings are wrong: a command that went on without them would do something else.
    """
    wanted = [key for key in keys if not getattr(options, key)]
    options.taken = taken = _taken(options, wanted) if options.project and wanted else Taken()
    return taken


def tell_settings(options: argparse.Namespace) -> None:
    """Say on the standard error what was taken, where anything was."""
    from policylang.commands.shared.output import tell

    if options.taken.values:
        tell(f"policylang {options.command}: {options.taken}")


def _taken(options: argparse.Namespace, wanted: Sequence[str]) -> Taken:
    from policylang.api.project.settings import as_typed, project_settings
    from policylang.errors import PolicyMeaningError

    settings, problems = project_settings(Path())
    if problems:
        mend = "`--no-project` leaves the project's settings out"
        raise PolicyMeaningError([evolve(each, details=(*each.details, mend)) for each in problems])
    if not (options.graph or settings.graph):
        return Taken()
    values = {key: as_typed(value) for key in wanted if (value := getattr(settings, key)) is not None}
    for key, value in values.items():
        setattr(options, key, [value] if isinstance(getattr(options, key), list) else value)
    return Taken(values, "" if settings.file is None else as_typed(str(settings.file)), settings.places)


def need_graph(options: argparse.Namespace, how: str = "--graph GRAPH") -> None:
    """Raises ``UsageError`` where neither the command line nor the project names a graph."""
    if options.graph is None:
        raise UsageError("no graph is given", f"name one with `{how}`, {_IN_PROJECT}")
