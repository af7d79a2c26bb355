"""``collapse round_trips``: a value gathered and sliced back to the rank's part is replaced by that part.

Values are followed from the gathers on as digits (:mod:`policylang.operators.layouts`). A slice at this rank's
positions in the groups takes away the digits that count their ranks; if only digits of one value on the chain are left,
the slice is a view of that value. The part that a rank takes is a number in its graph, and may equal the rank's
position by accident (on a square mesh, its place along the other dimension). So a slice counts as the rank's part only
if all ranks confirm theirs; if they cannot be asked, nothing is collapsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import chain

from attrs import evolve, frozen

from policylang.graph.facts import Flag, InputKind
from policylang.language.syntax import Collapse
from policylang.operators import layouts
from policylang.operators.layouts import JOINS, PASSING, Cut, DigitLayout, NoDigitsError, Pick, is_contiguous, movers_of
from policylang.operators.names import GATHER
from policylang.planning.edits import layout_chains
from policylang.planning.edits.edit_planner import EditPlanner, NewNodes, RefusedError, ReplacedMemory, Setting
from policylang.planning.edits.fusion import slice_on_ranks
from policylang.planning.edits.other_ranks import UNASKED
from policylang.planning.edits.proof import old_calls
from policylang.planning.graph_edit import Edit, Node, Proof, Refusal, common_names

_CUTS = movers_of(Cut, Pick)


@frozen
class _Value:
    """A node whose elements come from one gathered value."""

    gathers: tuple[int, ...]
    """All gathers up to here, in running order; digits name them by their index here."""
    layout: DigitLayout


@frozen
class _Trip:
    """A slice that equals what was gathered."""

    row: int
    home: int
    """The node that the slice is a view of."""
    gathers: tuple[int, ...]
    """The gathers between the two."""
    layout: DigitLayout
    """The slice, as digits of ``home``."""


class RoundTrips(EditPlanner[Collapse]):
    kind = "round_trip"
    counted = "all_gather"
    nothing_found = "no value of this graph is gathered and sliced back"

    def __init__(self, statement: Collapse, setting: Setting) -> None:
        super().__init__(statement, setting)
        self.values: dict[int, _Value] = {}
        self.cuts: dict[int, tuple[layout_chains.Piece, layouts.Digits, tuple[int, ...]]] = {}
        """Slices at this rank's own part, the digits that each fixes, and the gathers that these number."""
        self.dead: set[int] = set()
        self.instead: dict[int, str] = {}
        """By slice, the name of what is read instead."""
        self.reading_instead: dict[int, list[int]] = {}
        """By node that is read instead, the slices it replaces."""
        self.memory = ReplacedMemory(self.facts)
        self.common = common_names(self.facts)

    def outcomes(self) -> list[Edit | Refusal]:
        facts, found = self.facts, list[tuple[int, Edit | Refusal]]()
        for row, target in enumerate(facts.targets):
            if target == GATHER:
                self._gather(row)
            elif target in JOINS:
                if isinstance(fan := layout_chains.fan_of(facts, row), layout_chains.Fan):
                    self._follow(row, fan.base, fan)
            elif target in PASSING:
                piece = self._piece(row)
                if piece is None or piece.count == 1:
                    self._follow(row, layout_chains.single_input(facts, row), row)
                elif piece.base in self.values and not piece.drops and not self._fans_out(piece):
                    found.append((row, self._cut(row, piece)))
        # A slice that keeps too much may lead to one that does not.
        return [outcome for row, outcome in found if isinstance(outcome, Edit) or row not in self.dead]

    # --- values on their way ---

    def _gather(self, row: int) -> None:
        facts = self.facts
        source, name = layout_chains.single_input(facts, row), facts.group_names[row]
        if source < 0 or not name:
            return
        before, shape = self.values.get(source), facts.shapes[source]
        if before is None:
            if not shape or 0 in shape or facts.strides[source] is None:
                return
            before = _Value((), layouts.shard(shape))
        layout = before.layout.gathered(len(before.gathers), facts.groups[name].size)
        self._keep(row, _Value((*before.gathers, row), layout))

    def _follow(self, row: int, source: int, hop: layout_chains.Hop) -> None:
        if source in self.values:
            value = self.values[source]
            with suppress(NoDigitsError):
                self._keep(row, evolve(value, layout=layout_chains.layout_after(self.facts, hop, value.layout)))

    def _keep(self, row: int, value: _Value) -> None:
        if value.layout.shape == self.facts.shapes[row] and self.facts.strides[row] is not None:
            self.values[row] = value

    def _piece(self, row: int) -> layout_chains.Piece | None:
        return layout_chains.piece_of(self.facts, row) if self.facts.targets[row] in _CUTS else None

    def _fans_out(self, piece: layout_chains.Piece) -> bool:
        """True if all parts are joined again: a gather along another dimension, written out."""
        facts = self.facts
        readers = {user for part in facts.users[piece.whole] for user in facts.users[part]}
        joins = [user for user in readers if facts.targets[user] in JOINS]
        return any(
            isinstance(fan := layout_chains.fan_of(facts, join), layout_chains.Fan) and fan.base == piece.base
            for join in sorted(joins)
        )

    # --- one slice ---

    def _cut(self, row: int, piece: layout_chains.Piece) -> Edit | Refusal:
        facts, value = self.facts, self.values[piece.base]
        name = facts.names[piece.base]
        try:
            grid = self.grid(self.groups_of(value.gathers))
            taken, rest = self._part(piece, value)
            dims = value.layout.dims
            cut = evolve(value, layout=DigitLayout((*dims[: piece.cut], rest, *dims[piece.cut + 1 :])))
            if cut.layout.shape != facts.shapes[row] or facts.strides[row] is None:
                raise RefusedError(f"sizes not fixed: {name}")
            # Reasons that hold on every rank alike come first: ranks that give different reasons are stopped.
            for reader in facts.users[piece.whole]:
                other = self._piece(reader)
                # Own and other parts are different nodes on every rank, so plans would differ.
                if reader != row and other is not None and other.cut == piece.cut and other.place != piece.place:
                    raise RefusedError("parts of other ranks are read too")
            why_not, words = "", ("own part", self.common[row])
            if _part_of(grid.here, taken) != piece.place:
                why_not = "not this rank's own part"
            elif rejected := self.rejected(*words):
                why_not = f"not every rank's own part ({rejected})"
            else:
                self.propose(words, [list(self.names_of(value.gathers)), piece.cut, piece.count, taken], grid)
                self.cuts[row] = piece, taken, value.gathers
                self.values[row] = cut
            trip = self._trip(row, cut)
            if why_not:
                raise RefusedError(f"{why_not} of {name}")
            # From here on a view of home: another gather of it starts from there.
            del self.values[row]
            if passed := value.gathers[: -len(trip.gathers)]:
                self.values[row] = evolve(cut, gathers=passed)
            name_of_trip = (*self.names_of(trip.gathers), self.common[row])
            return self.shared(name_of_trip, self.groups_of(trip.gathers), partial(self._planned, trip))
        except RefusedError as why:
            return self.refusal(value.gathers, why)

    def as_on_every_rank(self, edit: Edit) -> Edit:
        index = self.facts.index
        names = [self.common[index[name]] if name in index else name for name in edit.sources]
        return evolve(edit, sources=tuple(names))

    def _part(self, piece: layout_chains.Piece, value: _Value) -> tuple[layouts.Digits, layouts.Digits]:
        """The digits that the slice fixes, and those of the dimension that it leaves."""
        name = self.facts.names[piece.base]
        digits = value.layout.dims[piece.cut]
        try:
            taken, rest = layouts.first(digits, piece.count)
        except NoDigitsError:
            raise RefusedError(f"cuts across shards of {name}") from None
        if any(digit.origin == layouts.SHARD for digit in taken):
            raise RefusedError(f"cuts dimension {piece.cut} of {name} within a shard")
        return taken, rest

    def _trip(self, row: int, value: _Value) -> _Trip:
        """The round trip to the input of the first gather of which no digits are left."""
        left = {digit.origin for digit in value.layout.flat} - {layouts.SHARD}
        facts = self.facts
        for place, gather in enumerate(value.gathers):
            if left <= set(range(place)):
                home = layout_chains.single_input(facts, gather)
                before = self.values[home].layout if home in self.values else layouts.shard(facts.shapes[home] or ())
                try:
                    layout = layouts.relative(value.layout, before)
                except NoDigitsError:
                    continue
                if layout.shape != facts.shapes[row] or layouts.size_of(layout.flat) != facts.numel[home]:
                    continue
                return _Trip(row, home, value.gathers[place:], layout)
        names = ", ".join(facts.names[value.gathers[place]] for place in sorted(left))
        raise RefusedError(f"keeps shards of other ranks: {names}")

    # --- the plan of it ---

    def _planned(self, trip: _Trip) -> Edit:
        facts, home, row = self.facts, trip.home, trip.row
        shape, stride = facts.shapes[home] or (), facts.strides[home]
        if stride is None or not is_contiguous(shape, stride):
            raise RefusedError(f"not contiguous: {facts.names[home]}")
        rows = self._rows(trip)
        for each in rows:
            if facts.flags[each] & Flag.RECORDED_SAVED:
                raise RefusedError(f"recorded as saved: {facts.names[each]}")
            if facts.dtypes[each] and facts.dtypes[each] != facts.dtypes[home]:
                raise RefusedError(f"dtype changes: {facts.names[each]}")
        if facts.phases[home] != facts.phases[row] and facts.input_kinds[home] == InputKind.NOT_AN_INPUT:
            raise RefusedError(f"other phase: {facts.names[row]}")
        self.memory.check(trip.home, trip.row, trip.gathers[0])
        steps = layout_chains.steps_to(trip.layout, (), shape)
        if steps.copies > layout_chains.copies(facts, rows):
            raise RefusedError("would copy what is not copied now")
        restrided = layout_chains.relaid(facts, row, steps.stride, dense_for_gaps=True)
        if isinstance(restrided, int):
            raise RefusedError(f"{facts.names[restrided]} needs {facts.names[row]} as it lies in memory")
        new = NewNodes(self.setting)
        result = new.follow(Node(facts.names[home]), steps, row).name
        proof = self._proof(trip, rows, new, result)
        if not self.setting.consensus.asked:
            raise RefusedError(UNASKED, "this rank's graph does not show that they take their parts too")
        new.take_names()
        self.reading_instead.setdefault(home, []).append(row)
        dead = self._newly_dead(rows)
        source = self.instead.get(home, facts.names[home])
        names = {Node(facts.names[home]): Node(source)}
        nodes = [evolve(node, arguments=tuple(names.get(each, each) for each in node.arguments)) for node in new.made]
        self.instead[row] = result if nodes else source
        last = trip.gathers[-1]
        note = "" if last in self.dead else f"{facts.names[last]} has other readers"
        replaced = {row: self.instead[row]}
        return self.edit(
            trip.gathers, (source,), row, nodes, replaced, dead, proof, restrided, note=note, per_rank=True
        )

    def _rows(self, trip: _Trip) -> tuple[int, ...]:
        """The nodes from home, excluded, to the slice."""
        facts = self.facts
        found, pending = {trip.row}, [trip.row]
        while pending:
            for source in facts.inputs[pending.pop()]:
                if source != trip.home and source not in found:
                    found.add(source)
                    pending.append(source)
        return tuple(sorted(found))

    def _proof(self, trip: _Trip, rows: Sequence[int], new: NewNodes, result: str) -> Proof:
        facts = self.facts
        # More than the trip's gathers, if a slice on the way was itself collapsed.
        gathers = [row for row in rows if facts.targets[row] == GATHER]
        groups = self.groups_of(gathers)
        grid = self.grid(groups)
        splits = {self.cuts[row][0].split for row in rows if row in self.cuts}
        old = []
        for row in rows:
            if row in self.cuts:
                piece, taken, numbered = self.cuts[row]
                taken = tuple(evolve(digit, origin=gathers.index(numbered[digit.origin])) for digit in taken)
                base = Node(facts.names[piece.base])
                part_at = partial(_part_of, taken=taken)
                shape = facts.shapes[row]
                old.append(slice_on_ranks(facts.names[row], base, piece.cut, piece.count, shape, grid, part_at))
            elif row not in splits:
                old.extend(old_calls(facts, [row]))
        return self.prove([trip.home], old, new.calls(), {trip.row: result}, groups)

    def _newly_dead(self, rows: Sequence[int]) -> list[int]:
        """The nodes that nobody reads once the last of them is not read, in graph order."""
        users, found = self.facts.users, list[int]()
        for row in reversed(rows):
            instead = (user for each in self.reading_instead.get(row, ()) for user in users[each])
            unread = row == rows[-1] or all(user in self.dead for user in chain(users[row], instead))
            if row not in self.dead and unread:
                self.dead.add(row)
                found.append(row)
        return found[::-1]


def _part_of(positions: Sequence[int], taken: layouts.Digits) -> int:
    """The part of a rank, from its positions in the groups that the digits number."""
    part = 0
    for digit in taken:
        part = part * digit.size + positions[digit.origin] // digit.weight % digit.size
    return part
