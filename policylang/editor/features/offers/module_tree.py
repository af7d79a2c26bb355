"""The module paths of a graph as a tree, with how many nodes lie in each module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from attrs import define, field

from policylang.language.globs import NameGlob, is_magic


@define(eq=False)
class ModuleBranch:
    """A module; the root stands for the model."""

    path: str = ""
    children: dict[str, ModuleBranch] = field(factory=dict)
    nodes: int = 0
    """In it or deeper, of all phases."""
    forward: int = 0
    """Of these, the calls of the forward."""

    @property
    def is_numbered(self) -> bool:
        """Whether its children are numbers, as those of a ``ModuleList``."""
        return any(name.isdecimal() for name in self.children)


@define(eq=False)
class ModuleTree:
    """Children stand in the order in which the graph first reaches them."""

    root: ModuleBranch
    by_name: Mapping[str, list[ModuleBranch]]
    """The modules of one name, whatever they are in, the outer ones first."""

    @classmethod
    def of(cls, nodes: Mapping[str, int], forward: Mapping[str, int]) -> ModuleTree:
        """From how many nodes, and how many calls of the forward, each module path has itself."""
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
    """How many nodes, and calls of the forward, lie in any of some modules, of which some may be in others."""
    counts: Counter[str] = Counter()
    paths = {branch.path for branch in branches}
    for branch in branches:
        parents = branch.path.split(".")
        if not any(".".join(parents[:length]) in paths for length in range(1, len(parents))):
            counts["nodes"] += branch.nodes
            counts["forward"] += branch.forward
    return counts["nodes"], counts["forward"]
