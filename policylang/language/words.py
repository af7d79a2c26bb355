"""The words of the language: their meanings, and the lists of them that highlighters need.

Meanings are in ``data/words.toml``, for editors and ``policylang explain WORD``. The words themselves are in the
grammar, the classes of ``syntax.py``, the statements and the prelude; lists elsewhere are made from these:
``scripts/make_word_lists.py`` brings those of TextMate and tree-sitter up to date, Pygments reads them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from typing import Literal

from attrs import frozen

from policylang.language.lexer import BEHIND_SELECTOR, keywords, terminal_texts, word_pairs
from policylang.language.operators import group_names
from policylang.language.predicates import FLAGS, IS_KINDS, MEASURES, PROPERTIES
from policylang.language.resources import data_file
from policylang.language.shown import UNITS
from policylang.language.statements import ACTIONS, FIGURES, KINDS, MODIFIERS, OPENERS

Sense = Literal[
    "action", "modifier", "statement", "selector", "position", "scope", "place", "flow", "joining", "predicate",
    "measure", "property", "figure", "bound", "fate", "limit", "name", "sign", "unit", "group",
]  # fmt: skip
"""The role of a word: ``users`` is a flow in ``users of mm`` and a measure in ``where users > 1``."""


@frozen
class Meaning:
    """The meaning of some words in one sense. Words of two parts have one space: ``crosses block``."""

    words: tuple[str, ...]
    sense: Sense
    text: str
    """One or two plain sentences, in Markdown."""
    example: str
    """A whole statement in which the first of the words, at least, has this sense."""
    section: str
    """The heading of ``docs/language.md`` that explains it."""

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
    return next((each for each in senses(word) if each.sense == sense), None)


def senses(word: str) -> tuple[Meaning, ...]:
    """All that a word means; empty for what is no word of the language."""
    return tuple(each for each in meanings() if word in each.words)


JOINERS = ("or", "and", "except", "feeding", "fed", "by", "not")


@cache
def word_lists() -> Mapping[str, tuple[str, ...]]:
    """Words by what they are, each list in the order of what defines it."""
    words = frozenset(filter(str.isidentifier, keywords()))
    opening = [opener for opener in OPENERS if opener in words and opener != "blocks"]  # which ends a place as well
    plain = sorted(words.difference(opening, MODIFIERS, JOINERS))
    soft = [word for each in OPENERS if each not in words for word in each.split()]
    pairs = [name for name in word_pairs() if name not in ("STEP_TIME", "HOST_MEMORY")]
    paired = [word for name in pairs for word in " ".join(_texts(name)).split()]
    closing = [word for kind in KINDS for _, word in kind.closing]
    queried = [word for word in plain if word not in ("users", "inputs", "module")]
    flags = [(*flag.split(), "")[:2] for flag in (*FLAGS, "crosses cut", "annotated")]
    figures = [figure.split()[-1] for figure in FIGURES]
    lists = {
        "actions": ACTIONS,
        "openers": (*opening, *MODIFIERS, *ACTIONS),
        "soft openers": [word.split()[0] for word in OPENERS if word not in words],
        "behind a selector": BEHIND_SELECTOR,
        "joiners": JOINERS,
        "keywords": plain,
        "queried keywords": (*opening, *queried, *soft, *paired, *_texts("WITHIN"), "stage", "stages", *closing),
        "measures": (*MEASURES, *PROPERTIES),
        "plain measures": (each for each in (*MEASURES, *PROPERTIES) if each != "shape"),
        "flags": (first for first, _ in flags if first not in words),
        "kinds": IS_KINDS,
        "made of": (second for first, second in flags if first == "from"),
        "properties": (second for _, second in flags if second and second not in words),
        "recomputed": (figure.split()[1] for figure in FIGURES if figure.startswith("recomputed ")),
        "figures": (*(each for each in figures if each not in words), "forward", "step"),
        "units": (unit for unit in UNITS if unit != "%"),
        "groups": group_names(),
    }
    return {name: tuple(dict.fromkeys(each)) for name, each in lists.items()}


def _texts(terminal: str) -> tuple[str, ...]:
    return terminal_texts().get(terminal, ())
