"""What a word or a rule means and does, under the pointer."""

from __future__ import annotations

import re

from lsprotocol import types

from policylang.editor.explaining.article import Article, code, with_code
from policylang.editor.explaining.modules_and_blocks import all_blocks_article, blocks_article, modules_article
from policylang.editor.explaining.names import let_article, name_article
from policylang.editor.explaining.pointed import Pointed, pointed_at
from policylang.editor.explaining.predicates import selector_article, test_article, unit_article
from policylang.editor.explaining.statements import statement_article
from policylang.editor.explaining.word_senses import meaning_at, unit_at
from policylang.editor.state import State
from policylang.language import syntax
from policylang.language.diagnostics import Span
from policylang.language.words import Meaning

_NUMBER = re.compile(r"[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][0-9]+)?")
_OF_THE_STATEMENT = frozenset({"action", "statement", "modifier", "figure", "fate", "bound", "limit", "name"})
"""Senses of words that say what the statement does: what it comes to is shown with them."""
_TESTS = (syntax.Compare, syntax.Match, syntax.Is, syntax.CrossesCut, syntax.Annotated)
_NAMES = (syntax.Word, syntax.Operator, syntax.Reference)


def hover(state: State, offset: int, *, markdown: bool = True) -> types.Hover | None:
    """Of the word at a character offset, else of the statement around it; None in comments and between statements.
    ``markdown``: whether the client shows it."""
    pointed = pointed_at(state, offset)
    if pointed is None:
        return None
    article, start, end = explained(state, pointed)
    if not article.blocks:
        return None
    return types.Hover(article.content(markdown=markdown), state.document.positions.between(start, end))


def explained(state: State, pointed: Pointed) -> tuple[Article, int, int]:
    """What is said of a place, and from where to where the text is of which it is said."""
    word = pointed.word
    if word is None:
        return _whole(state, pointed)
    assert pointed.at is not None
    said = meaning_at(pointed.words, pointed.at)
    inner = pointed.parts[-1] if pointed.parts else None
    if isinstance(inner, _NAMES) and inner.span.start <= word.span.start and word.span.end <= inner.span.end:
        return _ranged(name_article(state, inner), inner.span)
    if unit_at(pointed.words, pointed.at) is not None:
        return _unit(pointed, pointed.at)
    test = next((part for part in reversed(pointed.parts) if isinstance(part, _TESTS)), None)
    if test is not None:
        return _test(state, pointed, test, said)
    if said is not None and said.sense in _OF_THE_STATEMENT:
        article, start, end = _whole(state, pointed)
        if said.sense == "statement" and said.words == ("blocks",):
            article.follow(all_blocks_article(state))
        return article.follow(_meaning(said, article)), start, end
    article = Article().follow(_place(state, pointed))
    if said is not None:
        if isinstance(inner, _SELECTORS) and not article.blocks and said.sense != "sign":
            article.follow(selector_article(state, inner))
        return _ranged(_titled(said, str(word)).follow(article), word.span)
    if article.blocks:
        return _ranged(article, word.span)
    return _whole(state, pointed)


_SELECTORS = (
    *(syntax.InModule, syntax.InBlock, syntax.Ordinal, syntax.Where, syntax.Union, syntax.Intersection),
    *(syntax.Difference, syntax.Feeding, syntax.Step, syntax.Chain, syntax.ChainOf, syntax.Everything),
)


def _ranged(article: Article, span: Span) -> tuple[Article, int, int]:
    return article, span.start, span.end


def _whole(state: State, pointed: Pointed) -> tuple[Article, int, int]:
    """Of the statement: its text, and what it comes to; of one that cannot be read what its first words mean."""
    statement, article = pointed.statement, Article()
    text = state.document.source.text[pointed.start : pointed.end]
    if isinstance(statement, syntax.Let):
        article = let_article(state, statement, statement.selector)
    elif statement is not None:
        found = statement_article(state, statement)
        article.policy(text).follow(found)
        if not found.blocks and (opening := _opening(pointed)) is not None:
            article.say(with_code(opening.text))
    elif (said := meaning_at(pointed.words, 0)) is not None:
        article = _meaning(said)
    return article, pointed.start, pointed.end


def _opening(pointed: Pointed) -> Meaning | None:
    """The meaning of the word that says what kind of statement it is."""
    found = (meaning_at(pointed.words, at) for at in range(min(2, len(pointed.words))))
    return next((each for each in found if each is not None and each.sense in ("statement", "action")), None)


def _meaning(said: Meaning, before: Article | None = None) -> Article:
    """``before``: what is said already, and not again."""
    text = with_code(said.text)
    is_said = before is not None and any(text in each for _, each in before.blocks)
    return Article().say("" if is_said else text, f"For example {code(said.example)}; more in {code(said.page)}.")


def _titled(said: Meaning, word: str) -> Article:
    title = code(" ".join(word.split()))
    if len(said.words) == 1 and " " in said.words[0] and said.sense != "position":
        title = code(said.words[0])
    article = _meaning(said)
    kind, first = article.blocks[0]
    article.blocks[0] = kind, f"{title}: {first}"
    return article


def _unit(pointed: Pointed, at: int) -> tuple[Article, int, int]:
    """Of a number with its unit, from either of them."""
    words = pointed.words
    unit = unit_at(words, at)
    assert unit is not None
    first = at if words[at].type in ("INT", "NUMBER") else at - 1
    has_number = first >= 0 and words[first].type in ("INT", "NUMBER")
    number = _NUMBER.match(words[first]) if has_number else None
    last = at if words[at].type not in ("INT", "NUMBER") or str(words[at]).endswith(unit) else at + 1
    article = unit_article(unit, number.group().replace("_", "") if number is not None else "")
    start = words[first if has_number else at].span.start
    return article, start, words[last].span.end


def _test(state: State, pointed: Pointed, test: syntax.Test, said: Meaning | None) -> tuple[Article, int, int]:
    """Of a predicate, from any of its words: what it means, and how many nodes pass."""
    where = next(part for part in reversed(pointed.parts) if isinstance(part, syntax.Where))
    if said is None or said.sense == "sign":
        first = next(at for at, word in enumerate(pointed.words) if word.span.start >= test.span.start)
        said = meaning_at(pointed.words, first)
    article = Article() if said is None else _titled(said, said.words[0])
    return _ranged(article.follow(test_article(state, test, where)), test.span)


def _place(state: State, pointed: Pointed) -> Article:
    """Of a glob the modules that it matches, of words about blocks which of them are meant."""
    word, statement = pointed.word, pointed.statement
    assert word is not None
    assert pointed.at is not None
    if isinstance(statement, syntax.Blocks):
        return modules_article(state, statement.glob).follow(all_blocks_article(state))
    inner = next((part for part in reversed(pointed.parts) if isinstance(part, syntax.InModule | syntax.InBlock)), None)
    if inner is None or inner is not next(
        (part for part in reversed(pointed.parts) if isinstance(part, _SELECTORS)), None
    ):
        return Article()
    if isinstance(inner, syntax.InModule):
        return modules_article(state, inner.glob)
    return blocks_article(state, inner.which, outside=inner.outside)
