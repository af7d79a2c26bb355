"""Alias check of an edit that replaces a copy: the memory read in its place is neither written nor returned twice."""

from __future__ import annotations

from policylang.graph.facts import Facts, Flag, storage_roots
from policylang.operators.names import GETITEM
from policylang.planning.edits.edit_planner import RefusedError


class ReplacedMemory:
    """The memory of one graph's values, and who writes there."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.roots = storage_roots(facts)
        self.written: dict[int, list[int]] = {}
        """Memory, by the row that made it, and the rows that write there."""
        for row, flags in enumerate(facts.flags):
            if flags & Flag.WRITES:
                for source in facts.inputs[row]:
                    self.written.setdefault(self.roots[source], []).append(row)

    def check(self, home: int, row: int, since: int) -> None:
        """Whether readers of ``row``, which lies in memory of its own, may read ``home``, as it was at ``since``.

        Raises :class:`RefusedError` where they may not.
        """
        facts = self.facts
        reach = self._aliases(row)
        last = max(user for each in reach for user in (each, *facts.users[each]))
        later = (writer for writer in self.written.get(self.roots[home], ()) if since < writer <= last)
        for writer in (*self.written.get(self.roots[row], ()), *later):
            raise RefusedError(f"memory is written: {facts.names[writer]}")
        given = facts.ops[self.roots[home]] != "call_function" or self.is_returned(self.roots[home])
        for each in reach if given else ():
            if any(facts.ops[user] == "output" for user in facts.users[each]):
                name = facts.names[self.roots[home]]
                raise RefusedError(f"returned: {facts.names[each]}", f"it would share memory with `{name}`")

    def is_returned(self, row: int) -> bool:
        """Whether the graph returns a row or a view of it."""
        facts = self.facts
        return any(facts.ops[user] == "output" for each in self._aliases(row) for user in facts.users[each])

    def _aliases(self, row: int) -> list[int]:
        """A row and the views of it."""
        facts = self.facts
        found, pending = [row], [row]
        while pending:
            for user in facts.users[pending.pop()]:
                if facts.flags[user] & Flag.VIEW or facts.targets[user] == GETITEM:
                    found.append(user)
                    pending.append(user)
        return found
