"""Hovers that explain a word or a statement, and hints: figures at the end of each line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

from lsprotocol import types

from policylang.editor.article import Article, code, with_code
from policylang.editor.pointed import Pointed, meaning_at, pointed_at, statements_of, unit_at
from policylang.editor.selectors import (
    all_blocks_article,
    blocks_article,
    let_article,
    modules_article,
    name_article,
    selector_article,
    test_article,
    unit_article,
)
from policylang.editor.state import GraphState, Positions, StaleHint, State
from policylang.editor.statements import (
    picked,
    policy_article,
    policy_hint,
    rule_figures,
    rule_index,
    statement_article,
    statement_hint,
)
from policylang.language import syntax
from policylang.language.diagnostics import Span
from policylang.language.syntax import Statement
from policylang.language.words import Meaning

_NUMBER = re.compile(r"[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][0-9]+)?")
_OF_THE_STATEMENT = frozenset({"action", "statement", "modifier", "figure", "fate", "bound", "limit", "name"})
"""Senses of words that belong to the statement: their hover shows the statement's figures."""
_TESTS = get_args(syntax.Test)
_NAMES = (syntax.Word, syntax.Operator, syntax.Reference)
_SELECTORS = tuple(each for each in get_args(syntax.Selector) if each not in _NAMES)


def hover(state: State, offset: int, *, markdown: bool = True) -> types.Hover | None:
    """Explains the word at a character offset, else the statement around it; None in comments and between statements.
    ``markdown``: whether the client shows it."""
    pointed = pointed_at(state, offset)
    if pointed is None:
        return None
    article, start, end = explained(state, pointed)
    if not article.blocks:
        return None
    return types.Hover(article.content(markdown=markdown), state.document.positions.between(start, end))


def explained(state: State, pointed: Pointed) -> tuple[Article, int, int]:
    """The explanation of a place, and the start and end of the text that it is about."""
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


def _ranged(article: Article, span: Span) -> tuple[Article, int, int]:
    return article, span.start, span.end


def _whole(state: State, pointed: Pointed) -> tuple[Article, int, int]:
    """The statement's text and figures; for one that cannot be read, the meaning of its first words."""
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
    """The meaning of the word that names the kind of statement."""
    found = (meaning_at(pointed.words, at) for at in range(min(2, len(pointed.words))))
    return next((each for each in found if each is not None and each.sense in ("statement", "action")), None)


def _meaning(said: Meaning, before: Article | None = None) -> Article:
    """``before``: the text that is not repeated."""
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
    """Explains a number with its unit, from either of them."""
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
    """Explains a predicate, from any of its words, with the number of nodes that pass."""
    where = next(part for part in reversed(pointed.parts) if isinstance(part, syntax.Where))
    if said is None or said.sense == "sign":
        first = next(at for at, word in enumerate(pointed.words) if word.span.start >= test.span.start)
        said = meaning_at(pointed.words, first)
    article = Article() if said is None else _titled(said, said.words[0])
    return _ranged(article.follow(test_article(state, test, where)), test.span)


def _place(state: State, pointed: Pointed) -> Article:
    """The modules that a glob matches; the blocks that a phrase about blocks means."""
    word, statement = pointed.word, pointed.statement
    assert word is not None
    assert pointed.at is not None
    if isinstance(statement, syntax.Blocks):
        return modules_article(state, statement.glob).follow(all_blocks_article(state))
    inner = next((part for part in reversed(pointed.parts) if isinstance(part, _SELECTORS)), None)
    if isinstance(inner, syntax.InModule):
        return modules_article(state, inner.glob)
    if isinstance(inner, syntax.InBlock):
        return blocks_article(state, inner.which, outside=inner.outside)
    return Article()


def hints(state: State, start: int, end: int, *, markdown: bool = True) -> list[types.InlayHint]:
    """Hints of the statements that end between two character offsets; of a text with mistakes those of the last plan,
    marked as stale. A rule's worth is left out until it is worked out."""
    found: list[types.InlayHint] = []
    for each in state.stale if state.text.loaded.policy is None else ():
        at = state.document.positions.offset(types.Position(each.line, 0)) + each.column
        if start <= at <= end:
            found.append(_hint(state, at, f"{each.label} · stale", _STALE, markdown=markdown))
    for graph, statement, at, label in _labelled(state, start, end):
        tooltip = policy_article(graph) if statement is None else _tooltip(state, graph, statement)
        found.append(_hint(state, at, label, tooltip, markdown=markdown))
    return sorted(found, key=lambda each: (each.position.line, each.position.character))


_STALE = Article().say("The figure of the last text without mistakes.")


def _labelled(state: State, start: int, end: int) -> Iterator[tuple[GraphState, Statement | None, int, str]]:
    """Statements with the character offsets of their ends and their labels, then None with the totals; nothing where
    the text has no plan."""
    graph = state.graph
    if graph is None or state.text.loaded.policy is None:
        return
    for statement in statements_of(state):
        at = statement.span.end
        if start <= at <= end and (label := statement_hint(state, graph, statement)):
            yield graph, statement, at, label
    totals, first = policy_hint(graph), _first_statement(state)
    if totals and first is not None and start <= first.span.end <= end:
        yield graph, None, first.span.end, totals


def stale_hints(before: State, positions: Positions) -> tuple[StaleHint, ...]:
    """The hints of a text, its own or stale ones, where its lines are in another text: what is alike at the beginning
    and at the end of both, and what is between where that has as many lines in both."""
    old, new = before.document.positions.lines(), positions.lines()
    most = min(len(old), len(new))
    top = next((at for at in range(most) if old[at] != new[at]), most)
    bottom = next((at for at in range(most - top) if old[-1 - at] != new[-1 - at]), most - top)
    found, kept = [], list(before.stale)
    for _, _, at, label in _labelled(before, 0, len(before.document.source.text)):
        line = before.document.positions.position(at).line
        kept.append(StaleHint(line, at - before.document.positions.offset(types.Position(line, 0)), label))
    for each in kept:
        line = each.line + (len(new) - len(old) if each.line >= len(old) - bottom else 0)
        if len(old) == len(new) or not top <= each.line < len(old) - bottom:
            is_same = old[each.line] == new[line]
            found.append(StaleHint(line, each.column if is_same else len(new[line].rstrip()), each.label))
    return tuple(found)


def _first_statement(state: State) -> Statement | None:
    """The statement that shows the totals: the ``policy`` line, else the first."""
    own = statements_of(state)
    return next((each for each in own if isinstance(each, syntax.PolicyName)), own[0] if own else None)


def _tooltip(state: State, graph: GraphState, statement: Statement) -> Article:
    """The hover's text without names of nodes."""
    if isinstance(statement, syntax.Rule) and (index := rule_index(graph, statement)) is not None:
        return rule_figures(graph, index)
    if isinstance(statement, syntax.Let) and picked(graph, statement) is None:
        return Article().say("So many nodes of the forward have this name here.")
    return statement_article(state, statement)


def _hint(state: State, at: int, label: str, tooltip: Article, *, markdown: bool) -> types.InlayHint:
    return types.InlayHint(
        position=state.document.positions.position(at),
        label=label,
        tooltip=tooltip.content(markdown=markdown) if tooltip.blocks else None,
        padding_left=True,
    )
