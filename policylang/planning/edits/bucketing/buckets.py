"""``bucket``: collectives of one kind, process group and dtype become one, which is started and awaited once.

Members are independent of each other: within each stretch of blocks they are taken by depth
(:func:`~policylang.planning.edits.bucketing.bucket_members.depths`), in the order in which they run, each into the
first bucket in which there is room for it and a place at which all inputs can be there before any result is read
(:mod:`policylang.planning.edits.bucketing.placing`). The one collective carries the bytes of its members, and each
member's readers find the value that they read before (:mod:`policylang.planning.edits.bucketing.merging`), which is
proven on the shards of all ranks of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from attrs import evolve, field, frozen, mutable

from policylang.graph.facts import Facts
from policylang.language.interruption.wanted import check_cancelled
from policylang.language.syntax import Bucket
from policylang.operators.names import GATHER
from policylang.planning.edits.bucketing.bucket_members import Alike, Member, depths, group_sizes, grouped, member_of
from policylang.planning.edits.bucketing.merging import merge
from policylang.planning.edits.bucketing.placing import Placement, Places
from policylang.planning.edits.bucketing.serving import Serving
from policylang.planning.edits.edit_planner import EditPlanner, NewNodes, RefusedError, Setting
from policylang.planning.edits.grids import Grid, dims_of
from policylang.planning.edits.proof.calls import old_calls
from policylang.planning.graph_edit import Edit, FusedGroup, Refusal

ALONE = "no other like it"
BOUND = "others like it depend on it, or it on them"
OUTSIDE = "outside the blocks"
TOO_LARGE = "larger than the limit"
NO_ROOM = "no neighbour fits beside it"
LIMITED = (TOO_LARGE, NO_ROOM)
KEPT = "its order is kept"
MOST_OPEN = 8
"""Of buckets that a member is tried in: others of its depth stand too far apart to be joined."""


@mutable
class _OpenBucket:
    """Members that can be one."""

    members: list[Member]
    size: int
    full: bool = False


@frozen
class _Done:
    """A bucket, and where it stands among those that stand before the same row."""

    place: int
    count: int
    edit: Edit
    moved: tuple[int, ...] = field(repr=False)
    """Rows that are gone from where they were: they are no places to stand before."""


class Buckets(EditPlanner[Bucket]):
    """One ``bucket`` statement on one graph."""

    kind = "bucket"
    counted = "all_gather"
    nothing_found = "no two collectives of this graph that it picks can be one"

    def __init__(self, statement: Bucket, setting: Setting) -> None:
        super().__init__(statement, setting)
        held = (self.facts.index.get(name) for name in setting.held)
        self.places = Places(self.facts, sorted(row for row in held if row is not None))
        self.sizes = group_sizes(self.facts)
        self.limit = None if statement.size is None else int(statement.size.value)
        self._names: dict[str, FusedGroup] = {}
        self._refused: list[tuple[int, Refusal]] = []

    def outcomes(self) -> list[Edit | Refusal]:
        done: list[_Done] = []
        for members, alone in self._candidates():
            check_cancelled()
            for pile in self._piled(members, alone):
                if len(pile) > 1 and (found := self._bucket(pile)) is not None:
                    done.append(found)
        done.sort(key=lambda each: (each.place, each.count))
        return [*_placed(self.facts, done), *(each for _, each in sorted(self._refused, key=lambda each: each[0]))]

    def grid(self, groups: tuple[str, ...]) -> Grid:
        """The ranks of the one group. That of another rank is not asked for: whoever takes part in a collective is in
        its group already."""
        if groups in self._grids:
            return super().grid(groups)
        (name,) = groups
        group = self.facts.groups[name]
        if self.setting.ledger.asked and not group.ranks:
            raise RefusedError(f"ranks of group `{name}` not known")
        dims = dims_of(group, self.facts.meshes)
        size = self.sizes[name]
        self._grids[groups] = Grid((size,), group.ranks or tuple(range(size)), (0,), (), (dims,))
        return super().grid(groups)

    # --- what may be joined ---

    def _candidates(self) -> list[tuple[list[Member], str]]:
        """Collectives that are alike, belong to the same blocks and do not depend on each other, in graph order; and
        why one of them would be alone."""
        assert self.setting.pick is not None, "buckets are planned where values are decided"
        rows, block_of = self.setting.pick(self.facts, self.statement.selector)
        members: list[Member] = []
        for row in rows:
            try:
                if self.facts.names[row] in self.setting.held:
                    raise RefusedError(KEPT)
                members.append(member_of(self.facts, row, self.places, self.sizes))
            except RefusedError as why:
                self._refuse([row], why)
        deep = {each.row: depth for each, depth in zip(members, depths(self.facts, members), strict=True)}
        found: list[tuple[list[Member], str]] = []
        for alike in self._within_blocks(members, block_of):
            by_depth: dict[int, list[Member]] = {}
            for member, depth in zip(alike, depths(self.facts, alike), strict=True):
                by_depth.setdefault(depth, []).append(member)
            found.extend((each, BOUND if len(alike) > 1 else ALONE) for each in by_depth.values())
        return sorted(found, key=lambda each: _turn(each[0], deep))

    def _within_blocks(self, members: Sequence[Member], block_of: Sequence[int]) -> Iterator[list[Member]]:
        """Members that are alike, of so many blocks in the order in which each direction runs them."""
        if self.statement.blocks is None:
            yield from grouped(members).values()
            return
        order: dict[int, dict[int, int]] = {}
        stretches: dict[tuple[int, Alike], list[Member]] = {}
        serving = Serving(self.facts, block_of)
        for member in members:
            block = serving.block(member.row)
            if block < 0:
                self._refuse([member.row], RefusedError(OUTSIDE))
                continue
            places = order.setdefault(member.alike.phase, {})
            place = places.setdefault(block, len(places)) // self.statement.blocks
            stretches.setdefault((place, member.alike), []).append(member)
        yield from stretches.values()

    def _piled(self, members: Sequence[Member], alone: str) -> Iterator[list[Member]]:
        """Members in the buckets that there is room and a place for. Those that stay alone are refused."""
        piles: list[_OpenBucket] = []
        reasons: dict[int, RefusedError] = {}
        for member in members:
            if self.limit is not None and member.bytes > self.limit:
                reasons[member.row] = RefusedError(TOO_LARGE)
                piles.append(_OpenBucket([member], member.bytes, full=True))
                continue
            for pile in [each for each in piles if not each.full][-MOST_OPEN:]:
                if self.limit is not None and pile.size + member.bytes > self.limit:
                    pile.full = True
                    for each in (member, pile.members[0]):
                        reasons.setdefault(each.row, RefusedError(NO_ROOM))
                    continue
                try:
                    self._place([*pile.members, member])
                except RefusedError as why:
                    reasons.setdefault(member.row, why)
                    reasons.setdefault(pile.members[0].row, why)
                else:
                    pile.members.append(member)
                    pile.size += member.bytes
                    break
            else:
                piles.append(_OpenBucket([member], member.bytes))
        for pile in piles:
            if len(pile.members) == 1:
                (member,) = pile.members
                self._refuse([member.row], reasons.get(member.row) or RefusedError(alone, _said(member.alike)))
            yield pile.members

    def _place(self, members: Sequence[Member]) -> Placement:
        place = self.places.late if members[0].alike.late else self.places.early
        sources, waits, rows = zip(*((each.source, each.wait, each.row) for each in members), strict=True)
        return place(sources, waits, rows)

    # --- one bucket ---

    def _bucket(self, members: Sequence[Member]) -> _Done | None:
        words, groups = self.names_of(each.row for each in members), (members[0].alike.group,)
        try:
            placement = self._place(members)
            edit = self.shared(words, groups, partial(self._planned, members, placement))
        except RefusedError as why:
            self._refuse([each.row for each in members], why)
            return None
        replaced = [row for each in members for row in (each.row, each.wait)]
        count = self.places.settle(placement, replaced)
        return _Done(placement.before, count, edit, (*replaced, *placement.ahead, *placement.behind))

    def _planned(self, members: Sequence[Member], placement: Placement) -> Edit:
        facts, first = self.facts, members[0]
        new = NewNodes(self.setting, self.kind)
        replaced, restrided = merge(facts, members, self._group(first.alike.group), new, self.places.memory)
        sources = tuple(dict.fromkeys(each.source for each in members))
        rows = sorted(row for each in members for row in (each.row, each.wait))
        pairs = tuple((facts.names[row], name) for row, name in replaced.items())
        proof = self.prove(sources, old_calls(facts, rows), new.calls(), pairs, (first.alike.group,))
        new.take_names()
        return Edit(
            statement=self.setting.number,
            kind=self.kind,
            collectives=self.names_of(each.row for each in members),
            sources=self.names_of(sources),
            before=facts.names[placement.before],
            nodes=tuple(new.made),
            replaced=pairs,
            dead=self.names_of(rows),
            proof=evolve(proof, exact=_is_exact(first)),
            restrided=tuple((facts.names[row], stride) for row, stride in sorted(restrided)),
            ahead=self.names_of(placement.ahead),
            behind=self.names_of(placement.behind),
        )

    def _group(self, name: str) -> FusedGroup:
        if name not in self._names:
            group = self.facts.groups[name]
            # Ranks that nobody knows are counted from 0: a proof asks how many there are, and the name says which.
            ranks = group.ranks or tuple(range(self.sizes[name]))
            to_make = FusedGroup(ranks, None, dims_of(group, self.facts.meshes))
            # A group that a line before it has planned has another name once it is made: it is found by its ranks.
            self._names[name] = to_make if to_make.label == name else evolve(to_make, name=group.name)
        return self._names[name]

    def _refuse(self, rows: Sequence[int], why: RefusedError) -> None:
        self._refused.append((rows[0], self.refusal(rows, why)))


def _is_exact(member: Member) -> bool:
    """Whether one collective gives the bits of several. A sum of two is the same in either order, and so is one of
    whole numbers; of more the order depends on how the backend cuts what it is given, which is longer now."""
    alike = member.alike
    return alike.target == GATHER or member.ranks <= 2 or not alike.dtype.startswith(("float", "bfloat", "complex"))


def _turn(members: Sequence[Member], deep: Mapping[int, int]) -> tuple[bool, int, int]:
    """When a bucket has its place settled: what reads another bucket's results before it, where both stand as late as
    they can, so that the one in front finds its readers behind it."""
    late = members[0].alike.late
    return late, -max(deep[each.row] for each in members) if late else 0, members[0].row


def _said(alike: Alike) -> str:
    """What has to be the same of the members of a bucket."""
    operator = alike.target.partition(".")[2].partition(".")[0]
    return f"{operator} of {alike.dtype} over group `{alike.group}`"


def _placed(facts: Facts, done: Iterable[_Done]) -> Iterator[Edit]:
    """Each before a row that stays where it is: the next one, which is the same place."""
    done = list(done)
    moved = {row for each in done for row in each.moved}
    for each in done:
        row = each.place
        while row in moved:
            row += 1
        yield evolve(each.edit, before=facts.names[row])
