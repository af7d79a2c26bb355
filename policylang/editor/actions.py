"""Actions at a place of a policy, and its description: fixes, explanations, names, outline, layout.

The words of a statement that cannot be read still count, so that a mistake does not hide the name on its line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import get_args

from attrs import evolve, frozen
from lsprotocol import types

from policylang.editor.state import State, location, positions_of, uri_of, uri_of_path
from policylang.language import syntax
from policylang.language.devices.reading import find_device
from policylang.language.diagnostics import CODES, Diagnostic, Fix, Related, Severity, Source, Span, TextChange
from policylang.language.files import bundled_file
from policylang.language.formatting import format_source, line_end_of
from policylang.language.lexer import split, words_of
from policylang.language.operators import prelude_group
from policylang.language.parser import parse_file
from policylang.language.resources import codes_folder
from policylang.language.selectors import selector_of, walk
from policylang.language.shown import one_line, shortened
from policylang.language.syntax import Device, Include, Let, Statement, Word
from policylang.planning.capabilities import capabilities_for
from policylang.report import explain
from policylang.report.plan_page import plan_page
from policylang.report.rendering import fenced

_SEVERITIES = {
    Severity.ERROR: types.DiagnosticSeverity.Error,
    Severity.WARNING: types.DiagnosticSeverity.Warning,
    Severity.NOTE: types.DiagnosticSeverity.Information,
}
_UNNECESSARY = frozenset(("APL110", "APL303", "APL307", "APL309"))
"""The codes of unused names, and of rules that decide nothing, or nothing that the backward reads."""


def published(state: State, *, related: bool = True) -> list[types.Diagnostic]:
    """The diagnostics of a document, in the order of ``policylang check``. Errors in an included file are shown at its
    ``include``, with their place as related information: the same lines may be right in another policy, and an open
    file shows its errors itself. ``related``: True if the client shows that; else it is in the message."""
    return [_published(state, each, related) for each in state.diagnostics]


def place_in_document(state: State, found: Diagnostic) -> Span | None:
    """The place of a diagnostic in its document: its span, or the include that brings its line; None for neither."""
    for span in (found.span, *(each.span for each in found.related)):
        if span is not None and span.source == state.document.source:
            return span
    return None if found.span is None else state.text.expansion.brought.get(found.span.source.name)


def _published(state: State, found: Diagnostic, shows_related: bool) -> types.Diagnostic:
    positions, place = state.document.positions, place_in_document(state, found)
    lines, others = [found.message, *found.details], found.related
    if found.span is not None and place is not found.span:
        lines[0] = f"{found.span.location}: {found.message}"
        others = (Related(found.message, found.span), *others)
    related: list[types.DiagnosticRelatedInformation] = []
    for each in others:
        where = None if each.span is None else location(state, each.span)
        if where is not None and shows_related:
            related.append(types.DiagnosticRelatedInformation(where, each.message))
        else:
            lines.append(f"note: {each.message}" + (f" ({each.span.location})" if each.span is not None else ""))
    if found.help:
        lines.append(f"help: {found.help}")
    return types.Diagnostic(
        range=positions.between(0, 0) if place is None else positions.range(place),
        message="\n".join(lines),
        severity=_SEVERITIES[found.severity],
        code=found.code,
        code_description=types.CodeDescription((codes_folder() / f"{found.code}.md").as_uri()),
        source="policylang",
        tags=[types.DiagnosticTag.Unnecessary] if found.code in _UNNECESSARY else None,
        related_information=related or None,
    )


EXPLAIN_NODE = "policylang.explainNode"
EXPLAIN_RULE = "policylang.explainRule"
EXPLAIN_CODE = "policylang.explainCode"
SHOW_PLAN = "policylang.showPlan"


def explained_node(state: State, node: str) -> str:
    """``policylang explain --node`` as Markdown, for a node, a glob of several, or a module; empty without a plan."""
    if state.graph is None:
        return ""
    try:
        return "\n\n".join(map(_markdown, explain.explain_named(state.graph.plan, node)))
    except explain.NothingToExplain as error:
        return "\n\n".join(error.args)


def explained_line(state: State, line: int) -> str:
    """The answer of ``policylang explain --rule`` for the rules and scheduling lines on a line, counted from 0; empty
    where there are none, or the policy has no plan."""
    if state.graph is None:
        return ""
    plan, source = state.graph.plan, state.document.source
    spans = [span for found in explain.explained_statements(plan) for span in found]
    here = [each for each in spans if each.source == source and each.line - 1 <= line <= each.end_line - 1]
    capabilities = capabilities_for(state.graph.facts.kind, state.graph.path)
    return "\n\n".join(_markdown(explain.explain_statement(plan, each, capabilities)) for each in here)


def explained_code(code: str) -> str:
    """The page of a diagnostic's code; empty for what is no code."""
    return (codes_folder() / f"{code}.md").read_text(encoding="utf-8") if code in CODES else ""


