"""The single rules that a mixture of patterns lacks, found by a local search on the choices of the integer program.

Mixtures leave memory unused where no further block fits, and tell apart no more than their patterns do. Here every
phrase of the vocabulary, in all blocks or in some, is weighed as one more rule, and each two of them together: what one
frees pays for what the other saves. One pass over the clauses gives bytes and seconds of hundreds of rules at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from policylang.graph.blocks import OUTSIDE
from policylang.language.syntax import Action
from policylang.planning.plan import Plan
from policylang.tuning.choices import NONE, STAYS, Choices
from policylang.tuning.composition import Floats
from policylang.tuning.decision_list import MOST_STATEMENTS, blocks_phrase
from policylang.tuning.phrases import Phrase, ValueClasses, Vocabulary, bits

Bools = NDArray[np.bool_]
Weighed = list[tuple[float, list[str]]]
"""Seconds of recomputation, and the lines of a text."""

WORTH = 0.003
"""The share of the recomputation that each further rule has to spare."""
_PLACES = 8
"""Rules are tried in the first and in the last 1 to so many blocks, and in every so manyth number of them."""
_ELSEWHERE = 0.5
"""The cost to a reader of a rule that is for some blocks only."""
_PAIRS = 96
"""Pairs of rules that are weighed exactly: the best by the sum of what each of the two changes."""
_CELLS = 8_000_000
"""Rules times columns: of more rules the shortest are weighed."""
_AT_ONCE = 512
"""Rules that are weighed in one pass."""
_WITHOUT = 4
"""A text without room for a line is tried without each of so many of its own, those that change the least."""


@frozen(eq=False)
class _Rules:
    """Rules that might be added, one entry each."""

    texts: list[str]
    saves: Bools
    """Whether it saves; else it recomputes."""
    columns: Bools = field(repr=False)
    """Rule by column: whether it decides the column's operator."""


