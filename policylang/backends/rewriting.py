"""Applies planned edits (``fuse``, ``collapse``, ``bucket``) and planned orders to an FX graph, exactly as planned.

Nothing is decided here. Checks that need no change come first (is it the planned graph, do the process groups exist);
the result is compared with the plan, node by node.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from policylang.backends import runtime
from policylang.backends.copies import copies_in
from policylang.backends.runtime import RankOrder
from policylang.errors import PolicyAuditError
from policylang.graph import marks
from policylang.graph.facts import Facts, Schedule, StepKind
from policylang.language.diagnostics import diagnose
from policylang.language.syntax import Policy
from policylang.operators.calls import describe, group_name
from policylang.planning.graph_edit import Edit, Edits, FusedGroup, NewNode, Node
from policylang.planning.plan import OrderPlan, Plan
from policylang.torch_compat import distributed
from policylang.torch_compat.graphs import OpOverload, outside_of_modes, schema_of
from policylang.torch_compat.tracing import fake_mode_of, in_one_fake_mode

REWRITTEN_OTHERWISE = "APL408"

_OF_THE_CALL = frozenset(
    {
        "val", "tensor_meta", "example_value", "original_aten", "from_node", "eager_input_vals", "unbacked_bindings",
        "arg_kwarg_vals", "torch_fn", "source_fn_stack", "desc", "dist_from_bw",
    }
)  # fmt: skip
"""Metadata of one call of one operator; a node that replaces another copies the rest."""


def apply_edits(gm: fx.GraphModule, plan: Plan) -> tuple[RankOrder, ...]:
    """Change the graph that was planned, in place; returns the process groups that are new in it.

    Linear in what changes, but for one look at every node. Call it once the ranks agree, since all members of a group
    make it together: it blocks until they do. Raises ``PolicyAuditError`` (APL408) if the graph is not the planned one,
    or differs from the plan afterwards.
    """
    if not plan.edits:
        return ()
    orders = edit_graph(gm.graph, plan.policy, plan.edits, plan.before, plan.facts)
    gm.graph.lint()
    gm.recompile()
    return orders


def edit_graph(
    graph: fx.Graph, policy: Policy, edits: Edits, before: Facts, after: Facts, beside: Collection[fx.Node] = ()
) -> tuple[RankOrder, ...]:
    """Edit the graph that ``before`` describes into the one that ``after`` does, without recompiling it. ``beside``:
    nodes that neither describes, and that stay where they are."""
    check_names(graph, before, beside, "is not the one that was planned")
    if not edits:
        return ()
    orders = _rank_orders(graph, edits)
    runtime.ensure_groups(orders.values())
    editor = _GraphEditor(graph, policy, {group: order.name for group, order in orders.items()})
    for edit in edits.done:
        editor.apply(edit)
    check_names(graph, after, beside, "differs from the plan")
    return tuple(sorted(set(orders.values())))


def _rank_orders(graph: fx.Graph, edits: Edits) -> dict[FusedGroup, RankOrder]:
    """The groups that the graph does not name yet, with the backend of the collectives that they replace."""
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
            backend = distributed.group_backend(called[first])
            found.update({group: RankOrder(group.ranks, backend) for group in missing})
    return found


class _GraphEditor:
    """The only part that touches the graph."""

    def __init__(self, graph: fx.Graph, policy: Policy, group_names: dict[FusedGroup, str]) -> None:
        self.graph = graph
        self.policy = policy
        self.group_names = group_names
        self.nodes = {node.name: node for node in graph.nodes}
        self.fake_mode = fake_mode_of([node.meta.get("val") for node in graph.nodes])

    def apply(self, edit: Edit) -> None:
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
            meta = nodes[new_name].meta
            if (saved := marks.custom(nodes[old].meta).get(marks.SAVED)) is not None:
                meta["custom"] = {**marks.custom(meta), marks.SAVED: saved}
            nodes[old].replace_all_uses_with(nodes[new_name], delete_user_cb=lambda user: user not in dead)
        for name in reversed(edit.dead):
            self.graph.erase_node(nodes.pop(name))
        for name, stride in edit.restrided:
            meta = nodes[name].meta
            shape, dtype = tuple(meta["val"].shape), _dtype(meta["val"])
            meta["val"] = self._value(nodes[name])
            meta.pop("tensor_meta", None)
            _check_value(nodes[name], shape, stride, dtype)

    def _insert(self, new: NewNode, who: str) -> fx.Node:
        namespace, _, rest = new.target.partition(".")
        if namespace == "builtin":
            target = getattr(operator, rest)
        else:
            bare, _, overload = rest.rpartition(".")
            target = getattr(getattr(getattr(torch.ops, namespace), bare), overload)
        args, kwargs = self._arguments(target, new.arguments)
        node = self.graph.create_node("call_function", target, args, kwargs, name=new.name)
        node.name = new.name  # torch does not give a name twice, not even that of a node that is gone
        like = self.nodes[new.like].meta
        node.meta = {key: value for key, value in like.items() if key not in _OF_THE_CALL}
        annotations = {key: value for key, value in marks.custom(like).items() if key != marks.SAVED}
        node.meta["custom"] = {**annotations, marks.REWRITTEN: who}
        if new.slice:
            node.meta["custom"][marks.SLICE] = new.slice
        node.meta["val"] = self._value(node)
        found = node.meta["val"]
        # the strides of a slice follow from what it is computed from
        stride = tuple(found.stride()) if new.call and isinstance(found, Tensor) else new.stride
        _check_value(node, new.shape, stride, new.dtype)
        return node

    def _value(self, node: fx.Node) -> Any:
        """The result of the call on the fake values of its arguments, which share memory as real ones would."""
        read = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        mode = nullcontext() if node.all_input_nodes or self.fake_mode is None else self.fake_mode
        with torch.no_grad(), outside_of_modes(), mode:
            args, kwargs = in_one_fake_mode(read)
            return node.target(*args, **kwargs)

    def _arguments(self, target: Any, planned: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not isinstance(target, OpOverload):
            return tuple(map(self._argument, planned)), {}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for given, value in zip(schema_of(target).arguments, planned, strict=False):
            made, kind = self._argument(value), str(given.type)
            if isinstance(value, str) and "Device" in kind:
                made = torch.device(value)
            elif isinstance(value, str) and "int" in kind:  # a dtype, a layout or a memory format
                made = getattr(torch, value)
            if not given.kwarg_only:
                args.append(made)
            elif value != given.default_value:  # Inductor's lowerings do not take all that a schema lists
                kwargs[given.name] = made
        return tuple(args), kwargs

    def _argument(self, planned: Any) -> Any:
        if isinstance(planned, Node):
            return self.nodes[planned.name]
        if isinstance(planned, FusedGroup):
            return planned.name if planned.name is not None else self.group_names[planned]
        if isinstance(planned, tuple):
            return [self._argument(part) for part in planned]
        return planned


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _check_value(node: fx.Node, shape: tuple[int, ...], stride: tuple[int, ...], dtype: str) -> None:
    value = node.meta["val"]
    if not isinstance(value, Tensor):  # the tuple of a split, whose pieces are checked
        return
    found, planned = (tuple(value.shape), tuple(value.stride()), _dtype(value)), (shape, stride, dtype)
    if found != planned:
        is_so, wanted = (f"{each[2]}{list(each[0])} with strides {list(each[1])}" for each in (found, planned))
        refuse(f"`{node.name}` became {is_so}, and was planned as {wanted}")


def first_difference(nodes: Iterable[fx.Node], facts: Facts) -> tuple[int, str, str] | None:
    """The first difference between a graph and facts: the position, the name there, and the name that was planned;
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


