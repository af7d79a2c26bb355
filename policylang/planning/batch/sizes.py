"""Range analysis of sizes: which dimensions of a graph's values follow the batch, and within which bounds.

A graph that is compiled for fixed sizes does not say where they come from. They are followed through it, dimension by
dimension: those of the user's inputs may change, those of parameters, buffers and constants may not. Products of
matrices and changes of shape are followed exactly. Of any other operator a dimension is fixed if what it reads has
dimensions of this size, all fixed, or (a part, a join) dimensions at this place, all fixed; else it may change. So a
gathered weight is fixed, and so is the product of two activations over the batch. Of what has no one shape, such as a
tuple, nothing is fixed.

One pass over the nodes and edges, once for each facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from weakref import WeakKeyDictionary

from policylang.graph.facts import Facts, Flag, InputKind, Phase
from policylang.operators.moves import View, movers_of
from policylang.operators.names import GETITEM, MATRIX_PRODUCTS

REACH = 1024
"""So many times as much as here a value is taken to grow at most: what lies beyond, no batch reaches."""

_ANY = -1
_RESHAPES = movers_of(View)
Range = tuple[float, float]
"""The least and the most that a size may be; equal where it does not change."""

_known: WeakKeyDictionary[Facts, Sequence[int]] = WeakKeyDictionary()


class BatchSizes:
    """The sizes of one graph's inputs and forward values."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        known = _known.get(facts)
        if known is None:
            known = _known[facts] = _changing(facts)
        self._changing = known

    def changes(self, row: int) -> bool:
        """Whether the size of a value may be another one for another batch."""
        return bool(self._changing[row])

    def changes_call(self, row: int) -> bool:
        """Whether what an operator reads or makes may be of another size."""
        return self.changes(row) or any(self._changing[read] for read in self._facts.inputs[row])

    def of_value(self, row: int, amounts: Sequence[int]) -> Range:
        """The range of its bytes or its elements, which are in the column ``amounts``."""
        amount = amounts[row]
        return (self._least(row, amounts), amount * REACH) if self._changing[row] else (amount, amount)

    def of_call(self, row: int, flops: Sequence[int]) -> Range:
        """The range of its operations, which change with what it reads too."""
        amount = flops[row]
        if not self.changes_call(row):
            return amount, amount
        return self._least(row, flops), amount * REACH

    def of_dimension(self, row: int, place: int, size: int) -> Range:
        """The range of one dimension. That it is 1 is taken to belong to the form of a value, as broadcasting reads it:
        a longer one stays longer."""
        return (min(size, 2), size * REACH) if self._changing[row] >> place & 1 else (size, size)

    def _least(self, row: int, amounts: Sequence[int]) -> int:
        """What is left where each changing dimension is 1; of a tuple, of its pieces, as far as they are known."""
        facts = self._facts
        shape, changing = facts.shapes[row], self._changing[row]
        if shape is not None:
            grown = prod(size for place, size in enumerate(shape) if changing >> place & 1)
            return amounts[row] // grown if changing and grown else 0
        pieces = (
            user for user in facts.users[row] if facts.targets[user] == GETITEM and facts.shapes[user] is not None
        )
        return sum(self._least(piece, amounts) if self._changing[piece] else amounts[piece] for piece in pieces)


def _changing(facts: Facts) -> Sequence[int]:
    """By row, a bit a dimension that may change; :data:`_ANY` of what has no one shape."""
    changing = [0] * len(facts)
    for row in range(len(facts)):
        if facts.flags[row] & Flag.SYMBOLIC or facts.input_kinds[row] == InputKind.USER:
            changing[row] = _all(facts.shapes[row])
        elif facts.ops[row] == "call_function" and facts.phases[row] == Phase.FORWARD:
            reads = _reads(facts, row)
            if any(changing[read] for read in reads):
                changing[row] = _of_call(facts, row, reads, changing)
    return changing


def _all(shape: tuple[int, ...] | None) -> int:
    return _ANY if shape is None else (1 << len(shape)) - 1


def _reads(facts: Facts, row: int) -> tuple[int, ...]:
    """A piece of a tuple is made of what the operator reads."""
    reads = facts.inputs[row]
    return facts.inputs[reads[0]] or reads if facts.targets[row] == GETITEM and reads else reads


def _of_call(facts: Facts, row: int, reads: tuple[int, ...], changing: Sequence[int]) -> int:
    shape = facts.shapes[row]
    tensors = [read for read in reads if not facts.flags[read] & Flag.SYMBOLIC]
    if shape is None or any(facts.shapes[read] is None and changing[read] for read in tensors):
        return _all(shape)
    sources = [(known, changing[read]) for read in tensors if (known := facts.shapes[read]) is not None]
    name = facts.targets[row]
    if name in _RESHAPES and len(sources) == 1 and prod(sources[0][0]) == prod(shape) > 0:
        return _reshaped(*sources[0], shape)
    if len(sources) == MATRIX_PRODUCTS.get(name):
        return _multiplied(sources[-2], sources[-1], len(shape))
    sized = len(tensors) < len(reads)  # by a symbol, which may be the new size of any dimension
    return sum(1 << place for place in range(len(shape)) if not _is_fixed(shape, place, sources, sized))


def _is_fixed(shape: tuple[int, ...], place: int, sources: Sequence[tuple[tuple[int, ...], int]], sized: bool) -> bool:
    size = shape[place]
    alike = [not mask >> at & 1 for known, mask in sources for at, other in enumerate(known) if other == size]
    if alike or sized:
        return bool(alike) and all(alike)
    there = [known[place] > 1 and not mask >> place & 1 for known, mask in sources if len(known) == len(shape)]
    return size == 1 or (bool(there) and all(there))


def _multiplied(left: tuple[tuple[int, ...], int], right: tuple[tuple[int, ...], int], dims: int) -> int:
    """Rows are those of the left, columns those of the right, and a batch of matrices is that of both."""
    columns = 1 << (dims - 1)
    return (left[1] & right[1] & 1 if dims == 3 else 0) | (left[1] & columns >> 1) | (right[1] & columns)


def _reshaped(old: tuple[int, ...], mask: int, new: tuple[int, ...]) -> int:
    """Both shapes fall into the same shortest groups of neighbours with equal products. What one changing dimension
    is in makes all of its group change, but a new dimension of 1 beside others."""
    changing = here = there = 0
    while here < len(old) or there < len(new):
        first, start = here, there
        before, after = (old[here] if here < len(old) else 1), (new[there] if there < len(new) else 1)
        here, there = here + 1, there + 1
        while before != after:
            if before < after:
                before, here = before * old[here], here + 1
            else:
                after, there = after * new[there], there + 1
        if mask >> first & (1 << (here - first)) - 1:
            group = range(start, min(there, len(new)))
            changing |= sum(1 << place for place in group if new[place] != 1 or len(group) == 1)
    return changing
