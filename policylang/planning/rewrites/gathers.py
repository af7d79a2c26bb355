"""``fuse all_gather chains``: two or more gathers in a row become one over the ranks of all of them.

A chain is a line ``gather → wait → layout → gather → wait → layout …``. What it makes is found by the layout algebra
(:mod:`policylang.planning.rewrites.layouts`) and made again from one gather of the first one's input and views
(:mod:`policylang.planning.rewrites.canonical`). The order of the fused group's ranks is where the shards have to lie:
it comes from the groups' own rank lists. Then both chains are run on all ranks
(:mod:`policylang.planning.rewrites.proof`), and if anything differs, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag, Group, Phase
from policylang.language.syntax import Fuse
from policylang.planning.plan import Capabilities
from policylang.planning.rewrites import layouts
from policylang.planning.rewrites.calls import Call, Part, new_call, old_calls
from policylang.planning.rewrites.canonical import Steps, steps_to
from policylang.planning.rewrites.consumers import relaid
from policylang.planning.rewrites.data import FusedGroup, NewNode, Node, Refused, Rewrite
from policylang.planning.rewrites.grids import Grid, dims_of, grid_of
from policylang.planning.rewrites.layouts import Layout, NoDigitsError
from policylang.planning.rewrites.lines import Link, Path, Step, last_row, links, path_between, phase, tail
from policylang.planning.rewrites.moves import GATHER, WAIT, Fan, copies, fanned, moved
from policylang.planning.rewrites.naming import Names
from policylang.planning.rewrites.proof import Prover
from policylang.planning.rewrites.strides import contiguous, is_contiguous

_SLICE = "aten.slice.Tensor"
_MOST_ORDERS = 4
"""Of how many gathers every order is tried; of more, the outermost is slowest."""


def fuse_gathers(
    facts: Facts,
    number: int,
    fuse: Fuse,
    capabilities: Capabilities,
    names: Names,
    prover: Prover,
    known: Mapping[str, Group],
) -> list[Rewrite | Refused]:
    """What a ``fuse all_gather chains`` statement comes to, in graph order. Linear in nodes and edges.

    ``known``: the groups that exist, without those that earlier statements have planned.
    """
    return _Fusing(facts, number, fuse, capabilities, names, prover, known).outcomes()


class _RefusedError(Exception):
    """Why a candidate is left as it is: a reason, and a detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@frozen
