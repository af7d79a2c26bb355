"""The form of a declaration."""

from __future__ import annotations

from attrs import frozen

from policylang.language.diagnostics import Severity


@frozen
class Code:
    """One kind of diagnostic. ``wrong`` and ``mended`` are policy text; either is empty where no text shows it."""

    code: str
    title: str
    text: str
    """The long form, one paragraph: what it means, why it matters, what to do."""
    wrong: str = ""
    mended: str = ""
    severity: Severity = Severity.ERROR
