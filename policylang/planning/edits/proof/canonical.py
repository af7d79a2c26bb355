"""Layout operators that turn one gather into a wanted layout: the fewest views, and a copy where views do not do.

All shards, one after the other, are the digits of the ranks and then those of the shard. Any layout of the same digits
is a view of that (runs of digits that stay together), a permutation, and another view that joins what now lies side by
side. The last is a view of memory only where the joined digits are in order there; otherwise a copy comes before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from attrs import frozen

from policylang.operators.layouts import (
    SHARD,
    Digit,
    DigitLayout,
    Digits,
    Lengths,
    contiguous,
    permuted,
    size_of,
    viewed,
)
from policylang.operators.names import CLONE, PERMUTE, VIEW


@frozen
class LayoutStep:
    """One layout operator."""

    target: str
    argument: tuple[int, ...] | str | None
    shape: Lengths
    stride: Lengths


@frozen
class LayoutSteps:
    """Layout operators, each on what the one before it made."""

    steps: tuple[LayoutStep, ...]
    shape: Lengths
    stride: Lengths

    @property
    def copies(self) -> int:
        return sum(step.target == CLONE for step in self.steps)


def steps_to(wanted: DigitLayout, order: Sequence[int], start: Lengths, *, copied: bool = False) -> LayoutSteps:
    """From gathered shards to a layout.

    Args:
        wanted: the layout; its rank digits are those of the gathers in ``order``.
        order: the gathers, that of the slowest rank digit first.
        start: the shape of the gathered shards, or of a leading part of them.
        copied: whether the result has to be contiguous.
    """
    runs = _runs(wanted, {origin: place for place, origin in enumerate(order)})
    position = {run: at for at, run in enumerate(sorted(runs, key=lambda run: run.key))}
    moved = [position[run] for run in runs]
    pile = _Pile(start)
    if moved != sorted(moved):
        sizes = [0] * len(runs)
        for run in runs:
            sizes[position[run]] = run.size
        pile.view(tuple(sizes))
        pile.permute(moved)
        if copied or viewed(pile.shape, pile.stride, wanted.shape) is None:
            pile.copy()
    pile.view(wanted.shape)
    return LayoutSteps(tuple(pile.steps), pile.shape, pile.stride)


@frozen
class _Run:
    """Digits that lie side by side in the gathered shards and in one dimension of the layout."""

    key: tuple[int, int]
    """Where it lies among the gathered shards: its first digit's place and weight. Sorting brings slow ones first."""
    size: int


class _Pile:
    """Steps while they are being piled up. One that changes nothing is left out."""

    def __init__(self, shape: Lengths) -> None:
        self.steps: list[LayoutStep] = []
        self.shape, self.stride = shape, contiguous(shape)

    def view(self, shape: Lengths) -> None:
        if shape != self.shape:
            stride = viewed(self.shape, self.stride, shape)
            assert stride is not None, "a copy was made where there is no view"
            self._add(VIEW, shape, shape, stride)

    def permute(self, dims: Sequence[int]) -> None:
        self._add(PERMUTE, tuple(dims), permuted(self.shape, dims), permuted(self.stride, dims))

    def copy(self) -> None:
        self._add(CLONE, "contiguous_format", self.shape, contiguous(self.shape))

    def _add(self, target: str, argument: tuple[int, ...] | str, shape: Lengths, stride: Lengths) -> None:
        self.steps.append(LayoutStep(target, argument, shape, stride))
        self.shape, self.stride = shape, stride


def _runs(wanted: DigitLayout, places: dict[int, int]) -> list[_Run]:
    """The runs of a layout, in its own order."""
    places = {**places, SHARD: len(places)}
    following = _following(wanted.flat, places)
    runs: list[list[Digit]] = []
    for digits in wanted.dims:
        previous: Digit | None = None
        for digit in digits:
            if previous is not None and following.get(previous) == digit:
                runs[-1].append(digit)
            else:
                runs.append([digit])
            previous = digit
    return [_Run((places[run[0].origin], -run[0].weight), size_of(tuple(run))) for run in runs]


def _following(digits: Digits, places: dict[int, int]) -> dict[Digit, Digit]:
    """Each digit's next faster one among the gathered shards."""
    ordered = sorted(digits, key=lambda digit: (places[digit.origin], -digit.weight))
    return dict(pairwise(ordered))
