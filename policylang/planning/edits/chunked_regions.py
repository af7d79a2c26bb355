"""The nodes that ``chunk`` cuts: those that carry the rows of a product's result, up to where they are summed."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase, Ref, found_in
from policylang.language.shown import counted
from policylang.operators import rows as of_rows
from policylang.operators.names import ALL_REDUCE, GETITEM, SCATTER
from policylang.operators.rows import LIKE, NLL, Dims, RowDim
from policylang.planning.edits.edit_planner import RefusedError

_CANNOT = {
    Flag.RANDOM: "draws random numbers",
    Flag.WRITES: "writes memory",
    Flag.EFFECTFUL: "has an effect",
}
_ROWS, _STUCK, _WAITS, _SEEN = 1, 2, 4, 8
"""It carries rows, or is a sum over them; it needs all slices or mixes rows; it needs slices of the backward: if these
run later, its readers may need the forward's slices; it is or was to be looked at."""
_BIASED = ("aten.addmm.default", "aten.baddbmm.default")


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
        self._pending, self._ends = list[int](), [-1, -1]
        """Nodes to look at, the first first; the last readers of rows in the forward and behind it."""
        self._marks = bytearray(len(facts))
        """By node, whether it carries rows, and for what it needs slices."""
        self.hoisted: list[int] = []
        """Nodes that read a value of the region and none of its elements."""
        self.members: set[int] = {head}
        self.taken_in: set[int] = set()
        """Members that only other members read, and of which nothing says yet where they have rows."""
        self._follow()
        self.reads: dict[int, list[RowDim | None]] = {}
        """By member, the rows of each tensor among its arguments; None for one that every slice reads whole."""
        self.dims: dict[int, Dims | None] = {}
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
        """Follow rows and columns through all that reads them. What is stuck is followed as far as a reader of rows may
        await it, not to the end of the graph: each block may have a region."""
        facts, marks, forward = self.facts, self._marks, int(Phase.FORWARD)
        self._mark(self.head, _ROWS)
        while self._pending and self._pending[0] <= max(self._ends):
            row = heappop(self._pending)
            found, read, target = 0, facts.inputs[row], facts.targets[row]
            for each in read:
                found |= marks[each]
            if found & _ROWS and target == GETITEM and read[0] in self.rows:
                self._pick(row, read[0])
                continue
            if facts.ops[row] != "call_function" or of_rows.reads_dtype_alone(target):
                continue
            late = found & (_STUCK if facts.phases[row] == forward else _WAITS)
            awaited = next((each for each in read if marks[each] & late), -1) if late else -1
            live = [each for each in read if any(self.rows.get(each, ()))] if found & _ROWS else ()
            if not live:
                if target not in LIKE and (self.together or found & _WAITS or row < self._ends[0]):
                    source = awaited if late else next(each for each in read if marks[each] & _STUCK)
                    self._stop(row, self.stuck[source])
                elif target in LIKE and late:
                    self.hoisted.append(row)
                continue
            wide = any(any(self.wide[each]) for each in live if each in self.wide)
            try:
                if late:
                    raise RefusedError(f"{self.stuck[awaited]}, and {facts.names[row]} reads it")
                is_inner = f"{facts.modules[row]}.".startswith(f"{self.module}.")
                if self.module and not wide and facts.phases[row] == forward and not is_inner:
                    raise RefusedError(f"{facts.names[row]} is outside of `{self.module}`")
                _, made, dims = self.labelled(row, None)
            except RefusedError as why:
                if wide:
                    raise
                self._stop(row, self.stuck[awaited] if late else why.reason)
                continue
            self.rows[row] = tuple(made)
            self._mark(row, _ROWS)
            if wide:
                self.members.add(row)
                self.wide[row] = self._columns(row, dims) if any(made) else (None,)
            if dims is not None and made == [None]:
                self._stop(row, f"{facts.names[row]} is a sum over all rows")

    def _mark(self, row: int, mark: int) -> None:
        facts, marks, digits = self.facts, self._marks, self.rows.get(row, ())
        for user in facts.users[row]:
            if not marks[user] & _SEEN:
                marks[user] |= _SEEN
                heappush(self._pending, user)
            if mark == _ROWS and (any(digits) or len(digits) > 1):
                late = facts.phases[user] != Phase.FORWARD
                self._ends[late] = max(self._ends[late], user)
        marks[row] |= mark

    def _stop(self, row: int, reason: str) -> None:
        """Follow a value no further: it needs all slices."""
        found = 0
        for each in self.facts.inputs[row]:
            found |= self._marks[each]
        waits = self.together or found & _WAITS or (found & _ROWS and self.facts.phases[row] != Phase.FORWARD)
        self.stuck[row] = reason
        self._mark(row, _STUCK | _WAITS if waits else _STUCK)

    def _is_awaited(self, row: int, reader: int) -> bool:
        """True if a slice of a reader cannot run before all slices, by which a value is made. Where the slices of the
        backward run later, they may read what needs those of the forward alone."""
        return bool(self._marks[row] & (_STUCK if self.facts.phases[reader] == Phase.FORWARD else _WAITS))

    def _pick(self, row: int, source: int) -> None:
        index = self.facts.arguments[row][1]
        if self.facts.targets[source] == NLL and index == 1:
            self.hoisted.append(row)
            return
        self.rows[row] = (self.rows[source][index],)
        self._mark(row, _ROWS)
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
        refs = tensors(arguments)
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
        refs = tensors(facts.arguments[row])
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
        pending = sorted(-row for row in self.members)
        while pending:
            row = -heappop(pending)
            if row in self.reads:
                continue
            if row not in self.members:
                if row not in narrow and not self._absorbed(row, list(wanted[row])):
                    continue
                self.members.add(row)
            if facts.targets[row] == GETITEM:
                self.reads[row] = [None]
                heappush(pending, -facts.inputs[row][0])
                wanted.setdefault(facts.inputs[row][0], {})
                continue
            is_given = row == self.head or row in self.taken_in
            self.reads[row], _, self.dims[row] = self.labelled(row, self._row(row) if is_given else None)
            for each, digit in zip(tensors(facts.arguments[row]), self.reads[row], strict=True):
                if digit is not None:
                    if each not in wanted:
                        heappush(pending, -each)
                    wanted.setdefault(each, {})[digit] = None
                elif each in self.rows and not of_rows.reads_dtype_alone(facts.targets[row]):
                    raise RefusedError(f"reads all rows of {facts.names[each]}: {facts.names[row]}")
        forward = {row for row in self.members if facts.phases[row] == Phase.FORWARD}
        needed, at_once = self._needed(self.members), self._needed(forward)
        # Hoisted nodes that read no slice of the backward run before those slices.
        late = {row for row in self.hoisted if self._marks[facts.inputs[row][0]] & _WAITS}
        late.update(row for row in self.hoisted if facts.inputs[row][0] in self.members)
        self.hoisted = [row for row in self.hoisted if row in needed and (row in at_once or row in late)]

    def _needed(self, rows: set[int]) -> set[int]:
        """The nodes and all that they are made of, as far back as nodes are hoisted."""
        found = set(rows)
        for row in range(max(rows, default=-1), min(self.hoisted, default=len(self.facts)), -1):
            if row in found:
                found.update(self.facts.inputs[row])
        return found

    def _row(self, row: int) -> RowDim:
        digit = self.rows[row][0]
        assert digit is not None
        return digit

    def _absorbed(self, row: int, digits: list[RowDim]) -> bool:
        """True for a wide value that only members read, or what is made of such a value alone for them (a gradient that
        is summed over the columns), where it can be made slice by slice."""
        facts = self.facts
        if len(digits) != 1 or not self.members.issuperset(facts.users[row]) or self._is_stuck(row):
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

    def _is_stuck(self, row: int) -> bool:
        """True if a node is made of one that is stuck, by nodes that were not followed: the earliest first, which are
        the nearest to the region."""
        facts, pending, seen, least = self.facts, [row], {row}, min(self.stuck, default=len(self.facts))
        while pending:
            each = heappop(pending)
            if self._marks[each] & _STUCK:
                return True
            like = facts.targets[each] in LIKE or of_rows.reads_dtype_alone(facts.targets[each])
            if like or self._marks[each] & _ROWS or facts.ops[each] != "call_function":
                continue
            for source in facts.inputs[each]:
                if source >= least and source not in seen:
                    seen.add(source)
                    heappush(pending, source)
        return False

    def _is_wide(self, row: int) -> bool:
        return self.facts.ops[row] == "call_function" and self.facts.numel[row] >= self.facts.numel[self.head]

    def _check(self) -> None:
        """Refuse a region of which a part waits for all slices, or that is whole anyway."""
        facts, inner = self.facts, self.members | set(self.hoisted)
        roots = facts.storage_roots
        read = {roots[each] for row in self.order for each in (row, *facts.inputs[row])}
        for row in facts.writing:
            near = self.order[0] <= row < self.order[-1] or not self.members.isdisjoint(facts.inputs[row])
            if near and not read.isdisjoint(roots[each] for each in facts.inputs[row]):
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
            read = tensors(facts.arguments[row]) or list(facts.inputs[row])
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
        readers = ((row, [each for each in facts.users[row] if each in self.members]) for row in self.order)
        last = {row: max(users, default=row) for row, users in readers}
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


def tensors(arguments: tuple[Any, ...]) -> list[int]:
    """The nodes among the arguments of a call, as often as they are there."""
    return [each.row for each in found_in(arguments, Ref)]


def _is_zero(facts: Facts, row: int) -> bool:
    """True for a tensor of nothing but zeros."""
    name, arguments = facts.targets[row].rpartition(".")[0], facts.arguments[row]
    value = {"aten.full": 1, "aten.full_like": 1, "aten.scalar_tensor": 0}.get(name)
    return "zeros" in name or (value is not None and arguments[value] == 0)
