"""The joint path: tags a joint graph of forward and backward, splits it exactly as planned, and audits the result.

The order matters. The plan was made on the user's graph, and all its errors raised before the graph was changed; now
equal nodes are merged, tags written, values chosen, and PyTorch's extraction splits the graph. It saves what the plan
saves and the backward needs, and nothing else.

An offloaded value crosses from the forward to the backward like a saved one, under its name, until both graphs exist.
Then the copy on the host replaces it, as the same output and the same input, so AOTAutograd's order stays. A schedule
gives when copies start and are awaited: the plan's, or that of the forward and the backward graph if collectives were
reordered. The ``half`` path rewrites one graph of a partition whose saved values are decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, ClassVar

from attrs import evolve, field, frozen
from torch import fx
from torch.utils import _pytree as pytree

from policylang.audit.graphs import audit, audit_copies, read_halves
from policylang.audit.order import audit_order
from policylang.audit.outcome import Audit
from policylang.backends import copies, finalize, refusals
from policylang.backends.applied_plans import AppliedPlan, announce, remember, without_gradients
from policylang.backends.path import BackendPath, raise_differences, raise_errors
from policylang.backends.rewriting import apply_edits, arrange, put_in_order
from policylang.backends.runtime import RankOrder, timed
from policylang.errors import PolicyMatchError
from policylang.graph import marks
from policylang.graph.blocks import Chains
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase, Schedule, ScheduleStep, StepKind
from policylang.language.cancellation import collector_paused
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.syntax import Chunk, Expectation, ExpectTotal, Policy, Statement
from policylang.operators.calls import function, piece_of_draw, unread
from policylang.operators.names import RUNS_WITH_RANDOM_STATE, SAVES_RANDOM_STATE
from policylang.planning.capabilities import HALF, JOINT
from policylang.planning.decisions.rule_warnings import FsdpParameters
from policylang.planning.expectations import check_deferred
from policylang.planning.graph_edit import Edits
from policylang.planning.liveness import SavedForBackward, backward_needs
from policylang.planning.plan import Plan
from policylang.planning.planner import plan as make_plan
from policylang.planning.refusals import REWRITES_REFUSED
from policylang.planning.schedule import with_host_copies
from policylang.ranks.comparison import agree_on_collectives, is_compared, ranks_of
from policylang.ranks.rank_account import GraphRun
from policylang.torch_compat import graphs
from policylang.torch_compat.compilers import settings_lines
from policylang.torch_compat.graphs import cse_enabled, functorch_settings, min_cut_saved_values

ONLY_REWRITES = "APL329"
NOTHING_LEFT = refusals.Problem(
    "APL419",
    "`{line}` selects `{matched}` in the joint graph, and nothing in the forward or backward graph",
    "the collectives do not run under this policy; make the line `optional`, or remove it",
)
_BY_ORDER = ("exposed", "step time", "peak")


@frozen(eq=False)
class RewrittenGraph:
    """A forward or backward graph after a policy rewrote it."""

    kind: GraphKind
    plan: Plan
    groups: tuple[RankOrder, ...]
    """The process groups that were found or made for it."""

    @property
    def edits(self) -> Edits:
        """All that was rewritten, buckets included."""
        order = self.plan.order
        return self.plan.edits if order is None else self.plan.edits.followed_by(order.edits)

    @property
    def applied(self) -> AppliedPlan:
        """The applied plan of a graph without gradients."""
        return AppliedPlan("half", self.plan, without_backward=True)


class HalfPath(BackendPath):
    name: ClassVar[str] = "half"

    def check(self, gm: fx.GraphModule, policy: Policy, facts: Facts) -> None:
        if not (policy.rewrites or policy.orders):
            raise refusals.NO_PATH.error(kind=facts.kind.value)

    def part_of(self, policy: Policy) -> Policy:
        """Without the lines that decide about values."""
        blocks = policy.blocks if policy.orders else None
        return evolve(
            policy, blocks=blocks, rules=(), undecided=None, prefetch_offloaded=None, expectations=_of_order(policy)
        )

    def notes(self, policy: Policy, kind: GraphKind) -> tuple[Diagnostic, ...]:
        idle = (each for each in policy.expectations if each not in _of_order(policy))
        why = f"a {kind.value} graph of a partition has its saved values decided already"
        help = "apply the policy to the joint graph; here only lines that rewrite or order collectives are "
        return _note_on_idle((*policy.rules, *idle), "decide", why, f"{help}applied")


def _of_order(policy: Policy) -> tuple[Expectation, ...]:
    """The expectations about figures that the order of one graph decides."""
    kept = (each for each in policy.expectations if isinstance(each, ExpectTotal) and each.figure in _BY_ORDER)
    return tuple(kept) if policy.orders else ()


def rewrite_graph(gm: fx.GraphModule, joint: Plan, kind: GraphKind, *, root: str = "") -> RewrittenGraph:
    """Apply the ``fuse``, ``collapse``, ``bucket`` and scheduling lines of a joint graph's plan to its forward or
    backward graph, in place; the ranks that share it agree on these rewrites too. Raises ``PolicyMatchError`` where
    lines and graph do not fit; the graph is then as it was."""
    policy = joint.policy
    # these graphs follow from the joint graph: there the ranks have agreed, and the lines were checked
    rewrites = tuple(evolve(each, optional=True) for each in policy.rewrites if not isinstance(each, Chunk))
    scheduling = tuple(evolve(each, optional=True) for each in policy.scheduling)
    lenient = evolve(policy, rewrites=rewrites, scheduling=scheduling, expectations=())
    ranks = ranks_of(joint.before, policy, kind.value)
    facts = _with_inputs(collect(gm, kind=kind, root=root), joint.facts)
    made = make_plan(HalfPath().part_of(lenient), facts, HALF, ranks=ranks)
    raise_errors(made.diagnostics)
    groups = apply_edits(gm, made)
    if made.order is not None:
        groups = (*groups, *put_in_order(gm, policy, made.order))
    return RewrittenGraph(kind, made, groups)


def rewrite_inference(gm: fx.GraphModule, policy: Policy, *, root: str = "") -> RewrittenGraph:
    """Apply a policy's ``fuse`` and ``collapse`` lines to a graph without gradients, in place. Raises
    ``PolicyMatchError`` where a line and the graph do not fit, and ``PolicyDivergenceError`` where other ranks have
    another plan; the graph is then as it was."""
    facts = collect(gm, kind=GraphKind.FORWARD, root=root)
    made = HalfPath().plan(facts, without_gradients(policy))
    groups = apply_edits(gm, made)
    agree_on_halves(made, {"graph": (gm, GraphKind.FORWARD)}, root)
    idle = (*policy.rules, *policy.expectations, *policy.buckets, *policy.scheduling)
    why = "no gradient is computed through this graph, and it runs in the order of the trace"
    made = evolve(made, diagnostics=made.diagnostics + _note_on_idle(idle, "say", why))
    done = RewrittenGraph(GraphKind.FORWARD, made, groups)
    remember(done.applied, gm)
    announce(done.applied)
    return done


def agree_on_halves(plan: Plan, graphs: Mapping[str, tuple[fx.GraphModule, GraphKind]], root: str) -> None:
    """Raise ``PolicyDivergenceError`` unless the ranks that share these graphs run the same collectives in them."""
    if is_compared(plan.before):
        runs = [GraphRun(name, collect(gm, kind=kind, root=root)) for name, (gm, kind) in graphs.items()]
        agree_on_collectives(plan, runs, settings_lines("torch._functorch.config", functorch_settings()))


def _with_inputs(facts: Facts, joint: Facts) -> Facts:
    """The facts with what the joint graph has about the inputs. A value that was made of one parameter alone, and
    crosses to the backward, counts as that parameter there: ``where from parameter`` holds for both graphs alike."""
    origins, index = Chains(joint).origins, joint.index
    kinds, names = list(facts.input_kinds), list(facts.input_names)
    for row, (name, op) in enumerate(zip(facts.names, facts.ops, strict=True)):
        source = index.get(name, -1) if op == "placeholder" else -1
        if source >= 0 and joint.ops[source] == "call_function":
            origin = origins[source]
            source = origin if origin >= 0 and joint.input_kinds[origin] == InputKind.PARAMETER else -1
        if source >= 0 and kinds[row] != InputKind.TANGENT:
            kinds[row], names[row] = joint.input_kinds[source], joint.input_names[source]
    return evolve(facts, input_kinds=kinds, input_names=names)


def unanswered(joint: Plan, rewritten: Sequence[RewrittenGraph]) -> tuple[Diagnostic, ...]:
    """Errors for the lines about the order of collectives that match in the joint graph, and not after the split."""
    found = []
    for number, statement in enumerate(joint.policy.scheduling):
        matched = [each.plan.order.outcomes[number].matched for each in rewritten if each.plan.order is not None]
        before = () if joint.order is None else joint.order.outcomes[number].matched
        if before and not any(matched) and not statement.optional:
            line, span = statement.span.one_line, statement.span
            found.append(NOTHING_LEFT.diagnostic(span=span, line=line, matched=before[0]))
    return tuple(found)


def without_answered(diagnostics: Sequence[Diagnostic], rewritten: Sequence[RewrittenGraph]) -> tuple[Diagnostic, ...]:
    """The diagnostics without the warnings that a line changed nothing, where it did after the split."""
    done = {each.plan.policy.rewrites[edit.statement].span for each in rewritten for edit in each.edits.done}
    return tuple(found for found in diagnostics if found.code != REWRITES_REFUSED or found.span not in done)


def _note_on_idle(lines: Sequence[Statement], verb: str, why: str, help: str | None = None) -> tuple[Diagnostic, ...]:
    """A note on the lines that do nothing on a graph."""
    if not lines:
        return ()
    said = f"{len(lines)} lines {verb}" if len(lines) > 1 else f"1 line {verb}s"
    return (diagnose(ONLY_REWRITES, f"{said} nothing here: {why}", lines[0].span, help=help),)


_IN_BACKWARD = Flag.FEEDS_BACKWARD | Flag.GRADIENT


def split(
    joint: fx.GraphModule, plan: Plan, needs: SavedForBackward, *, num_fwd_outputs: int, static_inputs: Sequence[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward that returns what ``needs`` keeps, and the backward that recomputes the rest of what it reads, both
    in the order of the plan's schedule. What is offloaded crosses like what is saved, until :func:`move_across`."""
    facts = plan.facts
    nodes = {node.name: node for node in joint.graph.nodes}
    rows = (*needs.saved, *needs.offloaded, *needs.inputs, *needs.symbolic)
    symbols, opaque, tensors = list[fx.Node](), list[fx.Node](), list[fx.Node]()
    for node in (nodes[facts.names[row]] for row in sorted(rows)):
        if node.op != "get_attr":
            (symbols if graphs.is_symbolic(node) else opaque if graphs.is_opaque(node) else tensors).append(node)
    _exempt_statistics(joint.graph, facts)
    with graphs.modules_without_code():
        forward, backward = graphs.extract_forward_backward(
            joint, tensors, symbols, opaque, num_fwd_outputs=num_fwd_outputs, static_inputs=static_inputs
        )
    erase_strays(forward.graph, facts, Phase.BACKWARD)
    erase_strays(backward.graph, facts, Phase.FORWARD)
    for gm, is_backward in ((forward, False), (backward, True)):
        steps = (row for _, row, region in plan.schedule if (region > 0) == is_backward)
        arrange(gm.graph, (facts.names[row] for row in steps))
    random = [nodes[facts.names[row]] for row in needs.recomputed if facts.flags[row] & Flag.RANDOM]
    if random:
        forward, backward = graphs.replay_random(random, forward, backward, len(symbols))
    return forward, backward


