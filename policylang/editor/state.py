"""One version of an open document: its positions, its text, its plan on the snapshot, and what the snapshot names."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

from attrs import define, evolve, field, frozen
from lsprotocol import types

from policylang.api.load import operators_at_hand
from policylang.api.planned_graphs import on_graph
from policylang.graph.blocks import Chains, blocks_of
from policylang.graph.facts import Facts
from policylang.language import syntax
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import bundled_devices, find_device
from policylang.language.diagnostics import Diagnostic, Source, Span
from policylang.language.files import bundled_file
from policylang.language.globs import NameGlob, is_magic
from policylang.language.loader import Expansion, Loaded, Reader, load_expanded
from policylang.language.names import SELDOM_IN_GRAPHS
from policylang.language.operators import group_names, prelude_group
from policylang.language.parser import parse_file
from policylang.language.resources import devices_folder, manifest
from policylang.language.syntax import Compare, File, Quantity
from policylang.planning.capabilities import PathName, capabilities_for
from policylang.planning.inspection.breakdown import Breakdown, RuleAmounts, amounts_of_rules, breakdown
from policylang.planning.inspection.communication import Communication
from policylang.planning.inspection.worth import PolicyIndex, Worth, weighed, worth_of_rules
from policylang.planning.plan import Plan
from policylang.planning.selection.selectors import Selections, amount_of, selections_for, split_target
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
    """The bytes that the calls of the forward allocate."""

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
        """The caller holds them: an index that held them would keep its cache entry, and with it every snapshot."""
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
    return None if facts is None else _INDEXES.setdefault(facts, GraphIndex(ref(facts)))


_LINE_END = re.compile(r"\r\n|\r|\n")
_UNITS = {
    types.PositionEncodingKind.Utf8: "utf-8",
    types.PositionEncodingKind.Utf16: "utf-16-le",
    types.PositionEncodingKind.Utf32: "utf-32-le",
}
_WIDTH = {types.PositionEncodingKind.Utf8: 1, types.PositionEncodingKind.Utf16: 2, types.PositionEncodingKind.Utf32: 4}


@frozen(slots=False)
class Positions:
    """Places in a text as the language counts them, in characters, and as the protocol does, in code units of a line.

    The protocol counts in UTF-16 unless a client asks for UTF-8 or UTF-32. A line ends with ``\\n``, ``\\r\\n`` or
    ``\\r`` there, and with nothing else.
    """

    text: str = field(repr=False)
    encoding: types.PositionEncodingKind = types.PositionEncodingKind.Utf16

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(found.end() for found in _LINE_END.finditer(self.text))]

    def position(self, offset: int) -> types.Position:
        """The position of a character offset; one beyond the text is its end."""
        offset = max(0, min(offset, len(self.text)))
        line = bisect_right(self._starts, offset) - 1
        return types.Position(line, self._units(self.text[self._starts[line] : offset]))

    def offset(self, position: types.Position) -> int:
        """The character offset of a position: behind its line or the text, the end; in a character, its start."""
        if position.line >= len(self._starts):
            return len(self.text)
        start = self._starts[position.line]
        end = self._starts[position.line + 1] if position.line + 1 < len(self._starts) else len(self.text)
        line = self.text[start:end].rstrip("\r\n")
        if self.encoding is types.PositionEncodingKind.Utf32 or line.isascii():
            return start + min(position.character, len(line))
        units = 0
        for index, character in enumerate(line):
            units += self._units(character)
            if units > position.character:
                return start + index
        return start + len(line)

    def lines(self) -> list[str]:
        """The lines of the text without their ends."""
        return _LINE_END.split(self.text)

    def range(self, span: Span) -> types.Range:
        return self.between(span.start, span.end)

    def between(self, start: int, end: int) -> types.Range:
        """The range between two character offsets."""
        return types.Range(self.position(start), self.position(end))

    def _units(self, text: str) -> int:
        if self.encoding is types.PositionEncodingKind.Utf32 or text.isascii():
            return len(text)
        return len(text.encode(_UNITS[self.encoding], "surrogatepass")) // _WIDTH[self.encoding]


def changed_text(
    text: str,
    changes: Sequence[types.TextDocumentContentChangeEvent],
    encoding: types.PositionEncodingKind = types.PositionEncodingKind.Utf16,
) -> str:
    """A text after changes that were made one after the other, of the whole or of parts."""
    for change in changes:
        if isinstance(change, types.TextDocumentContentChangePartial):
            positions = Positions(text, encoding)
            start, end = positions.offset(change.range.start), positions.offset(change.range.end)
            text = text[:start] + change.text + text[max(start, end) :]
        else:
            text = change.text
    return text


_OF_OPERATORS = frozenset(("APL101", "APL102", SELDOM_IN_GRAPHS))


@frozen(slots=False)
class Document:
    """One version of an open document. ``path`` is None for a text that is in no file (``untitled:``)."""

    uri: str
    version: int
    source: Source
    """Its name is the file's in messages: relative to its folder of the workspace."""
    path: Path | None = None
    encoding: types.PositionEncodingKind = types.PositionEncodingKind.Utf16

    @cached_property
    def positions(self) -> Positions:
        return Positions(self.source.text, self.encoding)


