"""Source texts and their spans; diagnostics, one type for the errors, warnings and notes of all stages; their codes."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache, cached_property
from typing import Any

from attrs import evolve, field, frozen

from policylang.language.resources import codes_folder, policies_folder
from policylang.language.shown import counted, one_line, printable


@frozen(slots=False)
class Source:
    """The text of one policy file. ``name`` is what reports print: the path as the user gave it, ``<fsdp>`` for a file
    of the bundled library, ``<policy>`` for text without a file. Two sources are the same when name and text are."""

    name: str
    text: str = field(repr=False)

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(match.end() for match in re.finditer("\n", self.text))]

    def line_column(self, offset: int) -> tuple[int, int]:
        """The 1-based line and column (in characters) of a character offset."""
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def line_text(self, line: int) -> str:
        """The text of a 1-based line, without its line end."""
        start = self._line_starts[line - 1]
        end = self._line_starts[line] - 1 if line < len(self._line_starts) else len(self.text)
        return self.text[start:end].rstrip("\r")


@frozen
class Span:
    """A half-open range of characters in a source. Lines and columns are counted from 1, columns in characters."""

    source: Source
    start: int
    end: int

    @property
    def text(self) -> str:
        """The characters themselves."""
        return self.source.text[self.start : self.end]

    @property
    def one_line(self) -> str:
        """The text with each run of spaces and line breaks as one space."""
        return " ".join(self.text.split())

    @property
    def line(self) -> int:
        """The line of the first character."""
        return self.source.line_column(self.start)[0]

    @property
    def column(self) -> int:
        """The column of the first character."""
        return self.source.line_column(self.start)[1]

    @property
    def end_line(self) -> int:
        """The line of the character after the last."""
        return self.source.line_column(self.end)[0]

    @property
    def end_column(self) -> int:
        """The column of the character after the last."""
        return self.source.line_column(self.end)[1]

    @property
    def location(self) -> str:
        """``file:line``, the form in which rules are named in reports and on nodes."""
        return f"{self.source.name}:{self.line}"

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of ``other``."""
        return Span(self.source, self.start, other.end)


