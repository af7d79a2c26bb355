"""The operators, groups, modules and values that a policy can name in a graph, counted once for each snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from weakref import ReferenceType, WeakKeyDictionary, ref

from attrs import define, field, frozen

from policylang.graph.blocks import blocks_of
from policylang.graph.chains import Chains
from policylang.graph.facts import Facts
from policylang.language.globs import NameGlob, is_magic
from policylang.language.operators import group_names, prelude_group
from policylang.language.resources import manifest
from policylang.language.syntax import Compare, Quantity
from policylang.planning.selection.selectors import Selections, amount_of, split_target
from policylang.planning.value_outcome import own_bytes


@define(eq=False)
class ModuleBranch:
    """A module; the root is the model."""

    path: str = ""
    children: dict[str, ModuleBranch] = field(factory=dict)
    nodes: int = 0
    """Nodes in it or deeper, of all phases."""
    forward: int = 0
    """The calls of the forward among these."""

    @property
    def is_numbered(self) -> bool:
        """True if its children are numbers, as those of a ``ModuleList``."""
        return any(name.isdecimal() for name in self.children)


@define(eq=False)
class ModuleTree:
    """Children are in the order in which the graph first reaches them."""

    root: ModuleBranch
    by_name: Mapping[str, list[ModuleBranch]]
    """The modules of one name, whatever they are in, the outer ones first."""

    @classmethod
    def of(cls, nodes: Mapping[str, int], forward: Mapping[str, int]) -> ModuleTree:
        """The tree of the nodes, and the calls of the forward, that each module path has itself."""
        root = ModuleBranch()
        for path, count in nodes.items():
            calls = forward.get(path, 0)
            at = root
            at.nodes, at.forward = at.nodes + count, at.forward + calls
            for name in path.split(".") if path else ():
                below = at.children.get(name)
                if below is None:
                    below = at.children[name] = ModuleBranch(f"{at.path}.{name}" if at.path else name)
                at = below
                at.nodes, at.forward = at.nodes + count, at.forward + calls
        by_name: dict[str, list[ModuleBranch]] = {}
        level = [root]
        while level:
            level = [child for branch in level for child in branch.children.values()]
            for branch in level:
                by_name.setdefault(branch.path.rpartition(".")[2], []).append(branch)
        return cls(root, by_name)

    def reached(self, components: Sequence[str], *, anchored: bool) -> list[ModuleBranch]:
        """The modules that the first components of a glob lead to (:class:`~policylang.language.globs.PathGlob`)."""
        found = [self.root]
        if not anchored and components:
            first, *components = components
            found = self._named(first)
        for component in components:
            found = _step(found, component)
        return found

    def _named(self, pattern: str) -> list[ModuleBranch]:
        if not is_magic(pattern):
            return self.by_name.get(pattern, [])
        glob = NameGlob(pattern)
        return [branch for name, branches in self.by_name.items() if glob.matches(name) for branch in branches]


def _step(branches: Iterable[ModuleBranch], component: str) -> list[ModuleBranch]:
    if component == "**":
        return list(dict.fromkeys(below for branch in branches for below in _all(branch)))
    if not is_magic(component):
        return [branch.children[component] for branch in branches if component in branch.children]
    glob = NameGlob(component)
    return [child for branch in branches for name, child in branch.children.items() if glob.matches(name)]


def _all(branch: ModuleBranch) -> list[ModuleBranch]:
    """The module itself and all in it."""
    found = [branch]
    for each in found:  # grows as it is walked
        found.extend(each.children.values())
    return found


def counted_once(branches: Iterable[ModuleBranch]) -> tuple[int, int]:
    """Count nodes, and calls of the forward, in some modules, nested ones once."""
    counts: Counter[str] = Counter()
    paths = {branch.path for branch in branches}
    for branch in branches:
        parents = branch.path.split(".")
        if not any(".".join(parents[:length]) in paths for length in range(1, len(parents))):
            counts["nodes"] += branch.nodes
            counts["forward"] += branch.forward
    return counts["nodes"], counts["forward"]


@frozen
class Count:
    """Nodes of all phases, and of these the calls of the forward, which rules are about."""

    nodes: int = 0
    forward: int = 0
    bytes: int = 0
    """That the calls of the forward allocate."""

    def __add__(self, other: Count) -> Count:
        return Count(self.nodes + other.nodes, self.forward + other.forward, self.bytes + other.bytes)

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
    _values: dict[tuple[str, int | None], Counter[float] | Counter[str]] = field(factory=dict)

    @property
    def facts(self) -> Facts:
        """The caller holds them: an index that held them would keep its cache entry alive, and with it every
        snapshot."""
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
    return _INDEXES.setdefault(facts, GraphIndex(ref(facts)))
