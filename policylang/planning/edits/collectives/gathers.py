"""``fuse all_gather chains``: two or more gathers in a row become one over the ranks of all of them.

A chain is a line ``gather → wait → layout → gather → wait → layout …``. What it makes is found by the layout algebra
(:mod:`policylang.operators.layouts`) and made again from one gather of the first one's input and views
(:mod:`policylang.planning.edits.proof.canonical`). The order of the fused group's ranks is where the shards have to
lie: it comes from the groups' own rank lists. Then both chains are run on all ranks
(:mod:`policylang.planning.edits.proof.equivalence`), and if anything differs, nothing is changed.
"""

from __future__ import annotations

from itertools import permutations

from policylang.graph.facts import Flag, Phase
from policylang.operators import layouts
from policylang.operators.layouts import DigitLayout, NoDigitsError
from policylang.operators.names import GATHER, WAIT
from policylang.planning.edits.collectives.consumers import relaid
from policylang.planning.edits.collectives.element_moves import Fan, copies, fanned, moved
from policylang.planning.edits.collectives.fusing import MOST_ORDERS, Candidate, Fusing, needs_unsorted
from policylang.planning.edits.collectives.gather_nodes import Chain, Derived, Maker, slice_of_rank
from policylang.planning.edits.collectives.grids import Grid
from policylang.planning.edits.collectives.lines import ChainLink, ChainPath, Step, last_row, path_between, phase, tail
from policylang.planning.edits.data import Rewrite
from policylang.planning.edits.proof.calls import new_call, old_calls
from policylang.planning.edits.proof.canonical import steps_to
from policylang.planning.edits.proof.equivalence import Claim
from policylang.planning.edits.setting import RefusedError


