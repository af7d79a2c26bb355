"""The joint path: tags a joint graph (forward and backward before partitioning) and splits it as the plan says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

from attrs import frozen
from torch import fx

from policylang.backends import refusals
from policylang.backends.half.path import Half, rewrite_inference
from policylang.backends.joint import finalize
from policylang.backends.joint.partitioner import Partition, partition_planned
from policylang.backends.path import BackendPath
from policylang.backends.runtime.groups import RankOrder
from policylang.backends.runtime.stages import timed
from policylang.backends.surgery import tags
from policylang.backends.surgery.edits import carry_out
from policylang.graph.collect import collect
from policylang.graph.facts import GraphKind
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Policy
from policylang.planning.decisions.weights_aside import WeightsAside
from policylang.planning.plan import Plan


class JointPath(BackendPath):
    """``apply`` prepares a graph. What it saves is audited once :func:`partition_planned` has split it."""

    name: ClassVar[str] = "joint"
    front: ClassVar[str] = "policylang.backends.torch_compile.subjects:of_compiled"

    def refusals(self, plan: Plan) -> Sequence[Diagnostic]:
        return refusals.unsaveable(plan)

    def carry_out(self, gm: fx.GraphModule, plan: Plan, seconds: dict[str, float]) -> None:
        super().carry_out(gm, plan, seconds)
        with timed(seconds, "tag"):
            tags.write(gm.graph, plan)

    def put_in_order(self, gm: fx.GraphModule, plan: Plan, seconds: dict[str, float]) -> None:
        """Nothing: each half is put in order once it is cut."""


def returns_gradients(gm: fx.GraphModule, num_fwd_outputs: int) -> bool:
    return any(isinstance(each, fx.Node) for each in finalize.returned(gm.graph)[num_fwd_outputs:])


Done = Partition | Half
_partitioned: ContextVar[list[Done] | None] = ContextVar("policylang_partitioned", default=None)


@contextmanager
def partitions() -> Iterator[list[Done]]:
    """Collects what partitioners do meanwhile, and the graphs without gradients that are rewritten.

    They are called from deep inside torch, and a list on the partitioner would be part of the caches' key. What an
    inner collection gets, the outer one gets too.
    """
    outer = _partitioned.get()
    collected: list[Done] = []
    token = _partitioned.set(collected)
    try:
        yield collected
    finally:
        _partitioned.reset(token)
        if outer is not None:
            outer.extend(collected)


@frozen
class JointPartitioner:
    """A ``partition_fn`` for AOTAutograd that follows a policy. Plain data, since Inductor's cache keys pickle it."""

    policy: Policy
    deferred: tuple[str, ...] = ()
    """Codes of planning errors that are not raised: they stay in ``Partition.plan.diagnostics`` for the caller."""
    root: str = ""
    """Put before every module path, where a block of the model is compiled on its own."""
    aside: WeightsAside | None = None
    """The weights that FSDP gathers around the graph."""

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **options: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split ``gm``. ``options`` (such as Inductor's ``compiler``) do not bear on a plan and are accepted.

        Raises ``PolicyMatchError`` before the graph is touched, ``PolicyAuditError`` after.
        """
        partition = self.partition(
            gm, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static_lifetime_input_indices
        )
        return partition.forward, partition.backward

    def plan(
        self,
        gm: fx.GraphModule,
        *,
        num_fwd_outputs: int,
        static_inputs: Sequence[int] | None = None,
        seconds: dict[str, float] | None = None,
    ) -> Plan:
        """Plan a joint graph, without touching it. A graph that returns no gradient has no backward to plan for.

        Raises as :meth:`JointPath.plan` does, and ``PolicyGraphError`` for a graph that is not a joint graph.
        """
        seconds = {} if seconds is None else seconds
        kind = GraphKind.JOINT if returns_gradients(gm, num_fwd_outputs) else GraphKind.FORWARD
        with timed(seconds, "collect"):
            facts = collect(gm, kind=kind, static_inputs=static_inputs, root=self.root)
        with timed(seconds, "plan"):
            return JointPath().plan(facts, self.policy, aside=self.aside, deferred=self.deferred)

    def partition(
        self,
        gm: fx.GraphModule,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        prepared: Plan | None = None,
    ) -> Partition:
        """The same with everything that is known of how it came about. ``prepared``: the plan of a graph on which its
        edits are carried out."""
        static, seconds = static_lifetime_input_indices, dict[str, float]()
        groups: tuple[RankOrder, ...] = ()
        if prepared is None:
            prepared = self.plan(gm, num_fwd_outputs=num_fwd_outputs, static_inputs=static, seconds=seconds)
            with timed(seconds, "rewrite"):
                groups = carry_out(gm, prepared)
        done = partition_planned(
            gm,
            prepared,
            num_fwd_outputs=num_fwd_outputs,
            static_inputs=static or (),
            root=self.root,
            seconds=seconds,
            groups=groups,
        )
        _collect(done)
        return done

    def rewrite_inference(self, gm: fx.GraphModule) -> None:
        """Carry out on a graph without gradients what holds there, which no partitioner is asked for."""
        _collect(rewrite_inference(gm, self.policy, root=self.root))


def _collect(done: Done) -> None:
    collected = _partitioned.get()
    if collected is not None:
        collected.append(done)
