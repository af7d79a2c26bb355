"""A policy on a graph module that is at hand, down the path that takes graphs of its kind."""

from __future__ import annotations

from typing import Any

from torch import fx

from policylang.backends import graph_registry, refusals
from policylang.backends.eager.problems import refuse_another
from policylang.backends.path import path_named
from policylang.errors import PolicyGraphError
from policylang.graph.facts import Facts
from policylang.graph.reading.collect import collect
from policylang.language.syntax import Policy
from policylang.planning.capabilities import path_taking
from policylang.ranks.comparison import comparing


def apply_policy(gm: object, policy: Policy, mesh: Any = None, *, agree: bool = True) -> fx.GraphModule:
    """See :func:`policylang.apply`."""
    with comparing("apply", agree, mesh=mesh):
        module = checked_module(gm, "a policy is applied to a graph module")
        _check_checkpoints(module, policy)
        facts = collect(module, mesh=mesh)
        path_named(path_taking(facts.kind).name).apply(module, policy, facts)
        return module


def apply_to_step(gm: fx.GraphModule, policy: Policy, facts: Facts, mesh: Any = None) -> None:
    """What ``apply`` does on a flat graph, where the caller knows more of the graph than its nodes say: as ``facts``.

    Raises as ``apply`` does.
    """
    with comparing("apply", mesh=mesh):
        _check_checkpoints(gm, policy)
        path_named("flat").apply(gm, policy, facts)


def _check_checkpoints(gm: fx.GraphModule, wanted: Policy) -> None:
    for followed in graph_registry.checkpoints_of(gm):
        refuse_another(followed, wanted, "the graph")


def checked_module(gm: object, wanted: str) -> fx.GraphModule:
    """A graph module; raises ``PolicyGraphError`` for anything else."""
    if not isinstance(gm, fx.GraphModule):
        raise PolicyGraphError([refusals.not_a_graph(gm, wanted)])
    return gm