def _exempt_statistics(graph: fx.Graph, facts: Facts) -> None:
    """Spare inputs that the step writes, and only recomputed operators read, autograd's check that nobody wrote them.
    What is written does not bear on their results: a BatchNorm in training takes its running statistics to return them
    updated. What the backward itself reads stays under the check, as in eager."""
    output = graph.output_node()
    written = {graphs.mutated_input(desc) for desc in pytree.tree_leaves(output.meta.get("desc"))} - {None}
    for node in graph.find_nodes(op="placeholder"):
        desc = node.meta.get("desc")
        others = [user for user in node.users if function(user) != "copy_.default" or user.args[0] is not node]
        # Dynamo has buffers written in the graph; what else reads one of these returns it updated
        is_copied_to = len(others) < len(node.users) and all(node in unread(user) for user in others)
        is_written = (desc is not None and desc in written) or is_copied_to
        if is_written and not facts.has(facts.index[node.name], _IN_BACKWARD):
            node.meta["saved_tensor_with_no_vc_check"] = True


def finish(
    forward: fx.GraphModule, backward: fx.GraphModule, *, num_fwd_outputs: int, static_inputs: Sequence[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Do what PyTorch's partitioners do last, and AOTAutograd expects."""
    graphs.offload_activations(forward, backward, num_fwd_outputs, static_inputs)
    for gm in (forward, backward):
        gm.recompile()
    forward = graphs.thread_random_states(forward, is_backward=False)
    if backward.graph.find_nodes(op="placeholder"):
        backward = graphs.thread_random_states(backward, is_backward=True)
    return forward, backward


def erase_strays(graph: fx.Graph, facts: Facts, phase: Phase) -> None:
    """Remove the unused nodes of ``phase``, which belongs to the other graph: dead-code elimination spares random and
    effectful operators, and a dropout whose mask is saved would be drawn again in the backward."""
    index, phases = facts.index, facts.phases
    for node in reversed(graph.nodes):
        if node.users or node.op != "call_function" or graphs.must_be_in_backward(node):
            continue
        row = index.get(node.name)
        if row is not None and phases[row] == phase:
            graph.erase_node(node)


_WRAPPERS = (SAVES_RANDOM_STATE, *RUNS_WITH_RANDOM_STATE)


@frozen
class Crossing:
    """A value that crosses from the forward to the backward."""

    row: int
    returned: int
    """Its number among the outputs of the forward."""
    taken: int
    """Its number among the inputs of the backward."""


def crossings(
    facts: Facts, rows: Iterable[int], forward: fx.Graph, backward: fx.Graph, *, after: int
) -> list[Crossing]:
    """The crossings of some nodes. Outputs of the forward before ``after`` are the caller's."""
    values = list(enumerate(forward.output_node().args[0]))[after:]
    sent = {value.name: at for at, value in values if isinstance(value, fx.Node)}
    taken = {node.name: at for at, node in enumerate(backward.find_nodes(op="placeholder"))}
    return [Crossing(row, sent[name], taken[name]) for row in rows if (name := facts.names[row]) in sent]


def move_across(
    facts: Facts, schedule: Schedule, crossing: Sequence[Crossing], forward: fx.Graph, backward: fx.Graph
) -> None:
    """Have the values that cross at these places wait on the host, or in a narrower form: the forward returns that, and
    the backward fetches or widens it before what reads the values. One pass over each graph."""
    if not crossing:
        return
    output = forward.output_node()
    returned = [(value,) for value in output.args[0]]
    values = {place.row: returned[place.returned][0] for place in crossing}
    sent = copies.copy_out(forward, schedule, _nodes(facts, schedule, forward, backward=False), values)
    for place in crossing:
        returned[place.returned] = sent[place.row]
    output.args = (type(output.args[0])(chain.from_iterable(returned)),)
    steps = _nodes(facts, schedule, backward, backward=True)
    inputs = backward.find_nodes(op="placeholder")
    values = {place.row: inputs[place.taken] for place in crossing}
    hosts: dict[int, tuple[fx.Node, ...]] = {}
    for row, value in values.items():
        with backward.inserting_before(value):
            hosts[row] = tuple(backward.placeholder(each.name) for each in sent[row])
        for host, each in zip(hosts[row], sent[row], strict=True):
            host.meta = {**copies.without_marks(value.meta), "val": each.meta.get("val")}
    copies.copy_in(backward, schedule, steps, values, facts.dtypes, hosts, lambda reader: 1)
    for value in values.values():
        backward.erase_node(value)


def rows_in(plan: Plan, graph: fx.Graph, *, backward: bool) -> dict[str, int]:
    """By name, the node that each operator of a forward or backward graph runs, before anything in it is moved.
    Operators that torch wrapped to save or take a random state are known by their order."""
    facts, schedule = plan.facts, plan.schedule
    wanted = [row for kind, row, region in schedule if kind <= StepKind.SECOND_RUN and (region > 0) == backward]
    calls = {node.name: node for node in graph.nodes if node.op == "call_function" and piece_of_draw(node) is None}
    found = {name: row for row in wanted if (name := facts.names[row]) in calls}
    wrappers = [name for name, node in calls.items() if function(node) in _WRAPPERS and name not in found]
    wrapped = [row for row in wanted if facts.names[row] not in found and facts.flags[row] & Flag.RANDOM]
    found.update(zip(wrappers, (row for row in wrapped if facts.owners[row] == row), strict=False))
    return found


def schedule_of_graphs(
    plan: Plan,
    needs: SavedForBackward,
    graphs: Sequence[fx.Graph],
    rows: Sequence[Mapping[str, int]],
    edits: Sequence[Edits],
) -> Schedule:
    """The steps of the forward and the backward graph in their order, on the nodes of the plan that they were split by,
    with the copies to the host and back where that order has them. ``rows``: as :func:`rows_in` finds them in each;
    ``edits``: the edits made since. A replaced node runs where its replacement does."""
    again = frozenset(plan.schedule.rows_of(StepKind.SECOND_RUN))
    steps: list[ScheduleStep] = []
    for region, (graph, row_of, rewritten) in enumerate(zip(graphs, rows, edits, strict=True)):
        gone = {edit.nodes[0].name: edit.dead for edit in rewritten.done if edit.nodes}
        for node in graph.nodes:
            for row in (row_of[name] for name in (*gone.get(node.name, ()), node.name) if name in row_of):
                kind = StepKind.SECOND_RUN if region and row in again else StepKind.FIRST_RUN
                steps.append((kind, row, region))
    leaving = plan.schedule.moved
    moved = {row: leaving[row] for row in needs.moved}
    return Schedule.of(with_host_copies(plan.facts, steps, moved, plan.ahead), moved=moved)


def _nodes(facts: Facts, schedule: Schedule, graph: fx.Graph, *, backward: bool) -> list[fx.Node | None]:
    """By step of the schedule, the node of one graph that runs then."""
    names = {node.name: node for node in graph.nodes if node.op == "call_function"}
    return [
        names.get(facts.names[row]) if kind <= StepKind.SECOND_RUN and (region > 0) == backward else None
        for kind, row, region in schedule
    ]


@frozen(eq=False)
class Partition:
    """The forward and the backward graph that a joint graph was split into."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    plan: Plan
    """The plan of the user's graph, with every expectation checked."""
    audit: Audit
    seconds: dict[str, float] = field(factory=dict)
    """By stage, in the order they ran."""
    halves: Mapping[str, Edits] = field(factory=dict)
    """The edits made in the ``forward`` and in the ``backward`` after the split."""
    groups: tuple[RankOrder, ...] = ()
    """The process groups that were found or made for both."""
    schedule: Schedule | None = None
    """The order that both were brought into, on the plan's nodes, equal ones merged; without the later rewrites."""
    orders: Mapping[str, Plan] = field(factory=dict)
    """The plans of the ``forward`` and of the ``backward``, where the policy has scheduling lines."""

    @property
    def applied(self) -> AppliedPlan:
        return AppliedPlan("joint", self.plan, self.audit, self.seconds, self.halves, self.orders)


_KINDS = (GraphKind.FORWARD, GraphKind.BACKWARD)


def _choose(
    gm: fx.GraphModule, plan: Plan, num_fwd_outputs: int, static_inputs: Sequence[int]
) -> tuple[Plan, SavedForBackward]:
    """Decide what is saved and recomputed. Where something is left to decide, PyTorch's min-cut is asked, with the
    decided values as its fixed points."""
    gradients = finalize.gradient_rows(gm.graph, plan.facts, num_fwd_outputs)
    final = finalize.fit(plan, gradients)
    needs = backward_needs(final.facts, final.decisions)
    if not needs.final:
        with finalize.lent_to_min_cut(gm.graph, plan):
            try:
                saved = min_cut_saved_values(gm, num_fwd_outputs=num_fwd_outputs, static_inputs=static_inputs)
            except RuntimeError as error:
                raise PolicyMatchError([refusals.no_partition(plan, error)]) from error
        index = plan.facts.index
        chosen = [index[node.name] for node in saved or () if node.name in index]
        final = finalize.resolve_offloads_again(finalize.fit(plan, gradients, chosen))
        needs = backward_needs(final.facts, final.decisions)
    raise_errors(refusals.unsafe_after_all(final, needs, JOINT))
    return final, needs


def _saved_marks(facts: Facts, needs: SavedForBackward) -> dict[str, bool | str]:
    """The names of the saved values and of the multi-output operators they are pieces of, with their marks. Min-cut may
    save one piece of a tuple and recompute another; a decision on the operator cannot repeat that."""
    recomputed, moved = frozenset(needs.recomputed), frozenset(needs.offloaded)
    marked: dict[str, bool | str] = {}
    for row in (*needs.saved, *needs.offloaded):
        owner = facts.owners[row]
        whole = owner == row or owner not in recomputed
        marked[facts.names[owner]] = True if whole else marks.PARTLY
        marked[facts.names[row]] = marks.OFFLOADED if row in moved else True
    return marked


class JointPath(BackendPath):
    """``apply`` prepares a graph. What it saves is audited once :meth:`JointPartitioner.partition` has split it."""

    name: ClassVar[str] = "joint"
    front: ClassVar[str] = "policylang.backends.torch_compile.backend:of_compiled"

    def refusals(self, plan: Plan) -> Sequence[Diagnostic]:
        return refusals.unsaveable(plan)

    def lower(self, gm: fx.GraphModule, plan: Plan, seconds: dict[str, float]) -> None:
        super().lower(gm, plan, seconds)
        with timed(seconds, "tag"):
            finalize.write(gm.graph, plan)

    def put_in_order(self, gm: fx.GraphModule, plan: Plan, seconds: dict[str, float]) -> None:
        """Nothing: the forward and the backward graph are put in order once they are split."""


Done = Partition | RewrittenGraph
_partitioned: ContextVar[list[Done] | None] = ContextVar("policylang_partitioned", default=None)


@contextmanager
def partitions() -> Iterator[list[Done]]:
    """Collects what partitioners do meanwhile, deep inside torch, and the graphs without gradients that are rewritten.
    A list on the partitioner would be part of the caches' key. An outer collection gets all of an inner one."""
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
    """The prefix of every module path, if a block of the model is compiled separately."""
    aside: FsdpParameters | None = None
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
        """Split ``gm``; ``options`` (such as Inductor's ``compiler``) change no plan. Raises as ``partition`` does."""
        static = static_lifetime_input_indices
        partition = self.partition(gm, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static)
        return partition.forward, partition.backward

    def plan(
        self,
        gm: fx.GraphModule,
        *,
        num_fwd_outputs: int,
        static_inputs: Sequence[int] | None = None,
        seconds: dict[str, float] | None = None,
    ) -> Plan:
        """Plan a joint graph, without touching it. A graph that returns no gradient has no backward to plan for. Raises
        as :meth:`JointPath.plan` does, and ``PolicyGraphError`` for a graph that is not a joint graph."""
        seconds = {} if seconds is None else seconds
        kind = GraphKind.JOINT if finalize.gradients_of(gm.graph, num_fwd_outputs) else GraphKind.FORWARD
        with timed(seconds, "collect"):
            facts = collect(gm, kind=kind, static_inputs=static_inputs, root=self.root)
        with timed(seconds, "plan"):
            return JointPath().plan(facts, self.policy, aside=self.aside, deferred=self.deferred)

    @collector_paused()
    def partition(
        self,
        gm: fx.GraphModule,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        prepared: Plan | None = None,
    ) -> Partition:
        """Split ``gm``, which changes it, and return the findings about the partition.

        ``prepared``: the plan of a graph on which its edits are applied. A gather that is recomputed has fewer readers
        in the backward than it had in the joint graph, so the forward and the backward graph are rewritten once more.
        The order of collectives is planned on each of them.

        Raises as :meth:`plan` does, ``PolicyAuditError`` if the split graphs do not follow the plan, and
        ``PolicyMatchError`` if min-cut finds no cut that the decisions allow, or one with which an expectation fails.
        """
        static, seconds = static_lifetime_input_indices, dict[str, float]()
        sizes: dict[str, Any] = {"num_fwd_outputs": num_fwd_outputs, "static_inputs": static or ()}
        groups: set[RankOrder] = set()
        plan = prepared
        if plan is None:
            plan = self.plan(gm, num_fwd_outputs=num_fwd_outputs, static_inputs=static, seconds=seconds)
            with timed(seconds, "rewrite"):
                groups.update(apply_edits(gm, plan))
        with timed(seconds, "cse"):
            merged = finalize.eliminate(gm.graph, plan) if cse_enabled() else finalize.NOTHING_MERGED
            merged_plan = finalize.resolve_offloads_again(finalize.merge(plan, merged))
        with timed(seconds, "tag"):
            finalize.write(gm.graph, merged_plan)
        with timed(seconds, "choose"):
            final, needs = _choose(gm, merged_plan, **sizes)
            plan, failures = check_deferred(evolve(plan, diagnostics=final.diagnostics), final, needs)
            raise_errors(failures)
        with timed(seconds, "split"):
            finalize.mark_saved(gm.graph, _saved_marks(final.facts, needs))
            forward, backward = split(gm, final, needs, **sizes)
        with timed(seconds, "audit"):
            found = read_halves(final, needs, forward.graph, backward.graph, num_fwd_outputs=num_fwd_outputs)
            result = audit(final, needs, found)
        raise_differences(result.differences)
        crossing = crossings(final.facts, needs.moved, forward.graph, backward.graph, after=num_fwd_outputs)
        rewritten: tuple[RewrittenGraph, ...] = ()
        schedule, graphs = final.schedule, (forward.graph, backward.graph)
        rows = [rows_in(final, each, backward=each is graphs[1]) for each in graphs if plan.policy.orders]
        if plan.policy.rewrites or plan.policy.orders:
            with timed(seconds, "rewrite forward and backward"):
                both = zip((forward, backward), _KINDS, strict=True)
                rewritten = tuple(rewrite_graph(each, plan, kind, root=self.root) for each, kind in both)
            plan = evolve(plan, diagnostics=without_answered(plan.diagnostics, rewritten))
            raise_errors(unanswered(plan, rewritten))
        if plan.policy.orders:
            schedule = schedule_of_graphs(final, needs, graphs, rows, [each.edits for each in rewritten])
        with timed(seconds, "move"):
            move_across(final.facts, schedule, crossing, forward.graph, backward.graph)
            raise_differences(audit_copies(final, needs, found, forward.graph, backward.graph))
        with timed(seconds, "finish"):
            forward, backward = finish(forward, backward, **sizes)
        if plan.policy.orders:
            with timed(seconds, "audit order"):
                orders = zip((each.plan.order for each in rewritten), (forward, backward), strict=True)
                raise_differences([wrong for order, gm in orders if order for wrong in audit_order(order, gm.graph)])
        halves = zip((forward, backward), _KINDS, strict=True)
        agree_on_halves(plan, {kind.value: (each, kind) for each, kind in halves}, self.root)
        edits_of = {each.kind.value: each.edits for each in rewritten}
        plans_of = {each.kind.value: each.plan for each in rewritten if each.plan.order is not None}
        every = tuple(sorted(groups.union(*(each.groups for each in rewritten))))
        partition = Partition(forward, backward, plan, result, seconds, edits_of, every, schedule, plans_of)
        remember(partition.applied, gm, forward, backward)
        announce(partition.applied)
        _collect(partition)
        return partition

    @property
    def for_inference(self) -> Callable[[fx.GraphModule], None] | None:
        """Rewrites collectives in a graph without gradients, which has no partitioner; None where no line holds."""
        if not without_gradients(self.policy).rewrites:
            return None
        return lambda gm: _collect(rewrite_inference(gm, self.policy, root=self.root))


def _collect(done: Done) -> None:
    collected = _partitioned.get()
    if collected is not None:
        collected.append(done)
