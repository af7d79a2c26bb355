"""The parser of the grammar: from a table that travels with the package, or, where that does not fit, from the grammar.

Working the table out takes longer than checking a policy. ``scripts/make_grammar_table.py`` writes it; its key covers
the grammar, the options and the version of lark, so that a table that is out of date is never used. It is JSON: no
code is read from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lark
from lark import Lark
from lark.grammar import Rule
from lark.lexer import TerminalDef

from policylang.language.parsing.statement_tree import StatementRules
from policylang.language.resources import data_file

TABLE = data_file("grammar_table.json")
_PAIRS = "#"
_OPTIONS: dict[str, Any] = {
    "parser": "lalr",
    "lexer": "basic",
    "keep_all_tokens": True,
    "maybe_placeholders": False,
}


def parser_of(grammar: str, table: Path = TABLE) -> Lark:
    """The parser of a grammar's text."""
    try:
        found = json.loads(table.read_text(encoding="utf-8"), object_hook=_numbered)
        if found["key"] == key(grammar):
            load: Callable[..., Lark] = Lark._load_from_dict
            return load(found["data"], found["memo"], transformer=StatementRules())
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        pass  # the grammar says it all
    return Lark(grammar, **_OPTIONS, transformer=StatementRules())


def table_of(grammar: str) -> str:
    """The content of the table."""
    data, memo = Lark(grammar, **_OPTIONS).memo_serialize([TerminalDef, Rule])
    data["parser"]["parser"] = _in_order(data["parser"]["parser"])
    content = {"key": key(grammar), "data": _written(data), "memo": _written(memo)}
    return json.dumps(content, separators=(",", ":")) + "\n"


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
    """What a table has to be made of to be used."""
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
