"""Names of nodes that do not exist yet: the same in every process, and none that the graph has."""

from __future__ import annotations

from collections.abc import Container


class Names:
    """Gives out names that are neither the graph's nor given out before: ``fused_view``, ``fused_view_1``, …"""

    def __init__(self, taken: Container[str], prefix: str = "fused") -> None:
        self._taken = taken
        self._prefix = prefix
        self._counts: dict[str, int] = {}

    def new(self, target: str) -> str:
        """A name after the operator, ``aten.view.default``."""
        base = f"{self._prefix}_{target.split('.')[1].strip('_')}"
        while True:
            count = self._counts.get(base, 0)
            self._counts[base] = count + 1
            name = f"{base}_{count}" if count else base
            if name not in self._taken:
                return name

    def trial(self) -> Trial:
        """Names to try out: unless they are settled, the next trial gets the same."""
        return Trial(self)


class Trial:
    def __init__(self, names: Names) -> None:
        self._names = names
        self._before = dict(names._counts)
        self._mine = Names(names._taken, names._prefix)
        self._mine._counts = self._before

    def new(self, target: str) -> str:
        return self._mine.new(target)

    def settle(self) -> None:
        self._names._counts = self._mine._counts
