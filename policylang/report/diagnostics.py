"""Renders the findings of a check as text, JSON, GitHub's workflow commands, SARIF and JUnit XML.

A format is a function of a :class:`CheckResult` in :data:`RENDERERS`; ``--output-format`` offers its keys.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from attrs import asdict, field, frozen

from policylang.language.diagnostics import CODES, Diagnostic, Fix, Severity, Span, is_error
from policylang.language.resources import installed_version
from policylang.language.shown import counted, file_name, printable
from policylang.report.rendering import columns, element, table

if TYPE_CHECKING:
    from policylang.planning.plan import ExpectationOutcome, Plan

_CANNOT_BE_READ = {"APL103", "APL104", "APL152", "APL153", "APL355", "APL416", "APL515"}


@frozen
class CheckResult:
    """The diagnostics of one or more policy files, in this order: those of the snapshots; then, file by file, those of
    the text in its order, and those on each graph."""

    files: tuple[str, ...]
    """The files that were checked, of a folder each one below it; a policy that was loaded already by its name."""
    diagnostics: tuple[Diagnostic, ...]
    """The findings, in the order above."""
    graphs: tuple[str, ...] = ()
    """The snapshots that could be read."""
    plans: tuple[Plan, ...] = field(default=(), repr=False)
    """The plan of each file that can be read on each graph, file by file."""

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (_text(self), repr(self))))

    def __repr__(self) -> str:
        counts = counted(len(self.files), "file"), counted(self.errors, "error"), counted(self.warnings, "warning")
        return f"<policylang.CheckResult: {', '.join(counts)}>"

    @property
    def devices(self) -> tuple[str, ...]:
        """The device profiles that times were worked out from."""
        return tuple(dict.fromkeys(plan.shown_times.device.name for plan in self.plans if plan.shown_times is not None))

    @property
    def expectations(self) -> tuple[tuple[str, ExpectationOutcome], ...]:
        """Every expectation on every graph: the graph's name, and the outcome."""
        names = [name for _ in range(len(self.plans) // max(len(self.graphs), 1)) for name in self.graphs]
        planned = zip(names, self.plans, strict=True)
        return tuple((name, outcome) for name, plan in planned for outcome in plan.expectations)

    @property
    def errors(self) -> int:
        """The number of errors among the diagnostics."""
        return sum(map(is_error, self.diagnostics))

    @property
    def warnings(self) -> int:
        """The number of warnings among them."""
        return sum(diagnostic.severity is Severity.WARNING for diagnostic in self.diagnostics)

    @property
    def unreadable(self) -> bool:
        """True if one of the files itself could not be read; an include that is missing is an error of its file."""
        return any(d.span is None and d.code in _CANNOT_BE_READ for d in self.diagnostics)


# --- text -------------------------------------------------------------------------------------------------------------


_WINDOW = 100  # the columns of a source line that are shown; of a longer one, those around the span
_NARROWEST = 16
_TAB = 4
_plain = partial(printable, kept="\n")


def render_text(diagnostics: Iterable[Diagnostic]) -> str:
    """Each diagnostic with its source line and the span underlined, its fix on a line of its own."""
    return "\n\n".join("\n".join(_block(diagnostic)) for diagnostic in diagnostics)


def _block(diagnostic: Diagnostic) -> list[str]:
    lines = [f"{diagnostic.severity.value}[{diagnostic.code}]: {_plain(diagnostic.message)}"]
    margin = ""
    if diagnostic.span is not None:
        margin = " " * len(str(diagnostic.span.line))
        lines.extend(_excerpt(diagnostic.span))
    for detail in diagnostic.details:
        lines.append(f"{margin} = {_plain(detail)}")
    for other in diagnostic.related:
        place = f" ({_plain(other.span.location)})" if other.brief and other.span is not None else ""
        lines.append(f"{margin} = note: {_plain(other.message)}{place}")
        if other.span is not None and not other.brief:
            lines.extend(f"{margin}   {line}" for line in _excerpt(other.span))
    if diagnostic.help is not None:
        lines.append(f"{margin} = help: {_plain(diagnostic.help)}")
    return lines


def _excerpt(span: Span) -> list[str]:
    """The location, and the first line with the span underlined; the location alone where there is no such line."""
    number = str(span.line)
    margin = " " * len(number)
    lines = [f"{margin}--> {_plain(span.source.name)}:{span.line}:{span.column}"]
    text = span.source.line_text(span.line)
    if not text:
        return lines
    start = min(span.column - 1, len(text))
    end = min(span.end_column - 1, len(text)) if span.end_line == span.line else len(text)
    most = columns()
    room = _WINDOW if most is None else max(_NARROWEST, min(_WINDOW, most - len(number) - 5))  # number, bar, ellipses
    shown, before, width = _window(text, start, max(end, start), room)
    lines.append(f"{margin} |")
    lines.append(f"{number} | {shown}".rstrip())
    lines.append(f"{margin} | {' ' * before}{'^' * width}")
    return lines


def _window(text: str, start: int, end: int, window: int) -> tuple[str, int, int]:
    """The part of a line to show, the columns before the span in it, and the columns of the span (at least one)."""
    low, high = 0, len(text)
    if high > window:
        low = max(0, min(start - window // 4, high - window))
        high = min(high, low + window)
    head = "…" if low else ""
    tail = "…" if high < len(text) else ""
    end = min(end, high)
    parts = (text[low:start], text[start:end], text[end:high])
    before, inside, after = (_plain(part.replace("\t", " " * _TAB)) for part in parts)
    return f"{head}{before}{inside}{after}{tail}", len(head) + _columns(before), max(_columns(inside), 1)


def _columns(text: str) -> int:
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def render_concise(diagnostics: Iterable[Diagnostic]) -> str:
    """One line each: ``llama3.apl:9:6: error[APL101]: there is no operator, group or name `mn```."""
    return "\n".join(
        ("" if each.span is None else f"{_plain(each.span.source.name)}:{each.span.line}:{each.span.column}: ")
        + f"{each.severity.value}[{each.code}]: {_plain(each.message)}"
        for each in diagnostics
    )


# --- JSON -------------------------------------------------------------------------------------------------------------


_JSON_VERSION = 1


def render_json(diagnostics: Iterable[Diagnostic], **more: Any) -> str:
    """An object with a format version, the diagnostics and ``more``; lines and columns count from 1, offsets from 0."""
    found = [
        {
            "code": each.code,
            "severity": each.severity.value,
            "message": each.message,
            "help": each.help,
            "location": _json_location(each.span),
            "related": [{"message": other.message, "location": _json_location(other.span)} for other in each.related],
            "details": list(each.details),
            "mends": [
                {
                    "title": fix.title,
                    "changes": [{"location": _json_location(c.span), "text": c.text} for c in fix.changes],
                    "is_choice": fix.is_choice,
                }
                for fix in each.fixes
            ],
        }
        for each in diagnostics
    ]
    return json.dumps({"version": _JSON_VERSION, "diagnostics": found, **more}, indent=2)


def _json_location(span: Span | None) -> dict[str, Any] | None:
    if span is None:
        return None
    return {
        "file": span.source.name,
        "start": {"line": span.line, "column": span.column, "offset": span.start},
        "end": {"line": span.end_line, "column": span.end_column, "offset": span.end},
    }


# --- GitHub Actions ---------------------------------------------------------------------------------------------------


def render_github(diagnostics: Iterable[Diagnostic]) -> str:
    """Workflow commands of GitHub Actions, one each."""
    return "\n".join(map(_github_annotation, diagnostics))


def _github_annotation(diagnostic: Diagnostic) -> str:
    kind = "notice" if diagnostic.severity is Severity.NOTE else diagnostic.severity.value
    properties: dict[str, object] = {}
    message = "\n".join((diagnostic.message, *diagnostic.details, *_help(diagnostic)))
    span = diagnostic.span
    if span is not None and span.source.name.startswith("<"):
        message = f"{span.source.name}:{span.line}: {message}"
    elif span is not None:
        properties |= {"file": span.source.name, "line": span.line, "endLine": span.end_line}
        if span.line == span.end_line:  # columns across lines are not shown where they belong
            properties |= {"col": span.column, "endColumn": max(span.end_column, span.column + 1)}
    properties["title"] = diagnostic.code
    escaped = {name: _github_escaped(str(value)) for name, value in properties.items()}
    written = ",".join(f"{name}={value.replace(':', '%3A').replace(',', '%2C')}" for name, value in escaped.items())
    return f"::{kind} {written}::{_github_escaped(message)}"


def _help(diagnostic: Diagnostic) -> list[str]:
    return [f"help: {diagnostic.help}"] if diagnostic.help else []


def _github_escaped(text: str) -> str:
    """``##[`` begins a command wherever it is in a line."""
    return text.replace("##", "# #").replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


# --- SARIF ------------------------------------------------------------------------------------------------------------


_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"


def render_sarif(diagnostics: Iterable[Diagnostic]) -> str:
    """A log of one run, with a rule for each code that was found, after the OASIS standard "Static Analysis Results
    Interchange Format (SARIF) Version 2.1.0"."""
    found = list(diagnostics)
    codes = sorted({each.code for each in found})
    rules = [
        {
            "id": code,
            "shortDescription": {"text": CODES[code].title},
            "fullDescription": {"text": CODES[code].text},
            "defaultConfiguration": {"level": CODES[code].severity.value},
        }
        for code in codes
    ]
    driver = {"name": "policylang", "version": installed_version(), "rules": rules}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_sarif_result(each, codes) for each in found],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _sarif_result(diagnostic: Diagnostic, codes: Sequence[str]) -> dict[str, Any]:
    location = _sarif_location(diagnostic.span)
    message = diagnostic.message  # with the evidence, the help, and a span in a text that is no file
    if diagnostic.span is not None and location is None:
        message = f"{diagnostic.span.location}: {message}"
    places = [_sarif_location(other.span) for other in diagnostic.related]
    others = [other.message for other, place in zip(diagnostic.related, places, strict=True) if place is None]
    related = [
        {**place, "id": number, "message": {"text": other.message}}
        for number, (other, place) in enumerate(zip(diagnostic.related, places, strict=True), 1)
        if place is not None
    ]
    fixes = [found for fix in diagnostic.fixes if (found := _sarif_fix(fix)) is not None]
    return {
        "ruleId": diagnostic.code,
        "ruleIndex": codes.index(diagnostic.code),
        "level": diagnostic.severity.value,
        "message": {"text": "\n".join((message, *diagnostic.details, *others, *_help(diagnostic)))},
        **({} if location is None else {"locations": [location]}),
        **({"relatedLocations": related} if related else {}),
        **({"fixes": fixes} if fixes else {}),
    }


def _sarif_fix(fix: Fix) -> dict[str, Any] | None:
    """None for a fix of a text that is no file."""
    changes = []
    for source in fix.sources:
        replacements = []
        for change in fix.changes:
            if change.span.source == source:
                location = _sarif_location(change.span)
                if location is None:
                    return None
                region = location["physicalLocation"]["region"]
                replacements.append({"deletedRegion": region, "insertedContent": {"text": change.text}})
        changes.append({"artifactLocation": {"uri": _uri(source.name)}, "replacements": replacements})
    return {"description": {"text": fix.title}, "artifactChanges": changes}


def _sarif_location(span: Span | None) -> dict[str, Any] | None:
    if span is None or span.source.name.startswith("<"):
        return None
    region = {
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


# --- JUnit ------------------------------------------------------------------------------------------------------------


def render_junit(found: CheckResult) -> str:
    """A test case for each file, and for each graph or include with findings; it passes where nothing is found. Written
    after the schema of Jenkins' xUnit plugin, which code hosts read. Notes fail nothing."""
    by_file: dict[str, list[Diagnostic]] = {name: [] for name in found.files}
    bundled = {f"<{name}>": name for name in found.files}
    for each in found.diagnostics:
        by_file.setdefault(bundled.get(each.file, each.file), []).append(each)
    failures, cases = 0, []
    for name, of in by_file.items():
        body = []
        if all(each.severity is Severity.NOTE for each in of):
            body += [element("system-out", render_text(of))] if of else []
        else:
            failures += 1
            more = f" and {counted(len(of) - 1, 'further finding')}" if len(of) > 1 else ""
            message = _plain(of[0].message) + more
            body.append(element("failure", render_text(of), message=message, type=of[0].code))
        cases.append(element("testcase", *body, name=_plain(name), classname="policylang"))
    counts = {"tests": len(cases), "failures": failures, "errors": 0}
    suites = element("testsuites", element("testsuite", *cases, name="policylang", **counts), **counts)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{suites}'


# --- expectations -----------------------------------------------------------------------------------------------------


_SAID = {"held": "holds", "failed": "does not hold", "deferred": "cannot be told yet"}


def expectation_table(outcomes: Sequence[tuple[str, ExpectationOutcome]]) -> str:
    """Expectations, each with the name of its graph, or an empty one where there is no other; empty without any."""
    if not outcomes:
        return ""
    several = any(graph for graph, _ in outcomes)
    rows: list[tuple[str, ...]] = [("line", "expectation", "", "found", *("on",)[:several])]
    for graph, each in outcomes:
        cells = file_name(each.source), _words(each.text), _SAID[each.status], each.found
        rows.append((*cells, *(file_name(graph),)[:several]))
    return table(rows, right=range(0), ends=(0,))


def compared_rows(old: Sequence[ExpectationOutcome], new: Sequence[ExpectationOutcome]) -> list[tuple[str, str, str]]:
    """The expectation, and its result before and after; empty where a policy does not expect it."""
    before, after = ({each.text: f"{_SAID[each.status]}: {each.found}" for each in side} for side in (old, new))
    return [(_words(text), before.get(text, ""), after.get(text, "")) for text in dict.fromkeys((*before, *after))]


def _words(text: str) -> str:
    return text.removeprefix("expect ")


# --- formats ----------------------------------------------------------------------------------------------------------


def _text(found: CheckResult) -> str:
    """The expectations that hold: the others have diagnostics."""
    held = [(graph, each) for graph, each in found.expectations if each.status == "held"]
    if len(found.graphs) == 1:
        held = [("", each) for _, each in held]
    return "\n\n".join(filter(None, (render_text(found.diagnostics), expectation_table(held))))


def _json(found: CheckResult) -> str:
    """On graphs with every expectation."""
    if not found.graphs:
        return render_json(found.diagnostics)
    outcomes = [{"graph": graph, **asdict(outcome)} for graph, outcome in found.expectations]
    return render_json(found.diagnostics, expectations=outcomes, devices=found.devices)


RENDERERS: Mapping[str, Callable[[CheckResult], str]] = {
    "text": _text,
    "concise": lambda found: render_concise(found.diagnostics),
    "json": _json,
    "github": lambda found: render_github(found.diagnostics),
    "sarif": lambda found: render_sarif(found.diagnostics),
    "junit": render_junit,
}
"""By the name of the format, as ``--output-format`` takes it."""
