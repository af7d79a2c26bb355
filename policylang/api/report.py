"""Which graphs a thing that the user holds stands for, and what is known of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from policylang.backends.eager.checkpoint import sessions_of
from policylang.backends.eager.session import Session
from policylang.backends.graph_registry import halves_of, outcome_of, plan_of
from policylang.backends.joint import refusals
from policylang.backends.torch_compile.backend import graphs_of
from policylang.backends.torch_compile.custom_partitioner import PolicyPartitioner, reports_of
from policylang.errors import PolicyGraphError
from policylang.report.assemble import partition_report, plan_report
from policylang.report.data import Report


def reports_for(subject: Any) -> list[Report]:
    """One report a graph, in order of compilation. Raises as :func:`policylang.report` does."""
    if isinstance(subject, fx.GraphModule):
        return [_of_graph(subject)]
    if isinstance(subject, PolicyPartitioner):
        return _some(reports_of(subject))
    sessions = sessions_of(subject)
    if sessions:
        found = [*_of_checkpoints(sessions), *_of_compiled_code(subject, sessions)]
    else:
        graphs = graphs_of(subject)
        if graphs is None:
            raise PolicyGraphError([refusals.nothing_to_report(subject)])
        found = [report for graph in graphs for report in graph.reports]
    return _some(found)


def _some(found: Sequence[Report]) -> list[Report]:
    if not found:
        raise PolicyGraphError([refusals.nothing_decided()])
    return list(found)


def _of_checkpoints(sessions: Sequence[Session]) -> list[Report]:
    """One report a block and way in which it was called, in the order of the blocks."""
    regions = [region for session in sessions for region in session.regions.values()]
    kept = [each for region in regions for each in region.kept.values()]
    return [
        partition_report(each.instructions.plan, each.audit) if each.audit else plan_report(each.instructions.plan)
        for each in kept
    ]


def _of_compiled_code(subject: Any, sessions: Sequence[Session]) -> list[Report]:
    """One report a graph that was compiled in checkpoints or around them; those of the whole subject, where it is a
    model of which only parts are checkpoints."""
    compiled = [session for session in sessions if session.compiled]
    if not compiled:
        return []
    modules = [subject] if isinstance(subject, nn.Module) else [block for each in compiled for block in each.regions]
    graphs = dict.fromkeys(graph for module in modules for graph in graphs_of(module) or ())
    if not graphs:  # FSDP hands graphs parameters of its own making
        graphs = dict.fromkeys(graph for session in compiled for graph in session.graphs)
    return [report for graph in graphs for report in graph.reports]


def _of_graph(gm: fx.GraphModule) -> Report:
    outcome = outcome_of(gm)
    if outcome is not None:
        plan, audit, _ = outcome
        return partition_report(plan, audit, halves_of(gm))
    applied = plan_of(gm)
    if applied is None:
        raise PolicyGraphError([refusals.no_policy()])
    return plan_report(applied)
