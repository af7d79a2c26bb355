"""Compares what runs in a graph with its plan: one comparison for all paths, in the words of each.

What a path has to save and to run again may leave it a choice: a flat graph may read a value that lives on anyway. So
the plan is given as what may happen and what has to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from attrs import field, frozen

from policylang.audit.outcome import Audit, Found, HostCopy
from policylang.graph.facts import Facts, storage_roots
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Rule
from policylang.planning.liveness import Needs, with_cost
from policylang.planning.plan import Plan
from policylang.planning.value_decision import Decision

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
    """Rows of the plan: what may happen, and what has to."""

    may_save: Collection[int]
    must_save: Collection[int]
    may_recompute: Collection[int] = ()
    must_recompute: Collection[int] = ()


@frozen
class Wording:
    """How a path says it. ``{node}`` is what differs, ``{found}`` and ``{expected}`` what it does and was to do."""

    sentence: str
    help: str
    """Of what is said of the nodes of the plan."""
    codes: Mapping[str, str] = field(factory=dict)
    """By code, where a sentence of its own is said."""
    is_brief: bool = False
    """Whether module and line go without saying."""

    def of_node(self, code: str, name: str, found: str = "") -> Diagnostic:
        """Of a node that the plan may not have."""
        return Diagnostic(code, self._text(code).format(node=f"`{name}`", found=found, expected=""))

    def of_row(self, code: str, plan: Plan, row: int, found: str) -> Diagnostic:
        """Of a node of the plan that is not as planned."""
        facts, rule, module = plan.facts, plan.rule_of(row), "" if self.is_brief else plan.facts.modules[row]
        node = f"`{facts.names[row]}` ({facts.targets[row]}){module and f' in {module}'}"
        message = self._text(code).format(node=node, found=found, expected=_planned(plan.decisions[row], rule))
        return Diagnostic(code, message, None if rule is None or self.is_brief else rule.span, self.help)

    def _text(self, code: str) -> str:
        return self.codes.get(code) or _ALL_PATHS.get(code) or self.sentence


def runs_otherwise(
    say: Wording, plan: Plan, expected: Expected, saved: Iterable[int], found: Found
) -> Iterator[Diagnostic]:
    """What is saved, runs again or runs at another place than planned. ``saved``: what crosses by being kept, copies
    on the host included."""
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
    """What runs before something that it reads."""
    return (say.of_node(OUT_OF_ORDER, name, f"before `{read}`, which it reads") for name, read in found.early)


def moves_otherwise(
    say: Wording, plan: Plan, found: Found, moved: Mapping[int, HostCopy | None], unplanned: Iterable[str]
) -> Iterator[Diagnostic]:
    """What of the copies is not as planned. ``moved``: the rows that are to wait on the host, with their copies;
    ``unplanned``: the names of nodes that take part in any other."""
    yield from (say.of_node(RACE, name) for name in found.races)
    yield from (say.of_node(OFFLOADED_UNPLANNED, name) for name in unplanned)
    roots = storage_roots(plan.facts)
    alive = {roots[row] for row in found.saved}
    for row, copy in moved.items():
        root = roots[row]
        if copy is None:
            yield say.of_row(NOT_FREED, plan, row, "was not moved to the host")
        elif copy.awaited > found.begins:
            alive.add(root)
        if root in alive or found.held.get(root, -1) > found.begins:
            yield say.of_row(NOT_FREED, plan, row, "was offloaded and is held on the device all the same")
    for copy in found.copies:
        written = found.written.get(roots[copy.row], -1) if copy.row >= 0 else -1
        if written > copy.started:
            late = f"before `{found.order[written]}`, which writes to what it copies"
            yield say.of_node(OUT_OF_ORDER, found.order[copy.started], late)


def _planned(decision: Decision | None, rule: Rule | None) -> str:
    if decision is None:
        return "nothing of it: it is no forward value"
    verb = "left to the partitioner" if decision.action is None else decision.action.name.lower().replace("_", " ")
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
    """What was read, with what it costs."""
    facts, again = plan.facts, sorted(found.recomputed)
    needs = Needs(saved=tuple(saved), offloaded=tuple(offloaded), recomputed=tuple(again))
    cost = with_cost(needs, facts, plan.block_of, len(plan.block_names))
    return Audit(
        saved=names(facts, saved),
        saved_bytes=cost.saved_bytes,
        recomputed=names(facts, dict.fromkeys(again)),
        recomputed_bytes=cost.recomputed_bytes,
        recomputed_flops=cost.recomputed_flops,
        forward_flops=cost.forward.flops,
        random_states=found.random_states,
        offloaded=names(facts, offloaded),
        offloaded_bytes=cost.offloaded_bytes,
        differences=differences,
    )


def names(facts: Facts, rows: Iterable[int]) -> tuple[str, ...]:
    return tuple(facts.names[row] for row in rows)
