"""The facts of a graph as they will be once planned rewrites are carried out: rules are planned on these.

Everything is known beforehand, the names of new nodes included, so that a plan on a snapshot is the plan on the live
graph. The columns are those that :func:`policylang.graph.reading.collect.collect` finds on the graph that comes out.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from math import prod
from typing import Any

from attrs import evolve

from policylang.graph.facts import Facts, Flag, Group, InputKind, Phase, Ref, users_of
from policylang.operators.names import FOLLOWERS, Category
from policylang.operators.table import MOVERS
from policylang.planning.edits.data import FusedGroup, NewNode, Node, Rewrite

_KEPT = int(Flag.RECORDED_SAVED | Flag.BACKWARD_HOOK)
"""What a new node takes over from the one it is like, with that one's metadata."""
_HANDED_ON = int(Flag.FORWARD_OUTPUT | Flag.GRADIENT)
"""What the replacement of a value takes over from it."""


def rewritten(facts: Facts, done: Sequence[Rewrite]) -> Facts:
    """The facts after some rewrites of one statement. Linear in nodes, edges and new nodes."""
    return _Rewriting(facts, done).facts() if done else facts


class _Rewriting:
    def __init__(self, facts: Facts, done: Sequence[Rewrite]) -> None:
        self.old = facts
        self.done = done
        index = facts.index
        dead = {index[name] for rewrite in done for name in rewrite.dead}
        put: dict[int, list[NewNode]] = {}
        for rewrite in done:
            put.setdefault(index[rewrite.before], []).extend(rewrite.nodes)
        self.order: list[int | NewNode] = []
        for row in range(len(facts)):
            self.order.extend(put.get(row, ()))
            if row not in dead:
                self.order.append(row)
        self.row_of_name = {
            (facts.names[each] if isinstance(each, int) else each.name): row for row, each in enumerate(self.order)
        }
        replacing = {old: new for rewrite in done for old, new in rewrite.replaced}
        self.row_of = array("l", [-1]) * len(facts)
        for row, name in enumerate(facts.names):
            self.row_of[row] = self.row_of_name.get(_followed(name, replacing), -1)
        self.restrided = {name: stride for rewrite in done for name, stride in rewrite.restrided}
        self.groups = dict(facts.groups)

    def facts(self) -> Facts:
        old = self.old
        inputs = [self._inputs(each) for each in self.order]
        users = users_of(inputs)
        owners = self._owners(inputs)
        phases = bytearray(self._column(old.phases, lambda node: old.phases[old.index[node.like]]))
        flags = self._flags(phases, users, owners)
        arguments = [self._arguments(each) for each in self.order]
        numel = [prod(each.shape) if isinstance(each, NewNode) else old.numel[each] for each in self.order]
        return evolve(
            old,
            names=list(self.row_of_name),
            ops=self._column(old.ops, lambda _: "call_function"),
            targets=self._column(old.targets, lambda node: node.target),
            phases=phases,
            modules=self._column(old.modules, lambda node: node.module),
            ac_regions=self._column(old.ac_regions, lambda node: old.ac_regions[old.index[node.like]]),
            user_tags=self._column(old.user_tags, lambda node: old.user_tags[old.index[node.like]]),
            flags=flags,
            bytes=array("q", self._column(old.bytes, lambda node: prod(node.shape) * self._item(node))),
            numel=array("q", numel),
            shapes=self._column(old.shapes, lambda node: node.shape),
            strides=[self._stride(each) for each in self.order],
            dtypes=self._column(old.dtypes, lambda node: node.dtype),
            devices=self._column(old.devices, lambda node: node.device),
            flops=array("q", self._column(old.flops, lambda _: 0)),
            inputs=inputs,
            users=users,
            owners=owners,
            input_kinds=self._column(old.input_kinds, lambda _: int(InputKind.NOT_AN_INPUT)),
            input_names=self._column(old.input_names, lambda _: ""),
            arguments=arguments,
            annotations=self._annotations(),
            group_names=[self._group_name(each) for each in self.order],
            groups=self.groups,
        )

    def _column(self, old: Sequence[Any], new: Any) -> list[Any]:
        return [old[each] if isinstance(each, int) else new(each) for each in self.order]

    def _annotations(self) -> Sequence[tuple[str, ...]]:
        """New nodes are given what the node that they are like has."""
        old = self.old
        return (
            self._column(old.annotations, lambda node: old.annotations[old.index[node.like]]) if old.annotations else ()
        )

    def _item(self, node: NewNode) -> int:
        """Bytes of an element."""
        like = self.old.index[node.like]
        return self.old.bytes[like] // max(self.old.numel[like], 1)

    def _stride(self, each: int | NewNode) -> tuple[int, ...] | None:
        if isinstance(each, NewNode):
            return each.stride
        return self.restrided.get(self.old.names[each], self.old.strides[each])

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

    def _group_name(self, each: int | NewNode) -> str:
        if isinstance(each, int):
            return self.old.group_names[each]
        group = each.arguments[-1] if MOVERS[each.target].categories & Category.COLLECTIVE else None
        return self._group(group) if isinstance(group, FusedGroup) else group or ""

    def _group(self, group: FusedGroup) -> str:
        if group.name is not None:
            return group.name
        name = fused_name(group)
        self.groups[name] = Group(name, group.ranks, len(group.ranks), None)
        return name

    def _owners(self, inputs: Sequence[tuple[int, ...]]) -> array[int]:
        owners = array("i", range(len(self.order)))
        for row, each in enumerate(self.order):
            if isinstance(each, int):
                owners[row] = self.row_of[self.old.owners[each]]
            elif each.target in FOLLOWERS:
                owners[row] = owners[inputs[row][0]]
        return owners

    def _flags(self, phases: Sequence[int], users: Sequence[tuple[int, ...]], owners: Sequence[int]) -> array[int]:
        old = self.old
        flags = array("i", self._column(old.flags, self._new_flags))
        for rewrite in self.done:
            for was, now in rewrite.replaced:
                flags[self.row_of_name[now]] |= old.flags[old.index[was]] & _HANDED_ON
        touched = {row for row, each in enumerate(self.order) if isinstance(each, NewNode)}
        touched.update(self.row_of_name[rewrite.source] for rewrite in self.done)
        for row in sorted(touched):
            if phases[row] != Phase.BACKWARD and any(phases[user] == Phase.BACKWARD for user in users[row]):
                flags[row] |= Flag.FEEDS_BACKWARD
                flags[owners[row]] |= Flag.FEEDS_BACKWARD
        return flags

    def _new_flags(self, node: NewNode) -> int:
        return MOVERS[node.target].categories | (self.old.flags[self.old.index[node.like]] & _KEPT)


def fused_name(group: FusedGroup) -> str:
    """What facts call a group that is still to be made. It follows from the ranks."""
    return "fused_" + hashlib.sha256(",".join(map(str, group.ranks)).encode()).hexdigest()[:12]


def _followed(name: str, replacing: dict[str, str]) -> str:
    """A value that took another's place may have been replaced in turn."""
    while name in replacing:
        name = replacing[name]
    return name


def _nodes(value: Any) -> list[str]:
    if isinstance(value, Node):
        return [value.name]
    return [name for part in value for name in _nodes(part)] if isinstance(value, tuple) else []
