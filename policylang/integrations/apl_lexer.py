"""Highlighting of policies for Pygments, and so for Sphinx, rich and every tool that asks Pygments for a lexer.

The language's lexer classifies the words: a new keyword, property or group is highlighted automatically, and a word
that is a keyword only in some places, as ``device`` or ``up``, is one there. Pygments' lexer ``apl`` is for the array
language APL: this one is called ``policylang``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pygments.lexer import Lexer
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Text

from policylang.language.diagnostics import Source
from policylang.language.lexer import FOREIGN_COMMENT, Lexeme, comments, split, word_pairs, words_of
from policylang.language.operators import group_names
from policylang.language.predicates import FLAGS, MEASURES, PROPERTIES
from policylang.language.shown import UNITS
from policylang.language.statements import ACTIONS, FATES, KINDS, MODIFIERS, OPENERS
from policylang.language.words import word_lists

__all__ = ["PolicyLexer"]

_DECLARING = frozenset(kind.terminal() for kind in KINDS if kind.opener)
_BEGINNING = frozenset((*(word.split()[0] for word in OPENERS), *ACTIONS, *MODIFIERS))

_PLAIN = {
    "ACTION": Keyword,
    "STRING": String,
    "BUNDLED": String.Other,
    **dict.fromkeys(("COMPARISON", "ARROW", "EQUAL"), Operator),
    **dict.fromkeys(("LPAR", "RPAR", "COMMA"), Punctuation),
    **dict.fromkeys(("INT", "NUMBER", "ORDINAL", "RANGE", "PERCENT"), Number),
}
"""Token types of terminals. A terminal that is neither here nor a name is a keyword."""
_PAIRED = {
    "EVERY_NTH": (Operator.Word, Number),
    **dict.fromkeys(("STEP_TIME", "HOST_MEMORY"), (Name.Attribute, Name.Attribute)),
    "KEEP_ORDER": (Keyword.Declaration, Keyword.Declaration),
}
"""Token types of the two words of a pair, where they are not plain keywords."""
_NAMES = ("NAME", "PATH")
_PLACES = ("IN", "OUTSIDE", "BLOCKS")
_GIVEN = {
    ("POLICY", "POLICY"): Name.Class,
    ("DEVICE", "DEVICE"): Name.Constant,
    ("LET", "LET"): Name.Variable,
    ("REQUIRES", "REQUIRES"): Name.Namespace,
}
"""Token types of names behind the word that opens their statement."""
_COMPLETING = frozenset((kind.terminal(), *each) for kind in KINDS for each in kind.closing)
"""Words that a statement has in one place and that are names everywhere else."""
_OVER_DIMS = frozenset(kind.terminal() for kind in KINDS if kind.is_over_dims)
_MEASURED = frozenset((*MEASURES, *PROPERTIES))
_FIGURES = frozenset(word_lists()["figures"])
_FLAGS = frozenset((*FLAGS, "crosses cut"))
_GROUPS = frozenset(group_names())
_BLANK = re.compile(rf"(?:\s+|#[^\n]*|{FOREIGN_COMMENT})*")
_PARTS = re.compile(r"#[^\n]*|\S+")
_PIECE = re.compile(r'#[^\n]*|(?:"[^"\n]*"|[^\n;#])+')
_MARKS = re.compile(r";|[^;]+")


class PolicyLexer(Lexer):  # type: ignore[misc]  # Pygments is optional, so its classes have no type here
    """The lexer of the policy language, registered with Pygments as ``policylang`` (also ``apl-policy``)."""

    name = "APL policy language"
    aliases = ("policylang", "apl-policy")
    filenames = ("*.apl",)
    priority = -0.1
    """A text that does not look like a policy is left to the lexer of the array language."""

    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, object, str]]:
        """Each piece of a text with its kind: none is lost, and a mistake is shown as written."""
        at = 0
        for start, end, kind in sorted(_pieces(text), key=lambda piece: piece[:2]):
            yield from _between(text, at, start)
            yield start, kind, text[start:end]
            at = end
        yield from _between(text, at, len(text))

    @staticmethod
    def analyse_text(text: str) -> float:
        """The likelihood that a text is a policy, from 0 to 1, by the first words of lines that are not indented."""
        lines = [line for line in text.splitlines() if line[:1].isalpha()]
        begun = sum(line.split()[0] in _BEGINNING for line in lines)
        return begun / len(lines) if lines else 0.0


def _between(text: str, start: int, end: int) -> Iterator[tuple[int, object, str]]:
    """Tokens between words and comments: blanks, separators, and unreadable characters."""
    for part in _MARKS.finditer(text, start, end):
        yield part.start(), Punctuation if part.group() == ";" else Text, part.group()


def _pieces(text: str) -> Iterator[tuple[int, int, object]]:
    """The words and comments of a text: where each begins and ends, and its kind."""
    source = Source("", text)
    for start, end in comments(source):
        yield start, end, Comment.Single
    for start, end in _statements(source):
        words = list(_words(source, start, end))
        for word, kind in zip(words, _kinds(words), strict=True):
            begin = word.start_pos or 0
            if word.type not in word_pairs():
                yield begin, begin + len(word), kind
                continue
            # Anything that may be between words may be between the two words of a pair.
            parts = [part for part in _PARTS.finditer(word) if not part.group().startswith("#")]
            for part, each in zip(parts, _PAIRED.get(word.type, (Operator.Word,) * 2), strict=True):
                yield begin + part.start(), begin + part.end(), each


def _statements(source: Source) -> Iterator[tuple[int, int]]:
    """The ranges of all statements, and line by line what cannot be cut into any, as where a `(` is never closed."""
    at = 0
    for start, end in (*split(source).ranges, (len(source.text), len(source.text))):
        pieces = _PIECE.finditer(source.text, at, start)
        yield from (piece.span() for piece in pieces if not piece.group().startswith("#"))
        yield start, end
        at = end


def _words(source: Source, start: int, end: int) -> Iterator[Lexeme]:
    """The words of one statement, those behind a character that no word has too."""
    while start < end:
        words = words_of(source, start, end)
        yield from words
        blank = _BLANK.match(source.text, (words[-1].end_pos or end) if words else start, end)
        start = (blank.end() if blank else end) + 1


def _kinds(words: Sequence[Lexeme]) -> Iterator[object]:
    """The token type of each word of a statement, by its terminal and the words beside it."""
    opener = next((word for word in words if word.type not in ("OPTIONAL", "OVERRIDE")), None)
    asked = False
    for index, word in enumerate(words):
        asked = asked or word.type == "WHERE"
        before = words[index - 1] if index else None
        after = words[index + 1] if index + 1 < len(words) else None
        placed = word.type in ("INT", "NUMBER") and before is not None and before.type in _PLACES
        if word is opener and word.type in _DECLARING:
            yield Keyword.Declaration
        elif asked and _is_asked(word, before, after):
            yield Name.Attribute
        elif word in UNITS and before is not None and before.type in ("INT", "NUMBER") and not _counts(words[:index]):
            yield Number
        elif opener is not None and (word.type in _NAMES or placed):
            yield _kind_of_name(word, opener, before, after)
        else:
            yield _PLAIN.get(word.type, Operator.Word)


def _counts(words: Sequence[Lexeme]) -> bool:
    """True if the last number counts nodes, so that a name follows it."""
    return len(words) > 1 and words[-2].type in ("FIRST", "LAST", "EXACTLY", "LEAST", "MOST")


def _is_asked(word: Lexeme, before: Lexeme | None, after: Lexeme | None) -> bool:
    """True if a word behind ``where`` is a property, or a part of one that is no keyword."""
    if after is not None and after.type == "COMPARISON":
        return word.partition("[")[0] in _MEASURED
    if word.type != "NAME":
        return False
    if word == "annotated" and after is not None and after.type in (*_NAMES, "STRING", "BLOCK", "SAVED"):
        return True
    first = "is" if before == "not" else before
    return f"{first} {word}" in _FLAGS or f"{word} {after}" in _FLAGS


def _kind_of_name(word: Lexeme, opener: Lexeme, before: Lexeme | None, after: Lexeme | None) -> object:
    behind = before.type if before else ""
    if (fixed := _GIVEN.get((opener.type, behind))) is not None:
        return fixed
    if opener.type == "REQUIRES":
        return Number if word[0].isdigit() else Name
    ends = after is None or after.type == "OVER" or opener.type in ("CHUNK", "SCHEDULE")
    if (opener.type, behind, str(word)) in _COMPLETING and ends:
        return Operator.Word
    if behind in _PLACES:
        return Name.Namespace
    if behind == "COMPARISON":
        return Name.Constant
    if opener.type == "EXPECT" and word in _FIGURES:
        compared = after is not None and after.type in ("COMPARISON", "PER")
        if (behind in ("EXPECT", "RECOMPUTED", "PER") and compared) or (behind == "OF" and after is None):
            return Name.Attribute
    if behind == "OVER" or (behind == "COMMA" and opener.type in _OVER_DIMS):
        return Name  # a dimension of the user's mesh, whatever else is called so
    if (opener.type == "UNDECIDED" and word in FATES) or (behind == "PER" and word == "auto"):
        return Keyword.Constant
    return Name.Builtin if word in _GROUPS and before != "annotated" else Name
