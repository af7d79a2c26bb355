"""Evaluates selectors on a graph: each denotes a sorted list of forward rows, worked out once.

Every form costs at most one pass over the nodes and edges it touches. Operators are looked up by name in
``Facts.by_target``: a pattern is matched once per distinct operator, never per node. Equal sub-trees, wherever in a
policy they stand, are evaluated once; so is a ``let``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from functools import cache
from typing import assert_never

from attrs import fields

from policylang.graph.blocks import BlockTable, blocks_of
from policylang.graph.chains import Chains
from policylang.graph.facts import Facts
from policylang.graph.rowsets import difference, intersection, mask_of, members, union
from policylang.language.globs import NameGlob, PathGlob
from policylang.language.interruption.wanted import check_cancelled
from policylang.language.resolution.operator_names import PLAIN_FUNCTIONS
from policylang.language.syntax import (
    Chain,
    ChainOf,
    Difference,
    Everything,
    Feeding,
    InBlock,
    InModule,
    Intersection,
    Let,
    Operator,
    Ordinal,
    Policy,
    Reference,
    Selector,
    Step,
    Union,
    Where,
)
from policylang.language.walk import parts
from policylang.planning.selection.cuts import Cuts
from policylang.planning.selection.operator_prices import OperatorPrices
from policylang.planning.selection.ordinals import choose, chosen_blocks, effective_scope, group_keys
from policylang.planning.selection.predicates import compile_predicate, split_target
from policylang.simulation.node_times import NodeTimes

_CHILD_FIELDS = frozenset({"selector", "left", "right", "marker", "parts"})


def operator_matcher(operator: Operator) -> Callable[[str], bool]:
    """Whether a full operator name is one that ``operator`` names.

    Without a namespace: of any but Python's own functions, or ``add`` would count additions of sizes.
    """
    name = NameGlob(operator.name)
    namespace = None if operator.namespace is None else NameGlob(operator.namespace)
    overload = None if operator.overload is None else NameGlob(operator.overload)

    def matches(target: str) -> bool:
        target_namespace, target_name, target_overload = split_target(target)
        return (
            name.matches(target_name)
            and (target_namespace != PLAIN_FUNCTIONS if namespace is None else namespace.matches(target_namespace))
            and (overload is None or overload.matches(target_overload))
        )

    return matches


def children(selector: Selector, lets: Mapping[str, Let]) -> tuple[Selector, ...]:
    """The selectors a selector is made of; of a reference, what its ``let`` stands for."""
    return (lets[selector.name].selector,) if isinstance(selector, Reference) else parts(selector)


def parts_first(
    selector: Selector,
    lets: Mapping[str, Let],
    known: Container[int] = (),
    is_one_part: Callable[[Selector], bool] = lambda part: False,
) -> Iterator[Selector]:
    """The selector and all that it is made of, parts first, each once; those ``known`` by their id are left out.

    The walk keeps its own stack: a policy's ``let`` lines may refer to each other to any depth.
    """
    seen: set[int] = set()
    stack: list[tuple[Selector, bool]] = [(selector, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen and id(node) not in known:
            seen.add(id(node))
            stack.append((node, True))
            inside = () if is_one_part(node) else children(node, lets)
            stack.extend((part, False) for part in reversed(inside))


class Selections:
    """The sets that the selectors of one policy denote on one graph."""

    def __init__(
        self,
        facts: Facts,
        lets: Mapping[str, Let],
        blocks: BlockTable,
        chains: Chains,
        times: NodeTimes | None = None,
    ) -> None:
        self.facts = facts
        self.times = times
        self.prices = None if times is None else OperatorPrices(facts, times)
        self.lets = lets
        self.blocks = blocks
        self.chains = chains
        self.cuts = Cuts(facts, chains)
        self._numbers: dict[int, int] = {}  # id of a tree node -> number of its equivalence class
        self._classes: dict[tuple[object, ...], int] = {}
        self._rows: list[list[int]] = []  # by class
        self._alive: list[Selector] = []  # keeps the ids in _numbers from being used again

    def rows(self, selector: Selector) -> list[int]:
        """The forward rows a resolved selector denotes, in graph order. The list is shared: do not change it."""
        numbers = self._numbers
        for node in parts_first(selector, self.lets, numbers):
            self._evaluate_once(node, [numbers[id(part)] for part in children(node, self.lets)])
        return self._rows[numbers[id(selector)]]

    def _evaluate_once(self, node: Selector, parts: list[int]) -> None:
        check_cancelled()
        own = (getattr(node, f.name) for f in fields(type(node)) if f.eq and f.name not in _CHILD_FIELDS)
        key = (type(node), *own, *parts)
        number = self._classes.get(key)
        if number is None:
            found = self.evaluate(node, [self._rows[part] for part in parts])  # raises: then nothing is remembered
            number = self._classes[key] = len(self._rows)
            self._rows.append(found)
        self._numbers[id(node)] = number
        self._alive.append(node)

    def evaluate(self, node: Selector, parts: list[list[int]]) -> list[int]:
        """What one node of a tree denotes where its parts denote these rows: one pass, and nothing is remembered."""
        facts, length = self.facts, len(self.facts)
        if isinstance(node, Everything):
            return facts.forward
        if isinstance(node, Operator):
            return self._operator(node)
        if isinstance(node, Reference):
            return parts[0]
        if isinstance(node, InModule):
            return self._in_module(node, parts[0])
        if isinstance(node, InBlock):
            return self._in_block(node, parts[0])
        if isinstance(node, Ordinal):
            scope = effective_scope(node.scope, bool(self.blocks.names))
            return choose(node, parts[0], group_keys(scope, parts[0], facts, self.blocks, self.chains))
        if isinstance(node, Where):
            test = compile_predicate(node.predicate, facts, self.blocks, self.chains, self.cuts, self.prices)
            return [row for row in parts[0] if test(row)]
        if isinstance(node, Union):
            return union(parts, facts.forward, length)
        if isinstance(node, Intersection):
            return intersection(parts[0], parts[1], length)
        if isinstance(node, Difference):
            return difference(parts[0], parts[1], length)
        if isinstance(node, Feeding):
            return self._feeding(node, parts[0], parts[1])
        if isinstance(node, Step):
            return self._step(node, parts[0])
        if isinstance(node, Chain):
            return self._chain(node, parts[0])
        if isinstance(node, ChainOf):
            return self._chain_of(node, parts)
        raise TypeError(f"`{node.text}` has not been resolved")

    def _operator(self, node: Operator) -> list[int]:
        matches = operator_matcher(node)
        found = [rows for target, rows in self.facts.by_target.items() if matches(target)]
        return union(found, self.facts.forward, len(self.facts))

    def _in_module(self, node: InModule, rows: list[int]) -> list[int]:
        covers, modules = cache(PathGlob(node.glob).covers), self.facts.modules
        return [row for row in rows if covers(modules[row]) is not node.outside]

    def _in_block(self, node: InBlock, rows: list[int]) -> list[int]:
        block_of = self.blocks.block_of
        # The extra last entry answers for -1, "outside every block".
        chosen = [*chosen_blocks(node.which, len(self.blocks.names)), False]
        return [row for row in rows if chosen[block_of[row]] is not node.outside]

    def _feeding(self, node: Feeding, left: list[int], right: list[int]) -> list[int]:
        neighbours = self.facts.inputs if node.reverse else self.facts.users
        mask = mask_of(right, len(self.facts))
        return [row for row in left if any(mask[other] for other in neighbours[row])]

    def _step(self, node: Step, rows: list[int]) -> list[int]:
        neighbours = {"users": self.facts.users, "inputs": self.facts.inputs}[node.direction]
        mask = mask_of((other for row in rows for other in neighbours[row]), len(self.facts))
        return members(mask, self.facts.forward)

    def _chain(self, node: Chain, rows: list[int]) -> list[int]:
        match node.direction:
            case "after":
                return self.chains.after(rows)
            case "before":
                return self.chains.before(rows)
            case "through":
                both = [self.chains.before(rows), rows, self.chains.after(rows)]
                return union(both, self.facts.forward, len(self.facts))
            case _:
                assert_never(node.direction)

    def _chain_of(self, node: ChainOf, parts: list[list[int]]) -> list[int]:
        match node.cut:
            case "after":
                return self.chains.after_marker(parts[0], parts[1])
            case "before":
                return self.chains.before_marker(parts[0], parts[1])
            case None:
                return union([parts[0], self.chains.after(parts[0])], self.facts.forward, len(self.facts))
            case _:
                assert_never(node.cut)


def selections_for(
    policy: Policy, facts: Facts, blocks: BlockTable | None = None, *, times: NodeTimes | None = None
) -> Selections:
    """What the selectors of a policy denote on a graph, whose blocks are as the policy names them unless given.
    ``times``: of the graph's nodes, where there is a device."""
    if blocks is None:
        blocks = blocks_of(facts, None if policy.blocks is None else PathGlob(policy.blocks.glob))
    return Selections(facts, policy.lets, blocks, Chains(facts), times)
