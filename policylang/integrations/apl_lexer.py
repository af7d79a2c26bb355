"""Highlighting of policies for Pygments, and so for Sphinx, rich and every tool that asks Pygments for a lexer.

The words are those of the grammar and of the prelude: a new keyword, predicate or group is highlighted unasked.
Pygments has a lexer of its own for the array language APL, under the name ``apl``: this one is called ``policylang``.
"""

from __future__ import annotations

import re

from pygments.lexer import RegexLexer, bygroups, words
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Text

from policylang.language.parsing.parser import keywords
from policylang.language.parsing.predicate_tree import FLAGS, MEASURES, PROPERTIES
from policylang.language.parsing.statement_tree import ACTIONS
from policylang.language.resolution.prelude import group_names

__all__ = ["PolicyLexer"]

_STATEMENTS = frozenset(("policy", "requires", "include", "let", "blocks", "undecided", "fuse", "collapse", "expect"))
_DEVICE = r"(?:\A|(?<=[\n;]))([^\S\n]*)(device)([^\S\n]+)([\w.+-]+)(?=[^\S\n]*(?:#|;|$))"
"""``device`` is a word of the language where a profile follows it, and a name elsewhere."""
_ORDER = (
    r"(?:\A|(?<=[\n;]))([^\S\n]*)(optional[^\S\n]+)?(bucket|prefetch|delay|overlap|keep\s+order)"
    r"(?=[^\S\n]+(?!(?:in|outside|where|chain|per|from|or|and|except|feeding|fed)\b)[\w*{(])"
)
"""So are the words of a scheduling line, where a selector follows the first of them."""
_LIMITS = (
    r"(?<=\s)(?:(?:up\s+to|within)(?=\s+\d)|in\s+flight(?![\w.])|per\s+rank(?![\w.])"
    r"|(?:ahead|(?<=of\s)peak)(?=[^\S\n]*(?:#|;|$)))"
)
_ACTIONS = frozenset(ACTIONS)
_OPENERS = _STATEMENTS | _ACTIONS | {"optional", "override", "bucket", "prefetch", "delay", "overlap", "keep"}
_KEYWORDS = frozenset(word for word in keywords() if word.isidentifier())
_PREDICATES = frozenset(part for name in (*FLAGS, *MEASURES, *PROPERTIES) for part in name.split())

_UNIT = r"\s*(?:%|[KMGTP]?i?B\b|[KMGTP]?FLOPs?\b|[mnuµμ]?s\b)"
_NUMBER = rf"\d[\d_]*(?:\.(?!\.)\d*)?(?:[eE]\d+)?(?:{_UNIT}|(?:st|nd|rd|th)\b)?"


def _any_of(found: frozenset[str]) -> words:
    """A word of these alone, and not the start of a path such as ``in.1`` or ``block?``."""
    return words(tuple(sorted(found)), prefix=r"(?<![\w.*?/:])", suffix=r"(?![\w.*?/:\[{])")


class PolicyLexer(RegexLexer):  # type: ignore[misc]  # Pygments is optional, so its classes have no type here
    """The lexer of the policy language, registered with Pygments as ``policylang`` (also ``apl-policy``)."""

    name = "APL policy language"
    aliases = ("policylang", "apl-policy")
    filenames = ("*.apl",)
    flags = re.MULTILINE

    tokens = {  # noqa: RUF012  # Pygments reads a plain dictionary of the class
        "root": [
            (_DEVICE, bygroups(Text, Keyword.Declaration, Text, Name)),
            (r"^([^\S\n]*)(device)(?=\s+\")", bygroups(Text, Keyword.Declaration)),
            (_ORDER, bygroups(Text, Operator.Word, Keyword.Declaration)),
            (_LIMITS, Operator.Word),
            (r"#[^\n]*", Comment.Single),
            (r"\s+", Text),
            (r'"[^"\n]*"', String),
            (r"<[A-Za-z0-9_.-]+>", String.Other),
            (r"->|→|==|!=|<=|>=|<|>|=", Operator),
            (_any_of(_ACTIONS), Keyword),
            (_any_of(_STATEMENTS), Keyword.Declaration),
            (_any_of(_KEYWORDS), Operator.Word),
            (_any_of(frozenset(group_names())), Name.Builtin),
            (_any_of(_PREDICATES), Name.Attribute),
            (_NUMBER, Number),
            (r"(?:[\w.*?/:]|\[[^\[\]\n;#]*\]|\{[^{}\n;#]*\})+", Name),
            (r"[(),;%]", Punctuation),
            (r".", Text),  # a mistake is shown as it stands: naming it is the parser's business
        ]
    }

    @staticmethod
    def analyse_text(text: str) -> float:
        """How much a text looks like a policy, from 0 to 1: by the first word of the lines that are not indented."""
        lines = [line for line in text.splitlines() if line[:1].isalpha()]
        begun = sum(line.split()[0] in _OPENERS for line in lines)
        return begun / len(lines) if lines else 0.0
