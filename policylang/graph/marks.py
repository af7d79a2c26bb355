"""The metadata that policylang leaves on a graph's nodes, told from that of the user's ``checkpoint``.

The stages that write (``backends``) and the one that reads (``graph.collect``) share these names, nothing else.
Provenance lives in ``node.meta["custom"]``, which torch carries into copies of a node and into a second compilation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import asdict, field, frozen

from policylang.graph.facts import Facts, LostMarker, Phase
from policylang.graph.memory import find_root
from policylang.language.shown import one_line
from policylang.operators.names import AUTOGRAD_COPIES

PROVENANCE = "policylang"
"""``custom`` key: the line that decided, ``llama3_sac.apl:9``. A tag beside it is ours, any other is the user's."""
SAVED = "policylang_saved"
"""``custom`` key: a partition saved this value (``where recorded saved``). On the nodes of a partition itself True,
:data:`PARTLY` or :data:`OFFLOADED`; on those of a graph to be traced again, a :class:`SavedMarker`, which outlives
decompositions."""
PARTLY = "partly"
"""The value of :data:`SAVED` on part of a tuple whose rest was recomputed."""
OFFLOADED = "offloaded"
"""The value of :data:`SAVED` on a value that waits on the host."""
USER_TAG = "policylang_user_tag"
"""``custom`` key: the user's tag that an ``override`` rule replaced, as ``[member name or None, region or None]``."""
REWRITTEN = "policylang_rewritten"
"""``custom`` key of a node that a ``fuse`` or ``collapse`` line added to the graph: that line, ``mesh.apl:3``."""
SLICE = "policylang_slice"
"""``custom`` key of a node that computes a slice under a ``chunk`` line: a name that all nodes of the slice have."""
RECOMPUTED = "policylang_recomputed"
"""``custom`` key of a recomputation in a flat graph's backward: the name of the forward node that it repeats."""
MOVED = "policylang_moved"
"""``custom`` key of what copies a value to the host and back: the name of the value's node."""
RANDOM_STATE = "policylang_random_state"
"""``custom`` key of the nodes that keep and pass on a generator's state: the name of the operator that draws."""
PHASE = "policylang_phase"
"""``custom`` key of what a flat graph's tracer knows of a node: :data:`FORWARD`, :data:`BACKWARD`, :data:`EPILOGUE`."""
FORWARD = "forward"
BACKWARD = "backward"
"""Made by an outermost call of the autograd engine, or the accumulation of what such calls made."""
EPILOGUE = "epilogue"
"""The nodes after every gradient: the write-back of buffers, the optimizer's step."""
SESSION = "__policylang_session__"
"""The attribute of a checkpoint's ``context_fn`` that is ours: its session, whose ``policy`` it follows."""
COMPILER = "__policylang_compiler__"
"""The attribute of a backend for ``torch.compile`` that follows a policy."""
ALL = (PROVENANCE, SAVED, USER_TAG, REWRITTEN, SLICE)
"""Every ``custom`` key of a partition's; what does not belong to a second compilation is taken off by these names."""
AC_GRAPH_ID = 2**30
"""The ``ac_graph_id`` of every node that policylang tags.

torch saves a recomputed node that a node of a *later* region recomputes too (``cleanup_recompute_tags``), and numbers
regions upwards from 0. One number for all our nodes, above every region's, keeps that rule from undoing our tags.
"""