def arrange(graph: fx.Graph, names: Iterable[str]) -> None:
    """Order the operators of a graph as ``names`` are, which may name more than it has. One rule for the nodes that a
    schedule does not know: a ``getitem`` comes right behind what it reads, a node with an effect or without readers
    right behind the one it came behind, any other right before the first node that reads it; and no node comes behind
    one that reads it. For a backward that is the order of PyTorch's ``reordering_to_mimic_autograd_engine`` and
    ``raise_getitems``. O(nodes + edges), plus the sorting of what is pulled before a node together."""
    by_name = {node.name: node for node in graph.nodes if node.op == "call_function"}
    arrange_nodes(graph, [by_name[name] for name in names if name in by_name])


def arrange_nodes(graph: fx.Graph, planned: Sequence[fx.Node]) -> None:
    """Order some operators of a graph as they are given, and all else by the rule of :func:`arrange`."""
    position = {node: at for at, node in enumerate(graph.nodes)}
    beside = _followers(position, frozenset(planned))
    waiting = {node for node in position if node.op not in ("placeholder", "output")}
    order: list[fx.Node] = []

    def put(node: fx.Node) -> None:
        found = [node]
        waiting.discard(node)
        for each in found:
            for source in each.all_input_nodes:
                if source in waiting:
                    waiting.discard(source)
                    found.append(source)
        order.extend(sorted(found, key=position.__getitem__))

    for node in (*beside.get(None, ()), *planned):
        pending = [node]
        while pending:
            if (following := pending.pop()) in waiting:
                put(following)
            pending.extend(reversed(beside.get(following, ())))
    put(graph.output_node())
    _relink(graph, order)


