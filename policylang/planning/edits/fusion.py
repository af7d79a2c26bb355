"""``fuse all_gather chains``, ``fuse reduce_scatter chains``: consecutive collectives become one over the ranks of all.

Chains are as long as possible. If a whole chain cannot be fused, its last collective is given up, and what follows is
tried anew; each collective given up is refused with its reason. Both chains are run on all ranks
(:mod:`policylang.planning.edits.proof`), and if anything differs, nothing is changed.

*Gathers*: a line ``gather → wait → layout → gather → wait → layout …``. The layout algebra
(:mod:`policylang.operators.layouts`) finds its result and derives it again from one gather of the first input, by
views. The rank order of the fused group is the order of the shards, by the groups' rank lists.

*Scatters*: a sum over one group, scattered, summed over another group and scattered again is one sum over the ranks of
both. A scatter takes away the digits that count the ranks of its group, so the fused group counts ranks with the first
scatter slowest. Floating-point sums depend on their order: the result agrees up to rounding, and the report says so.
The proof runs on integers whose sums identify the elements and ranks in them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from math import prod
from typing import ClassVar

from attrs import evolve, frozen

from policylang.graph.facts import Flag, Phase
from policylang.language.syntax import Fuse
from policylang.operators import layouts
from policylang.operators.layouts import DigitLayout, Digits, NoDigitsError, Part, contiguous, is_contiguous
from policylang.operators.names import GATHER, SCATTER, SLICE, WAIT
from policylang.planning.edits import layout_chains
from policylang.planning.edits.edit_planner import REDUCES, EditPlanner, NewNodes, RefusedError, Setting
from policylang.planning.edits.other_ranks import UNASKED, Grid, ravel
from policylang.planning.edits.proof import ChainCall, old_calls
from policylang.planning.graph_edit import Edit, FusedGroup, Node, Refusal

GROUPS_NOT_KNOWN = "groups of other ranks not known"
MOST_ORDERS = 4
"""Collectives up to which every order of ranks is tried; for more, only the usual one."""
_Found = tuple[int, Edit | Refusal]
"""An outcome, and the node that orders it: an edit's first collective, behind its inputs; a refusal's last one."""


@frozen
class CollectiveChain:
    """Collectives that read each other, in running order, and the nodes between and after them."""

    collectives: tuple[int, ...]
    waits: tuple[int, ...]
    between: tuple[tuple[layout_chains.Hop, ...], ...]
    """From each collective's wait to the input of the next."""
    tail: tuple[layout_chains.Hop, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        hops = layout_chains.rows_of_hops(hop for path in (*self.between, self.tail) for hop in path)
        return tuple(sorted((*self.collectives, *self.waits, *hops)))

    @property
    def result(self) -> int:
        return layout_chains.last_row(self.tail[-1]) if self.tail else self.waits[-1]

    def part(self, start: int, end: int) -> CollectiveChain:
        """The collectives from ``start`` to ``end``, both included."""
        within = slice(start, end + 1)
        return CollectiveChain(self.collectives[within], self.waits[within], self.between[start:end])


class ChainFusion(EditPlanner[Fuse]):
    """One ``fuse`` statement on one graph. Methods raise :class:`RefusedError`."""

    collective: ClassVar[str]
    """The full operator name."""
    exact: ClassVar[bool] = True
    """True if one collective gives the same bits as several."""

    def __init__(self, statement: Fuse, setting: Setting) -> None:
        super().__init__(statement, setting)
        self.existing = {group.ranks: group.name for group in reversed(list(setting.known.values())) if group.ranks}

    @abstractmethod
    def check_line(self, inner: int, outer: int, wait: int, path: Sequence[int]) -> None:
        """Check the nodes between two collectives of a chain."""

    @abstractmethod
    def wait(self, collective: int) -> int:
        """The only reader of a collective."""

    @abstractmethod
    def planned(self, chain: CollectiveChain) -> Edit:
        """A chain as one collective."""

    def outcomes(self) -> list[Edit | Refusal]:
        found: list[_Found] = []
        for chain in self._chains(found):
            found.extend(self._fused(chain))
        return [outcome for _, outcome in sorted(found, key=lambda pair: pair[0])]

    # --- shared by both kinds ---

    def check_link(self, inner: int, outer: int) -> None:
        """Check that the statement's ``over`` takes in both collectives."""
        self.check_dims((inner, outer), self.statement.dims)

    def orders(self, usual: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
        """The orders in which ranks may be counted, the usual one first."""
        return permutations(usual) if len(usual) <= MOST_ORDERS else [usual]

    def source_of(self, chain: CollectiveChain) -> int:
        return layout_chains.single_input(self.facts, chain.collectives[0])

    def grid(self, groups: tuple[str, ...]) -> Grid:
        grid = super().grid(groups)
        if grid.guessed and len(grid.ranks) > 1 and not self.setting.consensus.asked:
            raise RefusedError(GROUPS_NOT_KNOWN, f"no mesh gives them, and {UNASKED}")
        return grid

    def fused_group(self, grid: Grid, order: tuple[int, ...]) -> FusedGroup:
        """The group of all ranks of a chain, with its collectives in an order, slowest first."""
        ranks = grid.ordered(order)
        dims = tuple(dim for place in order for dim in grid.dims[place]) if all(grid.dims) else ()
        return FusedGroup(ranks, self.existing.get(ranks), dims, grid.everyone_ordered(order))

    def unmakeable(self, group: FusedGroup) -> RefusedError | None:
        """Why the graph's torch cannot make a group with its ranks in this order, if it cannot."""
        if group.name is not None or group.sorted or self.setting.capabilities.unsorted_groups:
            return None
        listed = ", ".join(map(str, group.ranks[:6])) + (", …" if len(group.ranks) > 6 else "")
        return RefusedError(
            f"rank order {listed} needs `sort_ranks`",
            "this torch sorts the ranks of a new group; from 2.12 it need not",
        )

    def fused(
        self,
        chain: CollectiveChain,
        new: NewNodes,
        replaced: Mapping[int, str],
        *,
        latest: int,
        restrided: Sequence[tuple[int, tuple[int, ...]]] = (),
        note: str = "",
        calls: Sequence[ChainCall] | None = None,
    ) -> Edit:
        """The edit that replaces a chain, proven. It is placed before ``latest``, the first reader; if memory is
        written in between, before the first collective."""
        facts, first, source = self.facts, chain.collectives[0], self.source_of(chain)
        old, calls = old_calls(facts, chain.rows), new.calls() if calls is None else calls
        proof = self.prove([source], old, calls, replaced, self.groups_of(chain.collectives))
        new.take_names()
        written = any(facts.flags[row] & Flag.WRITES for row in range(first, latest))
        before, sources = first if written else latest, self.names_of([source])
        proof = evolve(proof, exact=self.exact)
        return self.edit(
            chain.collectives, sources, before, new.made, replaced, chain.rows, proof, restrided, note=note
        )

    # --- chains ---

    def _chains(self, refused: list[_Found]) -> Iterator[CollectiveChain]:
        """The longest chains; pairs that form none are added to ``refused``."""
        following: dict[int, tuple[int, tuple[layout_chains.Hop, ...]]] = {}
        continued = set()
        for inner, outer in layout_chains.links(self.facts, self.collective):
            try:
                if inner in following:
                    raise RefusedError(f"other consumer: {self.facts.names[following[inner][0]]}")
                following[inner] = outer, self._path_between(inner, outer)
                continued.add(outer)
            except RefusedError as why:
                refused.append((outer, self.refusal((inner, outer), why)))
        for first in sorted(following):
            if first in continued:
                continue
            rows, between = [first], []
            while rows[-1] in following:
                row, path = following[rows[-1]]
                rows.append(row)
                between.append(path)
            yield CollectiveChain(tuple(rows), tuple(map(self.wait, rows)), tuple(between))

    def _path_between(self, inner: int, outer: int) -> tuple[layout_chains.Hop, ...]:
        self.check_link(inner, outer)
        wait = self.wait(inner)
        self.wait(outer)
        path = layout_chains.path_between(self.facts, wait, layout_chains.single_input(self.facts, outer))
        if isinstance(path, str):
            raise RefusedError(path)
        self.check_line(inner, outer, wait, layout_chains.rows_of_hops(path))
        return path

    def _fused(self, chain: CollectiveChain) -> Iterator[_Found]:
        """A chain as one collective; if it cannot be one, its last collective is given up, and the rest tried."""
        start, whole = 0, len(chain.between)
        while start < whole:
            why: RefusedError | None = None
            for end in range(whole, start, -1):
                part = chain.part(start, end)
                try:
                    words, groups = self.names_of(part.collectives), self.groups_of(part.collectives)
                    yield part.collectives[0], self.shared(words, groups, partial(self.planned, part))
                    break
                except RefusedError as error:
                    why = error
            else:
                end = start
            if why is not None:  # the collective that could not be added
                part = chain.part(start, end + 1)
                yield part.collectives[-1], self.refusal(part.collectives, why)
            start = end + 1


def slice_on_ranks(
    name: str,
    source: Node,
    dim: int,
    count: int,
    shape: tuple[int, ...] | None,
    grid: Grid,
    part_at: Callable[[Sequence[int]], int],
) -> ChainCall:
    """A slice as every rank of the grid has it; ``part_at``: from positions in the groups to the part, of ``count``."""
    part = Part(tuple((rank, part_at(grid.position(rank))) for rank in grid.ranks), count)
    return ChainCall(name, SLICE, (source, dim, part), shape)


class GatherChains(ChainFusion):
    kind = counted = "all_gather"
    nothing_found = "no gather of this graph reads another gather, straight or through layout operators"
    collective = GATHER

    # --- candidates ---

    def check_line(self, inner: int, outer: int, wait: int, path: Sequence[int]) -> None:
        facts = self.facts
        for row in (*path, outer):
            if facts.shapes[row] is not None and facts.dtypes[row] != facts.dtypes[inner]:
                raise RefusedError(f"dtype changes: {facts.names[row]}")
        for row in (wait, *path, outer):
            if layout_chains.phase(facts, row) != layout_chains.phase(facts, inner):
                raise RefusedError(
                    f"other phase: {facts.names[row]}",
                    f"`{facts.names[inner]}` runs in the forward and `{facts.names[row]}` in the backward",
                )
            if facts.flags[row] & Flag.RECORDED_SAVED and row != outer:
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
        order, steps, group = self._derive(chain, grid, values, copied=False)
        restrided = layout_chains.relaid(facts, chain.result, steps.stride)
        if isinstance(restrided, int):  # a node that must not see other strides
            order, steps, group = self._derive(chain, grid, values, copied=True)
            if steps.stride != facts.strides[chain.result]:
                raise RefusedError(f"{facts.names[restrided]} needs {facts.names[chain.result]} as it lies in memory")
            restrided = []
        readers = self._middle_readers(chain)
        new = NewNodes(self.setting)
        source, count = Node(facts.names[self.source_of(chain)]), len(group.ranks)
        shape = self._gathered_shape(chain, grid)
        gather = new.add(GATHER, (source, count, group), shape, contiguous(shape), chain.collectives[-1])
        gathered = new.add(WAIT, (gather,), shape, contiguous(shape), chain.waits[-1])
        replaced = {chain.result: new.follow(gathered, steps, chain.result).name}
        calls, note = new.calls(), ""
        if readers:
            own, parts = self._add_parts(chain, readers, new, gathered, values, order, grid)
            calls += [own, *new.calls(len(calls) + 1)]
            replaced.update(parts)
            note = f"readers of {', '.join(self.names_of(parts))} read this rank's part of the fused value"
        latest = min([chain.result, *(user for users in readers.values() for user in users)])
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
                for hop in chain.between[place] if place < len(chain.between) else ():
                    value = layout_chains.layout_after(facts, hop, value)
                    values[layout_chains.last_row(hop)] = value
        except NoDigitsError as why:
            raise RefusedError(str(why)) from None
        return values

    def _with_tail(self, chain: CollectiveChain, values: dict[int, DigitLayout]) -> CollectiveChain:
        """With what follows the last wait up to the last copy; views behind it may stay."""
        facts = self.facts
        hops = layout_chains.tail(facts, chain.waits[-1])
        value = values[chain.waits[-1]]
        kept = 0
        for index, hop in enumerate(hops):
            try:
                value = layout_chains.layout_after(facts, hop, value)
            except NoDigitsError:
                break
            values[layout_chains.last_row(hop)] = value
            if layout_chains.copies(facts, [layout_chains.last_row(hop)]):
                kept = index + 1
        return evolve(chain, tail=hops[:kept])

    def _derive(
        self, chain: CollectiveChain, grid: Grid, values: dict[int, DigitLayout], *, copied: bool
    ) -> tuple[tuple[int, ...], layout_chains.LayoutSteps, FusedGroup]:
        """The order in which the shards are gathered, slowest first, the steps to the chain's result, and the group."""
        start, possible = self._gathered_shape(chain, grid), []
        for preference, order in enumerate(self.orders(tuple(reversed(range(len(chain.collectives)))))):
            steps = layout_chains.steps_to(values[chain.result], order, start, copied=copied)
            group = self.fused_group(grid, order)
            worth = steps.copies, len(steps.steps), group.name is None, not group.sorted, preference
            possible.append((worth, order, steps, group))
        _, order, steps, group = min(possible, key=lambda found: found[0])
        if steps.copies > layout_chains.copies(self.facts, chain.rows):
            raise RefusedError("would copy what is not copied now")
        if why := self.unmakeable(group):
            raise why
        return order, steps, group

    def _gathered_shape(self, chain: CollectiveChain, grid: Grid) -> tuple[int, ...]:
        shape = self.facts.shapes[self.source_of(chain)]
        assert shape is not None
        return (shape[0] * len(grid.ranks), *shape[1:])

    # --- readers inside a chain ---

    def _middle_readers(self, chain: CollectiveChain) -> dict[int, list[int]]:
        """By node of the chain, its readers outside: they can read this rank's part of the fused value. Only in the
        backward, where nothing is saved: a saved part would keep the whole value alive."""
        facts, inside = self.facts, set(chain.rows)
        between = (row for row in chain.rows if row != chain.result)
        outside = {row: [user for user in facts.users[row] if user not in inside] for row in between}
        readers = {row: users for row, users in outside.items() if users}
        for row, users in readers.items():
            for user in users:
                in_backward = all(layout_chains.phase(facts, each) == Phase.BACKWARD for each in (row, user))
                changes = facts.flags[user] & (Flag.WRITES | Flag.EFFECTFUL) or facts.ops[user] != "call_function"
                if changes or not in_backward or facts.targets[row] == GATHER:
                    raise RefusedError(f"other consumer: {facts.names[user]}")
        for user in facts.users[chain.result] if readers else ():
            if facts.flags[user] & Flag.WRITES:
                consumer = facts.names[next(iter(readers))]
                raise RefusedError(f"other consumer: {consumer}", f"`{facts.names[user]}` writes")
        return readers

    def _add_parts(
        self,
        chain: CollectiveChain,
        readers: Mapping[int, Sequence[int]],
        new: NewNodes,
        gathered: Node,
        values: Mapping[int, DigitLayout],
        order: tuple[int, ...],
        grid: Grid,
    ) -> tuple[ChainCall, dict[int, str]]:
        """Add the nodes that the readers read instead: the slice as all ranks have it, and each node's new one."""
        facts = self.facts
        refused = {row: RefusedError(f"other consumer: {facts.names[users[0]]}") for row, users in readers.items()}
        for row, why in refused.items():  # a piece of a fan
            if row not in values:
                raise why
        # All inner values lack the same gathers: the outermost ones, from the first reader on.
        lacking = {row: sum(gather <= row for gather in chain.collectives) for row in readers}
        first = min(lacking.values())
        fixed = order[: len(order) - first]
        if set(fixed) != set(range(first, len(order))):
            raise RefusedError("parts do not lie side by side")

        sizes = [grid.shape[place] for place in fixed]
        parts = prod(sizes)

        def part_at(positions: Sequence[int]) -> int:
            return ravel([positions[place] for place in fixed], sizes)

        whole, index = new.made[0].shape, part_at(grid.here)
        length = whole[0] // parts
        shape = (length, *whole[1:])
        arguments = (gathered, 0, index * length, (index + 1) * length)
        part = new.add(SLICE, arguments, shape, contiguous(shape), chain.waits[first - 1], per_rank=True)
        call = slice_on_ranks(part.name, gathered, 0, parts, shape, grid, part_at)
        replaced = {}
        for row in readers:
            if lacking[row] != first:
                raise refused[row]
            steps = layout_chains.steps_to(values[row], order[len(fixed) :], shape)
            if steps.copies or not self._lies_as(row, steps.stride):
                raise refused[row]
            replaced[row] = new.follow(part, steps, row).name
        return call, replaced

    def _lies_as(self, row: int, stride: Sequence[int]) -> bool:
        shape, traced = self.facts.shapes[row], self.facts.strides[row]
        if shape is None or traced is None:
            return False
        return tuple(stride) == traced or (is_contiguous(shape, stride) and is_contiguous(shape, traced))


class ScatterChains(ChainFusion):
    """A ``fuse reduce_scatter chains`` statement."""

    kind = counted = "reduce_scatter"
    nothing_found = "no scatter of this graph reads another scatter, straight or through layout operators"
    collective = SCATTER
    exact = False

    # --- candidates ---

    def check_line(self, inner: int, outer: int, wait: int, path: Sequence[int]) -> None:
        facts = self.facts
        inside = {outer, *path}
        for row in (wait, *path):
            for user in facts.users[row]:
                if user not in inside:
                    raise RefusedError(f"other consumer: {facts.names[user]}")
        for row in (wait, *path, outer):
            if facts.dtypes[row] and facts.dtypes[row] != facts.dtypes[inner]:
                raise RefusedError(f"dtype changes: {facts.names[row]}")
            if facts.phases[row] != facts.phases[inner]:
                raise RefusedError(f"other phase: {facts.names[row]}")
            if facts.flags[row] & Flag.RECORDED_SAVED:
                raise RefusedError(f"recorded as saved: {facts.names[row]}")

    def check_link(self, inner: int, outer: int) -> None:
        super().check_link(inner, outer)
        one, other = (self.facts.arguments[row][1] for row in (inner, outer))
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
        grid, source = self.grid(self.groups_of(chain.collectives)), self.source_of(chain)
        shape, stride = facts.shapes[source], facts.strides[source]
        if not shape or stride is None or facts.strides[chain.result] is None:
            raise RefusedError(f"sizes not fixed: {facts.names[source]}")
        if not is_contiguous(shape, stride):
            raise RefusedError(f"not contiguous: {facts.names[source]}")
        taken, left = self._digits(chain, grid, shape)
        steps, group = self._derive(grid, taken, left, shape)
        new = NewNodes(self.setting)
        first, last, count = chain.collectives[0], chain.collectives[-1], len(group.ranks)
        whole = new.follow(Node(facts.names[source]), steps, first)
        shape = (steps.shape[0] // count, *steps.shape[1:])
        arguments = (whole, facts.arguments[first][1], count, group)
        scattered = new.add(SCATTER, arguments, shape, contiguous(shape), last)
        waited = new.add(WAIT, (scattered,), shape, contiguous(shape), chain.result)
        return self.fused(chain, new, {chain.result: waited.name}, latest=chain.result)

    def _digits(self, chain: CollectiveChain, grid: Grid, shape: tuple[int, ...]) -> tuple[list[Digits], DigitLayout]:
        """The digits of the source's index that each scatter takes away, and the rest."""
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
                for hop in chain.between[place] if place < len(chain.between) else ():
                    value = layout_chains.layout_after(facts, hop, value)
                    if value.shape != facts.shapes[layout_chains.last_row(hop)]:
                        raise RefusedError(f"sizes not fixed: {facts.names[layout_chains.last_row(hop)]}")
        except NoDigitsError as why:
            raise RefusedError(str(why) or "parts do not lie side by side") from None
        return taken, value

    def _derive(
        self, grid: Grid, taken: list[Digits], left: DigitLayout, shape: tuple[int, ...]
    ) -> tuple[layout_chains.LayoutSteps, FusedGroup]:
        """The rank order for which the source needs no copy, and the views that it takes."""
        refused: RefusedError | None = None
        for order in self.orders(tuple(range(len(taken)))):
            slow = tuple(digit for place in order for digit in taken[place])
            steps = layout_chains.steps_to(DigitLayout((slow + left.dims[0], *left.dims[1:])), (), shape)
            if not steps.copies and is_contiguous(steps.shape, steps.stride):
                group = self.fused_group(grid, order)
                refused = self.unmakeable(group)
                if refused is None:
                    return steps, group
        if refused is not None:
            raise refused
        raise RefusedError("scatters several dimensions", "one scatter would need a copy of the whole value first")
