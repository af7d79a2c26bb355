"""The parser: the statements of a source, and a diagnostic for each that cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from attrs import evolve
from lark import Lark
from lark.exceptions import UnexpectedToken

from policylang.language.cancellation import check_cancelled
from policylang.language.diagnostics import MOST, Diagnostic, Source, Span
from policylang.language.grammar import lexer, parser_of
from policylang.language.lexer import MAX_DEPTH, Lexeme, split, too_deep
from policylang.language.mistakes import find_mistake
from policylang.language.statements import StatementRules, report_loose
from policylang.language.syntax import File, Statement
from policylang.language.unexpected import explain_unexpected
from policylang.language.walk import depth, selector_of

_LONGEST = 600
"""Characters of a statement whose fixes are tried, each by parsing it."""
_MENDED = frozenset(("APL005", "APL010", "APL011", "APL012", "APL013", "APL114"))
"""Codes of diagnostics that a common mistake may replace."""


@cache
def statement_parser() -> Lark:
    """The parser of one statement."""
    return parser_of(StatementRules())


def parse_file(source: Source) -> tuple[File, tuple[Diagnostic, ...]]:
    """The statements of a source that can be read, and a diagnostic for each that cannot, in the order of the text.

    Nothing is looked up: words stay words, includes stay includes. Linear in the length of the text.
    """
    slices = split(source)
    diagnostics = list(slices.diagnostics)
    statements: list[Statement] = []
    for start, end in slices.ranges:
        check_cancelled()
        statement = _parse_statement(source, start, end, diagnostics)
        if statement is not None:
            statements.append(statement)
    diagnostics.sort(key=lambda diagnostic: diagnostic.span.start if diagnostic.span else 0)
    return File(tuple(statements), span=Span(source, 0, len(source.text))), tuple(diagnostics)


def _parse_statement(source: Source, start: int, end: int, diagnostics: list[Diagnostic]) -> Statement | None:
    words, origin = lexer().lex(source, start, end)
    statement: Statement | None = None
    if not origin.problems:
        try:
            statement = _reduce(statement_parser(), words)
        except UnexpectedToken as error:
            explain_unexpected(error, words, lexer().keywords)
        else:
            report_loose(words)
            selector = selector_of(statement)
            if selector is not None and depth(selector) > MAX_DEPTH:
                diagnostics.append(too_deep(statement.span))
                return None
    diagnostics.extend(_mended(origin.problems, source, start, end, diagnostics))
    return None if origin.problems else statement


def _mended(
    problems: Sequence[Diagnostic], source: Source, start: int, end: int, found: Sequence[Diagnostic]
) -> list[Diagnostic]:
    """The problems of a statement, or the common mistake that explains the only one, with the fixes that let the
    statement be read further. ``found``: what is wrong with those before it."""
    if len(found) >= MOST:  # they are counted, and nobody reads them
        return [evolve(each, fixes=()) for each in problems]
    if len(problems) == 1 and problems[0].code in _MENDED:
        statement = Span(source, start, end)
        problems = [find_mistake(statement, problems[0], lambda text: _trial(text)[0]) or problems[0]]
    return [_proved(each, source, start, end) for each in problems]


def _proved(problem: Diagnostic, source: Source, start: int, end: int) -> Diagnostic:
    """Keeps the fixes with which the statement is read further, and with which no more is wrong."""
    if problem.span is None or not problem.fixes or end - start > _LONGEST:
        return evolve(problem, fixes=())
    text = source.text[start:end]
    stopped, count = _trial(text)
    kept = []
    for fix in problem.fixes:
        better = fix.applied(source, start, end)
        reached, left = _trial(better)
        further = stopped is not None and reached is not None and len(better) - reached < len(text) - stopped
        if reached is None or (further and left <= count):
            kept.append(fix)
    return evolve(problem, fixes=tuple(kept))


def _trial(text: str) -> tuple[int | None, int]:
    """The offset at which a statement cannot be read any further, and its number of problems."""
    words, origin = lexer().lex(Source("", text), 0, len(text))
    if not origin.problems and words:  # else it is a comment
        try:
            _reduce(statement_parser(), words)
        except UnexpectedToken as error:
            stop = len(text) if error.token.type == "$END" else int(error.token.start_pos or 0)
            return stop, 1 + len(origin.problems)
        report_loose(words)
    if not origin.problems:
        return None, 0
    return min((each.span.start for each in origin.problems if each.span is not None), default=0), len(origin.problems)


def _reduce(lark: Lark, words: list[Lexeme]) -> Statement:
    parser = lark.parse_interactive("")
    for word in words:
        parser.feed_token(word)
    statement: Statement = parser.feed_eof(words[-1])  # type: ignore[no-untyped-call]
    return statement
