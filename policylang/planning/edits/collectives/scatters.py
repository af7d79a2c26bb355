"""``fuse reduce_scatter chains``: reduce-scatters of gradients in a row become one over the ranks of all of them.

What is summed over one group, scattered, summed over another and scattered again is one sum over the ranks of both. A
scatter gives a rank the part of its position, so the digits that the scatters take away are those of the positions,
that of the first scatter slowest: the fused group's ranks are counted in this order. Sums of floating-point numbers
depend on the order in which they are taken: the result agrees up to rounding, and the report says so. The proof is
run on integers, of which every sum tells which elements of which ranks are in it.
"""

from __future__ import annotations

from policylang.graph.facts import Flag
from policylang.operators import layouts
from policylang.operators.layouts import DigitLayout, Digits, NoDigitsError, contiguous, is_contiguous
from policylang.operators.names import SCATTER, WAIT
from policylang.planning.edits.collectives.chain_fusion import ChainFusion, CollectiveChain, needs_unsorted
from policylang.planning.edits.collectives.lines import ChainLink, ChainPath, last_row, layout_after
from policylang.planning.edits.edit_planner import NewNodes, RefusedError
from policylang.planning.edits.grids import Grid
from policylang.planning.edits.proof.canonical import LayoutSteps, steps_to
from policylang.planning.graph_edit import Edit, FusedGroup, Node

REDUCES = ("sum", "avg")
"""What a reduction of reductions is again. Means of groups of equal size have the mean of all as their mean."""


class ScatterChains(ChainFusion):
    """A ``fuse reduce_scatter chains`` statement."""

    kind = counted = "reduce_scatter"
    nothing_found = "no scatter of this graph reads another scatter, straight or through layout operators"
    collective = SCATTER
    exact = False

    # --- candidates ---

    def check_line(self, link: ChainLink, wait: int, path: ChainPath) -> None:
        facts = self.facts
        inside = {link.outer, *path.rows}
        for row in (wait, *path.rows):
            for user in facts.users[row]:
                if user not in inside:
                    raise RefusedError(f"other consumer: {facts.names[user]}")
        for row in (wait, *path.rows, link.outer):
            if facts.dtypes[row] and facts.dtypes[row] != facts.dtypes[link.inner]:
                raise RefusedError(f"dtype changes: {facts.names[row]}")
            if facts.phases[row] != facts.phases[link.inner]:
                raise RefusedError(f"other phase: {facts.names[row]}")
            if facts.flags[row] & Flag.RECORDED_SAVED:
                raise RefusedError(f"recorded as saved: {facts.names[row]}")

    def check_link(self, link: ChainLink) -> None:
        super().check_link(link)
        one, other = (self.facts.arguments[row][1] for row in (link.inner, link.outer))
        if one != other:
            raise RefusedError(f"reduces with {one}, then with {other}")
        if one not in REDUCES:
            raise RefusedError(f"reduces with {one}")

    def wait(self, collective: int) -> int:
        facts = self.facts
        users = facts.users[collective]
        if not facts.group_names[collective]:
            raise RefusedError(f"group not known: {facts.names[collective]}")
        if len(users) != 1 or facts.targets[users[0]] != WAIT:
            raise RefusedError(f"not waited for once: {facts.names[collective]}")
        return users[0]

    # --- one chain ---

    def planned(self, chain: CollectiveChain) -> Edit:
        facts = self.facts
        groups = self.groups_of(chain.collectives)
        grid = self.grid(groups)
        source = self.source_of(chain)
        shape, stride = facts.shapes[source], facts.strides[source]
        if not shape or stride is None or facts.strides[chain.result] is None:
            raise RefusedError(f"sizes not fixed: {facts.names[source]}")
        if not is_contiguous(shape, stride):
            raise RefusedError(f"not contiguous: {facts.names[source]}")
        taken, left = self._digits(chain, grid, shape)
        steps, group = self._derive(grid, taken, left, shape, groups)
        new = NewNodes(self.setting)
        first, last, count = chain.collectives[0], chain.collectives[-1], len(group.ranks)
        whole = new.follow(Node(facts.names[source]), steps, first)
        shape = (steps.shape[0] // count, *steps.shape[1:])
        arguments = (whole, facts.arguments[first][1], count, group)
        scattered = new.add(SCATTER, arguments, shape, contiguous(shape), last)
        waited = new.add(WAIT, (scattered,), shape, contiguous(shape), chain.result)
        return self.fused(chain, new, {chain.result: waited.name}, latest=chain.result)

    def _digits(self, chain: CollectiveChain, grid: Grid, shape: tuple[int, ...]) -> tuple[list[Digits], DigitLayout]:
        """The digits of the source's index that each scatter takes away, and the layout that is left."""
        facts = self.facts
        value, taken = layouts.shard(shape), []
        try:
            for place, (scatter, wait) in enumerate(zip(chain.collectives, chain.waits, strict=True)):
                if facts.arguments[scatter][2] != grid.shape[place]:
                    raise RefusedError(f"group size of {facts.names[scatter]} is not {grid.shape[place]}")
                mine, rest = layouts.first(value.dims[0], grid.shape[place])
                taken.append(mine)
                value = DigitLayout((rest, *value.dims[1:]))
                if value.shape != facts.shapes[wait]:
                    raise RefusedError(f"sizes not fixed: {facts.names[wait]}")
                for hop in chain.between[place].hops if place < len(chain.between) else ():
                    value = layout_after(facts, hop, value)
                    if value.shape != facts.shapes[last_row(hop)]:
                        raise RefusedError(f"sizes not fixed: {facts.names[last_row(hop)]}")
        except NoDigitsError as why:
            raise RefusedError(str(why) or "parts do not lie side by side") from None
        return taken, value

    def _derive(
        self, grid: Grid, taken: list[Digits], left: DigitLayout, shape: tuple[int, ...], names: tuple[str, ...]
    ) -> tuple[LayoutSteps, FusedGroup]:
        """The order of the ranks in which the source's parts lie as they are, and the views that it takes."""
        refused: FusedGroup | None = None
        for order in self.orders(tuple(range(len(taken)))):
            slow = tuple(digit for place in order for digit in taken[place])
            steps = steps_to(DigitLayout((slow + left.dims[0], *left.dims[1:])), (), shape)
            if steps.copies or not is_contiguous(steps.shape, steps.stride):
                continue
            group = self.fused_group(names, grid, order)
            if self.can_make(group):
                return steps, group
            refused = group
        if refused is not None:
            raise needs_unsorted(refused.ranks)
        raise RefusedError("scatters several dimensions", "one scatter would need a copy of the whole value first")
