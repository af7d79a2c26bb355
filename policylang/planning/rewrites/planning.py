"""The statements of a policy that change a graph's structure, planned one after the other, before any rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve

from policylang.graph.facts import Facts
from policylang.language.syntax import Fuse, Policy
from policylang.planning.plan import Capabilities
from policylang.planning.rewrites.data import Node, Refused, Rewrite, Rewrites
from policylang.planning.rewrites.facts import rewritten
from policylang.planning.rewrites.gathers import fuse_gathers
from policylang.planning.rewrites.naming import Names
from policylang.planning.rewrites.proof import Prover
from policylang.planning.rewrites.round_trips import collapse_round_trips
from policylang.planning.rewrites.scatters import fuse_scatters


def plan_rewrites(policy: Policy, facts: Facts, capabilities: Capabilities) -> tuple[Rewrites, Facts]:
    """What is to be done to the structure of a graph, and the facts as they are then.

    Each statement is planned on what the ones before it leave. Linear in nodes and edges for each statement.
    """
    if not policy.rewrites or not capabilities.rewrites:
        return Rewrites(), facts
    if not _keeps_rank_order(facts.torch_version):
        capabilities = evolve(capabilities, unsorted_groups=False)
    done: list[Rewrite] = []
    refused: list[Refused] = []
    prover = Prover()
    known = facts.groups
    for number, statement in enumerate(policy.rewrites):
        planner = _PLANNERS.get(statement.collective if isinstance(statement, Fuse) else "round_trips")
        if planner is None:
            continue
        outcomes = planner(facts, number, statement, capabilities, Names(facts.index), prover, known)
        mine = _in_order([each for each in outcomes if isinstance(each, Rewrite)], facts)
        refused.extend(each for each in outcomes if isinstance(each, Refused))
        facts = rewritten(facts, mine)
        done.extend(mine)
    return Rewrites(tuple(done), tuple(refused)), facts


def _keeps_rank_order(version: str) -> bool:
    """Whether the torch that a graph is from stands by process groups whose ranks are not sorted: from 2.12.

    Read off the facts, so that a plan on a snapshot is the plan on the graph.
    """
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    return len(numbers) < 2 or tuple(numbers) >= (2, 12)


def _in_order(found: Sequence[Rewrite], facts: Facts) -> list[Rewrite]:
    """In the order of their first collectives, so that a rewrite comes after the one that makes what it starts from."""
    ordered = sorted(found, key=lambda rewrite: facts.index[rewrite.collectives[0]])
    replaced: dict[str, str] = {}
    result = []
    for rewrite in ordered:
        if rewrite.source in replaced:
            source = replaced[rewrite.source]
            nodes = tuple(evolve(node, arguments=_renamed(node.arguments, replaced)) for node in rewrite.nodes)
            rewrite = evolve(rewrite, source=source, nodes=nodes)
        replaced.update(rewrite.replaced)
        result.append(rewrite)
    return result


def _renamed(value: Any, replaced: dict[str, str]) -> Any:
    if isinstance(value, Node):
        return Node(replaced.get(value.name, value.name))
    return tuple(_renamed(part, replaced) for part in value) if isinstance(value, tuple) else value


Planner = Callable[..., list[Rewrite | Refused]]

_PLANNERS: dict[str, Planner] = {
    "all_gather": fuse_gathers,
    "reduce_scatter": fuse_scatters,
    "round_trips": collapse_round_trips,
}
