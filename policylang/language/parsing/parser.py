"""The parser: the statements of a source, and a diagnostic for each that cannot be read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cache, lru_cache

from attrs import evolve, frozen
from lark import Lark, Token
from lark.exceptions import UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser

from policylang.language.codes import MOST, diagnose
from policylang.language.diagnostics import Diagnostic, written
from policylang.language.interruption.wanted import check_cancelled
from policylang.language.parsing.grammar_table import parser_of
from policylang.language.parsing.lexer import Lexeme, Lexer
from policylang.language.parsing.mending import find_mend
from policylang.language.parsing.statement_tree import report_loose
from policylang.language.parsing.statements import MAX_DEPTH, split, too_deep
from policylang.language.parsing.unexpected import explain_unexpected
from policylang.language.resources import grammar_file
from policylang.language.source import Source, Span
from policylang.language.syntax import File, Statement
from policylang.language.walk import depth, selector_of

_A_TEXT = re.compile(r"[a-z_]+(?: [a-z_]+)*|[^\w\s()\[\]]+")
"""A word or two of the language, or a sign."""
_LONGEST = 600
"""Characters of a statement whose mends are tried, each by reading it again."""
_MENDED = frozenset(("APL005", "APL010", "APL011", "APL012", "APL013"))
"""Of a character, a word, a statement that ends, one that does not start, and an action that is none."""


@cache
def _lark() -> Lark:
    return parser_of(grammar_file().read_text(encoding="utf-8"))


@cache
def _lexer() -> Lexer:
    return Lexer(list(_lark().terminals))


def keywords() -> frozenset[str]:
    """The words that cannot be names of selectors, operators or modules."""
    return frozenset(_lexer().keywords)


def word_kind(text: str) -> str | None:
    """The terminal that a text is as one word; None where it is several or none."""
    words, origin = _lexer().lex(Source("", text), 0, len(text))
    return words[0].type if len(words) == 1 and len(words[0]) == len(text) and not origin.problems else None


def is_policy_name(text: str) -> bool:
    """Whether `policy` can be followed by a text as one plain name, a keyword or not."""
    words, origin = _lexer().lex(Source("", f"policy {text}"), 0, len(text) + len("policy "))
    return [word.type for word in words] == ["POLICY", "NAME"] and words[1] == text and not origin.problems


def words_of(source: Source, start: int, end: int) -> list[Lexeme]:
    """The words of one statement, in the order of the text."""
    return _lexer().lex(source, start, end)[0]


@frozen
class Reading:
    """How far the grammar reads the words of a statement, and what it takes next."""

    accepted: frozenset[str]
    """The terminals that may follow; ``$END`` where the statement may end."""
    refused: tuple[int, ...]
    """The words that could not stand where they stand; the others are read as if these were not there."""


@lru_cache(maxsize=2048)
def reading(terminals: tuple[str, ...]) -> Reading:
    """What may follow the beginning of a statement, given as the terminals of its words."""
    if not terminals:
        return Reading(_accepted(_fed(())[0]), ())
    before, refused = _fed(terminals[:-1])
    parser: InteractiveParser = before.copy(deepcopy_values=False)  # type: ignore[no-untyped-call]
    if not _feed(parser, terminals[-1]):
        refused = (*refused, len(terminals) - 1)
    return Reading(_accepted(parser), refused)


@lru_cache(maxsize=64)
def _fed(terminals: tuple[str, ...]) -> tuple[InteractiveParser, tuple[int, ...]]:
    """A parser behind some words, not to be fed itself, and the words that it refused."""
    parser = _lark().parse_interactive("")
    parser.parser_state.parse_conf = copy(parser.parser_state.parse_conf)
    parser.parser_state.parse_conf.callbacks = {}  # nothing is built, so nothing is reported
    return parser, tuple(index for index, terminal in enumerate(terminals) if not _feed(parser, terminal))


def _feed(parser: InteractiveParser, terminal: str) -> bool:
    """Whether a parser takes a terminal; where it does not, it stays as it is."""
    state = parser.parser_state
    states, values = [*state.state_stack], [*state.value_stack]
    try:
        parser.feed_token(Token(terminal, ""))
    except UnexpectedToken:  # what was reduced until then is undone
        state.state_stack, state.value_stack = states, values
        return False
    return True


def _accepted(parser: InteractiveParser) -> frozenset[str]:
    accepted: set[str] = parser.accepts()  # type: ignore[no-untyped-call]
    return frozenset(accepted)


@cache
def terminal_texts() -> Mapping[str, tuple[str, ...]]:
    """The words and signs of each terminal that stands for a few of them: ``PER_RANK`` is ``per rank``. Terminals that
    stand for names, numbers or texts of the user's are not there."""
    found: dict[str, tuple[str, ...]] = {}
    for terminal in _lark().terminals:
        pattern = terminal.pattern.value.replace(r"\s+", " ").removeprefix("(?:").removesuffix(")")
        texts = tuple(re.sub(r"\\(.)", r"\1", each) for each in pattern.split("|"))
        if terminal.pattern.type == "str":
            found[terminal.name] = (terminal.pattern.value,)
        elif all(_A_TEXT.fullmatch(text) for text in texts):
            found[terminal.name] = texts
    return found