class Severity(Enum):
    """An error stops, a warning is printed, a note belongs to one of these."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@frozen
class Related:
    """A second place that belongs to a diagnostic: the rule that overrides, the include that led here."""

    message: str
    span: Span | None = None
    brief: bool = False
    """True if the location is shown without its line of text."""


@frozen
class TextChange:
    """A text replaces a span; at an empty span it is inserted."""

    span: Span
    text: str


@frozen
class Fix:
    """A fix of a diagnostic: the text changes that its help describes, for editors to apply."""

    title: str
    """The change in words: ``write `==```."""
    changes: tuple[TextChange, ...]
    """Sorted by position; no two in one source overlap."""
    is_choice: bool = False
    """True if only its author can decide: a rule goes, or may match nothing. Never applied unasked."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """The texts that it changes, each once."""
        return tuple(dict.fromkeys(change.span.source for change in self.changes))

    def applied(self, source: Source, start: int = 0, end: int | None = None) -> str:
        """The text of a source, or a part of it, with the changes that are about it."""
        end = len(source.text) if end is None else end
        text = source.text[start:end]
        for change in sorted(self.changes, key=lambda each: each.span.start, reverse=True):
            first, last = change.span.start - start, change.span.end - start
            if change.span.source == source and first >= 0 and change.span.end <= end:
                text = text[:first] + change.text + text[last:]
        return text


@frozen
class Diagnostic:
    """One finding. ``message`` is one sentence in the user's terms: lowercase, no full stop, the user's text in
    backticks. ``help`` is the fix, where one exists. ``code`` has a page in ``docs/codes`` with its severity and its
    long form. ``span`` is None only where there is no text to point at (a file that is not there)."""

    code: str
    message: str
    span: Span | None = None
    help: str | None = None
    related: tuple[Related, ...] = ()
    severity: Severity = Severity.ERROR
    details: tuple[str, ...] = field(default=())
    """Further lines of evidence, such as what each part of a selector matched."""
    cause: str = ""
    """The cause that errors may share: the code of another error, or a phrase. An error whose cause is its code counts
    only if another error has this cause."""
    include: Span | None = None
    """The include in the loaded file that leads to this line, if it is in an included file."""
    fixes: tuple[Fix, ...] = ()
    """The fixes that the help describes, the likeliest first; each is complete."""
    about: str = ""
    """The file or graph that it is about, where there is no span."""

    @property
    def file(self) -> str:
        """The file that it is about, or the graph; empty only for what was found in neither."""
        return self.about if self.span is None else self.span.source.name

    def found_in(self, name: str) -> Diagnostic:
        """A copy of the diagnostic with the file or graph that was read, unless a span or an earlier call has set
        it."""
        return self if self.span is not None or self.about else evolve(self, about=name)

    def moved_to(self, span: Span) -> Diagnostic:
        """This diagnostic, whose fixes replace its text, for the same text at another span."""
        fixes = (evolve(fix, changes=tuple(evolve(each, span=span) for each in fix.changes)) for fix in self.fixes)
        return evolve(self, span=span, fixes=tuple(fixes))


def written(span: Span, texts: Iterable[str], *, near: bool = False, is_choice: bool = False) -> tuple[Fix, ...]:
    """A fix for each text that can be written in the place of a span. ``near``: they are guesses by likeness."""
    title = "did you mean `{}`?" if near else "write `{}`"
    titles = {text: title.format(" ".join(text.split())) for text in texts}
    return tuple(Fix(titled, (TextChange(span, text),), is_choice) for text, titled in titles.items())


def prefixed(span: Span, word: str) -> Fix:
    return Fix(f"write `{word}` before it", (TextChange(Span(span.source, span.start, span.start), f"{word} "),), True)


def left_out(span: Span) -> Fix:
    """The fix that leaves out the words of a span and the space before them."""
    text = span.source.text
    start = len(text[: span.start].rstrip(" \t"))
    return Fix(f"leave `{span.one_line}` out", (TextChange(Span(span.source, start, span.end), ""),), True)


def inserted(span: Span, text: str) -> Fix:
    at = Span(span.source, span.end, span.end)
    return Fix(f"write `{text}` behind it", (TextChange(at, f" {text}"),))


def removed(statement: Span, title: str = "remove the line") -> Fix:
    """The fix that removes a statement, with its line and the comment after it if nothing else is there."""
    return Fix(title, (_without_its_line(statement),), True)


def moved(statement: Span, to: Span, title: str, *, behind: bool = False) -> Fix:
    """The fix that moves a statement before another one of its text, or after it, onto a separate line."""
    source, gone = statement.source, _without_its_line(statement)
    if behind:
        return Fix(title, (gone, _line_behind(to, statement.text)), True)
    before = TextChange(Span(source, to.start, to.start), statement.text + _line_end(source))
    return Fix(title, (before, gone), True)


def put_before(statement: Span, text: str) -> Fix:
    """The fix that writes a statement on a separate line before another one."""
    source, start = statement.source, statement.start
    return Fix(f"write `{text}` above it", (TextChange(Span(source, start, start), text + _line_end(source)),), True)


def put_behind(statement: Span, text: str) -> Fix:
    """The fix that writes a statement behind another one."""
    return Fix(f"write `{text}` below it", (_line_behind(statement, text),), True)


def _line_behind(statement: Span, text: str) -> TextChange:
    """Inserts a separate line after a statement: after the comment in its line, before another statement there."""
    source, end = statement.source, statement.end
    last = source.text.find("\n", end)
    last = len(source.text) if last < 0 else last
    if source.text[end:last].lstrip().startswith(";"):
        return TextChange(Span(source, end, end), f"; {text}")
    place = last - source.text[:last].endswith("\r")
    return TextChange(Span(source, place, place), _line_end(source) + text)


def _line_end(source: Source) -> str:
    return "\r\n" if "\r\n" in source.text else "\n"


def _without_its_line(statement: Span) -> TextChange:
    """Deletes a statement so that no empty line or separator is left."""
    source, start, end = statement.source, statement.start, statement.end
    text = source.text
    first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    last = len(text) if last < 0 else last
    before, after = text[first:start], text[end:last].lstrip()
    if not before.strip() and (not after or after.startswith("#")):
        if last == len(text):  # of the last line, the end of the one before it: no empty line is left
            first = len(text[:first].removesuffix("\n").removesuffix("\r"))
        return TextChange(Span(source, first, min(last + 1, len(text))), "")
    if after.startswith(";"):
        return TextChange(Span(source, start, last - len(after[1:].lstrip())), "")
    kept = before.rstrip().removesuffix(";").rstrip()
    return TextChange(Span(source, first + len(kept), end), "")


GATHERS_NOTHING = "it gathers no weights"
AT_INCLUDE = frozenset({GATHERS_NOTHING})
"""Causes that make even the only line of an included file an error at its include."""


def one_cause(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """The diagnostics, with one error for errors of one cause: the others are notes at it. Errors that follow from
    another are notes at that one. Lines of an included file that fail for one reason are notes at its include."""
    found = list(diagnostics)
    heads = {each.code: each for each in reversed(found) if each.cause in ("", each.code)}
    follow: dict[str, list[Diagnostic]] = {}
    groups: dict[tuple[Span, str], list[Diagnostic]] = {}
    for each in found:
        if each.cause in heads and each.cause != each.code:
            follow.setdefault(each.cause, []).append(each)
        elif each.include is not None and each.cause and each.cause not in heads:
            groups.setdefault((each.include, each.cause), []).append(each)
    kept: list[Diagnostic] = []
    for each in found:
        group = groups.get((each.include, each.cause), []) if each.include is not None else []
        if each is heads.get(each.code) and each.code in follow:
            notes = [Related(f"from it follows: {n.message}", n.span, brief=True) for n in follow[each.code]]
            kept.append(_included(evolve(each, cause="", related=(*each.related, *notes))))
        elif each.cause == each.code or (each.cause in heads and each.cause != each.code):
            continue
        elif each.include is not None and (len(group) > 1 or each.cause in AT_INCLUDE):
            if each is group[0]:
                kept.append(_at_include(each.include, group))
        else:
            kept.append(_included(each))
    return tuple(kept)


def _included(found: Diagnostic) -> Diagnostic:
    """Adds a note of the include that leads to the line."""
    if found.include is None:
        return found
    return evolve(found, include=None, related=(*found.related, Related("included from here", found.include)))


def _at_include(include: Span, group: list[Diagnostic]) -> Diagnostic:
    """One error for several lines of an included file; its fix applies each line's fix, if all are the same."""
    message = f"`{include.one_line}` matches nothing in this graph: {group[0].cause}"
    related = tuple(Related(each.message, each.span, brief=True) for each in group)
    choices = [next((fix for fix in each.fixes if fix.is_choice), None) for each in group]
    told = [fix for fix in choices if fix is not None]
    fixes: tuple[Fix, ...] = ()
    if len(told) == len(group) and len({fix.title for fix in told}) == 1:
        changes = dict.fromkeys(change for fix in told for change in fix.changes)
        fixes = (Fix(told[0].title.replace(" it", f" {len(group)} lines"), tuple(changes), True),)
    one = evolve(group[0], message=message, span=include, related=related, fixes=fixes)
    return evolve(one, cause="", include=None, details=())


