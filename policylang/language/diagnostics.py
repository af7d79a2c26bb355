"""Diagnostics: one type for the errors, warnings and notes of every stage."""

from __future__ import annotations

from enum import Enum

from attrs import field, frozen

from policylang.language.source import Span


class Severity(Enum):
    """How bad it is: an error stops, a warning is printed, a note belongs to one of these."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@frozen
class Related:
    """A second place that belongs to a diagnostic: the rule that overrides, the include that led here."""

    message: str
    span: Span | None = None


@frozen
class Diagnostic:
    """One thing wrong.

    ``message`` is one sentence in the user's terms: lowercase, no full stop, the user's text in backticks.
    ``help`` is the mend, where one exists. ``code`` has a page in ``docs/codes`` with its severity and its long form;
    :mod:`policylang.language.codes` reads it. ``span`` is None only where there is no text to point at (a file that is
    not there).
    """

    code: str
    message: str
    span: Span | None = None
    help: str | None = None
    related: tuple[Related, ...] = ()
    severity: Severity = Severity.ERROR
    details: tuple[str, ...] = field(default=())
    """Further lines of evidence, such as what each part of a selector matched."""
