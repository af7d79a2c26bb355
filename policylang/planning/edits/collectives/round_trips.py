"""``collapse round_trips``: what is gathered and cut back to this rank's own part is the part itself.

Values are followed from the gathers on as digits (:mod:`policylang.operators.layouts`). A slice at this
rank's positions in the groups takes away the digits that count their ranks; where only digits of one value on the
chain are left, the slice is a view of that value, and its readers can read it there. Which part is a rank's own is a
number in its graph, other in every rank's. This rank's is compared with its positions in the groups; that the two are
equal may be an accident of this rank (on a square mesh, its place along the other dimension), so a slice counts as a
rank's own part only where all ranks say so of theirs, and where they cannot be asked, nothing is collapsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import evolve, frozen

from policylang.graph.facts import Flag, InputKind
from policylang.operators import layouts
from policylang.operators.layouts import DigitLayout, NoDigitsError
from policylang.operators.moves import Cut, Part, Pick
from policylang.operators.names import GATHER, SLICE
from policylang.operators.strides import is_contiguous
from policylang.operators.table import JOINS, PASSING, movers_of
from policylang.planning.edits.collectives.aliasing import ReplacedMemory
from policylang.planning.edits.collectives.consumers import relaid
from policylang.planning.edits.collectives.element_moves import (
    Fan,
    Piece,
    copies,
    fan_of,
    fanned,
    moved,
    piece_of,
    source_of,
)
from policylang.planning.edits.collectives.grids import Grid, grid_of
from policylang.planning.edits.data import NewNode, Node, Proof, Refused, Rewrite
from policylang.planning.edits.naming import Trial
from policylang.planning.edits.offers import UNASKED
from policylang.planning.edits.proof.calls import ChainCall, new_call, old_calls
from policylang.planning.edits.proof.canonical import LayoutSteps, steps_to
from policylang.planning.edits.proof.equivalence import Claim
from policylang.planning.edits.rank_view import common_names, rewrite_words
from policylang.planning.edits.setting import RefusedError, Setting

_CUTS = movers_of(Cut, Pick)


@frozen
class _Value:
    """A row whose elements are those of one value, gathered and moved."""

    gathers: tuple[int, ...]
    """All gathers on the way, the first to run first; digits name them by their places here."""
    layout: DigitLayout


@frozen
class _Trip:
    """A slice that comes back to what was gathered."""

    row: int
    piece: Piece
    home: int
    """The row that the slice is a view of."""
    gathers: tuple[int, ...]
    """The gathers between the two."""
    layout: DigitLayout
    """The slice, as digits of ``home``."""


class RoundTrips:
    """A ``collapse round_trips`` statement."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.facts = facts = setting.facts
        self.values: dict[int, _Value] = {}
        self.grids: dict[tuple[str, ...], Grid | str] = {}
        self.cuts: dict[int, tuple[Piece, layouts.Digits, tuple[int, ...]]] = {}
        """Slices at this rank's own part, the digits that each fixes, and the gathers that these number."""
        self.dead: set[int] = set()
        self.stands: dict[int, str] = {}
        """What is read in place of a slice, by name."""
        self.handed: dict[int, list[int]] = {}
        """Rows that are read in place of slices, and those slices."""
        self.memory = ReplacedMemory(facts)
        self.common = common_names(facts)

    def outcomes(self) -> list[Rewrite | Refused]:
        """What the statement comes to, in graph order. Linear in nodes, edges and chains."""
        found: list[tuple[int, Rewrite | Refused]] = []
        for row, target in enumerate(self.facts.targets):
            if target == GATHER:
                self._gather(row)
            elif target in JOINS:
                self._join(row)
            elif target in PASSING:
                found.extend((row, outcome) for outcome in self._pass(row))
        # A slice that keeps too much may be part of the way to one that does not.
        return [outcome for row, outcome in found if isinstance(outcome, Rewrite) or row not in self.dead]

    # --- values on their way ---

    def _gather(self, row: int) -> None:
        facts = self.facts
        source = source_of(facts, row)
        name = facts.group_names[row]
        if source < 0 or not name:
            return
        before = self.values.get(source)
        shape = facts.shapes[source]
        if before is None:
            if not shape or 0 in shape or facts.strides[source] is None:
                return
            before = _Value((), layouts.shard(shape))
        layout = layouts.gathered(before.layout, len(before.gathers), facts.groups[name].size)
        self._keep(row, _Value((*before.gathers, row), layout))

    def _join(self, row: int) -> None:
        fan = fan_of(self.facts, row)
        if isinstance(fan, Fan) and fan.base in self.values:
            value = self.values[fan.base]
            try:
                self._keep(row, evolve(value, layout=fanned(self.facts, fan, value.layout)))
            except NoDigitsError:
                return

    def _keep(self, row: int, value: _Value) -> None:
        if value.layout.shape == self.facts.shapes[row] and self.facts.strides[row] is not None:
            self.values[row] = value

    def _pass(self, row: int) -> Iterator[Rewrite | Refused]:
        facts = self.facts
        piece = piece_of(facts, row) if facts.targets[row] in _CUTS else None
        if piece is not None and piece.count > 1:
            if piece.base in self.values and not piece.drops and not self._fans_out(piece):
                yield self._cut(row, piece)
            return
        source = source_of(facts, row)
        if source in self.values:
            value = self.values[source]
            try:
                self._keep(row, evolve(value, layout=moved(facts, row, value.layout)))
            except NoDigitsError:
                return

    def _fans_out(self, piece: Piece) -> bool:
        """Whether all parts are joined again: a gather along another dimension, written out."""
        facts = self.facts
        readers = facts.users[piece.base if piece.split is None else piece.split]
        joins = {user for reader in readers for user in facts.users[reader] if facts.targets[user] in JOINS}
        return any(isinstance(fan := fan_of(facts, join), Fan) and fan.base == piece.base for join in sorted(joins))

    # --- one slice ---

    def _cut(self, row: int, piece: Piece) -> Rewrite | Refused:
        value = self.values[piece.base]
        try:
            grid = self._grid(value.gathers)
            taken, rest = self._part(piece, value)
            dims = value.layout.dims
            cut = evolve(value, layout=DigitLayout((*dims[: piece.cut], rest, *dims[piece.cut + 1 :])))
            if cut.layout.shape != self.facts.shapes[row] or self.facts.strides[row] is None:
                raise RefusedError(f"sizes not fixed: {self.facts.names[piece.base]}")
            # What holds on every rank alike comes first: where ranks give different reasons, they are stopped.
            self._check_others(row, piece)
            why_not = self._why_not_own(row, piece, value, taken, grid)
            if not why_not:
                self.cuts[row] = piece, taken, value.gathers
                self.values[row] = cut
            trip = self._trip(row, piece, cut)
            if why_not:
                raise RefusedError(f"{why_not} of {self.facts.names[piece.base]}")
            self._start_anew(row, cut, trip)
            return self._shared(trip)
        except RefusedError as why:
            gathers = tuple(self.facts.names[gather] for gather in value.gathers)
            return Refused(self.setting.number, "round_trip", gathers, why.reason, why.detail)

    def _why_not_own(self, row: int, piece: Piece, value: _Value, taken: layouts.Digits, grid: Grid) -> str:
        """Empty where the slice is this rank's own part, and every rank that was asked has its own there."""
        if _part_of(grid.here, taken) != piece.place:
            return "not this rank's own part"
        setting = self.setting
        key = setting.key("own part", self.common[row])
        if key in setting.ledger.left:
            return f"not every rank's own part ({setting.ledger.left[key]})"
        gathers = [self.facts.names[gather] for gather in value.gathers]
        setting.offer(key, [gathers, piece.cut, piece.count, taken], grid)
        return ""

    def _shared(self, trip: _Trip) -> Rewrite:
        """A round trip that every rank takes out."""
        setting, facts = self.setting, self.facts
        gathers = [facts.names[gather] for gather in trip.gathers]
        key = setting.key("round_trip", *gathers, self.common[trip.row])
        setting.check_shared(key)
        rewrite = self._rewrite(trip)
        words = list(rewrite_words(evolve(rewrite, source=self._common_name(rewrite.source))))
        setting.offer(key, [rewrite.proof.claim, *words], self._grid(trip.gathers))
        return rewrite

    def _common_name(self, name: str) -> str:
        row = self.facts.index.get(name)
        return name if row is None else self.common[row]

    def _start_anew(self, row: int, value: _Value, trip: _Trip) -> None:
        """Followed from here on as a view of home: what is gathered again starts from there."""
        passed = len(value.gathers) - len(trip.gathers)
        if passed:
            self.values[row] = evolve(value, gathers=value.gathers[:passed])
        else:
            del self.values[row]

    def _grid(self, gathers: Sequence[int]) -> Grid:
        names = tuple(self.facts.group_names[gather] for gather in gathers)
        if names not in self.grids:
            self.grids[names] = grid_of(self.facts, names)
        grid = self.grids[names]
        if isinstance(grid, str):
            raise RefusedError(grid)
        return grid

    def _part(self, piece: Piece, value: _Value) -> tuple[layouts.Digits, layouts.Digits]:
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

    def _check_others(self, row: int, piece: Piece) -> None:
        """A rank's own part and its neighbour's are other nodes on every rank: then plans would differ."""
        facts = self.facts
        readers = facts.users[piece.base if piece.split is None else piece.split]
        for reader in readers:
            other = piece_of(facts, reader) if reader != row and facts.targets[reader] in _CUTS else None
            if other is not None and other.cut == piece.cut and other.place != piece.place:
                raise RefusedError("parts of other ranks are read too")

    def _trip(self, row: int, piece: Piece, value: _Value) -> _Trip:
        """Back to which value on the chain: the input of the first gather of which nothing is left."""
        left = {digit.origin for digit in value.layout.flat} - {layouts.SHARD}
        facts = self.facts
        for place, gather in enumerate(value.gathers):
            if left <= set(range(place)):
                home = source_of(facts, gather)
                before = self.values[home].layout if home in self.values else layouts.shard(facts.shapes[home] or ())
                try:
                    layout = layouts.relative(value.layout, before)
                except NoDigitsError:
                    continue
                if layout.shape != facts.shapes[row] or layouts.size_of(layout.flat) != facts.numel[home]:
                    continue
                return _Trip(row, piece, home, value.gathers[place:], layout)
        names = ", ".join(facts.names[value.gathers[place]] for place in sorted(left))
        raise RefusedError(f"keeps shards of other ranks: {names}")

    # --- the plan of it ---

    def _rewrite(self, trip: _Trip) -> Rewrite:
        facts = self.facts
        home, row = trip.home, trip.row
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
        steps = steps_to(trip.layout, (), shape)
        if steps.copies > copies(facts, rows):
            raise RefusedError("would copy what is not copied now")
        restrided: list[tuple[int, tuple[int, ...]]] = []
        if steps.stride != facts.strides[row]:
            found = relaid(facts, row, steps.stride, dense_for_gaps=True)
            if isinstance(found, int):
                raise RefusedError(f"{facts.names[found]} needs {facts.names[row]} as it lies in memory")
            restrided = found
        names = self.setting.names.trial()
        nodes, result = self._nodes(trip, steps, names)
        proof = self._prove(trip, rows, nodes, result)
        if not self.setting.ledger.asked:
            raise RefusedError(UNASKED, "that they take their own parts too is not in this rank's graph")
        names.settle()
        self.handed.setdefault(home, []).append(row)
        dead = self._newly_dead(rows)
        source = self.stands.get(home, facts.names[home])
        nodes = [evolve(node, arguments=_reading(node.arguments, facts.names[home], source)) for node in nodes]
        self.stands[row] = result if nodes else source
        return Rewrite(
            statement=self.setting.number,
            kind="round_trip",
            collectives=tuple(facts.names[gather] for gather in trip.gathers),
            source=source,
            before=facts.names[row],
            nodes=tuple(nodes),
            replaced=((facts.names[row], self.stands[row]),),
            dead=tuple(facts.names[each] for each in dead),
            proof=proof,
            restrided=tuple((facts.names[each], stride) for each, stride in restrided),
            note="" if trip.gathers[-1] in self.dead else f"{facts.names[trip.gathers[-1]]} has other readers",
        )

    def _rows(self, trip: _Trip) -> tuple[int, ...]:
        """What lies on the way from home, left out, to the slice."""
        facts = self.facts
        found, pending = {trip.row}, [trip.row]
        while pending:
            for source in facts.inputs[pending.pop()]:
                if source != trip.home and source not in found:
                    found.add(source)
                    pending.append(source)
        return tuple(sorted(found))

    def _nodes(self, trip: _Trip, steps: LayoutSteps, names: Trial) -> tuple[list[NewNode], str]:
        facts, row = self.facts, trip.row
        name = facts.names[trip.home]
        nodes = []
        for step in steps.steps:
            arguments = (Node(name),) if step.argument is None else (Node(name), step.argument)
            name = names.new(step.target)
            nodes.append(
                NewNode(
                    name=name,
                    target=step.target,
                    arguments=arguments,
                    shape=step.shape,
                    stride=step.stride,
                    dtype=facts.dtypes[row],
                    device=facts.devices[row],
                    module=facts.modules[row],
                    like=facts.names[row],
                )
            )
        return nodes, name

    def _prove(self, trip: _Trip, rows: Sequence[int], nodes: Sequence[NewNode], result: str) -> Proof:
        facts = self.facts
        # More than those of the trip, where a slice on the way has come back from others already.
        gathers = [row for row in rows if facts.targets[row] == GATHER]
        grid = self._grid(gathers)
        splits = {self.cuts[row][0].split for row in rows if row in self.cuts}
        old = []
        for row in rows:
            if row in self.cuts:
                old.append(self._slice_of_ranks(row, gathers, grid))
            elif row not in splits:
                old.extend(old_calls(facts, [row]))
        claim = Claim(
            facts.shapes[trip.home] or (),
            facts.names[trip.home],
            old,
            list(map(new_call, nodes)),
            [(facts.names[trip.row], result)],
            grid,
            tuple(facts.group_names[gather] for gather in gathers),
        )
        return self.setting.proof(claim)

    def _slice_of_ranks(self, row: int, gathers: Sequence[int], grid: Grid) -> ChainCall:
        """A slice as every rank of the grid has it: at its own part."""
        piece, taken, numbered = self.cuts[row]
        taken = tuple(evolve(digit, origin=gathers.index(numbered[digit.origin])) for digit in taken)
        parts = [(rank, _part_of(grid.position(rank), taken)) for rank in grid.ranks]
        arguments = (Node(self.facts.names[piece.base]), piece.cut, Part(tuple(parts), piece.count))
        return ChainCall(self.facts.names[row], SLICE, arguments, self.facts.shapes[row])

    def _newly_dead(self, rows: Sequence[int]) -> list[int]:
        """The rows that nobody reads any more now that the last of them is not read, in graph order."""
        found = []
        for row in reversed(rows):
            if row not in self.dead and (row == rows[-1] or all(user in self.dead for user in self._readers(row))):
                self.dead.add(row)
                found.append(row)
        return found[::-1]

    def _readers(self, row: int) -> Iterator[int]:
        """Who reads a row, those included that read it in place of a slice."""
        yield from self.facts.users[row]
        for handed in self.handed.get(row, ()):
            yield from self.facts.users[handed]


def _part_of(positions: Sequence[int], taken: layouts.Digits) -> int:
    """Which part a rank has by its positions in the groups of the gathers that the digits number."""
    part = 0
    for digit in taken:
        part = part * digit.size + positions[digit.origin] // digit.weight % digit.size
    return part


def _reading(arguments: tuple[object, ...], name: str, instead: str) -> tuple[object, ...]:
    return tuple(Node(instead) if value == Node(name) else value for value in arguments)
