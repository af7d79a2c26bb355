"""Carries planned edits (``fuse``, ``collapse``, ``bucket``) out on an FX graph, exactly as they were planned.

Nothing is decided here. What can fail without touching the graph comes first (is it the graph that was planned, are
there the process groups); what comes out is held against the plan, node by node.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from policylang.backends.runtime import groups
from policylang.backends.runtime.groups import RankOrder
from policylang.errors import PolicyAuditError
from policylang.graph import marks
from policylang.graph.facts import Facts
from policylang.language.diagnostics import diagnose
from policylang.language.syntax import Policy
from policylang.operators.categories import describe, group_name
from policylang.planning.graph_edit import Edit, Edits, FusedGroup, NewNode, Node
from policylang.planning.plan import Plan
from policylang.torch_compat.graphs import OpOverload, outside_of_modes, schema_of

REWRITTEN_OTHERWISE = "APL408"

_OF_THE_CALL = frozenset(
    {
        "val", "tensor_meta", "example_value", "original_aten", "from_node", "eager_input_vals", "unbacked_bindings",
        "arg_kwarg_vals", "torch_fn", "source_fn_stack", "desc", "dist_from_bw",
    }
)  # fmt: skip
"""What metadata says of one call of one operator; a node that takes another's place takes over all else."""


def carry_out(gm: fx.GraphModule, plan: Plan) -> tuple[RankOrder, ...]:
    """Change the graph that was planned, in place; the process groups that it names now and did not before.

    Linear in what changes, but for one look at every node. To be called once the ranks agree, since a group is made by
    all its members: it blocks until they have come.

    Raises:
        PolicyAuditError: APL408 where the graph is not the one that was planned, or comes out otherwise.
    """
    if not plan.edits:
        return ()
    orders = edit_graph(gm.graph, plan.policy, plan.edits, plan.before, plan.facts)
    gm.graph.lint()
    gm.recompile()
    return orders


def edit_graph(
    graph: fx.Graph,
    policy: Policy,
    edits: Edits,
    before: Facts,
    after: Facts,
    beside: Collection[fx.Node] = (),
) -> tuple[RankOrder, ...]:
    """The same of the graph that ``before`` describes, which comes out as ``after`` does, without the recompilation.

    ``beside``: nodes that neither describes, and that stay where they are.
    """
    check_names(graph, before, beside, "is not the one that was planned")
    if not edits:
        return ()
    orders = _rank_orders(graph, edits)
    groups.ensure(orders.values())
    editor = _GraphEditor(graph, policy, {group: order.name for group, order in orders.items()})
    for edit in edits.done:
        editor.carry_out(edit)
    check_names(graph, after, beside, "came out otherwise than planned")
    return tuple(sorted(set(orders.values())))


def _rank_orders(graph: fx.Graph, edits: Edits) -> dict[FusedGroup, RankOrder]:
    """The groups that the graph does not name yet, with the backend of the collectives that they stand for."""
    wanted = {name for edit in edits.done for name in edit.collectives}
    called = {node.name: group_name(describe(node.target), node) for node in graph.nodes if node.name in wanted}
    stands_for: dict[str, str] = {}
    found: dict[FusedGroup, RankOrder] = {}
    for edit in edits.done:
        if not edit.groups:
            continue
        first = stands_for.get(edit.collectives[0], edit.collectives[0])
        stands_for.update({new.name: first for new in edit.nodes})  # a later statement may fuse what this one makes
        if missing := [group for group in edit.groups if group.name is None]:
            backend = groups.backend_of(called[first])
            found.update({group: RankOrder(group.ranks, backend) for group in missing})
    return found


