"""``fuse reduce_scatter chains``: the mirror image of fused gathers, for gradients.

What is summed over one group, scattered, summed over another and scattered again is one sum over the ranks of both. A
scatter gives a rank the part of its position, so the digits that the scatters take away are those of the positions,
that of the first scatter slowest: the fused group's ranks are counted in this order. Sums of floating-point numbers
depend on the order in which they are taken: the result agrees up to rounding, and the report says so. The proof is
run on integers, of which every sum tells which elements of which ranks are in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from attrs import evolve, frozen

from policylang.graph.facts import Flag
from policylang.operators import layouts
from policylang.operators.layouts import DigitLayout, Digits, NoDigitsError
from policylang.operators.names import SCATTER, WAIT
from policylang.operators.strides import contiguous, is_contiguous
from policylang.planning.edits.collectives.element_moves import Fan, fanned, moved, source_of
from policylang.planning.edits.collectives.fusing import MOST_ORDERS, Candidate, Fusing, needs_unsorted
from policylang.planning.edits.collectives.grids import Grid
from policylang.planning.edits.collectives.lines import ChainLink, ChainPath, last_row, path_between
from policylang.planning.edits.data import FusedGroup, NewNode, Node, Proof, Rewrite
from policylang.planning.edits.proof.calls import new_call, old_calls
from policylang.planning.edits.proof.canonical import LayoutSteps, steps_to
from policylang.planning.edits.proof.equivalence import Claim
from policylang.planning.edits.setting import RefusedError

REDUCES = ("sum", "avg")
"""What a reduction of reductions is again. Means of groups of equal size have the mean of all as their mean."""


@frozen
class _Chain:
    """Scatters that read each other, the first to run first, and what lies between them."""

    scatters: tuple[int, ...]
    waits: tuple[int, ...]
    between: tuple[ChainPath, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(sorted((*self.scatters, *self.waits, *(row for path in self.between for row in path.rows))))

    @property
    def result(self) -> int:
        return self.waits[-1]


class Scatters(Fusing):
    """A ``fuse reduce_scatter chains`` statement."""

    kind = "reduce_scatter"
    collective = SCATTER

    # --- candidates ---

    def path(self, link: ChainLink) -> ChainPath:
        """The way from the inner scatter's wait to the outer scatter. Raises where this can be no link of a chain."""
        facts = self.facts
        self.check_dims(link)
        self._check_reduction(link)
        wait = self._wait(link.inner)
        self._wait(link.outer)
        path = path_between(facts, wait, source_of(facts, link.outer))
        if isinstance(path, str):
            raise RefusedError(path)
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
        return path

    def _check_reduction(self, link: ChainLink) -> None:
        one, other = (self.facts.arguments[row][1] for row in (link.inner, link.outer))
        if one != other:
            raise RefusedError(f"reduces with {one}, then with {other}")
        if one not in REDUCES:
            raise RefusedError(f"reduces with {one}")

    def _wait(self, scatter: int) -> int:
        """The one reader of a scatter."""
        facts = self.facts
        users = facts.users[scatter]
        if not facts.group_names[scatter]:
            raise RefusedError(f"group not known: {facts.names[scatter]}")
        if len(users) != 1 or facts.targets[users[0]] != WAIT:
            raise RefusedError(f"not waited for once: {facts.names[scatter]}")
        return users[0]

    # --- one chain ---

    def rewrite(self, candidate: Candidate) -> Rewrite:
        facts = self.facts
        scatters = candidate.collectives
        chain = _Chain(scatters, tuple(map(self._wait, scatters)), candidate.paths)
        group_names = tuple(facts.group_names[scatter] for scatter in scatters)
        grid = self.grid(group_names)
        source = source_of(facts, chain.scatters[0])
        shape, stride = facts.shapes[source], facts.strides[source]
        if not shape or stride is None or facts.strides[chain.result] is None:
            raise RefusedError(f"sizes not fixed: {facts.names[source]}")
        if not is_contiguous(shape, stride):
            raise RefusedError(f"not contiguous: {facts.names[source]}")
        taken, left = self._digits(chain, grid, shape)
        steps, group = self._derive(grid, taken, left, shape, group_names)
        nodes = self._nodes(chain, source, steps, group)
        proof = self._prove(chain, source, nodes, grid, group_names)
        place = chain.result
        if any(facts.flags[row] & Flag.WRITES for row in range(chain.scatters[0], place)):
            place = chain.scatters[0]
        return Rewrite(
            statement=self.setting.number,
            kind=self.kind,
            collectives=tuple(facts.names[scatter] for scatter in chain.scatters),
            source=facts.names[source],
            before=facts.names[place],
            nodes=nodes,
            replaced=((facts.names[chain.result], nodes[-1].name),),
            dead=tuple(facts.names[row] for row in chain.rows),
            proof=proof,
            group=group,
        )

    def _digits(self, chain: _Chain, grid: Grid, shape: tuple[int, ...]) -> tuple[list[Digits], DigitLayout]:
        """The digits of the source's index that each scatter takes away, and the layout that is left."""
        facts = self.facts
        value, taken = layouts.shard(shape), []
        try:
            for place, (scatter, wait) in enumerate(zip(chain.scatters, chain.waits, strict=True)):
                if facts.arguments[scatter][2] != grid.shape[place]:
                    raise RefusedError(f"group size of {facts.names[scatter]} is not {grid.shape[place]}")
                mine, rest = layouts.first(value.dims[0], grid.shape[place])
                taken.append(mine)
                value = DigitLayout((rest, *value.dims[1:]))
                if value.shape != facts.shapes[wait]:
                    raise RefusedError(f"sizes not fixed: {facts.names[wait]}")
                for step in chain.between[place].steps if place < len(chain.between) else ():
                    value = fanned(facts, step, value) if isinstance(step, Fan) else moved(facts, step, value)
                    if value.shape != facts.shapes[last_row(step)]:
                        raise RefusedError(f"sizes not fixed: {facts.names[last_row(step)]}")
        except NoDigitsError as why:
            raise RefusedError(str(why) or "parts do not lie side by side") from None
        return taken, value

    def _derive(
        self, grid: Grid, taken: list[Digits], left: DigitLayout, shape: tuple[int, ...], names: tuple[str, ...]
    ) -> tuple[LayoutSteps, FusedGroup]:
        """The order of the ranks in which the source's parts lie as they are, and the views that it takes."""
        count = len(taken)
        orders = permutations(range(count)) if count <= MOST_ORDERS else iter([tuple(range(count))])
        refused: FusedGroup | None = None
        for order in orders:
            slow = tuple(digit for place in order for digit in taken[place])
            steps = steps_to(DigitLayout((slow + left.dims[0], *left.dims[1:])), (), shape)
            if steps.copies or not is_contiguous(steps.shape, steps.stride):
                continue
            group = self.fused_group(names, grid, order)
            if group.name is not None or group.sorted or self.setting.capabilities.unsorted_groups:
                return steps, group
            refused = group
        if refused is not None:
            raise needs_unsorted(refused.ranks)
        raise RefusedError("scatters several dimensions", "one scatter would need a copy of the whole value first")

    def _nodes(self, chain: _Chain, source: int, steps: LayoutSteps, group: FusedGroup) -> tuple[NewNode, ...]:
        facts = self.facts
        names = self.setting.names.trial()
        made: list[NewNode] = []

        def add(
            target: str, arguments: tuple[object, ...], shape: Sequence[int], stride: Sequence[int], row: int
        ) -> None:
            made.append(
                NewNode(
                    name=names.new(target),
                    target=target,
                    arguments=(Node(made[-1].name if made else facts.names[source]), *arguments),
                    shape=tuple(shape),
                    stride=tuple(stride),
                    dtype=facts.dtypes[row],
                    device=facts.devices[row],
                    module=facts.modules[row],
                    like=facts.names[row],
                )
            )

        first, last = chain.scatters[0], chain.scatters[-1]
        for step in steps.steps:
            add(step.target, () if step.argument is None else (step.argument,), step.shape, step.stride, first)
        count = len(group.ranks)
        shape = (steps.shape[0] // count, *steps.shape[1:])
        add(SCATTER, (facts.arguments[first][1], count, group), shape, contiguous(shape), last)
        add(WAIT, (), shape, contiguous(shape), chain.result)
        names.settle()
        return tuple(made)

    def _prove(
        self, chain: _Chain, source: int, nodes: Sequence[NewNode], grid: Grid, group_names: tuple[str, ...]
    ) -> Proof:
        facts = self.facts
        claim = Claim(
            facts.shapes[source] or (),
            facts.names[source],
            old_calls(facts, chain.rows),
            list(map(new_call, nodes)),
            [(facts.names[chain.result], nodes[-1].name)],
            grid,
            group_names,
        )
        return evolve(self.setting.proof(claim), exact=False)