def custom(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The annotations of a node; empty where it has none. Not to be written to: nodes share them."""
    found = meta.get("custom")
    return found if isinstance(found, dict) else {}


def annotated(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what others have set on a node, in order; one that is set to False or None is not set."""
    if not (found := custom(meta)):
        return ()
    others = (
        one_line(name)
        for name, value in found.items()
        if isinstance(name, str) and not name.startswith(PROVENANCE) and value is not None and value is not False
    )
    return tuple(sorted(others))


def is_ours(meta: Mapping[str, Any]) -> bool:
    """The ``recompute`` tag of a node, if any, was written by policylang."""
    return PROVENANCE in custom(meta)


def user_tag(meta: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """The ``CheckpointPolicy`` member name and region that the user's own ``checkpoint`` gave a node."""
    annotations = custom(meta)
    if PROVENANCE in annotations:
        tag, region = annotations.get(USER_TAG, (None, None))
        return tag, region
    tag, region = meta.get("recompute"), meta.get("ac_graph_id")
    return getattr(tag, "name", None), region if isinstance(region, int) else None


def session_of(context_fn: object) -> Any:
    return getattr(getattr(context_fn, "func", context_fn), SESSION, None)


def recorded(meta: Mapping[str, Any]) -> object:
    """The mark of a partition that saved the value of this very node."""
    found = custom(meta).get(SAVED)
    return found if found in (True, PARTLY, OFFLOADED) else None


def records_offloaded(meta: Mapping[str, Any]) -> bool:
    """A partition has offloaded the value of this node, or of what it was traced from."""
    marker = from_annotation(custom(meta).get(SAVED))
    return recorded(meta) == OFFLOADED or (marker is not None and marker.offloaded)


@frozen
class SavedMarker:
    """The annotation on an operator that records what one partition saved of its value.

    Retracing that operator copies the annotation to every node that results: the operators it is decomposed into, the
    pieces of a tuple, the copies that autograd keeps. These nodes are the marker's group, and the value is what is read
    of them from outside. A value that is not certain to be the saved one is reported.
    """

    partition: str
    """A digest of the partition's forward."""
    name: str
    """The operator's node."""
    number: int | None = None
    """From 0 in the order of the forward; with ``count``, it shows which marker is gone. None for what need not be
    found: a view of an input, or an operator that only carries ``stands_for``."""
    count: int = 0
    """The number of markers in the partition; the same in each of its markers."""
    following: str = ""
    """The name in the next numbered marker, of the first one in the last: what is gone can be named."""
    value: bool = False
    """The value itself was saved, of a tuple whatever the backward reads of it."""
    copies: bool = False
    """The copy that autograd keeps instead of it was saved."""
    several: bool = False
    """The operator returns a tuple."""
    partly: bool = False
    """Part of a tuple was saved and the rest recomputed, which no decision expresses."""
    offloaded: bool = False
    """It waited on the host, or a view of it did."""
    stands_for: Sequence[int] = ()
    """Numbers of the saved views of this value: compilers drop views that change nothing, and the memory is its own."""

    def annotation(self) -> dict[str, Any]:
        return asdict(self)


def from_annotation(annotation: object) -> SavedMarker | None:
    """None for what :meth:`SavedMarker.annotation` did not write."""
    try:
        return SavedMarker(**annotation) if isinstance(annotation, Mapping) else None
    except TypeError:
        return None


@frozen
class FoundMarkers:
    saved: list[tuple[int, bool]] = field(factory=list)
    """Nodes whose values were saved, with their producers, and whether they were offloaded."""
    lost: list[LostMarker] = field(factory=list)


def find(markers: Mapping[int, SavedMarker], facts: Facts) -> FoundMarkers:
    """The values that the markers of a graph speak of. ``markers``: node to marker, in graph order."""
    group_of: dict[int, tuple[str, str]] = {}
    rows_of: dict[tuple[str, str], list[int]] = {}
    for row, marker in markers.items():
        if facts.phases[row] == Phase.FORWARD and facts.targets[row]:
            key = group_of[row] = marker.partition, marker.name
            rows_of.setdefault(key, []).append(row)
    found = FoundMarkers()
    by_partition: dict[str, list[_Group]] = {}
    for (partition, name), rows in rows_of.items():
        group = _Group(markers[rows[0]], rows, group_of, facts)
        by_partition.setdefault(partition, []).append(group)
        if group.marker.value or group.marker.copies:
            if problem := group.problem():
                found.lost.append(LostMarker(name, problem))
            else:
                found.saved.extend(group.saved())
    for groups in by_partition.values():
        _add_missing(groups, found)
    return found


class _Group:
    """The forward nodes that one operator was traced into."""

    def __init__(
        self, marker: SavedMarker, rows: list[int], group_of: Mapping[int, tuple[str, str]], facts: Facts
    ) -> None:
        self.marker, self.rows, self.facts = marker, rows, facts
        key, phases = group_of[rows[0]], facts.phases
        self.copies: set[int] = set()
        self.results: list[int] = []
        for row in reversed(rows):
            users, copies = facts.users[row], self.copies
            of_group = any(group_of.get(read) == key for read in facts.inputs[row][:1])
            # A copy that autograd keeps only the backward reads; a `clone` of a decomposition the forward reads.
            if (
                of_group
                and facts.targets[row] in AUTOGRAD_COPIES
                and all(phases[user] == Phase.BACKWARD or user in copies for user in users)
            ):
                copies.add(row)
            elif any(user in copies or group_of.get(user) != key for user in users):
                self.results.append(row)
        self.results.reverse()

    def problem(self) -> str:
        """Why the saved value cannot be identified; empty where it can."""
        marker = self.marker
        if marker.partly:
            return "some of its values were saved and others recomputed, and a decision is for all of them"
        if not self.results:
            return "nothing reads what it became"
        if (marker.value or self.copies) if marker.several else self._is_one():
            return ""
        return f"it may be any of {', '.join(f'`{self.facts.names[row]}`' for row in self.results)}"

    def stands_in(self) -> bool:
        """Its value can be saved in place of a view of it."""
        return bool(self.results) and (self.marker.value if self.marker.several else self._is_one())

    def _is_one(self) -> bool:
        """The results are one value, or one in each connected part: a module that is called twice in one graph runs its
        operators twice."""
        if len({self.facts.owners[row] for row in self.results}) == 1:
            return True
        parents = {row: row for row in self.rows}
        for row in self.rows:
            for read in self.facts.inputs[row]:
                if read in parents:
                    parents[find_root(parents, row)] = find_root(parents, read)
        return len({find_root(parents, row) for row in self.results}) == len(self.results)

    def saved(self) -> Iterator[tuple[int, bool]]:
        """The nodes of the value that the marker's partition saved; for a copy that this graph lacks, the value."""
        if self.marker.value or (self.marker.copies and not self.copies):
            yield from self.values()
        if self.marker.copies:
            yield from ((row, self.marker.offloaded) for row in sorted(self.copies))

    def values(self) -> Iterator[tuple[int, bool]]:
        return ((each, self.marker.offloaded) for row in self.results for each in (row, self.facts.owners[row]))


def _add_missing(groups: Sequence[_Group], found: FoundMarkers) -> None:
    """Replaces a partition's markers that no forward node carries by the value that they view, or reports them."""
    count = groups[0].marker.count
    present = {group.marker.number: group.marker for group in groups}
    stand_ins = {number: group for group in groups for number in group.marker.stands_for if group.stands_in()}
    for number in range(count):
        if number in present:
            continue
        if number in stand_ins:
            found.saved.extend(stand_ins[number].values())
            continue
        before = present.get((number - 1) % count)
        name = f"value {number + 1} of {count}" if before is None else before.following
        found.lost.append(LostMarker(name, "no forward node of this graph was traced from it"))
