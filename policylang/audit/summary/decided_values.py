"""The decisions of a report by the names of their values, in full or short."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from policylang.language.wording import did_you_mean, listed, nearest

if TYPE_CHECKING:
    from policylang.audit.summary.report import DecisionReport

_MOST_NAMES = 4
_Default = TypeVar("_Default")


class DecidedValues(dict[str, "DecisionReport"]):
    """Of several graphs: ``layers.3/mm_3``, or by the number of its graph, ``3/mm_3``, where that has no name.

    ``[…]``, ``in`` and ``get`` also take the name alone, ``mm_3``, or with the end of a block's path, where one graph
    alone has such a value or where all that have it decide alike; of a name that is decided differently, ``in`` says
    no. All else about it is a dictionary of the full names.
    """

    def __missing__(self, name: str) -> DecisionReport:
        """Raises ``KeyError`` that names the values it may be, or those that are spelled nearly so."""
        by_graph = self._of_short_name(name)
        if not by_graph:
            known = self if "/" in str(name) else (full.rpartition("/")[2] for full in self)
            help_ = did_you_mean(nearest(str(name), known)) or f"the report has {len(self):,} values"
            raise KeyError(f"no forward value is called `{name}`; {help_}")
        if len(set(by_graph.values())) > 1:
            said: dict[DecisionReport, list[str]] = {}
            for full, decision in by_graph.items():
                said.setdefault(decision, []).append(full)
            ways = (f"{decision.action} {listed(names, _MOST_NAMES)}" for decision, names in said.items())
            raise KeyError(f"`{name}` is decided differently in {len(by_graph)} graphs: {'; '.join(ways)}")
        return next(iter(by_graph.values()))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or len(set(self._of_short_name(name).values())) == 1

    @overload
    def get(self, name: str, default: None = None, /) -> DecisionReport | None: ...
    @overload
    def get(self, name: str, default: DecisionReport, /) -> DecisionReport: ...
    @overload
    def get(self, name: str, default: _Default, /) -> DecisionReport | _Default: ...
    def get(self, name: str, default: Any = None, /) -> Any:
        if name not in self:
            return default
        return self[name]

    def _of_short_name(self, name: object) -> dict[str, DecisionReport]:
        """The values that it may be, by their full names."""
        if not isinstance(name, str):
            return {}
        graph, _, value = name.rpartition("/")
        graphs = dict.fromkeys(full.rpartition("/")[0] for full in self)
        near = (each for each in graphs if not graph or f".{each}".endswith(f".{graph}"))
        own = super().__contains__
        return {full: self[full] for each in near if own(full := f"{each}/{value}")}

    def __reduce__(self) -> tuple[type[DecidedValues], tuple[dict[str, DecisionReport]]]:
        return DecidedValues, (dict(self),)
