"""Puts the statements of included files in the place of their ``include``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import define, evolve, field, frozen

from policylang.language.diagnostics import Diagnostic, Mend, Related, Source, Span, diagnose, written
from policylang.language.files import ENDS, SUFFIX, bundled_file, bundled_names, meant_files, read_source
from policylang.language.parsing.parser import parse_file
from policylang.language.parsing.statements import MAX_STATEMENTS
from policylang.language.resources import policies_folder
from policylang.language.syntax import File, Include, Statement
from policylang.language.wording import did_you_mean, nearest

MAX_CHAIN = 32
PRELUDE = "prelude"


Reader = Callable[[Path, str], Source | Diagnostic]
"""The text of a file under the name that reports will give it, or why it cannot be read."""
IncludeChain = tuple[tuple[str, Include | None], ...]
"""The files on the way here, outermost first: which file, and the include that led to it."""


@frozen
class PlacedStatement:
    """A statement, and where it comes from."""

    statement: Statement
    index: int
    """Its number in its own file."""
    bundled: bool
    """Whether its file belongs to the bundled library."""
    depth: int
    """0 in the file that was loaded, 1 in one that it includes, …"""
    folder: Path = Path()
    """Of its own file: what the files that it names are relative to."""
    include: Span | None = None
    """In the file that was loaded, the include that brings it."""


@frozen
class _Unit:
    """A parsed file, and the folder that its includes are relative to."""

    file: File
    folder: Path
    bundled: bool


@define
class Expansion:
    """The statements of a policy in the order in which they count, and what was wrong with the files."""

    statements: list[PlacedStatement] = field(factory=list)
    diagnostics: list[Diagnostic] = field(factory=list)
    files: dict[str, Path] = field(factory=dict)
    """By its name in reports, where each file lies, those that cannot be read among them; the text itself has none
    where it came from no file."""
    brought: dict[str, Span] = field(factory=dict)
    """By the same names, the include in the file that was loaded that leads to each first."""
    _reader: Reader = read_source
    _parsed: dict[str, _Unit | None] = field(factory=dict)
    _targets: dict[Span, tuple[Path | None, str, str]] = field(factory=dict)
    _reported: set[tuple[str, Span]] = field(factory=set)
    _steps: int = 0

    def add(self, unit: _Unit, chain: IncludeChain) -> None:
        for index, statement in enumerate(unit.file.statements):
            self._steps += 1
            if self._steps > MAX_STATEMENTS:
                self._too_far(chain)
                return
            if isinstance(statement, Include):
                self._include(statement, unit, chain)
            else:
                by = chain[1][1] if len(chain) > 1 else None
                span = None if by is None else by.span
                self.statements.append(
                    PlacedStatement(statement, index, unit.bundled, len(chain) - 1, unit.folder, span)
                )

    def parse(self, source: Source, folder: Path, bundled: bool) -> _Unit:
        file, diagnostics = parse_file(source)
        self.diagnostics.extend(diagnostics)
        return _Unit(file, folder, bundled)

    def _include(self, include: Include, unit: _Unit, chain: IncludeChain) -> None:
        if include.bundled and include.target == PRELUDE:
            return  # it is always there
        if include.span not in self._targets:  # files that include one another come by here many times
            path, name = self._target(include, unit, chain)
            self._targets[include.span] = path, name, "" if path is None else str(path.resolve())
        path, name, key = self._targets[include.span]
        if path is None:
            return
        if any(key == seen for seen, _ in chain):
            files = [each.span.source.name for _, each in (*chain, (key, include)) if each is not None]
            trail = " → ".join(f"`{file}`" for file in (*files, name))
            self._report("APL105", f"`{name}` includes itself: {trail}", include, chain)
            return
        if len(chain) >= MAX_CHAIN:
            self._report("APL106", f"includes are nested more than {MAX_CHAIN} deep", include, chain)
            return
        if key not in self._parsed:
            self._parsed[key] = self._read(path, name, include, chain)
        target = self._parsed[key]
        if target is not None:
            self.add(target, (*chain, (key, include)))

    def _target(self, include: Include, unit: _Unit, chain: IncludeChain) -> tuple[Path | None, str]:
        if not include.bundled:
            name = os.path.normpath(os.path.join(os.path.dirname(_named(unit)), include.target))
            library = unit.file.span.source.name.startswith("<") and unit.bundled
            return unit.folder / include.target, f"<{Path(name).stem}>" if library else name
        path = bundled_file(include.target)
        if path is None:
            known = bundled_names()
            near = nearest(include.target, known)
            help = did_you_mean(near) or f"the library has {', '.join(known)}"
            mends = written(_target_span(include), [f"<{name}>" for name in near], near=True)
            message = f"the bundled library has no policy `{include.target}`"
            self._report("APL103", message, include, chain, help=help, mends=mends)
        return path, f"<{include.target.removesuffix('.apl')}>"

    def _read(self, path: Path, name: str, include: Include, chain: IncludeChain) -> _Unit | None:
        self.files.setdefault(name, path)
        first = chain[1][1] if len(chain) > 1 else include
        self.brought.setdefault(name, (first or include).span)
        source: Source | Diagnostic
        if path.suffix != SUFFIX and os.path.exists(path):  # its lines would be shown to whoever checks this one
            source = diagnose("APL104", f"`{name}` is no policy file", help=ENDS)
        else:
            source = self._reader(path, name)
        if isinstance(source, Source):
            return self.parse(source, path.parent, _is_bundled(path))
        if source.span is None:
            meant = [_quoted(each, include) for each in meant_files(path, include.target)]
            mends = written(_target_span(include), meant, near=(source.help or "").startswith("did"))
            source = evolve(source, span=include.span, mends=mends)
        self.diagnostics.append(evolve(source, related=_included_from(chain)))
        return None

    def _report(
        self,
        code: str,
        message: str,
        include: Include,
        chain: IncludeChain,
        *,
        help: str | None = None,
        mends: Sequence[Mend] = (),
    ) -> None:
        if (code, include.span) in self._reported:  # a file that is included twice is read once, and taken twice
            return
        self._reported.add((code, include.span))
        related = _included_from(chain)
        self.diagnostics.append(diagnose(code, message, include.span, help=help, related=related, mends=mends))

    def _too_far(self, chain: IncludeChain) -> None:
        if any(diagnostic.code == "APL106" for diagnostic in self.diagnostics):
            return
        span = next((include.span for _, include in chain if include is not None), None)
        message = f"the policy holds more than {MAX_STATEMENTS} statements, its includes expanded"
        self.diagnostics.append(diagnose("APL106", message, span))


def _target_span(include: Include) -> Span:
    """Of what is included, with its quotes or brackets."""
    span = include.span
    return Span(span.source, span.end - len(include.target) - 2, span.end)


def _quoted(name: str, include: Include) -> str:
    """A file beside the one that is included, or a policy that comes along, as `include` names it."""
    return name if name.startswith("<") else f'"{os.path.join(os.path.dirname(include.target), name)}"'


def expand(source: Source, path: Path | None, read: Reader = read_source) -> Expansion:
    """Parse a source and all it includes, as ``read`` gives it. ``path`` is the file it came from, None for text from
    no file."""
    expansion = Expansion(reader=read)
    folder = path.parent if path is not None else Path()
    bundled = path is not None and _is_bundled(path)
    key = str(path.resolve()) if path is not None else source.name
    if path is not None:
        expansion.files[source.name] = path
    expansion.add(expansion.parse(source, folder, bundled), ((key, None),))
    return expansion


def _is_bundled(path: Path) -> bool:
    return path.parent.resolve() == policies_folder()


def _named(unit: _Unit) -> str:
    """The name of a unit's file in reports: names of included files are formed like the one of the file they are in."""
    name = unit.file.span.source.name
    return "" if name.startswith("<") else name


def _included_from(chain: IncludeChain) -> tuple[Related, ...]:
    """Where each file of the chain was included, the innermost first."""
    return tuple(Related("included from here", include.span) for _, include in reversed(chain) if include is not None)
