"""What is known of one version of one open document: its text, and what it comes to on the snapshot.

States are immutable and belong together: no answer mixes a text with a plan of another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from attrs import evolve, field, frozen
from lsprotocol import types

from policylang.api.load import operators_at_hand, operators_in
from policylang.api.planned_graphs import PathName, on_graph
from policylang.editor.positions import Positions
from policylang.graph.facts import Facts
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic, Source
from policylang.language.loader import Expansion, Loaded, Reader, load_expanded
from policylang.language.parser import parse_file
from policylang.language.public_names import SELDOM_IN_GRAPHS
from policylang.language.syntax import Bucket, ExpectTotal, File
from policylang.planning.capabilities import capabilities_for
from policylang.planning.inspection.breakdown import Breakdown, RuleAmounts, amounts_of_rules, breakdown
from policylang.planning.inspection.communication import Communication
from policylang.planning.inspection.explain import PolicyIndex
from policylang.planning.inspection.worth import Worth, weighed, worth_of_rules
from policylang.planning.plan import Plan
from policylang.planning.selection.selectors import Selections, selections_for

_OF_OPERATORS = frozenset(("APL101", "APL102", SELDOM_IN_GRAPHS))


@frozen(slots=False)
class Document:
    """One version of an open document. ``path`` is None for a text that is in no file (``untitled:``)."""

    uri: str
    version: int
    source: Source
    """Its name is what messages call the file: relative to the workspace where it lies in one."""
    path: Path | None = None
    encoding: types.PositionEncodingKind = types.PositionEncodingKind.Utf16

    @cached_property
    def positions(self) -> Positions:
        return Positions(self.source.text, self.encoding)


@frozen(slots=False)
class TextState:
    """What a text says by itself; made in milliseconds."""

    loaded: Loaded
    """The policy, or why there is none; its diagnostics are those of ``policylang check``."""
    expansion: Expansion
    """Its statements with those of the files that it includes, as written: no name is looked up there."""
    source: Source
    unsettled: bool = False
    """Whether a graph that is still being read may know operators that are unknown here."""

    @cached_property
    def file(self) -> File:
        """The statements of the document itself that can be read, its includes among them."""
        return parse_file(self.source)[0]


@frozen(slots=False)
class GraphState:
    """What a policy comes to on a snapshot, as ``policylang check --graph`` and ``plan`` say it."""

    name: str
    """Of the snapshot, as the settings give it."""
    facts: Facts
    plan: Plan
    diagnostics: tuple[Diagnostic, ...]
    """Those of the plan, without those of the text."""
    path: PathName | None = None

    @cached_property
    def breakdown(self) -> Breakdown:
        return breakdown(self.plan)

    @cached_property
    def worth(self) -> tuple[Worth, ...]:
        """Of each rule that decides something; takes a plan a rule."""
        return worth_of_rules(self.plan, capabilities_for(self.facts.kind, self.path))

    @cached_property
    def order(self) -> Communication | None:
        """What the scheduling lines come to, and each is worth; takes an order a line, where there is a device."""
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
        """What the values that a rule decides come to, by ``file:line``."""
        return amounts_of_rules(self.breakdown)

    @cached_property
    def index(self) -> PolicyIndex:
        return PolicyIndex(self.plan.policy)

    def knows(self, *names: Literal["breakdown", "amounts", "worth", "order", "selections"]) -> bool:
        """Whether these have been worked out. The event loop asks before it reads one: none is worked out there."""
        return all(name in self.__dict__ for name in names)

    def look(self) -> None:
        """Work out what hovers and hints show at once; takes a few passes over the graph."""
        _ = self.selections, self.breakdown, self.amounts, self.index

    def steps_of_weighing(self) -> tuple[Callable[[], object], ...]:
        """What works out the rest of what they show: after each there is more."""
        worth, order = (lambda: self.worth), (lambda: self.order)
        return (*([worth] if self.plan.rules else ()), *([order] if self.plan.order is not None else ()))

    def weigh(self) -> None:
        for step in self.steps_of_weighing():
            step()


@frozen(slots=False)
class State:
    """What an answer is made from. ``graph`` is None where no snapshot is set, none can be read, or the text has
    errors."""

    document: Document
    text: TextState
    graph: GraphState | None = None
    facts: Facts | None = None
    """Of the snapshot, also where the text has errors: what completion offers."""
    problems: tuple[Diagnostic, ...] = field(default=())
    """Of the settings and the snapshot: why it cannot be read."""
    plans: bool = True
    """Whether the settings allow for a plan: not where the path or the device that they name is none."""
    early: tuple[Diagnostic, ...] = ()
    """Of the plan while it is made: what holds whatever the order of its collectives comes to."""

    @property
    def can_plan(self) -> bool:
        return self.facts is not None and self.plans and self.text.loaded.policy is not None

    @property
    def diagnostics(self) -> Sequence[Diagnostic]:
        """As ``policylang check`` says them: of the snapshot, of the text, of both together."""
        said = self.text.loaded.diagnostics
        if self.facts is not None:
            said = tuple(each for each in said if each.code != SELDOM_IN_GRAPHS)
        planned = self.early if self.graph is None else self.graph.diagnostics
        return tuple(dict.fromkeys((*self.problems, *said, *planned)))


def read_text(document: Document, facts: Facts | None, read: Reader) -> TextState:
    """``read`` gives the text of an included file: that of an open document where there is one."""
    operators = operators_at_hand(met=() if facts is None else operators_in(facts))
    loaded, expansion = load_expanded(document.source, document.path, operators=operators, read=read)
    return TextState(loaded, expansion, document.source)


def unsettled(text: TextState) -> TextState:
    """The same while a graph is read: without complaints about operators that it may know."""
    said = tuple(each for each in text.loaded.diagnostics if each.code not in _OF_OPERATORS)
    return evolve(text, loaded=evolve(text.loaded, diagnostics=said), unsettled=True)


def before_the_order(
    text: TextState, facts: Facts, name: str, path: PathName | None, device: DeviceProfile | None
) -> tuple[Diagnostic, ...] | None:
    """What is wrong between a policy and a graph whatever order its scheduling lines come to, which takes a second on
    a large graph; None for a policy without any. All of it is in the diagnostics of :func:`read_graph` too."""
    policy = text.loaded.policy
    if policy is None or not policy.orders or not capabilities_for(facts.kind, path).orders:
        return None
    rewrites = tuple(each for each in policy.rewrites if not isinstance(each, Bucket))
    expectations = tuple(each for each in policy.expectations if not isinstance(each, ExpectTotal))
    plain = evolve(policy, rewrites=rewrites, scheduling=(), expectations=expectations)
    _, found = on_graph(plain, {name: facts}, path, one_model=False, device=device)
    return found


def read_graph(
    text: TextState,
    facts: Facts,
    name: str,
    path: PathName | None,
    device: DeviceProfile | None,
) -> GraphState | None:
    """The plan of a text; None of one with errors."""
    if text.loaded.policy is None:
        return None
    (plan,), found = on_graph(text.loaded.policy, {name: facts}, path, one_model=False, device=device)
    return GraphState(name, facts, plan, found, path)
