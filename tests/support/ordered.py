"""Plans with an order that is made by hand: what reports say of one does not depend on who planned it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from attrs import evolve

from policylang.graph.facts import Facts, Ref, Schedule, StepKind
from policylang.language.devices.profile import DeviceProfile, Network, Rate
from policylang.language.loader import parse_policy
from policylang.planning.capabilities import JOINT
from policylang.planning.graph_edit import Edit, Edits, FusedGroup, NewNode, Node, Proof, Refusal
from policylang.planning.plan import OrderPlan, Plan, SchedulingOutcome
from policylang.planning.planner import plan
from policylang.simulation.node_times import node_times
from tests.support.textgraph import facts_of

GATHER, WAIT = "_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.wait_tensor.default"
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
        first, second = (
            f"%gather_{w}{n} = {GATHER}(%{w}{n}) layers.{n}.mlp collective group=dp:4 bytes=" for w in "wv"
        )
        joined = f"%bucket{n} = {GATHER}(%w{n}, %v{n}) layers.{n}.mlp collective group=dp:4 bytes=2000"
        text = text.replace(first + "1000", joined)
        text = "\n".join(line for line in text.split("\n") if not line.startswith(second))
        text = text.replace(f"(%gather_w{n})", f"(%bucket{n})").replace(f"(%gather_v{n})", f"(%bucket{n})")
    return text


def node_like(name: str) -> NewNode:
    return NewNode(
        name, GATHER, (Node("w0"), 4, FusedGroup((0, 1, 2, 3), "dp:4")), (40, 25), (25, 1), "float16", "", "", "x0"
    )


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
    edits = tuple(
        Edit(
            statement=0,
            kind="bucket",
            collectives=(f"gather_w{n}", f"gather_v{n}"),
            sources=(f"w{n}", f"v{n}"),
            before=f"gather_w{n}",
            nodes=(node_like(f"bucket{n}"),),
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
