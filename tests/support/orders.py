"""Orders of steps made by hand or drawn, what carries them out, how changed graphs run, and halves in another order."""

import heapq
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from attrs import evolve
from hypothesis import strategies as st
from torch import fx

import policylang
from policylang.backends import copies
from policylang.backends.joint import JointPartitioner
from policylang.backends.torch_compile.backend import PolicyBackend
from policylang.graph import marks
from policylang.graph.facts import Facts, Flag, GraphKind, Phase, Ref, Schedule, StepKind
from policylang.language.devices.profile import DeviceProfile, Network, Rate
from policylang.language.loader import parse_policy
from policylang.language.syntax import Policy
from policylang.operators.names import GETITEM, WAITS
from policylang.operators.work import is_communication, is_product, is_wait
from policylang.planning.capabilities import JOINT
from policylang.planning.graph_edit import Edit, Edits, FusedGroup, NewNode, Node, Proof, Refusal
from policylang.planning.order.dependencies import Dependencies
from policylang.planning.plan import OrderPlan, Plan, SchedulingOutcome
from policylang.planning.planner import plan
from policylang.simulation.node_times import NodeTimes, node_times
from policylang.torch_compat.graphs import random_state_operators
from tests.support.textgraph import GraphBuilder, facts_of

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
    returned = draw(st.lists(st.sampled_from(rows), max_size=3, unique=True)) if rows else ()
    builder.add("output", "output", tuple(returned))
    return builder.facts(kind), NodeTimes(SECOND, [*seconds, 0.0], {}, {})


KEEP = policylang.parse("undecided -> save")


def order_of(facts: Facts, rows: Sequence[int] | None = None) -> OrderPlan:
    """The order in which a graph runs some rows, which are all that it computes: its own, unless others are given."""
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    traced = Schedule.of((StepKind.FIRST_RUN, row, 0) for row in calls)
    chosen = Schedule.of((StepKind.FIRST_RUN, row, 0) for row in (calls if rows is None else rows))
    return OrderPlan(facts, traced, Edits(), facts, chosen, (), ())


def drawn_order(facts: Facts, seed: int) -> list[int]:
    """The rows that a graph computes in another order, in which each stands behind what it reads. What draws, writes or
    has an effect keeps its place among its like."""
    schedule = order_of(facts).schedule
    return [row for _, row, _ in drawn_schedule(facts, schedule, seed)]


def drawn_schedule(facts: Facts, schedule: Schedule, seed: int) -> Schedule:
    """The steps of a graph as it runs in another order. A copy to the host is awaited before the copy back starts, and
    that before its region reads the value."""
    steps = list(schedule)
    run = {row: at for at, (kind, row, _) in enumerate(steps) if kind <= StepKind.SECOND_RUN}
    copies = {step: at for at, step in enumerate(steps) if step[0] > StepKind.SECOND_RUN}
    before: list[set[int]] = []
    last = -1
    for at, (kind, row, region) in enumerate(steps):
        if kind == StepKind.COPY_TO_HOST:
            before.append({run[row]})
        elif kind == StepKind.WAIT_TO_HOST:
            before.append({copies[StepKind.COPY_TO_HOST, row, 0]})
        elif kind == StepKind.COPY_FROM_HOST:
            before.append({copies[StepKind.WAIT_TO_HOST, row, 0]})
        elif kind == StepKind.WAIT_FROM_HOST:
            before.append({copies[StepKind.COPY_FROM_HOST, row, region]})
        else:
            back = [copies.get((StepKind.WAIT_FROM_HOST, read, region)) for read in facts.inputs[row]]
            before.append({run[read] for read in facts.inputs[row] if read in run} | {each for each in back if each})
            has_turn = facts.flags[row] & (Flag.RANDOM | Flag.WRITES | Flag.EFFECTFUL)
            if has_turn and facts.targets[row] not in (GETITEM, *WAITS):
                before[-1] |= {last} - {-1}
                last = at
    return Schedule.of(steps[at] for at in drawn_places(before, random.Random(seed)))


