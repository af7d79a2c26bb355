"""The collectives that a bucket may take in: what has to be alike, what is known of each, and how deep each lies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from policylang.graph.facts import Facts, Flag
from policylang.operators.layouts import contiguous
from policylang.operators.names import ALL_REDUCE, GATHER, SCATTER, WAIT
from policylang.planning.edits.bucketing.placing import Places
from policylang.planning.edits.collectives.element_moves import NOWHERE, source_of
from policylang.planning.edits.collectives.lines import phase
from policylang.planning.edits.edit_planner import RefusedError

KINDS = (GATHER, SCATTER, ALL_REDUCE)
"""The operators of which several can be one."""
REDUCES = ("sum", "avg")


@frozen
class Alike:
    """What the members of one bucket have in common. Plain data, in an order that does not depend on hashes."""

    target: str
    reduction: str
    """Empty of a gather."""
    group: str
    dtype: str
    device: str
    phase: int

    @property
    def late(self) -> bool:
        """Whether it waits for the last of its inputs: gradients come one by one, shards of parameters are there."""
        return self.target != GATHER


@frozen
class Member:
    """One collective that may become a part of a bucket."""

    row: int
    wait: int
    source: int
    alike: Alike
    ranks: int
    given: tuple[int, ...]
    """The shape of what it is given."""
    gives: tuple[int, ...]
    piece: int
    """Elements that one rank has of it: of its shard, or of all of it where it is not sharded."""
    bytes: int
    """Of what it is given or gives, whichever is more."""


def group_sizes(facts: Facts) -> dict[str, int]:
    """The ranks of each group: as the graph knows them, else as all its gathers and scatters say; 0 where nothing does,
    or where they contradict each other."""
    sizes = {name: group.size or len(group.ranks) for name, group in facts.groups.items()}
    said: dict[str, set[int]] = {}
    for row, name in enumerate(facts.group_names):
        if not sizes.get(name, 1) and facts.targets[row] in (GATHER, SCATTER) and len(facts.arguments[row]) > 2:
            said.setdefault(name, set()).add(facts.arguments[row][-2])
    return {**sizes, **{name: found.pop() if len(found) == 1 else 0 for name, found in said.items()}}


def member_of(facts: Facts, row: int, places: Places, sizes: Mapping[str, int]) -> Member:
    """The collective in a row. Raises :class:`RefusedError` where it cannot be one of several.

    ``sizes``: of the groups (:func:`group_sizes`).
    """
    target, arguments = facts.targets[row], facts.arguments[row]
    if target not in KINDS:
        raise RefusedError(f"not one of those that can be joined: {target.partition('.')[2].partition('.')[0]}")
    source, group = source_of(facts, row), facts.group_names[row]
    if source == NOWHERE or len(arguments) < 3:  # the tensor, the group, and the ranks or the reduction
        raise RefusedError("arguments not known", "a snapshot of an earlier version does not have them")
    if group not in facts.groups:
        raise RefusedError("group not known")
    size = sizes[group]
    if size < 1:
        raise RefusedError(f"size of group `{group}` not known")
    if target != ALL_REDUCE and arguments[-2] != size:
        raise RefusedError(f"group size is not {size}")
    reduction = "" if target == GATHER else str(arguments[1])
    if reduction and reduction not in REDUCES:
        raise RefusedError(f"reduces with {reduction}")
    wait = _wait(facts, row)
    given, gives = (_lengths(facts, each) for each in (source, wait))
    if facts.dtypes[source] != facts.dtypes[wait]:
        raise RefusedError("dtype changes")
    if not facts.numel[source]:
        raise RefusedError("nothing in it")
    if target != ALL_REDUCE and not given:
        raise RefusedError("without dimensions")
    if target == SCATTER and given[0] % size:
        raise RefusedError(f"{list(given)} has no {size} parts")
    if facts.flags[source] & Flag.SYMBOLIC or facts.flags[row] & Flag.DATA_DEPENDENT:
        raise RefusedError("sizes not fixed")
    for writer in places.memory.written.get(places.memory.roots[wait], ()):
        raise RefusedError(f"memory is written: {facts.names[writer]}")
    alike = Alike(target, reduction, group, facts.dtypes[wait], facts.devices[wait], phase(facts, row))
    piece = facts.numel[source] // (size if target == SCATTER else 1)
    return Member(
        row=row,
        wait=wait,
        source=source,
        alike=alike,
        ranks=size,
        given=given,
        gives=gives,
        piece=piece,
        bytes=max(facts.bytes[source], facts.bytes[wait]),
    )


def depths(facts: Facts, members: Sequence[Member]) -> list[int]:
    """How many of the others follow each other at most on the way to each: two of one depth do not depend on each
    other, and no fewer collectives than there are depths can take them all in (Mirsky's theorem).

    ``members`` in graph order. Linear in the rows between the first and the last.
    """
    wanted = {member.row for member in members}
    behind: dict[int, int] = {}
    """Row to how many of them lie on the way to what it gives."""
    found: list[int] = []
    for row in range(members[0].row, members[-1].row + 1) if members else ():
        deep = max((behind.get(source, 0) for source in facts.inputs[row]), default=0) if behind else 0
        if row in wanted:
            found.append(deep)
            deep += 1
        if deep:
            behind[row] = deep
    return found


def grouped(members: Iterable[Member]) -> dict[Alike, list[Member]]:
    found: dict[Alike, list[Member]] = {}
    for member in members:
        found.setdefault(member.alike, []).append(member)
    return found


def _wait(facts: Facts, row: int) -> int:
    users = facts.users[row]
    if len(users) != 1 or facts.targets[users[0]] != WAIT:
        raise RefusedError("not waited for once")
    return users[0]


def _lengths(facts: Facts, row: int) -> tuple[int, ...]:
    shape, stride = facts.shapes[row], facts.strides[row]
    if shape is None or stride is None:
        raise RefusedError(f"sizes not fixed: {facts.names[row]}")
    if stride != contiguous(shape):
        raise RefusedError(f"not contiguous: {facts.names[row]}")
    return shape