_CODE = re.compile(r"APL[0-9]{3}")
_PAGE = re.compile(
    r"# (?P<code>APL[0-9]{3}): (?P<title>.+)\n"
    r"\n\*(?P<severity>error|warning|note)\*\n"
    r"\n(?P<text>(?:.+\n)+)"
    r"(?:\nWrong:\n\n```apl ignore\n(?P<wrong>(?:.*\n)*?)```\n)?"
    r"(?:\nRight:\n\n```apl(?: ignore)?\n(?P<mended>(?:.*\n)*?)```\n)?"
)


@frozen
class Code:
    """One kind of diagnostic. ``wrong`` and ``mended`` are policy text, empty if no text shows it."""

    code: str
    title: str
    severity: Severity
    text: str
    """The long form, one paragraph: what it means, why it matters, what to do."""
    wrong: str
    mended: str


class _Codes(Mapping[str, Code]):
    """Every code that has a page."""

    def __getitem__(self, code: str) -> Code:
        return _read(code)

    def __iter__(self) -> Iterator[str]:
        return (page.stem for page in codes_folder().glob("*.md") if _CODE.fullmatch(page.stem))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def _read(code: str) -> Code:
    """The page of a code. Raises ``KeyError`` where there is none, ``ValueError`` where it has not the form of one."""
    page = codes_folder() / f"{code}.md"
    if not _CODE.fullmatch(code) or not page.is_file():
        raise KeyError(code)
    found = _PAGE.fullmatch(page.read_text(encoding="utf-8"))
    if found is None or found["code"] != code:
        raise ValueError(f"{page} is not in the form of a page of {code}")
    examples = ((found[name] or "").removesuffix("\n") for name in ("wrong", "mended"))
    return Code(code, found["title"], Severity(found["severity"]), " ".join(found["text"].splitlines()), *examples)