class _GraphEditor:
    """The only part that touches the graph."""

    def __init__(self, graph: fx.Graph, policy: Policy, group_names: dict[FusedGroup, str]) -> None:
        self.graph = graph
        self.policy = policy
        self.group_names = group_names
        self.nodes = {node.name: node for node in graph.nodes}

    def carry_out(self, edit: Edit) -> None:
        """New nodes first, then everyone who reads the old ones reads the new ones, then the old ones go."""
        nodes = self.nodes
        who = self.policy.rewrites[edit.statement].span.location
        place = nodes[edit.before]
        for name in edit.ahead:
            place.prepend(nodes[name])
        with self.graph.inserting_before(place):
            for new in edit.nodes:
                nodes[new.name] = self._insert(new, who)
        for name in edit.behind:
            place.prepend(nodes[name])
        dead = {nodes[name] for name in edit.dead}
        for old, new_name in edit.replaced:
            _hand_over(nodes[old], nodes[new_name])
            nodes[old].replace_all_uses_with(nodes[new_name], delete_user_cb=lambda user: user not in dead)
        for name in reversed(edit.dead):
            self.graph.erase_node(nodes.pop(name))
        for name, stride in edit.restrided:
            _lay_out_anew(nodes[name], stride)

    def _insert(self, new: NewNode, who: str) -> fx.Node:
        target = _operator(new.target)
        args, kwargs = self._arguments(target, new.arguments)
        node = self.graph.create_node("call_function", target, args, kwargs, name=new.name)
        node.name = new.name  # torch does not give a name twice, not even that of a node that is gone
        like = self.nodes[new.like].meta
        node.meta = {key: value for key, value in like.items() if key not in _OF_THE_CALL}
        annotations = {key: value for key, value in marks.custom(like).items() if key != marks.SAVED}
        node.meta["custom"] = {**annotations, marks.REWRITTEN: who}
        node.meta["val"] = _value(node)
        _check_value(node, new.shape, new.stride, new.dtype)
        return node

    def _arguments(self, target: Any, planned: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not isinstance(target, OpOverload):
            return tuple(map(self._argument, planned)), {}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for given, value in zip(schema_of(target).arguments, planned, strict=False):
            made = self._argument(value)
            if isinstance(value, str):
                made = _constant(value, str(given.type))
            if given.kwarg_only:
                kwargs[given.name] = made
            else:
                args.append(made)
        return tuple(args), kwargs

    def _argument(self, planned: Any) -> Any:
        if isinstance(planned, Node):
            return self.nodes[planned.name]
        if isinstance(planned, FusedGroup):
            return planned.name if planned.name is not None else self.group_names[planned]
        if isinstance(planned, tuple):
            return [self._argument(part) for part in planned]
        return planned


def _operator(name: str) -> Any:
    namespace, _, rest = name.partition(".")
    if namespace == "builtin":
        return getattr(operator, rest)
    bare, _, overload = rest.rpartition(".")
    return getattr(getattr(getattr(torch.ops, namespace), bare), overload)


def _constant(text: str, kind: str) -> Any:
    """What a text stands for where the schema has ``kind``: dtypes, layouts and memory formats count as numbers."""
    if "Device" in kind:
        return torch.device(text)
    return getattr(torch, text) if "int" in kind else text


def _hand_over(old: fx.Node, new: fx.Node) -> None:
    """That a partition saved a value holds of the node that has the value now."""
    saved = marks.custom(old.meta).get(marks.SAVED)
    if saved is not None:
        new.meta["custom"] = {**marks.custom(new.meta), marks.SAVED: saved}


def _lay_out_anew(node: fx.Node, stride: tuple[int, ...]) -> None:
    old = node.meta["val"]
    node.meta["val"] = _value(node)
    node.meta.pop("tensor_meta", None)
    _check_value(node, tuple(old.shape), stride, str(old.dtype).removeprefix("torch."))


def _value(node: fx.Node) -> Any:
    """What the call returns for the values that its arguments stand for: fake tensors, which share memory as real ones
    would."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda read: read.meta["val"])
    with torch.no_grad(), outside_of_modes():
        return node.target(*args, **kwargs)


def _check_value(node: fx.Node, shape: tuple[int, ...], stride: tuple[int, ...], dtype: str) -> None:
    value = node.meta["val"]
    if not isinstance(value, Tensor):  # the tuple of a split, whose pieces are checked
        return
    found = tuple(value.shape), tuple(value.stride()), str(value.dtype).removeprefix("torch.")
    if found != (shape, stride, dtype):
        refuse(f"`{node.name}` came out as {_said(*found)}, and was planned as {_said(shape, stride, dtype)}")


def _said(shape: tuple[int, ...], stride: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}{list(shape)} with strides {list(stride)}"


def first_difference(nodes: Iterable[fx.Node], facts: Facts) -> tuple[int, str, str] | None:
    """Where a graph is not the one that facts describe: the position, the name there, and the name that was planned;
    a name is empty where the graph, or the plan, has ended."""
    pairs = zip_longest((node.name for node in nodes), facts.names, fillvalue="")
    return next(((at, found, planned) for at, (found, planned) in enumerate(pairs) if found != planned), None)


def check_names(graph: fx.Graph, facts: Facts, beside: Collection[fx.Node], complaint: str) -> None:
    """Raise ``PolicyAuditError`` where a graph, but for the nodes ``beside``, is not the one that facts describe."""
    difference = first_difference((node for node in graph.nodes if node not in beside), facts)
    if difference is not None:
        _, found, planned = difference
        have = f"has `{found}`" if found else "ends"
        refuse(f"the graph {complaint}: it {have} where the plan {f'has `{planned}`' if planned else 'ends'}")


def refuse(message: str) -> NoReturn:
    """Raise ``PolicyAuditError`` where graph and plan do not fit."""
    help = "apply the policy after the passes that change the graph; otherwise this is a bug in policylang"
    raise PolicyAuditError([diagnose(REWRITTEN_OTHERWISE, message, help=help)])