class Gathers(Fusing):
    """A ``fuse all_gather chains`` statement."""

    kind = "all_gather"
    collective = GATHER

    # --- candidates ---

    def path(self, link: ChainLink) -> ChainPath:
        """The way from the inner gather's wait to the outer gather. Raises where this can be no link of a chain."""
        facts = self.facts
        self.check_dims(link)
        wait = self._wait(link.inner)
        self._wait(link.outer)
        (source,) = (facts.arguments[link.outer][0].row,)
        path = path_between(facts, wait, source)
        if isinstance(path, str):
            raise RefusedError(path)
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
        return path

    def _wait(self, gather: int) -> int:
        """The one reader of a gather."""
        facts = self.facts
        users = facts.users[gather]
        waits = [user for user in users if facts.targets[user] == WAIT]
        if len(waits) != 1:
            raise RefusedError(f"{'two waits' if waits else 'no wait'}: {facts.names[gather]}")
        if len(users) > 1:
            raise RefusedError(f"other consumer: {facts.names[next(user for user in users if user != waits[0])]}")
        if not facts.group_names[gather]:
            raise RefusedError(f"group not known: {facts.names[gather]}")
        return waits[0]

    # --- one chain ---

    def rewrite(self, candidate: Candidate) -> Rewrite:
        facts = self.facts
        gathers = candidate.collectives
        chain = Chain(gathers, tuple(map(self._wait, gathers)), candidate.paths)
        group_names = tuple(facts.group_names[gather] for gather in gathers)
        grid = self.grid(group_names)
        values = self._layouts(chain, grid)
        chain = self._with_tail(chain, values)
        derived = self._derive(chain, grid, values, copied=False)
        restrided = self._restrided(chain, derived)
        if isinstance(restrided, int):
            derived = self._derive(chain, grid, values, copied=True)
            if derived.steps.stride != facts.strides[chain.result]:
                raise RefusedError(f"{facts.names[restrided]} needs {facts.names[chain.result]} as it lies in memory")
            restrided = []
        return self._planned(chain, grid, group_names, derived, restrided)

    def _layouts(self, chain: Chain, grid: Grid) -> dict[int, DigitLayout]:
        facts = self.facts
        source = facts.arguments[chain.gathers[0]][0].row
        shape = facts.shapes[source]
        if shape is None or facts.strides[source] is None:
            raise RefusedError(f"sizes not fixed: {facts.names[source]}")
        if not shape or 0 in shape:
            raise RefusedError(f"nothing to gather: {facts.names[source]}")
        try:
            value = layouts.shard(shape)
            values = {source: value}
            for place, (gather, wait) in enumerate(zip(chain.gathers, chain.waits, strict=True)):
                if facts.arguments[gather][1] != grid.shape[place]:
                    raise RefusedError(f"group size of {facts.names[gather]} is not {grid.shape[place]}")
                value = layouts.gathered(value, place, grid.shape[place])
                for row in (gather, wait):
                    if value.shape != facts.shapes[row] or facts.strides[row] is None:
                        raise RefusedError(f"sizes not fixed: {facts.names[row]}")
                    values[row] = value
                for step in chain.between[place].steps if place < len(chain.between) else ():
                    value = self._after(step, value)
                    values[last_row(step)] = value
        except NoDigitsError as why:
            raise RefusedError(str(why)) from None
        return values

    def _with_tail(self, chain: Chain, values: dict[int, DigitLayout]) -> Chain:
        """With what follows the last wait up to the last copy there: views behind it may stay as they are."""
        steps = tail(self.facts, chain.waits[-1])
        value = values[chain.waits[-1]]
        kept = 0
        for index, step in enumerate(steps):
            try:
                value = self._after(step, value)
            except NoDigitsError:
                break
            values[last_row(step)] = value
            if copies(self.facts, [last_row(step)]):
                kept = index + 1
        return Chain(chain.gathers, chain.waits, chain.between, steps[:kept])

    def _after(self, step: Step, value: DigitLayout) -> DigitLayout:
        return fanned(self.facts, step, value) if isinstance(step, Fan) else moved(self.facts, step, value)

    def _derive(self, chain: Chain, grid: Grid, values: dict[int, DigitLayout], *, copied: bool) -> Derived:
        """The order in which the shards have to be gathered, and the steps from there to the chain's result."""
        facts = self.facts
        wanted = values[chain.result]
        start = self._start(chain, len(grid.ranks))
        names = tuple(facts.group_names[gather] for gather in chain.gathers)
        outer_slow = tuple(reversed(range(len(chain.gathers))))
        orders = [outer_slow]
        if len(outer_slow) <= MOST_ORDERS:
            orders += [order for order in permutations(outer_slow) if order != outer_slow]
        possible = []
        for preference, order in enumerate(orders):
            steps = steps_to(wanted, order, start, copied=copied)
            group = self.fused_group(names, grid, order)
            worth = steps.copies, len(steps.steps), group.name is None, not group.sorted, preference
            possible.append((worth, steps, order, group))
        _, steps, order, group = min(possible, key=lambda found: found[0])
        if steps.copies > copies(facts, chain.rows):
            raise RefusedError("would copy what is not copied now")
        if group.name is None and not group.sorted and not self.setting.capabilities.unsorted_groups:
            raise needs_unsorted(group.ranks)
        return Derived(values, order, steps, group)

    def _start(self, chain: Chain, ranks: int) -> tuple[int, ...]:
        shape = self.facts.shapes[self.facts.arguments[chain.gathers[0]][0].row]
        assert shape is not None
        return (shape[0] * ranks, *shape[1:])

    def _restrided(self, chain: Chain, derived: Derived) -> list[tuple[int, tuple[int, ...]]] | int:
        """The rows behind the result whose strides change, or a row that must not see other strides."""
        traced = self.facts.strides[chain.result]
        if derived.steps.stride == traced:
            return []
        return relaid(self.facts, chain.result, derived.steps.stride)

    # --- the plan of it ---

    def _planned(
        self,
        chain: Chain,
        grid: Grid,
        group_names: tuple[str, ...],
        derived: Derived,
        restrided: list[tuple[int, tuple[int, ...]]],
    ) -> Rewrite:
        facts = self.facts
        source = facts.arguments[chain.gathers[0]][0].row
        middle = self._middle(chain)
        maker = Maker(facts, self.setting.names, chain, derived)
        result = maker.whole()
        replaced = [(facts.names[chain.result], result)]
        calls = [new_call(node) for node in maker.nodes]
        if middle:
            own = maker.own_part(grid)
            calls.append(slice_of_rank(maker.nodes[-1], grid, derived.order, own.fixed))
            for row in middle:
                made = len(maker.nodes)
                replaced.append((facts.names[row], maker.own(row, own)))
                calls.extend(new_call(node) for node in maker.nodes[made:])
        claim = Claim(
            facts.shapes[source] or (),
            facts.names[source],
            old_calls(facts, chain.rows),
            calls,
            replaced,
            grid,
            group_names,
        )
        proof = self.setting.proof(claim)
        maker.settle()
        return Rewrite(
            statement=self.setting.number,
            kind=self.kind,
            collectives=tuple(facts.names[gather] for gather in chain.gathers),
            source=facts.names[source],
            before=facts.names[self._place(chain, middle)],
            nodes=tuple(maker.nodes),
            replaced=tuple(replaced),
            dead=tuple(facts.names[row] for row in chain.rows),
            proof=proof,
            group=derived.group,
            restrided=tuple((facts.names[row], stride) for row, stride in restrided),
            note=self._note(middle),
        )

    def _middle(self, chain: Chain) -> list[int]:
        """Rows before the result that others read too: they can have this rank's part of the fused value.

        Only in the backward, where nothing is kept for later: a part that is saved would keep the whole alive.
        """
        facts, inside = self.facts, set(chain.rows)
        found = []
        for row in chain.rows:
            others = [user for user in facts.users[row] if user not in inside]
            if row == chain.result or not others:
                continue
            for user in others:
                if not self._may_read_part(row, user):
                    raise RefusedError(f"other consumer: {facts.names[user]}")
            found.append(row)
        if found:
            for user in facts.users[chain.result]:
                if facts.flags[user] & Flag.WRITES:
                    raise RefusedError(f"other consumer: {facts.names[found[0]]}", f"`{facts.names[user]}` writes")
        return found

    def _may_read_part(self, row: int, user: int) -> bool:
        facts = self.facts
        if facts.ops[user] != "call_function" or {phase(facts, row), phase(facts, user)} != {int(Phase.BACKWARD)}:
            return False
        return facts.targets[row] != GATHER and not facts.flags[user] & (Flag.WRITES | Flag.EFFECTFUL)

    def _place(self, chain: Chain, middle: list[int]) -> int:
        """As late as the first reader allows; where memory is written on the way, where the first gather stood."""
        facts, inside = self.facts, set(chain.rows)
        readers = [user for row in middle for user in facts.users[row] if user not in inside]
        place = min([chain.result, *readers])
        first = chain.gathers[0]
        return first if any(facts.flags[row] & Flag.WRITES for row in range(first, place)) else place

    def _note(self, middle: list[int]) -> str:
        if not middle:
            return ""
        inside = ", ".join(self.facts.names[row] for row in middle)
        return f"readers of {inside} read this rank's part of the fused value"