CODES: Mapping[str, Code] = _Codes()


MOST = 1000
"""Diagnostics of one policy, or of one on a graph."""


def diagnose(
    code: str,
    message: str,
    span: Span | None = None,
    *,
    help: str | None = None,
    related: tuple[Related, ...] = (),
    details: tuple[str, ...] = (),
    write: Sequence[str] = (),
    fixes: Iterable[Fix] = (),
) -> Diagnostic:
    """A diagnostic of a code, with the severity that its page gives. ``write``: texts that can replace the span, each a
    fix; ``fixes``: those that change something else. Fixes in a bundled policy, or of a rule without text, are left
    out: nobody writes there."""
    if write and span is not None:
        fixes = (*written(span, write, near=(help or "").startswith("did you mean")), *fixes)
    fixes = tuple(fix for fix in fixes if not any(not each.text or is_bundled(each.name) for each in fix.sources))
    help = None if help is None else printable(help)
    details = tuple(map(printable, details))
    return Diagnostic(code, one_line(message), span, help, related, CODES[code].severity, details, fixes=fixes)


class DiagnosticList(list[Diagnostic]):
    """Diagnostics in the order in which they are found."""

    def report(self, code: str, message: str, span: Span | None = None, **more: Any) -> None:
        """Adds the diagnostic that :func:`diagnose` makes of these."""
        self.append(diagnose(code, message, span, **more))


def is_bundled(name: str) -> bool:
    return name.startswith("<") and (policies_folder() / f"{name.strip('<>')}.apl").is_file()


def bounded(found: Sequence[Diagnostic]) -> tuple[Diagnostic, ...]:
    """At most :data:`MOST` diagnostics, and how many more there are."""
    if len(found) <= MOST:
        return tuple(found)
    more = f"{counted(len(found) - MOST, 'further diagnostic is', 'further diagnostics are')} not shown"
    span = next((each.span for each in found[MOST:] if each.span is not None), None)
    return (*found[:MOST], diagnose("APL117", more, span, help="fix those that are shown first"))


_ALLOWED = re.compile(r"#\s*allow:\s*((?:APL\d{3}[\s,]*)+)")


def heeded(found: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Diagnostics without the warnings and notes that a comment allows: ``# allow: APL701`` at the end of their line,
    or of the include that brings it."""
    return tuple(each for each in found if is_error(each) or not _is_allowed(each))


def _is_allowed(found: Diagnostic) -> bool:
    spans = [span for span in (found.span, found.include) if span is not None]
    lines = (span.source.line_text(number) for span in spans for number in range(span.line, span.end_line + 1))
    return any(found.code in match.group(1) for line in lines for match in _ALLOWED.finditer(line))


def is_error(diagnostic: Diagnostic) -> bool:
    return diagnostic.severity is Severity.ERROR


def is_syntax(diagnostic: Diagnostic) -> bool:
    """True if the text cannot be read; False if it can and its meaning is wrong."""
    return diagnostic.code.startswith("APL0")
