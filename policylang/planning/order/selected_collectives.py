"""The collectives that scheduling lines select, before and after buckets have joined some of them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from attrs import evolve, field, frozen

from policylang.graph.blocks import BlockTable
from policylang.graph.chains import Chains
from policylang.graph.facts import Facts, Flag, Phase
from policylang.language.syntax import Delay, KeepOrder, Overlap, Policy, Prefetch, Scheduling, Selector
from policylang.planning.graph_edit import Edits
from policylang.planning.order.segments import NO_SEGMENT, Segments, segments
from policylang.planning.selection.selectors import Selections
from policylang.simulation.node_times import NodeTimes, node_times


class WholeStepSelections:
    """The selectors of one policy on the rematerialised graph, where they denote forward and backward nodes alike."""

    def __init__(
        self,
        policy: Policy,
        blocks: Mapping[str, int],
        block_names: tuple[str, ...],
        recomputed: Collection[str],
        times: NodeTimes | None,
    ) -> None:
        """``blocks``: of nodes by name, if the graph has them; ``recomputed``: names of recomputations."""
        self._policy, self._blocks, self._block_names = policy, blocks, block_names
        self._recomputed = frozenset(recomputed)
        self._times = times
        self._known: dict[Facts, tuple[Selections, Segments]] = {}

    def rows(self, facts: Facts, selector: Selector) -> tuple[Sequence[int], Sequence[int]]:
        """The nodes that a selector denotes, and the block of every node of the graph."""
        selections = self.selections(facts)
        return selections.rows(selector), selections.blocks.block_of

    def collectives(self, facts: Facts, selector: Selector) -> tuple[list[int], list[int]]:
        """The collectives that a selector denotes, itself or by a wait or a piece of theirs, in graph order; and the
        other nodes that it denotes."""
        found, others = dict[int, None](), list[int]()
        for row in self.selections(facts).rows(selector):
            if facts.flags[row] & Flag.COLLECTIVE:
                found[row] = None
            elif facts.flags[facts.owners[row]] & Flag.COLLECTIVE:
                found[facts.owners[row]] = None
            else:
                others.append(row)
        return sorted(found), others

    def selections(self, facts: Facts) -> Selections:
        return self._of(facts)[0]

    def segments(self, facts: Facts) -> Segments:
        return self._of(facts)[1]

    def _of(self, facts: Facts) -> tuple[Selections, Segments]:
        if facts in self._known:
            return self._known[facts]
        labelled = [self._blocks.get(name, NO_SEGMENT) for name in facts.names]
        recomputed = frozenset(row for row, name in enumerate(facts.names) if name in self._recomputed)
        found = segments(facts, labelled, recomputed)
        block_of = array("i", labelled)
        for row, segment in enumerate(found.segment_of):
            if block_of[row] == NO_SEGMENT and segment >= 0:
                block_of[row] = found.block[segment]
        phases = bytearray(
            Phase.FORWARD if op == "call_function" else phase for op, phase in zip(facts.ops, facts.phases, strict=True)
        )
        whole = evolve(facts, phases=phases)
        times = None if self._times is None else node_times(facts, self._times.device)
        blocks = BlockTable(block_of, self._block_names)
        selections = Selections(whole, self._policy.lets, blocks, Chains(whole), times)
        self._known[facts] = selections, found
        return selections, found


@frozen
class SelectedCollectives:
    """The collectives of one statement, in the graph as its buckets leave it."""

    statement: Scheduling
    rows: tuple[int, ...]
    taken: tuple[int, ...] = ()
    """Those that this statement moves, where several select them."""
    takers: Mapping[int, int] = field(factory=dict)
    """Other statement to how many of them it moves instead."""


def after_edits(names: Sequence[str], edits: Edits, facts: Facts) -> tuple[int, ...]:
    """The nodes of some collectives once edits are made; those that were joined are the bucket's."""
    became: dict[str, list[str]] = {}
    for edit in edits.done:
        made = [node.name for node in edit.nodes if node.name in facts.index]
        starts = [name for name in made if facts.flags[facts.index[name]] & Flag.COLLECTIVE]
        for name in edit.collectives:
            became.setdefault(name, []).extend(starts)
    found: set[int] = set()
    pending, seen = list(names), set[str]()
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            if name in facts.index:
                found.add(facts.index[name])
            pending.extend(became.get(name, ()))
    return tuple(sorted(found))


def assigned(policy: Policy, rows: Sequence[tuple[int, ...]]) -> list[SelectedCollectives]:
    """The collectives that each statement of ``Policy.scheduling`` moves."""
    last: dict[tuple[type, int], int] = {}
    for number, statement in enumerate(policy.scheduling):
        last.update(dict.fromkeys(((type(statement), row) for row in rows[number]), number))
    found = []
    for number, statement in enumerate(policy.scheduling):
        movers = {row: _mover(statement, number, row, last) for row in rows[number]}
        taken = tuple(row for row, mover in movers.items() if mover == number)
        takers = Counter(mover for mover in movers.values() if mover != number)
        found.append(SelectedCollectives(statement, rows[number], taken, takers))
    return found


def _mover(statement: Scheduling, number: int, row: int, last: Mapping[tuple[type, int], int]) -> int:
    """The statement that moves a collective; ``last``: by kind and collective, the last statement that selects it."""
    if isinstance(statement, Overlap):
        return next((last[kind, row] for kind in (Prefetch, Delay, KeepOrder) if (kind, row) in last), number)
    return last[type(statement), row] if statement.is_alone else number
