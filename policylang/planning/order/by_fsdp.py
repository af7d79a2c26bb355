"""Scheduling lines where ``fully_shard`` gathers the weights, in hooks around the blocks of a model in eager.

There is no graph to put in order. What a line picks is read off a small graph that gathers the same weights; `prefetch`
comes to a list of what to gather ahead for each block, and `bucket … per block` is held against what is gathered
together.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from policylang.graph.blocks import BlockTable
from policylang.graph.builder import GraphBuilder
from policylang.graph.facts import GraphKind
from policylang.language.diagnostics import Diagnostic, diagnose, prefixed, removed
from policylang.language.syntax import TIMES, Bucket, Compare, Policy, Prefetch, Scheduling, Selector
from policylang.language.walk import tests_of
from policylang.language.wording import counted, first_lines, listed
from policylang.operators.names import GATHER, WAIT
from policylang.planning.block_graph import WHOLE_GRAPH
from policylang.planning.capabilities import EAGER
from policylang.planning.decisions.weights_aside import WeightAside
from policylang.planning.order.statements import cannot_order, done_by_fsdp
from policylang.planning.selection.selectors import Selections, selections_for

NOT_SHARDED, NOT_TOGETHER, NOTHING_AHEAD = "APL387", "APL388", "APL389"
_SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
_MOST = 8


@frozen
class Unit:
    """What ``fully_shard`` gathers at once."""

    path: str
    """Of the module that it was called with."""
    ranks: tuple[int, ...]
    """Over which it gathers."""
    within: bool = True
    """Whether all that it gathers lies in one block."""


@frozen
class BlockWeight:
    """A weight of a block; without a unit where ``fully_shard`` leaves it alone."""

    weight: WeightAside
    unit: int | None


@frozen
class LineByFsdp:
    statement: Bucket | Scheduling
    said: str
    """What came of it, as a phrase."""


@frozen
class OrderByFsdp:
    """What ``fully_shard`` is to be told."""

    forward: Mapping[int, tuple[int, ...]] = field(factory=dict)
    """By block, the units that are gathered ahead before it computes, in the order in which they are gathered."""
    backward: Mapping[int, tuple[int, ...]] = field(factory=dict)
    lines: tuple[LineByFsdp, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()

    def words(self, units: Sequence[Unit]) -> list[str]:
        """What has to be the same on every rank."""
        both = (("forward", self.forward), ("backward", self.backward))
        return [
            f"{half} of block {block}: {', '.join(units[each].path for each in ahead)}"
            for half, lists in both
            for block, ahead in sorted(lists.items())
        ]


def refused_in_eager(policy: Policy) -> list[Diagnostic]:
    """What no eager checkpoint can do of the policy's order, whatever the model."""
    return cannot_order(policy, EAGER)


def unchecked(policy: Policy) -> list[Diagnostic]:
    """Of a policy that decides about no value, so that no block is planned: its expectations are about a graph."""
    return [
        diagnose(
            WHOLE_GRAPH,
            f"`{each.span.one_line}` is not checked: a policy of scheduling lines alone plans no values in eager",
            each.span,
            help="check it with `policylang plan` on a snapshot of the model",
        )
        for each in policy.expectations
    ]


def plan_by_fsdp(
    policy: Policy, blocks: Sequence[str], units: Sequence[Unit], weights: Sequence[BlockWeight], running: Sequence[int]
) -> OrderByFsdp:
    """``blocks``: their paths; ``weights``: all of theirs, block by block; ``running``: the blocks as the forward runs
    them. Linear in weights and in what is gathered ahead."""
    graph = _WeightGraph.of(policy, blocks, units, weights)
    lines: list[LineByFsdp] = []
    found: list[Diagnostic] = []
    reach: dict[int, int] = {}
    for statement in (*policy.buckets, *policy.scheduling):
        said: str | Diagnostic = "left: an eager checkpoint has no order of collectives"
        if isinstance(statement, Prefetch):
            said = _prefetched(statement, graph, reach)
        elif isinstance(statement, Bucket) and done_by_fsdp(statement):
            said = _together(statement, graph)
        if isinstance(said, Diagnostic):
            if not statement.optional:
                found.append(said)
            said = f"left: {said.message}"
        lines.append(LineByFsdp(statement, said))
    running = [block for block in running if graph.units_of[block]]  # another gathers nothing, and is told nothing
    farthest = min(max(reach.values(), default=0), len(blocks))
    forward: dict[int, tuple[int, ...]] = {}
    backward: dict[int, tuple[int, ...]] = {}
    for at, block in enumerate(running):
        after = running[at + 1 : at + 1 + farthest]
        before = running[max(0, at - farthest) : at][::-1]
        forward[block] = _near(((number, graph.units_of[each]) for number, each in enumerate(after, 1)), reach)
        backward[block] = _near(((number, graph.units_of[each][::-1]) for number, each in enumerate(before, 1)), reach)
    return OrderByFsdp(_some(forward), _some(backward), tuple(lines), tuple(found))


