"""The half path: carries out the edits of a policy on one half of a partition, where saving is decided already."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from attrs import evolve, frozen
from torch import fx

from policylang.backends import refusals
from policylang.backends.path import BackendPath, raise_errors
from policylang.backends.runtime.groups import RankOrder
from policylang.backends.surgery.edits import carry_out
from policylang.errors import PolicyGraphError
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.reading.collect import collect
from policylang.language.codes import diagnose
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Policy
from policylang.planning.block_graph import Place
from policylang.planning.capabilities import HALF
from policylang.planning.decisions.weights_aside import WeightsAside
from policylang.planning.plan import Plan
from policylang.planning.planner import plan as make_plan
from policylang.planning.refusals import REWRITES_REFUSED
from policylang.ranks.comparison import ranks_of

ONLY_REWRITES = "APL329"


@frozen(eq=False)
class Half:
    """What a policy came to on one half."""

    kind: GraphKind
    plan: Plan
    groups: tuple[RankOrder, ...]
    """The process groups that were found or made for it."""


class HalfPath(BackendPath):
    name: ClassVar[str] = "half"

    def check(self, gm: fx.GraphModule, policy: Policy, facts: Facts) -> None:
        if not policy.rewrites:
            raise PolicyGraphError([refusals.no_path(facts.kind)])

    def part_of(self, policy: Policy) -> Policy:
        """Without what decides about values."""
        return evolve(policy, blocks=None, rules=(), undecided=None, expectations=())

    def plan(
        self,
        facts: Facts,
        policy: Policy,
        *,
        place: Place | None = None,
        aside: WeightsAside | None = None,
        deferred: Collection[str] = (),
    ) -> Plan:
        made = super().plan(facts, policy, place=place, aside=aside, deferred=deferred)
        return evolve(made, diagnostics=made.diagnostics + _note_on_rules(policy, facts.kind))


def rewrite_half(gm: fx.GraphModule, joint: Plan, kind: GraphKind, *, root: str = "") -> Half:
    """Carry out the ``fuse`` and ``collapse`` lines of a joint graph's plan on one half, in place.

    The ranks that share the joint graph settle the rewrites of its halves too. Raises ``PolicyMatchError`` where lines
    and graph do not fit; the graph is then as it was.
    """
    policy = joint.policy
    # the halves follow from the joint graph: there the ranks have agreed, and the lines were held to account
    lenient = evolve(policy, rewrites=tuple(evolve(each, optional=True) for each in policy.rewrites))
    ranks = ranks_of(joint.before, policy, kind.value)
    made = make_plan(HalfPath().part_of(lenient), collect(gm, kind=kind, root=root), HALF, ranks=ranks)
    raise_errors(made.diagnostics)
    return Half(kind, made, carry_out(gm, made))


def without_answered(diagnostics: Sequence[Diagnostic], halves: Sequence[Half]) -> tuple[Diagnostic, ...]:
    """Without the warnings that a line changed nothing on the joint graph, where it did on a half."""
    done = {half.plan.policy.rewrites[edit.statement].span for half in halves for edit in half.plan.edits.done}
    return tuple(found for found in diagnostics if found.code != REWRITES_REFUSED or found.span not in done)


def _note_on_rules(policy: Policy, kind: GraphKind) -> tuple[Diagnostic, ...]:
    """A note on the lines that do nothing where a user applies a policy to a half."""
    deciding = (*policy.rules, *policy.expectations)
    if not deciding:
        return ()
    lines = f"{len(deciding)} lines decide" if len(deciding) > 1 else "1 line decides"
    message = f"{lines} nothing here: a {kind.value} graph is one half of a partition, and what it saves is settled"
    help = "apply the policy to the joint graph; of a half, its `fuse` and `collapse` lines are carried out"
    return (diagnose(ONLY_REWRITES, message, deciding[0].span, help=help),)
