"""The grammar as tables, and the lexer: a file into statements, a statement into terminals of ``grammar/apl.lark``.

Working the parser's table out takes longer than checking a policy. ``scripts/make_grammar_table.py`` writes it; its key
covers the grammar, the options and the version of lark, so that a table that is out of date is never used: then the
grammar is read. It is JSON: no code is read from it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import lark
from attrs import define, field, frozen
from lark import Lark, Token
from lark.grammar import Rule
from lark.lexer import PatternStr, TerminalDef
from lark.utils import SerializeMemoizer

from policylang.language.diagnostics import Diagnostic, DiagnosticList, Fix, Source, Span, TextChange, diagnose
from policylang.language.files import MAX_FILE
from policylang.language.resources import data_file, grammar_file
from policylang.language.shown import did_you_mean, nearest
from policylang.language.syntax import Scope

TABLE = data_file("grammar_table.json")
_PAIRS = "#"
_OPTIONS: dict[str, Any] = {"parser": "lalr", "lexer": "basic", "keep_all_tokens": True, "maybe_placeholders": False}
_A_TEXT = re.compile(r"[a-z_]+(?: [a-z0-9_]+)*|[^\w\s()\[\]]+")  # a word or two of the language, or a sign


def parser_of(transformer: object) -> Lark:
    """The parser, with the callbacks that build a tree."""
    load: Callable[..., Lark] = Lark._load_from_dict
    return load(**tables(), transformer=transformer)


@cache
def tables() -> dict[str, Any]:
    """The arguments from which lark loads a parser: of the table file if it was made from this grammar, else made."""
    grammar = grammar_file().read_text(encoding="utf-8")
    try:
        found = json.loads(TABLE.read_text(encoding="utf-8"), object_hook=_numbered)
        if found["key"] == key(grammar):
            return {"data": found["data"], "memo": found["memo"]}
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return _worked_out(grammar)


def table_of(grammar: str) -> str:
    """The content of the table's file."""
    content = {"key": key(grammar), **{name: _written(part) for name, part in _worked_out(grammar).items()}}
    return json.dumps(content, separators=(",", ":")) + "\n"


def _worked_out(grammar: str) -> dict[str, Any]:
    data, memo = Lark(grammar, **_OPTIONS).memo_serialize([TerminalDef, Rule])
    data["parser"]["parser"] = _in_order(data["parser"]["parser"])
    for each in memo.values():  # Pythons differ in how wide what has no limit is
        if "_width" in each.get("pattern", ()):
            each["pattern"]["_width"] = [min(width, 2**32 - 1) for width in each["pattern"]["_width"]]
    return {"data": data, "memo": memo}


def _in_order(table: dict[str, Any]) -> dict[str, Any]:
    """The parse table with its tokens in the order of their names and its states in the order in which these lead to
    them: lark numbers both in the order of its sets, which is another one in every process."""
    names = table["tokens"]
    states = {
        state: sorted((names[token], action) for token, action in actions.items())
        for state, actions in table["states"].items()
    }
    numbers = {state: number for number, state in enumerate(table["start_states"].values())}
    for state in (reached := list(numbers)):
        for _, (reduces, then) in states[state]:
            if not reduces and then not in numbers:
                numbers[then] = len(numbers)
                reached.append(then)
    tokens = {name: number for number, name in enumerate(sorted(names.values()))}
    return {
        "tokens": {number: name for name, number in tokens.items()},
        "states": {
            numbers[state]: {
                tokens[name]: (reduces, then if reduces else numbers[then]) for name, (reduces, then) in states[state]
            }
            for state in reached
        },
        **{
            each: {start: numbers[state] for start, state in table[each].items()}
            for each in ("start_states", "end_states")
        },
    }


def key(grammar: str) -> str:
    """The hash of everything that a table depends on."""
    return hashlib.sha256(repr((lark.__version__, sorted(_OPTIONS.items()), grammar)).encode()).hexdigest()


def _written(value: Any) -> Any:
    """A dict whose keys are numbers becomes a list of pairs: the keys of JSON objects are text."""
    if isinstance(value, dict):
        if any(isinstance(each, int) for each in value):
            return {_PAIRS: [[number, _written(part)] for number, part in value.items()]}
        return {name: _written(part) for name, part in value.items()}
    return [_written(part) for part in value] if isinstance(value, list | tuple) else value


def _numbered(found: dict[str, Any]) -> Any:
    return dict(found[_PAIRS]) if _PAIRS in found else found