@frozen(slots=False)
class TextState:
    """The policy of a text, read without a graph; made in milliseconds."""

    loaded: Loaded
    """The policy, or why there is none; its diagnostics are those of ``policylang check``."""
    expansion: Expansion
    """Its statements with those of the files that it includes, with names unresolved."""
    source: Source

    @cached_property
    def file(self) -> File:
        """The statements of the document itself that can be read, its includes among them."""
        return parse_file(self.source)[0]


@frozen(slots=False)
class GraphState:
    """The plan of a policy on a snapshot, as ``policylang check --graph`` and ``plan`` report it."""

    name: str
    """The snapshot, as the settings name it."""
    facts: Facts
    plan: Plan
    diagnostics: tuple[Diagnostic, ...]
    """The diagnostics of the plan, without those of the text."""
    path: PathName | None = None

    @cached_property
    def breakdown(self) -> Breakdown:
        return breakdown(self.plan)

    @cached_property
    def worth(self) -> tuple[Worth, ...]:
        """The worth of each rule that decides something; takes a plan a rule."""
        return worth_of_rules(self.plan, capabilities_for(self.facts.kind, self.path))

    @cached_property
    def order(self) -> Communication | None:
        """The effect of the scheduling lines, with the worth of each; takes an order a line on a device."""
        found = self.breakdown.communication
        return found and weighed(found, self.plan, capabilities_for(self.facts.kind, self.path))

    @cached_property
    def selections(self) -> Selections:
        """The nodes that the selectors of the policy denote, on the graph that its rewrites leave."""
        policy = self.plan.policy
        found = selections_for(policy, self.plan.facts, times=self.plan.times)
        for selector in (*(let.selector for let in policy.lets.values()), *(rule.selector for rule in policy.rules)):
            found.rows(selector)
        return found

    @cached_property
    def amounts(self) -> Mapping[str, RuleAmounts]:
        """The amounts that each rule decides, by ``file:line``."""
        return amounts_of_rules(self.breakdown)

    @cached_property
    def index(self) -> PolicyIndex:
        return PolicyIndex(self.plan.policy)

    def knows(self, *names: Literal["breakdown", "amounts", "worth", "order", "selections"]) -> bool:
        """True if these have been worked out. The event loop asks before it reads one: none is worked out there."""
        return all(name in self.__dict__ for name in names)

    def look(self) -> None:
        """Work out what hovers and hints show at once; takes a few passes over the graph."""
        _ = self.selections, self.breakdown, self.amounts, self.index

    def steps_of_weighing(self) -> tuple[Callable[[], object], ...]:
        """The slow work for hovers and hints, in steps: after each there is more to show."""
        return (lambda: self.worth), (lambda: self.order)

    def weigh(self) -> None:
        for step in self.steps_of_weighing():
            step()


@frozen
class StaleHint:
    """A hint of the last plan, in a text that has none. Line and column in characters, from 0."""

    line: int
    column: int
    label: str


