"""What can be done about a place of a policy: the mends of its diagnostics as edits, and what can be shown of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lsprotocol import types

from policylang.editor.features.on_request import EXPLAIN_CODE, EXPLAIN_NODE, EXPLAIN_RULE, SHOW_PLAN
from policylang.editor.features.published import Shown, place_in_document, published
from policylang.editor.locations import positions_of, uri_of
from policylang.editor.refactorings.inlined_let import inlined_let
from policylang.editor.refactorings.named_selector import named_selector
from policylang.editor.state import State
from policylang.language.diagnostics import Diagnostic, Fix, Source, TextChange

FIX_ALL = "source.fixAll.policylang"
KINDS = (
    types.CodeActionKind.QuickFix,
    types.CodeActionKind.RefactorExtract,
    types.CodeActionKind.RefactorInline,
    FIX_ALL,
    types.CodeActionKind.Empty,
)
_OPTIONAL = "write `optional` before it"
_Told = tuple[Diagnostic, types.Diagnostic]


def actions(
    state: State,
    start: int,
    end: int,
    only: Sequence[str] | None = None,
    *,
    shown: Shown | None = None,
    versioned: bool = True,
) -> list[types.CodeAction]:
    """What can be done about the text between two character offsets, of the kinds that are asked for.

    ``versioned``: whether the client takes edits of a version of a document, and refuses them once it is another.
    """
    everywhere = list(zip(state.diagnostics, published(state, shown), strict=True))
    here = [each for each in everywhere if _touches(state, each[0], start, end)]
    found: list[types.CodeAction] = []
    if _asked_for(types.CodeActionKind.QuickFix, only):
        found += _mends(state, here, versioned)
        found += _all_optional(state, here, everywhere, versioned)
    if _asked_for(types.CodeActionKind.RefactorExtract, only):
        found += _reworded(state, named_selector(state, start, end), types.CodeActionKind.RefactorExtract, versioned)
    if _asked_for(types.CodeActionKind.RefactorInline, only):
        found += _reworded(state, inlined_let(state, start), types.CodeActionKind.RefactorInline, versioned)
    if _asked_for(FIX_ALL, only):
        found += _fix_all(state, everywhere, versioned, least=2 if only is None else 1)
    if _asked_for(types.CodeActionKind.Empty, only):
        found += _to_show(state, here, start)
    return found


def _asked_for(kind: str, only: Sequence[str] | None) -> bool:
    """A kind stands for those below it too: ``source`` for ``source.fixAll``."""
    if only is None:
        return True
    return any(kind == each or (each and kind.startswith(f"{each}.")) for each in only)


def _touches(state: State, found: Diagnostic, start: int, end: int) -> bool:
    place = place_in_document(state, found)
    low, high = (0, 0) if place is None else (place.start, place.end)
    return low <= end and start <= high


# --- edits ---


def _mends(state: State, here: Iterable[_Told], versioned: bool) -> Iterator[types.CodeAction]:
    """An action for each mend; one that mends several diagnostics is one action."""
    by_mend: dict[Fix, list[types.Diagnostic]] = {}
    only_one: dict[Fix, bool] = {}
    for found, told in here:
        for mend in found.mends:
            by_mend.setdefault(mend, []).append(told)
            only_one[mend] = only_one.get(mend, True) and len(found.mends) == 1
    for mend, told_of in by_mend.items():
        if (edit := _edit(state, mend.changes, versioned)) is not None:
            yield types.CodeAction(
                mend.title, types.CodeActionKind.QuickFix, told_of, only_one[mend] or None, edit=edit
            )


def _all_optional(
    state: State, here: Iterable[_Told], everywhere: Iterable[_Told], versioned: bool
) -> Iterator[types.CodeAction]:
    """`optional` before all lines that find nothing, where one of them is here."""
    if not any(mend.title == _OPTIONAL for found, _ in here for mend in found.mends):
        return
    told = [(mend, each) for found, each in everywhere for mend in found.mends if mend.title == _OPTIONAL]
    changes = list(dict.fromkeys(change for mend, _ in told for change in mend.changes))
    if len(changes) > 1 and (edit := _edit(state, changes, versioned)) is not None:
        title = f"write `optional` before all {len(changes)} lines that find nothing"
        yield types.CodeAction(title, types.CodeActionKind.QuickFix, [each for _, each in told], edit=edit)


def _fix_all(state: State, everywhere: Iterable[_Told], versioned: bool, *, least: int) -> Iterator[types.CodeAction]:
    """What is mended in one way only, all at once, where there are so many mistakes of that kind.

    What an author has to want, a rule that goes for instance, is not among it: some editors do this whenever a file is
    saved.
    """
    taken: list[TextChange] = []
    mended: list[types.Diagnostic] = []
    for found, told in everywhere:
        changes = found.mends[0].changes if len(found.mends) == 1 and not found.mends[0].is_choice else ()
        own = all(change.span.source == state.document.source for change in changes)
        if changes and own and not any(_overlap(one, other) for one in changes for other in taken):
            taken.extend(changes)
            mended.append(told)
    if len(mended) >= least and (edit := _edit(state, taken, versioned)) is not None:
        many = "1 mistake" if len(mended) == 1 else f"{len(mended)} mistakes"
        yield types.CodeAction(f"mend {many} that can be mended in one way", FIX_ALL, mended, edit=edit)


def _reworded(
    state: State, mend: Fix | None, kind: types.CodeActionKind, versioned: bool
) -> Iterator[types.CodeAction]:
    if mend is not None and (edit := _edit(state, mend.changes, versioned)) is not None:
        yield types.CodeAction(mend.title, kind, edit=edit)


def _overlap(one: TextChange, other: TextChange) -> bool:
    return one.span.start <= other.span.end and other.span.start <= one.span.end


def _edit(state: State, changes: Sequence[TextChange], versioned: bool) -> types.WorkspaceEdit | None:
    """None where one of the changes is in a text that is no file."""
    by_source: dict[Source, list[types.TextEdit]] = {}
    for change in changes:
        where = positions_of(state, change.span.source).range(change.span)
        by_source.setdefault(change.span.source, []).append(types.TextEdit(where, change.text))
    edits = [(uri_of(state, source), made) for source, made in by_source.items()]
    known = {uri: made for uri, made in edits if uri is not None}
    if len(known) < len(edits):
        return None
    if not versioned:
        return types.WorkspaceEdit(changes=known)
    document = state.document
    return types.WorkspaceEdit(
        document_changes=[
            types.TextDocumentEdit(
                types.OptionalVersionedTextDocumentIdentifier(uri, document.version if uri == document.uri else None),
                list(made),
            )
            for uri, made in known.items()
        ]
    )


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
            if any(outcome.matched for outcome in state.graph.plan.rules if outcome.rule.span in around):
                yield _command("explain a node of this rule", EXPLAIN_NODE, uri, None, line - 1, True)
        yield _command("show this plan", SHOW_PLAN, uri, True)
    for code in dict.fromkeys(found.code for found, _ in here):
        yield _command(f"explain {code}", EXPLAIN_CODE, code, True)


def _command(title: str, name: str, *arguments: object) -> types.CodeAction:
    command = types.Command(title, name, arguments=list(arguments))
    return types.CodeAction(title, types.CodeActionKind.Empty, command=command)
