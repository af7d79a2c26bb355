"""The nodes of one collective in place of several: what they are given put side by side, and cut apart again.

===============  =====================================================================================================
all-gather       shards flattened, one after the other: the gather brings ``[ranks, all]``, of which each member's
                 columns are its shards. They are copied out, since they do not lie side by side.
reduce-scatter   each ``[ranks, piece]``, side by side: every rank is given the sums of its own row. Each member's are a
                 part of it.
all-reduce       flattened, one after the other, and cut apart where they begin.
===============  =====================================================================================================

What crosses the wire is what crossed it before. A member's value has the strides that it had; where it is a view of the
bucket's memory, it begins where an allocation might (kernels load sixteen bytes at a time), and it is not returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from policylang.graph.facts import Facts
from policylang.operators.layouts import contiguous, viewed
from policylang.operators.names import ALL_REDUCE, CAT, CLONE, GATHER, SCATTER, SLICE, VIEW, WAIT
from policylang.planning.edits.bucketing.bucket_members import Member
from policylang.planning.edits.collectives.aliasing import ReplacedMemory
from policylang.planning.edits.collectives.consumers import relaid
from policylang.planning.edits.edit_planner import NewNodes
from policylang.planning.graph_edit import FusedGroup, Node

ALIGNED = 16
"""Bytes: what Inductor takes for granted of memory that a graph allocates."""


def merge(
    facts: Facts, members: Sequence[Member], group: FusedGroup, new: NewNodes, memory: ReplacedMemory
) -> tuple[dict[int, str], list[tuple[int, tuple[int, ...]]]]:
    """Make the new nodes. Each member's wait to what is read in its place, and the rows behind it that are laid out
    anew because of that, with their strides."""
    first = members[0]
    ranks, total = first.ranks, sum(member.piece for member in members)
    target, rows = first.alike.target, ranks if first.alike.target == SCATTER else 0
    flat = [_flattened(facts, member, (rows, member.piece) if rows else (member.piece,), new) for member in members]
    shape = (rows, total) if rows else (total,)
    joined = new.add(CAT, (tuple(flat), 1) if rows else (tuple(flat),), shape, contiguous(shape), first.row)
    if target == GATHER:
        shape = (ranks * total,)
        arguments: tuple[Any, ...] = (joined, ranks, group)
    elif target == SCATTER:
        shape, arguments = (1, total), (joined, first.alike.reduction, ranks, group)
    else:
        assert target == ALL_REDUCE
        arguments = (joined, first.alike.reduction, group)
    started = new.add(target, arguments, shape, contiguous(shape), first.row)
    whole = new.add(WAIT, (started,), shape, contiguous(shape), first.row)
    if target != ALL_REDUCE:
        shape = (ranks, total) if target == GATHER else (total,)
        whole = new.add(VIEW, (whole, shape), shape, contiguous(shape), first.row)
    cutter = _Cutter(facts, whole, shape, new, memory)
    replaced = {member.wait: cutter.cut(member) for member in members}
    return replaced, cutter.restrided


class _Cutter:
    """Cuts what a bucket's collective gives, from the left to the right."""

    def __init__(
        self, facts: Facts, whole: Node, shape: tuple[int, ...], new: NewNodes, memory: ReplacedMemory
    ) -> None:
        self.facts = facts
        self.whole = whole
        self.shape = shape
        self.new = new
        self.memory = memory
        self.at = 0
        self.restrided: list[tuple[int, tuple[int, ...]]] = []

    def cut(self, member: Member) -> str:
        new, dim, start = self.new, len(self.shape) - 1, self.at
        self.at += member.piece
        shape, stride = (*self.shape[:-1], member.piece), contiguous(self.shape)
        arguments = (self.whole, dim, start, self.at)
        part = new.add(SLICE, arguments, shape, stride, member.wait if shape == member.gives else member.row)
        lies = viewed(shape, stride, member.gives)
        # Of lengths of 1 in memory with gaps, torch does not work out the strides of a view in one way alone.
        plain = stride == contiguous(shape) or 1 not in (*shape, *member.gives)
        if lies is None or not plain or not self._may_share(member, start, lies):
            stride = contiguous(shape)
            like = member.wait if shape == member.gives else member.row
            part = new.add(CLONE, (part, "contiguous_format"), shape, stride, like)
            lies = contiguous(member.gives)
        if shape != member.gives:
            part = new.add(VIEW, (part, member.gives), member.gives, lies, member.wait)
        return part.name

    def _may_share(self, member: Member, start: int, lies: tuple[int, ...]) -> bool:
        """Whether a member's value may be a view of the bucket's memory."""
        facts, wait = self.facts, member.wait
        item = facts.bytes[wait] // facts.numel[wait]
        rows = self.shape[-1] if prod(self.shape[:-1]) > 1 else 0
        if start * item % ALIGNED or rows * item % ALIGNED or self.memory.is_returned(wait):
            return False
        behind = relaid(facts, wait, lies)
        if isinstance(behind, int):
            return False
        self.restrided += behind
        return True


def _flattened(facts: Facts, member: Member, shape: tuple[int, ...], new: NewNodes) -> Node:
    node = Node(facts.names[member.source])
    return node if shape == member.given else new.add(VIEW, (node, shape), shape, contiguous(shape), member.row)
