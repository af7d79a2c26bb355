"""How long a mixture of patterns waits for copies to the host and back, and what they hold where zones meet.

Copies start and are awaited as :mod:`policylang.planning.schedule` has it. What a piece of the step
does to the moments that later pieces go by is linear where the greatest is the sum and the sum is the product (Baccelli
et al., *Synchronization and Linearity*, 1992): a small matrix a piece, which does not depend on what other blocks do.

Of the forward the moments are the present, and when the last copy and the one before it are done; of the backward the
present, when the last value and the one before it were used first, and when the last copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule, StepKind
from policylang.simulation.memory import Lifetimes, Origin
from policylang.simulation.node_times import NodeTimes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NEVER = -1e30
_MOMENTS = 4
_NOW = 0
_LAST, _BEFORE = 1, 2
_DONE = 3


@frozen(eq=False)
class PieceWaits:
    """Of a pattern that all blocks follow."""

    matrices: Floats
    """By piece: of each moment after it and each before it, how much later the one is at least."""
    computes: Floats
    """By piece, seconds."""


def waits_of(facts: Facts, times: NodeTimes, schedule: Schedule, keys: Ints, pieces: int, backward: int) -> PieceWaits:
    """``keys``: by step its piece, the first of the backward ``backward``. A collective counts as computation: what
    waits for it can hide a copy."""
    kinds, rows = np.frombuffer(schedule.kinds, dtype=np.uint8), np.frombuffer(schedule.rows, dtype=np.int32)
    seconds = np.where(kinds <= StepKind.SECOND_RUN, np.asarray(times.seconds, dtype=np.float64)[rows], 0.0)
    computes = np.bincount(keys, weights=seconds, minlength=pieces).astype(np.float64)
    matrices = np.full((pieces, _MOMENTS, _MOMENTS), _NEVER)
    matrices[:, range(_MOMENTS), range(_MOMENTS)] = 0.0
    since = np.cumsum(seconds) - seconds
    starts = dict(zip(*(each.tolist() for each in _first_steps(keys, since)), strict=True))
    spent = np.zeros(pieces)
    host = times.device.host_bandwidth or np.inf
    for step in np.flatnonzero((kinds == StepKind.COPY_TO_HOST) | (kinds == StepKind.WAIT_FROM_HOST)).tolist():
        leaves = kinds[step] == StepKind.COPY_TO_HOST
        piece = int(keys[step])
        if leaves is (piece >= backward):
            piece = backward - 1 if leaves else backward
        matrix, length = matrices[piece], facts.bytes[rows[step]] / host
        gap = max(since[step] - starts.get(piece, since[step]) - spent[piece], 0.0)
        spent[piece] += gap
        matrix[_NOW] += gap
        if leaves:
            matrix[_NOW] = np.maximum(matrix[_NOW], matrix[_BEFORE])
            matrix[_BEFORE] = matrix[_LAST]
            matrix[_LAST] = np.maximum(matrix[_NOW], matrix[_LAST]) + length
        else:
            matrix[_DONE] = np.maximum(matrix[_BEFORE], matrix[_DONE]) + length
            matrix[_NOW] = np.maximum(matrix[_NOW], matrix[_DONE])
            matrix[_BEFORE] = matrix[_LAST]
            matrix[_LAST] = matrix[_NOW]
    matrices[:, _NOW] += np.maximum(computes - spent, 0.0)[:, None]
    return PieceWaits(matrices, computes)


def _first_steps(keys: Ints, since: Floats) -> tuple[Ints, Floats]:
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], since[starts]


class CopyWaits:
    """The patterns of some mixtures."""

    def __init__(self, patterns: Sequence[PieceWaits], backward: int) -> None:
        self._matrices = np.stack([each.matrices for each in patterns])
        self._computes = np.stack([each.computes for each in patterns])
        self._backward = backward

    def of(self, by_piece: Ints) -> Floats:
        """Seconds; ``by_piece`` says, mixture by piece, the number of the pattern."""
        count, pieces = by_piece.shape
        waits = np.zeros(count)
        for part in (range(self._backward), range(self._backward, pieces)):
            moments = np.full((count, _MOMENTS), _NEVER)
            moments[:, _NOW] = 0.0
            if part.start:
                moments[:] = 0.0
            for piece in part:
                number = by_piece[:, piece]
                later = self._matrices[number, piece]
                found = later[:, :, 0] + moments[:, 0, None]
                for each in range(1, _MOMENTS):
                    np.maximum(found, later[:, :, each] + moments[:, each, None], out=found)
                moments = found
                waits -= self._computes[number, piece]
            waits += moments[:, _NOW] if part.start else moments[:, : _BEFORE + 1].max(axis=1)
        return np.maximum(waits, 0.0)


def on_their_way(found: Lifetimes, schedule: Schedule, keys: Ints, backward: Sequence[int]) -> tuple[Ints, Ints]:
    """By block, of what it and earlier blocks move: the bytes that are on their way to the host as its forward ends,
    and those that are back, or on their way, as its backward begins. Last, for what lies outside, none.

    ``keys``: by step its piece; ``backward``: by block the piece of its backward, as the one after 0 is of its forward.
    """
    moved = set(schedule.rows_of(StepKind.COPY_TO_HOST))
    leaving, returned = np.zeros((2, len(backward) + 1), dtype=np.int64)
    begins = np.searchsorted(keys, backward)
    ends = np.searchsorted(keys, np.arange(len(backward)) + 1, side="right") - 1
    makes: dict[int, int] = {}
    for origin, row, _, size, made, last in found:
        if row not in moved or origin not in (Origin.FIRST_RUN, Origin.COPY_FROM_HOST):
            continue
        own = ends >= makes.setdefault(row, made)
        if origin == Origin.FIRST_RUN:
            leaving[:-1] += size * (own & (last > ends))
        else:
            returned[:-1] += size * (own & (made < begins) & (last >= begins))
    return leaving, returned


def where_zones_meet(
    leaving: Ints, returned: Ints, moves: NDArray[np.bool_], chosen: Ints, backward: Sequence[int]
) -> Ints:
    """By mixture and piece, the bytes that pieces of later blocks would have added or freed for copies of earlier ones
    if both followed one pattern. Where the later ones copy nothing, what is on its way is held until the forward ends.

    The first three by pattern; ``chosen``: by mixture and block the pattern.
    """
    more = np.zeros((len(chosen), 2 * len(backward) + 4), dtype=np.int64)
    for block in range(len(backward) - 1):
        here, there = chosen[:, block], chosen[:, block + 1]
        held = leaving[here, block] - leaving[there, block]
        back = returned[here, block] - returned[there, block]
        more[:, 2 + block] -= np.where(moves[there], held, 0)
        more[:, backward[block]] = np.where(moves[there], back, back - held)
    return more
