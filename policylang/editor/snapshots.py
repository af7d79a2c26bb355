"""The graphs that settings name: each is read once, and again where its file has changed."""

from __future__ import annotations

import os
import stat

from attrs import define, field, frozen

from policylang.api.planned_graphs import read_graphs
from policylang.editor.explaining.on_snapshot import forget_snapshots
from policylang.editor.features.offers.graph_index import index_of
from policylang.editor.workspace import Stamp, stamp_of
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, diagnose

UNREADABLE = "APL355"
_MOST = 4


@frozen
class ReadGraph:
    """A graph as it was read, or why it could not be."""

    facts: Facts | None = None
    problems: tuple[Diagnostic, ...] = ()
    stamp: Stamp = None


NO_GRAPH = ReadGraph()


@define(eq=False)
class Snapshots:
    """The last few that were asked for. Reading takes a tenth of a second, of a recorded graph in JSON several."""

    _read: dict[str, ReadGraph] = field(factory=dict)

    def known(self, name: str | None) -> ReadGraph:
        """As it was read last, whatever has become of its file; nothing where it was never read."""
        return NO_GRAPH if name is None else self._read.get(name, NO_GRAPH)

    def is_read(self, name: str | None) -> bool:
        """Whether :meth:`known` is what the file holds now."""
        return name is None or (name in self._read and self._read[name].stamp == stamp_of(name))

    def read(self, name: str) -> ReadGraph:
        """What the file holds now. To be called in one thread at a time."""
        if self.is_read(name):
            return self._read[name]
        stamp = stamp_of(name)
        graphs, problems = ({}, (_irregular(name),)) if _is_irregular(name) else read_graphs([name])
        found = ReadGraph(next(iter(graphs.values()), None), problems, stamp)
        self._read = {**{key: each for key, each in [*self._read.items()][1 - _MOST :] if key != name}, name: found}
        forget_snapshots()
        if (index := index_of(found.facts)) is not None:
            index.prepare()  # here nobody waits for it, and who completes a word does
        return found


def _is_irregular(name: str) -> bool:
    """Whether it is a pipe or the like, which would be waited for."""
    try:
        mode = os.stat(name).st_mode
    except (OSError, ValueError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _irregular(name: str) -> Diagnostic:
    return diagnose(UNREADABLE, f"`{name}` is not a regular file", help="name a snapshot")