# --- words -----------------------------------------------------------------------------------------------------


@cache
def _terminals() -> Sequence[TerminalDef]:
    made = SerializeMemoizer.deserialize(tables()["memo"], {"Rule": Rule, "TerminalDef": TerminalDef}, {})
    return tuple(made[each["@"]] for each in tables()["data"]["parser"]["lexer_conf"]["terminals"])


@cache
def lexer() -> Lexer:
    return Lexer(_terminals())


def keywords() -> frozenset[str]:
    """The words that cannot be names of selectors, operators or modules."""
    return frozenset(lexer().keywords)


def word_kind(text: str) -> str | None:
    """The terminal that a text is as one word; None where it is several or none."""
    words, origin = lexer().lex(Source("", text), 0, len(text))
    return words[0].type if len(words) == 1 and len(words[0]) == len(text) and not origin.problems else None


def is_policy_name(text: str) -> bool:
    words, origin = lexer().lex(Source("", f"policy {text}"), 0, len(text) + len("policy "))
    return [word.type for word in words] == ["POLICY", "NAME"] and words[1] == text and not origin.problems


def words_of(source: Source, start: int, end: int) -> list[Lexeme]:
    """The words of one statement, in the order of the text."""
    return lexer().lex(source, start, end)[0]


@cache
def terminal_texts() -> Mapping[str, tuple[str, ...]]:
    """The words and signs of each terminal with a few of them: ``PER_RANK`` is ``per rank``. Terminals for names,
    numbers or texts of the user's are not included."""
    found: dict[str, tuple[str, ...]] = {}
    for terminal in _terminals():
        pattern = terminal.pattern.value.replace(r"\s+", " ").removeprefix("(?:").removesuffix(")")
        texts = tuple(re.sub(r"\\(.)", r"\1", each) for each in pattern.split("|"))
        if terminal.pattern.type == "str":
            found[terminal.name] = (terminal.pattern.value,)
        elif all(_A_TEXT.fullmatch(text) for text in texts):
            found[terminal.name] = texts
    return found


def word_pairs() -> Mapping[str, tuple[str, str]]:
    """The terminals of two words: the first of them, and the second or, where that is any of many, its terminal."""
    return lexer().pairs


def words_until(source: Source, start: int, end: int) -> tuple[list[Lexeme], int | None]:
    """The words of one statement as far as they can be read, and the place of a character that no word has."""
    words, origin = lexer().lex(source, start, end)
    return words, next((problem.span.start for problem in origin.problems if problem.span is not None), None)


MAX_STATEMENT = 64 * 1024
MAX_STATEMENTS = 100_000
MAX_DEPTH = 100
_MOST_OPEN = 8

_UNREADABLE = re.compile("[\x00\ud800-\udfff]")
# A comment of another language, `//` or `--` before text, is one to the scanner, and reported: what follows it is no
# policy, whatever marks it holds.
FOREIGN_COMMENT = r"(?<!\S)(?://|--)(?!>)[^\n]*"
_STRUCTURE = re.compile(rf'"[^"\n]*"?|#[^\n]*|{FOREIGN_COMMENT}|[();\n]')
_BLANK = re.compile(rf"(?:\s+|#[^\n]*|{FOREIGN_COMMENT})*")


@frozen
class Slices:
    """The ranges of the statements of a source, and what was wrong with its form."""

    ranges: tuple[tuple[int, int], ...]
    diagnostics: tuple[Diagnostic, ...]


