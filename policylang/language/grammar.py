"""The grammar as tables: the parser's, which travels with the package, and the words and signs of its terminals.

Working the parser's table out takes longer than checking a policy. ``scripts/make_grammar_table.py`` writes it; its key
covers the grammar, the options and the version of lark, so that a table that is out of date is never used: then the
grammar is read. It is JSON: no code is read from it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import lark
from lark import Lark
from lark.grammar import Rule
from lark.lexer import TerminalDef
from lark.utils import SerializeMemoizer

from policylang.language.diagnostics import Source
from policylang.language.lexer import Lexeme, Lexer
from policylang.language.resources import data_file, grammar_file

TABLE = data_file("grammar_table.json")
_PAIRS = "#"
_OPTIONS: dict[str, Any] = {"parser": "lalr", "lexer": "basic", "keep_all_tokens": True, "maybe_placeholders": False}
_A_TEXT = re.compile(r"[a-z_]+(?: [a-z0-9_]+)*|[^\w\s()\[\]]+")
"""A word or two of the language, or a sign."""


def parser_of(transformer: object) -> Lark:
    """The parser, with the callbacks that build a tree."""
    load: Callable[..., Lark] = Lark._load_from_dict
    return load(**tables(), transformer=transformer)


@cache
def tables() -> dict[str, Any]:
    """The arguments ``data`` and ``memo`` from which lark loads a parser: of the table file if it was made from this
    grammar, else worked out."""
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
    """True if a text can be the plain name of a policy; keywords can."""
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
