"""What tests ask of every rewritten graph."""

from __future__ import annotations

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from policylang.graph.collect import collect
from policylang.graph.facts import Group
from policylang.planning.plan import Plan

_COLUMNS = (
    "names", "ops", "targets", "phases", "modules", "ac_regions", "user_tags", "flags", "bytes", "numel", "shapes",
    "strides", "dtypes", "devices", "flops", "inputs", "users", "owners", "input_kinds", "input_names",
)  # fmt: skip


def assert_facts_hold(gm: fx.GraphModule, plan: Plan, mesh: DeviceMesh | None = None) -> None:
    """The facts that the plan derived are those of the graph that came out, to the last column."""
    found, planned = collect(gm, kind=plan.facts.kind, mesh=mesh), plan.facts
    for column in _COLUMNS:
        ours, theirs = list(getattr(planned, column)), list(getattr(found, column))
        differ = [row for row, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]
        assert not differ, (column, [(found.names[row], ours[row], theirs[row]) for row in differ[:5]])
    assert [_ranks(planned.groups, name) for name in planned.group_names] == [
        _ranks(found.groups, name) for name in found.group_names
    ]


def _ranks(groups: dict[str, Group], name: str) -> tuple[int, ...]:
    return groups[name].ranks if name else ()
