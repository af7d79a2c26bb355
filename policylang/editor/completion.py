"""Completion: the words that may follow at a place of a policy, by the grammar and by the snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from attrs import evolve, frozen
from lsprotocol import types

from policylang.editor import word_offers
from policylang.editor.hover import meaning_at
from policylang.editor.selectors import name_article
from policylang.editor.state import GraphIndex, State, index_of
from policylang.editor.statements import Article, with_code
from policylang.editor.word_offers import Kind, WordOffer
from policylang.language.cursor import Cursor, cursors_at
from policylang.language.devices.reading import SUFFIX as DEVICE_SUFFIX
from policylang.language.diagnostics import Source
from policylang.language.files import SUFFIX
from policylang.language.lexer import Lexeme, StatementOrigin, is_policy_name, terminal_texts, words_of
from policylang.language.predicates import MEASURES, PROPERTIES
from policylang.language.resources import devices_folder, policies_folder
from policylang.language.statements import FATES, FIGURES, KINDS, LANGUAGE_VERSION
from policylang.language.syntax import NARROW_BYTES, Word
from policylang.language.words import Meaning, Sense, meaning


@frozen
class WordPlace:
    """A cursor with the state of its document and the index of its graph."""

    state: State
    cursor: Cursor
    index: GraphIndex | None

    @property
    def before(self) -> str:
        return str(self.cursor.words[-1])


_TOLD = 2  # characters from which on parts of names are looked for as well as their beginnings
Offers = Callable[[WordPlace], Iterator[WordOffer]]


def offers_at(place: WordPlace) -> tuple[Iterator[WordOffer], bool]:
    """The offers for a place, the best first; and whether further typing may bring others."""
    row = next(row for row in _PLACES if row.fits(place.cursor))
    return row.offers(place), row.grows and (len(place.cursor.typed) < _TOLD or "INT" in place.cursor.accepted)


# --- what the places take ---


def _words(*words: str) -> Offers:
    """Names that the grammar leaves to the statement."""
    return lambda place: (WordOffer(word, Kind.Keyword) for word in words)


def _policy_name(place: WordPlace) -> Iterator[WordOffer]:
    path = place.state.document.path
    if path is not None and is_policy_name(path.stem):
        yield WordOffer(path.stem, Kind.Value, "the name of the file")


def _dims(place: WordPlace) -> Iterator[WordOffer]:
    if place.index is not None:
        yield from (WordOffer(dim, Kind.EnumMember, "mesh dimension") for dim in place.index.dims)


def _selector(place: WordPlace) -> Iterator[WordOffer]:
    """At the start of a statement that may be a selector, the words that open statements come first."""
    cursor, index = place.cursor, place.index
    names = word_offers.lets_above(place.state.text, cursor)
    words = [] if cursor.typed.startswith('"') else list(word_offers.keyword_offers(cursor))
    if "ACTION" in cursor.accepted:
        yield from words
    else:
        yield from (word for word in words if word.text == "everything")
    present = list(word_offers.group_offers(index, names))
    called = [each for each in present if index is None or each.text in index.groups]
    yield from called
    yield from word_offers.name_offers(names)
    if "ACTION" not in cursor.accepted:
        yield from words
    operators = list(word_offers.operator_offers(index, cursor, names))
    yield from (each for each in operators if not each.elsewhere)
    yield from present
    yield from operators


def _recomputed(place: WordPlace) -> Iterator[WordOffer]:
    second = [figure.partition(" ")[2] for figure in FIGURES if figure.startswith("recomputed ")]
    yield from (WordOffer(word, Kind.Property, about=f"figure:recomputed {word}") for word in second)
    yield from word_offers.keyword_offers(place.cursor)


def _modules(place: WordPlace) -> Iterator[WordOffer]:
    lists_first = place.cursor.kinds == ("BLOCKS",)
    if not lists_first and not place.cursor.typed.startswith('"'):
        yield from _blocks(place)
    yield from word_offers.module_offers(place.index, place.cursor, lists_first=lists_first)


def _blocks(place: WordPlace) -> Iterator[WordOffer]:
    """The words for blocks, with figures to change."""
    last = 3 if place.index is None or not place.index.blocks else len(place.index.blocks) - 1
    ends = (f"{which} {what}" for which in ("first", "last") for what in ("block", "4 blocks", "half of blocks"))
    yield from map(WordOffer, ("block", *ends, "every 2nd block", "blocks", f"blocks 0..{last}", "2nd block"))
    shown = ("first", "last", "every", "1st", "2nd", "3rd", "4th")
    yield from (each for each in word_offers.keyword_offers(place.cursor) if each.text.split()[0] not in shown)


def _predicate(place: WordPlace) -> Iterator[WordOffer]:
    yield from word_offers.predicate_offers(place.index, place.cursor)
    known = ("from", "is", "not", *MEASURES, *PROPERTIES)  # alone they offer nothing beyond the full list
    yield from (each for each in word_offers.keyword_offers(place.cursor) if each.text not in known)


def _kinds_of_flag(place: WordPlace) -> Iterator[WordOffer]:
    begun = "is" if place.cursor.kinds[-1] == "NOT" else place.before
    yield from word_offers.flag_offers(begun)
    yield from word_offers.keyword_offers(place.cursor)


def _measured(cursor: Cursor) -> str:
    """The quantity that the figure at the cursor limits, or is compared with."""
    kinds = cursor.kinds
    if "COMPARISON" not in kinds:
        return "bytes"
    at = len(kinds) - 1 - kinds[::-1].index("COMPARISON")
    if kinds[0] == "EXPECT" and "WHERE" not in kinds:
        return " ".join(" ".join(str(word).split()) for word in cursor.words[1:at] if word not in ("per", "block"))
    return str(cursor.words[at - 1]) if "PER" not in kinds[at:] else "bytes"


def _subject(place: WordPlace) -> Iterator[WordOffer]:
    return word_offers.subject_offers(place.index, place.before)


def _figure(place: WordPlace) -> Iterator[WordOffer]:
    measured = _measured(place.cursor)
    for offer in word_offers.figure_offers(place.cursor, measured):
        yield offer
        if offer.text.endswith("%") and measured in ("saved", "recomputed"):
            yield WordOffer(f"{offer.text} of forward", offer.kind)


def _units(place: WordPlace) -> Iterator[WordOffer]:
    yield from word_offers.unit_offers(_measured(place.cursor) if "WITHIN" not in place.cursor.kinds else "saved")
    yield from (each for each in word_offers.keyword_offers(place.cursor) if each.text != "%")


_AUTO = WordOffer("auto", about="flag:crosses cut")


@frozen
class _Row:
    """Statement and last words, in terminals; what the parser takes there (with a minus: does not); what is offered."""

    statement: str
    last: str
    accepted: str
    offers: Offers
    grows: bool = False
    """True if there is more than is offered while little or nothing is typed."""

    def fits(self, cursor: Cursor) -> bool:
        last = cursor.kinds[-1] if cursor.kinds else ""
        return (
            self.statement in ("", word_offers.opener(cursor))
            and (not self.last or last in self.last.split())
            and all((each.lstrip("-") in cursor.accepted) != each.startswith("-") for each in self.accepted.split())
        )


_PLACES = (
    _Row("POLICY", "POLICY", "", _policy_name),
    _Row("REQUIRES", "REQUIRES", "", _words("policylang")),
    _Row("REQUIRES", "COMPARISON", "", _words(".".join(map(str, LANGUAGE_VERSION)))),
    _Row("INCLUDE", "INCLUDE", "", lambda place: word_offers.include_offers(place.state.document.path, place.cursor)),
    _Row("DEVICE", "DEVICE", "", lambda place: word_offers.device_offers(place.state.document.path, place.cursor)),
    _Row("LET", "LET", "", _words()),
    _Row("BLOCKS", "BLOCKS", "STRING", _modules, grows=True),
    _Row("UNDECIDED", "ARROW", "", _words(*FATES)),
    *(_Row(kind.terminal(), kind.terminal(), "", _words(*kind.named)) for kind in KINDS if kind.named),
    *(_Row(kind.terminal(), "OVER COMMA", "", _dims) for kind in KINDS if kind.is_over_dims),
    _Row("FUSE", "NAME", "NAME", _words("chains")),
    _Row(
        *("EXPECT", "EXPECT", ""),
        lambda place: chain(word_offers.limit_offers(), word_offers.keyword_offers(place.cursor), _selector(place)),
        grows=True,
    ),
    _Row("SCHEDULE", "NAME PATH", "NAME", _words("into", "stages", "microbatches")),
    _Row("SCHEDULE", "INT", "NAME", _words("stages", "microbatches")),
    _Row("CHUNK", "OVER", "NAME", _words("tokens")),
    _Row("CHUNK", "", "NAME UP_TO TO_LOSS", _words("to loss", "in block", "into", "up to")),
    _Row("CHUNK", "", "NAME UP_TO", _words("into", "up to")),
    _Row("EXPECT", "RECOMPUTED", "NAME", _recomputed),
    _Row("PREFETCH", "BLOCK BLOCKS", "NAME", _words("ahead")),
    _Row("OVERLAP", "OF", "NAME -EVERYTHING", _words("peak")),
    _Row("OVERLAP", "WITHIN", "", lambda place: word_offers.figure_offers(place.cursor, "saved"), grows=True),
    _Row(
        "EXPECT",
        "OF",
        "NAME -EVERYTHING",
        lambda place: _words("step" if _measured(place.cursor) == "exposed" else "forward")(place),
    ),
    _Row("", "IS", "", _kinds_of_flag),
    _Row("", "NOT", "-IS", _kinds_of_flag),
    _Row("", "FROM", "NAME -ORDINAL", _kinds_of_flag),
    _Row("", "", "IS NOT", _predicate),
    _Row("", "NAME", "CUT", _subject),
    _Row("", "PATH USERS INPUTS MODULE", "COMPARISON -OR", _subject),
    _Row(
        *("", "COMPARISON", "STRING"),
        lambda place: word_offers.value_offers(place.index, place.cursor, str(place.cursor.words[-2])),
        grows=True,
    ),
    _Row("", "COMPARISON", "", _figure, grows=True),
    _Row("", "PER", "NUMBER", lambda place: chain(_figure(place), (_AUTO,)), grows=True),
    _Row("", "UP_TO", "", _figure, grows=True),
    _Row("", "AS", "", _words(*(name if size > 1 else f"{name} per row" for name, size in NARROW_BYTES.items()))),
    _Row("", "INT NUMBER", "NAME PERCENT", _units),
    _Row("", "IN OUTSIDE", "STRING", _modules, grows=True),
    _Row("", "", "EVERYTHING", _selector, grows=True),
    _Row("", "", "", lambda place: word_offers.keyword_offers(place.cursor)),
)
"""The first row that matches decides."""


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
    """Explains the offer of ``text`` at a place; may be empty."""
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
    return Article().say(*(with_code(" ".join(part.split())) for part in word_offers.comment_of(file).split("\n\n")))


def _in_its_place(cursor: Cursor, text: str) -> Meaning | None:
    """The meaning of a word of the language behind the words before it."""
    origin = StatementOrigin(Source("", text))
    found = (name for name, texts in terminal_texts().items() if text in texts and name in cursor.accepted)
    terminal = next(found, None)
    words = words_of(origin.source, 0, len(text))
    if terminal is not None:
        words = [Lexeme.make(terminal, text, 0, origin)]
    return meaning_at([*cursor.words, *words], len(cursor.words)) if words else None


TRIGGERS = [".", "<", '"', "/", "(", " "]
"""Characters behind which an editor asks by itself, beside letters. They are answered where they begin something: a
blank only where a statement cannot end yet, for where it can, who goes on with Enter must not choose from a list."""
_NONE = types.CompletionList(is_incomplete=False, items=[])


def completion(state: State, offset: int, *, trigger: str | None = None) -> types.CompletionList:
    """At a character offset, what fits best first. ``trigger``: the character behind which the client asked itself."""
    cursors = cursors_at(state.document.source, offset)
    if not cursors or not _is_begun(cursors[0], trigger):
        return _NONE
    index, cursor = index_of(state.facts), cursors[0]
    offers = [offers_at(WordPlace(state, each, index)) for each in cursors]
    found, complete = word_offers.fitting_offers(chain.from_iterable(each for each, _ in offers), cursor)
    grows = any(each for _, each in offers)
    range = state.document.positions.between(cursor.start, cursor.end)
    data = {"uri": state.document.uri, "at": cursor.start}
    items = list(word_offers.protocol_items(found, range, data))
    return types.CompletionList(is_incomplete=grows or not complete, items=items)


def with_documentation(
    state: State | None, item: types.CompletionItem, *, markdown: bool = True
) -> types.CompletionItem:
    """An item with its documentation, as Markdown or plain text; without that if its document is closed."""
    data = item.data if isinstance(item.data, dict) else {}
    about, at = data.get("about"), data.get("at")
    if state is None or not isinstance(about, str) or not isinstance(at, int):
        return item
    said = documentation(state, cursors_at(state.document.source, at), item.label, about)
    if not said.blocks:
        return item
    return evolve(item, documentation=said.content(markdown=True) if markdown else said.plain())


def uri_of_item(item: types.CompletionItem) -> str:
    """The address of the document that an item is for; may be empty."""
    uri = item.data.get("uri") if isinstance(item.data, dict) else None
    return uri if isinstance(uri, str) else ""


def _is_begun(cursor: Cursor, trigger: str | None) -> bool:
    """True if the last typed character begins something, or the user asked."""
    if trigger == " ":
        return bool(cursor.kinds) and not cursor.typed and not cursor.accepted & {"$END", "OR"}
    if trigger == '"':
        return cursor.typed.startswith('"')
    return trigger != "<" or "BUNDLED" in cursor.accepted
