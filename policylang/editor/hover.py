"""Hovers and hints, and what they explain: the statement at an offset of a text, its words, the parts of its tree."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, get_args

from attrs import fields, frozen, has
from lsprotocol import types

from policylang.editor import selectors, statements
from policylang.editor.state import GraphState, Positions, StaleHint, State
from policylang.editor.statements import Article, code, with_code
from policylang.language import syntax
from policylang.language.diagnostics import Source, Span
from policylang.language.lexer import Lexeme, comments, split, terminal_texts, words_of
from policylang.language.predicates import FLAGS, MEASURES, PROPERTIES
from policylang.language.shown import UNITS
from policylang.language.syntax import Statement
from policylang.language.words import Meaning, Sense, meaning, senses

_TERMINALS: dict[str, tuple[str, Sense]] = {
    "DEVICE": ("device", "statement"),
    "RANGE": ("blocks", "place"),
    "ORDINAL": ("3rd", "position"),
    "EVERY_NTH": ("every 2nd", "position"),
    "LEAST": ("at least", "bound"),
    "MOST": ("at most", "bound"),
    "CUT": ("crosses cut", "predicate"),
}
"""Terminals with one meaning, which their text alone does not identify."""
_NAMED = {
    "chains": "FUSE",
    "round_trips": "COLLAPSE",
    **dict.fromkeys(("loss", "into", "tokens"), "CHUNK"),
    "ahead": "PREFETCH",
    "policylang": "REQUIRES",
    "auto": "UNDECIDED",
}
"""Names that mean something in one statement alone."""
_OF_PREDICATES = {"gathered", "crosses", "feeds", "user", "recorded", "annotated"}
_SUFFIX = re.compile(r"[0-9_.]+(?:[eE][0-9]+)?([A-Za-zµμ]+)")
_INDEXED = re.compile(r"(\w+)\[-?\d+\]")


def meaning_at(words: Sequence[Lexeme], at: int) -> Meaning | None:
    """The meaning of one of the words of a statement; None for names and numbers of the user's."""
    found = _sense(words, at)
    return None if found is None else meaning(*found)


def unit_at(words: Sequence[Lexeme], at: int) -> str | None:
    """The unit that a word is or ends in, or that follows a number."""
    word = words[at]
    following = _kind(words, at + 1), _text(words, at + 1)
    if word.type in ("INT", "NUMBER"):
        if following[0] == "PERCENT" or (following[0] == "NAME" and following[1] in UNITS):
            return following[1]
        suffix = _SUFFIX.fullmatch(str(word))
        return suffix[1] if suffix is not None and suffix[1] in UNITS else None
    if word.type == "PERCENT":
        return "%"
    is_behind = _kind(words, at - 1) in ("INT", "NUMBER")
    return str(word) if word.type == "NAME" and is_behind and word in UNITS else None


def _sense(words: Sequence[Lexeme], at: int) -> tuple[str, Sense] | None:
    word = words[at]
    before, after = _kind(words, at - 1), _kind(words, at + 1)
    if word.type == "ACTION":
        return str(word), "action"
    if word.type in _TERMINALS:
        return _TERMINALS[word.type]
    if (unit := unit_at(words, at)) is not None:
        return unit, "unit"
    if word.type in ("AND", "OR"):
        return str(word), "predicate" if _in_predicate(words, at) else "joining"
    if word.type == "AT":
        return (f"at {_text(words, at + 1)}", "bound") if after in ("LEAST", "MOST") else None
    if word.type in ("USERS", "INPUTS"):
        return str(word), "measure" if after == "COMPARISON" else "flow"
    if word.type == "MODULE":
        return "module", "property" if after == "COMPARISON" else "scope"
    if word.type == "CHAIN":
        return "chain", "scope" if before == "PER" else "flow"
    if word.type in ("BLOCK", "BLOCKS"):
        return _block(words, at)
    if word.type == "STAGE":
        return ("peak per stage", "figure") if before == "PER" else (str(word), "place")
    if word.type == "PER" and before == "CUT":
        return "crosses cut", "predicate"
    if word.type == "PER" and after == "STAGE":
        return "peak per stage", "figure"
    if word.type in ("SAVED", "OFFLOADED") and _text(words, at - 1) == "recorded":
        return f"recorded {word}", "predicate"
    if word.type in ("SAVED", "RECOMPUTED"):
        if at != 1:
            return str(words[at]), "fate"
        kind = _text(words, at + 1) if _kind(words, at + 1) == "NAME" else ""
        return f"{words[at]} {kind}".rstrip(), "figure"
    if word.type in ("FROM", "IS"):
        return ("from", "position") if after == "ORDINAL" else _flag(words, at)
    text = " ".join(word.split())
    if text in terminal_texts().get(word.type, ()) and len(found := senses(text)) == 1:
        return text, found[0].sense
    return _name(words, at)


