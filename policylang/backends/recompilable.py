"""Turns the forward graph of a partition into a module that can be differentiated and compiled again.

A parallelizer that partitions a graph and hands the result to ``torch.compile`` has it partitioned a second time. What
the first partition saved is marked on the nodes and travels with them, so that ``policies/replay.apl`` repeats its
decisions.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from attrs import evolve
from torch import fx

from policylang.backends import refusals
from policylang.errors import PolicyGraphError
from policylang.graph import marks
from policylang.graph.facts import Flag
from policylang.graph.marks import SavedMarker
from policylang.operators.calls import describe, function, piece_of_draw, unread
from policylang.operators.names import (
    AUTOGRAD_COPIES,
    GETITEM,
    RUNS_WITH_RANDOM_STATE,
    SAVES_RANDOM_STATE,
    VIEWS_UNSAID,
)


def dead_operators(graph: fx.Graph) -> dict[fx.Node, None]:
    """The operators that lead to no output, last first. What only the backward read, autograd makes anew."""
    found: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.is_impure() and all(user in found for user in node.users):
            found[node] = None
    return found


def leave_markers(graph: fx.Graph, saved: Mapping[fx.Node, object], gone: Collection[fx.Node]) -> None:
    """Write the markers of the ``saved`` nodes, given with the mark that the partition left on each.

    ``gone``: the nodes that tracing will not meet. What autograd kept of an input needs no marker: inputs stay alive.
    """
    drafts: dict[fx.Node, SavedMarker] = {}
    for node, mark in saved.items():
        bearer = _maker(node, gone)
        if bearer.op != "call_function":
            continue
        kept = node in gone and _is_copy(node)
        draft = drafts.get(bearer) or _draft(bearer)
        drafts[bearer] = evolve(
            draft,
            value=draft.value or not kept,
            copies=draft.copies or kept,
            partly=draft.partly or mark == marks.PARTLY,
        )
    _number(graph, drafts)
    partition = _digest(graph, drafts)
    for bearer, draft in drafts.items():
        marker = evolve(draft, partition=partition)
        bearer.meta["custom"] = {**marks.custom(bearer.meta), marks.SAVED: marker.annotation()}


def _draft(node: fx.Node) -> SavedMarker:
    several = any(user.target is operator.getitem for user in node.users)
    return SavedMarker(partition="", name=node.name, several=several)


def _number(graph: fx.Graph, drafts: dict[fx.Node, SavedMarker]) -> None:
    """Number what has to be found again, and let the base of a saved view represent the view."""
    memory = _memory_of(graph)
    numbered = [node for node in graph.nodes if node in drafts and memory[node].op == "call_function"]
    views: dict[fx.Node, list[int]] = {}
    for number, bearer in enumerate(numbered):
        following = numbered[(number + 1) % len(numbered)].name
        drafts[bearer] = evolve(drafts[bearer], number=number, following=following)
        if memory[bearer] is not bearer:
            views.setdefault(memory[bearer], []).append(number)
    for base, numbers in views.items():
        drafts[base] = evolve(drafts.get(base) or _draft(base), stands_for=numbers)
    for bearer, draft in drafts.items():
        drafts[bearer] = evolve(draft, count=len(numbered))


def _memory_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The operator or the input in whose memory each value lies."""
    memory: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        memory[node] = memory[node.all_input_nodes[0]] if _is_view(node) else node
    return memory


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    described = describe(node.target)
    return bool(described.flags & Flag.VIEW) or described.name in (GETITEM, *VIEWS_UNSAID)


def _is_copy(node: fx.Node) -> bool:
    return node.op == "call_function" and describe(node.target).name in AUTOGRAD_COPIES


def _maker(node: fx.Node, gone: Collection[fx.Node]) -> fx.Node:
    """The operator whose call makes a value: neither a piece of a tuple nor what autograd keeps runs on its own."""
    while node.op == "call_function" and (node.target is operator.getitem or (node in gone and _is_copy(node))):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def _digest(graph: fx.Graph, drafts: Mapping[fx.Node, SavedMarker]) -> str:
    """A digest of the partition, equal in every process: the caches of a second compilation are keyed by it."""
    digest = hashlib.sha256()
    for node in graph.nodes:
        name = describe(node.target).name if node.op == "call_function" else node.op
        words = (node.name, name, [read.name for read in node.all_input_nodes], drafts.get(node))
        digest.update(repr(words).encode())
    return digest.hexdigest()[:16]


_FORWARD_ONLY = ("recompute", "ac_graph_id", "partitioner_tag")
"""Keys that say what a node was in the first joint graph; in the second one they are to be found afresh."""


def recompilable(forward: fx.GraphModule, *, num_fwd_outputs: int) -> fx.GraphModule:
    """The computation of a partition's forward graph alone: its first ``num_fwd_outputs`` outputs, from its inputs.

    The module is differentiable, takes its inputs as separate arguments in the same order, and carries on its nodes
    which values the partition saved: ``torch.compile(module, backend=policylang.backend("replay.apl"))`` saves the
    same. Random operators whose state the first partition kept draw for themselves again. ``forward`` is not changed.

    Raises ``PolicyGraphError`` for a forward that updates a buffer, as BatchNorm in training does.
    """
    for node in forward.graph.nodes:
        operator_called = describe(node.target) if node.op == "call_function" else None
        if operator_called is not None and (operator_called.flags & Flag.WRITES or unread(node)):
            raise PolicyGraphError([refusals.updates_buffer(node.name, operator_called.name)])
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
