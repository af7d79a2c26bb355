"""Chains of layout operators around collectives, as the layout algebra sees them.

*Reading*: the element moves of a chain's nodes, and the pairs of collectives that only layout operators connect.

*Restriding*: the operators after a chain were traced with the strides of its result. A permuted view in its place
holds the same elements elsewhere. Layout operators pass new strides on; matrix products take any strides and return
fresh memory. Everyone else (pointwise operators, whose results follow the strides of their inputs, collectives,
writers, graph outputs) gets the strides it was traced with.

*Deriving*: gathered shards, concatenated, are the digits of the ranks and then those of the shard. Any layout of these
digits is a view, a permutation, and another view that joins what is then adjacent. The last is a view of memory only if
the joined digits are in order there; otherwise it needs a copy.

*Pieces*: ``chunk`` is traced with a ``getitem`` for every part, of which a rank may take one, another one on every
rank. The others go with the tuple.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import pairwise

from attrs import Factory, define, evolve, field, frozen

from policylang.graph.facts import Facts, Flag, GraphKind, Phase, Ref
from policylang.operators import layouts
from policylang.operators.layouts import JOINS, PASSING, Cut, Join, Move, Pick, Split, move_of
from policylang.operators.names import CLONE, GETITEM, PERMUTE, PRODUCTS, VIEW, WAIT
from policylang.planning.graph_edit import Edit

NO_ROW = -1


@frozen
class Piece:
    """One of several equal parts of a value."""

    base: int
    split: int | None
    """The node that makes all parts; None for a slice."""
    cut: int
    """The dimension that is cut."""
    drops: bool
    """Set if the part lacks that dimension (``unbind``)."""
    place: int
    """The number of the part, from 0."""
    count: int

    @property
    def whole(self) -> int:
        """The node whose readers are all parts."""
        return self.base if self.split is None else self.split

    @property
    def of(self) -> tuple[int, int | None, int, bool]:
        """The value, and how it is cut."""
        return self.base, self.split, self.cut, self.drops


@frozen
class Fan:
    """``split → getitem* → cat``, or slices of one value in place of ``split`` and ``getitem``."""

    first: Piece
    rows: tuple[int, ...]
    """Split, pieces and join, in graph order."""
    join: Join

    @property
    def base(self) -> int:
        return self.first.base


Hop = int | Fan
"""A node, or the nodes of a fan."""


def layout_after(facts: Facts, hop: Hop, value: layouts.DigitLayout) -> layouts.DigitLayout:
    """A layout after a hop. Raises :class:`NoDigitsError` with a phrase if it is no layout operator."""
    row = last_row(hop)
    shape, name = facts.shapes[row], facts.names[row]
    if shape is None or facts.strides[row] is None or (hop == row and len(facts.inputs[row]) != 1):
        raise layouts.NoDigitsError(f"sizes not fixed: {name}")
    if isinstance(hop, Fan):
        try:
            digits, piece = value.cut(hop.first.cut, hop.first.count, drops=hop.first.drops)
        except layouts.NoDigitsError:
            raise layouts.NoDigitsError(f"{name} cuts across shards") from None
        found = hop.join.layout(piece, digits)
        if found.shape != shape:
            raise layouts.NoDigitsError(f"{name} joins uneven pieces")
        return found
    if facts.dtypes[row] != facts.dtypes[facts.inputs[row][0]]:
        raise layouts.NoDigitsError(f"dtype changes: {name}")
    move = move_in(facts, row)
    if move.keeps_part and value.shape != shape:
        raise layouts.NoDigitsError(f"{name} keeps a part")
    try:
        found = move.layout(value)
    except layouts.NoDigitsError as why:
        raise layouts.NoDigitsError(f"{name} {str(why) or 'cuts across shards'}") from None
    if found.shape != shape:
        raise layouts.NoDigitsError(f"{name} is no layout operator")
    return found


def move_in(facts: Facts, row: int) -> Move:
    """The element move of a node's call."""
    arguments = facts.arguments[row]
    return move_of(facts.targets[row], arguments, facts.shapes[row]) if arguments else Move()