class Refinement:
    """The rules that the vocabulary of a graph can say, and what each of them changes."""

    def __init__(self, choices: Choices, classes: ValueClasses, *words: Vocabulary, override: bool) -> None:
        self._choices, self._before = choices, "override " if override else ""
        self._sizes, self._seconds = np.asarray(choices.sizes, float), np.asarray(choices.seconds, float)
        self._words, self._classes = words, len(classes)
        owners = choices.facts.owners
        self._stays = {row for row in choices.facts.forward if choices.fixed[owners[row]] == STAYS}
        """Nodes that may not be recomputed, such as a router's choice: a text that would is refused."""
        self._never = bits(classes.of[row] for row in self._stays if classes.of[row] >= 0)
        self._numbers = np.array([classes.of[row] for row in choices.rows], dtype=np.int64)
        count, blocks = len(classes.blocks.names), np.array([classes.blocks.block_of[row] for row in choices.rows])
        everywhere = blocks >= OUTSIDE
        inside = [("in block", "", everywhere)]
        for number in (each for each in range(1, count) if each <= _PLACES or not each % _PLACES):
            inside.append((blocks_phrase("first", number), "first", blocks < number))
            inside.append((blocks_phrase("last", number), "last", blocks >= count - number))
        outside = [("outside block" if count else "", "", everywhere)]
        self._places = [inside if each.inside else outside for each in words]
        """Per vocabulary its places: in words, from which end, and the columns there."""

    def texts(self, text: str, made: Plan, room: float) -> list[str]:
        """The texts that should recompute for less in ``room`` bytes more than this one, the best first. Where it has
        to free bytes, so that ``room`` is negative, all that do. ``made``: its plan."""
        lines = text.splitlines()
        again = np.array([_recomputes(made, row) for row in self._choices.rows], dtype=np.bool_)
        sizes, seconds, on = self._figures(again[:, None])
        rules, limit = self._rules(on[:, 0]), float(sizes[0]) + room
        least = float(seconds[0]) if room >= 0 else inf
        found: Weighed = []
        for state, rest in self._starts(again, lines, made):
            found += self._with_more(state, rest, rules, limit, least)
        return ["\n".join(each) + "\n" for _, each in sorted(found, key=lambda each: each[0])]

    def _starts(self, again: Bools, lines: list[str], made: Plan) -> list[tuple[Bools, list[str]]]:
        """The decisions and lines to start from: those of the text or, where it is full, without one of its rules."""
        if len(lines) < MOST_STATEMENTS:
            return [(again, lines)]
        rest = made.policy.undecided
        ground = rest is not None and rest.fate == "recompute"
        before: dict[int, bool] = {}
        places = [at for at, line in enumerate(lines) if "->" not in line and not line.startswith("blocks ")]
        ways = []
        for at, outcome in zip(places, made.rules, strict=True):
            decided = {row: before.get(row, ground) for row in outcome.decided}
            if not any(decided[row] for row in self._stays & decided.keys()):
                state = [decided.get(row, now) for row, now in zip(self._choices.rows, again, strict=True)]
                ways.append((np.array(state), lines[:at] + lines[at + 1 :]))
            before.update(dict.fromkeys(outcome.matched, outcome.rule.action is not Action.SAVE))
        sizes, seconds, _ = self._figures(np.stack([again, *(state for state, _ in ways)], axis=1))
        harm = sum(abs(each[1:] - each[0]) / (each[0] or 1.0) for each in (seconds, sizes))  # one may be nothing
        return [ways[at] for at in np.argsort(harm, kind="stable")[:_WITHOUT]]

    def _with_more(self, again: Bools, lines: list[str], rules: _Rules, limit: float, least: float) -> Weighed:
        """One more rule, or two of which the first frees what the second saves."""
        changed = np.where(rules.columns, ~rules.saves[:, None], again).T
        sizes, seconds, _ = self._figures(np.column_stack([changed, again]))
        start_size, start, sizes, seconds = sizes[-1], seconds[-1], sizes[:-1], seconds[:-1]
        ways: list[tuple[float, tuple[int, ...]]]
        ways = [(took, (at,)) for at, took in enumerate(seconds) if sizes[at] <= limit]
        frees, saves = (np.flatnonzero(each) for each in ((sizes < start_size) & (seconds >= start), seconds < start))
        if len(lines) + 2 <= MOST_STATEMENTS and len(frees) and len(saves):
            sums = np.add.outer(seconds[frees], seconds[saves])
            sums[np.add.outer(sizes[frees], sizes[saves]) > limit + start_size] = np.inf
            some = np.argpartition(sums, min(_PAIRS, sums.size) - 1, axis=None)[:_PAIRS]
            best = some[np.argsort(sums.flat[some], kind="stable")]
            one, other = frees[best // len(saves)], saves[best % len(saves)]
            sizes, seconds, _ = self._figures(np.where(rules.columns[other].T, False, changed[:, one]))
            pairs = zip(seconds, sizes, one, other, strict=True)
            ways += [(took, (first, then)) for took, size, first, then in pairs if size <= limit]
        worth = [each for each in ways if each[0] < (1 - WORTH * len(each[1])) * least]
        at_end = len(lines) - lines[-1].startswith("undecided")
        return [
            (float(took), lines[:at_end] + [rules.texts[at] for at in chosen] + lines[at_end:])
            for took, chosen in sorted(worth)[:_WITHOUT]
        ]

    def _rules(self, on: Bools) -> _Rules:
        """The shortest of the rules that change the same. ``on``: the columns that are 1."""
        found: dict[tuple[bool, str, int, int], tuple[float, str, Bools, Bools]] = {}
        for saves in (True, False):
            relevant = on & ((self._sizes == 0) if saves else (self._sizes > 0)) & (self._numbers >= 0)
            asked = bits(self._numbers[relevant].tolist())
            for words, places in zip(self._words, self._places, strict=True):
                may_be = (each for each in words.phrases if saves or not each.mask & self._never)
                shortest = {each.mask & asked: each for each in sorted(may_be, key=lambda each: -each.cost)}
                phrases = [each for mask, each in shortest.items() if mask]
                takes = self._by_class(phrases)
                total = takes @ np.bincount(self._numbers[relevant], minlength=self._classes)
                for place, end, there in places:
                    here = self._numbers[relevant & there]
                    count, asked_here = takes @ np.bincount(here, minlength=self._classes), bits(here.tolist())
                    for at in np.flatnonzero((count > 0) & (count < total) if end else count).tolist():
                        cost = phrases[at].cost + _ELSEWHERE * bool(end)
                        key = saves, end, phrases[at].mask & asked_here, int(count[at])
                        if key not in found or cost < found[key][0]:
                            said = f"{self._before}{'save' if saves else 'recompute'} "
                            found[key] = cost, said + phrases[at].text(place, inside=words.inside), takes[at], there
        some = sorted(found.items(), key=lambda each: each[1][0])[: _CELLS // max(len(on), 1)]
        decides = [takes[self._numbers] & there & (self._numbers >= 0) for _, (_, _, takes, there) in some]
        columns = np.array(decides, dtype=np.bool_).reshape(len(some), len(on))
        return _Rules([text for _, (_, text, *_) in some], np.array([key[0] for key, _ in some], bool), columns)

    def _by_class(self, phrases: Sequence[Phrase]) -> Bools:
        """Phrase by class: whether it takes the class."""
        size = self._classes // 8 + 1
        masks = b"".join(each.mask.to_bytes(size, "little") for each in phrases)
        packed = np.frombuffer(masks, dtype=np.uint8).reshape(len(phrases), size)
        return np.unpackbits(packed, axis=1, bitorder="little")[:, : self._classes].astype(np.bool_)

    def _figures(self, again: Bools) -> tuple[Floats, Floats, Bools]:
        """Bytes, seconds and columns of many decisions. ``again``: column by decision, whether the column's operator is
        recomputed where the backward asks for it. O(clauses × decisions)."""
        found = [self._at_once(again[:, at : at + _AT_ONCE]) for at in range(0, again.shape[1], _AT_ONCE)]
        sizes, seconds, on = zip(*found, strict=True) if found else ((np.zeros(0),),) * 2 + ((again,),)
        return np.concatenate(sizes), np.concatenate(seconds), on[0]

    def _at_once(self, again: Bools) -> tuple[Floats, Floats, Bools]:
        on = np.zeros((len(again) + 1, again.shape[1]), dtype=np.bool_)
        on[NONE] = True  # of what is asked for in any case
        for kept, runs, asked in self._choices.clauses:
            if kept == NONE:
                on[runs] |= on[asked]
            elif runs == NONE:
                on[kept] |= on[asked]
            else:
                needed = on[asked] & ~on[kept]
                on[runs] |= needed & again[runs]
                on[kept] |= needed & ~again[runs]
        return self._sizes @ on[:NONE], self._seconds @ on[:NONE], on[:NONE]


def _recomputes(made: Plan, row: int) -> bool:
    decided = made.decisions[row]
    return decided is not None and decided.action is not None and decided.action.recomputes
