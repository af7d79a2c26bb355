"""Small graphs that send things, in every order that their edges allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from policylang.graph.facts import Facts, Flag, GraphKind, Phase, Ref, Schedule, StepKind
from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.planning.order.dependencies import Dependencies
from policylang.planning.plan import OrderPlan
from policylang.simulation.node_times import NodeTimes
from tests.support.textgraph import GraphBuilder

SECOND = DeviceProfile("one byte a second", {}, Rate.constant(1.0), host_bandwidth=1.0)
GATHER, WAIT = "_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.wait_tensor.default"
COALESCED = "_c10d_functional.all_gather_into_tensor_coalesced.default"


def calls(facts: Facts) -> list[int]:
    return [row for row, op in enumerate(facts.ops) if op == "call_function"]


def collectives(facts: Facts) -> list[int]:
    return [row for row in calls(facts) if facts.flags[row] & Flag.COLLECTIVE]


def by_edges(facts: Facts) -> Dependencies:
    """What edges alone say."""
    return Dependencies([tuple(each for each in reads if facts.ops[each] == "call_function") for reads in facts.inputs])


def names_in_order(order: OrderPlan | None) -> list[str]:
    """The nodes in the order in which they run; a copy to the host or back is none."""
    return [order.facts.names[row] for kind, row, _ in order.schedule if kind <= StepKind.SECOND_RUN]


def in_order(facts: Facts, order: Sequence[int]) -> Schedule:
    return Schedule.of((0, row, int(facts.phases[row] == Phase.BACKWARD)) for row in order)


def every_order(facts: Facts) -> Iterator[list[int]]:
    """Every order of all calls that edges allow."""
    needs = by_edges(facts).before
    rows = calls(facts)

    def more(done: list[int]) -> Iterator[list[int]]:
        if len(done) == len(rows):
            yield [*done]
        for row in rows:
            if row not in done and all(each in done for each in needs[row]):
                yield from more([*done, row])

    return more([])


@st.composite
def sending(draw: st.DrawFn, most: int = 12) -> tuple[Facts, NodeTimes]:
    """A graph of computation, views, tuples, collectives of two groups and their waits, and what each call takes."""
    builder = GraphBuilder()
    kind = draw(st.sampled_from([GraphKind.FORWARD, GraphKind.BACKWARD]))
    backward = kind is GraphKind.BACKWARD
    builder.add("x", "parameter", (), bytes=4)
    builder.add("y", "tangent" if backward else "input", (), bytes=4)
    seconds = [0.0, 0.0]
    while len(builder.rows) < 2 + draw(st.integers(1, most)):
        last = len(builder.rows) - 1
        name, size = f"n{last}", draw(st.integers(0, 9))
        row = st.integers(0, last).filter(lambda row: builder.rows[row]["targets"] != COALESCED)
        reads = tuple(draw(st.lists(row, min_size=1, max_size=2, unique=True)))
        what = draw(st.sampled_from(["compute", "compute", "view", "send", "send", "tuple", "both"]))
        group = draw(st.sampled_from(["dp:4", "tp:2"]))
        length = float(draw(st.integers(1, 6)))
        if what == "compute":
            builder.add(name, "aten.sin.default", reads, bytes=size, backward=backward)
            seconds.append(length)
        elif what == "view":
            builder.add(name, "aten.view.default", reads[:1], flags=Flag.VIEW, bytes=size, backward=backward)
            seconds.append(0.0)
        elif what == "tuple":
            flags = Flag.MULTI_OUTPUT
            made = builder.add(name, "aten.split_copy", reads[:1], flags=flags, bytes=2 * size, backward=backward)
            for piece in range(2):
                builder.add(f"{name}_{piece}", "builtin.getitem", (made,), bytes=size, backward=backward)
            seconds += [length, 0.0, 0.0]
        elif what == "both":
            flags = Flag.COLLECTIVE | Flag.MULTI_OUTPUT
            arguments = (tuple(map(Ref, reads)), 4, group)
            made = builder.add(
                name, COALESCED, reads, flags=flags, group=group, bytes=2 * size, arguments=arguments, backward=backward
            )
            seconds.append(length)
            for piece in range(2):
                taken = builder.add(f"{name}_{piece}", "builtin.getitem", (made,), bytes=size, backward=backward)
                builder.add(f"{name}_w{piece}", WAIT, (taken,), bytes=size, backward=backward)
                seconds += [0.0, 0.0]
        else:
            arguments = (Ref(reads[0]), 4, group)
            sent = builder.add(
                name, GATHER, reads[:1], flags=Flag.COLLECTIVE, group=group, bytes=size, arguments=arguments,
                backward=backward,
            )  # fmt: skip
            seconds.append(length)
            if draw(st.integers(0, 9)):
                builder.add(f"{name}_w", WAIT, (sent,), bytes=size, backward=backward)
                seconds.append(0.0)
    whole = {row["inputs"][0] for row in builder.rows if row["targets"] == "builtin.getitem"}
    rows = [row for row in range(2, len(builder.rows)) if row not in whole]
    builder.add(
        "output", "output", tuple(draw(st.lists(st.sampled_from(rows), max_size=3, unique=True))) if rows else ()
    )
    return builder.facts(kind), NodeTimes(SECOND, [*seconds, 0.0], {}, {})
