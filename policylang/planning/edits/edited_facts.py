"""The facts of a graph after its planned edits: rules are planned on these.

Everything is known beforehand, the names of new nodes included, so that a plan on a snapshot is the plan on the live
graph. The columns are those that :func:`policylang.graph.reading.collect.collect` finds on the graph that comes out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from attrs import evolve

from policylang.graph.facts import LATER_COLUMNS, Facts, Flag, Group, InputKind, Ref, read_by_backward, users_of
from policylang.language.interruption.wanted import check_cancelled
from policylang.operators.names import FOLLOWERS
from policylang.operators.table import MOVERS
from policylang.planning.graph_edit import Edit, FusedGroup, NewNode, Node

_KEPT = Flag.RECORDED_SAVED | Flag.BACKWARD_HOOK
"""What a new node takes over from the one it is like, with that one's metadata."""
_HANDED_ON = Flag.FORWARD_OUTPUT | Flag.GRADIENT
"""What the replacement of a value takes over from it."""


def edited(facts: Facts, edits: Sequence[Edit]) -> Facts:
    """The facts after some edits of one statement. Linear in nodes, edges and new nodes."""
    return _EditedFacts(facts, edits).facts() if edits else facts


class _EditedFacts:
    def __init__(self, facts: Facts, edits: Sequence[Edit]) -> None:
        self.old = facts
        self.edits = edits
        index = facts.index
        gone = {index[name] for edit in edits for name in (*edit.dead, *edit.ahead, *edit.behind)}
        put: dict[int, list[int | NewNode]] = {}
        for edit in edits:
            ahead, behind = ([index[name] for name in names] for names in (edit.ahead, edit.behind))
            put.setdefault(index[edit.before], []).extend((*ahead, *edit.nodes, *behind))
        self.order: list[int | NewNode] = []
        for row in range(len(facts)):
            self.order.extend(put.get(row, ()))
            if row not in gone:
                self.order.append(row)
        self.row_of_name = {
            (facts.names[each] if isinstance(each, int) else each.name): row for row, each in enumerate(self.order)
        }
        replacing = {old: new for edit in edits for old, new in edit.replaced}
        self.row_of = array("l", [-1]) * len(facts)
        for row, name in enumerate(facts.names):
            while name in replacing:  # what took another's place may have been replaced in turn
                name = replacing[name]
            self.row_of[row] = self.row_of_name.get(name, -1)
        self.groups = dict(facts.groups)

    def facts(self) -> Facts:
        check_cancelled()
        old, column, like = self.old, self._column, self._like
        inputs = [self._inputs(each) for each in self.order]
        users = users_of(inputs)
        owners = self._owners(inputs)
        phases = bytearray(like(old.phases))
        restrided = {old.index[name]: stride for edit in self.edits for name, stride in edit.restrided}
        strides = column(old.strides, lambda node: node.stride)
        later: dict[str, Any] = {name: like(known) if (known := getattr(old, name)) else () for name in LATER_COLUMNS}
        later["uncounted"] = column(old.uncounted, lambda _: "") if old.uncounted else ()
        return evolve(
            old,
            names=list(self.row_of_name),
            ops=column(old.ops, lambda _: "call_function"),
            targets=column(old.targets, lambda node: node.target),
            phases=phases,
            modules=column(old.modules, lambda node: node.module),
            ac_regions=like(old.ac_regions),
            user_tags=like(old.user_tags),
            flags=self._flags(phases, inputs, owners),
            bytes=array("q", column(old.bytes, lambda node: prod(node.shape) * self._item(node))),
            numel=array("q", column(old.numel, lambda node: prod(node.shape))),
            shapes=column(old.shapes, lambda node: node.shape),
            strides=[
                restrided.get(each, stride) if isinstance(each, int) else stride
                for each, stride in zip(self.order, strides, strict=True)
            ],
            dtypes=column(old.dtypes, lambda node: node.dtype),
            devices=column(old.devices, lambda node: node.device),
            flops=array("q", column(old.flops, lambda _: 0)),
            inputs=inputs,
            users=users,
            owners=owners,
            input_kinds=column(old.input_kinds, lambda _: int(InputKind.NOT_AN_INPUT)),
            input_names=column(old.input_names, lambda _: ""),
            arguments=[self._arguments(each) for each in self.order],
            group_names=column(old.group_names, self._group_name),
            groups=self.groups,
            **later,
        )

    def _column(self, old: Sequence[Any], new: Callable[[NewNode], Any]) -> list[Any]:
        check_cancelled()
        return [old[each] if isinstance(each, int) else new(each) for each in self.order]

    def _like(self, old: Sequence[Any]) -> list[Any]:
        """A column of which new nodes have what the node has that they are like."""
        return self._column(old, lambda node: old[self.old.index[node.like]])

    def _item(self, node: NewNode) -> int:
        """Bytes of an element."""
        like = self.old.index[node.like]
        return self.old.bytes[like] // max(self.old.numel[like], 1)

    def _inputs(self, each: int | NewNode) -> tuple[int, ...]:
        if isinstance(each, int):
            return tuple(dict.fromkeys([self.row_of[row] for row in self.old.inputs[each]]))
        return tuple(dict.fromkeys(self.row_of_name[name] for name in _nodes(each.arguments)))

    def _arguments(self, each: int | NewNode) -> tuple[Any, ...]:
        if isinstance(each, int):
            return tuple([self._argument(value) for value in self.old.arguments[each]])
        return tuple([self._argument(value) for value in MOVERS[each.target].completed(each.arguments)])

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(self.row_of[value.row])
        if isinstance(value, Node):
            return Ref(self.row_of_name[value.name])
        if isinstance(value, FusedGroup):
            return self._group(value)
        return tuple([self._argument(part) for part in value]) if isinstance(value, tuple) else value

    def _group_name(self, node: NewNode) -> str:
        return next((self._group(value) for value in node.arguments if isinstance(value, FusedGroup)), "")

    def _group(self, group: FusedGroup) -> str:
        if group.name is None:
            self.groups[group.label] = Group(group.label, group.ranks, len(group.ranks), None)
        return group.label

    def _owners(self, inputs: Sequence[tuple[int, ...]]) -> array[int]:
        owners = array("i", range(len(self.order)))
        for row, each in enumerate(self.order):
            if isinstance(each, int):
                owners[row] = self.row_of[self.old.owners[each]]
            elif each.target in FOLLOWERS:
                owners[row] = owners[inputs[row][0]]
        return owners

    def _flags(self, phases: Sequence[int], inputs: Sequence[tuple[int, ...]], owners: Sequence[int]) -> array[int]:
        old = self.old
        kept = self._column(old.flags, lambda node: old.flags[old.index[node.like]] & _KEPT)
        flags = array("i", [each & ~Flag.FEEDS_BACKWARD for each in kept])
        for row, each in enumerate(self.order):
            if isinstance(each, NewNode):
                flags[row] |= MOVERS[each.target].categories
        for edit in self.edits:
            for was, now in edit.replaced:
                if now in self.row_of_name:  # unless a later edit removes it, with all that reads it
                    flags[self.row_of_name[now]] |= old.flags[old.index[was]] & _HANDED_ON
        for row in self._reading_mutated(inputs):
            flags[row] |= Flag.READS_MUTATED
        for row in read_by_backward(phases, inputs, owners):
            flags[row] |= Flag.FEEDS_BACKWARD
        return flags

    def _reading_mutated(self, inputs: Sequence[tuple[int, ...]]) -> Iterator[int]:
        """The new rows that read memory which is written later, as the rows did that go."""
        old, index = self.old, self.old.index
        mutated: set[int] = set()
        for edit in self.edits:
            sources = {index[name] for name in edit.sources if name in index}
            dead = [index[name] for name in edit.dead]
            reading = [old.inputs[row] for row in dead if old.flags[row] & Flag.READS_MUTATED]
            mutated.update(self.row_of[read[0]] for read in reading if len(read) == 1 and read[0] in sources)
        for row, each in enumerate(self.order) if mutated else ():
            if isinstance(each, NewNode) and not mutated.isdisjoint(inputs[row]):
                yield row
                if MOVERS[each.target].categories & Flag.VIEW:
                    mutated.add(row)


def _nodes(value: Any) -> list[str]:
    if isinstance(value, Node):
        return [value.name]
    return [name for part in value for name in _nodes(part)] if isinstance(value, tuple) else []
