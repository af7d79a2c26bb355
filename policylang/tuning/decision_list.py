"""Writes the outcomes of classes of values as a few rules, last match first, as a person would.

A ground rule, then its exceptions: the fewest phrases, by a greedy cover, that cover all classes with another outcome
and no class for which that would be wrong. Values that the backward does not need may have either outcome. Blocks that
follow another pattern get separate exceptions, or a separate ground rule if that is shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from heapq import heapify, heapreplace
from itertools import combinations, groupby
from operator import or_

from attrs import evolve, frozen

from policylang.tuning.phrases import EVERYTHING, Option, Phrase, Vocabulary, bits

MOST_STATEMENTS = 16
_MOST_LISTED = 5
_LONGEST = 110
_MOST_PHRASES = 24
_ACTIONS = {Option.RECOMPUTE: "recompute", Option.SAVE: "save", Option.OFFLOAD: "offload"}


@frozen
class Zone:
    """Blocks that follow another pattern than the rest."""

    place: str
    """``in first 3 blocks``."""
    pattern: tuple[int, ...]
    """An :class:`Option` per class."""
    nested: bool = False
    """True if they are among the blocks of the zone before."""


@frozen
class RuleGroup:
    """Phrases with one action in one place, in any order."""

    action: Option
    place: str
    inside: bool
    phrases: tuple[Phrase, ...]


@frozen
class Script:
    """Statements, and the outcome of each class: in the blocks outside all zones, and in the zones."""

    ground: tuple[str, ...]
    groups: tuple[RuleGroup, ...]
    rest: str = ""
    """``undecided -> save``."""

    @property
    def cost(self) -> float:
        return len(self.ground) + bool(self.rest) + _length(self.groups)

    def text(self, head: str, *, override: bool) -> str | None:
        """The policy's text after ``head``, a statement or none; None where it takes more than 16 statements."""
        room = MOST_STATEMENTS - len(self.ground) - bool(self.rest) - bool(head)
        lists = [[[phrase] for phrase in group.phrases] for group in self.groups]
        while sum(map(len, lists)) > room:
            if not _join_two(self.groups, lists):
                return None
        said = [
            f"{_ACTIONS[group.action]} {_listed(phrases, group)}"
            for group, each in zip(self.groups, lists, strict=True)
            for phrases in each
        ]
        before = "override " if override else ""
        lines = [before + line for line in (*self.ground, *said)]
        return head + "\n".join([*lines, *([self.rest] if self.rest else [])]) + "\n"


def scripts(
    inside: Vocabulary,
    outside: Vocabulary,
    base: Sequence[int],
    zones: Sequence[Zone],
    around: Sequence[int],
    *,
    undecided: bool = False,
) -> list[Script]:
    """The possible texts, the shortest first. ``base``: the pattern of all blocks outside the zones; ``around``: the
    pattern outside of blocks. ``undecided``: True if values without a rule may be the ground that is saved, so that
    views follow what is offloaded."""
    offloads = any(Option.OFFLOAD in pattern for pattern in (base, around, *(zone.pattern for zone in zones)))
    grounds = [_BLOCKS_AGAIN] if inside.numbers else []
    grounds += [_ALL_AGAIN, _ALL_SAVED, *([_SAVED_UNLESS_SAID] if undecided and offloads else [])]
    found = (_script(inside, outside, base, zones, around, ground) for ground in grounds)
    return sorted(filter(None, found), key=lambda script: (script.cost, str(script.ground)))


@frozen
class _Ground:
    lines: tuple[str, ...]
    rest: str
    inside: Option
    outside: Option


_BLOCKS_AGAIN = _Ground(("recompute everything in block",), "undecided -> save", Option.RECOMPUTE, Option.SAVE)
_ALL_AGAIN = _Ground(("recompute everything",), "", Option.RECOMPUTE, Option.RECOMPUTE)
_ALL_SAVED = _Ground(("save everything",), "", Option.SAVE, Option.SAVE)
_SAVED_UNLESS_SAID = _Ground((), "undecided -> save", Option.EITHER, Option.EITHER)


def _script(
    inside: Vocabulary,
    outside: Vocabulary,
    base: Sequence[int],
    zones: Sequence[Zone],
    around: Sequence[int],
    ground: _Ground,
) -> Script | None:
    groups: list[RuleGroup] = []
    effect = {number: int(ground.inside) for number in inside.numbers}
    beyond = {number: int(ground.outside) for number in outside.numbers}
    place = "in block" if inside.numbers else ""
    if not _settle(inside, base, effect, place, groups):
        return None
    if not _settle(outside, around, beyond, "outside block" if inside.numbers else "", groups):
        return None
    before = effect
    for zone in zones:
        best: list[RuleGroup] | None = None
        around_it, after = before if zone.nested else effect, effect
        for start in (None, Option.RECOMPUTE, Option.SAVE):
            own = dict(around_it) if start is None else {number: int(start) for number in inside.numbers}
            added: list[RuleGroup] = []
            if start is not None:
                everything = next(phrase for phrase in inside.phrases if phrase.subject == EVERYTHING)
                added.append(RuleGroup(start, zone.place, True, (everything,)))
            done = _settle(inside, zone.pattern, own, zone.place, added)
            if done and (best is None or _length(added) < _length(best)):
                best, after = added, own
        if best is None:
            return None
        groups += best
        before = after
    return Script(ground.lines, tuple(groups), ground.rest)


