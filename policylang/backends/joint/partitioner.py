"""The exact partitioner of joint graphs: saves what the plan saves and the backward needs, and nothing else.

The order matters. The plan is made on the user's graph and everything wrong with it is raised before the graph is
touched; then equal nodes are merged, tags written, values chosen, and the graph is split by PyTorch's own extraction.
What came out is audited.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve, field, frozen
from torch import fx

from policylang.audit.joint import Audit, audit
from policylang.audit.offload import places, wrongly_moved
from policylang.backends.graph_registry import record
from policylang.backends.half.path import Half, rewrite_half, without_answered
from policylang.backends.joint import cse, finalize, refusals
from policylang.backends.joint.offload import move_across
from policylang.backends.joint.split import finish, split
from policylang.backends.runtime.garbage import collector_paused
from policylang.backends.runtime.groups import RankOrder
from policylang.backends.runtime.stages import timed
from policylang.backends.surgery import tags
from policylang.backends.surgery.edits import carry_out
from policylang.errors import PolicyAuditError, PolicyMatchError
from policylang.graph import marks
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.reading.collect import collect
from policylang.language.diagnostics import Diagnostic, Severity
from policylang.language.syntax import Policy
from policylang.planning.capabilities import JOINT
from policylang.planning.edits.graph_edit import Edits
from policylang.planning.expectations.deferred import settle_expectations
from policylang.planning.liveness import Needs, backward_needs
from policylang.planning.plan import Plan
from policylang.planning.planner import plan as make_plan
from policylang.ranks.accounts import Run
from policylang.ranks.comparison import agree_on_collectives, agree_on_plan, is_compared, ranks_of
from policylang.torch_compat import aot


@frozen(eq=False)
class Partition:
    """The two halves of a joint graph and how they came about."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    plan: Plan
    """As made on the user's graph, with every expectation settled."""
    audit: Audit
    seconds: dict[str, float] = field(factory=dict)
    """By stage, in the order they ran."""
    halves: tuple[Half, ...] = ()
    """What was rewritten in the halves once they were apart; empty where the policy rewrites nothing."""
    groups: tuple[RankOrder, ...] = ()
    """The process groups that were found or made for both."""

    @property
    def rewritten_halves(self) -> dict[str, Edits]:
        """By ``forward`` and ``backward``."""
        return {half.kind.value: half.plan.edits for half in self.halves}


@frozen
class JointPartitioner:
    """A ``partition_fn`` for AOTAutograd that follows a policy. Plain data, since Inductor's cache keys pickle it."""

    policy: Policy
    deferred: tuple[str, ...] = ()
    """Codes of planning errors that are not raised: they stay in ``Partition.plan.diagnostics`` for the caller."""
    root: str = ""
    """Put before every module path, where a block of the model is compiled on its own."""

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

    def partition(
        self,
        gm: fx.GraphModule,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
    ) -> Partition:
        """The same with everything that is known of how it came about."""
        seconds: dict[str, float] = {}
        static = static_lifetime_input_indices
        made = plan_joint(
            gm,
            self.policy,
            static,
            num_fwd_outputs=num_fwd_outputs,
            root=self.root,
            deferred=self.deferred,
            seconds=seconds,
        )
        with timed(seconds, "rewrite"):
            groups = carry_out(gm, made)
        return partition_planned(
            gm,
            made,
            num_fwd_outputs=num_fwd_outputs,
            static_inputs=static or (),
            root=self.root,
            seconds=seconds,
            groups=groups,
        )


def plan_joint(
    gm: fx.GraphModule,
    policy: Policy,
    static_inputs: Sequence[int] | None = None,
    *,
    num_fwd_outputs: int,
    root: str = "",
    deferred: Sequence[str] = (),
    seconds: dict[str, float] | None = None,
) -> Plan:
    """Plan a joint graph, without touching it. A graph that returns no gradient has no backward to plan for.

    Raises as :func:`plan_facts` does, and ``PolicyGraphError`` for a graph that is not a joint graph.
    """
    seconds = {} if seconds is None else seconds
    has_backward = any(isinstance(each, fx.Node) for each in finalize.returned(gm.graph)[num_fwd_outputs:])
    with timed(seconds, "collect"):
        kind = GraphKind.JOINT if has_backward else GraphKind.FORWARD
        facts = collect(gm, kind=kind, static_inputs=static_inputs, root=root)
    with timed(seconds, "plan"):
        return plan_facts(facts, policy, deferred=deferred)


def plan_facts(facts: Facts, policy: Policy, *, deferred: Sequence[str] = ()) -> Plan:
    """Plan for this path. Raises ``PolicyMatchError`` with every error whose code is not deferred, and
    ``PolicyDivergenceError`` where other ranks have another plan."""
    made = make_plan(policy, facts, JOINT, ranks=ranks_of(facts, policy, facts.kind.value))
    _raise_errors(_errors((*made.diagnostics, *refusals.unsaveable(made)), deferred))
    agree_on_plan(made, facts)
    return made