@cache
def halves() -> Mapping[str, tuple[str, str]]:
    """The terminals of two words: the first of them, and the second or, where that is any of many, its terminal."""
    pairs = {}
    kinds = {terminal.pattern.value: terminal.name for terminal in _lark().terminals}
    for terminal in _lark().terminals:
        first, between, second = terminal.pattern.value.partition(r"\s+")
        if between and first.isidentifier():
            pairs[terminal.name] = first, kinds.get(second, second)
    return pairs


def words_until(source: Source, start: int, end: int) -> tuple[list[Lexeme], int | None]:
    """The words of one statement as far as they can be told, and where a character stands that no word has."""
    words, origin = _lexer().lex(source, start, end)
    return words, next((problem.span.start for problem in origin.problems if problem.span is not None), None)


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
    return File(tuple(statements), Span(source, 0, len(source.text))), tuple(diagnostics)


def _parse_statement(source: Source, start: int, end: int, diagnostics: list[Diagnostic]) -> Statement | None:
    words, origin = _lexer().lex(source, start, end)
    if origin.problems:
        diagnostics.extend(_mended(origin.problems, source, start, end, diagnostics))
        return None
    try:
        statement = _reduce(_lark(), words)
    except UnexpectedToken as error:
        explain_unexpected(error, words, _lexer().keywords)
        diagnostics.extend(_mended(origin.problems, source, start, end, diagnostics))
        return None
    report_loose(words)
    selector = selector_of(statement)
    if selector is not None and depth(selector) > MAX_DEPTH:
        diagnostics.append(too_deep(statement.span))
        return None
    diagnostics.extend(_mended(origin.problems, source, start, end, diagnostics))
    return None if origin.problems else statement


def _mended(
    problems: list[Diagnostic], source: Source, start: int, end: int, found: Sequence[Diagnostic]
) -> list[Diagnostic]:
    """What is wrong with a statement, or in its place the common mistake behind it where there is one. ``found``: what
    is wrong with those before it."""
    first = problems[0] if problems else None
    if len(found) >= MOST:  # they are counted, and nobody reads them
        return [evolve(each, mends=()) for each in problems]
    if first is None or first.span is None or first.code not in _MENDED or len(problems) > 1:
        return [_proved(each, source, start, end) for each in problems]
    mend = find_mend(source.text[start:end], first.span.start - start, _stops)
    if mend is None:
        return [_proved(first, source, start, end)]
    span = Span(source, start + mend.start, start + mend.end)
    mends = []
    if mend.change is not None:
        low, high, good = mend.change
        mends = list(written(Span(source, start + low, start + high), [good]))
        if not good.strip():
            mends = [evolve(mends[0], title=mend.help or "leave it out")]
    mended = diagnose(mend.code or first.code, mend.message, span, help=mend.help, mends=mends)
    return [_proved(mended, source, start, end)]


def _proved(problem: Diagnostic, source: Source, start: int, end: int) -> Diagnostic:
    """With those of its mends with which the statement is read further than without them, and no more is wrong."""
    if problem.span is None or not problem.mends or end - start > _LONGEST:
        return evolve(problem, mends=())
    text = source.text[start:end]
    stopped, count = _trial(text)
    kept = []
    for mend in problem.mends:
        better = mend.applied(source, start, end)
        reached, left = _trial(better)
        further = stopped is not None and reached is not None and len(better) - reached < len(text) - stopped
        if reached is None or (further and left <= count):
            kept.append(mend)
    return evolve(problem, mends=tuple(kept))


def _stops(text: str) -> int | None:
    """Where a statement's text cannot be read any further."""
    return _trial(text)[0]


def _trial(text: str) -> tuple[int | None, int]:
    """Where a statement's text cannot be read any further, and how much is wrong with it."""
    words, origin = _lexer().lex(Source("", text), 0, len(text))
    stop = len(text)
    if not origin.problems:
        if not words:  # a comment
            return None, 0
        try:
            _reduce(_lark(), words)
        except UnexpectedToken as error:
            stop = stop if error.token.type == "$END" else int(error.token.start_pos or 0)
            return stop, 1 + len(origin.problems)
        report_loose(words)
        if not origin.problems:
            return None, 0
    spans = (problem.span for problem in origin.problems)
    return min((span.start for span in spans if span is not None), default=0), len(origin.problems)


def _reduce(lark: Lark, words: list[Lexeme]) -> Statement:
    parser = lark.parse_interactive("")
    for word in words:
        parser.feed_token(word)
    statement: Statement = parser.feed_eof(words[-1])  # type: ignore[no-untyped-call]
    return statement