def _settle(
    vocabulary: Vocabulary, pattern: Sequence[int], effect: dict[int, int], place: str, groups: list[RuleGroup]
) -> bool:
    """Add the groups that turn the outcomes so far into the wanted ones; False if no phrase distinguishes them."""
    for action in (Option.RECOMPUTE, Option.SAVE, Option.OFFLOAD):
        asking = (n for n in vocabulary.numbers if _asks_for(pattern[n], action))
        must = bits(n for n in asking if not _is_so(pattern[n], effect[n]))
        if not must:
            continue
        never = bits(n for n in vocabulary.numbers if not _allows(pattern[n], action))
        if action is Option.OFFLOAD:  # a view of a saved value would be saved
            never |= vocabulary.views & bits(n for n in vocabulary.numbers if pattern[n] == Option.EITHER)
        phrases = _cover(vocabulary.phrases, must, never)
        if phrases is None:
            return False
        groups.append(RuleGroup(action, place, vocabulary.inside, phrases))
        taken = _union(phrases)
        effect.update(dict.fromkeys((n for n in vocabulary.numbers if taken >> n & 1), int(action)))
    return True


def _asks_for(option: int, action: Option) -> bool:
    return option == action or (option == Option.REBUILT and action is Option.RECOMPUTE)


def _allows(option: int, action: Option) -> bool:
    return option in (action, Option.EITHER) or (option == Option.REBUILT and action is not Option.SAVE)


def _is_so(option: int, said: int) -> bool:
    """True if a class already has the wanted outcome. Without a rule it is saved, or follows its base."""
    if option == Option.REBUILT:
        return said != Option.SAVE
    return option == (Option.SAVE if said == Option.EITHER else said)


def _cover(phrases: Sequence[Phrase], must: int, never: int) -> tuple[Phrase, ...] | None:
    """Few and short phrases that take all of ``must`` and nothing of ``never``: the one that takes the most for its
    length first (Chvátal, "A greedy heuristic for the set-covering problem", 1979), then none that others make up for.
    What a phrase takes of the rest only falls, so most are weighed once (Minoux, "Accelerated greedy algorithms for
    maximizing submodular set functions", 1978).
    """
    pure = [phrase for phrase in phrases if not phrase.mask & never and phrase.mask & must]
    chosen: list[Phrase] = []
    left = must
    heap = [(-(phrase.mask & left).bit_count() / phrase.cost, at) for at, phrase in enumerate(pure)]
    heapify(heap)
    while left:
        if not heap or len(chosen) == _MOST_PHRASES:
            return None
        before, at = heap[0]
        best = pure[at]
        now = -(best.mask & left).bit_count() / best.cost
        if now != before:
            heapreplace(heap, (now, at))
            continue
        if not now:
            return None
        chosen.append(best)
        left &= ~best.mask
    for phrase in sorted(chosen, key=lambda phrase: -phrase.cost):
        if not must & ~_union(other for other in chosen if other is not phrase):
            chosen.remove(phrase)
    return _with_braces(chosen)


def _union(phrases: Iterable[Phrase]) -> int:
    return reduce(or_, (phrase.mask for phrase in phrases), 0)


def _with_braces(phrases: Sequence[Phrase]) -> tuple[Phrase, ...]:
    """One operator in several modules with one parent becomes one phrase: ``mm in attention.{wq,wk}``."""
    made: list[Phrase] = []

    def family(phrase: Phrase) -> tuple[str, str, str, str, str]:
        parent = phrase.module.rpartition(".")[0] if phrase.module else "-"
        return phrase.subject, phrase.position, phrase.predicate, phrase.stages, parent

    ordered = sorted(phrases, key=lambda phrase: (family(phrase), phrases.index(phrase)))
    for (_, _, _, _, parent), each in groupby(ordered, key=family):
        group = list(each)
        if len(group) > 1 and group[0].module and not group[0].predicate:
            children = ",".join(phrase.module.rpartition(".")[2] for phrase in group)
            module = f"{parent}.{{{children}}}" if parent else f"{{{children}}}"
            made.append(evolve(group[0], mask=_union(group), module=module, cost=group[0].cost + 0.2))
        else:
            made += group
    return tuple(sorted(made, key=lambda phrase: (phrase.cost, phrase.subject, phrase.module, phrase.position)))


def _length(groups: Sequence[RuleGroup]) -> float:
    return sum(1 + 0.3 * phrase.cost for group in groups for phrase in group.phrases)


def _join_two(groups: Sequence[RuleGroup], lists: list[list[list[Phrase]]]) -> bool:
    """Join two statements with one action and one place: those that make the shortest line."""
    ways = []
    for at, (group, each) in enumerate(zip(groups, lists, strict=True)):
        for left, right in combinations(range(len(each)), 2):
            joined = each[left] + each[right]
            alike = len({phrase.stages for phrase in joined}) == 1 and all(phrase.is_plain for phrase in joined)
            if len(joined) <= _MOST_LISTED and alike and (length := len(_listed(joined, group))) <= _LONGEST:
                ways.append((length, at, left, right))
    if ways:
        _, at, left, right = min(ways)
        lists[at][left] += lists[at].pop(right)
    return bool(ways)


def _listed(phrases: Sequence[Phrase], group: RuleGroup) -> str:
    if len(phrases) == 1:
        return phrases[0].text(group.place, inside=group.inside)
    parts = ", ".join(evolve(phrase, stages="").text("", inside=group.inside) for phrase in phrases)
    return evolve(phrases[0], subject=f"({parts})", module="").text(group.place, inside=group.inside)


def blocks_phrase(end: str, number: int) -> str:
    """``in first 3 blocks``."""
    return f"in {end} block" if number == 1 else f"in {end} {number} blocks"
