"""The decisions of a report by the names of their values, in full or short."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policylang.language.figures import listed
from policylang.language.nearest import did_you_mean, nearest

if TYPE_CHECKING:
    from policylang.audit.summary.report import DecisionReport

_MOST_NAMES = 4


class DecidedValues(dict[str, "DecisionReport"]):
    """Of several graphs: ``layers.3/mm_3``, or by the number of its graph, ``3/mm_3``, where that has no name.

    ``[…]`` also takes the name alone, ``mm_3``, or with the end of a block's path, where one graph alone has such a
    value or where all that have it decide alike. Everything else about it is a dictionary of the full names.
    """

    def __missing__(self, name: str) -> DecisionReport:
        """Raises ``KeyError`` that names the values it may be, or those that are spelled nearly so."""
        graph, _, value = name.rpartition("/")
        graphs = dict.fromkeys(full.rpartition("/")[0] for full in self)
        near = [each for each in graphs if not graph or f".{each}".endswith(f".{graph}")]
        by_graph = {full: self[full] for each in near if (full := f"{each}/{value}") in self}
        if not by_graph:
            known = self if "/" in name else (full.rpartition("/")[2] for full in self)
            help_ = did_you_mean(nearest(name, known)) or f"the report has {len(self):,} values"
            raise KeyError(f"no forward value is called `{name}`; {help_}")
        if len(set(by_graph.values())) > 1:
            said: dict[DecisionReport, list[str]] = {}
            for full, decision in by_graph.items():
                said.setdefault(decision, []).append(full)
            ways = (f"{decision.action} {listed(names, _MOST_NAMES)}" for decision, names in said.items())
            raise KeyError(f"`{name}` is decided differently in {len(by_graph)} graphs: {'; '.join(ways)}")
        return next(iter(by_graph.values()))

    def __reduce__(self) -> tuple[type[DecidedValues], tuple[dict[str, DecisionReport]]]:
        return DecidedValues, (dict(self),)
