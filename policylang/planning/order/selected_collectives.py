"""What the selectors of scheduling lines denote: nodes of the whole step, and the collectives among them.

---

The collectives that each scheduling statement names, before and after some of them have become one."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence

from attrs import evolve, field, frozen

from policylang.graph.blocks import BlockTable
from policylang.graph.chains import Chains
from policylang.graph.facts import Facts, Flag, Phase
from policylang.language.syntax import Delay, KeepOrder, Overlap, Policy, Prefetch, Scheduling, Selector
from policylang.planning.graph_edit import Edits
from policylang.planning.order.segments import NOWHERE, Stages, stages
from policylang.planning.selection.selectors import Selections
from policylang.simulation.node_times import NodeTimes, node_times


class Picks:
    """The selectors of one policy on the graph as it runs, before and after collectives have become one."""

    def __init__(
        self,
        policy: Policy,
        blocks: Mapping[str, int],
        block_names: tuple[str, ...],
        again: Collection[str],
        times: NodeTimes | None,
    ) -> None:
        """``blocks``: of nodes by their names, as far as the graph says them; ``again``: the names of second runs."""
        self._policy = policy
        self._blocks = blocks
        self._block_names = block_names
        self._again = frozenset(again)
        self._times = times
        self._known: dict[int, tuple[Facts, Selections, Stages]] = {}  # by id; the facts keep it theirs

    def of(self, facts: Facts, selector: Selector) -> tuple[Sequence[int], Sequence[int]]:
        """The rows that a selector denotes, backward and recomputations included, and the block of every row."""
        selections = self.selections(facts)
        return selections.rows(selector), selections.blocks.block_of

    def collectives(self, facts: Facts, selector: Selector) -> tuple[list[int], list[int]]:
        """The collectives that a selector picks, each once and in the order of the graph, and what it picks beside: a
        wait or a piece stands for its collective."""
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
        return self._of(facts)[1]

    def stages(self, facts: Facts) -> Stages:
        return self._of(facts)[2]

    def _of(self, facts: Facts) -> tuple[Facts, Selections, Stages]:
        known = self._known.get(id(facts))
        if known is None:
            known = self._known[id(facts)] = (facts, *self._work_out(facts))
        return known

    def _work_out(self, facts: Facts) -> tuple[Selections, Stages]:
        said = [self._blocks.get(name, NOWHERE) for name in facts.names]
        again = frozenset(row for row, name in enumerate(facts.names) if name in self._again)
        found = stages(facts, said, again)
        block_of = array("i", said)
        for row, stage in enumerate(found.stage_of):
            if block_of[row] == NOWHERE and stage >= 0:
                block_of[row] = found.block[stage]
        phases = bytearray(
            Phase.FORWARD if op == "call_function" else phase for op, phase in zip(facts.ops, facts.phases, strict=True)
        )
        whole = evolve(facts, phases=phases)
        times = None if self._times is None else node_times(facts, self._times.device)
        blocks = BlockTable(block_of, self._block_names)
        return Selections(whole, self._policy.lets, blocks, Chains(whole), times), found


@frozen
class Picked:
    """Of one statement."""

    statement: Scheduling
    rows: tuple[int, ...]
    """In the graph as its buckets leave it, in order."""
    taken: tuple[int, ...] = ()
    """Those of them that are this statement's to move: of those that several name, the last one's."""
    takers: Mapping[int, int] = field(factory=dict)
    """Later statement to how many of them it has taken."""


def after_edits(names: Sequence[str], edits: Edits, facts: Facts) -> tuple[int, ...]:
    """The rows, once edits are carried out, of some collectives: those that have become one are that one."""
    became: dict[str, list[str]] = {}
    for edit in edits.done:
        made = [node.name for node in edit.nodes if node.name in facts.index]
        starts = [name for name in made if facts.flags[facts.index[name]] & Flag.COLLECTIVE]
        for name in edit.collectives:
            became.setdefault(name, []).extend(starts)
    found: dict[int, None] = {}
    pending = list(reversed(names))
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in facts.index:
            found[facts.index[name]] = None
        pending.extend(became.get(name, ()))
    return tuple(sorted(found))


def shared_out(policy: Policy, rows: Sequence[tuple[int, ...]]) -> list[Picked]:
    """What each statement of ``Policy.scheduling`` moves of what it names.

    Of two prefetches that name a collective the later one moves it, and of two delays. ``overlap`` moves what none of
    them names and no ``keep order of`` holds.
    """
    statements = policy.scheduling
    owner: dict[tuple[type, int], int] = {}
    for number, statement in enumerate(statements):
        for row in rows[number]:
            owner[type(statement), row] = number
    found = []
    for number, statement in enumerate(statements):
        takers: dict[int, int] = {}
        taken = []
        for row in rows[number]:
            by = owner[type(statement), row]
            if isinstance(statement, Overlap):
                others = (owner.get((kind, row), number) for kind in (Prefetch, Delay, KeepOrder))
                by = next((each for each in others if each != number), number)
            if by == number or isinstance(statement, KeepOrder):
                taken.append(row)
            else:
                takers[by] = takers.get(by, 0) + 1
        found.append(Picked(statement, rows[number], tuple(taken), takers))
    return found
