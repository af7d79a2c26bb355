"""Turns the forward half of a partition into a module that can be differentiated and compiled again.

A parallelizer that partitions a graph and hands the result to ``torch.compile`` has it partitioned a second time. What
the first partition saved is marked on the nodes and travels with them, so that ``policies/replay.apl`` repeats its
decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from policylang.backends import refusals
from policylang.backends.joint.saved_markers import dead_operators, leave_markers
from policylang.errors import PolicyGraphError
from policylang.graph import marks
from policylang.graph.facts import Flag
from policylang.operators.calls import describe, function, piece_of_draw, unread
from policylang.operators.names import RUNS_WITH_RANDOM_STATE, SAVES_RANDOM_STATE

_FORWARD_ONLY = ("recompute", "ac_graph_id", "partitioner_tag")
"""Keys that say what a node was in the first joint graph; in the second one they are to be found afresh."""


def recompilable(forward: fx.GraphModule, *, num_fwd_outputs: int) -> fx.GraphModule:
    """The computation of a partition's forward half alone: its first ``num_fwd_outputs`` outputs, from its inputs.

    The module is differentiable, takes its inputs as separate arguments in the same order, and carries on its nodes
    which values the partition saved: ``torch.compile(module, backend=policylang.backend("replay.apl"))`` saves the
    same. Random operators whose state the first partition kept draw for themselves again. ``forward`` is not changed.

    Raises ``PolicyGraphError`` for a forward that updates a buffer, as BatchNorm in training does.
    """
    _refuse_updates(forward)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in forward.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(tuple(node.args[0][:num_fwd_outputs]), copies.__getitem__))
        else:
            copies[node] = _copied(graph, node, copies)
    saved = {
        copies[node]: mark
        for node in copies
        if node.op == "call_function" and (mark := marks.custom(node.meta).get(marks.SAVED))
    }
    gone = dead_operators(graph)
    leave_markers(graph, saved, gone)
    for node in gone:
        graph.erase_node(node)
    return fx.GraphModule(forward, graph)


def _refuse_updates(forward: fx.GraphModule) -> None:
    for node in forward.graph.nodes:
        operator = describe(node.target) if node.op == "call_function" else None
        if operator is not None and (operator.flags & Flag.WRITES or unread(node, operator)):
            raise PolicyGraphError([refusals.updates_buffer(node.name, operator.name)])


def _copied(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    kept = _without_kept_state(node)
    if kept is not None:
        operator, arguments, keywords = kept
        copy = graph.call_function(
            operator, fx.map_arg(arguments, copies.__getitem__), fx.map_arg(keywords, copies.__getitem__)
        )
        copy.meta = dict(node.meta)
    elif piece_of_draw(node) == 1:
        copy = copies[node.args[0]]
    else:
        copy = graph.node_copy(node, copies.__getitem__)
    for key in _FORWARD_ONLY:
        copy.meta.pop(key, None)
    annotations = {key: value for key, value in copy.meta.pop("custom", {}).items() if key not in marks.ALL}
    if annotations:
        copy.meta["custom"] = annotations
    return copy


def _without_kept_state(node: fx.Node) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    """The random operator inside a wrapper that keeps its generator's state for the backward."""
    if function(node) not in (SAVES_RANDOM_STATE, RUNS_WITH_RANDOM_STATE[1]):
        return None
    keywords = {key: value for key, value in node.kwargs.items() if key != "rng_state"}
    return node.args[0], tuple(node.args[1:]), keywords
