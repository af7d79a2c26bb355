"""A ``let`` that goes: what it stands for is written wherever its name is used."""

from __future__ import annotations

from policylang.editor.names.occurrences import Occurrence, occurrences
from policylang.editor.refactorings.named_selector import with_names_read
from policylang.editor.state import State
from policylang.language.diagnostics import Fix, Source, TextChange, removed
from policylang.language.grammar import words_of
from policylang.language.parser import parse_file
from policylang.language.syntax import Let, Rule


def inlined_let(state: State, offset: int) -> Fix | None:
    """What writes out the name at an offset, at its definition or a use. None for a name that another file defines or
    uses, that nothing uses, and in a file of names for others, which uses are not known of."""
    source = state.document.source
    here = occurrences(source).at(offset)
    decides = any(isinstance(each, Rule) for each in state.text.file.statements)
    if not isinstance(here, Occurrence) or not decides or state.text.loaded.policy is None:
        return None
    let = next((each for each in state.text.file.statements if isinstance(each, Let) and each.name == here.name), None)
    others = {each.statement.span.source for each in state.text.expansion.statements} - {source}
    uses = [each for each in occurrences(source).of(here.name) if not each.defines]
    if let is None or not uses or any(occurrences(other).of(let.name) for other in others):
        return None
    words = words_of(source, let.span.start, let.span.end)
    start = words[3].span.start  # behind `let NAME =`
    written = source.text[start : let.span.end]
    if len(words) > 4:
        written = f"({written})"
    (line,) = removed(let.span).changes
    changes = [line, *(TextChange(each.span, written) for each in uses)]
    mend = Fix(f"write out `{let.name}`", tuple(sorted(changes, key=lambda each: each.span.start)))
    return mend if _says_the_same(state, mend, let) else None


def _says_the_same(state: State, mend: Fix, let: Let) -> bool:
    before = [each for each in state.text.file.statements if each is not let]
    file, wrong = parse_file(Source("", mend.applied(state.document.source)))
    return not wrong and list(file.statements) == [with_names_read(each, let.name, let.selector) for each in before]