def page_of(state: State) -> str | None:
    """The page of ``policylang plan --html``; None where the policy has no plan. Weighs each rule."""
    graph = state.graph
    if graph is None:
        return None
    found = graph.breakdown if graph.order is None else evolve(graph.breakdown, communication=graph.order)
    return plan_page(found, graph.worth, Path(graph.name).name)


def _markdown(explained: explain.Explained) -> str:
    """A table of text keeps its columns in a block of code."""
    first, _, rest = str(explained).partition("\n")
    head = re.sub(r"([\\`*_{}\[\]<>()#+!|~])", r"\\\1", one_line(first))
    return f"## {head}\n\n{fenced(rest.strip(chr(10)), 'text')}\n"


NODES_OF_RULE = "policylang.nodesOfRule"


def nodes_of_rule(state: State, line: int) -> list[str]:
    """The nodes that the rules on a line match, in graph order; lines count from 0. Empty without a rule or a plan."""
    if state.graph is None:
        return []
    source, plan = state.document.source, state.graph.plan
    spans = ((outcome, outcome.rule.span) for outcome in plan.rules)
    here = (outcome for outcome, at in spans if at.source == source and at.line - 1 <= line <= at.end_line - 1)
    rows = {row for outcome in here for row in outcome.matched}
    return [plan.facts.names[row] for row in sorted(rows)]


FIX_ALL = "source.fixAll.policylang"
KINDS = (types.CodeActionKind.QuickFix, FIX_ALL, types.CodeActionKind.Empty)
_Told = tuple[Diagnostic, types.Diagnostic]


def actions(
    state: State,
    start: int,
    end: int,
    only: Sequence[str] | None = None,
    *,
    related: bool = True,
    versioned: bool = True,
) -> list[types.CodeAction]:
    """The actions for the text between two character offsets, of the kinds that are asked for. ``versioned``: whether
    the client takes edits of a version of a document, and refuses them once it is another."""
    everywhere = list(zip(state.diagnostics, published(state, related=related), strict=True))
    here = [each for each in everywhere if _touches(state, each[0], start, end)]
    found: list[types.CodeAction] = []
    if _asked_for(types.CodeActionKind.QuickFix, only):
        found += _fixes(state, here, versioned)
    if _asked_for(FIX_ALL, only):
        found += _fix_all(state, everywhere, versioned, least=2 if only is None else 1)
    if _asked_for(types.CodeActionKind.Empty, only):
        found += _to_show(state, here, start)
    return found


def _asked_for(kind: str, only: Sequence[str] | None) -> bool:
    """A kind includes those below it: ``source`` includes ``source.fixAll``."""
    if only is None:
        return True
    return any(kind == each or (each and kind.startswith(f"{each}.")) for each in only)


def _touches(state: State, found: Diagnostic, start: int, end: int) -> bool:
    place = place_in_document(state, found)
    low, high = (0, 0) if place is None else (place.start, place.end)
    return low <= end and start <= high


# --- edits ---


def _fixes(state: State, here: Iterable[_Told], versioned: bool) -> Iterator[types.CodeAction]:
    """An action for each fix; one that fixes several diagnostics is one action."""
    by_fix: dict[Fix, list[_Told]] = {}
    for each in here:
        for fix in each[0].fixes:
            by_fix.setdefault(fix, []).append(each)
    for fix, told in by_fix.items():
        if (edit := _edit(state, fix.changes, versioned)) is not None:
            preferred = all(len(found.fixes) == 1 for found, _ in told) or None
            of = [each for _, each in told]
            yield types.CodeAction(fix.title, types.CodeActionKind.QuickFix, of, preferred, edit=edit)


def _fix_all(state: State, everywhere: Iterable[_Told], versioned: bool, *, least: int) -> Iterator[types.CodeAction]:
    """One action for all mistakes with a single fix, where there are at least so many. What an author has to want, a
    rule that goes for instance, is not among it: some editors do this whenever a file is saved."""
    taken: list[TextChange] = []
    mended: list[types.Diagnostic] = []
    for found, told in everywhere:
        changes = found.fixes[0].changes if len(found.fixes) == 1 and not found.fixes[0].is_choice else ()
        own = all(change.span.source == state.document.source for change in changes)
        apart = all(a.span.end < b.span.start or b.span.end < a.span.start for a in changes for b in taken)
        if changes and own and apart:
            taken.extend(changes)
            mended.append(told)
    if len(mended) >= least and (edit := _edit(state, taken, versioned)) is not None:
        many = "1 mistake" if len(mended) == 1 else f"{len(mended)} mistakes"
        yield types.CodeAction(f"fix {many} that have one fix", FIX_ALL, mended, edit=edit)


