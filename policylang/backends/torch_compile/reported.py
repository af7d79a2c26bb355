"""What was decided on the graphs that a compiled model, a backend or a partitioner stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policylang.backends.findings import Findings
from policylang.backends.torch_compile.backend import graphs_of
from policylang.backends.torch_compile.custom_partitioner import PolicyPartitioner, split_by


def reported(subject: Any) -> Sequence[Findings] | None:
    """One a graph, in order of compilation; None where nothing of ours compiles."""
    if isinstance(subject, PolicyPartitioner):
        return split_by(subject)
    graphs = graphs_of(subject)
    return None if graphs is None else [found for graph in graphs for found in graph.findings]
