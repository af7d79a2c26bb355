"""What a graph has that a policy can name, counted once for each snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from weakref import ReferenceType, WeakKeyDictionary, ref

from attrs import define

from policylang.editor.features.offers.module_tree import ModuleTree
from policylang.graph.blocks import blocks_of
from policylang.graph.chains import Chains
from policylang.graph.facts import Facts
from policylang.language.operators import group_names, prelude_group
from policylang.language.resources import manifest
from policylang.language.syntax import Compare, Quantity
from policylang.planning.selection.selectors import Selections, amount_of, split_target
from policylang.planning.value_outcome import own_bytes


@define
class Count:
    """Nodes of all phases, and of these the calls of the forward, which rules are about."""

    nodes: int = 0
    forward: int = 0
    bytes: int = 0
    """That the calls of the forward allocate."""

    def add(self, other: Count) -> None:
        self.nodes += other.nodes
        self.forward += other.forward
        self.bytes += other.bytes

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sorts operators: those with the most bytes first, then those with the most calls, as ``policylang show``."""
        return -self.bytes, -self.forward, -self.nodes

    def __str__(self) -> str:
        return f"{self.nodes:,} {'node' if self.nodes == 1 else 'nodes'}, {self.forward:,} forward"


@define(eq=False, slots=False)
class GraphIndex:
    """Nothing is counted before it is asked for."""

    _facts: ReferenceType[Facts]

    @property
    def facts(self) -> Facts:
        """Held by whoever asks: an index that held them would keep its own entry, and with it every snapshot."""
        found = self._facts()
        assert found is not None
        return found

    @cached_property
    def operators(self) -> Mapping[str, Mapping[str, Mapping[str, Count]]]:
        """Namespace, name and overload to how often the graph calls it."""
        found: dict[str, dict[str, dict[str, Count]]] = {}
        forward = self.facts.by_target
        for target, number in Counter(self.facts.targets).items():
            if target:
                namespace, name, overload = split_target(target)
                counts = found.setdefault(namespace, {}).setdefault(name, {})
                rows = forward.get(target, ())
                counts[overload] = Count(number, len(rows), sum(own_bytes(self.facts, row) for row in rows))
        return found

    @cached_property
    def groups(self) -> Mapping[str, int]:
        """Group to how many calls of the forward it denotes; those that denote none are left out."""
        facts = self.facts
        selections = Selections(facts, {}, blocks_of(facts), Chains(facts))
        lets = {name: prelude_group(name) for name in group_names()}
        sizes = {name: len(selections.rows(let.selector)) for name, let in lets.items() if let is not None}
        return {name: size for name, size in sizes.items() if size}

    @cached_property
    def modules(self) -> ModuleTree:
        facts = self.facts
        return ModuleTree.of(Counter(facts.modules), Counter(facts.modules[row] for row in facts.forward))

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks of a policy without a ``blocks`` line."""
        return blocks_of(self.facts).names

    @cached_property
    def annotations(self) -> Mapping[str, int]:
        """Annotation to how many nodes have it, the most frequent first."""
        return dict(Counter(name for names in self.facts.annotations for name in names).most_common())

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """The names of the mesh dimensions that the graph's groups are known to belong to."""
        named = [dim for mesh in self.facts.meshes for dim in mesh.dims]
        named += [group.dim for group in self.facts.groups.values() if group.dim]
        return tuple(dict.fromkeys(named))

    def prepare(self) -> None:
        """Count what most places want."""
        for each in (self.operators, self.groups, self.modules, manifest()):
            assert each is not None

    def values(self, measured: str, index: int | None = None) -> Counter[float] | Counter[str]:
        """The values that a measure or a property of the forward's calls takes, and how often."""
        key = (measured, index)
        if key not in self._values:
            self._values[key] = self._counted(measured, index)
        return self._values[key]

    @cached_property
    def _values(self) -> dict[tuple[str, int | None], Counter[float] | Counter[str]]:
        return {}

    def _counted(self, measured: str, index: int | None) -> Counter[float] | Counter[str]:
        facts, rows = self.facts, self.facts.forward
        if measured == "overload":
            texts = (split_target(facts.targets[row])[2] for row in rows)
            return Counter(text for text in texts if text)
        if measured in ("dtype", "device"):
            column = facts.dtypes if measured == "dtype" else facts.devices
            return Counter(column[row] for row in rows if column[row])
        compared = Compare(measured, "==", Quantity(0.0, "number"), index)  # type: ignore[arg-type]
        amount = amount_of(compared, facts, None)
        return Counter(value for row in rows if (value := amount(row)) is not None)


_INDEXES: WeakKeyDictionary[Facts, GraphIndex] = WeakKeyDictionary()


def index_of(facts: Facts | None) -> GraphIndex | None:
    """The index of a snapshot, made once while its facts are held."""
    if facts is None:
        return None
    if facts not in _INDEXES:
        _INDEXES[facts] = GraphIndex(ref(facts))
    return _INDEXES[facts]
