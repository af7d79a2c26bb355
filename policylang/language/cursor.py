"""The cursor in a text that is being written: the words before it, and what the grammar takes there.

Only the text before the cursor counts, and what cannot be read there is skipped: a text is broken for as long as
somebody writes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from functools import lru_cache

from attrs import evolve, frozen
from lark import Token
from lark.exceptions import UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser

from policylang.language.diagnostics import Source
from policylang.language.lexer import (
    MAX_STATEMENT,
    Lexeme,
    is_blank,
    lexer,
    starts_before,
    terminal_texts,
    word_pairs,
    words_until,
)
from policylang.language.parser import statement_parser

# The lexer's rules for words: a word holds braces and brackets with commas in them. Here the last one may lack its end.
_BRACKETED = r"\[[^\[\]\n;#]*\]|\{[^{}\n;#]*\}"
_OPEN_BRACKET = r"[\[{][^\[\]{}\n;#()\"]*"
_WORD = re.compile(rf"(?:[\w.*?/:]|{_BRACKETED})+(?:{_OPEN_BRACKET})?|{_OPEN_BRACKET}")
_WHOLE_WORD = re.compile(rf"(?:[\w.*?/:]|{_BRACKETED})+")
_TEXT = r'"[^"\n]*"?'
_PASSED = re.compile(
    rf"(?P<text>{_TEXT})|(?P<word>{_WORD.pattern})|(?P<sign>->|[=<>!]=?|[-→])|(?P<rest>#[^\n]*|\s+|.)", re.DOTALL
)
_REST_OF_WORD = re.compile(r"[\w.*?/:]*")
_REST_OF_TEXT = re.compile(r'[^"\n]*"|[\w.*?/:-]*')
_BUNDLED = re.compile(r"include\s*(?P<word><[\w.-]*)")
_REST_OF_BUNDLED = re.compile(r"[\w.-]*>?")
_DEVICE = re.compile(r"device[^\S\n]+(?P<word>[\w.+-]+)")
_REST_OF_DEVICE = re.compile(r"[\w.+-]*")
_MOST_BEFORE_SELECTOR = 2  # words before which a statement's opener may still be a name
_MOST_SKIPPED = 16  # characters of one statement that no word has and that are passed over


@frozen
class Reading:
    """The state of the grammar behind the words of a statement."""

    accepted: frozenset[str]
    """The terminals that may follow; ``$END`` where the statement may end."""
    refused: tuple[int, ...]
    """The words that the grammar refused; the others are read without these."""


@lru_cache(maxsize=2048)
def reading(terminals: tuple[str, ...]) -> Reading:
    """Reads the beginning of a statement, given as the terminals of its words."""
    parser, refused = _fed(terminals[:-1])
    if terminals:
        parser = parser.copy(deepcopy_values=False)  # type: ignore[no-untyped-call]
        if not _feed(parser, terminals[-1]):
            refused = (*refused, len(terminals) - 1)
    return Reading(frozenset(parser.accepts()), refused)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=64)
def _fed(terminals: tuple[str, ...]) -> tuple[InteractiveParser, tuple[int, ...]]:
    """A parser behind some words, not to be fed itself, and the words that it refused."""
    parser = statement_parser().parse_interactive("")
    parser.parser_state.parse_conf = copy(parser.parser_state.parse_conf)
    parser.parser_state.parse_conf.callbacks = {}  # nothing is built, so nothing is reported
    return parser, tuple(index for index, terminal in enumerate(terminals) if not _feed(parser, terminal))


def _feed(parser: InteractiveParser, terminal: str) -> bool:
    """Feeds a terminal to a parser; returns False and leaves the parser as it was if it is refused."""
    state = parser.parser_state
    states, values = [*state.state_stack], [*state.value_stack]
    try:
        parser.feed_token(Token(terminal, ""))
    except UnexpectedToken:  # what was reduced until then is undone
        state.state_stack, state.value_stack = states, values
        return False
    return True


@frozen(slots=False)
class Cursor:
    """A place in a statement: behind the words before it, and in or behind the word that is being written."""

    source: Source
    offset: int
    words: tuple[Lexeme, ...]
    """The words of the statement before the cursor, without those that the grammar refuses."""
    start: int
    end: int
    """The range of the word at the cursor; empty where there is none."""
    accepted: frozenset[str]
    """The terminals that may replace that word; ``$END`` where the statement may end before it."""
    begin: int = 0
    seconds: tuple[str, ...] = ()
    """The words or terminals that make one terminal with the word before."""
    is_first: bool = False

    @property
    def typed(self) -> str:
        """The word at the cursor, as far as the cursor."""
        return self.source.text[self.start : self.offset]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The terminals of the words before."""
        return tuple(word.type for word in self.words)


