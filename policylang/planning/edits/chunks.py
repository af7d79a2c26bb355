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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import accumulate, islice, pairwise
from math import prod
from typing import Any

from attrs import define, evolve, field

from policylang.graph.blocks import blocks_of
from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase, Ref
from policylang.language.globs import PathGlob
from policylang.language.shown import counted
from policylang.language.syntax import Action, Chunk
from policylang.operators import rows as of_rows
from policylang.operators.layouts import contiguous
from policylang.operators.names import ALL_REDUCE, CAT, CLONE, GETITEM, PRODUCTS, SCATTER, SLICE, VIEW, WAITS
from policylang.operators.rows import INDEXED, LIKE, NLL, SHIFTS, Dims, RowDim
from policylang.planning.edits.edit_planner import SAME_GRAPH, EditPlanner, NewNodes, RefusedError, Setting
from policylang.planning.graph_edit import Edit, NewNode, Node, Proof, Refusal

_CANNOT = {
    Flag.RANDOM: "draws random numbers",
    Flag.WRITES: "writes memory",
    Flag.EFFECTFUL: "has an effect",
}
_MM, _ADDMM, _ADD, _DIV, _FULL, _SCALE, _MUL = (
    *("aten.mm.default", "aten.addmm.default", "aten.add.Tensor", "aten.div.Tensor", "aten.full.default"),
    *("aten.mul.Scalar", "aten.mul.Tensor"),
)
_BIASED = (_ADDMM, "aten.baddbmm.default")
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


