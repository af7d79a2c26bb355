"""Checking policy files without a graph: what ``policylang check`` prints, as data. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

from policylang.language.codes import is_error
from policylang.language.diagnostics import Diagnostic, Severity
from policylang.language.loader import load_policy
from policylang.loading import operators_at_hand

SUFFIX = ".apl"
_CANNOT_BE_READ = {"APL103", "APL104"}


@frozen
class CheckResult:
    """The diagnostics of one or more policy files, file by file, each in the order of its text."""

    files: tuple[str, ...]
    diagnostics: tuple[Diagnostic, ...]

    @property
    def errors(self) -> int:
        return sum(map(is_error, self.diagnostics))

    @property
    def warnings(self) -> int:
        return sum(diagnostic.severity is Severity.WARNING for diagnostic in self.diagnostics)

    @property
    def unreadable(self) -> bool:
        """Whether one of the files itself could not be read; an include that is missing is an error of its file."""
        return any(d.span is None and d.code in _CANNOT_BE_READ for d in self.diagnostics)


def check(*paths: str | os.PathLike[str]) -> CheckResult:
    """Check policy files, or bundled policies by their bare names. A folder stands for every ``.apl`` file below it.

    Operators are looked up in the bundled manifest and, where torch is loaded, in torch's registry too.

    Never raises for what is in a file, or for a file that is not there: that is a diagnostic.
    """
    files = tuple(name for path in paths for name in _files(os.fspath(path)))
    return CheckResult(
        files, tuple(_once(d for file in files for d in load_policy(file, operators=operators_at_hand()).diagnostics))
    )


def _files(path: str) -> list[str]:
    """The files a path stands for, in order. An empty folder stands for itself, so that someone says so."""
    if not os.path.isdir(path):  # nor is the empty path, which `Path` takes for the current folder
        return [path]
    found = sorted(str(file) for file in Path(path).rglob(f"*{SUFFIX}") if file.is_file())
    return found or [path]


def _once(diagnostics: Iterable[Diagnostic]) -> Iterable[Diagnostic]:
    """Without repetitions: two files that include the same faulty one report its faults once."""
    return dict.fromkeys(diagnostics)