@collector_paused()
def partition_planned(
    gm: fx.GraphModule,
    plan: Plan,
    *,
    num_fwd_outputs: int,
    static_inputs: Sequence[int] = (),
    root: str = "",
    seconds: dict[str, float] | None = None,
    groups: Sequence[RankOrder] = (),
) -> Partition:
    """Split a joint graph after a plan whose rewrites are carried out and whose facts are the graph's. Changes ``gm``.

    A gather that is recomputed has fewer readers in the backward than it had in the joint graph, so each half is
    rewritten once more.

    Raises ``PolicyAuditError`` where the graphs that come out do not do what the plan says, and ``PolicyMatchError``
    where min-cut, left to decide a rest, finds none that a decided recomputation allows, or decides it so that an
    expectation fails.
    """
    seconds = {} if seconds is None else seconds
    with timed(seconds, "cse"):
        merged = cse.eliminate(gm.graph, plan) if aot.cse_enabled() else cse.NOTHING_MERGED
        merged_plan = finalize.moves(finalize.merge(plan, merged))
    with timed(seconds, "tag"):
        tags.write(gm.graph, merged_plan)
    with timed(seconds, "choose"):
        settled, needs = _choose(gm, merged_plan, num_fwd_outputs, static_inputs)
        plan, failures = settle_expectations(evolve(plan, diagnostics=settled.diagnostics), settled, needs)
        _raise_errors(failures)
    with timed(seconds, "split"):
        tags.record_saved(gm.graph, _saved_marks(settled.facts, needs))
        forward, backward = split(gm, settled, needs, num_fwd_outputs=num_fwd_outputs, static_inputs=static_inputs)
    with timed(seconds, "audit"):
        result = audit(settled, needs, forward.graph, backward.graph, num_fwd_outputs=num_fwd_outputs)
    _raise_differences(result.differences)
    crossing = places(settled.facts, needs.offloaded, forward.graph, backward.graph, after=num_fwd_outputs)
    halves: tuple[Half, ...] = ()
    if plan.policy.rewrites:
        with timed(seconds, "rewrite halves"):
            kinds = ((forward, GraphKind.FORWARD), (backward, GraphKind.BACKWARD))
            halves = tuple(rewrite_half(half, plan, kind, root=root) for half, kind in kinds)
        plan = evolve(plan, diagnostics=without_answered(plan.diagnostics, halves))
    with timed(seconds, "move"):
        move_across(settled.facts, crossing, forward.graph, backward.graph)
        _raise_differences(wrongly_moved(settled, crossing, forward.graph, backward.graph))
    with timed(seconds, "finish"):
        forward, backward = finish(forward, backward, num_fwd_outputs=num_fwd_outputs, static_inputs=static_inputs)
    if is_compared(plan.before):
        kinds = ((forward, GraphKind.FORWARD), (backward, GraphKind.BACKWARD))
        runs = [Run(kind.value, collect(half, kind=kind, root=root)) for half, kind in kinds]
        agree_on_collectives(plan, runs, aot.settings_lines("torch._functorch.config", aot.functorch_settings()))
    made = {*groups, *(group for half in halves for group in half.groups)}
    partition = Partition(forward, backward, plan, result, seconds, halves, tuple(sorted(made)))
    record(gm, partition)
    return partition


def _choose(gm: fx.GraphModule, plan: Plan, num_fwd_outputs: int, static_inputs: Sequence[int]) -> tuple[Plan, Needs]:
    """What is saved and recomputed; min-cut is asked only where it has something to decide."""
    gradients = finalize.gradient_rows(gm.graph, plan.facts, num_fwd_outputs)
    settled = finalize.fit(plan, gradients)
    needs = backward_needs(settled.facts, settled.decisions)
    if not needs.settled:
        chosen = _ask_min_cut(gm, plan, num_fwd_outputs, static_inputs)
        settled = finalize.moves(finalize.fit(plan, gradients, chosen))
        needs = backward_needs(settled.facts, settled.decisions)
    _raise_errors(refusals.unsafe_after_all(settled, needs, JOINT))
    return settled, needs


def _ask_min_cut(gm: fx.GraphModule, plan: Plan, num_fwd_outputs: int, static_inputs: Sequence[int]) -> list[int]:
    """The rows that PyTorch's min-cut would save, with the decided values as its fixed points."""
    index = plan.facts.index
    with tags.lent_to_min_cut(gm.graph, plan):
        try:
            saved = aot.min_cut_saved_values(gm, num_fwd_outputs=num_fwd_outputs, static_inputs=static_inputs)
        except RuntimeError as error:
            raise PolicyMatchError([refusals.no_partition(plan, error)]) from error
    return [index[node.name] for node in saved or () if node.name in index]


def _saved_marks(facts: Facts, needs: Needs) -> dict[str, bool | str]:
    """The names of the saved values and of the multi-output operators they are pieces of, with what is recorded there.

    Min-cut may save one piece of a tuple and recompute another; a decision on the operator cannot repeat that.
    """
    recomputed = frozenset(needs.recomputed)
    marked: dict[str, bool | str] = {}
    for row in (*needs.saved, *needs.offloaded):
        owner = facts.owners[row]
        whole = owner == row or owner not in recomputed
        marked[facts.names[owner]] = True if whole else marks.PARTLY
        marked[facts.names[row]] = True
    return marked


def _raise_differences(found: Sequence[Diagnostic]) -> None:
    if found:
        raise PolicyAuditError(tuple(found))


def _errors(diagnostics: Sequence[Diagnostic], deferred: Sequence[str] = ()) -> list[Diagnostic]:
    return [found for found in diagnostics if found.severity is Severity.ERROR and found.code not in deferred]


def _raise_errors(diagnostics: Sequence[Diagnostic]) -> None:
    errors = _errors(diagnostics)
    if errors:
        raise PolicyMatchError(errors)