def fan_of(facts: Facts, join: int) -> Fan | str:
    """The fan that ends in a ``cat`` or ``stack``, or why it is none, as a phrase."""
    parts = facts.arguments[join][0]
    name = facts.names[join]
    pieces = [part.row for part in parts if isinstance(part, Ref)] if isinstance(parts, tuple) else []
    shape = facts.shapes[join]
    if not pieces or len(pieces) != len(parts) or shape is None or len(set(pieces)) != len(pieces):
        return f"{name} joins other values"
    first = piece_of(facts, pieces[0])
    for place, piece in enumerate(pieces):
        found = piece_of(facts, piece)
        if found is None or first is None or found.of != first.of:
            return f"{name} joins other values"
        if found.place != place:
            return f"{name} joins pieces in another order"
    if first is None or first.count != len(pieces):
        return f"{name} joins a part of the pieces"
    move = move_in(facts, join)
    assert isinstance(move, Join)
    rows = tuple(sorted({*pieces, *(() if first.split is None else (first.split,)), join}))
    return Fan(first, rows, move)


def copies(facts: Facts, rows: Iterable[int]) -> int:
    """The number of nodes that copy their input."""
    count = 0
    for row in rows:
        move, source = move_in(facts, row), facts.inputs[row][0]
        shape, stride = facts.shapes[source], facts.strides[source]
        count += isinstance(move, Join) if shape is None or stride is None else move.copies(shape, stride)
    return count


def piece_of(facts: Facts, row: int) -> Piece | None:
    """The part that a slice, or a ``getitem`` of a split, takes; None for other nodes and unequal parts."""
    move, source, shape = move_in(facts, row), single_input(facts, row), facts.shapes[row]
    if source == NO_ROW or shape is None:
        return None
    if isinstance(move, Cut) and (whole := facts.shapes[source]) is not None:
        dim = move.dim % len(whole)
        found = move.piece(whole[dim])
        return None if found is None else Piece(source, None, dim, False, *found)
    split, base = move_in(facts, source), single_input(facts, source)
    if not isinstance(move, Pick) or not isinstance(split, Split) or base == NO_ROW:
        return None
    if (whole := facts.shapes[base]) is None or not isinstance(move.index, int):
        return None
    dim = split.dim % len(whole)
    length = 1 if split.drops else shape[dim]
    if not length or not whole[dim] or whole[dim] % length:
        return None
    count = whole[dim] // length
    return Piece(base, source, dim, split.drops, move.index % count, count)


def single_input(facts: Facts, row: int) -> int:
    """The node that a layout operator or a collective reads; ``NO_ROW`` if its first argument is no single node."""
    arguments = facts.arguments[row]
    return arguments[0].row if arguments and isinstance(arguments[0], Ref) else NO_ROW


_HALVES = {GraphKind.FORWARD: int(Phase.FORWARD), GraphKind.BACKWARD: int(Phase.BACKWARD)}


def links(facts: Facts, target: str) -> Iterator[tuple[int, int]]:
    """Every pair of collectives of which one reads the other through layout operators only, in graph order."""
    origin = array("l", [NO_ROW]) * len(facts)
    for row, name in enumerate(facts.targets):
        if name == target:
            source = single_input(facts, row)
            if source != NO_ROW and origin[source] != NO_ROW:
                yield origin[source], row
            origin[row] = row
        elif name in PASSING:
            source = single_input(facts, row)
            origin[row] = NO_ROW if source == NO_ROW else origin[source]
        elif name in JOINS:
            found = {origin[source] for source in facts.inputs[row]}
            origin[row] = found.pop() if len(found) == 1 else NO_ROW


