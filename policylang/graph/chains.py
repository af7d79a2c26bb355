"""Chains, straight lines of data flow: what ``chain after``, ``S chain after T``, ``per chain`` and others denote.

From a node the line goes on to its only forward user, while that user reads no other node; backwards, to the only node
it reads. Symbolic sizes are not counted among what a node reads: ``view(x, [s0, 8])`` with a dynamic ``s0`` is still
on the line of ``x``. The fan-out with which FSDP undoes a shard of another dimension than the first,
``split → getitem* → cat``, is on the line too, its nodes one after the other.

Every node has thus at most one next and one previous node, lines that meet stay together, and each walk may stop at
the first node that has been visited: all answers for all nodes together cost one pass.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise

from policylang.graph.facts import Facts, Flag, InputKind, forward_users, mask_of, members
from policylang.operators.moves import SPLITS
from policylang.operators.names import CAT, GETITEM, is_all_gather

_NOWHERE = -1
_SYMBOLIC = Flag.SYMBOLIC


class Chains:
    """The lines of one graph. Nothing is computed before it is asked for."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def after(self, rows: Iterable[int]) -> list[int]:
        """The nodes that follow any of the nodes on its line, in graph order; a node itself if it follows another."""
        return self._walk(rows, self.next)

    def before(self, rows: Iterable[int]) -> list[int]:
        """The nodes that precede any of the nodes on its line, without the graph input, in graph order."""
        return self._walk(rows, self.previous)

    def after_marker(self, rows: Iterable[int], markers: Iterable[int]) -> list[int]:
        """``S chain after T``: of the line from each node (itself included), what follows the first marker on it."""
        first = self._first_marker(markers)
        return self.after({first[row]: None for row in rows if first[row] != _NOWHERE})

    def before_marker(self, rows: Iterable[int], markers: Iterable[int]) -> list[int]:
        """``S chain before T``: of the line from each node (itself included), what precedes the first marker on it."""
        first, following = self._first_marker(markers), self.next
        seen = bytearray(len(self.facts))
        for row in rows:
            if first[row] == _NOWHERE:
                continue
            while first[row] != row and not seen[row]:
                seen[row] = 1
                row = following[row]
        return members(seen, range(len(seen)))

    @cached_property
    def origins(self) -> array[int]:
        """Forward call to the graph input that is its only ancestor, through single-input nodes; -1 where there is no
        such input. The line's fan-out counts as a single-input node."""
        kinds, origins = self.facts.input_kinds, array("i", [_NOWHERE]) * len(self.facts)
        for row in self.facts.forward:
            source = self._source(row)
            if source != _NOWHERE:
                origins[row] = source if kinds[source] != InputKind.NOT_AN_INPUT else origins[source]
        return origins

    @cached_property
    def from_parameter_mask(self) -> bytearray:
        """The nodes whose only ancestors are one parameter, through single-input nodes, one byte each."""
        return self.made_of(InputKind.PARAMETER)

    def made_of(self, kind: InputKind) -> bytearray:
        """The nodes whose origin is an input of this kind, one byte each."""
        kinds = self.facts.input_kinds
        return bytearray(origin != _NOWHERE and kinds[origin] == kind for origin in self.origins)

    @cached_property
    def gathered_mask(self) -> bytearray:
        """The nodes with an origin that are all-gathers or descend from one, across forks too."""
        mask = bytearray(len(self.facts))
        for row in self.facts.forward:
            if self.origins[row] != _NOWHERE:
                mask[row] = mask[self._source(row)] or is_all_gather(self.facts.targets[row])
        return mask

    @cached_property
    def first(self) -> array[int]:
        """Node to the first on its line. A line ends where its last node has other readers, or its reader other inputs:
        each forward node is on one line. Of other nodes, themselves."""
        following = self.next
        first = array("i", range(len(self.facts)))
        for row in self.facts.forward:
            if following[row] != _NOWHERE:
                first[following[row]] = first[row]
        return first

    @cached_property
    def next(self) -> array[int]:
        """Node to the next on its line, -1 where the line ends."""
        facts = self.facts
        users, mask = facts.users, facts.forward_mask
        following = array("i", [_NOWHERE]) * len(facts)
        for row in facts.forward:
            readers = users[row] if len(users[row]) == 1 else forward_users(facts, row)
            if len(readers) == 1 and mask[readers[0]] and self._only_input(readers[0]) == row:
                following[row] = readers[0]
        for line in self._fan_outs:
            for here, there in pairwise(line):
                following[here] = there
        return following

    @cached_property
    def previous(self) -> array[int]:
        """Node to the one before it on its line, -1 where the line begins."""
        mask, preceding = self.facts.forward_mask, array("i", [_NOWHERE]) * len(self.facts)
        for row in self.facts.forward:
            only = self._only_input(row)
            if only != _NOWHERE and mask[only]:
                preceding[row] = only
        for line in self._fan_outs:
            for here, there in pairwise(line):
                preceding[there] = here
        return preceding

    @cached_property
    def _fan_outs(self) -> list[tuple[int, ...]]:
        """Each ``split, getitem…, cat`` whose pieces go nowhere else in the forward, in graph order."""
        facts = self.facts
        found = []
        for target in sorted(SPLITS):
            for split in facts.by_target.get(target, ()):
                pieces = forward_users(facts, split)
                joins = {user for piece in pieces for user in forward_users(facts, piece)}
                if len(joins) != 1 or any(facts.targets[piece] != GETITEM for piece in pieces):
                    continue
                (join,) = joins
                if facts.targets[join] == CAT and set(self._inputs(join)) == set(pieces):
                    found.append((split, *pieces, join))
        return found

    @cached_property
    def _joins(self) -> dict[int, int]:
        """The ``cat`` of a fan-out to its ``split``."""
        return {line[-1]: line[0] for line in self._fan_outs}

    def _inputs(self, row: int) -> list[int]:
        flags = self.facts.flags
        return [other for other in self.facts.inputs[row] if not flags[other] & _SYMBOLIC]

    def _source(self, row: int) -> int:
        """The node that a node is made of alone: of a fan-out's ``cat`` the ``split``."""
        return self._joins[row] if row in self._joins else self._only_input(row)

    def _only_input(self, row: int) -> int:
        inputs = self.facts.inputs[row]
        if len(inputs) == 1:  # the usual case, without a list
            return _NOWHERE if self.facts.flags[inputs[0]] & _SYMBOLIC else inputs[0]
        found = self._inputs(row)
        return found[0] if len(found) == 1 else _NOWHERE

    def _first_marker(self, markers: Iterable[int]) -> array[int]:
        """Node to the first marker on the line from it, itself included; -1 where there is none. Data flows along graph
        order, so a pass from the back has the answer for the next node before it is needed."""
        following = self.next
        first = array("i", [_NOWHERE]) * len(self.facts)
        marked = mask_of(markers, len(self.facts))
        for row in reversed(self.facts.forward):
            if marked[row]:
                first[row] = row
            elif following[row] != _NOWHERE:
                first[row] = first[following[row]]
        return first

    def _walk(self, rows: Iterable[int], step: Sequence[int]) -> list[int]:
        seen = bytearray(len(self.facts))
        for row in rows:
            row = step[row]
            while row != _NOWHERE and not seen[row]:
                seen[row] = 1
                row = step[row]
        return members(seen, range(len(seen)))
