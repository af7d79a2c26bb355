"""Plans policies on snapshots of graphs, and finds what does not fit between policy and graph."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve

from policylang.errors import PolicyGraphError
from policylang.graph.any_form import read_any
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.textual import GraphBuilder
from policylang.graph.traced_device import kernel_findings
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic, bounded, diagnose, heeded, is_error, one_cause
from policylang.language.syntax import ExpectTotal, Policy
from policylang.planning import statement_errors
from policylang.planning.capabilities import PathName, capabilities_for, path_entry
from policylang.planning.decisions.rule_warnings import conflicts
from policylang.planning.inspection.costly import costly_rules
from policylang.planning.inspection.worth import slowing_edits
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.planning.refusals import PATH_CANNOT

DEFERRED = "APL315"

GraphLike = str | os.PathLike[str] | Facts


def facts_of(graph: GraphLike) -> Facts:
    """The facts of a graph that is given. Raises ``PolicyGraphError`` for a file that holds none."""
    return graph if isinstance(graph, Facts) else read_any(graph)


def read_graphs(graphs: Sequence[GraphLike]) -> tuple[dict[str, Facts], tuple[Diagnostic, ...]]:
    """The graphs by name, in order, and the diagnostics of those that cannot be read."""
    found: dict[str, Facts] = {}
    problems: list[Diagnostic] = []
    for number, graph in enumerate(graphs):
        if isinstance(graph, Facts):
            found[f"graph {number}"] = graph
            continue
        try:
            found[os.fsdecode(graph)] = read_any(graph)
        except PolicyGraphError as error:
            problems.extend(each.found_in(os.fsdecode(graph)) for each in error.diagnostics)
    return found, tuple(problems)


def on_graph(
    policy: Policy,
    graphs: Mapping[str, Facts],
    path: PathName | None,
    *,
    one_model: bool,
    device: DeviceProfile | None = None,
) -> tuple[tuple[Plan, ...], tuple[Diagnostic, ...]]:
    able = [capabilities_for(facts.kind, path) for facts in graphs.values()]
    plans = tuple(plan(policy, facts, each, device=device) for facts, each in zip(graphs.values(), able, strict=True))
    weighed = [heeded((*slowing_edits(*each), *costly_rules(*each))) for each in zip(plans, able, strict=True)]
    return plans, bounded(tuple(_diagnostics(policy, list(graphs), plans, weighed, one_model)))


def refused_of_any_graph(policy: Policy, path: PathName) -> tuple[Diagnostic, ...]:
    """The errors of a policy on a path whatever the graph. Raises ``ValueError`` for a path that there is not."""
    made = plan(policy, GraphBuilder().facts(GraphKind.JOINT), path_entry(path).capabilities)
    return tuple(each for each in made.diagnostics if each.code == PATH_CANNOT)


def _diagnostics(
    policy: Policy,
    names: Sequence[str],
    plans: Sequence[Plan],
    weighed: Sequence[tuple[Diagnostic, ...]],
    one_model: bool,
) -> Iterable[Diagnostic]:
    waiting = statement_errors.DEFERRED_CODES if one_model and len(plans) > 1 else ()
    for name, made, costly in zip(names, plans, weighed, strict=True):
        for diagnostic in (*findings(made), *costly):
            if diagnostic.code in waiting and is_error(diagnostic):
                continue
            yield diagnostic if len(plans) == 1 else evolve(diagnostic, details=(f"on `{name}`", *diagnostic.details))
    if waiting:
        complaints = [
            (name, statement_errors.complaints(policy, made.diagnostics))
            for name, made in zip(names, plans, strict=True)
        ]
        yield from statement_errors.shared_by_all(policy, complaints, root="layers.0")


def findings(made: Plan) -> tuple[Diagnostic, ...]:
    """All findings of a check of a policy on a graph."""
    deferred = []
    for expectation, planned in zip(made.policy.expectations, made.expectations, strict=True):
        untimed = made.times is None and isinstance(expectation, ExpectTotal) and expectation.of_time
        if planned.status == "deferred" and not untimed:  # that there is no device is an error already
            message = f"`{planned.text}` cannot be checked on a snapshot: {planned.found}"
            deferred.append(diagnose(DEFERRED, message, expectation.span))
    return one_cause(heeded((*kernel_findings(made.facts), *made.diagnostics, *conflicts(made), *deferred)))