def _edit(state: State, changes: Sequence[TextChange], versioned: bool) -> types.WorkspaceEdit | None:
    """Edits by the addresses of their files, those of the document for its version where the client takes versions;
    None where one of the changes is in a text that is no file."""
    edits: dict[str, list[types.TextEdit]] = {}
    for change in changes:
        source = change.span.source
        if (uri := uri_of(state, source)) is None:
            return None
        edits.setdefault(uri, []).append(types.TextEdit(positions_of(state, source).range(change.span), change.text))
    if not versioned:
        return types.WorkspaceEdit(changes=edits)
    document = state.document
    documents: list[types.TextDocumentEdit] = []
    for uri, made in edits.items():
        version = document.version if uri == document.uri else None
        identifier = types.OptionalVersionedTextDocumentIdentifier(uri, version)
        documents.append(types.TextDocumentEdit(identifier, list(made)))
    return types.WorkspaceEdit(document_changes=documents)


# --- what can be shown ---


def _to_show(state: State, here: Iterable[_Told], start: int) -> Iterator[types.CodeAction]:
    """Commands: the last argument asks the server to show what it answers, where the client does not itself."""
    uri = state.document.uri
    if state.graph is not None:
        policy, source = state.graph.plan.policy, state.document.source
        line, _ = source.line_column(start)
        rules = [rule.span for rule in policy.rules]
        lines = [each.span for each in (*policy.buckets, *policy.scheduling)]
        around = [span for span in (*rules, *lines) if span.source == source and span.line <= line <= span.end_line]
        if around:
            what = "rule" if around[0] in rules else "line"
            yield _command(f"explain this {what}", EXPLAIN_RULE, uri, line - 1, True)
        yield _command("show this plan", SHOW_PLAN, uri, True)
    for code in dict.fromkeys(found.code for found, _ in here):
        yield _command(f"explain {code}", EXPLAIN_CODE, code, True)


def _command(title: str, name: str, *arguments: object) -> types.CodeAction:
    command = types.Command(title, name, arguments=list(arguments))
    return types.CodeAction(title, types.CodeActionKind.Empty, command=command)


_START = types.Range(types.Position(0, 0), types.Position(0, 0))
_NO_NAMES_AFTER = frozenset(
    ("IN", "OUTSIDE", "COMPARISON", "POLICY", "OVER", "BLOCKS", "WHERE", "IS", "NOT", "UNDECIDED", "REQUIRES", "DEVICE")
)
"""Words behind which a name is one of a module, a figure or a dimension, in a statement that cannot be read."""


# --- names ---


@frozen
class Occurrence:
    """A word of a selector, or the name that a ``let`` defines."""

    name: str
    span: Span
    defines: bool = False


@lru_cache(maxsize=64)
def occurrences(source: Source) -> tuple[Occurrence | Include | Device, ...]:
    """The names of a text, and its statements that name files, in its order; linear in its length."""
    found: list[Occurrence | Include | Device] = []
    read = {statement.span.start: statement for statement in parse_file(source)[0].statements}
    for start, end in split(source).ranges:
        found += _read(read[start]) if start in read else _unread(source, start, end)
    return tuple(found)


def _read(statement: Statement) -> Iterator[Occurrence | Include | Device]:
    if isinstance(statement, Include | Device):
        yield statement
    if isinstance(statement, Let):
        yield _defined_by(statement)
    selector = selector_of(statement)
    for part in walk(selector) if selector is not None else ():
        if isinstance(part, Word):
            yield Occurrence(part.text, part.span)


def _defined_by(let: Let) -> Occurrence:
    return Occurrence(let.name, words_of(let.span.source, let.span.start, let.span.end)[1].span, defines=True)


def _unread(source: Source, start: int, end: int) -> Iterator[Occurrence]:
    before = ""
    for word in words_of(source, start, end):
        if word.type in ("NAME", "PATH") and before not in _NO_NAMES_AFTER:
            yield Occurrence(str(word), word.span, defines=before == "LET")
        before = word.type


def _at(state: State, offset: int) -> Occurrence | Include | Device | None:
    """The occurrence, include or device at an offset, the offset after its last character included."""
    found = occurrences(state.document.source)
    return next((part for part in found if part.span.start <= offset <= part.span.end), None)


