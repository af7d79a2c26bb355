"""Loads a policy: parses a file or a text, expands its includes, resolves it. Errors are values."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import evolve, frozen

from policylang.language.diagnostics import Diagnostic, Source, bounded, diagnose, is_error
from policylang.language.files import find_policy, read_source
from policylang.language.formatting.unparse import format_policy
from policylang.language.resolution.includes import Expansion, Reader, expand
from policylang.language.resolution.operator_names import OperatorTable
from policylang.language.resolution.resolver import resolve
from policylang.language.syntax import Policy

_BYTE_ORDER_MARK = "\ufeff"
"""What some editors of Windows begin a text with."""
_ABOUT_WHAT_IS_MISSING = {"APL110", "APL207"}
"""Warnings that nothing uses a name, or that there is no rule: a statement that could not be read may be what does."""


@frozen
class Loaded:
    """A policy, unless one of the diagnostics is an error; they stand in the order of the text, file by file."""

    policy: Policy | None
    diagnostics: tuple[Diagnostic, ...]

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        return tuple(filter(is_error, self.diagnostics))


def load_policy(path: str | os.PathLike[str], *, operators: OperatorTable | None = None) -> Loaded:
    """Load a policy file, or, for a bare name that is no file here, a policy of the bundled library.

    ``operators`` is what operator names are looked up in; by default the bundled manifest.
    """
    if not isinstance(path, str | os.PathLike):
        return Loaded(None, (_wrong_type("a policy is loaded by its path", path),))
    file, name = find_policy(os.fsdecode(path))
    source = read_source(file, name)
    if isinstance(source, Diagnostic):
        return Loaded(None, (source,))
    return _load(source, file, operators)


def parse_policy(text: str, *, name: str = "<policy>", operators: OperatorTable | None = None) -> Loaded:
    """The policy that a text makes; what it includes is relative to the current folder."""
    if not isinstance(text, str):
        return Loaded(None, (_wrong_type("a policy is parsed from its text", text),))
    return _load(Source(name, text.removeprefix(_BYTE_ORDER_MARK)), None, operators)


def load_source(source: Source, file: Path | None, *, operators: OperatorTable | None = None) -> Loaded:
    """The policy that a source makes; what it includes is relative to the folder of ``file``."""
    return _load(source, file, operators)


def load_expanded(
    source: Source, file: Path | None, *, operators: OperatorTable | None = None, read: Reader = read_source
) -> tuple[Loaded, Expansion]:
    """The same with the statements that it was made from; ``read`` gives the texts of included files."""
    expansion = expand(source, file, read)
    return _resolved(expansion, source, operators), expansion


def _wrong_type(wanted: str, given: object) -> Diagnostic:
    help = "it is loaded already" if isinstance(given, Policy) else 'for example `policylang.load("llama3_sac.apl")`'
    return diagnose("APL104", f"{wanted}, and this is a `{type(given).__name__}`", help=help)


def _load(source: Source, file: Path | None, operators: OperatorTable | None) -> Loaded:
    return load_expanded(source, file, operators=operators)[0]


def _resolved(expansion: Expansion, source: Source, operators: OperatorTable | None) -> Loaded:
    policy, found = resolve(expansion.statements, source, operators or OperatorTable.bundled())
    if any(map(is_error, expansion.diagnostics)):
        found = tuple(diagnostic for diagnostic in found if diagnostic.code not in _ABOUT_WHAT_IS_MISSING)
    diagnostics = bounded(_in_order((*expansion.diagnostics, *found)))
    if any(map(is_error, diagnostics)):
        return Loaded(None, diagnostics)
    return Loaded(evolve(policy, canonical=format_policy(policy)), diagnostics)


def _in_order(diagnostics: tuple[Diagnostic, ...]) -> tuple[Diagnostic, ...]:
    """By file, in the order in which the files come up, and by position; each once."""
    files: dict[str, int] = {}
    for diagnostic in diagnostics:
        if diagnostic.span is not None:
            files.setdefault(diagnostic.span.source.name, len(files))

    def place(diagnostic: Diagnostic) -> tuple[int, int]:
        span = diagnostic.span
        return (-1, 0) if span is None else (files[span.source.name], span.start)

    return tuple(sorted(dict.fromkeys(diagnostics), key=place))