class Region:
    """The nodes that are cut along some rows of a product's result. Raises :class:`RefusedError` where it cannot be."""

    def __init__(self, facts: Facts, head: int, rows: RowDim, module: str, *, together: bool) -> None:
        self.facts, self.head, self.size, self.together = facts, head, rows.size, together
        self.module = module
        """Forward values are followed within it, unless they have the columns; empty: everywhere."""
        width = len(facts.shapes[head] or ()) - 1
        self.rows: dict[int, tuple[RowDim | None, ...]] = {head: (rows,)}
        """By node that carries rows, where each tensor that it returns has them; None for a sum over them."""
        self.wide: dict[int, tuple[RowDim | None, ...]] = {head: (RowDim(width, 1, (facts.shapes[head] or ())[-1], 1),)}
        """By node that has the columns, where each tensor that it returns has them."""
        self.stuck: dict[int, str] = {}
        """Nodes that need all slices or mix rows, with the reason."""
        self.waits: set[int] = set()
        """Nodes that need slices of the backward: if these run later, their readers may need the forward's slices."""
        self.hoisted: list[int] = []
        """Nodes that read a value of the region and none of its elements."""
        self.members: set[int] = {head}
        self.taken_in: set[int] = set()
        """Members that only other members read, and of which nothing says yet where they have rows."""
        self._follow()
        self.reads: dict[int, list[RowDim | None]] = {}
        """By member, the rows of each tensor among its arguments; None for one that every slice reads whole."""
        self.dims: dict[int, Dims | None] = {}
        self.cut: dict[Placed, None] = {}
        self._gather()
        self.order = sorted(self.members)
        self._check()
        self.tangents: list[int] = []
        self.early: list[int] = []
        """In a joint graph: what leads from the incoming gradient to a backward that runs beside the forward."""
        self.constants: list[int] = []
        """The constants that this reads."""
        self.scaled: set[int] = set()
        """Nodes of that backward which are linear in the incoming gradient."""
        if together and facts.kind is GraphKind.JOINT:
            self._run_early()

    def _follow(self) -> None:
        """Follow rows and columns through all that reads them."""
        facts = self.facts
        for row in range(self.head + 1, len(facts)):
            read = facts.inputs[row]
            if facts.targets[row] == GETITEM and read[0] in self.rows:
                self._pick(row, read[0])
                continue
            live = [each for each in read if any(self.rows.get(each, ()))]
            stuck = next((each for each in read if each in self.stuck), None)
            if of_rows.reads_dtype_alone(facts.targets[row]):
                continue
            if (not live and stuck is None) or facts.ops[row] != "call_function":
                continue
            awaited = next((each for each in read if self._is_awaited(each, row)), None)
            if facts.targets[row] in LIKE and not live:
                if awaited is not None:
                    self.hoisted.append(row)
                continue
            wide = any(any(self.wide[each]) for each in live if each in self.wide)
            try:
                if awaited is not None:
                    raise RefusedError(f"{self.stuck[awaited]}, and {facts.names[row]} reads it")
                if not live:
                    raise RefusedError(self.stuck[stuck or 0])
                is_inner = f"{facts.modules[row]}.".startswith(f"{self.module}.")
                if self.module and not wide and facts.phases[row] == Phase.FORWARD and not is_inner:
                    raise RefusedError(f"{facts.names[row]} is outside of `{self.module}`")
                _, made, dims = self.labelled(row, None)
            except RefusedError as why:
                if wide:
                    raise
                self._stop(row, self.stuck[awaited] if awaited is not None else why.reason)
                continue
            self.rows[row] = tuple(made)
            if wide:
                self.members.add(row)
                self.wide[row] = self._columns(row, dims) if any(made) else (None,)
            if dims is not None and made == [None]:
                self._stop(row, f"{facts.names[row]} is a sum over all rows")

    def _stop(self, row: int, reason: str) -> None:
        """Follow a value no further: it needs all slices."""
        facts, read = self.facts, self.facts.inputs[row]
        self.stuck[row] = reason
        live = any(each in self.rows for each in read)
        if self.together or not self.waits.isdisjoint(read) or (live and facts.phases[row] != Phase.FORWARD):
            self.waits.add(row)

    def _is_awaited(self, row: int, reader: int) -> bool:
        """True if a slice of a reader cannot run before all slices, by which a value is made. Where the slices of the
        backward run later, they may read what needs those of the forward alone."""
        return row in self.stuck and (self.facts.phases[reader] == Phase.FORWARD or row in self.waits)

    def _pick(self, row: int, source: int) -> None:
        index = self.facts.arguments[row][1]
        if self.facts.targets[source] == NLL and index == 1:
            self.hoisted.append(row)
            return
        self.rows[row] = (self.rows[source][index],)
        if source in self.wide:
            self.wide[row] = (self.wide[source][index],)
            self.members.add(row)
        if self.rows[row] == (None,):
            self._stop(row, f"{self.facts.names[row]} is a sum over all rows")

    def labelled(self, row: int, result: RowDim | None) -> tuple[list[RowDim | None], list[RowDim | None], Dims | None]:
        """The dimensions in which the tensors that a call reads, and those that it makes, have the rows: from the known
        ones among them, or from the wanted dimension of its result."""
        facts, name = self.facts, self.facts.names[row]
        for flag, why in _CANNOT.items():
            if facts.flags[row] & flag:
                raise RefusedError(f"{why}: {name}")
        target, arguments = facts.targets[row], facts.arguments[row]
        if facts.flags[row] & Flag.COLLECTIVE and not of_rows.is_known(target):
            raise RefusedError(f"communicates: {name}")
        if facts.shapes[row] is not None and facts.strides[row] is None:
            raise RefusedError(f"sizes not fixed: {name}")
        refs = list(tensors(arguments))
        known = [self.rows[each][0] if each in self.rows else None for each in refs]
        if of_rows.reads_dtype_alone(target):
            known = [None] * len(refs)
        if of_rows.is_view(target) and refs:
            from_, to = facts.shapes[refs[0]] or (), facts.shapes[row] or ()
            there = known[0] if result is None else of_rows.viewed(result, to, from_)
            here = result if there is None else of_rows.viewed(there, from_, to)
            if there is None or here is None:
                raise RefusedError(f"cuts rows apart: {name}", "view")
            return [there], [here], None
        if not arguments and of_rows.is_known(target):
            raise RefusedError(f"arguments not recorded, take the snapshot again: {name}")
        shapes = [facts.shapes[each] for each in refs]
        dims = of_rows.dims_of(target, arguments, facts.shapes[row], shapes, [self._dtype(each) for each in refs])
        if dims is None:
            raise RefusedError(f"not known to treat rows apart: {name} ({target or facts.ops[row]})")
        there = next((digit for digit in known if digit is not None), None)
        if there is not None and {*known} <= {there, None}:
            here = of_rows.repeated(target, arguments, there, shapes)
            if here is not None:
                return [there] * len(refs), [here] * len(dims.makes), dims
        pairs = [(labels, digit) for labels, digit in zip(dims.reads, known, strict=True) if digit is not None]
        pairs += [] if result is None else [(dims.makes[0], result)]
        found = {(labels[digit.dim], digit.outer, digit.size, digit.inner, digit.first) for labels, digit in pairs}
        if len(found) != 1:
            raise RefusedError(f"mixes rows: {name}")
        ((label, *part),) = found
        if label in dims.mixed and result is None:
            digit = next(each for each in known if each is not None)
            here = of_rows.shifted(target, arguments, digit, facts.shapes[row] or ())
            if here is not None and 0 <= here.first <= self.size - here.size:
                return [digit if label in labels else here for labels in dims.reads], [here], dims
        if label in dims.mixed or label == of_rows.NONE:
            raise RefusedError(f"mixes rows: {name}")

        def place(labels: Sequence[int]) -> RowDim | None:
            return RowDim(labels.index(label), *part) if label in labels else None

        made = [place(labels) for labels in dims.makes]
        if label in dims.summed and target in _BIASED:
            raise RefusedError(f"adds to a sum over all rows: {name}")
        return [place(labels) for labels in dims.reads], made, dims

    def _dtype(self, row: int) -> str:
        facts = self.facts
        return of_rows.COUNTING if of_rows.counts(facts.targets[row], facts.arguments[row]) else facts.dtypes[row]

    def _columns(self, row: int, dims: Dims | None) -> tuple[RowDim | None, ...]:
        """The dimension of the columns in each tensor that the call returns."""
        facts = self.facts
        refs = list(tensors(facts.arguments[row]))
        known = [self.wide[each][0] if each in self.wide else None for each in refs]
        if dims is None:
            column = known[0]
            after = column and of_rows.viewed(column, facts.shapes[refs[0]] or (), facts.shapes[row] or ())
            if column is not None and after is None:
                raise RefusedError(f"cuts columns apart: {facts.names[row]}")
            return (after,)
        first = next(digit for digit in known if digit is not None)
        if (target := facts.targets[row]).rpartition(".")[0] in of_rows.RESIZING:
            read, made = facts.shapes[refs[0]] or (), facts.shapes[row]
            found = of_rows.lengths(target, facts.arguments[row], made, read, first.dim)
            return tuple(self._if_wide(first.dim, length) for length in found)
        labels = [each[digit.dim] for each, digit in zip(dims.reads, known, strict=True) if digit is not None]
        return tuple(
            next((RowDim(made.index(each), 1, first.size, 1) for each in labels if each in made), None)
            for made in dims.makes
        )

    def _if_wide(self, dim: int, length: int) -> RowDim | None:
        """The columns of a value that has some of them, or those of other ranks too; None where most are left out."""
        return RowDim(dim, 1, length, 1) if length * 2 >= (self.facts.shapes[self.head] or (0,))[-1] else None

    def _gather(self) -> None:
        """Take in what lies between members, and what is wide and only they read; what else they read along rows is
        cut. Against the order of the graph: all readers of a node are known before it."""
        facts, narrow = self.facts, set(self.rows).difference(self.members)
        wanted: dict[int, dict[RowDim, None]] = {self.head: {self._row(self.head): None}}
        for row in range(max(self.members), -1, -1):
            if row not in self.members and row in wanted:
                if row not in narrow and not self._absorbed(row, list(wanted[row])):
                    self.cut.update(dict.fromkeys((row, digit) for digit in wanted[row]))
                    continue
                self.members.add(row)
            if row not in self.members:
                continue
            if facts.targets[row] == GETITEM:
                self.reads[row] = [None]
                wanted.setdefault(facts.inputs[row][0], {})
                continue
            is_given = row == self.head or row in self.taken_in
            self.reads[row], _, self.dims[row] = self.labelled(row, self._row(row) if is_given else None)
            for each, digit in zip(tensors(facts.arguments[row]), self.reads[row], strict=True):
                if digit is not None:
                    wanted.setdefault(each, {})[digit] = None
                elif each in self.rows and not of_rows.reads_dtype_alone(facts.targets[row]):
                    raise RefusedError(f"reads all rows of {facts.names[each]}: {facts.names[row]}")
        needed = set(self.members)
        for row in range(max(self.members), -1, -1):
            if row in needed:
                needed.update(facts.inputs[row])
        self.hoisted = [row for row in self.hoisted if row in needed]

    def _row(self, row: int) -> RowDim:
        digit = self.rows[row][0]
        assert digit is not None
        return digit

    def _absorbed(self, row: int, digits: list[RowDim]) -> bool:
        """True for a wide value that only members read, or what is made of such a value alone for them (a gradient that
        is summed over the columns), where it can be made slice by slice."""
        facts = self.facts
        if len(digits) != 1 or row in self.stuck or not self.members.issuperset(facts.users[row]):
            return False
        try:
            reads, _, _ = self.labelled(row, digits[0])
        except RefusedError:
            return False
        is_wide = self._is_wide(row) or of_rows.reads_dtype_alone(facts.targets[row])
        if not is_wide and not facts.flags[row] & Flag.COMPUTE:
            by_rows = (each for each, digit in zip(tensors(facts.arguments[row]), reads, strict=True) if digit)
            inner = {row, *self.members}
            is_wide = any(self._is_wide(each) and inner.issuperset(facts.users[each]) for each in by_rows)
        if not is_wide:
            return False
        self.rows[row] = tuple(digits)
        self.taken_in.add(row)
        return True

    def _is_wide(self, row: int) -> bool:
        return self.facts.ops[row] == "call_function" and self.facts.numel[row] >= self.facts.numel[self.head]

    def _check(self) -> None:
        """Refuse a region of which a part waits for all slices, or that is whole anyway."""
        facts, inner = self.facts, self.members | set(self.hoisted)
        roots = facts.storage_roots
        read = {roots[each] for row in self.order for each in (row, *facts.inputs[row])}
        for row in range(self.order[0], len(facts)):
            near = row < self.order[-1] or not self.members.isdisjoint(facts.inputs[row])
            if (
                near
                and facts.flags[row] & Flag.WRITES
                and not read.isdisjoint(roots[each] for each in facts.inputs[row])
            ):
                raise RefusedError(f"{facts.names[row]} writes memory that it reads")
        for row in self.order:
            for each in facts.inputs[row]:
                if self._is_awaited(each, row) and each not in inner:
                    raise RefusedError(f"{self.stuck[each]}, and {facts.names[row]} reads it")
            if row in self.wide and any(self.wide[row]) and self.is_read_outside(row):
                reader = next(each for each in facts.users[row] if each not in inner)
                raise RefusedError(f"{facts.names[reader]} reads all of {facts.names[row]}")

    def _run_early(self) -> None:
        """Find what the backward needs to run beside the forward, with 1 in place of the incoming gradient. Raises
        :class:`RefusedError` unless all that it returns is linear in that."""
        facts, tangents, wanted, early = self.facts, self.tangents, set(self.members), set[int]()
        for row in range(self.order[-1], -1, -1):
            if row in wanted and facts.input_kinds[row] == InputKind.TANGENT:
                tangents.append(row)
            elif row in wanted and facts.ops[row] == "get_attr":
                self.constants.insert(0, row)
            elif row in self.members or (row in wanted and facts.phases[row] == Phase.BACKWARD):
                wanted.update(facts.inputs[row])
                early.add(row)
        early -= self.members
        self.early = sorted(early)
        if len(tangents) != 1 or facts.shapes[tangents[0]] != ():
            raise RefusedError(f"{counted(len(tangents), 'incoming gradient')}, not that of one number")
        self.scaled.update(tangents)
        for row in sorted((*self.early, *self.members)):
            read = list(tensors(facts.arguments[row])) or list(facts.inputs[row])
            target, name = facts.targets[row], facts.names[row]
            cannot = facts.flags[row] & (Flag.COMPUTE | sum(_CANNOT)) or not of_rows.is_known(target)
            if row in early and cannot:
                raise RefusedError(f"its backward needs {name}")
            if self.scaled.isdisjoint(read) or target in LIKE or of_rows.reads_dtype_alone(target):
                continue
            if facts.flags[row] & Flag.COLLECTIVE:
                raise RefusedError(f"other ranks' incoming gradients are in {name}")
            scaled, zero = [each in self.scaled for each in read], [_is_zero(facts, each) for each in read]
            if not of_rows.is_linear(target, facts.arguments[row], scaled, zero):
                raise RefusedError(f"not known to be linear in the incoming gradient: {name}")
            if facts.dtypes[row] == "float16":
                raise RefusedError("float16 needs the scale of the loss in its backward")
            self.scaled.add(row)
        if any(facts.phases[row] == Phase.BACKWARD for row in self.hoisted):
            raise RefusedError("its backward reads sizes of it")

    def is_read_outside(self, row: int) -> bool:
        inner = self.members
        return any(each not in inner and each not in self.hoisted for each in self.facts.users[row])

    def is_sum(self, row: int) -> bool:
        """True for a sum over all rows."""
        return self.rows[row] == (None,)

    def is_ring(self, row: int) -> bool:
        """True for a sum over so many ranks that its order depends on where an element is among those that are sent."""
        facts, is_sum = self.facts, self.facts.targets[row] in (ALL_REDUCE, SCATTER)
        return is_sum and facts.arguments[row][1] in ("sum", "avg") and facts.groups[facts.group_names[row]].size > 2

    @property
    def collectives(self) -> list[int]:
        return [row for row in self.order if self.facts.flags[row] & Flag.COLLECTIVE]

    def count(self, most: int) -> int:
        """The least number of slices whose values, alive at once, are no more bytes than ``most``."""
        facts = self.facts
        last = {
            row: max((each for each in facts.users[row] if each in self.members), default=row) for row in self.order
        }
        ends: dict[int, int] = {}
        alive = peak = 0
        for row in self.order:
            made = 0 if facts.flags[row] & Flag.VIEW or self.is_sum(row) else facts.bytes[row]
            root = row
            while facts.flags[root] & Flag.VIEW and facts.inputs[root] and facts.inputs[root][0] in self.members:
                root = facts.inputs[root][0]
            alive += made
            peak = max(peak, alive)
            ends[root] = max(ends.get(root, 0), last[row])
            for each in [each for each, end in ends.items() if end <= row]:
                del ends[each]
                alive -= 0 if facts.flags[each] & Flag.VIEW or self.is_sum(each) else facts.bytes[each]
        return max(2, -(-peak // most))


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
        said += _named(
            self.planner.names_of(kept), "product", "scaled afterwards, and rounded unless by a power of two"
        )
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

        given = _with(arguments, lambda source: self._read(half, source, next(places), at, row))
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
            first = self._add(
                SLICE, (first, 0, 0, short[0], 1), short[:1], row, next(islice(tensors(arguments), 1, None))
            )
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
        return self._add(
            VIEW, (self._add(CAT, (tuple(slices), digit.dim + 1), whole, row, row), shape), shape, row, row
        )

    def _whole(self, source: int) -> Node:
        """A value of which nothing is cut."""
        return self.early.get(source) or self.planner.apart.get(source) or Node(self.facts.names[source])

    def _run_early(self, row: int) -> Node:
        """The nodes between an incoming gradient of 1 and the region."""
        facts, dtype, more = self.facts, self.facts.dtypes[row], {"call": self.facts.names[row]}
        if row in self.region.tangents:
            return self._add(_FULL, ((), 1, dtype, None, facts.devices[row], None), (), row, row)
        given = _with(facts.arguments[row], self._whole)
        return self._add(
            facts.targets[row], given, facts.shapes[row] or (), row, row, stride=facts.strides[row], **more
        )

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


def tensors(value: Any) -> Iterator[int]:
    """The nodes among the arguments of a call, as often as they are there."""
    if isinstance(value, Ref):
        yield value.row
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors(part)


def _with(value: Any, put: Callable[[int], Node]) -> Any:
    """Arguments with other nodes in the places of theirs."""
    if isinstance(value, Ref):
        return put(value.row)
    return tuple([_with(part, put) for part in value]) if isinstance(value, tuple) else value


def _named(names: Sequence[str], what: str, done: str) -> str:
    is_ = "is" if len(names) == 1 else "are"
    return f"; {counted(len(names), what)} {is_} {done} ({', '.join(names)})" if names else ""


def _is_zero(facts: Facts, row: int) -> bool:
    """True for a tensor of nothing but zeros."""
    name, arguments = facts.targets[row].rpartition(".")[0], facts.arguments[row]
    value = {"aten.full": 1, "aten.full_like": 1, "aten.scalar_tensor": 0}.get(name)
    return "zeros" in name or (value is not None and arguments[value] == 0)


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
