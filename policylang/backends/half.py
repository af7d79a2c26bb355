"""The ``half`` path: a policy's edits and order on one graph of a partition whose saved values are decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from attrs import evolve, frozen
from torch import fx

from policylang.backends import refusals
from policylang.backends.path import BackendPath, raise_errors
from policylang.backends.records import AppliedPlan, announce, remember, without_gradients
from policylang.backends.rewriting import apply_edits, put_in_order
from policylang.backends.runtime import RankOrder
from policylang.graph.chains import Chains
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind, InputKind
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.syntax import Chunk, Expectation, ExpectTotal, Policy, Statement
from policylang.planning.capabilities import HALF
from policylang.planning.graph_edit import Edits
from policylang.planning.plan import Plan
from policylang.planning.planner import plan as make_plan
from policylang.planning.refusals import REWRITES_REFUSED
from policylang.ranks.comparison import agree_on_collectives, is_compared, ranks_of
from policylang.ranks.rank_account import GraphRun
from policylang.torch_compat.compilers import settings_lines
from policylang.torch_compat.partition import functorch_settings

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
    lenient = evolve(
        policy,
        rewrites=tuple(evolve(each, optional=True) for each in policy.rewrites if not isinstance(each, Chunk)),
        scheduling=tuple(evolve(each, optional=True) for each in policy.scheduling),
        expectations=(),
    )
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
