"""Compares what runs in a graph with its plan: one comparison for all paths, in the words of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from attrs import define, field, frozen

from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Rule
from policylang.planning.liveness import SavedForBackward, with_cost
from policylang.planning.plan import Plan
from policylang.planning.value_outcome import KEPT, Decision, Outcome, saved_as


@frozen
class HostCopy:
    """A value that is copied to the host. ``started`` and ``awaited`` are positions."""

    row: int
    """The row of the value; -1 if the plan lacks it."""
    value: str
    host: str
    """The node that returns the copy once it is awaited."""
    started: int
    awaited: int
    fetched: bool
    """Something reads it on the device afterwards."""


@define
class Found:
    """The nodes that run, read off the actual graph. Values are nodes of the planned facts; positions are indices into
    ``order``."""

    order: list[str] = field(factory=list)
    """The nodes, as they run."""
    begins: int = 0
    """The position of the first backward node."""
    crossing: dict[int, int] = field(factory=dict)
    """Forward values and inputs that the backward reads, recomputation included, by the last position that reads
    them."""
    saved: list[int] = field(factory=list)
    """The tensors among these that the forward computes, in graph order."""
    held: dict[int, int] = field(factory=dict)
    """By allocating node, the last position at which the forward, or an output, reads its memory."""
    written: dict[int, int] = field(factory=dict)
    """By allocating node, the last position at which the forward writes its memory in place."""
    recomputed: list[int] = field(factory=list)
    """Recomputed nodes, in execution order, with repetitions."""
    twice: list[int] = field(factory=list)
    """Recomputations beyond the first in one backward region, which is a stretch between two forward operators."""
    redrawn: list[int] = field(factory=list)
    """Recomputations that do not start from the random state of the first run."""
    rewritten: list[int] = field(factory=list)
    """Recomputed operators that write to memory that was not recomputed."""
    random_states: int = 0
    early: list[tuple[str, str]] = field(factory=list)
    """Nodes that run before a node they read, and that node."""
    swapped: dict[str, str] = field(factory=dict)
    """First runs with an effect, to one that runs before them and follows them in the plan."""
    unknown: list[str] = field(factory=list)
    """Nodes that the plan does not have; of a partition, those with an effect."""
    kept_unknown: list[str] = field(factory=list)
    """Forward outputs for the backward that the plan does not have or the backward does not take."""
    places: dict[int, tuple[int, int]] = field(factory=dict)
    """By node that crosses between the two graphs, its output number in one and its input number in the other."""
    copies: list[HostCopy] = field(factory=list)
    unsent: list[str] = field(factory=list)
    """Nodes that copy back a value that is not passed as a copy on the host."""
    races: list[str] = field(factory=list)
    """Nodes that start, take or read a copy without the wait that makes it safe."""


@frozen
class Audit:
    """The saved and recomputed values of a partition, by node name in graph order, and differences from the plan."""

    saved: tuple[str, ...]
    """Values of the forward kept for the backward; no graph inputs, no symbolic sizes."""
    saved_bytes: int
    """Bytes of distinct storages."""
    recomputed: tuple[str, ...]
    """Forward operators that the backward recomputes."""
    recomputed_bytes: int
    recomputed_flops: int
    forward_flops: int
    random_states: int
    """Generator states kept so that recomputed random operators draw the same numbers."""
    differences: tuple[Diagnostic, ...] = field(default=())
    offloaded: tuple[str, ...] = ()
    """Values that are on the host between their last forward and their first backward use; none of ``saved``."""
    offloaded_bytes: int = 0

    @property
    def agrees(self) -> bool:
        return not self.differences


SAVED_UNPLANNED = "APL401"
NOT_SAVED = "APL402"
RECOMPUTED_UNPLANNED = "APL403"
NOT_RECOMPUTED = "APL404"
NOT_CONNECTED = "APL405"
EFFECT_REPEATED = "APL406"
RANDOM_AGAIN = "APL407"
OUT_OF_ORDER = "APL410"
OFFLOADED_UNPLANNED = "APL411"
NOT_FREED = "APL412"
RACE = "APL413"

_TWICE = "was recomputed more than once for the same part of the backward"
_ALL_PATHS = {
    NOT_CONNECTED: "the graph has a node {node}, which the graph that was planned does not have",
    OUT_OF_ORDER: "{node} runs {found}, which is not the order of the plan",
    RACE: "{node} is part of a copy to the host or back that is not awaited as it has to be",
}


@frozen
class Expected:
    """Nodes of the plan: what may happen, and what has to."""

    may_save: Collection[int]
    must_save: Collection[int]
    may_recompute: Collection[int] = ()
    must_recompute: Collection[int] = ()


@frozen
class Wording:
    """A path's sentences. ``{node}`` is the node that differs, ``{found}`` and ``{expected}`` its actual and planned
    treatment."""

    sentence: str
    help: str
    """For differences in nodes of the plan."""
    codes: Mapping[str, str] = field(factory=dict)
    """By code, a specific sentence."""
    is_brief: bool = False
    """Leaves out module and line."""

    def of_node(self, code: str, name: str, found: str = "") -> Diagnostic:
        """A difference in a node that the plan may not have."""
        return Diagnostic(code, self._text(code).format(node=f"`{name}`", found=found, expected=""))

    def of_row(self, code: str, plan: Plan, row: int, found: str) -> Diagnostic:
        """A difference in a node of the plan."""
        facts, rule, module = plan.facts, plan.rule_of(row), "" if self.is_brief else plan.facts.modules[row]
        node = f"`{facts.names[row]}` ({facts.targets[row]}){module and f' in {module}'}"
        message = self._text(code).format(node=node, found=found, expected=_planned(plan.decisions[row], rule))
        return Diagnostic(code, message, None if rule is None or self.is_brief else rule.span, self.help)

    def _text(self, code: str) -> str:
        return self.codes.get(code) or _ALL_PATHS.get(code) or self.sentence


def runs_otherwise(
    say: Wording, plan: Plan, expected: Expected, saved: Iterable[int], found: Found
) -> Iterator[Diagnostic]:
    """Values saved, recomputed or placed otherwise than planned. ``saved``: values kept for the backward, host copies
    included."""
    now, again = frozenset(saved), frozenset(found.recomputed)
    for code, rows, happened in (
        (SAVED_UNPLANNED, now.difference(expected.may_save), "was saved"),
        (NOT_SAVED, frozenset(expected.must_save) - now - found.crossing.keys(), "was not saved"),
        (RECOMPUTED_UNPLANNED, again.difference(expected.may_recompute), "was recomputed"),
        (RECOMPUTED_UNPLANNED, frozenset(found.twice), _TWICE),
        (NOT_RECOMPUTED, frozenset(expected.must_recompute) - again, "was not recomputed"),
        (RANDOM_AGAIN, frozenset(found.redrawn), "draws new random numbers"),
        (EFFECT_REPEATED, frozenset(found.rewritten), "writes a second time"),
    ):
        yield from (say.of_row(code, plan, row, happened) for row in sorted(rows))
    yield from (say.of_node(NOT_CONNECTED, name) for name in found.unknown)
    yield from (say.of_node(OUT_OF_ORDER, name, f"after `{other}`") for name, other in found.swapped.items())


def reads_otherwise(say: Wording, found: Found) -> Iterator[Diagnostic]:
    """Nodes that run before something they read."""
    return (say.of_node(OUT_OF_ORDER, name, f"before `{read}`, which it reads") for name, read in found.early)


def moves_otherwise(
    say: Wording, plan: Plan, found: Found, moved: Mapping[int, HostCopy | None], unplanned: Iterable[str]
) -> Iterator[Diagnostic]:
    """Copies that are not as planned. ``moved``: the nodes that are to wait on the host, with their copies;
    ``unplanned``: the names of nodes that take part in any other copy."""
    yield from (say.of_node(RACE, name) for name in found.races)
    yield from (say.of_node(OFFLOADED_UNPLANNED, name) for name in unplanned)
    roots = plan.facts.storage_roots
    alive = {roots[row] for row in found.saved}
    for row, copy in moved.items():
        root = roots[row]
        if copy is None:
            yield say.of_row(NOT_FREED, plan, row, f"was not {_outcome(plan, row).moves}")
        elif copy.awaited > found.begins:
            alive.add(root)
        if root in alive or found.held.get(root, -1) > found.begins:
            yield say.of_row(
                NOT_FREED, plan, row, f"was {_outcome(plan, row).word} and is held on the device all the same"
            )
    for copy in found.copies:
        written = found.written.get(roots[copy.row], -1) if copy.row >= 0 else -1
        if written > copy.started:
            late = f"before `{found.order[written]}`, which writes to what it copies"
            yield say.of_node(OUT_OF_ORDER, found.order[copy.started], late)


def _outcome(plan: Plan, row: int) -> Outcome:
    decision = plan.decisions[row]
    return KEPT if decision is None else decision.outcome


def _planned(decision: Decision | None, rule: Rule | None) -> str:
    if decision is None:
        return "nothing of it: it is no forward value"
    verb = decision.outcome.phrase if decision.action is None else decision.action.word.replace("_", " ")
    if rule is not None:
        return f"{verb} (`{rule.text}`, {rule.source})"
    return f"{verb} ({decision.reason or decision.why.value})"


def summary(
    plan: Plan,
    found: Found,
    differences: tuple[Diagnostic, ...],
    *,
    saved: Sequence[int],
    offloaded: Sequence[int] = (),
) -> Audit:
    """The audit with its costs."""
    facts, again = plan.facts, sorted(found.recomputed)
    kept = {outcome: tuple(rows) for outcome, rows in saved_as(saved, plan.decisions).items()}
    needs = SavedForBackward({**SavedForBackward.of((), again, offloaded).rows, **kept})
    cost = with_cost(needs, facts, plan.block_of, len(plan.block_names))
    return Audit(
        saved=names(facts, saved),
        saved_bytes=cost.saved_bytes,
        recomputed=names(facts, dict.fromkeys(again)),
        recomputed_bytes=cost.recomputed_bytes,
        recomputed_flops=cost.recomputed_flops,
        forward_flops=cost.forward("flops")[0],
        random_states=found.random_states,
        offloaded=names(facts, offloaded),
        offloaded_bytes=cost.offloaded_bytes,
        differences=differences,
    )


def names(facts: Facts, rows: Iterable[int]) -> tuple[str, ...]:
    return tuple(facts.names[row] for row in rows)
