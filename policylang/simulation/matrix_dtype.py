"""Which dtype the matrix work of an operator runs in: that of its operands, not of what it returns."""

from __future__ import annotations

from policylang.graph.facts import Facts

_INDICES = frozenset(("bool", "int16", "int32", "int64", "uint16", "uint32", "uint64"))


def matrix_dtype(facts: Facts, row: int) -> str:
    """Of the first two matrices that it reads; of two dtypes the wider, which the narrower is brought to. Empty where
    nothing that it reads has one.

    Scales, offsets and biases are no operands: they come behind, or have one dimension. Whole numbers are indices,
    unless there is nothing else, as in a product of them.
    """
    tensors = [each for each in facts.inputs[row] if facts.dtypes[each] and facts.shapes[each] is not None]
    for operands in (
        [each for each in tensors if _dims(facts, each) >= 2 and facts.dtypes[each] not in _INDICES],
        [each for each in tensors if _dims(facts, each) >= 1 and facts.dtypes[each] not in _INDICES],
        tensors,
    ):
        if operands:
            return facts.dtypes[max(operands[:2], key=lambda each: _width(facts, each))]
    return facts.dtypes[row]


def _dims(facts: Facts, row: int) -> int:
    return len(facts.shapes[row] or ())


def _width(facts: Facts, row: int) -> float:
    return facts.bytes[row] / facts.numel[row] if facts.numel[row] else 0.0
