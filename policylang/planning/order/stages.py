"""The blocks of a graph in the order in which each half of it runs them: what ``ahead`` and ``later`` count by."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from policylang.graph.facts import Facts


@frozen(eq=False)
class Stages:
    """A *stage* is the computation of one block in one direction, or what runs outside the blocks between two."""

    stage_of: Sequence[int]
    """Row to stage, in the order of running; of a collective, the stage that uses or makes what it moves."""
    first: Sequence[int]
    """Stage to the first row that computes in it, as traced."""
    last: Sequence[int]
    direction: Sequence[int]
    """Stage to the half it belongs to: 0 the forward, then each region of the backward."""
    block: Sequence[int]
    """Stage to block number; -1 outside the blocks."""


def stages(facts: Facts, block_of: Sequence[int]) -> Stages:
    raise NotImplementedError