def cursors_at(source: Source, offset: int) -> tuple[Cursor, ...]:
    """The readings of a character offset, the likeliest first; empty in a comment, and in a statement that is longer
    than one may be. There are several where the first word of a line may go on with a parenthesis that is not closed or
    begin a statement, and where the word before may open a statement or be a name."""
    starts = [start for start in starts_before(source, offset) or () if offset - start <= MAX_STATEMENT]
    if not starts:
        return ()
    readings = (_within(source, start, offset) for start in starts[:-1])
    inside = next((cursor for cursor, fits in readings if fits), None)
    outside = _within(source, starts[-1], offset)[0]
    found = [outside] if inside is None else [inside] if outside.words else [inside, outside]
    return (*found, *(other for cursor in found if (other := _as_a_name(cursor)) is not None))


def _within(source: Source, start: int, offset: int) -> tuple[Cursor, bool]:
    """The cursor in a statement that begins at ``start``, and whether all words before it can be read."""
    begin, end = _word_at(source.text, start, offset)
    text, skipped = source, 0
    words, wrong = words_until(text, start, begin)
    while wrong is not None and wrong < begin and skipped < _MOST_SKIPPED:  # a character that no word has
        text = Source(source.name, f"{text.text[:wrong]} {text.text[wrong + 1 :]}")
        words, wrong = words_until(text, start, begin)
        skipped += 1
    kinds = tuple(word.type for word in words)
    found = reading(kinds)
    last, seconds = len(words) - 1, tuple[str, ...]()
    if words:
        before = reading(kinds[:-1]).accepted
        pairs = word_pairs().items()
        seconds = tuple(second for name, (first, second) in pairs if first == words[-1] and name in before)
    accepted = frozenset() if seconds and last in found.refused else found.accepted
    if words and _is_opener(words):
        accepted = _kept(accepted, words, words[-1].type)
    refused = [index for index in found.refused if index != last or not seconds]
    kept = tuple(word for index, word in enumerate(words) if index not in refused)
    is_first = is_blank(source.text, 0, start)
    return Cursor(source, offset, kept, begin, end, accepted, start, seconds, is_first), not refused and not skipped


def _kept(accepted: frozenset[str], words: Sequence[Lexeme], kind: str) -> frozenset[str]:
    """The terminals behind which the last of some words is what it is: `bucket` opens no statement before `in`."""
    texts, before = terminal_texts(), " ".join(words)

    def keeps(text: str) -> bool:
        whole = f"{before} {text}"
        found = words_until(Source("", whole), 0, len(whole))[0]
        return len(found) < len(words) or found[len(words) - 1].type in (kind, *word_pairs())

    return frozenset(each for each in accepted if each not in texts or all(keeps(text) for text in texts[each]))


def _as_a_name(cursor: Cursor) -> Cursor | None:
    """The reading in which the word before is a name, if what follows may make it one."""
    if not cursor.words or not _is_opener(cursor.words):
        return None
    last = cursor.words[-1]
    words = (*cursor.words[:-1], Lexeme.make("NAME", str(last), last.span.start, last.origin))
    texts = terminal_texts()
    named = {each for each in reading(tuple(word.type for word in words)).accepted if each in texts}
    return evolve(cursor, words=words, accepted=_kept(frozenset(named), words, "NAME"), seconds=())


def _is_opener(words: Sequence[Lexeme]) -> bool:
    """True if the last word opens a statement here and is a name elsewhere."""
    return len(words) <= _MOST_BEFORE_SELECTOR and str(words[-1]) in lexer().openers and words[-1].type != "NAME"


def _word_at(text: str, start: int, offset: int) -> tuple[int, int]:
    """The range of the word that an offset is in or right behind; empty where there is none."""

    def end(pattern: re.Pattern[str], at: int) -> int:
        found = pattern.match(text, at)
        return at if found is None else found.end()

    for opening, rest in ((_BUNDLED, _REST_OF_BUNDLED), (_DEVICE, _REST_OF_DEVICE)):
        if (found := opening.fullmatch(text, start, offset)) is not None:
            return found.start("word"), end(rest, offset)
    position, last = start, None
    while position < offset and (last := _PASSED.match(text, position, offset)) is not None:
        position = last.end()
    if last is None:
        return offset, offset
    begin, word = last.start(), last.group()
    if last.lastgroup == "text" and (len(word) == 1 or not word.endswith('"')):
        return begin, end(_REST_OF_TEXT, offset)
    if last.lastgroup == "word":
        whole = end(_WHOLE_WORD, begin)
        return begin, whole if whole >= offset else end(_REST_OF_WORD, offset)
    return (begin, offset) if last.lastgroup == "sign" else (offset, offset)
