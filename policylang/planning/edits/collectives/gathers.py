"""``fuse all_gather chains``: two or more gathers in a row become one over the ranks of all of them.

A chain is a line ``gather → wait → layout → gather → wait → layout …``. What it makes is found by the layout algebra
(:mod:`policylang.operators.layouts`) and made again from one gather of the first one's input and views
(:mod:`policylang.planning.edits.proof.canonical`). The order of the fused group's ranks is where the shards have to
lie: it comes from the groups' own rank lists. Then both chains are run on all ranks
(:mod:`policylang.planning.edits.proof.equivalence`), and if anything differs, nothing is changed.
"""

from __future__ import annotations

from attrs import evolve

from policylang.graph.facts import Flag
from policylang.operators import layouts
from policylang.operators.layouts import DigitLayout, NoDigitsError, contiguous
from policylang.operators.names import GATHER, WAIT
from policylang.planning.edits.collectives.chain_fusion import ChainFusion, CollectiveChain, needs_unsorted
from policylang.planning.edits.collectives.consumers import relaid
from policylang.planning.edits.collectives.element_moves import copies
from policylang.planning.edits.collectives.lines import (
    ChainLink,
    ChainPath,
    last_row,
    layout_after,
    phase,
    tail,
)
from policylang.planning.edits.collectives.own_part import Derived, MiddleReaders
from policylang.planning.edits.edit_planner import NewNodes, RefusedError
from policylang.planning.edits.grids import Grid
from policylang.planning.edits.proof.canonical import steps_to
from policylang.planning.graph_edit import Edit, Node


