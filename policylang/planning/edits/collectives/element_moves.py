"""The bridge between a graph and the layout algebra: the element moves of a chain's nodes, read from facts."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from policylang.graph.facts import Facts, Ref
from policylang.operators.layouts import DigitLayout, NoDigitsError
from policylang.operators.moves import Cut, Join, Move, Pick, Split, move_of

NOWHERE = -1


@frozen
class Piece:
    """One of several equal parts of a value."""

    base: int
    split: int | None
    """The row that makes all parts; None of a slice."""
    cut: int
    """The dimension that is cut."""
    drops: bool
    """Whether the part has lost that dimension (``unbind``)."""
    place: int
    """Which part, from 0."""
    count: int

    @property
    def whole(self) -> int:
        """The row whose readers are all parts."""
        return self.base if self.split is None else self.split

    @property
    def of(self) -> tuple[int, int | None, int, bool]:
        """What is cut, and how."""
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
        """The row that is split."""
        return self.first.base


def moved(facts: Facts, row: int, value: DigitLayout) -> DigitLayout:
    """A layout after the operator of a row. Raises :class:`NoDigitsError` with a phrase where it is none."""
    shape, name = facts.shapes[row], facts.names[row]
    if shape is None or facts.strides[row] is None or len(facts.inputs[row]) != 1:
        raise NoDigitsError(f"sizes not fixed: {name}")
    if facts.dtypes[row] != facts.dtypes[facts.inputs[row][0]]:
        raise NoDigitsError(f"dtype changes: {name}")
    move = move_in(facts, row)
    if move.keeps_part and value.shape != shape:
        raise NoDigitsError(f"{name} keeps a part")
    try:
        found = move.layout(value)
    except NoDigitsError as why:
        raise NoDigitsError(f"{name} {str(why) or 'cuts across shards'}") from None
    if found.shape != shape:
        raise NoDigitsError(f"{name} is no layout operator")
    return found


def move_in(facts: Facts, row: int) -> Move:
    """What the call in a row does with elements."""
    arguments = facts.arguments[row]
    return move_of(facts.targets[row], arguments, facts.shapes[row]) if arguments else Move()


def fan_of(facts: Facts, join: int) -> Fan | str:
    """The fan that ends in a ``cat`` or ``stack``, or a phrase that says why it is none."""
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


def fanned(facts: Facts, fan: Fan, value: DigitLayout) -> DigitLayout:
    """A layout after a fan."""
    join = fan.rows[-1]
    shape = facts.shapes[join]
    if shape is None or facts.strides[join] is None:
        raise NoDigitsError(f"sizes not fixed: {facts.names[join]}")
    try:
        digits, piece = value.cut(fan.first.cut, fan.first.count, drops=fan.first.drops)
    except NoDigitsError:
        raise NoDigitsError(f"{facts.names[join]} cuts across shards") from None
    found = fan.join.layout(piece, digits)
    if found.shape != shape:
        raise NoDigitsError(f"{facts.names[join]} joins uneven pieces")
    return found


def copies(facts: Facts, rows: Sequence[int]) -> int:
    """How many of the rows write their value anew."""
    return sum(_copies(facts, row) for row in rows)


def _copies(facts: Facts, row: int) -> bool:
    move, source = move_in(facts, row), facts.inputs[row][0]
    shape, stride = facts.shapes[source], facts.strides[source]
    return isinstance(move, Join) if shape is None or stride is None else move.copies(shape, stride)


def piece_of(facts: Facts, row: int) -> Piece | None:
    """Of a slice, or of a ``getitem`` of a split, which part it is; None where parts are not equal, and of others."""
    move, source, shape = move_in(facts, row), source_of(facts, row), facts.shapes[row]
    if source == NOWHERE or shape is None:
        return None
    if isinstance(move, Cut) and (whole := facts.shapes[source]) is not None:
        dim = move.dim % len(whole)
        found = move.piece(whole[dim])
        return None if found is None else Piece(source, None, dim, False, *found)
    split, base = move_in(facts, source), source_of(facts, source)
    if not isinstance(move, Pick) or not isinstance(split, Split) or base == NOWHERE:
        return None
    if (whole := facts.shapes[base]) is None or not isinstance(move.index, int):
        return None
    dim = split.dim % len(whole)
    length = 1 if split.drops else shape[dim]
    if not length or not whole[dim] or whole[dim] % length:
        return None
    count = whole[dim] // length
    return Piece(base, source, dim, split.drops, move.index % count, count)


def source_of(facts: Facts, row: int) -> int:
    """The row that a layout operator or a collective reads; ``NOWHERE`` where its first argument is no single row."""
    arguments = facts.arguments[row]
    return arguments[0].row if arguments and isinstance(arguments[0], Ref) else NOWHERE