def split(source: Source) -> Slices:
    """Cut a source into statements. Statements that break a bound are reported and left out."""
    text = source.text
    if len(text) > MAX_FILE:
        size = f"{len(text) / 1024 / 1024:.1f} MiB"
        message = f"the file holds {size} of text, more than the 4 MiB a policy may have"
        return Slices((), (diagnose("APL002", message, Span(source, 0, 1)),))
    if unreadable := _UNREADABLE.search(text):
        message = f"the file is not text: it holds the character U+{ord(unreadable.group()):04X}"
        span = Span(source, *unreadable.span())
        return Slices((), (diagnose("APL001", message, span, help="a policy is a UTF-8 text file"),))
    unclosed = _unclosed(text)
    ranges: list[tuple[int, int]] = []
    diagnostics: list[Diagnostic] = []
    start, depth, deepest = 0, 0, 0
    broken: Diagnostic | None = None
    for match in chain(_STRUCTURE.finditer(text), [None]):
        mark, at = (match.group(), match.start()) if match else (";", len(text))
        if mark.startswith(("//", "--")):
            comment = f"# {' '.join(mark.lstrip('/-').split())}".rstrip()
            span, help = Span(source, at, at + len(mark.rstrip())), f"write `{comment}`"
            diagnostics.append(diagnose("APL005", "a comment starts with `#`", span, help=help, write=(comment,)))
        elif mark == "(" and at in unclosed:
            broken = broken or diagnose("APL007", "this `(` is never closed", Span(source, at, at + 1))
        elif mark == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif mark == ")" and depth:
            depth -= 1
        elif mark == ")":
            broken = broken or diagnose("APL007", "this `)` has no `(` before it", Span(source, at, at + 1))
        elif match is None or (mark in (";", "\n") and not depth):
            start = _behind_blanks(text, start, at)
            if at - start > MAX_STATEMENT:
                size = f"{(at - start) / 1024:.0f} KiB"
                message = f"this statement holds {size} of text, more than the 64 KiB it may have"
                help = "give its parts names with `let`"
                broken = broken or diagnose("APL003", message, Span(source, start, at), help=help)
            elif deepest > MAX_DEPTH and start < at:
                broken = broken or too_deep(Span(source, start, at))
            if broken is not None:
                diagnostics.append(broken)
            elif start < at:
                ranges.append((start, at))
            start, deepest, broken = at + 1, 0, None
    if len(ranges) > MAX_STATEMENTS:
        message = f"the file holds {len(ranges)} statements, more than the {MAX_STATEMENTS} a policy may have"
        return Slices((), (diagnose("APL002", message, Span(source, *ranges[MAX_STATEMENTS])),))
    return Slices(tuple(ranges), tuple(diagnostics))


def starts_before(source: Source, offset: int) -> tuple[int, ...] | None:
    """The possible starts of the statement around an offset, sorted; None in a comment. The last is where it begins by
    the line ends, the others those of statements before it with a parenthesis that is still to be closed."""
    text, unclosed = source.text, _unclosed(source.text)
    start, depth = 0, 0
    opened: list[int] = []
    for match in _STRUCTURE.finditer(text):
        mark, at = match.group(), match.start()
        if at >= offset:
            break
        if mark.startswith(("#", "//", "--")):
            if offset <= match.end():
                return None
        elif mark == "(" and at in unclosed:
            opened.append(start)
        elif mark == "(":
            depth += 1
        elif mark == ")":
            depth = max(0, depth - 1)
        elif mark in (";", "\n") and not depth:
            start = at + 1
    return tuple(_behind_blanks(text, each, offset) for each in dict.fromkeys((*opened[-_MOST_OPEN:], start)))


def is_blank(text: str, start: int, end: int) -> bool:
    """True if a part of a text holds nothing but blanks and comments."""
    return _behind_blanks(text, start, end) == end


def _behind_blanks(text: str, start: int, end: int) -> int:
    found = _BLANK.match(text, start, end)
    return found.end() if found else start


def comments(source: Source) -> list[tuple[int, int]]:
    """The ranges of the comments of a source, without their line ends."""
    return [match.span() for match in _STRUCTURE.finditer(source.text) if match.group().startswith("#")]


def comment_above(span: Span) -> str:
    """The comment on the lines above a statement, without its marks; else the one behind it on its line."""
    source = span.source
    found = {source.line_column(start)[0]: source.text[start:end] for start, end in comments(source)}
    alone = {line for line in found if source.line_text(line).lstrip().startswith("#")}
    line, lines = span.line - 1, list[str]()
    while line in alone:
        lines.insert(0, found[line])
        line -= 1
    if not lines and span.end_line in found:
        lines = [found[span.end_line]]
    return " ".join(" ".join(each.lstrip("#").split()) for each in lines)


def _unclosed(text: str) -> frozenset[int]:
    """The offsets of the opening parentheses that have no closing one."""
    stack: list[int] = []
    for match in _STRUCTURE.finditer(text):
        if match.group() == "(":
            stack.append(match.start())
        elif match.group() == ")" and stack:
            stack.pop()
    return frozenset(stack)


def too_deep(span: Span) -> Diagnostic:
    """The diagnostic for a statement whose parts are nested beyond the bound."""
    message = f"this statement is nested more than {MAX_DEPTH} deep"
    return diagnose("APL004", message, span, help="give its parts names with `let`")