class GatherChains(ChainFusion):
    """A ``fuse all_gather chains`` statement."""

    kind = counted = "all_gather"
    nothing_found = "no gather of this graph reads another gather, straight or through layout operators"
    collective = GATHER

    # --- candidates ---

    def check_line(self, link: ChainLink, wait: int, path: ChainPath) -> None:
        facts = self.facts
        for row in (*path.rows, link.outer):
            if facts.shapes[row] is not None and facts.dtypes[row] != facts.dtypes[link.inner]:
                raise RefusedError(f"dtype changes: {facts.names[row]}")
        for row in (wait, *path.rows, link.outer):
            if phase(facts, row) != phase(facts, link.inner):
                raise RefusedError(
                    f"other phase: {facts.names[row]}",
                    f"`{facts.names[link.inner]}` runs in the forward and `{facts.names[row]}` in the backward",
                )
            if facts.flags[row] & Flag.RECORDED_SAVED and row != link.outer:
                raise RefusedError(f"recorded as saved: {facts.names[row]}")

    def wait(self, collective: int) -> int:
        facts = self.facts
        users = facts.users[collective]
        waits = [user for user in users if facts.targets[user] == WAIT]
        if len(waits) != 1:
            raise RefusedError(f"{'two waits' if waits else 'no wait'}: {facts.names[collective]}")
        if len(users) > 1:
            raise RefusedError(f"other consumer: {facts.names[next(user for user in users if user != waits[0])]}")
        if not facts.group_names[collective]:
            raise RefusedError(f"group not known: {facts.names[collective]}")
        return waits[0]

    # --- one chain ---

    def planned(self, chain: CollectiveChain) -> Edit:
        facts = self.facts
        grid = self.grid(self.groups_of(chain.collectives))
        values = self._layouts(chain, grid)
        chain = self._with_tail(chain, values)
        derived = self._derive(chain, grid, values, copied=False)
        restrided = relaid(facts, chain.result, derived.steps.stride)
        if isinstance(restrided, int):  # a row that must not see other strides
            derived = self._derive(chain, grid, values, copied=True)
            if derived.steps.stride != facts.strides[chain.result]:
                raise RefusedError(f"{facts.names[restrided]} needs {facts.names[chain.result]} as it lies in memory")
            restrided = []
        middle = MiddleReaders(facts, chain)
        middle.check()
        new = NewNodes(self.setting)
        gathered = self._gathered(chain, derived, new)
        replaced = {chain.result: new.follow(gathered, derived.steps, chain.result).name}
        calls, note = new.calls(), ""
        if middle.readers:
            own, parts = middle.hand_parts(new, gathered, derived, grid)
            calls += [own, *new.calls(len(calls) + 1)]
            replaced.update(parts)
            note = f"readers of {', '.join(self.names_of(parts))} read this rank's part of the fused value"
        latest = middle.first(chain.result)
        return self.fused(chain, new, replaced, latest=latest, restrided=restrided, note=note, calls=calls)

    def _layouts(self, chain: CollectiveChain, grid: Grid) -> dict[int, DigitLayout]:
        facts, source = self.facts, self.source_of(chain)
        shape = facts.shapes[source]
        if shape is None or facts.strides[source] is None:
            raise RefusedError(f"sizes not fixed: {facts.names[source]}")
        if not shape or 0 in shape:
            raise RefusedError(f"nothing to gather: {facts.names[source]}")
        try:
            value = layouts.shard(shape)
            values = {source: value}
            for place, (gather, wait) in enumerate(zip(chain.collectives, chain.waits, strict=True)):
                if facts.arguments[gather][1] != grid.shape[place]:
                    raise RefusedError(f"group size of {facts.names[gather]} is not {grid.shape[place]}")
                value = value.gathered(place, grid.shape[place])
                for row in (gather, wait):
                    if value.shape != facts.shapes[row] or facts.strides[row] is None:
                        raise RefusedError(f"sizes not fixed: {facts.names[row]}")
                    values[row] = value
                for hop in chain.between[place].hops if place < len(chain.between) else ():
                    value = layout_after(facts, hop, value)
                    values[last_row(hop)] = value
        except NoDigitsError as why:
            raise RefusedError(str(why)) from None
        return values

    def _with_tail(self, chain: CollectiveChain, values: dict[int, DigitLayout]) -> CollectiveChain:
        """With what follows the last wait up to the last copy there: views behind it may stay as they are."""
        facts = self.facts
        hops = tail(facts, chain.waits[-1])
        value = values[chain.waits[-1]]
        kept = 0
        for index, hop in enumerate(hops):
            try:
                value = layout_after(facts, hop, value)
            except NoDigitsError:
                break
            values[last_row(hop)] = value
            if copies(facts, [last_row(hop)]):
                kept = index + 1
        return evolve(chain, tail=hops[:kept])

    def _derive(self, chain: CollectiveChain, grid: Grid, values: dict[int, DigitLayout], *, copied: bool) -> Derived:
        """The order in which the shards have to be gathered, and the steps from there to the chain's result."""
        facts, names = self.facts, self.groups_of(chain.collectives)
        wanted, start = values[chain.result], self._start(chain, len(grid.ranks))
        outer_slow = tuple(reversed(range(len(chain.collectives))))
        possible = []
        for preference, order in enumerate(self.orders(outer_slow)):
            steps = steps_to(wanted, order, start, copied=copied)
            group = self.fused_group(names, grid, order)
            worth = steps.copies, len(steps.steps), group.name is None, not group.sorted, preference
            possible.append((worth, steps, order, group))
        _, steps, order, group = min(possible, key=lambda found: found[0])
        if steps.copies > copies(facts, chain.rows):
            raise RefusedError("would copy what is not copied now")
        if not self.can_make(group):
            raise needs_unsorted(group.ranks)
        return Derived(values, order, steps, group)

    def _start(self, chain: CollectiveChain, ranks: int) -> tuple[int, ...]:
        """The shape of the gathered shards."""
        shape = self.facts.shapes[self.source_of(chain)]
        assert shape is not None
        return (shape[0] * ranks, *shape[1:])

    def _gathered(self, chain: CollectiveChain, derived: Derived, new: NewNodes) -> Node:
        source = Node(self.facts.names[self.source_of(chain)])
        count = len(derived.group.ranks)
        start = self._start(chain, count)
        stride = contiguous(start)
        gather = new.add(GATHER, (source, count, derived.group), start, stride, chain.collectives[-1])
        return new.add(WAIT, (gather,), start, stride, chain.waits[-1])
