"""What has to run before what: the edges of the graph, and what edges do not say.

Writes to memory and its readers, draws from one generator, operators with other effects, operators that nobody knows
(barriers), collectives whose order is kept, and the order in which the members of one process group start them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import field, frozen

from policylang.graph.facts import Facts


@frozen(eq=False)
class Dependencies:
    before: Sequence[Sequence[int]]
    """For each row, the rows that have to run before it, data and all else; they all stand before it as traced."""
    barriers: Mapping[str, int] = field(factory=dict)
    """Unknown operators that nothing crosses, and how many calls."""


def dependencies(facts: Facts, kept: Collection[int] = ()) -> Dependencies:
    """``kept``: the rows of ``keep order of`` statements: nothing that communicates crosses them. Linear in nodes and
    edges."""
    raise NotImplementedError