def _named(source: Source, name: str) -> Iterator[Occurrence]:
    return (part for part in occurrences(source) if isinstance(part, Occurrence) and part.name == name)


def _definition_of(state: State, name: str) -> Occurrence | None:
    """The ``let`` that counts: the first, one that can be read before others; else the group of the prelude."""
    lets = (placed.statement for placed in state.text.expansion.statements if isinstance(placed.statement, Let))
    let = next((let for let in lets if let.name == name), None)
    torn = next((each for each in _named(state.document.source, name) if each.defines), None)
    if let is None and torn is None:
        let = prelude_group(name)
    return torn if let is None else _defined_by(let)


def definition(state: State, offset: int) -> types.Location | None:
    """The place of the ``let``, the group or the file that is named at a character offset."""
    part = _at(state, offset)
    if isinstance(part, Include | Device):
        path = _file_of(state, part)
        return None if path is None else types.Location(uri_of_path(path), _START)
    found = None if part is None else _definition_of(state, part.name)
    return None if found is None else location(state, found.span)


def _file_of(state: State, statement: Include | Device) -> Path | None:
    """The file that a line of the document names; None where there is none such."""
    folder = Path() if state.document.path is None else state.document.path.parent
    path: Path | None
    if isinstance(statement, Device):
        found = find_device(statement.target, folder)
        path = found[0] if isinstance(found, tuple) else None
    else:
        path = bundled_file(statement.target) if statement.bundled else folder / statement.target
    try:
        return path if path is not None and os.path.isfile(path) else None
    except (OSError, ValueError):
        return None


def references(state: State, offset: int, *, declaration: bool) -> list[types.Location]:
    """The uses of the name at an offset in the document and in what it includes, the document's own first."""
    name = _at(state, offset)
    if not isinstance(name, Occurrence):
        return []
    sources = [state.document.source, *(each.statement.span.source for each in state.text.expansion.statements)]
    if (defined := _definition_of(state, name.name)) is not None:
        sources.append(defined.span.source)
    uses = (each for source in dict.fromkeys(sources) for each in _named(source, name.name))
    places = (location(state, each.span) for each in uses if declaration or not each.defines)
    return [place for place in places if place is not None]


def highlights(state: State, offset: int) -> list[types.DocumentHighlight]:
    """The uses of the name at an offset within the document."""
    name = _at(state, offset)
    if not isinstance(name, Occurrence):
        return []
    write, read = types.DocumentHighlightKind.Write, types.DocumentHighlightKind.Read
    return [
        types.DocumentHighlight(state.document.positions.range(each.span), write if each.defines else read)
        for each in _named(state.document.source, name.name)
    ]


# --- outline and layout ---

_LONGEST = 80
_KIND = types.SymbolKind
_KINDS: dict[type, types.SymbolKind] = {
    syntax.PolicyName: _KIND.Module,
    syntax.Include: _KIND.File,
    syntax.Let: _KIND.Variable,
    **dict.fromkeys((syntax.Rule, syntax.Undecided), _KIND.Function),
    **dict.fromkeys(get_args(syntax.Expectation), _KIND.Boolean),
    **dict.fromkeys((syntax.Requires, syntax.Device, syntax.Blocks), _KIND.Property),
}
"""Rewrites and scheduling lines, which are not here, are events."""


def symbols(state: State) -> list[types.SymbolInformation]:
    """The statements of a document that can be read; a ``let`` by its name."""
    return [
        types.SymbolInformation(
            types.Location(state.document.uri, state.document.positions.range(each.span)),
            each.name if isinstance(each, Let) else shortened(each.span.one_line, _LONGEST),
            _KINDS.get(type(each), _KIND.Event),
        )
        for each in state.text.file.statements
    ]


def formatted(state: State) -> list[types.TextEdit] | None:
    """The edit from the first to the last line that canonical form changes; None where a mistake rules one out."""
    source = state.document.source
    made = format_source(source).text
    if made is None:
        return None
    old = source.text.splitlines(keepends=True)
    new = made.replace("\n", line_end_of(source.text)).splitlines(keepends=True)
    first = _alike(old, new)
    last = _alike(reversed(old[first:]), reversed(new[first:]))
    start, end = len("".join(old[:first])), len(source.text) - len("".join(old[len(old) - last :]))
    text = "".join(new[first : len(new) - last])
    return [types.TextEdit(state.document.positions.between(start, end), text)] if text or start < end else []


def _alike(old: Iterable[str], new: Iterable[str]) -> int:
    """The number of equal lines at the beginning of both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
