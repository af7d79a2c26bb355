"""The blocks of its model that the nodes of a graph belong to, and the chains that nodes form."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from itertools import pairwise
from typing import Protocol

from attrs import frozen

from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase, forward_users, mask_of, members
from policylang.operators.layouts import SPLITS
from policylang.operators.names import CAT, GETITEM, is_all_gather

LEAST = 8
"""Nodes from one anchor to the next: what repeats in less is a loop within a layer."""
UNEVEN = 3
"""By how much one distance between anchors may be larger than another."""
ALIKE = 0.75
"""The least share of nodes that two adjacent layers have in common."""
MOST_TRIED = 4
"""Operators of each number of calls that are tried as anchors, and layers that the outermost ones are compared with."""
SLACK = 12
"""The most adjacent nodes that one layer may have and another not."""
AGAIN = 4
"""The adjacent nodes that must agree before two layers are in step after a difference."""
_SKIPS = [(skipped, both - skipped) for both in range(SLACK + 1) for skipped in range(both + 1)]
"""Numbers of nodes to skip in each of two layers, few first."""


def has_no_modules(facts: Facts) -> bool:
    """A forward or backward graph carries neither module paths nor activation-checkpoint regions."""
    halves = (GraphKind.FORWARD, GraphKind.BACKWARD)
    return facts.kind in halves and not any(facts.modules) and all(region is None for region in facts.ac_regions)


def repeated_stretches(facts: Facts) -> tuple[Sequence[int], int]:
    """Node to the number of its stretch in graph order, -1 outside all; and the number of stretches, 0 if nothing
    repeats. Near linear in nodes.

    A graph without module paths still has its layers: the same operators on the same shapes over the same groups. An
    operator called once per layer, an anchor, finds them: anchors are followed by nearly the same operators. Single
    nodes of some layers may differ. The outermost layers show where layers begin and end: the nodes before a forward's
    first layer, and after a backward's last one, differ from those between layers.
    """
    block_of = array("i", [-1]) * len(facts)
    rows = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    bounds = _stretches(facts, rows)
    for number, (start, end) in enumerate(bounds):
        for row in rows[start:end]:
            block_of[row] = number
    return block_of, len(bounds)


def _stretches(facts: Facts, rows: Sequence[int]) -> list[tuple[int, int]]:
    """The bounds of each stretch, as indices into ``rows``."""
    numbers: dict[object, int] = {}  # by operator, result and group
    kinds = ((facts.targets[row], facts.shapes[row], facts.dtypes[row], facts.group_names[row]) for row in rows)
    words = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    anchors = _anchors(facts, rows, words)
    if len(anchors) < 2:
        return []
    if facts.kind is not GraphKind.BACKWARD:
        return _bounded(words, anchors)
    # Read from its end, a backward looks as a forward does: the nodes after its last layer are unlike a layer.
    count = len(words)
    found = _bounded(words[::-1], [count - 1 - anchor for anchor in reversed(anchors)])
    return [(count - end, count - start) for start, end in reversed(found)]


def _anchors(facts: Facts, rows: Sequence[int], words: Sequence[int]) -> list[int]:
    """The places of an operator called once per layer. Products are preferred, since others (a last norm) may also be
    called outside the layers; then the operator with the most calls, then the first."""
    places: dict[int, list[int]] = {}
    for place, word in enumerate(words):
        places.setdefault(word, []).append(place)
    by_worth: dict[tuple[bool, int], list[list[int]]] = {}
    for found in places.values():
        gaps = [after - before for before, after in pairwise(found)]
        if gaps and min(gaps) >= LEAST and max(gaps) <= UNEVEN * min(gaps):
            by_worth.setdefault((facts.flops[rows[found[0]]] > 0, len(found)), []).append(found)
    for _, several in sorted(by_worth.items(), reverse=True):
        for found in several[:MOST_TRIED]:
            if 2 * (found[-1] - found[0]) * len(found) >= len(words) * (len(found) - 1) and _repeat(words, found):
                return found
    return []


def _repeat(words: Sequence[int], anchors: Sequence[int]) -> bool:
    """Much the same is done from each anchor to the next."""
    between = [Counter(words[start:end]) for start, end in pairwise(anchors)]
    shared = sum((one & other).total() for one, other in pairwise(between))
    whole = sum(max(one.total(), other.total()) for one, other in pairwise(between))
    return shared >= ALIKE * whole


def _bounded(words: Sequence[int], anchors: Sequence[int]) -> list[tuple[int, int]]:
    """From where to where each layer of a forward goes: all begin with what the first one begins with."""
    tried = range(1, min(len(anchors), MOST_TRIED + 1))
    # Compared with the layer that agrees with the first one for longest, backwards from its anchor.
    model = max(tried, key=lambda at: _in_step(words, anchors[0], anchors[at], -1, anchors[at] - anchors[at - 1] - 1))
    ahead = anchors[model] - anchors[model - 1] - 1
    ahead = _in_step(words, anchors[0], anchors[model], -1, ahead)[0]
    starts = [anchor - _in_step(words, anchor, anchors[model], -1, ahead)[1] for anchor in anchors]
    before = len(anchors) - 2 if len(anchors) < 3 else len(anchors) - 3
    behind = starts[before + 1] - anchors[before] - 1
    end = anchors[-1] + _in_step(words, anchors[-1], anchors[before], 1, behind)[1] + 1
    return list(pairwise([*starts, end]))


def _in_step(words: Sequence[int], here: int, there: int, step: int, most: int) -> tuple[int, int]:
    """How far the nodes before (step -1) or after two anchors are the same: those from ``there``, ``most`` at most, and
    those from ``here``. Nodes that only one of them has are skipped."""
    one = other = 0
    while one < most:
        for skipped, extra in _SKIPS:
            after, beyond = one + skipped + 1, other + extra + 1
            if after <= most and _agree(words, here + step * beyond, there + step * after, step, skipped + extra):
                one, other = after, beyond
                break
        else:
            break
    return one, other


def _agree(words: Sequence[int], here: int, there: int, step: int, passed: int) -> bool:
    """The nodes from two places on are the same: one node, or several after a skip."""
    for ahead in range(0, step * (AGAIN if passed else 1), step):
        one, other = here + ahead, there + ahead
        if min(one, other) < 0 or max(one, other) >= len(words) or words[one] != words[other]:
            return False
    return True


OUTSIDE = -1


class ModuleMatcher(Protocol):
    """A ``blocks`` glob."""

    def outermost(self, path: str) -> str | None:
        """The outermost module on the path that matches, itself a prefix of the path; None where none does."""
        ...


@frozen(eq=False)
class BlockTable:
    """Blocks are numbered from 0 in the order in which the graph reaches them; those of a backward alone as it leaves
    them, the last one first, which is the order of its forward."""

    block_of: Sequence[int]
    """Node to block number, -1 outside every block."""
    names: tuple[str, ...]
    """The module path of each block; ``region 3`` of checkpoints; without module paths ``repeated stretch 3``."""
    alone: int | None = None
    """The number of the block that the whole graph is, if each block is compiled as a graph."""


def blocks_of(facts: Facts, matcher: ModuleMatcher | None = None) -> BlockTable:
    """The blocks of a graph.

    With a matcher, each module that it matches is one. Without, each activation-checkpoint region if the graph has any,
    else the numbered children of the largest ``ModuleList``; a backward alone does not carry its regions. A node
    without a module path is in its producer's block. In a forward or backward graph that carries neither module paths
    nor regions, the stretches of operators that repeat are the blocks, whatever a matcher asks for."""
    if has_no_modules(facts):
        block_of, count = repeated_stretches(facts)
        return BlockTable(block_of, tuple(f"repeated stretch {number}" for number in range(count)))
    if matcher is not None:
        return _by_module(facts, matcher.outermost)
    if facts.kind is not GraphKind.BACKWARD and any(region is not None for region in facts.ac_regions):
        return _by_region(facts)
    prefix = _largest_list(facts)
    if prefix is None:
        return BlockTable(array("i", [OUTSIDE]) * len(facts), ())

    def numbered_child(path: str) -> str | None:
        *around, number = path.split(".")[: len(prefix) + 1]
        return ".".join((*around, number)) if tuple(around) == prefix and number.isdigit() else None

    return _by_module(facts, numbered_child)


def is_one_block(blocks: BlockTable, facts: Facts) -> bool:
    """The graph is one block and nothing else, as when each block is compiled alone."""
    return len(blocks.names) == 1 and all(blocks.block_of[facts.owners[row]] == 0 for row in facts.forward)


def _by_module(facts: Facts, block_name: Callable[[str], str | None]) -> BlockTable:
    numbers: dict[str, int] = {}
    block_of = array("i", [OUTSIDE]) * len(facts)
    modules, owners = facts.modules, facts.owners

    @cache
    def number_of(path: str) -> int:
        name = block_name(path) if path else None
        return OUTSIDE if name is None else numbers.setdefault(name, len(numbers))

    # Forward nodes first: a block is numbered by its first forward node.
    for rows in (facts.forward, range(len(facts))):
        for row in rows:
            block_of[row] = number_of(modules[row] or modules[owners[row]])
    names = tuple(numbers)
    if facts.kind is not GraphKind.BACKWARD:
        return BlockTable(block_of, names)
    order = dict.fromkeys(block for block in reversed(block_of) if block != OUTSIDE)  # from the end, by last node
    number = {block: at for at, block in enumerate(order)}
    renumbered = array("i", (number.get(block, OUTSIDE) for block in block_of))
    return BlockTable(renumbered, tuple(names[block] for block in order))


def _by_region(facts: Facts) -> BlockTable:
    numbers: dict[int, int] = {}
    block_of = array("i", [OUTSIDE]) * len(facts)
    regions, owners = facts.ac_regions, facts.owners
    for row in facts.forward:
        region = regions[owners[row]] if regions[row] is None else regions[row]
        if region is not None:
            block_of[row] = numbers.setdefault(region, len(numbers))
    return BlockTable(block_of, tuple(f"region {region}" for region in numbers))


def _largest_list(facts: Facts) -> tuple[str, ...] | None:
    """The path whose numbered children hold the most forward nodes; of a backward alone, the most nodes. The most
    nodes, not the most children: the experts of one layer may outnumber the layers. A list of two children or more is
    preferred to a list of one; of two lists with the same nodes, the outer one."""
    nodes: dict[tuple[str, ...], int] = {}
    children: dict[tuple[str, ...], set[str]] = {}
    rows = range(len(facts)) if facts.kind is GraphKind.BACKWARD else facts.forward
    for path, count in Counter(facts.modules[row] for row in rows).items():
        parts = path.split(".")
        for position, part in enumerate(parts):
            if part.isdigit():
                prefix = tuple(parts[:position])
                nodes[prefix] = nodes.get(prefix, 0) + count
                children.setdefault(prefix, set()).add(part)
    # dicts keep graph order and max takes the first of equals: no hash order reaches the answer
    return max(nodes, key=lambda prefix: (len(children[prefix]) > 1, nodes[prefix], -len(prefix)), default=None)


_NOWHERE = -1
_SYMBOLIC = Flag.SYMBOLIC


class Chains:
    """The straight lines of data flow of one graph: what ``chain after``, ``S chain after T``, ``per chain`` denote.

    From a node the line goes on to its only forward user, while that user reads no other node; backwards, to the only
    node it reads. Symbolic sizes are not counted among what a node reads: ``view(x, [s0, 8])`` with a dynamic ``s0`` is
    still on the line of ``x``. The fan-out with which FSDP undoes a shard of another dimension than the first,
    ``split → getitem* → cat``, is on the line too, its nodes one after the other.

    Every node has thus at most one next and one previous node, lines that meet stay together, and each walk may stop at
    the first node that has been visited: all answers for all nodes together cost one pass, when they are asked for."""

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


def directions(facts: Facts) -> Sequence[int]:
    """By node the number of its *direction*: 0 the first forward, then each backward and each further forward. A
    forward or backward graph has one. Forward nodes traced within a backward are a separate direction only if they
    multiply or communicate. Inputs and constants have direction 0, the output the last."""
    found = array("i", bytes(4 * len(facts)))
    if facts.kind not in (GraphKind.JOINT, GraphKind.FLAT):
        return found
    phases, ops = facts.phases, facts.ops
    starts, weighs = bytearray(len(facts)), False  # from a forward node, a product or a collective follows
    for row in range(len(facts) - 1, -1, -1):
        if phases[row] == Phase.BACKWARD:
            weighs = False
        elif phases[row] == Phase.FORWARD and ops[row] == "call_function":
            weighs = weighs or bool(facts.flops[row] or facts.flags[row] & Flag.COLLECTIVE)
            starts[row] = weighs
    direction, now = 0, int(Phase.FORWARD)
    for row, phase in enumerate(phases):
        if ops[row] == "call_function" and phase != now and (phase == Phase.BACKWARD or starts[row]):
            direction, now = direction + 1, phase
        if ops[row] in ("call_function", "output"):
            found[row] = direction
    return found
