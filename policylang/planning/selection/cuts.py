"""``crosses cut per 2 GiB``: the forward cut into stages, each cut where the least is alive."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from math import sqrt

from policylang.graph.chains import Chains
from policylang.graph.facts import Facts, Flag
from policylang.operators.names import GETITEM

_NEVER = -1


class Cuts:
    """The stages of one graph.

    A *value* here is memory that the forward makes: views, ``wait_tensor`` and in-place results share that of the value
    that allocated it; each output of a multi-output operator is a value, made when the operator runs. Sizes are no
    values, nor is what depends on one parameter alone (a cast or gathered weight).

    A *cut* lies between two nodes of the forward, in graph order. A value is alive at it if it was made before and a
    forward node after it reads it, itself or through a view. While what is left of the forward makes more than ``size``
    bytes, the stage ends at the cut where the fewest bytes are alive, among those after it has made between ``size /
    2`` and ``size`` bytes; of several such at the latest. Where there is no cut in that range, because one node makes
    too much, the stage ends behind that node, before the next one that makes anything, where the fewest bytes are
    alive. ``auto`` is the square root of what the forward makes, both in GiB: as many stages as GiB in each,
    AutoParallel's ``ac_stage_size_in_GiB="auto"``. One pass over the nodes and edges, and one over the forward for each
    size that a policy asks for.
    """

    def __init__(self, facts: Facts, chains: Chains) -> None:
        self.facts = facts
        self._chains = chains
        self._known: dict[float, tuple[int, ...]] = {}

    @property
    def produced(self) -> int:
        """The bytes that the whole forward makes."""
        return self._produced[-1]

    def positions(self, size: float) -> tuple[int, ...]:
        """The cuts between stages of ``size`` bytes, each as the number of forward nodes before it."""
        if size not in self._known:
            self._known[size] = tuple(_cut(self._produced, self._alive, size))
        return self._known[size]

    def stage(self, size: float | None) -> float:
        """The bytes of a stage; ``auto`` is None."""
        return sqrt(self.produced * 2**30) if size is None else size

    def crossing(self, size: float | None) -> bytearray:
        """By node, 1 for the nodes whose decision saves a value that is alive at a cut.

        These are the nodes whose memory the value is and that share the decision of the node that allocated it, a
        ``wait_tensor`` for instance, and the producer of that decision. Mere views are excluded.
        """
        cuts, mask = self.positions(self.stage(size)), bytearray(len(self.facts))
        roots, owners = self.facts.storage_roots, self.facts.owners
        born, last = self._lifetimes
        for row in self.facts.forward if cuts else ():
            value = roots[row]
            is_value = owners[row] == owners[value] and born[value] != _NEVER
            if is_value and bisect_right(cuts, born[value]) < bisect_right(cuts, last[value]):
                mask[row] = mask[owners[row]] = 1
        return mask

    @cached_property
    def _lifetimes(self) -> tuple[array[int], array[int]]:
        """By node of a value, the places in the forward at which it is made and read last; -1 for what is no value."""
        facts, roots = self.facts, self.facts.storage_roots
        inputs, targets, flags = facts.inputs, facts.targets, facts.flags
        of_parameter = self._chains.from_parameter_mask
        born, last, place = (array("i", [_NEVER]) * len(facts) for _ in range(3))
        for at, row in enumerate(facts.forward):
            place[row] = at
            if roots[row] == row and not flags[row] & Flag.SYMBOLIC and not of_parameter[row]:
                born[row] = at
                if targets[row] == GETITEM:  # one of several results, which the operator made when it ran
                    whole = inputs[row][0]
                    born[row] = place[row] = place[whole]
                    born[whole] = _NEVER
            for source in inputs[row]:
                last[roots[source]] = at
        return born, last

    @cached_property
    def _made(self) -> list[tuple[int, int, int]]:
        """Each value's birth, last reader and bytes."""
        born, last = self._lifetimes
        return [(born[row], last[row], self.facts.bytes[row]) for row in self.facts.forward if born[row] != _NEVER]

    @cached_property
    def _produced(self) -> list[int]:
        """By cut, the bytes that the nodes before it make."""
        made = [0] * (len(self.facts.forward) + 1)
        for born, _, size in self._made:
            made[born + 1] += size
        return list(accumulate(made))

    @cached_property
    def _alive(self) -> list[int]:
        """By cut, the bytes alive at it."""
        change = [0] * (len(self.facts.forward) + 2)
        for born, last, size in self._made:
            if last > born:
                change[born + 1] += size
                change[last + 1] -= size
        return list(accumulate(change))


def _cut(produced: Sequence[int], alive: Sequence[int], size: float) -> list[int]:
    """The cuts, from what is produced before and alive at each place. Every place is looked at once."""
    cuts: list[int] = []
    start = 0
    while produced[-1] - produced[start] > size:
        done = produced[start]
        first = bisect_left(produced, done + size / 2, start + 1)
        most = max(done + size, produced[first])
        if most == produced[-1]:
            break  # nothing is made behind that node
        behind = bisect_right(produced, most, first)
        start = min(range(first, behind), key=lambda place: (alive[place], -place))
        cuts.append(start)
    return cuts
