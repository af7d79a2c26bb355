"""The proof: what the two graphs that came out really save and recompute, held against the plan.

Reads the graphs alone. What crosses from the forward to the backward is what the forward returns beyond its own
outputs; what is recomputed is every forward operator that stands in the backward, inside the wrappers that replay
random numbers too. Nothing the partitioner noted down is taken on trust.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import field, frozen
from torch import fx

from policylang.audit.random_draws import is_random_state, is_replay, replayed
from policylang.graph.facts import Facts, Flag, Phase
from policylang.language.diagnostics import Diagnostic
from policylang.planning.liveness import Needs, with_cost
from policylang.planning.plan import Decision, Plan, Why

SAVED_UNPLANNED = "APL401"
NOT_SAVED = "APL402"
RECOMPUTED_UNPLANNED = "APL403"
NOT_RECOMPUTED = "APL404"
NOT_CONNECTED = "APL405"
OFFLOADED_UNPLANNED = "APL411"
NOT_FREED = "APL412"
RACE = "APL413"


@frozen
class Audit:
    """What a partition came to, by node name in graph order, and where it differs from its plan."""

    saved: tuple[str, ...]
    """Values of the forward kept for the backward, ``auto_saved`` included; no graph inputs, no symbolic sizes."""
    saved_bytes: int
    """Of the distinct memory they keep alive."""
    recomputed: tuple[str, ...]
    """Forward operators that run again in the backward, ``auto_recomputed`` included."""
    recomputed_bytes: int
    recomputed_flops: int
    forward_flops: int
    auto_saved: tuple[str, ...]
    """Those of ``saved`` that PyTorch's min-cut chose."""
    auto_saved_bytes: int
    auto_recomputed: tuple[str, ...]
    """Those of ``recomputed`` that PyTorch's min-cut chose."""
    inputs: tuple[str, ...]
    """Graph inputs that the backward reads; they are alive anyway."""
    symbolic: tuple[str, ...]
    """Sizes kept as numbers."""
    random_states: int
    """Generator states kept so that recomputed random operators draw the same numbers."""
    saved_bytes_by_block: tuple[int, ...] = ()
    recomputed_flops_by_block: tuple[int, ...] = ()
    differences: tuple[Diagnostic, ...] = field(default=())
    offloaded: tuple[str, ...] = ()
    """Values that are on the host between their last forward and their first backward use; none of ``saved``."""
    offloaded_bytes: int = 0

    @property
    def agrees(self) -> bool:
        return not self.differences


@frozen
class _Found:
    """What was read off the graphs, as rows of the facts."""

    kept: list[int]
    """Values computed by the forward that cross."""
    inputs: list[int]
    symbolic: list[int]
    recomputed: list[int]
    random_states: int
    unknown: list[str]


def audit(plan: Plan, needs: Needs, forward: fx.Graph, backward: fx.Graph, *, num_fwd_outputs: int) -> Audit:
    """Compare a partition with what its plan came to.

    ``plan`` is the plan as it stood when the graph was split and ``needs`` what follows from it
    (:func:`policylang.planning.liveness.backward_needs`). Differences are returned, not raised. What is offloaded still
    crosses as a value of the device here; :func:`policylang.audit.offload.wrongly_moved` looks at its copies.
    """
    facts = plan.facts
    found = _read(facts, needs, forward, backward, num_fwd_outputs)
    by_auto = _left_to_min_cut(plan)
    to_host = frozenset(needs.offloaded)
    moved = [row for row in found.kept if row in to_host]
    saved = [row for row in found.kept if row not in to_host]
    auto_saved = [row for row in saved if by_auto(row)]
    actual = Needs(saved=tuple(saved), offloaded=tuple(moved), recomputed=tuple(found.recomputed))
    cost = with_cost(actual, facts, plan.block_of, len(plan.block_names))
    auto_cost = with_cost(Needs(saved=tuple(auto_saved)), facts, (), 0)
    return Audit(
        saved=_names(facts, saved),
        saved_bytes=cost.saved_bytes,
        recomputed=_names(facts, found.recomputed),
        recomputed_bytes=cost.recomputed_bytes,
        recomputed_flops=cost.recomputed_flops,
        forward_flops=cost.forward_flops,
        auto_saved=_names(facts, auto_saved),
        auto_saved_bytes=auto_cost.saved_bytes,
        auto_recomputed=_names(facts, [row for row in found.recomputed if by_auto(row)]),
        inputs=_names(facts, found.inputs),
        symbolic=_names(facts, found.symbolic),
        random_states=found.random_states,
        saved_bytes_by_block=cost.saved_bytes_by_block,
        recomputed_flops_by_block=cost.recomputed_flops_by_block,
        offloaded=_names(facts, moved),
        offloaded_bytes=cost.offloaded_bytes,
        differences=_differences(plan, needs, found),
    )


