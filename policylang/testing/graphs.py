"""The graphs of a file of policy tests: written in it as ``graph`` blocks, or snapshots beside it."""

from __future__ import annotations

from pathlib import Path

from attrs import define, evolve, field, frozen

from policylang.errors import PolicyGraphError
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.snapshot import SUFFIX, load
from policylang.graph.textual import read_graph
from policylang.language.diagnostics import Diagnostic, Span, diagnose
from policylang.language.wording import did_you_mean, nearest
from policylang.testing.fences import Fence, lifted, lowered_diagnostic

INFO = "APL504"

_KINDS = {kind.value: kind for kind in GraphKind if kind is not GraphKind.BACKWARD}


@frozen(eq=False)
class DrawnGraph:
    """A ``graph`` block. ``facts`` is None where it cannot be read, which has been said then."""

    facts: Facts | None
    section: int


@define(eq=False)
class Graphs:
    """The graphs that the policies of one file may name."""

    folder: Path
    named: dict[str, DrawnGraph] = field(factory=dict)
    latest: DrawnGraph | None = None
    """The last block without a name."""
    problems: list[Diagnostic] = field(factory=list)
    snapshots: dict[str, Facts | None] = field(factory=dict)

    def is_named(self, fence: Fence) -> bool:
        return any(word.text not in _KINDS for word in fence.words[1:])

    def draw(self, fence: Fence) -> None:
        """Read a ``graph`` block."""
        kind, name = None, None
        for word in fence.words[1:]:
            if word.text in _KINDS:
                kind = _KINDS[word.text]
            elif name is None and word.text.isidentifier():
                name = word
            else:
                help = "for example `graph two_layers flat`"
                self.problems.append(diagnose(INFO, f"`{word.text}` says nothing of a graph", word, help=help))
        source = lifted(fence)
        facts, problems = read_graph(source, kind)
        self.problems.extend(lowered_diagnostic(each, fence, source) for each in problems)
        drawn = DrawnGraph(facts, fence.section)
        if name is None:
            self.latest = drawn
        elif name.text in self.named:
            self.problems.append(diagnose(INFO, f"there are two graphs `{name.text}`", name))
        else:
            self.named[name.text] = drawn

    def above(self, fence: Fence) -> DrawnGraph | None:
        """The graph without a name that a policy stands below, under the same heading."""
        return self.latest if self.latest is not None and self.latest.section == fence.section else None

    def find(self, name: str, span: Span) -> DrawnGraph:
        """The graph of a name, else the snapshot of that path."""
        drawn = self.named.get(name)
        if drawn is None and not name.endswith(SUFFIX):
            near = nearest(name, self.named)
            help = did_you_mean(near) or f"a snapshot is a file `*{SUFFIX}`, a graph a block `graph {name}`"
            self.problems.append(diagnose(INFO, f"there is no graph `{name}`", span, help=help))
            return DrawnGraph(None, -1)
        return drawn or DrawnGraph(self._snapshot(name, span), -1)

    def _snapshot(self, name: str, span: Span) -> Facts | None:
        if name not in self.snapshots:
            try:
                self.snapshots[name] = load(self.folder / name)
            except PolicyGraphError as error:
                self.snapshots[name] = None
                self.problems.extend(evolve(each, span=span) for each in error.diagnostics)
        return self.snapshots[name]
