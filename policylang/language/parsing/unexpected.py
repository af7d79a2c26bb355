"""What to say when a word cannot stand where it stands: the parser's view, put in the words of the language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen
from lark.exceptions import UnexpectedToken

from policylang.language.nearest import did_you_mean, nearest
from policylang.language.parsing.lexer import Lexeme
from policylang.language.parsing.predicate_tree import ANNOTATED, CUT, FLAGS
from policylang.language.parsing.statement_tree import ACTIONS
from policylang.language.source import Span

_OPENERS = (
    "policy", "requires", "include", "let", "blocks", "undecided", "fuse", "collapse", "expect", "optional", "override",
)  # fmt: skip
_JOINING = frozenset({"OR", "AND", "EXCEPT", "FEEDING", "FED", "COMMA", "IN", "OUTSIDE", "WHERE", "CHAIN", "PER"})
_RULE = "a rule is `ACTION SELECTOR` or `SELECTOR -> ACTION`, such as `save mm` or `mm -> save`"
_LINES = "a statement ends with its line; to go on over several lines, put the selector in parentheses"


@frozen
class _Missing:
    """What has to follow, and how it looks."""

    what: str
    help: str | None = None


# By the terminals that the parser would take here; the first row that fits is the most telling.
_MISSING: tuple[tuple[frozenset[str], _Missing], ...] = (
    (
        frozenset({"EVERY", "EXACTLY"}),
        _Missing("an expectation", "such as `saved <= 4 GiB`, `exactly 7 mm` or `every mm saved`"),
    ),
    (frozenset({"EVERYTHING"}), _Missing("a selector", "such as `mm`, `attention` or `everything`")),
    (frozenset({"BLOCK", "STRING"}), _Missing("a module path or `block`", "a module path is written as `layers.*`")),
    (frozenset({"STRING", "BUNDLED"}), _Missing("a file", 'a file is written `"other.apl"`, or `<name>` if bundled')),
    (frozenset({"IS", "NOT"}), _Missing("a predicate", "such as `bytes > 64 MiB` or `crosses block`")),
    (frozenset({"SAVED", "OFFLOADED"}), _Missing("`saved`, `recomputed` or `offloaded`")),
    (frozenset({"COMPARISON"}), _Missing("a comparison", "such as `<= 64 MiB`")),
    (frozenset({"ARROW"}), _Missing("`->`")),
    (frozenset({"ACTION"}), _Missing("an action", "such as `save` or `recompute`")),
    (frozenset({"BLOCK", "MODULE", "CHAIN", "GRAPH"}), _Missing("`block`, `module`, `chain` or `graph`")),
    (frozenset({"AFTER", "BEFORE", "THROUGH"}), _Missing("`after`, `before` or `through`")),
    (frozenset({"EQUAL"}), _Missing("`=` and a selector")),
    (frozenset({"STRING", "PATH"}), _Missing("a module path", "such as `layers.*`")),
    (frozenset({"INT"}), _Missing("a whole number")),
    (frozenset({"ORDINAL"}), _Missing("a position", "such as `1st`")),
    (frozenset({"LEAST", "MOST"}), _Missing("`least` or `most`")),
    (frozenset({"BLOCK"}), _Missing("`block`")),
    (frozenset({"OF"}), _Missing("`of`")),
    (frozenset({"BY"}), _Missing("`by`")),
    (frozenset({"RPAR"}), _Missing("`)`")),
    (frozenset({"PER_RANK"}), _Missing("`per rank`", "such as `up to 8 GiB per rank`")),
    (frozenset({"NAME"}), _Missing("a name")),
)


def explain_unexpected(error: UnexpectedToken, words: Sequence[Lexeme], keywords: Mapping[str, str]) -> None:
    """Report, at the origin of the words, why the parser stopped."""
    expected = frozenset(error.expected)
    if error.token.type == "$END":
        _report_end(words, expected)
        return
    at = next(index for index, word in enumerate(words) if word is error.token)
    word = words[at]
    if at == 0:
        _report_opening(word)
    elif at == 1 and words[0].type == "NAME" and word.type not in _JOINING:
        message = f"`{words[0]}` does not start a statement"
        word.origin.report("APL012", message, words[0].span, help=_near_opener(words[0]) or _RULE)
    else:
        _report_word(word, words[:at], expected, keywords)


def _report_opening(word: Lexeme) -> None:
    if word.type in _JOINING:
        help = _LINES
    elif word.type == "ARROW":
        help = "the selector comes before `->`"
    else:
        help = _near_opener(word) or _RULE
    word.report("APL012", f"no statement starts with `{word}`", help=help)


def _near_opener(word: Lexeme) -> str | None:
    return did_you_mean(nearest(str(word), (*_OPENERS, *ACTIONS)))


def _report_end(words: Sequence[Lexeme], expected: frozenset[str]) -> None:
    last = words[-1]
    origin = last.origin
    caret = Span(origin.source, last.span.end, last.span.end)
    if _in_predicate(words, expected):
        origin.report("APL011", f"a comparison is missing after `{last}`", caret, help=_predicate_help(words, None))
        return
    missing = _missing(words, expected)
    help = missing.help
    if words[0].type not in {"EXPECT", "UNDECIDED"} and "ARROW" in expected:
        first = words[0] if words[0].type == "NAME" else None
        help = (_near_opener(first) if first is not None else None) or _RULE
    origin.report("APL011", f"the statement ends where {missing.what} has to follow", caret, help=help)


def _report_word(word: Lexeme, before: Sequence[Lexeme], expected: frozenset[str], keywords: Mapping[str, str]) -> None:
    origin, last = word.origin, before[-1]
    spelt = str(word).isidentifier()
    reserved = spelt and str(word) in keywords
    if reserved and last.type == "LET":
        message = f"`{word}` is a word of the language and cannot be a name"
        origin.report("APL015", message, word.span, help="choose another name")
        return
    if word.type == "EQUAL" and "COMPARISON" in expected:
        origin.report("APL010", "`=` defines a name, a comparison is `==`", word.span, help="write `==`")
        return
    near = _near_keyword(word, before, expected, keywords) if spelt else None
    if near is None and _in_predicate(before, expected):
        message = f"a comparison is missing after `{last}`"
        origin.report("APL010", message, word.span, help=_predicate_help(before, word))
        return
    if near is not None or "$END" in expected:
        message = f"`{word}` cannot follow `{last}`"
        if expected == {"$END"}:
            message += ", the statement is complete there"
        if near is None and spelt and "OR" in expected:
            near = "join two selectors with a comma, `or`, `and` or `except`"
        origin.report("APL010", message, word.span, help=near)
        return
    missing = _missing(before, expected)
    message = f"`{word}` cannot follow `{last}`, {missing.what} has to"
    origin.report("APL010", message, word.span, help=_way_out(word, reserved, expected) or missing.help)


def _missing(before: Sequence[Lexeme], expected: frozenset[str]) -> _Missing:
    """What has to follow the words, by what they are and by what the parser would take."""
    opener, last = _opener(before), before[-1].type
    if opener == "FUSE" and "OVER" not in expected:
        if last == "FUSE":
            return _Missing("`all_gather chains` or `reduce_scatter chains`")
        return _Missing("a mesh dimension", "such as `dp`") if last in ("OVER", "COMMA") else _Missing("`chains`")
    if opener == "COLLAPSE":
        return _Missing("`round_trips`")
    if opener == "UNDECIDED" and "ACTION" in expected:
        return _Missing("`auto`, `save` or `recompute`")
    if last == "COMPARISON":
        if opener == "REQUIRES":
            return _Missing("a version", "such as `0.2`")
        return (
            _Missing("a figure", "such as `64 MiB`, `2 GFLOP` or `20%`") if opener == "EXPECT" else _Missing("a value")
        )
    if opener == "REQUIRES":
        if last == "NAME":
            return _Missing("a comparison", "such as `>= 0.2`")
        return _Missing("`policylang`", "such as `requires policylang >= 0.2`")
    if last == "CUT" or (last == "PER" and "NUMBER" in expected):
        return _Missing("`per` and a size" if last == "CUT" else "a size", "such as `crosses cut per 2 GiB`")
    if last == "IS":
        return _Missing("a property", "such as `view`, `random`, `multi_output` or `mutated`")
    if last == "FROM" and "NAME" in expected:
        return _Missing("`parameter`, `buffer` or `input`")
    fitting = (missing for terminals, missing in _MISSING if terminals <= expected)
    return next(fitting, _Missing("something else"))


def _in_predicate(words: Sequence[Lexeme], expected: frozenset[str]) -> bool:
    """Whether the last word is the beginning of a predicate that is not finished."""
    return "COMPARISON" in expected and any(word.type == "WHERE" for word in words)


def _opener(before: Sequence[Lexeme]) -> str:
    """What says which statement it is; `optional` stands before several."""
    verbs = [word.type for word in before[1:2] if word.type in ("FUSE", "COLLAPSE")]
    return verbs[0] if before[0].type == "OPTIONAL" and verbs else before[0].type


def _predicate_help(before: Sequence[Lexeme], word: Lexeme | None) -> str | None:
    last = before[-1]
    flags = [flag for flag in (*FLAGS, CUT, ANNOTATED) if flag.split()[0] == last]
    if flags:
        return did_you_mean(flags)
    if len(before) > 1 and before[-2].type in ("OR", "AND") and word is None:
        joiner = before[-2]
        return f"after `where`, `{joiner}` joins predicates; to join selectors, write `(… where …) {joiner} {last}`"
    return "a comparison is written as `bytes > 64 MiB`"


def _near_keyword(
    word: Lexeme, before: Sequence[Lexeme], expected: frozenset[str], keywords: Mapping[str, str]
) -> str | None:
    possible = [text for text, kind in keywords.items() if kind in expected and text.isidentifier()]
    if _opener(before) == "FUSE" and len(before) > 1 and before[-2].type == "FUSE":
        possible = ["chains"]
    if before[0].type == "UNDECIDED" and before[-1].type == "ARROW":
        possible = ["auto", "save", "recompute"]
    return did_you_mean(nearest(str(word), possible))


def _way_out(word: Lexeme, reserved: bool, expected: frozenset[str]) -> str | None:
    """How to say what the misplaced word may have been meant for."""
    if "EVERYTHING" in expected:
        if word.type == "EVERY":
            return "a position is written as `every 2nd`; a selector without one means all of its nodes"
        if word.type == "STRING":
            return "operators are written without quotes"
        if reserved:
            return f"an operator that is named like a word of the language is written `aten.{word}`"
    if "BUNDLED" in expected and word.type in ("NAME", "PATH"):
        return f'write `"{word}"`, or `<{str(word).removesuffix(".apl")}>` for a bundled policy'
    if word.type == "EVERY" and "BLOCK" in expected:
        return "write `block` for all of them, `every 2nd block` for some"
    if reserved and "STRING" in expected and "PATH" in expected:
        return f'a module that is named like a word of the language is written in quotes, `"{word}"`'
    return None