class _Chain:
    """Gathers that read each other, the first to run first, and what lies between and after them."""

    gathers: tuple[int, ...]
    waits: tuple[int, ...]
    between: tuple[Path, ...]
    """From each gather's wait to the input of the next."""
    tail: tuple[Step, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        found = [*self.gathers, *self.waits]
        for path in self.between:
            found.extend(path.rows)
        for step in self.tail:
            found.extend((step,) if isinstance(step, int) else step.rows)
        return tuple(sorted(found))

    @property
    def result(self) -> int:
        return last_row(self.tail[-1]) if self.tail else self.waits[-1]


@frozen
class _Derived:
    """A chain as the layout algebra sees it."""

    layouts: dict[int, Layout] = field(repr=False)
    """Of every row whose value is one tensor that is all of the chain's."""
    order: tuple[int, ...]
    """The gathers, that of the slowest rank digit first."""
    steps: Steps
    group: FusedGroup


class _Fusing:
    def __init__(
        self,
        facts: Facts,
        number: int,
        fuse: Fuse,
        capabilities: Capabilities,
        names: Names,
        prover: Prover,
        known: Mapping[str, Group],
    ) -> None:
        self.facts = facts
        self.number = number
        self.fuse = fuse
        self.capabilities = capabilities
        self.names = names
        self.prover = prover
        self.grids: dict[tuple[str, ...], Grid | str] = {}
        self.groups: dict[tuple[tuple[str, ...], tuple[int, ...]], FusedGroup] = {}
        self.existing = {group.ranks: group.name for group in reversed(list(known.values())) if group.ranks}

    def outcomes(self) -> list[Rewrite | Refused]:
        found: list[tuple[int, Rewrite | Refused]] = []
        for chain in self._chains(found):
            found.extend((outer, outcome) for outer, outcome in self._fused(chain))
        return [outcome for _, outcome in sorted(found, key=lambda pair: pair[0])]

    # --- candidates ---

    def _chains(self, refused: list[tuple[int, Rewrite | Refused]]) -> Iterator[tuple[list[Link], list[Path]]]:
        """Chains as long as they go; links that are none are put among the refused."""
        following: dict[int, tuple[Link, Path]] = {}
        continued = set()
        for link in links(self.facts):
            try:
                if link.inner in following:
                    raise _RefusedError(f"other consumer: {self.facts.names[following[link.inner][0].outer]}")
                following[link.inner] = link, self._path(link)
                continued.add(link.outer)
            except _RefusedError as why:
                refused.append((link.outer, self._refusal((link.inner, link.outer), why)))
        for first in sorted(following):
            if first in continued:
                continue
            chain, paths, at = [], [], first
            while at in following:
                link, path = following[at]
                chain.append(link)
                paths.append(path)
                at = link.outer
            yield chain, paths

    def _path(self, link: Link) -> Path:
        """The way from the inner gather's wait to the outer gather. Raises where this can be no link of a chain."""
        facts = self.facts
        self._check_dims(link)
        wait = self._wait(link.inner)
        self._wait(link.outer)
        (source,) = (facts.arguments[link.outer][0].row,)
        path = path_between(facts, wait, source)
        if isinstance(path, str):
            raise _RefusedError(path)
        for row in (*path.rows, link.outer):
            if facts.shapes[row] is not None and facts.dtypes[row] != facts.dtypes[link.inner]:
                raise _RefusedError(f"dtype changes: {facts.names[row]}")
        for row in (wait, *path.rows, link.outer):
            if phase(facts, row) != phase(facts, link.inner):
                raise _RefusedError(
                    f"other phase: {facts.names[row]}",
                    f"`{facts.names[link.inner]}` runs in the forward and `{facts.names[row]}` in the backward",
                )
            if facts.flags[row] & Flag.RECORDED_SAVED and row != link.outer:
                raise _RefusedError(f"recorded as saved: {facts.names[row]}")
        return path

    def _check_dims(self, link: Link) -> None:
        facts, wanted = self.facts, self.fuse.dims
        if not wanted:
            return
        for row in (link.inner, link.outer):
            group = facts.groups[facts.group_names[row]]
            spanned = dims_of(group, facts.meshes)
            if not spanned:
                raise _RefusedError(f"mesh dimension of group `{group.name}` not known")
            if not set(spanned) <= set(wanted):
                raise _RefusedError(f"over {', '.join(spanned)}: {facts.names[row]}")

    def _wait(self, gather: int) -> int:
        """The one reader of a gather."""
        facts = self.facts
        users = facts.users[gather]
        waits = [user for user in users if facts.targets[user] == WAIT]
        if len(waits) != 1:
            raise _RefusedError(f"{'two waits' if waits else 'no wait'}: {facts.names[gather]}")
        if len(users) > 1:
            raise _RefusedError(f"other consumer: {facts.names[next(user for user in users if user != waits[0])]}")
        if not facts.group_names[gather]:
            raise _RefusedError(f"group not known: {facts.names[gather]}")
        return waits[0]

    # --- one chain ---

    def _fused(self, candidate: tuple[list[Link], list[Path]]) -> Iterator[tuple[int, Rewrite | Refused]]:
        """A chain as one gather. Where it cannot be one, its last link is given up, and the rest tried."""
        chain, paths = candidate
        start = 0
        while start < len(chain):
            end = len(chain)
            why: _RefusedError | None = None
            while end > start:
                try:
                    yield chain[end - 1].outer, self._rewrite(self._chain(chain[start:end], paths[start:end]))
                    break
                except _RefusedError as error:
                    why = error
                    end -= 1
            if end < len(chain):  # the link that could not be added, and what follows it anew
                assert why is not None
                gathers = [chain[start].inner, *(link.outer for link in chain[start : end + 1])]
                yield chain[end].outer, self._refusal(gathers, why)
            start = end + 1

    def _chain(self, chain: Sequence[Link], paths: Sequence[Path]) -> _Chain:
        gathers = (chain[0].inner, *(link.outer for link in chain))
        waits = tuple(self._wait(gather) for gather in gathers)
        return _Chain(gathers, waits, tuple(paths))

    def _rewrite(self, chain: _Chain) -> Rewrite:
        facts = self.facts
        group_names = tuple(facts.group_names[gather] for gather in chain.gathers)
        grid = self._grid(group_names)
        values = self._layouts(chain, grid)
        chain = self._with_tail(chain, values)
        derived = self._derive(chain, grid, values, copied=False)
        restrided = self._restrided(chain, derived)
        if isinstance(restrided, int):
            derived = self._derive(chain, grid, values, copied=True)
            if derived.steps.stride != facts.strides[chain.result]:
                raise _RefusedError(f"{facts.names[restrided]} needs {facts.names[chain.result]} as it lies in memory")
            restrided = []
        return self._planned(chain, grid, group_names, derived, restrided)

    def _grid(self, names: tuple[str, ...]) -> Grid:
        if names not in self.grids:
            self.grids[names] = grid_of(self.facts, names)
        grid = self.grids[names]
        if isinstance(grid, str):
            raise _RefusedError(grid)
        return grid

    def _layouts(self, chain: _Chain, grid: Grid) -> dict[int, Layout]:
        facts = self.facts
        source = facts.arguments[chain.gathers[0]][0].row
        shape = facts.shapes[source]
        if shape is None or facts.strides[source] is None:
            raise _RefusedError(f"sizes not fixed: {facts.names[source]}")
        if not shape or 0 in shape:
            raise _RefusedError(f"nothing to gather: {facts.names[source]}")
        try:
            value = layouts.shard(shape)
            values = {source: value}
            for place, (gather, wait) in enumerate(zip(chain.gathers, chain.waits, strict=True)):
                if facts.arguments[gather][1] != grid.shape[place]:
                    raise _RefusedError(f"group size of {facts.names[gather]} is not {grid.shape[place]}")
                value = layouts.gathered(value, place, grid.shape[place])
                for row in (gather, wait):
                    if value.shape != facts.shapes[row] or facts.strides[row] is None:
                        raise _RefusedError(f"sizes not fixed: {facts.names[row]}")
                    values[row] = value
                for step in chain.between[place].steps if place < len(chain.between) else ():
                    value = self._after(step, value)
                    values[last_row(step)] = value
        except NoDigitsError as why:
            raise _RefusedError(str(why)) from None
        return values

    def _with_tail(self, chain: _Chain, values: dict[int, Layout]) -> _Chain:
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
        return _Chain(chain.gathers, chain.waits, chain.between, steps[:kept])

    def _after(self, step: Step, value: Layout) -> Layout:
        return fanned(self.facts, step, value) if isinstance(step, Fan) else moved(self.facts, step, value)

    def _derive(self, chain: _Chain, grid: Grid, values: dict[int, Layout], *, copied: bool) -> _Derived:
        """The order in which the shards have to be gathered, and the steps from there to the chain's result."""
        facts = self.facts
        wanted = values[chain.result]
        start = self._start(chain, len(grid.ranks))
        outer_slow = tuple(reversed(range(len(chain.gathers))))
        orders = [outer_slow]
        if len(outer_slow) <= _MOST_ORDERS:
            orders += [order for order in permutations(outer_slow) if order != outer_slow]
        possible = []
        for preference, order in enumerate(orders):
            steps = steps_to(wanted, order, start, copied=copied)
            group = self._group(chain, grid, order)
            worth = steps.copies, len(steps.steps), group.name is None, not group.sorted, preference
            possible.append((worth, steps, order, group))
        _, steps, order, group = min(possible, key=lambda found: found[0])
        if steps.copies > copies(facts, chain.rows):
            raise _RefusedError("would copy what is not copied now")
        if group.name is None and not group.sorted and not self.capabilities.unsorted_groups:
            raise _RefusedError(
                f"rank order {_listed(group.ranks)} needs `sort_ranks`",
                "this torch sorts the ranks of a new group; it can be told not to from 2.12",
            )
        return _Derived(values, order, steps, group)

    def _start(self, chain: _Chain, ranks: int) -> tuple[int, ...]:
        shape = self.facts.shapes[self.facts.arguments[chain.gathers[0]][0].row]
        assert shape is not None
        return (shape[0] * ranks, *shape[1:])

    def _group(self, chain: _Chain, grid: Grid, order: tuple[int, ...]) -> FusedGroup:
        key = tuple(self.facts.group_names[gather] for gather in chain.gathers), order
        if key not in self.groups:
            ranks = grid.ordered(order)
            dims = tuple(dim for place in order for dim in grid.dims[place])
            known = dims if all(grid.dims) else ()
            self.groups[key] = FusedGroup(ranks, self.existing.get(ranks), known, grid.everyone_ordered(order))
        return self.groups[key]

    def _restrided(self, chain: _Chain, derived: _Derived) -> list[tuple[int, tuple[int, ...]]] | int:
        """The rows behind the result whose strides change, or a row that must not see other strides."""
        traced = self.facts.strides[chain.result]
        if derived.steps.stride == traced:
            return []
        return relaid(self.facts, chain.result, derived.steps.stride)

    # --- the plan of it ---

    def _planned(
        self,
        chain: _Chain,
        grid: Grid,
        group_names: tuple[str, ...],
        derived: _Derived,
        restrided: list[tuple[int, tuple[int, ...]]],
    ) -> Rewrite:
        facts = self.facts
        source = facts.arguments[chain.gathers[0]][0].row
        middle = self._middle(chain)
        maker = _Maker(facts, self.names, chain, derived)
        result = maker.whole()
        replaced = [(facts.names[chain.result], result)]
        calls = [new_call(node) for node in maker.nodes]
        if middle:
            own = maker.own_part(grid)
            calls.append(_slice_of_rank(maker.nodes[-1], grid, derived.order, own.fixed))
            for row in middle:
                made = len(maker.nodes)
                replaced.append((facts.names[row], maker.own(row, own)))
                calls.extend(new_call(node) for node in maker.nodes[made:])
        proof = self.prover.prove(
            facts.shapes[source] or (), facts.names[source], old_calls(facts, chain.rows), calls, replaced, grid,
            group_names,
        )  # fmt: skip
        if isinstance(proof, str):
            raise _RefusedError("the check failed", proof)
        maker.settle()
        return Rewrite(
            statement=self.number,
            kind="all_gather",
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

    def _middle(self, chain: _Chain) -> list[int]:
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
                    raise _RefusedError(f"other consumer: {facts.names[user]}")
            found.append(row)
        if found:
            for user in facts.users[chain.result]:
                if facts.flags[user] & Flag.WRITES:
                    raise _RefusedError(f"other consumer: {facts.names[found[0]]}", f"`{facts.names[user]}` writes")
        return found

    def _may_read_part(self, row: int, user: int) -> bool:
        facts = self.facts
        if facts.ops[user] != "call_function" or {phase(facts, row), phase(facts, user)} != {int(Phase.BACKWARD)}:
            return False
        return facts.targets[row] != GATHER and not facts.flags[user] & (Flag.WRITES | Flag.EFFECTFUL)

    def _place(self, chain: _Chain, middle: list[int]) -> int:
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

    def _refusal(self, gathers: Sequence[int], why: _RefusedError) -> Refused:
        names = tuple(self.facts.names[gather] for gather in gathers)
        return Refused(self.number, "all_gather", names, why.reason, why.detail)


@frozen
class _Own:
    """This rank's part of the fused value."""

    name: str
    shape: tuple[int, ...]
    fixed: int
    """How many of the slowest gathers it has one rank of."""


class _Maker:
    """The new nodes of a chain, one after the other. Names are taken for good only by :meth:`settle`."""

    def __init__(self, facts: Facts, names: Names, chain: _Chain, derived: _Derived) -> None:
        self.facts, self.chain, self.derived = facts, chain, derived
        self.names = names.trial()
        self.nodes: list[NewNode] = []

    def settle(self) -> None:
        self.names.settle()

    def whole(self) -> str:
        """Gather, wait and the steps to the result."""
        chain, derived = self.chain, self.derived
        facts = self.facts
        source = facts.arguments[chain.gathers[0]][0].row
        shape = facts.shapes[source]
        assert shape is not None
        size = len(derived.group.ranks)
        start = (shape[0] * size, *shape[1:])
        stride = contiguous(start)
        source_name = Node(facts.names[source])
        gather = self._add(GATHER, (source_name, size, derived.group), start, stride, chain.gathers[-1])
        self.gathered = self._add(WAIT, (Node(gather),), start, stride, chain.waits[-1])
        self.start = start
        return self._steps(self.gathered, derived.steps, chain.result)

    def own_part(self, grid: Grid) -> _Own:
        """The part of the gathered shards that the first gathers alone would have brought to this rank."""
        order = self.derived.order
        count = len(order)
        # which gathers a value in the middle lacks is the same for all: the outermost ones, from the first reader on
        first = min(self._lacking(row) for row in self._middle_rows())
        lacking = tuple(range(first, count))
        if set(order[: len(lacking)]) != set(lacking):
            raise _RefusedError("parts do not lie side by side")
        index, parts = 0, 1
        for place in order[: len(lacking)]:
            index = index * grid.shape[place] + grid.here[place]
            parts *= grid.shape[place]
        length = self.start[0] // parts
        shape = (length, *self.start[1:])
        arguments = (Node(self.gathered), 0, index * length, (index + 1) * length)
        wait = self.chain.waits[first - 1]
        name = self._add(_SLICE, arguments, shape, contiguous(shape), wait, per_rank=True)
        return _Own(name, shape, len(lacking))

    def own(self, row: int, own: _Own) -> str:
        """A value in the middle, from this rank's part."""
        facts = self.facts
        if len(self.chain.gathers) - self._lacking(row) != own.fixed:
            raise _RefusedError(f"other consumer: {self._reader(row)}")
        steps = steps_to(self.derived.layouts[row], self.derived.order[own.fixed :], own.shape)
        shape = facts.shapes[row]
        if steps.copies or shape is None or not _same_strides(shape, steps.stride, facts.strides[row]):
            raise _RefusedError(f"other consumer: {self._reader(row)}")
        return self._steps(own.name, steps, row)

    def _steps(self, name: str, steps: Steps, like: int) -> str:
        for step in steps.steps:
            arguments = (Node(name),) if step.argument is None else (Node(name), step.argument)
            name = self._add(step.target, arguments, step.shape, step.stride, like)
        return name

    def _middle_rows(self) -> list[int]:
        facts, inside = self.facts, set(self.chain.rows)
        return [
            row
            for row in self.chain.rows
            if row != self.chain.result and any(user not in inside for user in facts.users[row])
        ]

    def _lacking(self, row: int) -> int:
        """The number of the first gather that a value has not been through; a piece of a fan has no layout."""
        layout = self.derived.layouts.get(row)
        if layout is None:
            raise _RefusedError(f"other consumer: {self._reader(row)}")
        return sum(gather <= row for gather in self.chain.gathers)

    def _reader(self, row: int) -> str:
        inside = set(self.chain.rows)
        return self.facts.names[next(user for user in self.facts.users[row] if user not in inside)]

    def _add(
        self,
        target: str,
        arguments: tuple[object, ...],
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        like: int,
        *,
        per_rank: bool = False,
    ) -> str:
        facts = self.facts
        name = self.names.new(target)
        self.nodes.append(
            NewNode(
                name=name,
                target=target,
                arguments=arguments,
                shape=shape,
                stride=stride,
                dtype=facts.dtypes[like],
                device=facts.devices[like],
                module=facts.modules[like],
                like=facts.names[like],
                per_rank=per_rank,
            )
        )
        return name


def _slice_of_rank(node: NewNode, grid: Grid, order: Sequence[int], fixed: int) -> Call:
    """The slice of the own part as every rank of the grid has it."""
    count = 1
    for place in order[:fixed]:
        count *= grid.shape[place]
    index = []
    for rank in grid.ranks:
        at, part = grid.position(rank), 0
        for place in order[:fixed]:
            part = part * grid.shape[place] + at[place]
        index.append((rank, part))
    ends = tuple((rank, part + 1) for rank, part in index)
    bounds = Part(tuple(index), count), Part(ends, count)
    return Call(node.name, node.target, (node.arguments[0], 0, *bounds), node.shape)


def _same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int] | None) -> bool:
    return other is not None and (
        tuple(one) == tuple(other) or (is_contiguous(shape, one) and is_contiguous(shape, other))
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:6])) + (", …" if len(ranks) > 6 else "")
