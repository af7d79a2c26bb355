"""Findings on what users hold of compiled code and of checkpoints: models, backends, partitioners, and so on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import evolve
from torch import nn

from policylang.backends.compiled_graphs import CompiledGraph, GraphUse
from policylang.backends.eager.checkpoint import sessions_of
from policylang.backends.findings import Findings, findings_of
from policylang.backends.graph_registry import CarriedOut
from policylang.backends.torch_compile.backend import graph_uses_of
from policylang.backends.torch_compile.custom_partitioner import PolicyPartitioner


def of_compiled(subject: Any) -> Sequence[Findings] | None:
    """One a graph and module that runs it, in order of compilation; None where nothing of ours compiles."""
    if isinstance(subject, PolicyPartitioner):
        return tuple(subject.findings)
    uses = graph_uses_of(subject)
    return None if uses is None else _findings(uses)


def of_checkpoints(subject: Any) -> Sequence[Findings] | None:
    """One a block and way in which it was called, in the order of the blocks; then one a graph that was compiled in
    checkpoints or around them and module that runs it. None where there is no checkpoint of ours."""
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
    uses = [use for module in modules for use in graph_uses_of(module) or ()]
    if not uses:
        uses = [GraphUse(graph) for session in compiled for graph in session.graphs]
    return [*found, *_findings(uses)]


def _of_block(found: Findings, name: str) -> Findings:
    """With the block's name in its report, where it is known."""
    return evolve(found, report=evolve(found.report, label=name))


def _findings(uses: Iterable[GraphUse]) -> list[Findings]:
    """Those of a graph as often as modules run it: each of them keeps what the graph keeps."""
    return [_with_code(found, use.graph) for use in uses for _ in range(use.modules) for found in use.graph.findings]


def _with_code(found: Findings, graph: CompiledGraph) -> Findings:
    """With what the code of the halves was read to do, which is known of the backward only once that has run."""
    if graph.code is None:
        return found
    return evolve(found, report=evolve(found.report, code=graph.code.reports()))