def _followers(position: Iterable[fx.Node], planned: frozenset[fx.Node]) -> dict[fx.Node | None, list[fx.Node]]:
    """By node, the nodes that come right behind it, in order; None for the beginning of the graph."""
    found: dict[fx.Node | None, list[fx.Node]] = {}
    before: fx.Node | None = None
    for node in position:
        if node in planned:
            before = node
        elif node.op == "call_function" and node.target is operator.getitem and node.args[0] in position:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            found.setdefault(source if source.op == "call_function" else before, []).append(node)
        elif node.op == "call_function" and (not node.users or node.is_impure()):
            found.setdefault(before, []).append(node)
            before = node
    return found


def _relink(graph: fx.Graph, order: Iterable[fx.Node]) -> None:
    last = next((node for node in reversed(graph.nodes) if node.op == "placeholder"), None)
    for node in order:
        if last is None:
            next(iter(graph.nodes)).prepend(node)
        elif last.next is not node:
            last.append(node)
        last = node


_SECOND_RUN = StepKind.SECOND_RUN


def check_order(order: OrderPlan) -> None:
    """Raise ``PolicyAuditError`` for an order in which something runs twice, never, or before what it reads. Linear."""
    facts = order.facts
    if len(order.traced_schedule) == 0 and len(order.schedule) == 0:
        return
    at: dict[int, int] = {}
    for step, (kind, row, _) in enumerate(order.schedule):
        if kind <= _SECOND_RUN:
            if row in at:
                refuse(f"the order has `{facts.names[row]}` twice")
            at[row] = step
    for row, op in enumerate(facts.ops):
        if op != "call_function":
            continue
        if row not in at:
            refuse(f"the order leaves `{facts.names[row]}` out")
        late = next((read for read in facts.inputs[row] if at.get(read, -1) > at[row]), None)
        if late is not None:
            refuse(f"the order has `{facts.names[row]}` before `{facts.names[late]}`, which it reads")


def put_in_order(gm: fx.GraphModule, policy: Policy, order: OrderPlan) -> tuple[RankOrder, ...]:
    """Apply buckets and order, in place; returns the process groups that the graph did not name before. O(nodes +
    edges). Raises ``PolicyAuditError`` (APL408) where the graph is not the one that was planned."""
    graph = gm.graph
    check_order(order)
    beside = copies_in(graph.nodes)
    check_names(graph, order.traced, beside, "is not the one whose order was planned")
    _check_copies(graph, order)
    if not order.moves and order.traced_schedule == order.schedule:
        return ()
    groups = edit_graph(graph, policy, order.edits, order.traced, order.facts, beside)
    arrange_nodes(graph, list(_in_order(graph, order.facts, order.schedule)))
    graph.lint()
    gm.recompile()
    return groups


def _check_copies(graph: fx.Graph, order: OrderPlan) -> None:
    """The copies to the host and back that the final order has are those of the graph."""
    instead = {old: new for edit in order.edits.done for old, new in edit.replaced}

    def name_of(name: str) -> str:
        while name in instead:
            name = instead[name]
        return name

    there = Counter((kind, name_of(value)) for kind, value in copies_in(graph.nodes).values())
    planned = Counter((kind, name) for kind, name, _ in _copy_steps(order.facts, order.schedule))
    wrong = next(iter((there - planned) + (planned - there)), None)
    if wrong is not None:
        refuse(f"the copies of `{wrong[1]}` to the host and back are not those of the order")


def _copy_steps(facts: Facts, schedule: Schedule) -> Iterator[tuple[StepKind, str, int]]:
    return ((StepKind(kind), facts.names[row], region) for kind, row, region in schedule if kind > _SECOND_RUN)


def _in_order(graph: fx.Graph, facts: Facts, schedule: Schedule) -> Iterator[fx.Node]:
    """The nodes by the steps of a schedule. Copies of one value are in the order of their regions."""
    nodes = {node.name: node for node in graph.nodes}
    copies: dict[tuple[StepKind, str], list[fx.Node]] = {}
    for node, key in copies_in(graph.nodes).items():
        copies.setdefault(key, []).append(node)
    waiting = {key: iter(each) for key, each in copies.items()}
    steps = sorted(_copy_steps(facts, schedule), key=lambda step: step[2])
    copy_of = {(kind, name, region): next(waiting[kind, name]) for kind, name, region in steps}
    for kind, row, region in schedule:
        name = facts.names[row]
        yield nodes[name] if kind <= _SECOND_RUN else copy_of[StepKind(kind), name, region]
