"""Findings on what users hold of compiled code and of checkpoints: models, backends, partitioners, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve
from torch import nn

from policylang.backends.eager.checkpoint import sessions_of
from policylang.backends.findings import Findings, findings_of
from policylang.backends.graph_registry import CarriedOut
from policylang.backends.torch_compile.backend import graphs_of
from policylang.backends.torch_compile.custom_partitioner import PolicyPartitioner


def of_compiled(subject: Any) -> Sequence[Findings] | None:
    """One a graph, in order of compilation; None where nothing of ours compiles."""
    if isinstance(subject, PolicyPartitioner):
        return tuple(subject.findings)
    graphs = graphs_of(subject)
    return None if graphs is None else [found for graph in graphs for found in graph.findings]


def of_checkpoints(subject: Any) -> Sequence[Findings] | None:
    """One a block and way in which it was called, in the order of the blocks; then one a graph that was compiled in
    checkpoints or around them. None where there is no checkpoint of ours."""
    sessions = sessions_of(subject)
    if not sessions:
        return None
    regions = [region for session in sessions for region in session.regions.values()]
    found = [
        _of_block(findings_of(CarriedOut("eager", each.instructions.plan, each.audit)), region.root)
        for region in regions
        for each in region.kept.values()
    ]
    compiled = [session for session in sessions if session.compiled]
    if not compiled:
        return found
    # of the whole subject, where it is a model of which only parts are checkpoints
    modules = [subject] if isinstance(subject, nn.Module) else [block for each in compiled for block in each.regions]
    graphs = dict.fromkeys(graph for module in modules for graph in graphs_of(module) or ())
    if not graphs:  # FSDP hands graphs parameters of its own making
        graphs = dict.fromkeys(graph for session in compiled for graph in session.graphs)
    return [*found, *(each for graph in graphs for each in graph.findings)]


def _of_block(found: Findings, name: str) -> Findings:
    """With the block's name in its report, where it is known."""
    return evolve(found, report=evolve(found.report, label=name))
