"""Every diagnostic code, declared once: title, severity, the long form, and an example that is wrong and its mend.

The declarations lie in one module a hundred: ``syntax`` (APL0xx), ``names`` (1xx), ``meaning`` and ``options`` (2xx),
``planning``, ``graph`` and ``snapshot`` (3xx), ``audit`` (4xx), ``testing`` (5xx), ``ranks`` (6xx). To add a code,
append a :class:`Code` to the tuple of its module and run ``scripts/make_code_pages.py``, which writes its page in
``docs/codes``.
"""

from __future__ import annotations

from policylang.language.codes import (
    audit,
    checking,
    eager,
    flat,
    graph,
    meaning,
    names,
    options,
    planning,
    ranks,
    snapshot,
    step,
    syntax,
    testing,
)
from policylang.language.codes.declaration import Code
from policylang.language.diagnostics import Diagnostic, Related, Severity
from policylang.language.source import Span

_MODULES = (
    *(syntax, names, meaning, options),
    *(planning, checking, graph, snapshot, step, flat, eager),
    *(audit, testing, ranks),
)

CODES: dict[str, Code] = {code.code: code for module in _MODULES for code in module.CODES}


def diagnose(
    code: str,
    message: str,
    span: Span | None = None,
    *,
    help: str | None = None,
    related: tuple[Related, ...] = (),
    details: tuple[str, ...] = (),
) -> Diagnostic:
    """A diagnostic of a declared code, with the severity of its declaration."""
    return Diagnostic(code, message, span, help, related, CODES[code].severity, details)


def is_error(diagnostic: Diagnostic) -> bool:
    return diagnostic.severity is Severity.ERROR


def is_syntax(diagnostic: Diagnostic) -> bool:
    """Whether a diagnostic says that a text cannot be read, rather than what it means."""
    return diagnostic.code.startswith("APL0")


__all__ = ["CODES", "Code", "diagnose", "is_error", "is_syntax"]
