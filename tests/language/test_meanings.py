"""Every word of the language has a meaning, every meaning is of a word, and its example shows it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from policylang.language import syntax
from policylang.language.diagnostics import Source
from policylang.language.lexer import keywords, lexer, terminal_texts, word_pairs, words_of
from policylang.language.parser import parse_file
from policylang.language.predicates import FLAGS, MEASURES, PROPERTIES
from policylang.language.shown import UNITS
from policylang.language.statements import ACTIONS
from policylang.language.words import Meaning, meaning, meanings, senses

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "language.md").read_text(encoding="utf-8")
FIGURES = get_args(get_type_hints(syntax.ExpectTotal)["figure"])
OF_PREDICATES = {"crosses cut", "annotated"}
NAMES_IN_ONE_PLACE = {"policylang", "chains", "round_trips", "ahead", "auto", "peak", "forward", "step", "lossless"}
NAMES_IN_ONE_PLACE |= {"loss", "into", "tokens"}  # of `chunk`
SIGNS = {"->", "→", *get_args(syntax.Comparison)}
WHERE = [pytest.param(each, id=f"{each.words[0]}-{each.sense}") for each in meanings()]


def known_words() -> set[str]:
    pairs = {terminal_texts().get(each, ("every 2nd",))[0] for each in word_pairs()}
    predicates = {*FLAGS, *MEASURES, *PROPERTIES, *OF_PREDICATES}
    named = {*ACTIONS, *lexer().openers, *FIGURES, *UNITS, *NAMES_IN_ONE_PLACE, "within", "3rd", "at least", "at most"}
    return {*keywords(), *pairs, *predicates, *named, *SIGNS}


def test_every_word_has_a_meaning_and_every_meaning_is_of_a_word() -> None:
    said = {word for each in meanings() for word in each.words}
    parts = {part for word in said for part in word.split()}  # `at least` says what `at` and `least` are
    assert known_words() - said - parts == set()
    assert said - known_words() == set()


@pytest.mark.parametrize(
    ("words", "sense"),
    [
        *(((word,), "action") for word in ACTIONS),
        *(((word,), "unit") for word in UNITS),
        *(((word,), "measure") for word in MEASURES),
        *(((word,), "property") for word in PROPERTIES),
        *(((word,), "predicate") for word in (*FLAGS, *OF_PREDICATES)),
        *(((word,), "figure") for word in FIGURES),
        (("save", "recompute", "auto"), None),
    ],
)
def test_what_has_one_sense_has_that_one(words, sense) -> None:
    for word in words:
        assert meaning(word, sense) if sense else senses(word)


def test_a_word_means_one_thing_in_one_sense() -> None:
    pairs = [(word, each.sense) for each in meanings() for word in each.words]
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("each", WHERE)
def test_the_example_is_a_statement_in_which_the_word_means_that(each: Meaning) -> None:
    pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")
    from policylang.editor.hover import meaning_at

    assert f"\n### {each.section}\n" in PAGE or f"\n## {each.section}\n" in PAGE
    for word in each.words:
        source = Source("example", with_word(each, word))
        _, diagnostics = parse_file(source)
        assert diagnostics == ()
        words = words_of(source, 0, len(source.text))
        found = [said for at in range(len(words)) if (said := meaning_at(words, at)) is not None]
        assert each in found, source.text


def with_word(each: Meaning, word: str) -> str:
    """The example with this word of the entry in place of the one that stands there."""
    if stands(word, each.example):
        return each.example
    other = next(each_word for each_word in each.words if stands(each_word, each.example))
    return re.sub(edges(other), word, each.example, count=1)


def stands(word: str, text: str) -> bool:
    return re.search(edges(word), text) is not None


def edges(word: str) -> str:
    before, after = (r"(?<!\w)" if word[0].isalnum() else ""), (r"(?!\w)" if word[-1].isalnum() else "")
    return before + re.escape(word) + after


def test_meanings_are_short_and_plain() -> None:
    for each in meanings():
        assert each.text[0].isupper()
        assert each.text.endswith(".")
        assert len(each.text) < 160
