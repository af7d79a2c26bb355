"""The lexer: the text of one statement as the terminals of ``grammar/apl.lark``.

Written by hand, for what lark's lexer cannot do: a keyword behind ``policy`` or ``over`` is a name, braces and brackets
belong to their word, and a character that no word has is met with what it may have been meant for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from attrs import define, field
from lark import Token
from lark.lexer import PatternStr, TerminalDef

from policylang.language.diagnostics import Diagnostic, Mend, Source, Span, TextChange, diagnose
from policylang.language.parsing.statements import FOREIGN_COMMENT
from policylang.language.syntax import Scope

# A run of characters that make one word; a brace or bracket belongs to it with all it holds, commas too.
_RUN = r"(?:[\w.*?/:]|\[[^\[\]\n;#]*\]|\{[^{}\n;#]*\})+"
_SCAN = re.compile(
    rf"(?P<blank>[^\S\n]+|\n|#[^\n]*|{FOREIGN_COMMENT})"
    r'|(?P<string>"[^"\n]*")'
    r"|(?P<bundled><[A-Za-z0-9_.-]+>)"
    r"|(?P<comparison>==|!=|<=|>=|<|>)"
    r"|(?P<arrow>->|→)"
    r"|(?P<mark>[(),=%])"
    rf"|(?P<run>{_RUN})"
)
_OF_A_SELECTOR = re.compile(
    r"[^\S\n]*(?:->|→|⇒|,|\)|(?:in|outside|where|chain|per|from|or|and|except|feeding|fed)(?![\w.*?/:-]))"
)
"""What follows a word that begins a selector."""
_DEVICE = re.compile(r"[^\s\"'`‘’“”‐‑‒–—−#;(),=<>]+")
"""The name of a device profile, which may have a ``-`` in it; or a file whose quotes are missing."""
_KINDS = {"string": "STRING", "bundled": "BUNDLED", "comparison": "COMPARISON", "arrow": "ARROW"}
_MARKS = {"(": "LPAR", ")": "RPAR", ",": "COMMA", "=": "EQUAL", "%": "PERCENT"}
_LOOKALIKES = {
    "≤": "write `<=`",
    "≥": "write `>=`",
    "≠": "write `!=`",
    "“": 'write `"`',
    "”": 'write `"`',
    "'": 'quotes are written `"`',
    "`": 'quotes are written `"`',
    "⇒": "write `->`",
    "&": "write `and`",
    "|": "write `or`",
    "+": "write `or`, or a comma",
    "!": "write `not` or `!=`",
    "-": "names are written with `_`; a difference is `except`",
    "[": "a `[` needs its `]` in the same word",
    "{": "a `{` needs its `}` in the same word",
}


OPENERS = ("device", "bucket", "prefetch", "delay", "overlap")
"""Words that open a statement and are names wherever a name can stand."""
PAIRS = ("EVERY_NTH", "HALF_OF", "UP_TO", "PER_RANK", "STEP_TIME", "KEEP_ORDER", "IN_FLIGHT")
"""Terminals of two words, which are no keywords by themselves where ``every`` and ``per`` are not."""


@define(eq=False)
class StatementOrigin:
    """What the words of one statement share: their source, and what was found wrong while its tree was built."""

    source: Source
    problems: list[Diagnostic] = field(factory=list)
    loose: list[tuple[Scope | int, Span]] = field(factory=list)
    """Each ``per …`` that no position of its phrase has taken: an expectation or a bucket may, else it is an error. A
    number is one of blocks."""

    def report(
        self,
        code: str,
        message: str,
        span: Span,
        *,
        help: str | None = None,
        write: Sequence[str] = (),
        mends: Sequence[Mend] = (),
    ) -> None:
        self.problems.append(diagnose(code, message, span, help=help, write=write, mends=mends))


class Lexeme(Token):
    """A lark token that knows where it comes from, so that tree building needs no state beside its arguments."""

    __slots__ = ("origin",)
    origin: StatementOrigin

    @classmethod
    def make(cls, kind: str, text: str, start: int, origin: StatementOrigin) -> Lexeme:
        lexeme: Lexeme = cls(kind, text, start_pos=start, end_pos=start + len(text))
        lexeme.origin = origin
        return lexeme

    @property
    def span(self) -> Span:
        return Span(self.origin.source, self.start_pos or 0, self.end_pos or 0)

    def report(
        self,
        code: str,
        message: str,
        span: Span | None = None,
        *,
        help: str | None = None,
        write: Sequence[str] = (),
        mends: Sequence[Mend] = (),
    ) -> None:
        """``write``: what can stand in place of the span."""
        self.origin.report(code, message, span or self.span, help=help, write=write, mends=mends)


class Lexer:
    """Splits statements into lexemes, by the terminals of a grammar."""

    def __init__(self, terminals: Sequence[TerminalDef]) -> None:
        self.keywords = {t.pattern.value: t.name for t in terminals if isinstance(t.pattern, PatternStr)}
        worded = [t for t in terminals if t.priority > 0]
        self._classes = [(t.name, re.compile(t.pattern.to_regexp())) for t in sorted(worded, key=lambda t: -t.priority)]
        self._classify = lru_cache(maxsize=8192)(self._classify_uncached)

    def lex(self, source: Source, start: int, end: int) -> tuple[list[Lexeme], StatementOrigin]:
        """The lexemes of ``source.text[start:end]``; what cannot be read is in the problems of the origin."""
        origin = StatementOrigin(source)
        lexemes: list[Lexeme] = []
        text = source.text
        position = start
        while position < end:
            is_named = len(lexemes) == 1 and lexemes[0].type == "DEVICE"
            named = _DEVICE.match(text, position, end) if is_named else None
            if named is not None:
                word = named.group()
                lexemes.append(Lexeme.make("NAME" if word.isidentifier() else "PATH", word, position, origin))
                position = named.end()
                continue
            match = _SCAN.match(text, position, end)
            if match is None:
                _report_character(origin, text, position)
                break
            kind = match.lastgroup
            if kind != "blank":
                word = match.group()
                if kind == "run":
                    name = "NAME" if word.isidentifier() and _is_given(lexemes) else self._classify(word)
                    if word in OPENERS and not _OF_A_SELECTOR.match(text, match.end(), end):
                        name = _opened(word, lexemes) or name
                    elif word == "within" and _opens(lexemes, "OVERLAP"):
                        name = "WITHIN"
                elif kind == "mark":
                    name = _MARKS[word]
                else:
                    name = _KINDS[kind or ""]
                lexeme = Lexeme.make(name, word, position, origin)
                if lexemes and (pair := _pair(lexemes, lexeme)) is not None:
                    begin = lexemes.pop().start_pos or 0
                    lexeme = Lexeme.make(pair, text[begin : match.end()], begin, origin)
                lexemes.append(lexeme)
            position = match.end()
        return lexemes, origin

    def _classify_uncached(self, word: str) -> str:
        keyword = self.keywords.get(word)
        if keyword is not None:
            return keyword
        for name, pattern in self._classes:
            if pattern.fullmatch(word):
                return name
        return "PATH"


def _is_given(before: Sequence[Lexeme]) -> bool:
    """Whether the next word is a name whatever it is elsewhere: a policy's, or a dimension's of the user's mesh."""
    if not before or before[0].type == "POLICY":
        return len(before) == 1
    if before[-1].type == "COMMA":  # of `over dp, tp`; no other comma follows an `over`
        return len(before) > 1 and before[-2].type == "NAME" and _opens_fuse(before)
    return before[-1].type == "OVER"


