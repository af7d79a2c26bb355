"""Turns the forward graph of a partition into a module that can be differentiated and compiled again.

A parallelizer that partitions a graph and passes the result to ``torch.compile`` has it partitioned a second time.
Marks on the nodes carry the decisions of the first partition, so that ``policies/replay.apl`` repeats them.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Mapping

from attrs import evolve
from torch import fx

from policylang.backends import refusals
from policylang.backends.path import checked_module
from policylang.errors import check_argument, is_count
from policylang.graph import marks
from policylang.graph.facts import Flag
from policylang.graph.marks import SavedMarker
from policylang.operators import names
from policylang.operators.calls import describe, function, piece_of_draw, unread


def leave_markers(graph: fx.Graph, saved: Mapping[fx.Node, object], gone: Collection[fx.Node]) -> None:
    """Write the markers of the ``saved`` nodes, given with the mark that the partition left on each. ``gone``: the
    nodes that tracing will not meet. What autograd kept of an input needs no marker: inputs stay alive."""
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
            offloaded=draft.offloaded or mark == marks.OFFLOADED,
        )
    _number(graph, drafts)
    digest = hashlib.sha256()  # of the partition, equal in every process: a second compilation is cached by it
    for node in graph.nodes:
        name = describe(node.target).name if node.op == "call_function" else node.op
        digest.update(repr((node.name, name, [read.name for read in node.all_input_nodes], drafts.get(node))).encode())
    partition = digest.hexdigest()[:16]
    for bearer, draft in drafts.items():
        marker = evolve(draft, partition=partition)
        bearer.meta["custom"] = {**marks.custom(bearer.meta), marks.SAVED: marker.annotation()}


def _draft(node: fx.Node) -> SavedMarker:
    several = any(user.target is operator.getitem for user in node.users)
    return SavedMarker(partition="", name=node.name, several=several)


def _number(graph: fx.Graph, drafts: dict[fx.Node, SavedMarker]) -> None:
    """Number the values to be found after retracing; the base of a saved view represents the view."""
    memory: dict[fx.Node, fx.Node] = {}  # the operator or the input that allocates the memory of each value
    for node in graph.nodes:
        described = describe(node.target) if node.op == "call_function" and node.all_input_nodes else None
        is_view = described and (described.flags & Flag.VIEW or described.name in (names.GETITEM, *names.VIEWS_UNSAID))
        memory[node] = memory[node.all_input_nodes[0]] if is_view else node
    numbered = [node for node in graph.nodes if node in drafts and memory[node].op == "call_function"]
    views: dict[fx.Node, list[int]] = {}
    for number, bearer in enumerate(numbered):
        following = numbered[(number + 1) % len(numbered)].name
        drafts[bearer] = evolve(drafts[bearer], number=number, following=following)
        if memory[bearer] is not bearer:
            views.setdefault(memory[bearer], []).append(number)
    for base, numbers in views.items():
        draft = drafts.get(base) or _draft(base)
        moved = draft.offloaded or any(drafts[numbered[number]].offloaded for number in numbers)
        drafts[base] = evolve(draft, stands_for=numbers, offloaded=moved)
    for bearer, draft in drafts.items():
        drafts[bearer] = evolve(draft, count=len(numbered))


def _is_copy(node: fx.Node) -> bool:
    return node.op == "call_function" and describe(node.target).name in names.AUTOGRAD_COPIES


def _maker(node: fx.Node, gone: Collection[fx.Node]) -> fx.Node:
    """The operator whose call makes a value: neither a piece of a tuple nor what autograd keeps is an operator call."""
    while node.op == "call_function" and (node.target is operator.getitem or (node in gone and _is_copy(node))):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


_FORWARD_ONLY = ("recompute", "ac_graph_id", "partitioner_tag")
"""Keys about a node of the first joint graph; the second one finds them anew."""


def recompilable(forward: fx.GraphModule, *, num_fwd_outputs: int) -> fx.GraphModule:
    """A partition's forward graph as a module that computes its first ``num_fwd_outputs`` outputs from its inputs.

    The module is differentiable and takes its inputs as separate arguments, in the same order. Its nodes record which
    values the partition saved: ``torch.compile(module, backend=policylang.backend("replay.apl"))`` saves the same.
    Random operators whose state the first partition kept draw new numbers. ``forward`` is not changed.

    Raises ``PolicyGraphError`` for a forward that updates a buffer, as BatchNorm in training does.
    """
    checked_module(forward, "what is compiled again is the forward graph of a partition")
    check_argument("num_fwd_outputs", num_fwd_outputs, is_count(num_fwd_outputs), "a whole number from 0 on")
    for node in forward.graph.nodes:
        operator_called = describe(node.target) if node.op == "call_function" else None
        if operator_called is not None and (operator_called.flags & Flag.WRITES or unread(node)):
            raise refusals.UPDATES_BUFFER.error(node=node.name, target=operator_called.name)
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
    gone: dict[fx.Node, None] = {}  # what only the backward read, autograd makes anew
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.is_impure() and all(user in gone for user in node.users):
            gone[node] = None
    leave_markers(graph, saved, gone)
    for node in gone:
        graph.erase_node(node)
    return fx.GraphModule(forward, graph)


def _copied(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    if function(node) in (names.SAVES_RANDOM_STATE, names.RUNS_WITH_RANDOM_STATE[1]):  # around the operator that draws
        keywords = {key: value for key, value in node.kwargs.items() if key != "rng_state"}
        copy = graph.call_function(node.args[0], *fx.map_arg((tuple(node.args[1:]), keywords), copies.__getitem__))
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
