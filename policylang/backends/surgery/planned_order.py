"""Carries a planned order out on a graph as it runs: collectives become buckets, then every node takes its place.

The graph is the one that :attr:`OrderPlan.traced` describes, with the copies to the host and back that its schedule has
beside it. Nothing is changed before all that can be wrong with graph or plan has been looked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from torch import fx

from policylang.backends.runtime.groups import RankOrder
from policylang.backends.surgery.copy_insertion import copies_in
from policylang.backends.surgery.edits import check_names, edit_graph, refuse
from policylang.backends.surgery.order import arrange_nodes
from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule, StepKind
from policylang.language.syntax import Policy
from policylang.planning.plan import OrderPlan

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
    """Carry buckets and order out, in place; the process groups that the graph names now and did not before.

    O(nodes + edges). Raises ``PolicyAuditError`` (APL408) where the graph is not the one that was planned.
    """
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
    """The nodes by the steps of a schedule. Copies of one value come in the order of their regions."""
    nodes = {node.name: node for node in graph.nodes}
    copies: dict[tuple[StepKind, str], list[fx.Node]] = {}
    for node, key in copies_in(graph.nodes).items():
        copies.setdefault(key, []).append(node)
    by_region = _numbered(sorted(_copy_steps(facts, schedule), key=lambda step: step[2]))
    for kind, row, region in schedule:
        name = facts.names[row]
        if kind <= _SECOND_RUN:
            yield nodes[name]
        else:
            yield copies[StepKind(kind), name][by_region[StepKind(kind), name, region]]


def _numbered(steps: Iterable[tuple[StepKind, str, int]]) -> Mapping[tuple[StepKind, str, int], int]:
    seen: Counter[tuple[StepKind, str]] = Counter()
    found = {}
    for kind, name, region in steps:
        found[kind, name, region] = seen[kind, name]
        seen[kind, name] += 1
    return found