def _near(others: Iterable[tuple[int, Sequence[int]]], reach: Mapping[int, int]) -> tuple[int, ...]:
    """The units that are wanted so many blocks away."""
    return tuple(unit for distance, units in others for unit in units if reach.get(unit, 0) >= distance)


def _some(lists: Mapping[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    return {block: units for block, units in lists.items() if units}


def _prefetched(statement: Prefetch, graph: _WeightGraph, reach: dict[int, int]) -> str | Diagnostic:
    """Notes how far ahead each unit is gathered, and says how many blocks have one."""
    if timed := _asks_for_times(statement, graph):
        return timed
    picked = graph.picked(statement.selector, scatters=False)
    wrong = _nothing_there(statement, graph, picked) or _not_sharded(statement, graph, picked)
    if wrong is not None:
        return wrong
    chosen = {weight.unit: weight.weight.block for weight in picked if weight.unit is not None}
    shared = [graph.units[unit].path for unit in chosen if not graph.units[unit].within]
    if shared:
        message = f"{_asks(statement)}, and {_whose(shared)} gathers more than one block at once"
        help = "call `fully_shard` with each block by itself, then with the model"
        return diagnose(NOT_TOGETHER, message, statement.span, help=help)
    of_unit = Counter(each.unit for each in graph.weights)
    in_part = [unit for unit, count in Counter(each.unit for each in picked).items() if count < of_unit[unit]]
    if split := [unit for unit in in_part if unit is not None]:
        paths = [graph.units[unit].path for unit in split]
        message = f"{_asks(statement)} of a part of the weights that {_whose(paths)} gathers at once"
        help = "pick all of a block's gathers, such as `all_gather where from parameter`"
        return diagnose(NOTHING_AHEAD, message, statement.span, help=help)
    if len(graph.blocks) < 2:
        message = f"{_asks(statement)}, and the model has one block: there is none before it"
        return diagnose(
            NOTHING_AHEAD,
            message,
            statement.span,
            help="leave the line out, or write `optional` before it",
            mends=[removed(statement.span), prefixed(statement.span, "optional")],
        )
    for unit in chosen:
        reach[unit] = statement.blocks  # of two lines that pick a weight, the later one says how far
    far = counted(statement.blocks, "block")
    return f"`fully_shard` gathers the weights of {counted(len(set(chosen.values())), 'block')} {far} ahead"


def _together(statement: Bucket, graph: _WeightGraph) -> str | Diagnostic:
    if timed := _asks_for_times(statement, graph):
        return timed
    picked = graph.picked(statement.selector, scatters=True)
    wrong = _nothing_there(statement, graph, picked) or _not_sharded(statement, graph, picked)
    if wrong is not None:
        return wrong
    of_block: dict[int, dict[int, None]] = {}
    for each in picked:
        if each.unit is not None:
            of_block.setdefault(each.weight.block, {})[each.unit] = None
    apart: list[str] = []
    for block, theirs in of_block.items():
        name, paths = graph.blocks[block], [graph.units[unit].path for unit in theirs]
        if not all(graph.units[unit].within for unit in theirs):
            apart.append(f"`{name}` is gathered with other blocks, by `fully_shard` of {listed(_quoted(paths), 3)}")
        elif len({graph.units[unit].ranks for unit in theirs}) < len(theirs):
            apart.append(f"`{name}` is gathered in {len(theirs)} parts: {listed(_quoted(paths), 3)}")
    if apart:
        message = f"{_asks(statement)}, and `fully_shard` gathers otherwise: {apart[0]}"
        help = "call `fully_shard` with each block, and with nothing inside it that has the same ranks"
        details = first_lines(tuple(apart), _MOST) if len(apart) > 1 else ()
        return diagnose(NOT_TOGETHER, message, statement.span, help=help, details=details)
    return f"`fully_shard` gathers and scatters each of {counted(len(of_block), 'block')} at once"


def _asks_for_times(statement: Bucket | Prefetch, graph: _WeightGraph) -> Diagnostic | None:
    tests = tests_of(graph.policy, statement)
    if not any(isinstance(test, Compare) and test.quantity in TIMES for test in tests):
        return None
    message = f"{_asks(statement)} by their times, which are not known in eager"
    help = "pick them by `bytes`, or by where they are"
    return diagnose(NOTHING_AHEAD, message, statement.span, help=help)


def _nothing_there(
    statement: Bucket | Prefetch, graph: _WeightGraph, picked: Sequence[BlockWeight]
) -> Diagnostic | None:
    if picked:
        return None
    message = f"{_asks(statement)}, and picks no weight of a block"
    help = "in eager, what is gathered is weights: write `all_gather where from parameter`"
    return diagnose(NOTHING_AHEAD, message, statement.span, help=help)


def _not_sharded(statement: Bucket | Prefetch, graph: _WeightGraph, picked: Sequence[BlockWeight]) -> Diagnostic | None:
    """A block may have weights that ``fully_shard`` was told to leave alone, but not all of them."""
    sharded = {each.weight.block for each in graph.weights if each.unit is not None}
    bare = [graph.blocks[each] for each in dict.fromkeys(each.weight.block for each in picked) if each not in sharded]
    if not bare:
        return None
    who = listed(_quoted(bare), 3) if sharded else "none of the blocks"
    message = f"{_asks(statement)}, which `fully_shard` does in eager, and it has not sharded {who}"
    if not sharded:
        message = f"{_asks(statement)}, which `fully_shard` does in eager, and it has sharded none of the blocks"
    help = "call `fully_shard` with each block and then with the model, before the first step; "
    help += "`FullyShardedDataParallel` and `DistributedDataParallel` take no order"
    return diagnose(NOT_SHARDED, message, statement.span, help=help)


def _asks(statement: Bucket | Prefetch) -> str:
    return f"`{statement.span.one_line}` asks for {'gathers' if isinstance(statement, Prefetch) else 'buckets'}"


def _whose(paths: Sequence[str]) -> str:
    return f"`fully_shard` of {listed(_quoted(paths), 3)}"


def _quoted(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]


@frozen(eq=False)
class _WeightGraph:
    """A graph that gathers each weight in its module, uses it, and scatters its gradient."""

    policy: Policy
    blocks: Sequence[str]
    units: Sequence[Unit]
    weights: Sequence[BlockWeight]
    units_of: Sequence[Sequence[int]]
    """Of each block, in the order of its modules."""
    selections: Selections
    gathers: Mapping[int, int]
    """Row to the number of its weight."""
    scatters: Mapping[int, int]

    @classmethod
    def of(
        cls, policy: Policy, blocks: Sequence[str], units: Sequence[Unit], weights: Sequence[BlockWeight]
    ) -> _WeightGraph:
        graph = GraphBuilder()
        numbers: list[int] = []
        gathers: dict[int, int] = {}
        scatters: dict[int, int] = {}
        units_of: list[dict[int, None]] = [{} for _ in blocks]
        for number, each in enumerate(weights):
            weight = each.weight
            ranks = len(units[each.unit].ranks) if each.unit is not None else 2
            size: dict[str, Any] = {"bytes": weight.bytes, "shape": weight.shape, "module": weight.module}
            parameter = graph.add(f"weight_{number}", "parameter", (), input_name=weight.path)
            gather = graph.add(f"gather_{number}", GATHER, (parameter,), group=f"fsdp:{ranks}", **size)
            wait = graph.add(f"wait_{number}", WAIT, (gather,), **size)
            used = graph.add(f"used_{number}", "aten.mm.default", (wait,), module=weight.module)
            other = graph.add(f"other_{number}", "aten.mm.default", (wait, used), module=weight.module)
            scatter = graph.add(f"scatter_{number}", _SCATTER, (other,), group=f"fsdp:{ranks}", **size)
            graph.add(f"backward_{number}", "aten.mm.default", (wait, other, scatter), backward=True)
            gathers[gather], scatters[scatter] = number, number
            if each.unit is not None:
                units_of[weight.block][each.unit] = None
            numbers += [weight.block] * (len(graph.rows) - len(numbers))
        facts = graph.facts(GraphKind.JOINT)
        selections = selections_for(policy, facts, BlockTable(array("i", numbers), tuple(blocks)))
        return cls(policy, blocks, units, weights, [list(each) for each in units_of], selections, gathers, scatters)

    def picked(self, selector: Selector, *, scatters: bool) -> list[BlockWeight]:
        """The weights whose gathers a selector picks, or whose gradients' scatters."""
        moved = {**self.gathers, **(self.scatters if scatters else {})}
        return [self.weights[number] for number in sorted({moved[row] for row in self._rows(selector) if row in moved})]

    def _rows(self, selector: Selector) -> set[int]:
        owners = self.selections.facts.owners
        return {owners[row] for row in self.selections.rows(selector)}