# A run of characters that make one word; a brace or bracket belongs to it with all it holds, commas too.
_RUN = r"(?:[\w.*?/:]|\[[^\[\]\n;#]*\]|\{[^{}\n;#]*\})+"
_SCAN = re.compile(
    rf"(?P<blank>[^\S\n]+|\n|#[^\n]*|{FOREIGN_COMMENT})"
    r'|(?P<STRING>"[^"\n]*")'
    r"|(?P<BUNDLED><[A-Za-z0-9_.-]+>)"
    r"|(?P<COMPARISON>==|!=|<=|>=|<|>)"
    r"|(?P<ARROW>->|→)"
    r"|(?P<mark>[(),=%])"
    rf"|(?P<run>{_RUN})"
)
BEHIND_SELECTOR = ("in", "outside", "where", "chain", "per", "from", "or", "and", "except", "feeding", "fed")
_OF_A_SELECTOR = re.compile(rf"[^\S\n]*(?:->|→|⇒|,|\)|(?:{'|'.join(BEHIND_SELECTOR)})(?![\w.*?/:-]))")
"""The text that may follow the first word of a selector."""
_DEVICE = re.compile(r"(?P<device>[^\s\"'`‘’“”‐‑‒–—−#;(),=<>]+)")
"""The name of a device profile, which may have a ``-`` in it; or a file whose quotes are missing."""
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


@define(eq=False)
class StatementOrigin:
    """State shared by the words of one statement: the source, and problems found while its tree is built."""

    source: Source
    problems: DiagnosticList = field(factory=DiagnosticList)
    loose: list[tuple[Scope | int, Span]] = field(factory=list)
    """Each ``per …`` that no position of its phrase has taken: an expectation or a bucket may, else it is an error. A
    number is one of blocks."""


class Lexeme(Token):
    """A lark token with its source, so that tree building needs no state beside its arguments."""

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

    def report(self, code: str, message: str, span: Span | None = None, **more: Any) -> None:
        """Adds a problem of the statement; ``more`` goes to :func:`diagnose`."""
        self.origin.problems.report(code, message, span or self.span, **more)

    def misnamed(self, code: str, message: str, known: Iterable[str], otherwise: str, meant: str | None = None) -> None:
        """Reports that this is none of the names known: did you mean the nearest, or ``meant``? Else another help."""
        near = nearest(self, known) if meant is None else (meant,)
        self.report(code, message, help=did_you_mean(near) or otherwise, write=near)