def _block(words: Sequence[Lexeme], at: int) -> tuple[str, Sense]:
    if at == 0:
        return "blocks", "statement"
    if _text(words, at - 1) == "crosses":
        return "crosses block", "predicate"
    counts = _kind(words, at - 1) == "PER" and words[0].type != "BUCKET" and not _is_total(words)
    return ("block", "scope") if counts else (str(words[at]), "place")


def _is_total(words: Sequence[Lexeme]) -> bool:
    return words[0].type == "EXPECT" and any(word.type == "COMPARISON" for word in words[:5])


def _flag(words: Sequence[Lexeme], at: int) -> tuple[str, Sense] | None:
    """``is view`` of ``is not view``, from either of its words."""
    rest = words[at + 1 : at + 3]
    kind = next((str(word) for word in rest if word.type != "NOT"), "")
    text = f"{words[at]} {kind}"
    return (text, "predicate") if text in FLAGS else None


def _name(words: Sequence[Lexeme], at: int) -> tuple[str, Sense] | None:
    word, before, after = words[at], _kind(words, at - 1), _kind(words, at + 1)
    indexed = _INDEXED.fullmatch(word)
    text = str(word) if indexed is None else indexed[1]
    if after == "COMPARISON" and words[0].type != "EXPECT":
        if text in MEASURES:
            return text, "measure"
        if text in PROPERTIES:
            return text, "property"
    if word.type not in ("NAME", "PATH"):
        return None
    if word in _NAMED and any(each.type == _NAMED[word] for each in words[:2]):
        return str(word), senses(word)[0].sense
    if words[0].type == "EXPECT" and (found := _expected(words, at)) is not None:
        return found
    if word == "auto" and _text(words, at - 2) == "cut":
        return "crosses cut", "predicate"
    if before == "OF" and word == "peak" and any(each.type == "WITHIN" for each in words):
        return "peak", "limit"
    if not _in_predicate(words, at):
        return None
    if before in ("IS", "FROM") or (before == "NOT" and _kind(words, at - 2) == "IS"):
        return _flag(words, at - 1 if before != "NOT" else at - 2)
    if before == "NAME" and f"{_text(words, at - 1)} {word}" in FLAGS:
        return f"{_text(words, at - 1)} {word}", "predicate"
    if word in _OF_PREDICATES:
        pair = f"{word} {_text(words, at + 1)}"
        if pair in FLAGS or pair == "crosses cut":
            return pair, "predicate"
        return ("annotated", "predicate") if word == "annotated" else None
    return None


def _expected(words: Sequence[Lexeme], at: int) -> tuple[str, Sense] | None:
    """The figure that an expectation is about, and what a share is one of."""
    word = str(words[at])
    if at == 1 and _kind(words, 2) == "COMPARISON":
        return word, "figure"
    if at == 2 and words[1].type == "RECOMPUTED":
        return f"recomputed {word}", "figure"
    if _kind(words, at - 1) == "OF" and _is_total(words) and word in ("forward", "step"):
        return word, "limit"
    return None


_ENDS_PREDICATE = frozenset(
    ("IN", "OUTSIDE", "CHAIN", "ARROW", "COMMA", "EXCEPT", "FEEDING", "FED", "UP_TO", "SAVED", "OFFLOADED")
)


def _in_predicate(words: Sequence[Lexeme], at: int) -> bool:
    """True if a word belongs to a ``where``: ``and`` and ``or`` behind one do until the phrase ends."""
    depth = 0
    for index in range(at - 1, -1, -1):
        kind = words[index].type
        if kind == "RPAR":
            depth += 1
        elif kind == "LPAR":
            depth = max(depth - 1, 0)
        elif depth == 0 and kind == "WHERE":
            return True
        elif depth == 0 and kind in _ENDS_PREDICATE and _text(words, index - 1) != "recorded":
            return False
    return False


def _kind(words: Sequence[Lexeme], at: int) -> str:
    return words[at].type if 0 <= at < len(words) else ""


def _text(words: Sequence[Lexeme], at: int) -> str:
    return str(words[at]) if 0 <= at < len(words) else ""