@frozen(slots=False)
class State:
    """The data of every answer. ``graph`` is None without a snapshot that can be read, or where the text has errors."""

    document: Document
    text: TextState
    graph: GraphState | None = None
    facts: Facts | None = None
    """The facts of the snapshot, also where the text has errors: completion reads them."""
    problems: tuple[Diagnostic, ...] = field(default=())
    """The diagnostics of the settings and of the snapshot."""
    plans: bool = True
    """False where the settings name an unknown path or device."""
    stale: tuple[StaleHint, ...] = field(default=(), repr=False)
    """The hints of the last plan, until there is one of this text."""

    @property
    def can_plan(self) -> bool:
        return self.facts is not None and self.plans and self.text.loaded.policy is not None

    @property
    def diagnostics(self) -> Sequence[Diagnostic]:
        """The diagnostics of ``policylang check``: of the snapshot, of the text, of both together."""
        said = self.text.loaded.diagnostics
        if self.facts is not None:
            said = tuple(each for each in said if each.code != SELDOM_IN_GRAPHS)
        planned = () if self.graph is None else self.graph.diagnostics
        return tuple(dict.fromkeys((*self.problems, *said, *planned)))


def read_text(document: Document, facts: Facts | None, read: Reader) -> TextState:
    """``read`` gives the text of an included file: that of an open document where there is one."""
    operators = operators_at_hand(met=() if facts is None else facts.operators)
    loaded, expansion = load_expanded(document.source, document.path, operators=operators, read=read)
    return TextState(loaded, expansion, document.source)


def unsettled(text: TextState) -> TextState:
    """The text without diagnostics about operators that a graph which is still read may know."""
    said = tuple(each for each in text.loaded.diagnostics if each.code not in _OF_OPERATORS)
    return evolve(text, loaded=evolve(text.loaded, diagnostics=said))


def read_graph(
    text: TextState, facts: Facts, name: str, path: PathName | None, device: DeviceProfile | None
) -> GraphState | None:
    """The plan of a text; None of one with errors."""
    if text.loaded.policy is None:
        return None
    (plan,), found = on_graph(text.loaded.policy, {name: facts}, path, one_model=False, device=device)
    return GraphState(name, facts, plan, found, path)


def location(state: State, span: Span) -> types.Location | None:
    """The location of a span in the document, an included file, the prelude or a device profile; None where the
    text came from no file that is known, a table that a profile names for instance."""
    uri = uri_of(state, span.source)
    return None if uri is None else types.Location(uri, positions_of(state, span.source).range(span))


def uri_of(state: State, source: Source) -> str | None:
    """The address of the file that a source was read from."""
    if source == state.document.source:
        return state.document.uri
    path = path_of_source(state, source.name)
    return None if path is None else uri_of_path(path)


def path_of_source(state: State, name: str) -> Path | None:
    """The path of the file with this name in reports."""
    path = state.text.expansion.files.get(name)
    if path is not None:
        return path
    if name.startswith("<") and name.endswith(">"):
        word = name[1:-1]
        return bundled_file(word) or (devices_folder() / f"{word}.toml" if word in bundled_devices() else None)
    for placed in state.text.expansion.statements:
        if isinstance(placed.statement, syntax.Device) and placed.statement.target == name:
            found = find_device(name, placed.folder)
            return found[0] if isinstance(found, tuple) else None
    beside = Path() if state.document.path is None else state.document.path.parent
    named = beside / name  # the project's settings are called as seen from the document, the client's in full
    return named if "\0" not in name and os.path.isfile(named) else None


def uri_of_path(path: Path) -> str:
    """The address of a file, without ``..``: editors take two spellings of one file for two files."""
    plain = os.path.abspath(path)
    return Path(plain if os.path.realpath(plain) == os.path.realpath(path) else os.path.realpath(path)).as_uri()


def positions_of(state: State, source: Source) -> Positions:
    """The positions of a source, in the encoding of the document."""
    if source == state.document.source:
        return state.document.positions
    return _positions_of_text(source.text, state.document.encoding)


@lru_cache(maxsize=64)
def _positions_of_text(text: str, encoding: types.PositionEncodingKind) -> Positions:
    return Positions(text, encoding)
