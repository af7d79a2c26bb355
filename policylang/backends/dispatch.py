"""Applies a policy to a graph module, down the path that takes graphs of its kind."""

from __future__ import annotations

from typing import Any

from torch import fx

from policylang.backends import records, refusals
from policylang.backends.eager.problems import refuse_another
from policylang.backends.path import path_named
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.language.syntax import Policy
from policylang.planning.capabilities import path_taking
from policylang.ranks.comparison import comparing


def apply_policy(
    gm: object, policy: Policy, mesh: Any = None, *, agree: bool = True, facts: Facts | None = None
) -> fx.GraphModule:
    """See :func:`policylang.apply`. ``facts``: where the caller knows more of the graph than its nodes say."""
    with comparing("apply", agree, mesh=mesh):
        module = checked_module(gm, "a policy is applied to a graph module")
        for followed in records.checkpoints_of(module):
            refuse_another(followed, policy, "the graph")
        known = collect(module, mesh=mesh) if facts is None else facts
        path_named(path_taking(known.kind).name).apply(module, policy, known)
        return module


def checked_module(gm: object, wanted: str) -> fx.GraphModule:
    """A graph module; raises ``PolicyGraphError`` for anything else."""
    if not isinstance(gm, fx.GraphModule):
        raise refusals.not_a_graph(gm, wanted)
    return gm