@frozen
class Pointed:
    """A place inside a statement."""

    words: Sequence[Lexeme]
    """The words of the whole statement, as far as it can be read."""
    at: int | None
    """The index of the word at the place; None between two of them."""
    statement: Statement | None
    """Its names are resolved where the policy has no errors; None where it cannot be read."""
    parts: tuple[Any, ...]
    """The selectors, predicates and figures of its tree that hold the place, outermost first."""

    @property
    def word(self) -> Lexeme | None:
        return None if self.at is None else self.words[self.at]

    @property
    def start(self) -> int:
        return self.words[0].span.start

    @property
    def end(self) -> int:
        """The end of its last word."""
        return self.words[-1].span.end


def pointed_at(state: State, offset: int) -> Pointed | None:
    """None outside statements, and in comments."""
    source = state.document.source
    ranges, remarks = _cut(source)
    here = _around(ranges, offset)
    if here is None or _around(remarks, offset) is not None:
        return None
    words = _words(source, *here)
    if not words or offset >= words[-1].span.end:
        return None
    at = next((index for index, word in enumerate(words) if word.span.start <= offset < word.span.end), None)
    end = words[-1].span.end
    statement = next((each for each in statements_of(state) if here[0] <= each.span.start < end), None)
    return Pointed(words, at, statement, () if statement is None else tuple(_holding(statement, offset)))


Ranges = Sequence[tuple[int, int]]
"""Ranges of characters, in order, without overlap."""


@lru_cache(maxsize=4)
def _cut(source: Source) -> tuple[Ranges, Ranges]:
    """The statements and the comments of a text, cached for repeated pointers."""
    return split(source).ranges, tuple(comments(source))


@lru_cache(maxsize=16)
def _words(source: Source, start: int, end: int) -> Sequence[Lexeme]:
    return words_of(source, start, end)


def _around(ranges: Ranges, offset: int) -> tuple[int, int] | None:
    at = bisect_right(ranges, offset, key=lambda each: each[0]) - 1
    return ranges[at] if at >= 0 and offset < ranges[at][1] else None


def statements_of(state: State) -> list[Statement]:
    """The statements of the document that can be read, with their names resolved where the policy has no errors."""
    policy, source = state.text.loaded.policy, state.document.source
    found: dict[int, Statement] = {}
    if policy is not None:
        resolved = (*policy.lets.values(), *policy.statements, policy.blocks, policy.undecided)
        found = {each.span.start: each for each in resolved if each is not None and each.span.source == source}
    return [found.get(each.span.start, each) for each in state.text.file.statements]


def _holding(node: Any, offset: int) -> Iterator[Any]:
    """The parts of a tree that hold an offset, below the node itself."""
    while True:
        inside = next((part for part in _parts(node) if part.span.start <= offset < part.span.end), None)
        if inside is None:
            return
        yield inside
        node = inside


def _parts(node: Any) -> Iterator[Any]:
    """The parts of a node of the tree that have a span."""
    for each in fields(type(node)):
        value = getattr(node, each.name)
        for part in value if isinstance(value, tuple) else (value,):
            if has(type(part)) and isinstance(getattr(part, "span", None), Span):
                yield part


_NUMBER = re.compile(r"[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][0-9]+)?")
_OF_THE_STATEMENT = frozenset({"action", "statement", "modifier", "figure", "fate", "bound", "limit", "name"})
"""Senses of words that belong to the statement: their hover shows the statement's figures."""
_TESTS = get_args(syntax.Test)
_NAMES = (syntax.Word, syntax.Operator, syntax.Reference)
_SELECTORS = tuple(each for each in get_args(syntax.Selector) if each not in _NAMES)


def hover(state: State, offset: int, *, markdown: bool = True) -> types.Hover | None:
    """Explains the word at an offset, else the statement around it; None in comments and between statements."""
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
        return _ranged(selectors.name_article(state, inner), inner.span)
    if unit_at(pointed.words, pointed.at) is not None:
        return _unit(pointed, pointed.at)
    test = next((part for part in reversed(pointed.parts) if isinstance(part, _TESTS)), None)
    if test is not None:
        return _test(state, pointed, test, said)
    if said is not None and said.sense in _OF_THE_STATEMENT:
        article, start, end = _whole(state, pointed)
        if said.sense == "statement" and said.words == ("blocks",):
            article.follow(selectors.all_blocks_article(state))
        return article.follow(_meaning(said, article)), start, end
    article = Article().follow(_place(state, pointed))
    if said is not None:
        if isinstance(inner, _SELECTORS) and not article.blocks and said.sense != "sign":
            article.follow(selectors.selector_article(state, inner))
        return _ranged(_titled(said, str(word)).follow(article), word.span)
    return _ranged(article, word.span) if article.blocks else _whole(state, pointed)