def _opens_fuse(words: Sequence[Lexeme]) -> bool:
    return _opens(words, "FUSE")


def _opens(words: Sequence[Lexeme], terminal: str) -> bool:
    return any(word.type == terminal for word in words[:2])


def _opened(word: str, before: Sequence[Lexeme]) -> str | None:
    """The terminal of a word that opens a statement and is a name elsewhere."""
    is_first = not before or (word != "device" and [each.type for each in before] == ["OPTIONAL"])
    return word.upper() if is_first else None


def _pair(words: Sequence[Lexeme], second: Lexeme) -> str | None:
    """The terminal that the last of some words and another one make together."""
    first, expected = words[-1], words[0].type == "EXPECT" and len(words) == 2
    if first.type == "EVERY" and second.type == "ORDINAL":
        return "EVERY_NTH"
    if first.type == "PER" and second == "rank":
        return "PER_RANK"
    if first == "half" and second.type == "OF":
        return "HALF_OF"
    if first == "step" and second == "time" and expected:
        return "STEP_TIME"
    if first == "keep" and second == "order" and (len(words) == 1 or (words[0].type == "OPTIONAL" and len(words) == 2)):
        return "KEEP_ORDER"
    if first.type == "IN" and second == "flight" and _opens(words, "OVERLAP"):
        return "IN_FLIGHT"
    return "UP_TO" if first == "up" and second == "to" else None


def _report_character(origin: StatementOrigin, text: str, position: int) -> None:
    character = text[position]
    span = Span(origin.source, position, position + 1)
    if character == '"':
        line_end = text.find("\n", position)
        whole = Span(origin.source, position, len(text) if line_end < 0 else line_end)
        word = re.match(r'"[^\s#;)]*', whole.text)
        behind = position + (word.end() if word else 1)
        closed = Mend('write `"` behind it', (TextChange(Span(origin.source, behind, behind), '"'),))
        line_ends = 'a quoted text ends with `"` on the same line'
        origin.report("APL006", "this quote is never closed", whole, help=line_ends, mends=(closed,))
        return
    shown = f"`{character}`" if character.isprintable() else f"U+{ord(character):04X}"
    help = _LOOKALIKES.get(character)
    write = re.findall("write `([^`]+)`$", help or "")
    origin.report("APL005", f"unexpected character {shown}", span, help=help, write=write)
