"""Which kinds of words a place takes, by the words before it and by what the grammar takes there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import evolve, frozen

from policylang.editor.features.offers.file_offers import device_offers, include_offers
from policylang.editor.features.offers.graph_index import GraphIndex
from policylang.editor.features.offers.items import Kind, WordOffer
from policylang.editor.features.offers.keyword_offers import keyword_offers, opener
from policylang.editor.features.offers.module_offers import module_offers
from policylang.editor.features.offers.operator_offers import group_offers, lets_above, name_offers, operator_offers
from policylang.editor.features.offers.predicate_offers import (
    figure_offers,
    flag_offers,
    limit_offers,
    predicate_offers,
    subject_offers,
    unit_offers,
    value_offers,
)
from policylang.editor.state import State
from policylang.language.cursor import Cursor
from policylang.language.grammar import is_policy_name
from policylang.language.predicates import MEASURES, PROPERTIES
from policylang.language.statements import FATES, FIGURES, LANGUAGE_VERSION


@frozen
class WordPlace:
    """A cursor, and what is known around it."""

    state: State
    cursor: Cursor
    index: GraphIndex | None

    @property
    def before(self) -> str:
        """The word before."""
        return str(self.cursor.words[-1])


_TOLD = 2
"""Characters from which on parts of names are looked for as well as their beginnings."""
Offers = Callable[[WordPlace], Iterator[WordOffer]]


def offers_at(place: WordPlace) -> tuple[Iterator[WordOffer], bool]:
    """What fits the place, the best first; and whether whoever types on may be offered something else."""
    row = next(row for row in _PLACES if row.fits(place.cursor))
    return row.offers(place), row.grows and (len(place.cursor.typed) < _TOLD or "INT" in place.cursor.accepted)


# --- what the places take ---


def _keywords(place: WordPlace) -> Iterator[WordOffer]:
    yield from keyword_offers(place.cursor)


def _nothing(place: WordPlace) -> Iterator[WordOffer]:
    yield from ()


def _policy_name(place: WordPlace) -> Iterator[WordOffer]:
    path = place.state.document.path
    if path is not None and is_policy_name(path.stem):
        yield WordOffer(path.stem, Kind.Value, "the name of the file")


def _named(offer: WordOffer, place: WordPlace) -> WordOffer:
    """A policy is mostly called like its file."""
    named = next(_policy_name(place), None) if offer.text == "policy" else None
    return offer if named is None else evolve(offer, snippet=f"policy ${{1:{named.text}}}")


def _words(*words: str) -> Offers:
    """Names that the grammar leaves to the statement."""

    def offers(place: WordPlace) -> Iterator[WordOffer]:
        yield from (WordOffer(word, Kind.Keyword) for word in words)

    return offers


def _dims(place: WordPlace) -> Iterator[WordOffer]:
    if place.index is not None:
        yield from (WordOffer(dim, Kind.EnumMember, "mesh dimension") for dim in place.index.dims)


def _selector(place: WordPlace) -> Iterator[WordOffer]:
    """Of a statement that begins with a selector the action comes behind it, so what opens statements is first."""
    cursor, index = place.cursor, place.index
    names = lets_above(place.state.text, cursor)
    words = [] if cursor.typed.startswith('"') else [_named(each, place) for each in keyword_offers(cursor)]
    if "ACTION" in cursor.accepted:
        yield from words
    else:
        yield from (word for word in words if word.text == "everything")
    present = list(group_offers(index, names))
    called = [each for each in present if index is None or each.text in index.groups]
    yield from called
    yield from name_offers(names)
    if "ACTION" not in cursor.accepted:
        yield from words
    operators = list(operator_offers(index, cursor, names))
    yield from (each for each in operators if not each.elsewhere)
    yield from present
    yield from operators


def _expectation(place: WordPlace) -> Iterator[WordOffer]:
    yield from limit_offers()
    yield from keyword_offers(place.cursor)
    yield from _selector(place)


def _recomputed(place: WordPlace) -> Iterator[WordOffer]:
    second = [figure.partition(" ")[2] for figure in FIGURES if figure.startswith("recomputed ")]
    yield from (WordOffer(word, Kind.Property, about=f"figure:recomputed {word}") for word in second)
    yield from keyword_offers(place.cursor)


def _modules(place: WordPlace) -> Iterator[WordOffer]:
    lists_first = place.cursor.kinds == ("BLOCKS",)
    if not lists_first and not place.cursor.typed.startswith('"'):
        yield from _blocks(place)
    yield from module_offers(place.index, place.cursor, lists_first=lists_first)


def _blocks(place: WordPlace) -> Iterator[WordOffer]:
    """The words for blocks, with figures to change."""
    yield WordOffer("block")
    for which in ("first", "last"):
        yield WordOffer(f"{which} block")
        yield WordOffer(f"{which} 4 blocks", snippet=f"{which} ${{1:4}} blocks")
        yield WordOffer(f"{which} half of blocks")
    yield WordOffer("every 2nd block", snippet="every ${1:2nd} block")
    last = 3 if place.index is None or not place.index.blocks else len(place.index.blocks) - 1
    yield WordOffer("blocks")
    yield WordOffer(f"blocks 0..{last}", snippet=f"blocks ${{1:0}}..${{2:{last}}}")
    yield WordOffer("2nd block", snippet="${1:2nd} block")
    shown = ("first", "last", "every", "1st", "2nd", "3rd", "4th")
    yield from (each for each in keyword_offers(place.cursor) if each.text.split()[0] not in shown)


def _predicate(place: WordPlace) -> Iterator[WordOffer]:
    yield from predicate_offers(place.index, place.cursor)
    known = ("from", "is", "not", *MEASURES, *PROPERTIES)  # alone they say nothing that is not offered in full
    yield from (each for each in keyword_offers(place.cursor) if each.text not in known)


def _kinds_of_flag(place: WordPlace) -> Iterator[WordOffer]:
    begun = "is" if place.cursor.kinds[-1] == "NOT" else place.before
    yield from flag_offers(begun)
    yield from keyword_offers(place.cursor)


def _subject(place: WordPlace) -> Iterator[WordOffer]:
    yield from subject_offers(place.index, place.before)


def _value(place: WordPlace) -> Iterator[WordOffer]:
    yield from value_offers(place.index, place.cursor, str(place.cursor.words[-2]))


def _measured(cursor: Cursor) -> str:
    """What the figure at the cursor is a limit of, or is compared with."""
    kinds = cursor.kinds
    if "COMPARISON" not in kinds:
        return "bytes"
    at = len(kinds) - 1 - kinds[::-1].index("COMPARISON")
    if kinds[0] == "EXPECT" and "WHERE" not in kinds:
        return " ".join(" ".join(str(word).split()) for word in cursor.words[1:at] if word not in ("per", "block"))
    return str(cursor.words[at - 1]) if "PER" not in kinds[at:] else "bytes"


def _figure(place: WordPlace) -> Iterator[WordOffer]:
    measured = _measured(place.cursor)
    for offer in figure_offers(place.cursor, measured):
        yield offer
        if offer.text.endswith("%") and measured in ("saved", "recomputed"):
            yield WordOffer(f"{offer.text} of forward", offer.kind)


def _stage(place: WordPlace) -> Iterator[WordOffer]:
    yield from _figure(place)
    yield WordOffer("auto", about="flag:crosses cut")


def _peak_share(place: WordPlace) -> Iterator[WordOffer]:
    yield from figure_offers(place.cursor, "saved")


def _units(place: WordPlace) -> Iterator[WordOffer]:
    yield from unit_offers(_measured(place.cursor) if "WITHIN" not in place.cursor.kinds else "saved")
    yield from (each for each in keyword_offers(place.cursor) if each.text != "%")


def _whole(place: WordPlace) -> Iterator[WordOffer]:
    yield WordOffer("step" if _measured(place.cursor) == "exposed" else "forward")


@frozen
class _Row:
    """The statement and the last words, in terminals; what the parser takes there, with a minus does not; and what is
    offered then."""

    statement: str
    last: str
    accepted: str
    offers: Offers
    grows: bool = False
    """Whether there is more than is offered while little or nothing is typed."""

    def fits(self, cursor: Cursor) -> bool:
        last = cursor.kinds[-1] if cursor.kinds else ""
        return (
            self.statement in ("", opener(cursor))
            and (not self.last or last in self.last.split())
            and all((each.lstrip("-") in cursor.accepted) != each.startswith("-") for each in self.accepted.split())
        )


_PLACES = (
    _Row("POLICY", "POLICY", "", _policy_name),
    _Row("REQUIRES", "REQUIRES", "", _words("policylang")),
    _Row("REQUIRES", "COMPARISON", "", _words(".".join(map(str, LANGUAGE_VERSION)))),
    _Row("INCLUDE", "INCLUDE", "", lambda place: include_offers(place.state.document.path, place.cursor)),
    _Row("DEVICE", "DEVICE", "", lambda place: device_offers(place.state.document.path, place.cursor)),
    _Row("LET", "LET", "", _nothing),
    _Row("BLOCKS", "BLOCKS", "STRING", _modules, grows=True),
    _Row("UNDECIDED", "ARROW", "", _words(*FATES)),
    _Row("FUSE", "FUSE", "", _words("all_gather", "reduce_scatter")),
    _Row("FUSE", "OVER COMMA", "", _dims),
    _Row("FUSE", "NAME", "NAME", _words("chains")),
    _Row("COLLAPSE", "COLLAPSE", "", _words("round_trips")),
    _Row("EXPECT", "EXPECT", "", _expectation, grows=True),
    _Row("EXPECT", "RECOMPUTED", "NAME", _recomputed),
    _Row("PREFETCH", "BLOCK BLOCKS", "NAME", _words("ahead")),
    _Row("OVERLAP", "OF", "NAME -EVERYTHING", _words("peak")),
    _Row("OVERLAP", "WITHIN", "", _peak_share, grows=True),
    _Row("EXPECT", "OF", "NAME -EVERYTHING", _whole),
    _Row("", "IS", "", _kinds_of_flag),
    _Row("", "NOT", "-IS", _kinds_of_flag),
    _Row("", "FROM", "NAME -ORDINAL", _kinds_of_flag),
    _Row("", "", "IS NOT", _predicate),
    _Row("", "NAME", "CUT", _subject),
    _Row("", "PATH USERS INPUTS MODULE", "COMPARISON -OR", _subject),
    _Row("", "COMPARISON", "STRING", _value, grows=True),
    _Row("", "COMPARISON", "", _figure, grows=True),
    _Row("", "PER", "NUMBER", _stage, grows=True),
    _Row("", "UP_TO", "", _figure, grows=True),
    _Row("", "INT NUMBER", "NAME PERCENT", _units),
    _Row("", "IN OUTSIDE", "STRING", _modules, grows=True),
    _Row("", "", "EVERYTHING", _selector, grows=True),
    _Row("", "", "", _keywords),
)
"""The first row that fits says it."""