def path_between(facts: Facts, start: int, end: int) -> tuple[Hop, ...] | str:
    """The layout operators on the straight line behind ``start`` to ``end``; or why there is none, as a phrase."""
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
            row = single_input(facts, row)
    return tuple(reversed(hops))


def tail(facts: Facts, wait: int) -> tuple[Hop, ...]:
    """The layout operators after a node that are the only readers of their inputs, in the same phase."""
    hops: list[Hop] = []
    row = wait
    while (hop := _only_reader(facts, row)) is not None:
        hops.append(hop)
        row = last_row(hop)
    return tuple(hops)


def last_row(hop: Hop) -> int:
    return hop if isinstance(hop, int) else hop.rows[-1]


def rows_of_hops(hops: Iterable[Hop]) -> tuple[int, ...]:
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
    """A node's phase; a graph of a partition is one phase, whatever it recomputes."""
    if facts.kind in _HALVES and facts.ops[row] == "call_function":
        return _HALVES[facts.kind]
    return facts.phases[row]


def relaid(
    facts: Facts, row: int, stride: layouts.Lengths, *, dense_for_gaps: bool = False
) -> list[tuple[int, layouts.Lengths]] | int:
    """The nodes after a value whose strides change with it, in graph order, and their new strides. Or a node that needs
    the value unchanged. With ``dense_for_gaps``, an operator that allocates its result may read a dense value in place
    of one with gaps between its rows: its result has the same strides."""
    found: list[tuple[int, layouts.Lengths]] = []
    pending = [] if stride == facts.strides[row] else [(row, stride)]
    while pending:
        at, now = heappop(pending)
        for user in facts.users[at]:
            if facts.targets[user] in PRODUCTS:
                continue
            after = _after(facts, user, at, now)
            if after is None:
                if dense_for_gaps and _only_gaps(facts, at, now) and _makes_its_own(facts, user):
                    continue
                return user
            if after != facts.strides[user]:
                found.append((user, after))
                heappush(pending, (user, after))
    return sorted(found)


def _only_gaps(facts: Facts, row: int, stride: layouts.Lengths) -> bool:
    """True if a value is dense with these strides and before had gaps between its rows, in the same order."""
    shape, before = facts.shapes[row], facts.strides[row]
    if shape is None or before is None or not layouts.is_contiguous(shape, stride):
        return False
    lengths = [(step, length) for step, length in zip(before, shape, strict=True) if length != 1]
    return all(outer >= inner * length for (outer, _), (inner, length) in pairwise(lengths))


def _makes_its_own(facts: Facts, row: int) -> bool:
    ours = Flag.VIEW | Flag.WRITES | Flag.EFFECTFUL | Flag.COLLECTIVE | Flag.RANDOM
    return facts.ops[row] == "call_function" and not facts.flags[row] & ours and facts.targets[row] != GETITEM


def _after(facts: Facts, row: int, source: int, stride: layouts.Lengths) -> layouts.Lengths | None:
    """The strides of a layout operator's result for an input with these; None if it cannot read that."""
    shape = facts.shapes[source]
    if facts.flags[row] & (Flag.WRITES | Flag.EFFECTFUL) or facts.inputs[row] != (source,):
        return None
    if shape is None or facts.strides[row] is None or facts.ops[row] != "call_function":
        return None
    return move_in(facts, row).strides(shape, stride)


@frozen
class LayoutStep:
    target: str
    argument: tuple[int, ...] | str | None
    shape: layouts.Lengths
    stride: layouts.Lengths


