"""What became of a graph, kept beside its modules for as long as they live, and never in what is pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import fx

from policylang.language.syntax import Policy
from policylang.planning.edits.graph_edit import Edits
from policylang.planning.plan import Plan

if TYPE_CHECKING:
    from policylang.backends.flat.path import FlatOutcome
    from policylang.backends.joint.partitioner import Partition

_plans: WeakKeyDictionary[fx.GraphModule, Plan] = WeakKeyDictionary()
_partitions: WeakKeyDictionary[fx.GraphModule, Any] = WeakKeyDictionary()
_halves: WeakKeyDictionary[fx.GraphModule, Mapping[str, Edits]] = WeakKeyDictionary()
_checkpoints: WeakKeyDictionary[fx.GraphModule, Sequence[Policy]] = WeakKeyDictionary()


def remember_plan(gm: fx.GraphModule, plan: Plan) -> None:
    """Keep the plan that was written on a graph."""
    _plans[gm] = plan


def plan_of(gm: fx.GraphModule) -> Plan | None:
    """The plan that was last applied to a graph."""
    return _plans.get(gm)


def remember_checkpoints(gm: fx.GraphModule, policies: Sequence[Policy]) -> None:
    """Keep what the checkpoints of ours follow in the model that a graph was traced from."""
    _checkpoints[gm] = tuple(policies)


def checkpoints_of(gm: fx.GraphModule) -> Sequence[Policy]:
    """The policies that checkpoints of ours follow in the model that a graph was traced from."""
    return _checkpoints.get(gm, ())


def record(gm: fx.GraphModule, partition: Partition) -> None:
    """Keep how a graph was split, to be asked for by the joint graph or by either half."""
    outcome = (partition.plan, partition.audit, partition.seconds)
    for module in (gm, partition.forward, partition.backward):
        _partitions[module] = outcome
        _halves[module] = partition.rewritten_halves


def record_flat(gm: fx.GraphModule, outcome: FlatOutcome) -> None:
    """Keep what became of a flat graph."""
    _partitions[gm] = (outcome.plan, outcome.audit, outcome.seconds)


def halves_of(gm: fx.GraphModule) -> Mapping[str, Edits]:
    """What was rewritten in the ``forward`` and in the ``backward`` of the partition that a module took part in."""
    return _halves.get(gm, {})


def outcome_of(gm: fx.GraphModule) -> tuple[Plan, Any, dict[str, float]] | None:
    """Plan, audit and seconds by stage of the partition that a module took part in."""
    return _partitions.get(gm)
