"""What is said of an offer when somebody looks at it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from policylang.editor.explaining.article import Article, with_code
from policylang.editor.explaining.names import name_article
from policylang.editor.explaining.word_senses import meaning_at
from policylang.editor.features.offers.file_offers import comment_of
from policylang.editor.state import State
from policylang.language.cursor import Cursor
from policylang.language.devices.reading import SUFFIX as DEVICE_SUFFIX
from policylang.language.diagnostics import Source
from policylang.language.files import SUFFIX
from policylang.language.grammar import terminal_texts, words_of
from policylang.language.lexer import Lexeme, StatementOrigin
from policylang.language.resources import devices_folder, policies_folder
from policylang.language.syntax import Word
from policylang.language.words import Meaning, Sense, meaning

_NAMES = ("op", "group", "let")
_SENSES: dict[str, Sense] = {
    "flag": "predicate",
    "measure": "measure",
    "property": "property",
    "figure": "figure",
    "unit": "unit",
    "position": "position",
}


def documentation(state: State, cursors: Sequence[Cursor], text: str, about: str) -> Article:
    """Of the offer of ``text`` at a place; empty where there is nothing to say."""
    kind, _, name = about.partition(":")
    if kind == "bundled":
        return _comment(policies_folder() / f"{name}{SUFFIX}")
    if kind == "device":
        return _comment(devices_folder() / f"{name}{DEVICE_SUFFIX}")
    if kind in _NAMES:
        return name_article(state, Word(name))
    sense = _SENSES.get(kind)
    found = None if sense is None else meaning(name, sense)
    found = found or next(filter(None, (_in_its_place(each, text) for each in cursors)), None)
    return Article() if found is None else Article().say(with_code(found.text)).policy(found.example)


def _comment(file: Path) -> Article:
    """The paragraphs of a bundled file's first comment."""
    return Article().say(*(with_code(" ".join(part.split())) for part in comment_of(file).split("\n\n")))


def _in_its_place(cursor: Cursor, text: str) -> Meaning | None:
    """Of a word of the language, in the sense that it has behind the words before it."""
    origin = StatementOrigin(Source("", text))
    terminal = next(
        (name for name, texts in terminal_texts().items() if text in texts and name in cursor.accepted), None
    )
    words = words_of(origin.source, 0, len(text))
    if terminal is not None:
        words = [Lexeme.make(terminal, text, 0, origin)]
    return meaning_at([*cursor.words, *words], len(cursor.words)) if words else None
