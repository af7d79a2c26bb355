"""Diagnostics: one type for the errors, warnings and notes of every stage."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from attrs import evolve, field, frozen

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
    brief: bool = False
    """Whether its place says enough, without the line that stands there."""


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
    cause: str = ""
    """What an error comes from where others may come from the same: the code of another error, or a phrase. An error
    whose cause is its own code is one only if something follows from it."""
    include: Span | None = None
    """In the file that was loaded, the include that brings the line of an included file."""


GATHERS_NOTHING = "it gathers no weights"
AT_INCLUDE = frozenset({GATHERS_NOTHING})
"""Causes that make even the only line of an included file an error at its include."""


def one_cause(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The diagnostics, with one error for errors of one cause: the others are notes at it.

    Errors that follow from another are notes at that one. Several lines of one included file that fail for one reason
    are notes at its include.
    """
    found = list(diagnostics)
    heads = {each.code: each for each in reversed(found) if each.cause in ("", each.code)}
    follow: dict[str, list[Diagnostic]] = {}
    for each in found:
        if each.cause in heads and each.cause != each.code:
            follow.setdefault(each.cause, []).append(each)
    kept: list[Diagnostic] = []
    groups: dict[tuple[Span, str], list[Diagnostic]] = {}
    for each in found:
        if each.include is not None and each.cause and each.cause not in heads:
            groups.setdefault((each.include, each.cause), []).append(each)
    for each in found:
        group = groups.get((each.include, each.cause), []) if each.include is not None else []
        if each is heads.get(each.code) and each.code in follow:
            kept.append(_included(_with_notes(each, follow[each.code])))
        elif each.cause == each.code or (each.cause in heads and each.cause != each.code):
            continue
        elif each.include is not None and (len(group) > 1 or each.cause in AT_INCLUDE):
            if each is group[0]:
                kept.append(_at_include(each.include, group))
        else:
            kept.append(_included(each))
    return tuple(kept)


def _included(found: Diagnostic) -> Diagnostic:
    """With a note of the include that brings the line."""
    if found.include is None:
        return found
    note = Related("included from here", found.include)
    return evolve(found, include=None, related=(*found.related, note))


def _with_notes(cause: Diagnostic, follow: Iterable[Diagnostic]) -> Diagnostic:
    notes = (Related(f"from it follows: {each.message}", each.span, brief=True) for each in follow)
    return evolve(cause, cause="", related=(*cause.related, *notes))


def _at_include(include: Span, group: list[Diagnostic]) -> Diagnostic:
    first = group[0]
    message = f"`{include.one_line}` matches nothing in this graph: {first.cause}"
    notes = tuple(Related(each.message, each.span, brief=True) for each in group)
    return evolve(first, message=message, span=include, cause="", include=None, details=(), related=notes)
