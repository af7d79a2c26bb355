"""What is said of an offer when somebody looks at it."""

from __future__ import annotations

from policylang.editor.explaining.word_senses import meaning_at
from policylang.editor.features.offers.file_offers import comment_of
from policylang.language.devices.lookup import SUFFIX as DEVICE_SUFFIX
from policylang.language.files import SUFFIX
from policylang.language.meanings.dictionary import Meaning, Sense, meaning
from policylang.language.parsing.cursor import Cursor
from policylang.language.parsing.lexer import Lexeme, StatementOrigin
from policylang.language.parsing.parser import terminal_texts, words_of
from policylang.language.resources import devices_folder, policies_folder
from policylang.language.source import Source


_SENSES: dict[str, Sense] = {
    "flag": "predicate",
    "measure": "measure",
    "property": "property",
    "figure": "figure",
    "unit": "unit",
    "position": "position",
}


def documentation(cursor: Cursor | None, text: str, about: str) -> str:
    """As Markdown, of the offer of ``text`` at a place; empty where there is nothing to say."""
    kind, _, name = about.partition(":")
    if kind == "bundled":
        return comment_of(policies_folder() / f"{name}{SUFFIX}")
    if kind == "device":
        return comment_of(devices_folder() / f"{name}{DEVICE_SUFFIX}")
    found = _known(kind, name) or (None if cursor is None else _in_its_place(cursor, text))
    return "" if found is None else f"{found.text}\n\n```apl\n{found.example}\n```"


def _known(kind: str, name: str) -> Meaning | None:
    sense = _SENSES.get(kind)
    return None if sense is None else meaning(name, sense)


def _in_its_place(cursor: Cursor, text: str) -> Meaning | None:
    """Of a word of the language, in the sense that it has behind the words before it."""
    origin = StatementOrigin(Source("", text))
    terminal = next((name for name, texts in terminal_texts().items() if text in texts and name in cursor.accepted), None)
    if terminal is not None:
        words = [Lexeme.make(terminal, text, 0, origin)]
    else:
        words = words_of(origin.source, 0, len(text))
    return meaning_at([*cursor.words, *words], len(cursor.words)) if words else None
