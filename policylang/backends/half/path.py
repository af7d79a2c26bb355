"""A policy on one half of a partition: what to save is decided there, so only its rewrites have anything to say."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen
from torch import fx

from policylang.backends.runtime.groups import RankOrder
from policylang.backends.surgery.edits import carry_out
from policylang.errors import PolicyMatchError
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.reading.collect import collect
from policylang.language.codes import diagnose, is_error
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Policy
from policylang.planning.capabilities import HALF
from policylang.planning.edits.offers import Ranks
from policylang.planning.plan import Plan
from policylang.planning.planner import plan as make_plan
from policylang.planning.refusals import REWRITES_REFUSED
from policylang.ranks.comparison import agree_on_plan, ranks_of

ONLY_REWRITES = "APL329"


@frozen(eq=False)
class Half:
    """What a policy came to on one half."""

    kind: GraphKind
    plan: Plan
    groups: tuple[RankOrder, ...]
    """The process groups that were found or made for it."""


def rewrite_half(gm: fx.GraphModule, joint: Plan, kind: GraphKind, *, root: str = "") -> Half:
    """Carry out the ``fuse`` and ``collapse`` lines of a joint graph's plan on one half, in place.

    The ranks that share the joint graph settle the rewrites of its halves too. Raises ``PolicyMatchError`` where lines
    and graph do not fit; the graph is then as it was.
    """
    policy = joint.policy
    # the halves follow from the joint graph: there the ranks have agreed, and the lines were held to account
    lenient = evolve(policy, rewrites=tuple(evolve(each, optional=True) for each in policy.rewrites))
    made = _planned(collect(gm, kind=kind, root=root), lenient, ranks_of(joint.before, policy, kind.value))
    _raise_errors(made)
    return Half(kind, made, carry_out(gm, made))


def plan_half(facts: Facts, policy: Policy) -> Plan:
    """Plan the rewrites of a policy on one half that a user hands over, and compare the plan between ranks.

    Raises ``PolicyMatchError`` with what is wrong with them.
    """
    made = _planned(facts, policy, ranks_of(facts, policy, facts.kind.value))
    _raise_errors(made)
    agree_on_plan(made, facts)
    return made


def _planned(facts: Facts, policy: Policy, ranks: Ranks | None) -> Plan:
    return make_plan(only_rewrites(policy), facts, HALF, ranks=ranks)


def _errors(plan: Plan) -> list[Diagnostic]:
    return [found for found in plan.diagnostics if is_error(found)]


def _raise_errors(plan: Plan) -> None:
    errors = _errors(plan)
    if errors:
        raise PolicyMatchError(errors)


def only_rewrites(policy: Policy) -> Policy:
    """The policy without what decides about values."""
    return evolve(policy, blocks=None, rules=(), undecided=None, expectations=())


def without_answered(diagnostics: Sequence[Diagnostic], halves: Sequence[Half]) -> tuple[Diagnostic, ...]:
    """Without the warnings that a line changed nothing on the joint graph, where it did on a half."""
    done = {half.plan.policy.rewrites[edit.statement].span for half in halves for edit in half.plan.edits.done}
    return tuple(found for found in diagnostics if found.code != REWRITES_REFUSED or found.span not in done)


def note_on_rules(policy: Policy, kind: GraphKind) -> tuple[Diagnostic, ...]:
    """What becomes of a policy's other lines where a user applies it to a half."""
    count = len(policy.rules) + len(policy.expectations)
    if not count:
        return ()
    first = (*policy.rules, *policy.expectations)[0]
    lines = f"{count} lines decide" if count > 1 else "1 line decides"
    return (
        diagnose(
            ONLY_REWRITES,
            f"{lines} nothing here: a {kind.value} graph is one half of a partition, and what it saves is settled",
            span=first.span,
            help="apply the policy to the joint graph; of a half, its `fuse` and `collapse` lines are carried out",
        ),
    )
