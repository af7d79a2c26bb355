"""Diagnostics as SARIF 2.1.0, the form in which code hosts take the findings of an analysis.

Written after the OASIS standard "Static Analysis Results Interchange Format (SARIF) Version 2.1.0".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from policylang.language.diagnostics import CODES, Diagnostic, Fix, Severity, Span
from policylang.language.resources import installed_version

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}


def render_sarif(diagnostics: Iterable[Diagnostic]) -> str:
    """A log of one run, with a rule for each code that was found."""
    found = list(diagnostics)
    codes = sorted({each.code for each in found})
    driver = {"name": "policylang", "version": installed_version(), "rules": [_rule(code) for code in codes]}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(each, codes) for each in found],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _rule(code: str) -> dict[str, Any]:
    entry = CODES[code]
    return {
        "id": code,
        "shortDescription": {"text": entry.title},
        "fullDescription": {"text": entry.text},
        "defaultConfiguration": {"level": _LEVELS[entry.severity]},
    }


def _result(diagnostic: Diagnostic, codes: Sequence[str]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": diagnostic.code,
        "ruleIndex": codes.index(diagnostic.code),
        "level": _LEVELS[diagnostic.severity],
        "message": {"text": _message(diagnostic)},
    }
    location = _location(diagnostic.span)
    if location is not None:
        result["locations"] = [location]
    related = [
        {**place, "id": number, "message": {"text": other.message}}
        for number, other in enumerate(diagnostic.related, 1)
        if (place := _location(other.span)) is not None
    ]
    if related:
        result["relatedLocations"] = related
    fixes = [fix for mend in diagnostic.mends if (fix := _fix(mend)) is not None]
    if fixes:
        result["fixes"] = fixes
    return result


def _fix(mend: Fix) -> dict[str, Any] | None:
    """None for a mend of a text that is no file."""
    changes = []
    for source in mend.sources:
        replacements = []
        for change in mend.changes:
            if change.span.source == source:
                location = _location(change.span)
                if location is None:
                    return None
                region = location["physicalLocation"]["region"]
                replacements.append({"deletedRegion": region, "insertedContent": {"text": change.text}})
        changes.append({"artifactLocation": {"uri": _uri(source.name)}, "replacements": replacements})
    return {"description": {"text": mend.title}, "artifactChanges": changes}


def _message(diagnostic: Diagnostic) -> str:
    """With what has no place of its own: the evidence, the mend, a span in a text that is no file."""
    span = diagnostic.span
    first = diagnostic.message
    if span is not None and _location(span) is None:
        first = f"{span.location}: {first}"
    notes = [other.message for other in diagnostic.related if _location(other.span) is None]
    help = [f"help: {diagnostic.help}"] if diagnostic.help else []
    return "\n".join([first, *diagnostic.details, *notes, *help])


def _location(span: Span | None) -> dict[str, Any] | None:
    if span is None or span.source.name.startswith("<"):
        return None
    region: dict[str, Any] = {
        "startLine": span.line,
        "startColumn": span.column,
        "endLine": span.end_line,
        "endColumn": span.end_column,
        "charOffset": span.start,
        "charLength": span.end - span.start,
    }
    return {"physicalLocation": {"artifactLocation": {"uri": _uri(span.source.name)}, "region": region}}


def _uri(path: str) -> str:
    """Relative paths stay so: a code host resolves them against the repository."""
    forward = path.replace("\\", "/")
    if forward[1:3] == ":/":  # a drive
        return f"file:///{forward[0]}:{quote(forward[2:], errors='surrogateescape')}"
    quoted = quote(forward, errors="surrogateescape")
    return f"file://{quoted}" if forward.startswith("/") else quoted
