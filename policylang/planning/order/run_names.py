"""The names of nodes that a recomputation adds to a graph, the same on a snapshot and on the graph it is of."""

from __future__ import annotations

from collections.abc import Iterable


class RunNames:
    """Names after those of a graph's nodes, each given out once: ``add_recomputed``, ``add_recomputed_1``, …"""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def second_run(self, name: str) -> str:
        """Of a node that runs once more."""
        return self._new(f"{name}_recomputed")

    def drawn(self, name: str) -> str:
        """Of the result of a random operator that keeps the state it starts from."""
        return self._new(f"{name}_result")

    def state(self, name: str) -> str:
        """Of that state."""
        return self._new(f"{name}_state")

    def _new(self, name: str) -> str:
        found, count = name, self._counts.get(name, 0)
        while found in self._taken:
            count += 1
            found = f"{name}_{count}"
        self._counts[name] = count
        self._taken.add(found)
        return found
