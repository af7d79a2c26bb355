"""Remembers the plan that was carried out on a graph module, for as long as the module lives; nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from attrs import field, frozen
from torch import fx

from policylang.audit.outcome import Audit
from policylang.language.syntax import Policy
from policylang.planning.graph_edit import Edits
from policylang.planning.plan import Plan


@frozen(eq=False)
class CarriedOut:
    """A plan that was carried out on a graph."""

    path: str
    """The name of the path."""
    plan: Plan
    audit: Audit | None = None
    """None where the graph is only prepared, so that what it saves cannot be read off it yet."""
    seconds: Mapping[str, float] = field(factory=dict)
    """By stage, in the order they ran."""
    halves: Mapping[str, Edits] = field(factory=dict)
    """What was rewritten in the ``forward`` and in the ``backward`` of a partition."""
    orders: Mapping[str, Plan] = field(factory=dict)
    """The plans of those halves on which scheduling lines were carried out."""
    without_backward: bool = False
    """Whether it is a graph that no gradient is computed through."""


_applied: WeakKeyDictionary[fx.GraphModule, CarriedOut] = WeakKeyDictionary()
_audited: WeakKeyDictionary[fx.GraphModule, CarriedOut] = WeakKeyDictionary()
_checkpoints: WeakKeyDictionary[fx.GraphModule, Sequence[Policy]] = WeakKeyDictionary()


def remember(done: CarriedOut, *modules: fx.GraphModule) -> None:
    """Keep what was done, to be asked for by the graph, or by either half of its partition."""
    kept = _applied if done.audit is None else _audited
    for module in modules:
        kept[module] = done


def carried_out(gm: fx.GraphModule) -> CarriedOut | None:
    """What was last carried out on a graph: audited, or else prepared."""
    return last_audited(gm) or _applied.get(gm)


def last_audited(gm: fx.GraphModule) -> CarriedOut | None:
    """What was carried out on a graph, or on the joint graph that it is a half of, and audited."""
    return _audited.get(gm)


def plan_of(gm: fx.GraphModule) -> Plan | None:
    """The plan that a graph was last prepared for."""
    found = _applied.get(gm)
    return None if found is None else found.plan


def remember_checkpoints(gm: fx.GraphModule, policies: Sequence[Policy]) -> None:
    """Keep what the checkpoints of ours follow in the model that a graph was traced from."""
    _checkpoints[gm] = tuple(policies)


def checkpoints_of(gm: fx.GraphModule) -> Sequence[Policy]:
    """The policies that checkpoints of ours follow in the model that a graph was traced from."""
    return _checkpoints.get(gm, ())