def drawn_places(before: list[set[int]], numbers: random.Random) -> list[int]:
    """Any order that has each behind what has to come before it."""
    behind: list[list[int]] = [[] for _ in before]
    for at, needed in enumerate(before):
        for each in needed:
            behind[each].append(at)
    missing = [len(needed) for needed in before]
    ready = [(numbers.random(), at) for at, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, at = heapq.heappop(ready)
        order.append(at)
        for each in behind[at]:
            missing[each] -= 1
            if not missing[each]:
                heapq.heappush(ready, (numbers.random(), each))
    return order


def names_in(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "call_function"]


def drawing(seed: int) -> Callable[..., OrderPlan | None]:
    """A stand-in for what plans an order, which draws one for each half."""

    def plan_order(policy: Policy, facts: Facts, schedule: Schedule, *_: Any, **__: Any) -> OrderPlan | None:
        if not policy.orders or facts.kind is GraphKind.JOINT:
            return None
        order = order_of(facts, drawn_order(facts, seed))
        return evolve(order, outcomes=tuple(SchedulingOutcome(each, (), ()) for each in policy.scheduling))

    return plan_order


SLOW = DeviceProfile(
    "slow",
    compute={"float16": Rate.constant(1e6)},
    bandwidth=Rate.constant(1e9),
    networks=(Network(bandwidth=1e5, latency=1e-3),),
)
"""A product of 10,000 FLOP takes 10 ms, and a gather of 1,000 bytes among four 8.5 ms."""
POLICY = """blocks layers.*
bucket all_gather per block
prefetch all_gather 1 block ahead
overlap collective up to 4 KiB in flight
"""


def layers(count: int) -> str:
    """A forward in which each layer gathers two weights; the gathers stand where they are read."""
    lines = ["%x0 = input bytes=1000 shape=25x10 dtype=float16"]
    lines += [f"%{w}{n} = parameter bytes=250 shape=5x25 dtype=float16" for n in range(count) for w in "wv"]
    for n in range(count):
        for w, reads in (("w", f"x{n}"), ("v", f"h{n}")):
            out = f"h{n}" if w == "w" else f"x{n + 1}"
            lines += [
                f"%gather_{w}{n} = {GATHER}(%{w}{n}) layers.{n}.mlp collective group=dp:4 bytes=1000 "
                "shape=20x25 dtype=float16",
                f"%wait_{w}{n} = {WAIT}(%gather_{w}{n}) layers.{n}.mlp bytes=1000 shape=20x25 dtype=float16",
                f"%{out} = aten.mm.default(%{reads}, %wait_{w}{n}) layers.{n}.mlp bytes=1000 flops=10000 "
                "shape=25x10 dtype=float16",
            ]
    return "\n".join([*lines, f"output(%x{count})"])


def sharded(count: int) -> Facts:
    """The facts of such a graph with all that a bucket has to know of it."""
    facts = facts_of(layers(count))
    calls = zip(facts.targets, facts.inputs, facts.group_names, strict=True)
    given = {GATHER: lambda reads, group: (Ref(reads[0]), 4, group), WAIT: lambda reads, _: (Ref(reads[0]),)}
    return evolve(
        facts,
        arguments=[given[target](reads, group) if target in given else () for target, reads, group in calls],
        strides=[None if shape is None else (shape[1], 1) for shape in facts.shapes],
        numel=[prod(shape or ()) for shape in facts.shapes],
        devices=["cuda:0" if shape else "" for shape in facts.shapes],
    )


def bucketed(count: int) -> str:
    """The same with one gather a layer, in place of the first of its two."""
    text = layers(count)
    for n in range(count):
        gathered = f"layers.{n}.mlp collective group=dp:4 bytes="
        first, second = (f"%gather_{w}{n} = {GATHER}(%{w}{n}) {gathered}" for w in "wv")
        joined = f"%bucket{n} = {GATHER}(%w{n}, %v{n}) layers.{n}.mlp collective group=dp:4 bytes=2000"
        text = text.replace(first + "1000", joined)
        text = "\n".join(line for line in text.split("\n") if not line.startswith(second))
        text = text.replace(f"(%gather_w{n})", f"(%bucket{n})").replace(f"(%gather_v{n})", f"(%bucket{n})")
    return text


def ordered_plan(
    count: int = 3,
    policy: str = POLICY,
    device: DeviceProfile | None = SLOW,
    *,
    refused: Sequence[Refusal] = (),
    left: Mapping[str, str] | None = None,
    barriers: Mapping[str, int] | None = None,
) -> Plan:
    """Each layer's two gathers are one, which starts before the layer before it computes."""
    facts, after = facts_of(layers(count)), facts_of(bucketed(count))
    loaded = parse_policy(policy, name="mine.apl")
    assert loaded.policy is not None, loaded.diagnostics
    made = plan(evolve(loaded.policy, rewrites=(), scheduling=()), facts, JOINT, device=device)
    proof = Proof(ranks=4, shards=((2, 2), (2, 2)))
    arguments = (Node("w0"), 4, FusedGroup((0, 1, 2, 3), "dp:4"))
    edits = tuple(
        Edit(
            statement=0,
            kind="bucket",
            collectives=(f"gather_w{n}", f"gather_v{n}"),
            sources=(f"w{n}", f"v{n}"),
            before=f"gather_w{n}",
            nodes=(NewNode(f"bucket{n}", GATHER, arguments, (40, 25), (25, 1), "float16", "", "", "x0"),),
            replaced=((f"gather_w{n}", f"bucket{n}"), (f"gather_v{n}", f"bucket{n}")),
            dead=(f"gather_w{n}", f"gather_v{n}"),
            proof=proof,
        )
        for n in range(count)
    )
    buckets = tuple(f"bucket{n}" for n in range(count))
    moved = [buckets[0]]
    for name, op in zip(after.names, after.ops, strict=True):
        if op == "call_function" and name not in buckets:
            moved.append(name)
            if name.startswith("wait_w") and int(name[6:]) + 1 < count:
                moved.append(f"bucket{int(name[6:]) + 1}")
    outcomes = [
        SchedulingOutcome(loaded.policy.scheduling[0], buckets, buckets[1:], left or {}),
        SchedulingOutcome(loaded.policy.scheduling[1], buckets, ()),
    ][: len(loaded.policy.scheduling)]
    order = OrderPlan(
        traced=facts,
        traced_schedule=made.schedule,
        edits=Edits(edits, tuple(refused)),
        facts=after,
        schedule=schedule_of_names(after, moved),
        outcomes=tuple(outcomes),
        diagnostics=(),
        times=None if device is None else node_times(after, device),
        traced_times=None if device is None else node_times(facts, device),
        barriers=barriers or {},
        block_of=blocks_of(after),
        block_names=tuple(f"layers.{n}" for n in range(count)),
    )
    return evolve(made, policy=loaded.policy, order=order)


def schedule_of_names(facts: Facts, names: Sequence[str]) -> Schedule:
    return Schedule.of((int(StepKind.FIRST_RUN), facts.index[name], 0) for name in names)


def blocks_of(facts: Facts) -> list[int]:
    return [int(module.split(".")[1]) if module else -1 for module in facts.modules]


AHEAD = 2
"""Products."""

Reorder = Callable[[fx.Graph], None]


class HandOrdered(JointPartitioner):
    reorder: Reorder

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        halves = super().__call__(gm, joint_inputs, **options)
        for half in halves:
            type(self).reorder(half.graph)
            half.recompile()
        return halves


def in_hand_order(backend: PolicyBackend, reorder: Reorder | None = None) -> PolicyBackend:
    """A backend whose halves are reordered by hand, whatever its policy."""
    made = backend._partitioner
    kind = type("HandOrdered", (HandOrdered,), {"reorder": staticmethod(reorder or in_other_order)})
    backend._partitioner = kind(made.policy, made.deferred, made.root, made.aside)
    return backend


def at_random(seed: int) -> Reorder:
    """Any order in which what is read stands before what reads it, drawn for each half anew."""
    draw = random.Random(seed)

    def reorder(graph: fx.Graph) -> None:
        inner = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        at = {node: place for place, node in enumerate(inner)}
        before = [{at[source] for source in node.all_input_nodes if source in at} for node in inner]
        _lay_out(graph, [inner[place] for place in drawn_places(before, draw)])

    return reorder


def in_other_order(graph: fx.Graph) -> None:
    """Waits as late and collectives as early as readers, :data:`AHEAD` and the order of starts allow."""
    order = list(graph.nodes)
    for node in [each for each in order if is_communication(each) and is_wait(str(each.target))]:
        readers = [order.index(user) for user in node.users]
        order.remove(node)
        order.insert(min(readers) - 1, node)
    for node in [each for each in order if is_communication(each) and not is_wait(str(each.target))]:
        place = order.index(node)
        before = [at for at in range(place) if order[at].op in ("placeholder", "get_attr") or _holds(order[at], node)]
        products = [at for at in range(place) if is_product(order[at])]
        early = products[-AHEAD] if len(products) >= AHEAD else 0
        order.remove(node)
        order.insert(max(early, *(at + 1 for at in before), 0), node)
    _lay_out(graph, [node for node in order if node.op not in ("placeholder", "output")])


def _lay_out(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    last = graph.find_nodes(op="placeholder")[-1]
    for node in order:
        last.append(node)
        last = node
    graph.lint()


def _holds(other: fx.Node, node: fx.Node) -> bool:
    """Whether a node stays behind another: what it reads, and what starts before it."""
    return other in node.all_input_nodes or (is_communication(other) and not is_wait(str(other.target)))


Steps = list[tuple[StepKind, str, int]]
"""Kind, name and region; in a partition a random operator that runs twice goes by its operator."""


def flat_steps(graph: fx.Graph, facts: Facts) -> Steps:
    found: Steps = []
    region, inside = 0, False
    for kind, name, _ in _read(graph):
        if name not in facts.index:
            continue
        fetched = kind in (StepKind.COPY_FROM_HOST, StepKind.WAIT_FROM_HOST, StepKind.WIDEN)
        in_backward = facts.phases[facts.index[name]] == Phase.BACKWARD
        backward = in_backward or kind == StepKind.SECOND_RUN or fetched
        region += backward and not inside
        inside = backward
        found.append((kind, name, region if backward else 0))
    return found


def half_steps(graph: fx.Graph, facts: Facts, *, backward: bool) -> Steps:
    found: Steps = []
    for kind, name, node in _read(graph):
        if node.target in random_state_operators():
            at = 0 if node.target is random_state_operators()[0] else 1
            found.append((StepKind(int(backward)), str(node.args[at]), int(backward)))
        elif name in facts.index and not _is_of_torch(node):
            again = backward and kind == StepKind.FIRST_RUN and facts.phases[facts.index[name]] == Phase.FORWARD
            found.append((StepKind.SECOND_RUN if again else kind, name, int(backward)))
    return found


def planned_half(schedule: Schedule, facts: Facts, *, backward: bool) -> Steps:
    again = set(schedule.rows_of(StepKind.SECOND_RUN))
    found: Steps = []
    for kind, row, region in schedule:
        if (region > 0) == backward:
            replayed = row in again and facts.flags[row] & Flag.RANDOM and facts.owners[row] == row
            name = facts.targets[row] if replayed and kind <= StepKind.SECOND_RUN else facts.names[row]
            found.append((StepKind(kind), name, region))
    return found


def _read(graph: fx.Graph) -> Iterator[tuple[StepKind, str, fx.Node]]:
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        found = marks.custom(node.meta)
        if node.target is copies.OFFLOAD_OP:
            yield StepKind.COPY_TO_HOST, _moved(node), node
        elif node.target is copies.RELOAD_OP:
            yield StepKind.COPY_FROM_HOST, _moved(node), node
        elif node.target in _NARROWING:
            yield _NARROWING[node.target], _moved(node), node
        elif node.target is copies.WAIT_OP:
            ticket = node.args[0]
            assert isinstance(ticket, fx.Node)
            out = ticket.target is copies.OFFLOAD_OP
            yield StepKind.WAIT_TO_HOST if out else StepKind.WAIT_FROM_HOST, _moved(node), node
        elif marks.RECOMPUTED in found:
            yield StepKind.SECOND_RUN, str(found[marks.RECOMPUTED]), node
        else:
            yield StepKind.FIRST_RUN, node.name, node


_NARROWING = {copies.SCALES_OP: StepKind.SCALE, copies.NARROW_OP: StepKind.NARROW, copies.WIDEN_OP: StepKind.WIDEN}


def _moved(node: fx.Node) -> str:
    """The value that a copy moves; of a random operator that keeps its state, a node of its own has it."""
    return str(marks.custom(node.meta)[marks.MOVED]).removesuffix("_result")


def _is_of_torch(node: fx.Node) -> bool:
    """What torch takes of a random operator that keeps its state; it may be named like a node of the other half."""
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and source.target is random_state_operators()[0]