class Lexer:
    """Splits statements into lexemes, by the terminals of a grammar."""

    def __init__(self, terminals: Sequence[TerminalDef]) -> None:
        self.keywords = {t.pattern.value: t.name for t in terminals if isinstance(t.pattern, PatternStr)}
        soft = (t.pattern.value for t in terminals if not isinstance(t.pattern, PatternStr))
        self.openers = frozenset(word for word in soft if word.isidentifier()) - {"within", "lossless"}
        """Words that open a statement and are names elsewhere."""
        twos = ((t.name, *t.pattern.value.partition(r"\s+")) for t in terminals)
        kinds = {t.pattern.value: t.name for t in terminals}
        self.pairs = {name: (a, kinds.get(b, b)) for name, a, between, b in twos if between and a.isidentifier()}
        """The terminals of two words: the first of them, and the second or, where that is any of many, its terminal."""
        self._pair_names = {pair: name for name, pair in self.pairs.items()}
        worded = sorted((t for t in terminals if t.priority > 0), key=lambda t: -t.priority)
        classes = [(t.name, re.compile(t.pattern.to_regexp())) for t in worded]

        @lru_cache(maxsize=8192)
        def classify(word: str) -> str:
            fitting = (name for name, pattern in classes if pattern.fullmatch(word))
            return self.keywords.get(word) or next(fitting, "PATH")

        self._classify = classify

    def lex(self, source: Source, start: int, end: int) -> tuple[list[Lexeme], StatementOrigin]:
        """The lexemes of ``source.text[start:end]``; what cannot be read is in the problems of the origin."""
        origin = StatementOrigin(source)
        lexemes: list[Lexeme] = []
        text = source.text
        position = start
        while position < end:
            is_device = len(lexemes) == 1 and lexemes[0].type == "DEVICE"
            match = (is_device and _DEVICE.match(text, position, end)) or _SCAN.match(text, position, end)
            if not match:
                origin.problems.append(_unexpected_character(source, position))
                break
            kind, word, at = match.lastgroup or "", match.group(), position
            position = match.end()
            if kind == "blank":
                continue
            if kind == "run":
                name = "NAME" if word.isidentifier() and _is_given(lexemes) else self._classify(word)
                if word in self.openers and not _OF_A_SELECTOR.match(text, position, end):
                    is_first = not lexemes or (word != "device" and [each.type for each in lexemes] == ["OPTIONAL"])
                    name = word.upper() if is_first else name
                elif word == "within" and _opens(lexemes, "OVERLAP"):
                    name = "WITHIN"
                elif word in ("stage", "stages") and _is_stage(lexemes, text, position):
                    name = "STAGE"
                elif word == "lossless" and [each.type for each in lexemes] == ["EXPECT"]:
                    name = "LOSSLESS" if is_blank(text, position, end) else name
            elif kind == "device":
                name = "NAME" if word.isidentifier() else "PATH"
            else:
                name = _MARKS[word] if kind == "mark" else kind
            lexeme = Lexeme.make(name, word, at, origin)
            if lexemes and (pair := self._pair(lexemes, lexeme)) is not None:
                begin = lexemes.pop().start_pos or 0
                lexeme = Lexeme.make(pair, text[begin:position], begin, origin)
            lexemes.append(lexeme)
        return lexemes, origin

    def _pair(self, words: Sequence[Lexeme], second: Lexeme) -> str | None:
        """The terminal that the last of some words and another one make together."""
        first, names = words[-1], self._pair_names
        name = names.get((first, second)) or names.get((first, second.type))
        if name is None or first.type != self.keywords.get(first, "NAME"):
            return None
        opening = [each.type for each in words[:-1]]
        match name:
            case "STEP_TIME" | "HOST_MEMORY":
                fits = opening == ["EXPECT"]
            case "KEEP_ORDER":
                fits = opening in ([], ["OPTIONAL"])
            case "IN_FLIGHT":
                fits = _opens(words, "OVERLAP")
            case _:
                fits = True
        return name if fits else None


def _is_given(before: Sequence[Lexeme]) -> bool:
    """True if the next word is a name even if it is a keyword: of a policy, or of a mesh dimension."""
    if not before or before[0].type == "POLICY":
        return len(before) == 1
    if before[-1].type == "COMMA":  # of `over dp, tp`; no other comma follows an `over`
        return len(before) > 1 and before[-2].type == "NAME" and any(word.type == "OVER" for word in before)
    return before[-1].type == "OVER"


_NUMBERED = re.compile(r"[^\S\n]+\d+(?:\.\.\d+)?(?![\w.*?/:\[{])")
_SHARES = ("FIRST", "LAST", "ORDINAL", "EVERY_NTH", "INT", "NUMBER", "PERCENT", "OF", "HALF_OF")


def _is_stage(before: Sequence[Lexeme], text: str, end: int) -> bool:
    """True if `stage` is no module behind `in`, nor another name: which stage is said, or an expectation is `per`
    stage."""
    types = [each.type for each in before]
    if types[-1:] == ["PER"]:
        return types[0] == "EXPECT"
    at = next((at for at in range(len(types) - 1, -1, -1) if types[at] not in _SHARES), -1)
    if at < 0 or types[at] not in ("IN", "OUTSIDE"):
        return False
    return at < len(types) - 1 or _NUMBERED.match(text, end) is not None


def _opens(words: Sequence[Lexeme], terminal: str) -> bool:
    return any(word.type == terminal for word in words[:2])


def _unexpected_character(source: Source, position: int) -> Diagnostic:
    text, character = source.text, source.text[position]
    span = Span(source, position, position + 1)
    if character == '"':
        line_end = text.find("\n", position)
        whole = Span(source, position, len(text) if line_end < 0 else line_end)
        word = re.match(r'"[^\s#;)]*', whole.text)
        behind = position + (word.end() if word else 1)
        closed = Fix('write `"` behind it', (TextChange(Span(source, behind, behind), '"'),))
        line_ends = 'a quoted text ends with `"` on the same line'
        return diagnose("APL006", "this quote is never closed", whole, help=line_ends, fixes=(closed,))
    shown = f"`{character}`" if character.isprintable() else f"U+{ord(character):04X}"
    help = _LOOKALIKES.get(character)
    write = re.findall("write `([^`]+)`$", help or "")
    return diagnose("APL005", f"unexpected character {shown}", span, help=help, write=write)
