"""Lines of layout operators between collectives: finds the pairs of collectives that may be fused, in one pass."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from attrs import frozen

from policylang.graph.facts import Facts, GraphKind, Phase
from policylang.operators.layouts import DigitLayout
from policylang.operators.moves import JOINS, PASSING
from policylang.operators.names import GATHER, GETITEM, WAIT
from policylang.planning.edits.collectives.element_moves import NOWHERE, Fan, fan_of, fanned, moved, source_of

_HALVES = {GraphKind.FORWARD: int(Phase.FORWARD), GraphKind.BACKWARD: int(Phase.BACKWARD)}


@frozen
class ChainLink:
    """A collective whose value, laid out anew perhaps, goes into another one."""

    inner: int
    outer: int


def links(facts: Facts, target: str = GATHER) -> Iterator[ChainLink]:
    """Every pair of collectives of which one reads the other through layout operators only, in graph order."""
    origin = array("l", [NOWHERE]) * len(facts)
    for row, name in enumerate(facts.targets):
        if name == target:
            source = source_of(facts, row)
            if source != NOWHERE and origin[source] != NOWHERE:
                yield ChainLink(origin[source], row)
            origin[row] = row
        elif name in PASSING:
            source = source_of(facts, row)
            origin[row] = NOWHERE if source == NOWHERE else origin[source]
        elif name in JOINS:
            found = {origin[source] for source in facts.inputs[row]}
            origin[row] = found.pop() if len(found) == 1 else NOWHERE


Hop = int | Fan
"""A row, or the rows of a fan."""


@frozen
class ChainPath:
    """The layout operators on the straight line between two rows."""

    hops: tuple[Hop, ...]
    rows: tuple[int, ...]
    """In graph order."""


def path_between(facts: Facts, start: int, end: int) -> ChainPath | str:
    """What lies on the way from a row, left out, to what reads it, included; a phrase where the line is not one."""
    hops: list[Hop] = []
    row = end
    while row != start:
        if facts.targets[row] in JOINS:
            fan = fan_of(facts, row)
            if isinstance(fan, str):
                return fan
            hops.append(fan)
            row = fan.base
        else:
            if facts.targets[row] == GETITEM:
                return f"{facts.names[row]} keeps a part"
            hops.append(row)
            row = source_of(facts, row)
    hops.reverse()
    return ChainPath(tuple(hops), rows_of(hops))


def tail(facts: Facts, wait: int) -> tuple[Hop, ...]:
    """The layout operators after a row that are the only readers of what is before them, in the same phase."""
    hops: list[Hop] = []
    row = wait
    while (hop := _only_reader(facts, row)) is not None:
        hops.append(hop)
        row = last_row(hop)
    return tuple(hops)


def last_row(hop: Hop) -> int:
    return hop if isinstance(hop, int) else hop.rows[-1]


def layout_after(facts: Facts, hop: Hop, value: DigitLayout) -> DigitLayout:
    """A layout after a layout operator. Raises :class:`NoDigitsError` where it is none."""
    return fanned(facts, hop, value) if isinstance(hop, Fan) else moved(facts, hop, value)


def rows_of(hops: Iterable[Hop]) -> tuple[int, ...]:
    """In graph order."""
    return tuple(sorted(row for hop in hops for row in ((hop,) if isinstance(hop, int) else hop.rows)))


def _only_reader(facts: Facts, row: int) -> Hop | None:
    users = facts.users[row]
    if not users:
        return None
    first = users[0]
    if len(users) == 1 and facts.targets[first] in PASSING and phase(facts, first) == phase(facts, row):
        if facts.shapes[first] is not None:
            return None if facts.targets[first] == WAIT else first
        pieces = facts.users[first]
    else:
        pieces = users
    joins = {user for piece in pieces[:1] for user in facts.users[piece]}
    if len(joins) != 1:
        return None
    (join,) = joins
    if facts.targets[join] not in JOINS or phase(facts, join) != phase(facts, row):
        return None
    fan = fan_of(facts, join)
    if isinstance(fan, str) or fan.base != row:
        return None
    inside = set(fan.rows)
    if any(user not in inside for each in (row, *fan.rows[:-1]) for user in facts.users[each]):
        return None
    return fan


def phase(facts: Facts, row: int) -> int:
    """Of a half of a partition the whole graph is one phase, whatever it recomputes."""
    if facts.kind in _HALVES and facts.ops[row] == "call_function":
        return _HALVES[facts.kind]
    return facts.phases[row]
