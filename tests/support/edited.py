"""What tests ask of every edited graph."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from policylang.graph.collect import collect
from policylang.graph.facts import COLUMNS, Facts, Group
from policylang.planning.edits.other_ranks import Proposal
from policylang.planning.plan import Plan

_COMPARED_BELOW = ("arguments", "group_names")


class AllAlike:
    """Other ranks that offer whatever this one does: for tests of what one rank finds."""

    def unshared(self, offers: Sequence[Proposal]) -> Mapping[str, str]:
        return {}


def assert_facts_hold(
    gm: fx.GraphModule, plan: Plan, mesh: DeviceMesh | None = None, groups: Mapping[str, Group] | None = None
) -> None:
    """The facts that the plan derived are those of the graph that came out, to the last column.

    ``groups``: those that no process group of this process stands for.
    """
    found, planned = collect(gm, kind=plan.facts.kind, mesh=mesh, groups=groups), plan.facts
    for column in COLUMNS.keys() - _COMPARED_BELOW:
        ours, theirs = list(getattr(planned, column)), list(getattr(found, column))
        differ = [row for row, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]
        assert not differ, (column, [(found.names[row], ours[row], theirs[row]) for row in differ[:5]])
    ranks, others = ([name and each.groups[name].ranks for name in each.group_names] for each in (planned, found))
    assert ranks == others
    arguments = [[_arguments(facts, row) for row in range(len(facts))] for facts in (planned, found)]
    differ = [row for row, (one, other) in enumerate(zip(*arguments, strict=True)) if one != other]
    assert not differ, [(found.names[row], arguments[0][row], arguments[1][row]) for row in differ[:5]]


def _arguments(facts: Facts, row: int) -> tuple[Any, ...]:
    """With the name of a group, which a plan cannot know yet, left out."""
    return facts.arguments[row][:-1] if facts.group_names[row] else facts.arguments[row]
