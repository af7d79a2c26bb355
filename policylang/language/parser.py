"""The parser: the statements of a source, and for each that cannot be read a message from the terminals it accepts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import get_args

from attrs import evolve
from lark import Lark
from lark.exceptions import UnexpectedToken

from policylang.language import statements as kinds
from policylang.language.cancellation import check_cancelled
from policylang.language.diagnostics import MOST, Diagnostic, Fix, Source, Span, TextChange, inserted, written
from policylang.language.lexer import MAX_DEPTH, Lexeme, lexer, parser_of, split, too_deep
from policylang.language.mistakes import find_mistake
from policylang.language.predicates import ANNOTATED, CUT, FLAGS, IS_KINDS, MEASURES, PROPERTIES
from policylang.language.selectors import depth, selector_of
from policylang.language.shown import did_you_mean, nearest
from policylang.language.syntax import File, Rewriting, Scheduling, Statement

_JOINING = frozenset({"OR", "AND", "EXCEPT", "FEEDING", "FED", "COMMA", "IN", "OUTSIDE", "WHERE", "CHAIN", "PER"})
_RULE = "a rule is `ACTION SELECTOR` or `SELECTOR -> ACTION`, such as `save mm` or `mm -> save`"
_LINES = "a statement ends with its line; to go on over several lines, put the selector in parentheses"


_OPENERS = (*kinds.OPENERS, *kinds.MODIFIERS, *kinds.ACTIONS)
_WORDS = re.compile("`([^`]+)`")
_ALL_WORDS = re.compile("`[^`]+`(?:(?:, | or )`[^`]+`)*")
_KINDS = f"such as {', '.join(f'`{kind}`' for kind in IS_KINDS[:-1])} or `{IS_KINDS[-1]}`"
_BEHIND_OPTIONAL = frozenset(kind.terminal() for kind in kinds.KINDS if kind.made in get_args(Rewriting | Scheduling))
_MISSING: tuple[kinds.MissingRow, ...] = (
    ("COMPARISON", "", "a value", None),
    ("CUT", "", "`per` and a size", "such as `crosses cut per 2 GiB`"),
    ("PER", "NUMBER", "a size or `auto`", "such as `crosses cut per 2 GiB`"),
    ("IS", "", "a property", _KINDS),
    ("FROM", "NAME", "`parameter`, `buffer` or `input`", None),
    ("", "EVERY EXACTLY", "an expectation", "such as `saved <= 4 GiB`, `exactly 7 mm` or `every mm saved`"),
    ("", "EVERYTHING", "a selector", "such as `mm`, `attention` or `everything`"),
    ("", "BLOCK STRING", "a module path or `block`", "a module path is written as `layers.*`"),
    ("", "STRING BUNDLED", "a file", 'a file is written `"other.apl"`, or `<name>` if bundled'),
    ("", "IS NOT", "a predicate", "such as `bytes > 64 MiB` or `crosses block`"),
    ("", "SAVED OFFLOADED", "`saved`, `recomputed` or `offloaded`", None),
    ("", "COMPARISON", "a comparison", "such as `<= 64 MiB`"),
    ("", "ARROW", "`->`", None),
    ("", "ACTION", "an action", "such as `save` or `recompute`"),
    ("", "BLOCK MODULE CHAIN GRAPH", "`block`, `module`, `chain` or `graph`", None),
    ("", "AFTER BEFORE THROUGH", "`after`, `before` or `through`", None),
    ("", "EQUAL", "`=` and a selector", None),
    ("", "STRING PATH", "a module path", "such as `layers.*`"),
    ("", "INT", "a whole number", None),
    ("", "ORDINAL", "a position", "such as `1st`"),
    ("", "LEAST MOST", "`least` or `most`", None),
    ("", "BLOCK", "`block`", None),
    ("", "OF", "`of`", None),
    ("", "BY", "`by`", None),
    ("", "RPAR", "`)`", None),
    ("", "PER_RANK", "`per rank`", "such as `up to 8 GiB per rank`"),
    ("AS", "NAME", "a type", "such as `bfloat16` or `float8_e4m3fn per row`"),
    ("", "NAME", "a name", None),
    ("", "", "something else", None),
)
"""Rows for every statement, tried after those of its kind. The first row that fits is the most specific."""


def explain_unexpected(error: UnexpectedToken, words: Sequence[Lexeme], keywords: Mapping[str, str]) -> None:
    """Report, at the origin of the words, why the parser stopped."""
    expected = frozenset(error.expected)
    if error.token.type == "$END":
        _report_end(words, expected)
        return
    at = next(index for index, word in enumerate(words) if word is error.token)
    word = words[at]
    if at == 0:
        said = _LINES if word.type in _JOINING else "the selector comes before `->`" if word.type == "ARROW" else _RULE
        word.misnamed("APL012", f"no statement starts with `{word}`", _OPENERS if said == _RULE else (), said)
    elif at == 1 and words[0].type == "NAME" and word.type not in _JOINING:
        words[0].misnamed("APL012", f"`{words[0]}` does not start a statement", _OPENERS, _RULE)
    else:
        _report_word(word, words[:at], expected, keywords)


def _report_end(words: Sequence[Lexeme], expected: frozenset[str]) -> None:
    last = words[-1]
    caret = Span(last.span.source, last.span.end, last.span.end)
    if _in_predicate(words, expected):
        fixes = _whole_flags(last)
        first = next((at + 1 for at, word in enumerate(words[:-3]) if word.type in ("ACTION", "EQUAL")), None)
        if first is not None and words[-2].type in ("OR", "AND"):  # `… where … or bmm`: two selectors are joined
            begin, end, source = words[first].span.start, words[-3].span.end, last.span.source
            changes = (TextChange(Span(source, begin, begin), "("), TextChange(Span(source, end, end), ")"))
            fixes = (*fixes, Fix(f"write `(… where …) {words[-2]} {last}`", changes, is_choice=True))
        message = f"a comparison is missing after `{last}`"
        last.report("APL011", message, caret, help=_predicate_help(words, None), fixes=fixes)
        return
    missing, help = _missing(words, expected)
    fixes = _missing_words(missing, last)
    if words[0].type not in {"EXPECT", "UNDECIDED"} and "ARROW" in expected:
        near = nearest(words[0], _OPENERS) if words[0].type == "NAME" else ()
        help = did_you_mean(near) or _RULE
        fixes = written(words[0].span, near, near=True)
    last.report("APL011", f"the statement ends where {missing} has to follow", caret, help=help, fixes=fixes)


def _missing_words(missing: str, last: Lexeme) -> tuple[Fix, ...]:
    """The words that have to follow another one, where they are known by themselves."""
    words = _WORDS.findall(missing)
    return tuple(inserted(last.span, word) for word in words) if _ALL_WORDS.fullmatch(missing) else ()


def _whole_flags(last: Lexeme) -> tuple[Fix, ...]:
    """The predicates that begin with a word."""
    return written(last.span, [flag for flag in (*FLAGS, CUT) if flag.split()[0] == last], near=True)


def _report_word(word: Lexeme, before: Sequence[Lexeme], expected: frozenset[str], keywords: Mapping[str, str]) -> None:
    last = before[-1]
    spelt = str(word).isidentifier()
    reserved = spelt and str(word) in keywords
    if reserved and last.type == "LET":
        message = f"`{word}` is a word of the language and cannot be a name"
        word.report("APL015", message, help="choose another name")
        return
    if word.type == "EQUAL" and "COMPARISON" in expected:
        word.report("APL010", "`=` defines a name, a comparison is `==`", help="write `==`", write=["=="])
        return
    possible = [text for text, kind in keywords.items() if kind in expected and text.isidentifier()]
    if _opener(before) == "FUSE" and len(before) > 1 and before[-2].type == "FUSE":
        possible = ["chains"]
    elif before[0].type == "UNDECIDED" and last.type == "ARROW":
        possible = [*kinds.FATES]
    is_short = reserved and len(word) < 3  # `at` is no misspelled `as`
    near = nearest(str(word), possible) if spelt and not is_short else ()
    message, help, fixes = f"`{word}` cannot follow `{last}`", did_you_mean(near), written(word.span, near, near=True)
    if not near and _in_predicate(before, expected):
        message, help = f"a comparison is missing after `{last}`", _predicate_help(before, word)
        fixes = _whole_flags(last)
    elif near or "$END" in expected:
        if expected == {"$END"}:
            message += ", the statement is complete there"
        if not near and spelt and "OR" in expected:
            help = "join two selectors with a comma, `or`, `and` or `except`"
            at = Span(last.span.source, last.span.end, last.span.end)
            fixes = (Fix("write a comma between them", (TextChange(at, ","),), is_choice=True),)
    else:
        missing, example = _missing(before, expected)
        message += f", {missing} has to"
        help, write = _way_out(word, reserved, expected)
        fixes = written(word.span, write) if help else _missing_words(missing, last)
        help = help or example
    word.report("APL010", message, help=help, fixes=fixes)


def _missing(before: Sequence[Lexeme], expected: frozenset[str]) -> tuple[str, str | None]:
    """The name of what has to follow the words, and an example."""
    last, opener = before[-1].type, _opener(before)
    rows = (row for kind in kinds.KINDS if kind.terminal() == opener for row in kind.missing)
    return next(
        (what, help)
        for words, terminals, what, help in (*rows, *_MISSING)
        if (not words or last in words.split())
        and all((name.removeprefix("-") in expected) is not name.startswith("-") for name in terminals.split())
    )


def _in_predicate(words: Sequence[Lexeme], expected: frozenset[str]) -> bool:
    """True if the last word begins an unfinished predicate."""
    return "COMPARISON" in expected and any(word.type == "WHERE" for word in words)


def _opener(before: Sequence[Lexeme]) -> str:
    """The terminal that opens the statement, behind `optional`."""
    verbs = [word.type for word in before[1:2] if word.type in _BEHIND_OPTIONAL]
    return verbs[0] if before[0].type == "OPTIONAL" and verbs else before[0].type


def _predicate_help(before: Sequence[Lexeme], word: Lexeme | None) -> str | None:
    last = before[-1]
    flags = [flag for flag in (*FLAGS, CUT, ANNOTATED) if flag.split()[0] == last]
    if flags:
        return did_you_mean(flags)
    if len(before) > 1 and before[-2].type in ("OR", "AND") and word is None:
        joiner = before[-2]
        return f"after `where`, `{joiner}` joins predicates; to join selectors, write `(… where …) {joiner} {last}`"
    operators = f"; operators are chosen without `where`, as in `everything except {last}`"
    return f"a comparison is written as `bytes > 64 MiB`{'' if last in (*MEASURES, *PROPERTIES) else operators}"


def _way_out(word: Lexeme, reserved: bool, expected: frozenset[str]) -> tuple[str | None, Sequence[str]]:
    """A help for what the misplaced word may have meant, and what to write in its place."""
    if "EVERYTHING" in expected:
        if word.type == "EVERY":
            return "a position is written as `every 2nd`; a selector without one means all of its nodes", ()
        if word.type == "STRING":
            return "operators are written without quotes", (str(word)[1:-1],)
        if reserved:
            return f"an operator that is named like a word of the language is written `aten.{word}`", (f"aten.{word}",)
    if "BUNDLED" in expected and word.type in ("NAME", "PATH"):
        bundled = f"<{str(word).removesuffix('.apl')}>"
        return f'write `"{word}"`, or `{bundled}` for a bundled policy', (f'"{word}"', bundled)
    if word.type == "EVERY" and "BLOCK" in expected:
        return "write `block` for all of them, `every 2nd block` for some", ("block",)
    if reserved and "STRING" in expected and "PATH" in expected:
        return f'a module that is named like a word of the language is written in quotes, `"{word}"`', (f'"{word}"',)
    return None, ()


_LONGEST = 600  # characters of a statement whose fixes are tried, each by parsing it
_MENDED = frozenset(("APL005", "APL010", "APL011", "APL012", "APL013", "APL114"))
"""Codes of diagnostics that a common mistake may replace."""


@cache
def statement_parser() -> Lark:
    return parser_of(kinds.StatementRules())


def parse_file(source: Source) -> tuple[File, tuple[Diagnostic, ...]]:
    """The statements of a source that can be read, and a diagnostic for each that cannot, in the order of the text.
    Nothing is looked up: words stay words, includes stay includes. Linear in the length of the text."""
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
            kinds.report_loose(words)
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
        kinds.report_loose(words)
    if not origin.problems:
        return None, 0
    return min((each.span.start for each in origin.problems if each.span is not None), default=0), len(origin.problems)


def _reduce(lark: Lark, words: list[Lexeme]) -> Statement:
    parser = lark.parse_interactive("")
    for word in words:
        parser.feed_token(word)
    statement: Statement = parser.feed_eof(words[-1])  # type: ignore[no-untyped-call]
    return statement
