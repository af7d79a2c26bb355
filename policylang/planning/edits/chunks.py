"""``chunk``: a part of a step runs slice by slice over its rows, so that what is wide is never whole.

A region starts at a product: of a head, whose columns are the vocabulary, or of an MLP, whose columns are its
intermediate features. All that reads a value with these columns belongs to it, forward and backward, and so does what
lies between such values; where the columns are summed over it ends. Each operator has to treat rows apart
(:mod:`policylang.operators.rows`): a call on a slice gives a slice of the result, or a part of a sum over rows, which
is added up slice by slice and named. Ranks reduce and gather rows apart, too: each slice then issues its own
collectives, and a cut is made on every rank or on none. Whatever else reads rows is refused with its node.

The forward and the backward of a slice of the loss run together. In a joint graph the incoming gradient comes later:
where the backward of the region is linear in it, it runs with 1 in its place, and what is kept is scaled when it comes.
For a module, and where that cannot be, the slices of the forward run first, and those of the backward recompute what
they read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from attrs import define, evolve, field

from policylang.graph.blocks import blocks_of
from policylang.graph.facts import Facts, Flag, GraphKind, Phase, Ref, replaced_in
from policylang.language.globs import PathGlob
from policylang.language.shown import counted
from policylang.language.syntax import Action, Chunk
from policylang.operators import rows as of_rows
from policylang.operators.layouts import contiguous
from policylang.operators.names import CAT, CLONE, GETITEM, PRODUCTS, SLICE, VIEW, WAITS
from policylang.operators.rows import INDEXED, LIKE, NLL, SHIFTS, RowDim
from policylang.planning.edits.chunked_regions import Region, tensors
from policylang.planning.edits.edit_planner import SAME_GRAPH, EditPlanner, NewNodes, RefusedError, Setting
from policylang.planning.graph_edit import Edit, NewNode, Node, Proof, Refusal

_MM, _ADDMM, _ADD, _DIV, _FULL, _SCALE, _MUL = (
    *("aten.mm.default", "aten.addmm.default", "aten.add.Tensor", "aten.div.Tensor", "aten.full.default"),
    *("aten.mul.Scalar", "aten.mul.Tensor"),
)
_WHOLE_STEPS = (GraphKind.FLAT, GraphKind.JOINT)
_MEAN, _SUM = 1, 2
"""Reductions of a loss, as torch numbers them."""


class Chunks(EditPlanner[Chunk]):
    """A ``chunk`` statement."""

    kind = "chunk"
    counted = ""

    def __init__(self, statement: Chunk, setting: Setting) -> None:
        super().__init__(statement, setting)
        self.taken: set[int] = set()
        """The nodes of regions that are cut."""
        self.apart: dict[int, Node] = {}
        """Replacements of nodes that do not depend on any slice."""

    @classmethod
    def nothing_in(cls, statement: Chunk) -> str:
        if not statement.module:
            return "a region starts at the last product before the loss, a number that the forward returns"
        of_loss = " that a loss is made of" if statement.to_loss else ""
        return f"no module `{statement.module}` of this graph has a product{of_loss}"

    def outcomes(self) -> list[Edit | Refusal]:
        found: list[Edit | Refusal] = []
        for head in self._heads():
            if head not in self.taken:
                try:
                    found += self._cut(head)
                except RefusedError as why:
                    found.append(self.refusal((head,), why))
        # Nodes that several edits move go behind the last of them, or ahead of the first.
        index, behind, ahead = self.facts.index, dict[str, int](), dict[str, int]()
        for each in found:
            if isinstance(each, Edit):
                place = index[each.before]
                behind.update({name: max(behind.get(name, 0), place) for name in each.behind})
                ahead.update({name: min(ahead.get(name, place), place) for name in each.ahead})

        def here(each: Edit, names: tuple[str, ...], places: Mapping[str, int]) -> tuple[str, ...]:
            return tuple(name for name in names if places[name] == index[each.before])

        return [
            evolve(each, behind=here(each, each.behind, behind), ahead=here(each, each.ahead, ahead))
            if isinstance(each, Edit)
            else each
            for each in found
        ]

    # --- where regions start ---

    def _heads(self) -> list[int]:
        """The products at which regions start, in graph order."""
        facts, asked = self.facts, self.statement
        before = self._before_loss() if asked.to_loss else None
        if not asked.module:
            assert before is not None
            widths = [(facts.shapes[row] or (0,))[-1] for row in before]
            return [row for row, width in zip(before, widths, strict=True) if width == max(widths)]
        glob, found = PathGlob(asked.module), dict[str, int]()
        blocks: Sequence[int] = ()
        if asked.in_block:
            given = self.setting.blocks
            blocks = blocks_of(facts, None if given is None else PathGlob(given)).block_of
        for row in facts.forward:
            module = glob.outermost(facts.modules[row])
            within = before is None or row in before
            if module is None or facts.targets[row] not in PRODUCTS or not within or (blocks and blocks[row] < 0):
                continue
            if before is not None:
                found[module] = row  # the last one of it
            else:
                found.setdefault(module, row)
        return sorted(found.values())

    def _before_loss(self) -> list[int]:
        """The forward products from which a loss is made with no other product between."""
        facts = self.facts
        seen, found = bytearray(len(facts)), list[int]()
        for row in reversed(facts.forward):
            is_loss = facts.flags[row] & Flag.FORWARD_OUTPUT and facts.numel[row] == 1
            if is_loss and "float" in facts.dtypes[row]:
                seen[row] = 1
            if not seen[row]:
                continue
            if facts.targets[row] in PRODUCTS:
                found.append(row)
            elif not facts.flags[row] & Flag.COMPUTE:
                for source in facts.inputs[row]:
                    seen[source] = 1
        return found[::-1]

    # --- one region ---

    def _cut(self, head: int) -> list[Edit]:
        """The edits of a region. The forward and the backward of a slice of the loss run together, unless the backward
        of each needs the forward of all."""
        asked, found = self.statement, list[tuple[int, RefusedError]]()
        words = (self.kind, self.facts.names[head])
        if lacking := self.rejected(*words):
            sizes = "" if asked.slices else "; what fits differs by rank, write `into`"
            raise RefusedError(f"not on every rank: {lacking}{sizes}")
        module = "" if asked.to_loss else PathGlob(asked.module).outermost(self.facts.modules[head]) or ""
        for together in (True, False) if asked.to_loss and self.facts.kind in _WHOLE_STEPS else (False,):
            for rows in self._axes(head):
                apart = dict(self.apart)
                try:
                    region = Region(self.facts, head, rows, module, together=together)
                    count = asked.slices or region.count(int(asked.size.value))  # type: ignore[union-attr]
                    if count > rows.size:
                        raise RefusedError(f"{rows.size:,} rows cannot be cut into {count:,} slices")
                    before = next((why.reason for size, why in found if size == rows.size), "")
                    asks = region.collectives and self.setting.consensus.asked
                    grid = self.grid(tuple(dict.fromkeys(self.groups_of(region.collectives)))) if asks else None
                    edits = _Writer(self, region, count, before).edits()
                except RefusedError as why:
                    self.apart = apart
                    found.append((rows.size, why))
                    continue
                if grid is not None:
                    self.propose(words, [together, rows, count, self.names_of(region.collectives)], grid)
                self.taken.update(region.members)
                return edits
        # The longest rows that views do not cut say most.
        raise max(found, key=lambda each: (each[1].detail != "view", each[0]))[1]

    def _axes(self, head: int) -> Iterator[RowDim]:
        """The rows of a product's result that a region may be cut along: a dimension, or a part of one that views
        before or behind it show."""
        facts = self.facts
        shape = facts.shapes[head] or ()
        if facts.strides[head] is None or len(shape) < 2:
            raise RefusedError(f"sizes not fixed: {facts.names[head]}")
        found = {RowDim(dim, 1, length, 1): None for dim, length in enumerate(shape[:-1])}
        source = next((row for row in facts.inputs[head] if row_digits(facts, row, shape)), -1)
        views = [(source, row) for row in facts.inputs[source]] if source >= 0 else []
        views += [(head, row) for row in facts.users[head]]
        for near, other in views:
            view = near if facts.targets[near] in of_rows.RESIZED and other in facts.inputs[near] else other
            if of_rows.is_view(facts.targets[view]):
                full, here = facts.shapes[other] or (), facts.shapes[near] or ()
                for dim, length in enumerate(full[:-1]):
                    digit = of_rows.viewed(RowDim(dim, 1, length, 1), full, here)
                    if digit is not None and digit.dim < len(shape) - 1:
                        found.setdefault(digit)
        return iter(sorted((each for each in found if each.size > 1), key=lambda each: -each.size))


def row_digits(facts: Facts, row: int, shape: tuple[int, ...]) -> bool:
    """The operand of a product that has the rows of its result."""
    own = facts.shapes[row] or ()
    return len(own) == len(shape) and own[:-1] == shape[:-1]


Placed = tuple[int, RowDim]
"""A value that is cut, and the dimension along which it is."""


@define
class _Half:
    """The members of a region that one edit writes anew."""

    order: list[int]
    anchor: int
    """The member before which it is put."""
    cuts: dict[tuple[Placed, int], Node] = field(factory=dict)
    instead: dict[int, str] = field(factory=dict)


class _Writer:
    """Writes a region as slices."""

    def __init__(self, planner: Chunks, region: Region, count: int, apart: str) -> None:
        self.planner, self.region, self.facts = planner, region, planner.facts
        self.new = NewNodes(planner.setting, "chunk")
        least, more = divmod(region.size, count)
        self.sizes = [least + (at < more) for at in range(count)]
        self.slices = [range(stop - rows, stop) for rows, stop in zip(self.sizes, accumulate(self.sizes), strict=True)]
        self.why_apart = apart
        self.early: dict[int, Node] = {}
        """Nodes of the backward that lead to a backward beside its forward, as they are there."""
        self.made: dict[tuple[int, int], Node] = {}
        self.sums: dict[int, Node] = {}
        self.weights: dict[int, Node] = {}
        """By loss, the sum of the weights of its targets."""

    def edits(self) -> list[Edit]:
        region, facts, planner = self.region, self.facts, self.planner
        halves = [_Half(region.order, self._anchor())]
        if not region.together:
            sides = {True: list[int](), False: list[int]()}
            for row in region.order:
                sides[facts.phases[row] == Phase.FORWARD].append(row)
            halves = [_Half(order, order[-1]) for order in sides.values() if order]
        apart, starts = [row for row in region.hoisted if row not in planner.apart], list[int]()
        for row in apart:
            starts.append(len(self.new.made))
            planner.apart[row] = self._hoist(row)
        for half in halves:
            starts.append(len(self.new.made))
            for row in (*region.tangents, *region.early):
                self.early[row] = self._run_early(row)
            self._write(half)
        kept = {row: name for row, name in halves[0].instead.items() if row in region.scaled}
        for row in kept:
            starts.append(len(self.new.made))
            halves[0].instead[row] = self._scaled(row, kept[row]).name
        parts = iter([self.new.made[first:last] for first, last in pairwise([*starts, len(self.new.made)])])
        self.new.take_names()
        assumed = SAME_GRAPH if region.collectives and not planner.setting.consensus.asked else ""
        proof = Proof(0, (), assumed, self._claim(), not self._split(region.order))
        found = []
        for row in apart:  # the weights of targets before the loss, whose result they divide
            place = min(facts.inputs[row][0] if facts.targets[row] == GETITEM else row, halves[0].anchor)
            instead = {row: planner.apart[row].name}
            found.append(planner.edit((), (), place, next(parts), instead, (row,), proof, goes_on=True))
        for half in halves:
            exits = dict.fromkeys(half.instead.values()) | dict.fromkeys(kept.values(), Action.SAVE)
            inside = None if half is halves[-1] else Action.RECOMPUTE
            nodes = [evolve(each, action=exits.get(each.name, self._inside(each, inside))) for each in next(parts)]
            sources = planner.names_of(sorted({row for (row, _), _ in half.cuts}))
            instead = {row: name for row, name in half.instead.items() if row not in kept}
            dead = self._dead() if half is halves[-1] and not kept else []
            more: dict[str, Any] = {
                "ahead": planner.names_of(row for row in region.constants if row > half.anchor),
                "behind": planner.names_of(self._behind(half, kept)),
                "goes_on": half is not halves[0],
                "per_rank": True,
                "scaled": planner.names_of(kept) if half is halves[0] else (),
            }
            more |= {"note": "" if more["goes_on"] else self._note(kept), "split_sums": self._split(half.order)}
            gone = [row for row in dead if facts.flags[row] & Flag.COLLECTIVE]
            found.append(planner.edit(gone, sources, half.anchor, nodes, instead, dead, proof, **more))
        for row in kept:
            dead, instead = self._dead() if row == max(kept) else [], {row: halves[0].instead[row]}
            gone = [each for each in dead if facts.flags[each] & Flag.COLLECTIVE]
            found.append(planner.edit(gone, (), row, next(parts), instead, dead, proof, goes_on=True, per_rank=True))
        return found

    def _inside(self, node: NewNode, action: Action | None) -> Action | None:
        """The action for a value of a slice. A value that ranks have reduced to a number a row is saved, so that they
        do not communicate once more in the backward."""
        facts, row = self.facts, self.facts.index.get(node.call, -1)
        of_ranks = node.target in WAITS or (node.call and facts.flags[row] & Flag.COLLECTIVE)
        is_narrow = of_ranks and not any(self.region.wide.get(row, ()))
        return Action.SAVE if action is not None and is_narrow else action

    def _anchor(self) -> int:
        """Before which member the slices are put: in a joint graph as soon as what they read is there."""
        region, facts = self.region, self.facts
        if not region.scaled:
            return region.order[-1]
        read = (each for row in (*region.early, *region.order) for each in facts.inputs[row])
        inner = region.members.union(region.early, region.hoisted, region.constants)
        last = max((row for row in read if row not in inner), default=0)
        return next(row for row in region.order if row > last)

    def _dead(self) -> list[int]:
        """The members, and what led to them alone."""
        region, dead = self.region, set(self.region.members)
        dead.update(row for row in reversed(region.early) if dead.issuperset(self.facts.users[row]))
        return sorted(dead)

    def _split(self, rows: Iterable[int]) -> tuple[str, ...]:
        facts, region = self.facts, self.region
        return self.planner.names_of(facts.owners[row] for row in rows if region.is_sum(row) or region.is_ring(row))

    def _note(self, kept: Collection[int]) -> str:
        region, sizes = self.region, self.sizes
        rows = f"{max(sizes):,}" if len(set(sizes)) == 1 else f"{max(sizes):,} or {min(sizes):,}"
        names = self._split(region.order)
        said = f"{len(sizes)} slices of {rows} of {region.size:,} rows from {self.facts.names[region.head]} on"
        if kept:
            said += f"; {counted(len(kept), 'gradient')} made in the forward, scaled when that of the loss comes"
        elif self.why_apart:
            said += f"; the backward computes them again ({self.why_apart})"
        for target, calls in Counter(self.facts.targets[row] for row in region.collectives).items():
            said += f"; they issue {len(sizes) * calls:,} {target.split('.')[1]} in place of {calls:,}"
        if not names and not kept:
            return f"{said}; no sum is split, so no bit differs"
        said += _named(names, "sum", "split")
        scaled = "scaled afterwards, and rounded unless by a power of two"
        said += _named(self.planner.names_of(kept), "product", scaled)
        return f"{said}: bits differ there, nowhere else"

    def _claim(self) -> str:
        facts = self.facts
        calls = [(facts.targets[row], facts.shapes[row]) for row in self.region.order]
        return sha256(repr((calls, self.sizes)).encode()).hexdigest()[:32]

    def _behind(self, half: _Half, kept: Collection[int]) -> list[int]:
        """The nodes that read what the half makes, and come before it."""
        facts, found = self.facts, set(half.instead).difference(kept)
        inner = self.region.members | set(self.region.hoisted)
        for row in range(half.order[0], half.anchor):
            if row not in inner and not found.isdisjoint(facts.inputs[row]):
                found.add(row)
        return sorted(found.difference(inner))

    # --- new nodes ---

    def _write(self, half: _Half) -> None:
        region, facts = self.region, self.facts
        for at in range(len(self.sizes)):
            for row in half.order:
                self._call(half, row, at)
        for row in half.order:
            if facts.shapes[row] is not None and region.is_read_outside(row):
                half.instead[row] = self._joined(row).name

    def _add(
        self, target: str, arguments: tuple[Any, ...], shape: Sequence[int], like: int, of: int, **more: Any
    ) -> Node:
        """``of``: the node that has its dtype."""
        stride, region = more.pop("stride", None) or contiguous(shape), self.region
        if region.scaled and not more.pop("late", False) and self.facts.phases[like] == Phase.BACKWARD:
            like = region.head
        dtype, device = self.facts.dtypes[of], self.facts.devices[of]
        node = self.new.add(target, arguments, shape, stride, like)
        self.new.made[-1] = evolve(self.new.made[-1], **{"dtype": dtype, "device": device, "per_rank": True, **more})
        return node

    def _call(self, half: _Half, row: int, at: int) -> None:
        """One member on one slice."""
        facts, region, rows = self.facts, self.region, self.slices[at]
        target, arguments, name = facts.targets[row], facts.arguments[row], facts.names[row]
        places = iter(region.reads[row])

        given = replaced_in(arguments, Ref, lambda source: self._read(half, source.row, next(places), at, row))
        digit, dims, shape = region.rows[row][0], region.dims.get(row), facts.shapes[row]
        short = shape
        if shape is not None and digit is not None:
            short = (*shape[: digit.dim], digit.length(rows), *shape[digit.dim + 1 :])
        if of_rows.is_view(target):
            target, given = target if target in of_rows.RESIZED else "aten.reshape.default", (given[0], short)
        elif dims is not None and dims.sizes >= 0:
            given = (*given[: dims.sizes], short, *given[dims.sizes + 1 :])
        if target.rpartition(".")[0] in INDEXED and dims is not None and dims.reads[1] == (of_rows.NONE,) and short:
            first, *rest = given[1]  # what counts the rows of a slice begins at 0
            first = self._add(SLICE, (first, 0, 0, short[0], 1), short[:1], row, tensors(arguments)[1])
            given = (given[0], (first, *rest), *given[2:])
        if target == NLL and given[3]:
            given = (*given[:3], _SUM, *given[4:])
        cut = next((each for each in (*region.reads[row][::-1], digit) if each is not None), None)
        if digit is not None and cut is not None and digit.outer < cut.outer:
            length = (facts.shapes[facts.inputs[row][0]] or ())[cut.dim]
            given = of_rows.parted(target, given, length, digit.length(rows))
        elif target in SHIFTS and digit is not None and cut is not None and cut != digit:
            narrow, wide = (digit, cut) if target == SLICE else (cut, digit)
            start = narrow.of(rows).start + narrow.first - wide.of(rows).start - wide.first
            at_dim = SHIFTS[target] + 1
            given = (*given[:at_dim], start, start + len(narrow.of(rows)), 1)
        share = (len(rows), region.size) if cut is None else (len(cut.of(rows)), cut.size)
        if not share[0]:
            raise RefusedError(f"slice {at + 1} has no row of {name}: cut into fewer")
        of_slice = {"slice": f"{facts.names[region.head]}:{at}"}
        more = {"call": name, "share": share, "stride": _stride(facts, row, short), **of_slice}
        before = self.sums.get(row)
        is_sum = region.is_sum(row)
        if is_sum and before is not None and target == _MM:
            target, given = _ADDMM, (before, *given, 1, 1)
            before = None
        node = self._add(target, given, short or (), row, row, **more)
        if is_sum:
            if dims is not None and dims.is_mean:
                node = self._add(_SCALE, (node, share[0] / share[1]), short or (), row, row, **of_slice)
            if before is not None:
                node = self._add(_ADD, (before, node, 1), short or (), row, row, **of_slice)
            self.sums[row] = node
        self.made[row, at] = node

    def _read(self, half: _Half, source: int, digit: RowDim | None, at: int, reader: int) -> Node:
        region = self.region
        if source in region.members:
            return self.made[source, at]
        if digit is None:
            return self._whole(source)
        key = (source, digit), at
        if key not in half.cuts:
            half.cuts[key] = self._slice(source, digit, at, reader)
        return half.cuts[key]

    def _slice(self, source: int, digit: RowDim, at: int, like: int) -> Node:
        facts, name = self.facts, self.facts.names[source]
        shape, stride = facts.shapes[source] or (), facts.strides[source]
        if stride is None:
            raise RefusedError(f"sizes not fixed: {name}")
        own, dim, value = digit.of(self.slices[at]), digit.dim, self._whole(source)
        short, inner = (*shape[:dim], digit.length(self.slices[at]), *shape[dim + 1 :]), digit.inner
        cut = short
        if digit.outer > 1:
            step = digit.size * digit.inner
            stride = (*stride[:dim], stride[dim] * step, *stride[dim:])
            parted, cut = _parted(shape, digit, digit.size), _parted(shape, digit, len(own))
            value, dim = self._add(VIEW, (value, parted), parted, like, source, stride=stride), dim + 1
        bounds = (dim, own.start * inner, own.stop * inner, 1)
        value = self._add(SLICE, (value, *bounds), cut, like, source, stride=stride)
        if prod(cut[:dim]) > 1:
            value = self._add(CLONE, (value, "contiguous_format"), cut, like, source)
        return self._add(VIEW, (value, short), short, like, source) if digit.outer > 1 else value

    def _joined(self, row: int) -> Node:
        """The value that nodes outside the region read: the slices concatenated, or their sum."""
        facts, region = self.facts, self.region
        shape, digit = facts.shapes[row] or (), region.rows[row][0]
        if digit is None:
            node, source = self.sums[row], facts.inputs[row][0]
            if facts.targets[source] == NLL and facts.arguments[source][3] == _MEAN:
                node = self._add(_DIV, (node, self._weight(source, row)), shape, row, row)
            return node
        slices = [self.made[row, at] for at in range(len(self.sizes))]
        if digit.outer == 1:
            return self._add(CAT, (tuple(slices), digit.dim), shape, row, row)
        parts = [_parted(shape, digit, len(digit.of(rows))) for rows in self.slices]
        slices = [self._add(VIEW, (each, part), part, row, row) for each, part in zip(slices, parts, strict=True)]
        whole = _parted(shape, digit, digit.size)
        joined = self._add(CAT, (tuple(slices), digit.dim + 1), whole, row, row)
        return self._add(VIEW, (joined, shape), shape, row, row)

    def _whole(self, source: int) -> Node:
        """A value of which nothing is cut."""
        return self.early.get(source) or self.planner.apart.get(source) or Node(self.facts.names[source])

    def _run_early(self, row: int) -> Node:
        """The nodes between an incoming gradient of 1 and the region."""
        facts, dtype, more = self.facts, self.facts.dtypes[row], {"call": self.facts.names[row]}
        if row in self.region.tangents:
            return self._add(_FULL, ((), 1, dtype, None, facts.devices[row], None), (), row, row)
        given = replaced_in(facts.arguments[row], Ref, lambda source: self._whole(source.row))
        shape, stride = facts.shapes[row] or (), facts.strides[row]
        return self._add(facts.targets[row], given, shape, row, row, stride=stride, **more)

    def _scaled(self, row: int, kept: str) -> Node:
        """A gradient that was made with 1 in place of the incoming one, which is there now."""
        made = next(each for each in reversed(self.new.made) if each.name == kept)
        given = Node(kept), Node(self.facts.names[self.region.tangents[0]])
        return self._add(_MUL, given, made.shape, row, row, late=True, stride=made.stride)

    def _hoist(self, row: int) -> Node:
        """A node that does not depend on any slice: a value of which only the shape is read, and the weights of
        targets."""
        facts, source = self.facts, self.facts.inputs[row][0]
        if facts.targets[row] not in LIKE:
            return self._weight(source, row)
        target, shape = facts.targets[row], facts.shapes[row] or ()
        value = facts.arguments[row][1] if "full" in target else int("ones" in target)
        return self._add(_FULL, (shape, value, facts.dtypes[row], None, facts.devices[row], None), shape, row, row)

    def _weight(self, loss: int, row: int) -> Node:
        """The weights of the targets that a loss counts, added up as the whole loss does."""
        facts = self.facts
        if loss in self.weights:
            return self.weights[loss]
        _, target, weight, _, ignored = facts.arguments[loss]
        if target.row in self.region.members or target.row in self.region.stuck:
            raise RefusedError(f"its targets depend on it: {facts.names[loss]}")
        shape, labels = facts.shapes[target.row] or (), Node(facts.names[target.row])
        kept = self._add("aten.ne.Scalar", (labels, ignored), shape, row, row, dtype="bool")
        if weight is not None:  # of the classes
            labels = self._add(_MUL, (labels, kept), shape, row, target.row)
            picked = self._add("aten.index_select.default", (self._whole(weight.row), 0, labels), shape, row, row)
            kept = self._add(_MUL, (picked, kept), shape, row, row)
        found = self._add("aten.sum.default", (kept, facts.dtypes[row]), (), row, row)
        self.weights[loss] = found
        return found


def _named(names: Sequence[str], what: str, done: str) -> str:
    is_ = "is" if len(names) == 1 else "are"
    return f"; {counted(len(names), what)} {is_} {done} ({', '.join(names)})" if names else ""


def _parted(shape: tuple[int, ...], digit: RowDim, rows: int) -> tuple[int, ...]:
    """A shape with the dimension of the rows as two."""
    return (*shape[: digit.dim], digit.outer, rows * digit.inner, *shape[digit.dim + 1 :])


def _stride(facts: Facts, row: int, short: tuple[int, ...] | None) -> tuple[int, ...]:
    """The strides of a dense slice whose dimensions are in the order of the whole."""
    stride = facts.strides[row]
    if short is None or stride is None:
        return contiguous(short or ())
    found, step = [0] * len(short), 1
    for dim in sorted(range(len(short)), key=lambda dim: (stride[dim], -dim)):
        if stride[dim] or short[dim] == 1:
            found[dim] = step
            step *= short[dim]
    return tuple(found)