@define
class LayoutSteps:
    """A chain of layout operators, without those that change nothing."""

    shape: layouts.Lengths
    stride: layouts.Lengths = field(default=Factory(lambda it: layouts.contiguous(it.shape), takes_self=True))
    steps: list[LayoutStep] = field(factory=list)

    @property
    def copies(self) -> int:
        return sum(step.target == CLONE for step in self.steps)

    def view(self, shape: layouts.Lengths) -> None:
        if shape != self.shape:
            stride = layouts.viewed(self.shape, self.stride, shape)
            assert stride is not None, "a copy was made where there is no view"
            self._add(VIEW, shape, shape, stride)

    def permute(self, dims: Sequence[int]) -> None:
        self._add(PERMUTE, tuple(dims), layouts.permuted(self.shape, dims), layouts.permuted(self.stride, dims))

    def copy(self) -> None:
        self._add(CLONE, "contiguous_format", self.shape, layouts.contiguous(self.shape))

    def _add(
        self, target: str, argument: tuple[int, ...] | str, shape: layouts.Lengths, stride: layouts.Lengths
    ) -> None:
        self.steps.append(LayoutStep(target, argument, shape, stride))
        self.shape, self.stride = shape, stride


def steps_to(
    wanted: layouts.DigitLayout, order: Sequence[int], start: layouts.Lengths, *, copied: bool = False
) -> LayoutSteps:
    """The operators from gathered shards to a layout.

    Args:
        wanted: the layout; its rank digits are those of the gathers in ``order``.
        order: the gathers, that of the slowest rank digit first.
        start: the shape of the gathered shards, or of a leading part of them.
        copied: whether the result has to be contiguous.
    """
    runs = _runs(wanted, order)
    position = {run: at for at, run in enumerate(sorted(runs, key=lambda run: run[0]))}
    moved = [position[run] for run in runs]
    found = LayoutSteps(start)
    if moved != sorted(moved):
        found.view(tuple(size for _, size in position))
        found.permute(moved)
        if copied or layouts.viewed(found.shape, found.stride, wanted.shape) is None:
            found.copy()
    found.view(wanted.shape)
    return found


def _runs(wanted: layouts.DigitLayout, order: Sequence[int]) -> list[tuple[tuple[int, int], int]]:
    """The runs of digits that are adjacent in the gathered shards and in one dimension of the layout, in the layout's
    order: the place of each in the gathered shards, slow ones first, and its size."""
    places = {**{origin: place for place, origin in enumerate(order)}, layouts.SHARD: len(order)}
    gathered = sorted(wanted.flat, key=lambda digit: (places[digit.origin], -digit.weight))
    following = dict(pairwise(gathered))
    runs: list[list[layouts.Digit]] = []
    for digits in wanted.dims:
        previous: layouts.Digit | None = None
        for digit in digits:
            if previous is not None and following.get(previous) == digit:
                runs[-1].append(digit)
            else:
                runs.append([digit])
            previous = digit
    return [((places[run[0].origin], -run[0].weight), layouts.size_of(tuple(run))) for run in runs]


def unread_pieces(facts: Facts) -> frozenset[int]:
    """The nodes of pieces that nobody reads, or only such pieces."""
    found: set[int] = set()
    for row in range(len(facts) - 1, -1, -1):
        if facts.targets[row] == GETITEM and all(user in found for user in facts.users[row]):
            found.add(row)
    return frozenset(found)


def without_pieces(facts: Facts, unread: Collection[int]) -> Facts:
    """The facts without what unread pieces read, as edits are planned on them."""
    if not unread:
        return facts
    targets, inputs = list(facts.targets), list(facts.inputs)
    users, arguments = list(facts.users), list(facts.arguments)
    for row in unread:
        for source in facts.inputs[row]:
            users[source] = tuple(user for user in users[source] if user not in unread)
        targets[row], inputs[row], arguments[row] = "", (), ()
    return evolve(facts, targets=targets, inputs=inputs, users=users, arguments=arguments)


def with_pieces(edit: Edit, facts: Facts, unread: Collection[int]) -> Edit:
    if not unread:
        return edit
    dead = {facts.index[name] for name in edit.dead}
    pending = list(dead)
    while pending:
        more = [user for user in facts.users[pending.pop()] if user in unread and user not in dead]
        dead.update(more)
        pending += more
    return evolve(edit, dead=tuple(facts.names[row] for row in sorted(dead)))
