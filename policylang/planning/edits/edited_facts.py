"""The facts of a graph after its planned edits: rules are planned on these.

Everything is known beforehand, the names of new nodes included, so that a plan on a snapshot is the plan on the live
graph. The columns are those that :func:`policylang.graph.collect.collect` finds on the edited graph.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from policylang.graph.facts import Derivation, Facts, Flag, Group, Ref, rewritten
from policylang.language.cancellation import check_cancelled
from policylang.operators.moves import MOVERS
from policylang.operators.names import FOLLOWERS
from policylang.planning.graph_edit import Edit, FusedGroup, NewNode, Node

_KEPT = Flag.RECORDED_SAVED | Flag.BACKWARD_HOOK
"""What a new node copies from the one it is like, with that one's metadata."""
_HANDED_ON = Flag.FORWARD_OUTPUT | Flag.GRADIENT
"""What the replacement of a value inherits from it."""


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
            while name in replacing:  # a replacement may have been replaced in turn
                name = replacing[name]
            self.row_of[row] = self.row_of_name.get(name, -1)
        self.groups = dict(facts.groups)

    def facts(self) -> Facts:
        check_cancelled()
        old, column = self.old, self._column
        inputs = [self._inputs(each) for each in self.order]
        restrided = {old.index[name]: stride for edit in self.edits for name, stride in edit.restrided}
        strides = column(old.strides, lambda node: node.stride)
        like = {node.like: old.index[node.like] for edit in self.edits for node in edit.nodes}
        item = {name: old.bytes[row] // max(old.numel[row], 1) for name, row in like.items()}
        return rewritten(
            old,
            [
                (each, Derivation.SAME) if isinstance(each, int) else (like[each.like], Derivation.NEW)
                for each in self.order
            ],
            names=list(self.row_of_name),
            targets=column(old.targets, lambda node: node.target),
            phases=bytearray(column(old.phases, lambda node: old.phases[like[node.like]])),
            modules=column(old.modules, lambda node: node.module),
            flags=self._flags(inputs),
            bytes=array("q", column(old.bytes, lambda node: prod(node.shape) * item[node.like])),
            numel=array("q", column(old.numel, lambda node: prod(node.shape))),
            shapes=column(old.shapes, lambda node: node.shape),
            strides=[
                restrided.get(each, stride) if isinstance(each, int) else stride
                for each, stride in zip(self.order, strides, strict=True)
            ],
            dtypes=column(old.dtypes, lambda node: node.dtype),
            devices=column(old.devices, lambda node: node.device),
            inputs=inputs,
            owners=self._owners(inputs),
            arguments=[
                self._argument(
                    old.arguments[each] if isinstance(each, int) else MOVERS[each.target].completed(each.arguments)
                )
                for each in self.order
            ],
            group_names=column(
                old.group_names, lambda node: next((v.label for v in node.arguments if isinstance(v, FusedGroup)), "")
            ),
            groups=self.groups,
        )

    def _column(self, old: Sequence[Any], new: Callable[[NewNode], Any]) -> list[Any]:
        check_cancelled()
        return [old[each] if isinstance(each, int) else new(each) for each in self.order]

    def _inputs(self, each: int | NewNode) -> tuple[int, ...]:
        if isinstance(each, int):
            return tuple(dict.fromkeys([self.row_of[row] for row in self.old.inputs[each]]))
        return tuple(dict.fromkeys(self.row_of_name[name] for name in _nodes(each.arguments)))

    def _argument(self, value: Any) -> Any:
        match value:
            case Ref():
                return Ref(self.row_of[value.row])
            case Node():
                return Ref(self.row_of_name[value.name])
            case FusedGroup():
                if value.name is None:
                    self.groups[value.label] = Group(value.label, value.ranks, len(value.ranks), None)
                return value.label
        return tuple([self._argument(part) for part in value]) if isinstance(value, tuple) else value

    def _owners(self, inputs: Sequence[tuple[int, ...]]) -> array[int]:
        owners = array("i", range(len(self.order)))
        for row, each in enumerate(self.order):
            if isinstance(each, int):
                owners[row] = self.row_of[self.old.owners[each]]
            elif each.target in FOLLOWERS:
                owners[row] = owners[inputs[row][0]]
        return owners

    def _flags(self, inputs: Sequence[tuple[int, ...]]) -> list[int]:
        old = self.old
        flags = self._column(old.flags, lambda node: old.flags[old.index[node.like]] & _KEPT)
        for row, each in enumerate(self.order):
            if isinstance(each, NewNode):
                flags[row] |= MOVERS[each.target].categories
        for edit in self.edits:
            for was, now in edit.replaced:
                if now in self.row_of_name:  # unless a later edit removes it, with all that reads it
                    flags[self.row_of_name[now]] |= old.flags[old.index[was]] & _HANDED_ON
        for row in self._reading_mutated(inputs):
            flags[row] |= Flag.READS_MUTATED
        return flags

    def _reading_mutated(self, inputs: Sequence[tuple[int, ...]]) -> Iterator[int]:
        """The new nodes that read memory which is written later, as the nodes did that go."""
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
