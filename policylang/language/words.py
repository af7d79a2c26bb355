"""What each word of the language means, from ``words.toml``: for editors and for ``policylang explain WORD``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from typing import Literal

from attrs import frozen

from policylang.language.resources import data_file

Sense = Literal[
    "action", "modifier", "statement", "selector", "position", "scope", "place", "flow", "joining", "predicate",
    "measure", "property", "figure", "bound", "fate", "limit", "name", "sign", "unit", "group",
]  # fmt: skip
"""What a word is in a place: ``users`` is a flow in ``users of mm`` and a measure in ``where users > 1``."""


@frozen
class Meaning:
    """What some words mean in one sense. Words of two parts are written with one space: ``crosses block``."""

    words: tuple[str, ...]
    sense: Sense
    text: str
    """One or two plain sentences, in Markdown."""
    example: str
    """A whole statement in which the first of the words, at least, has this sense."""
    section: str
    """The heading of ``docs/language.md`` that tells more."""

    @property
    def page(self) -> str:
        """``docs/language.md#data-flow``."""
        return f"docs/language.md#{self.section.lower().replace(' ', '-')}"


@cache
def meanings() -> tuple[Meaning, ...]:
    """All of them, in the order of the file."""
    content = tomllib.loads(data_file("words.toml").read_text(encoding="utf-8"))
    return tuple(Meaning(words=tuple(each.pop("words")), **each) for each in content["meaning"])


def meaning(word: str, sense: Sense) -> Meaning | None:
    """Of a word in one sense; None where it has none."""
    return _by_word().get((word, sense))


def senses(word: str) -> tuple[Meaning, ...]:
    """All that a word means; empty for what is no word of the language."""
    return tuple(each for each in meanings() if word in each.words)


@cache
def _by_word() -> Mapping[tuple[str, Sense], Meaning]:
    return {(word, each.sense): each for each in meanings() for word in each.words}