def _ranged(article: Article, span: Span) -> tuple[Article, int, int]:
    return article, span.start, span.end


def _whole(state: State, pointed: Pointed) -> tuple[Article, int, int]:
    """The statement's text and figures; for one that cannot be read, the meaning of its first words."""
    statement, article = pointed.statement, Article()
    text = state.document.source.text[pointed.start : pointed.end]
    if isinstance(statement, syntax.Let):
        article = selectors.let_article(state, statement, statement.selector)
    elif statement is not None:
        found = statements.statement_article(state, statement)
        article.policy(text).follow(found)
        meanings = (meaning_at(pointed.words, at) for at in range(min(2, len(pointed.words))))
        kinds = (each for each in meanings if each is not None and each.sense in ("statement", "action"))
        if not found.blocks and (opening := next(kinds, None)) is not None:
            article.say(with_code(opening.text))
    elif (said := meaning_at(pointed.words, 0)) is not None:
        article = _meaning(said)
    return article, pointed.start, pointed.end


def _meaning(said: Meaning, before: Article | None = None) -> Article:
    """``before``: the text that is not repeated."""
    known = [] if before is None else [each for _, each in before.blocks]
    texts = with_code(said.text), f"For example {code(said.example)}; more in {code(said.page)}."
    return Article().say(*("" if any(text in each for each in known) else text for text in texts))


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
    article = selectors.unit_article(unit, number.group().replace("_", "") if number is not None else "")
    start = words[first if has_number else at].span.start
    return article, start, words[last].span.end


def _test(state: State, pointed: Pointed, test: syntax.Test, said: Meaning | None) -> tuple[Article, int, int]:
    """Explains a predicate, from any of its words, with the number of nodes that pass."""
    where = next(part for part in reversed(pointed.parts) if isinstance(part, syntax.Where))
    if said is None or said.sense == "sign":
        first = next(at for at, word in enumerate(pointed.words) if word.span.start >= test.span.start)
        said = meaning_at(pointed.words, first)
    article = Article() if said is None else _titled(said, said.words[0])
    return _ranged(article.follow(selectors.test_article(state, test, where)), test.span)


def _place(state: State, pointed: Pointed) -> Article:
    """The modules that a glob matches; the blocks that a phrase about blocks means."""
    word, statement = pointed.word, pointed.statement
    assert word is not None
    assert pointed.at is not None
    if isinstance(statement, syntax.Blocks):
        return selectors.modules_article(state, statement.glob).follow(selectors.all_blocks_article(state))
    inner = next((part for part in reversed(pointed.parts) if isinstance(part, _SELECTORS)), None)
    if isinstance(inner, syntax.InModule):
        return selectors.modules_article(state, inner.glob)
    if isinstance(inner, syntax.InBlock):
        return selectors.blocks_article(state, inner.which, outside=inner.outside)
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
        tooltip = statements.policy_article(graph) if statement is None else _tooltip(state, graph, statement)
        found.append(_hint(state, at, label, tooltip, markdown=markdown))
    return sorted(found, key=lambda each: (each.position.line, each.position.character))


_STALE = Article().say("The figure of the last text without mistakes.")


def _labelled(state: State, start: int, end: int) -> Iterator[tuple[GraphState, Statement | None, int, str]]:
    """Statements with the offsets of their ends and their labels, then None with the totals; nothing without a plan."""
    graph = state.graph
    if graph is None or state.text.loaded.policy is None:
        return
    for statement in statements_of(state):
        at = statement.span.end
        if start <= at <= end and (label := statements.statement_hint(state, graph, statement)):
            yield graph, statement, at, label
    totals, own = statements.policy_hint(graph), statements_of(state)
    first = next((each for each in own if isinstance(each, syntax.PolicyName)), own[0] if own else None)
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


def _tooltip(state: State, graph: GraphState, statement: Statement) -> Article:
    """The hover's text without names of nodes."""
    if isinstance(statement, syntax.Rule) and (index := statements.rule_index(graph, statement)) is not None:
        return statements.rule_figures(graph, index)
    if isinstance(statement, syntax.Let) and statements.picked(graph, statement) is None:
        return Article().say("So many nodes of the forward have this name here.")
    return statements.statement_article(state, statement)


def _hint(state: State, at: int, label: str, tooltip: Article, *, markdown: bool) -> types.InlayHint:
    return types.InlayHint(
        position=state.document.positions.position(at),
        label=label,
        tooltip=tooltip.content(markdown=markdown) if tooltip.blocks else None,
        padding_left=True,
    )
