"""Gives the slices of ``chunk`` lines to Inductor as calls of subgraphs, one subgraph for all slices that are alike.

Unrolled, Inductor lowers and compiles every slice by itself: the offset of a slice is a constant of its kernels, so no
two are the same. It also fuses kernels of several slices and runs slices side by side, which keeps the wide values of
all of them alive. A subgraph (torch's ``invoke_subgraph``, as in Inductor's auto-chunker) is compiled once, is not
fused with what is around it, and frees what it made when it returns.

A slice's arguments are what it reads from outside, cut there, and its results what others read of it. A view that is
read outside is made there, so that no result shares memory with an argument or with another result.
"""

from __future__ import annotations

import operator

from attrs import define, field
from torch import Tensor, fx

from policylang.graph import marks
from policylang.operators.calls import effects
from policylang.operators.work import is_communication
from policylang.torch_compat.compilers import invoke_subgraph

_ALIGNED = 16
"""Bytes. Inductor's kernels read an argument that starts at a multiple of these in wider pieces."""


@define(eq=False)
class _Part:
    """Nodes of one slice, in graph order. Nothing outside reads any of them before the last one."""

    nodes: dict[fx.Node, None] = field(factory=dict)
    is_open: bool = True


def share_slices(gm: fx.GraphModule) -> int:
    """Replace the slices in a graph by calls, in place; returns the number of subgraphs. Linear."""
    subgraphs: dict[str, str] = {}
    for part in _parts(gm.graph):
        nodes = list(part.nodes)
        sources = list(dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in part.nodes))
        read = {node for node in nodes if not part.nodes.keys() >= node.users.keys()}
        views = [node for node in reversed(nodes) if _is_read_through(node, read)][::-1]
        results = [node for node in nodes if node in read and node not in views]
        if len(nodes) < 2 or not all(isinstance(each.meta.get("val"), Tensor) for each in (*sources, *results)):
            continue
        if any(map(is_communication, nodes)):  # Inductor orders the collectives of one graph, not across subgraphs
            continue
        # Inductor writes constants into kernels; as arguments they would be tensors in memory.
        inner = [*(each for each in sources if each.op == "call_function" and not each.all_input_nodes), *nodes]
        sources = [each for each in sources if each not in inner]
        key = _key(inner, sources, results)
        if key not in subgraphs:
            subgraphs[key] = f"chunk_slice_{len(subgraphs)}"
            gm.add_submodule(subgraphs[key], fx.GraphModule(gm, _subgraph(inner, sources, results)))
        _call(gm.graph, nodes, subgraphs[key], sources, results, views)
    if subgraphs:
        gm.graph.lint()
        gm.recompile()
    return len(subgraphs)


def _parts(graph: fx.Graph) -> list[_Part]:
    """The slices: a part each, or several where something outside reads one piece of it and another reads that."""
    last: dict[str | None, _Part] = {}
    part_of: dict[fx.Node, _Part] = {}
    for node in graph.nodes:
        if node in part_of:  # a piece of a tuple
            continue
        name = marks.custom(node.meta).get(marks.SLICE) if node.op == "call_function" else None
        own = last.get(name)
        for each in node.all_input_nodes:
            if each in part_of and part_of[each] is not own:
                part_of[each].is_open = False
        if name is None:
            continue
        if own is None or not own.is_open:
            own = last[name] = _Part()
        for each in (node, *(user for user in node.users if user.target is operator.getitem)):
            own.nodes[each] = None
            part_of[each] = own
    return list(dict.fromkeys(part_of.values()))


def _is_read_through(node: fx.Node, read: set[fx.Node]) -> bool:
    """True for a view that others read, who then read what it views. Asked from the last node to the first."""
    if node not in read or node.target is operator.getitem or not effects(node)[0]:
        return False
    read.update(node.all_input_nodes)
    return True


def _described(node: fx.Node) -> str:
    """All that kernels are made for."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return ""
    is_aligned = value.storage_offset() * value.element_size() % _ALIGNED == 0
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device} {is_aligned}"


def _key(nodes: list[fx.Node], sources: list[fx.Node], results: list[fx.Node]) -> str:
    """Alike for slices that one subgraph computes."""
    names = {node: f"%{at}" for at, node in enumerate((*sources, *nodes))}
    calls = [str((node.target, fx.map_arg((node.args, node.kwargs), names.__getitem__))) for node in nodes]
    return repr(([*map(_described, (*sources, *nodes))], calls, [names[each] for each in results]))


def _subgraph(nodes: list[fx.Node], sources: list[fx.Node], results: list[fx.Node]) -> fx.Graph:
    graph, inner = fx.Graph(), dict[fx.Node, fx.Node]()
    for at, source in enumerate(sources):
        inner[source] = graph.placeholder(f"arg{at}_1")
        inner[source].meta["val"] = source.meta["val"]
    for node in nodes:
        inner[node] = graph.node_copy(node, inner.__getitem__)
    graph.output(tuple(inner[each] for each in results))
    return graph


def _call(
    graph: fx.Graph,
    nodes: list[fx.Node],
    name: str,
    sources: list[fx.Node],
    results: list[fx.Node],
    views: list[fx.Node],
) -> None:
    """Put a call, and the views of its results, in the place of nodes."""
    place = next(node for node in reversed(nodes) if node.target is not operator.getitem)
    outer: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(place.next):
        call = graph.call_function(invoke_subgraph(), (graph.get_attr(name), name, *sources))
        call.meta["val"] = tuple(each.meta["val"] for each in results)
        for at, result in enumerate(results):
            outer[result] = graph.call_function(operator.getitem, (call, at))
            outer[result].meta = dict(result.meta)
        for view in views:
            outer[view] = graph.node_copy(view, lambda each: outer.get(each, each))
    inside = frozenset(nodes)
    for old, new in outer.items():
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)
