"""Finds what an earlier partition saved, by the markers it left, in a graph that was traced again from its forward.

A marker lies on the operator whose value was saved. Tracing that operator again gives its annotations to all that
comes of it: the operators it is decomposed into, the pieces of a tuple, the copies that autograd keeps. These nodes
are the marker's group, and the value is the group's result: what is read from outside. Names and operators play no
part in this. What cannot be found for certain is reported, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import asdict, field, frozen

from policylang.graph.facts import LostMarker, Phase
from policylang.graph.reading.memory import find_root
from policylang.operators.names import AUTOGRAD_COPIES


@frozen
class SavedMarker:
    """What one partition saved of one operator's value, as it stands in an annotation."""

    partition: str
    """Which partition: a digest of its forward."""
    name: str
    """The operator's node."""
    number: int | None = None
    """In the order of the forward, from 0; with ``count``, a marker that is gone is missed. None for what need not be
    found: a view of an input, or an operator that only carries ``stands_for``."""
    count: int = 0
    """How many markers of the partition are numbered; in each of its markers."""
    following: str = ""
    """The name in the next numbered marker, of the first one in the last: what is gone can be named."""
    value: bool = False
    """Whether the value itself was saved, of a tuple whatever the backward reads of it."""
    copies: bool = False
    """Whether what autograd keeps instead of it was saved."""
    several: bool = False
    """Whether the operator returns a tuple."""
    partly: bool = False
    """Whether some of a tuple was saved and the rest recomputed, which no decision says."""
    stands_for: Sequence[int] = ()
    """Numbers of the saved views of this value. Compilers drop views that change nothing, and the memory is this
    value's."""

    def annotation(self) -> dict[str, Any]:
        return asdict(self)


def from_annotation(annotation: object) -> SavedMarker | None:
    """None for what :meth:`SavedMarker.annotation` did not write."""
    if not isinstance(annotation, Mapping):
        return None
    try:
        return SavedMarker(**annotation)
    except TypeError:
        return None


@frozen(eq=False)
class MarkerColumns:
    """The part of a graph's facts that this needs."""

    names: Sequence[str]
    targets: Sequence[str]
    phases: Sequence[int]
    inputs: Sequence[tuple[int, ...]]
    users: Sequence[tuple[int, ...]]
    owners: Sequence[int]


@frozen
class FoundMarkers:
    saved: list[int] = field(factory=list)
    """Rows whose values were saved, with the owners of those rows."""
    lost: list[LostMarker] = field(factory=list)


def find(markers: Mapping[int, SavedMarker], columns: MarkerColumns) -> FoundMarkers:
    """The values that the markers of a graph speak of. ``markers``: row to marker, in graph order."""
    group_of = {
        row: (marker.partition, marker.name)
        for row, marker in markers.items()
        if columns.phases[row] == Phase.FORWARD and columns.targets[row]
    }
    rows_of: dict[tuple[str, str], list[int]] = {}
    for row, key in group_of.items():
        rows_of.setdefault(key, []).append(row)
    found = FoundMarkers()
    by_partition: dict[str, list[_Group]] = {}
    for rows in rows_of.values():
        group = _Group(markers[rows[0]], rows, group_of, columns)
        by_partition.setdefault(group.marker.partition, []).append(group)
        if group.marker.value or group.marker.copies:
            problem = group.problem()
            found.lost.extend([LostMarker(group.marker.name, problem)] if problem else ())
            found.saved.extend(() if problem else group.saved())
    for groups in by_partition.values():
        _add_missing(groups, found)
    return found


class _Group:
    """The forward nodes that came of one operator."""

    def __init__(
        self, marker: SavedMarker, rows: list[int], group_of: Mapping[int, tuple[str, str]], columns: MarkerColumns
    ) -> None:
        self.marker, self.rows, self.columns = marker, rows, columns
        key = group_of[rows[0]]
        self.copies: set[int] = set()
        self.results: list[int] = []
        for row in reversed(rows):
            users = columns.users[row]
            if any(group_of.get(read) == key for read in columns.inputs[row][:1]) and self._is_copy(row):
                self.copies.add(row)
            elif any(user in self.copies or group_of.get(user) != key for user in users):
                self.results.append(row)
        self.results.reverse()

    def _is_copy(self, row: int) -> bool:
        """Whether autograd keeps it: only the backward reads it. A ``clone`` of a decomposition the forward reads."""
        phases = self.columns.phases
        return self.columns.targets[row] in AUTOGRAD_COPIES and all(
            phases[user] == Phase.BACKWARD or user in self.copies for user in self.columns.users[row]
        )

    def problem(self) -> str:
        """Why what was saved cannot be told; empty where it can."""
        marker = self.marker
        if marker.partly:
            return "some of its values were saved and others recomputed, and a decision is for all of them"
        if not self.results:
            return "nothing reads what it became"
        if (marker.value or self.copies) if marker.several else self._is_one():
            return ""
        return f"it may be any of {', '.join(f'`{self.columns.names[row]}`' for row in self.results)}"

    def stands_in(self) -> bool:
        """Whether its value can be saved in place of a view of it."""
        return bool(self.results) and (self.marker.value if self.marker.several else self._is_one())

    def _is_one(self) -> bool:
        """Whether the results are one value, or one for each call."""
        if len({self.columns.owners[row] for row in self.results}) == 1:
            return True
        parts = self._parts()
        return len({parts[row] for row in self.results}) == len(self.results)

    def _parts(self) -> dict[int, int]:
        """Row to its connected part: a module that is called twice in one graph runs its operators twice."""
        parents = {row: row for row in self.rows}
        for row in self.rows:
            for read in self.columns.inputs[row]:
                if read in parents:
                    parents[find_root(parents, row)] = find_root(parents, read)
        return {row: find_root(parents, row) for row in self.rows}

    def saved(self) -> Iterator[int]:
        """The rows of what the marker says was saved; a copy that is not made here is the value itself."""
        if self.marker.value or (self.marker.copies and not self.copies):
            yield from self.values()
        if self.marker.copies:
            yield from (row for row in self.rows if row in self.copies)

    def values(self) -> Iterator[int]:
        for row in self.results:
            yield row
            yield self.columns.owners[row]


def _add_missing(groups: Sequence[_Group], found: FoundMarkers) -> None:
    """What no forward node carries of one partition: the value that it is a view of stands in, or it is lost."""
    count = groups[0].marker.count
    present = {group.marker.number: group.marker for group in groups if group.marker.number is not None}
    stand_ins = {number: group for group in groups for number in group.marker.stands_for}
    for number in range(count):
        if number in present:
            continue
        stand_in = stand_ins.get(number)
        if stand_in is not None and stand_in.stands_in():
            found.saved.extend(stand_in.values())
            continue
        before = present.get((number - 1) % count)
        name = f"value {number + 1} of {count}" if before is None else before.following
        found.lost.append(LostMarker(name, "no forward node of this graph comes of it"))
