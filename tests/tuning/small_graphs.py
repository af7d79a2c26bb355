"""Small graphs with everything that a choice of values can trip over, and what every choice on one comes to.

All choices are put through the planner and the schedule one by one: the oracle of the integer program.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from functools import cache
from itertools import chain, combinations
from random import Random

from policylang.api.load import parse
from policylang.graph.facts import Facts, Flag, GraphKind, Phase, StepKind, returns_memory_of_input
from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.language.syntax import Policy
from policylang.planning.capabilities import Capabilities
from policylang.planning.decisions.decide import Safety, Verdict, first_decisions, keep_routing, user_decisions
from policylang.planning.liveness import SavedForBackward, with_cost
from policylang.planning.plan import schedule_of
from policylang.simulation.node_times import NodeTimes
from tests.support.textgraph import GraphBuilder

DEVICE = DeviceProfile("by hand", {}, Rate.constant(1.0))
SAVE, RECOMPUTE = 0, 1


@cache
def either() -> Policy:
    return parse("optional save everything\noptional recompute everything")


def joint_graph(random: Random, *, dead_ends: bool = False) -> Facts:
    """``dead_ends``: some of the backward leads to nothing."""
    return _SmallJoint(random).build(dead_ends)


class _SmallJoint:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.builder = GraphBuilder()

    def build(self, dead_ends: bool) -> Facts:
        random, builder = self.random, self.builder
        for number in range(random.randint(1, 2)):
            builder.add(f"in_{number}", random.choice(["parameter", "input"]), ())
        builder.add("size", "input", (), flags=Flag.SYMBOLIC)
        gradients = [builder.add("tangent", "tangent", ())]
        parts = [self._plain, self._plain, self._view, self._flagged, self._pieces, self._fan_out, self._gather]
        for _ in range(random.randint(3, 6)):
            random.choice([*parts, self._plain, self._choice])()
        last, forward = len(builder.rows) - 1, self._readable()
        for number in range(random.randint(1, 4)):
            read = [random.choice(gradients), *(random.choice(forward) for _ in range(random.randint(1, 2)))]
            row = builder.add(f"grad_{number}", "aten.mul.Tensor", tuple(dict.fromkeys(read)), backward=True)
            gradients.append(row)
        returned = gradients[-1:] if dead_ends else gradients[1:]
        builder.add("output", "output", (last, *returned))
        return builder.facts(GraphKind.JOINT)

    def _readable(self) -> list[int]:
        """What another node may read: no tuple, of which it would read a piece."""
        rows = enumerate(self.builder.rows)
        whole = Flag.MULTI_OUTPUT
        return [
            row
            for row, node in rows
            if node["input_kinds"] != 4 and (not node["flags"] & whole or node["targets"] == "builtin.getitem")
        ]

    def _reads(self, most: int) -> tuple[int, ...]:
        rows = self._readable()
        count = self.random.randint(1, most)
        return tuple(dict.fromkeys(self.random.choice([*rows, *rows[-3:] * 2]) for _ in range(count)))

    def _add(self, target: str, inputs: tuple[int, ...], flags: int = 0, **more: str) -> int:
        tagged = self.random.random() < 0.06
        tag = self.random.choice(["PREFER_RECOMPUTE", "MUST_SAVE", "MUST_RECOMPUTE"])
        region = self.random.choice("01")
        size = self.random.choice([0, 1, 2, 4, 5, 7, 8, 16])
        tags = {"tag": tag, "region": region} if tagged else {}
        dtype = more.pop("dtype", "float32")
        name = f"n_{len(self.builder.rows)}"
        shape = "" if flags & Flag.MULTI_OUTPUT else "4"
        return self.builder.add(name, target, inputs, flags=flags, bytes=size, dtype=dtype, shape=shape, **tags, **more)

    def _plain(self) -> None:
        self._add("aten.mul.Tensor", self._reads(2))

    def _view(self) -> None:
        self._add("aten.view.default", self._reads(2), Flag.VIEW)

    def _flagged(self) -> None:
        flags = [Flag.RANDOM, Flag.READS_MUTATED, Flag.SYMBOLIC, Flag.SEED, Flag.VIEW | Flag.READS_MUTATED]
        self._add("aten.sin.default", self._reads(1), self.random.choice(flags))

    def _choice(self) -> None:
        chosen = self._add("aten.argmax.default", self._reads(1), dtype="int64")
        self._add("aten.gather.default", (chosen, *self._reads(1)))

    def _gather(self) -> None:
        gather = "_c10d_functional.all_gather_into_tensor.default"
        row = self._add(gather, self._reads(1), Flag.COLLECTIVE, group="dp:4")
        self._add("_c10d_functional.wait_tensor.default", (row,))

    def _pieces(self) -> None:
        row = self._add("aten.native_layer_norm.default", self._reads(1), Flag.MULTI_OUTPUT)
        for _ in range(self.random.randint(1, 3)):
            self._add("builtin.getitem", (row,), self.random.choice([0, 0, 0, Flag.SYMBOLIC]))

    def _fan_out(self) -> None:
        row = self._add("aten.split.Tensor", self._reads(1), Flag.MULTI_OUTPUT | Flag.VIEW)
        for _ in range(self.random.randint(1, 3)):
            self._add("builtin.getitem", (row,))


def random_times(facts: Facts, random: Random) -> NodeTimes:
    """Whole seconds, at times none; no time for what does nothing on a device."""
    seconds = array("d", bytes(8 * len(facts)))
    for row, op in enumerate(facts.ops):
        computes = op == "call_function" and facts.owners[row] == row and not facts.flags[row] & Flag.SYMBOLIC
        if computes and not returns_memory_of_input(facts, row):
            seconds[row] = random.choice([0, 1, 2, 3, 5, 8])
    return NodeTimes(DEVICE, seconds, {}, {})


def planned(
    facts: Facts, times: NodeTimes, capabilities: Capabilities, again: Collection[int]
) -> tuple[int, float, SavedForBackward]:
    """Bytes kept and seconds run again where these owners are to be recomputed and all others saved, as far as
    the planner lets them."""
    tagged = user_decisions(facts)
    winner = array("i", [-1]) * len(facts)
    for owner in _owners(facts):
        if owner not in tagged and not facts.flags[owner] & (Flag.SYMBOLIC | Flag.SEED):
            winner[owner] = RECOMPUTE if owner in again else SAVE
    decisions = first_decisions(either(), facts, Verdict((), winner), tagged, "save", capabilities)
    keep_routing(either(), facts, decisions)
    needs = Safety(either(), facts, capabilities, decisions).enforce()
    steps = schedule_of(facts, decisions)
    twice = (row for kind, row, _ in steps if kind == StepKind.SECOND_RUN and facts.phases[row] == Phase.FORWARD)
    return with_cost(needs, facts, (), 0).saved_bytes, sum(times.seconds[row] for row in twice), needs


def every_choice(facts: Facts, times: NodeTimes, capabilities: Capabilities) -> Iterator[tuple[int, float]]:
    """Bytes and seconds of every set of owners that may be recomputed."""
    owners = _owners(facts)
    for again in chain.from_iterable(combinations(owners, count) for count in range(len(owners) + 1)):
        saved, seconds, _ = planned(facts, times, capabilities, frozenset(again))
        yield saved, seconds


def _owners(facts: Facts) -> list[int]:
    return list(dict.fromkeys(facts.owners[row] for row in facts.forward))
