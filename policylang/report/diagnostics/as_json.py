"""Diagnostics as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from policylang.language.diagnostics import Diagnostic, Span

_VERSION = 1


def render_json(diagnostics: Iterable[Diagnostic], **more: Any) -> str:
    """An object with a format version and the diagnostics; lines and columns count from 1, offsets from 0. ``more``
    stands beside them."""
    found = [
        {
            "code": each.code,
            "severity": each.severity.value,
            "message": each.message,
            "help": each.help,
            "location": _location(each.span),
            "related": [{"message": other.message, "location": _location(other.span)} for other in each.related],
            "details": list(each.details),
            "mends": [
                {
                    "title": mend.title,
                    "changes": [{"location": _location(c.span), "text": c.text} for c in mend.changes],
                    "is_choice": mend.is_choice,
                }
                for mend in each.mends
            ],
        }
        for each in diagnostics
    ]
    return json.dumps({"version": _VERSION, "diagnostics": found, **more}, indent=2)


def _location(span: Span | None) -> dict[str, Any] | None:
    if span is None:
        return None
    return {
        "file": span.source.name,
        "start": {"line": span.line, "column": span.column, "offset": span.start},
        "end": {"line": span.end_line, "column": span.end_column, "offset": span.end},
    }