def _left_to_min_cut(plan: Plan) -> Callable[[int], bool]:
    def by_auto(row: int) -> bool:
        decision = plan.decisions[row]
        return plan.undecided == "auto" and decision is not None and decision.why is Why.UNDECIDED

    return by_auto


def _names(facts: Facts, rows: Iterable[int]) -> tuple[str, ...]:
    return tuple(facts.names[row] for row in rows)


# --- reading the graphs --------------------------------------------------------------------------------------------


def _read(facts: Facts, needs: Needs, forward: fx.Graph, backward: fx.Graph, num_fwd_outputs: int) -> _Found:
    index = facts.index
    saved: list[int] = []
    inputs: list[int] = []
    symbolic: list[int] = []
    unknown: list[str] = []
    states = 0
    arrives = {node.name for node in backward.find_nodes(op="placeholder")}
    kept = returned(forward)[num_fwd_outputs:]
    for value in kept:
        if is_random_state(value):
            states += 1
            continue
        row = index.get(value.name) if isinstance(value, fx.Node) else None
        if row is None or value.name not in arrives:
            unknown.append(str(value))
        elif facts.flags[row] & Flag.SYMBOLIC:
            symbolic.append(row)
        elif facts.phases[row] == Phase.INPUT:
            inputs.append(row)
        else:
            saved.append(row)
    states += sum(1 for node in forward.find_nodes(op="placeholder") if node.name not in index)
    recomputed = sorted(_recomputed(facts, needs, kept, forward, backward))
    return _Found(sorted(saved), sorted(inputs), sorted(symbolic), recomputed, states, unknown)


def returned(graph: fx.Graph) -> Sequence[Any]:
    """What a graph returns, in order."""
    values = graph.output_node().args[0]
    return values if isinstance(values, list | tuple) else (values,)


def _recomputed(facts: Facts, needs: Needs, kept: Sequence[Any], forward: fx.Graph, backward: fx.Graph) -> list[int]:
    """The forward rows among the backward's operators, by name, and those that draw inside a wrapper."""
    index, phases = facts.index, facts.phases
    calls = (index.get(node.name) for node in backward.nodes if node.op == "call_function" and not is_replay(node))
    plain = [row for row in calls if row is not None and phases[row] == Phase.FORWARD]
    in_plain = set(plain)
    random = [row for row in needs.recomputed if facts.flags[row] & Flag.RANDOM and row not in in_plain]
    return plain + replayed(facts, random, kept, forward, backward)


# --- comparing -----------------------------------------------------------------------------------------------------


def _differences(plan: Plan, needs: Needs, found: _Found) -> tuple[Diagnostic, ...]:
    planned_saved, planned_recomputed = {*needs.saved, *needs.offloaded}, set(needs.recomputed)
    really_saved, really_recomputed = set(found.kept), set(found.recomputed)
    differences: list[Diagnostic] = []
    for row in sorted(really_saved - planned_saved):
        differences.append(difference(SAVED_UNPLANNED, plan, row, "was saved"))
    for row in sorted(planned_saved - really_saved):
        differences.append(difference(NOT_SAVED, plan, row, "was not saved"))
    for row in sorted(really_recomputed - planned_recomputed):
        differences.append(difference(RECOMPUTED_UNPLANNED, plan, row, "was recomputed"))
    for row in sorted(planned_recomputed - really_recomputed):
        differences.append(difference(NOT_RECOMPUTED, plan, row, "was not recomputed"))
    for name in found.unknown:
        message = f"the forward keeps `{name}` for the backward, which the graph that was planned does not have"
        differences.append(Diagnostic(NOT_CONNECTED, message))
    return tuple(differences)


def difference(code: str, plan: Plan, row: int, happened: str) -> Diagnostic:
    """A node that did not become what was planned."""
    facts = plan.facts
    decision = plan.decisions[row]
    where = f" in {facts.modules[row]}" if facts.modules[row] else ""
    rule = plan.policy.rules[decision.rule] if decision is not None and decision.rule is not None else None
    return Diagnostic(
        code,
        f"`{facts.names[row]}` ({facts.targets[row]}){where} {happened}; the plan says {_planned(plan, decision)}",
        span=rule.span if rule is not None else None,
        help="the graph was changed after it was planned, or torch's extraction is not the one policylang knows",
    )


def _planned(plan: Plan, decision: Decision | None) -> str:
    if decision is None:
        return "nothing of it: it is no forward value"
    verb = "left to the partitioner" if decision.action is None else decision.action.name.lower().replace("_", " ")
    if decision.rule is not None:
        rule = plan.policy.rules[decision.rule]
        return f"{verb} (`{rule.text}`, {rule.source})"
    return f"{verb} ({decision.reason or decision.why.value})"
