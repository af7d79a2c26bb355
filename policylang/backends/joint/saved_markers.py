"""Leaves markers of what a partition saved on the operators of a forward that is to be traced again.

See :mod:`policylang.graph.marks` for how they are read. Every saved value that the forward holds is
counted: one that tracing will not make again leaves a marker that is missed, not a gap that nobody sees.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Mapping

from attrs import evolve
from torch import fx

from policylang.graph import marks
from policylang.graph.facts import Flag
from policylang.graph.marks import SavedMarker
from policylang.operators.calls import describe
from policylang.operators.names import AUTOGRAD_COPIES, GETITEM, VIEWS_UNSAID


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
    """Number what has to be found again, and have the value that a saved view is of stand for the view."""
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
    """The same for the same partition, in every process: the caches of a second compilation are keyed by it."""
    digest = hashlib.sha256()
    for node in graph.nodes:
        name = describe(node.target).name if node.op == "call_function" else node.op
        words = (node.name, name, [read.name for read in node.all_input_nodes], drafts.get(node))
        digest.update(repr(words).encode())
    return digest.hexdigest()[:16]
