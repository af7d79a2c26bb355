"""The statements of a policy that change a graph's structure, planned one after the other, before any rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from policylang.graph.facts import Facts
from policylang.language.syntax import Fuse, Policy, Rewriting
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.collectives.fusing import Fusing
from policylang.planning.edits.collectives.gathers import Gathers
from policylang.planning.edits.collectives.round_trips import RoundTrips
from policylang.planning.edits.collectives.scatters import Scatters
from policylang.planning.edits.data import Node, Refused, Rewrite, Rewrites
from policylang.planning.edits.edited_facts import rewritten
from policylang.planning.edits.naming import Names
from policylang.planning.edits.offers import Ledger, Ranks
from policylang.planning.edits.proof.equivalence import Prover
from policylang.planning.edits.setting import Setting
from policylang.planning.edits.unread import unread_pieces, with_pieces, without_pieces

_FUSING: Mapping[str, type[Fusing]] = {kind.kind: kind for kind in (Gathers, Scatters)}


def plan_rewrites(
    policy: Policy, facts: Facts, capabilities: Capabilities, ranks: Ranks | None = None
) -> tuple[Rewrites, Facts]:
    """What is to be done to the structure of a graph, and the facts as they are then.

    Each statement is planned on what the ones before it leave. Linear in nodes and edges for each statement. ``ranks``
    that can be asked settle what all of them do; without them nothing is done that rests on what other ranks do.
    """
    if not policy.rewrites or not capabilities.rewrites:
        return Rewrites(), facts
    if not _keeps_rank_order(facts.torch_version):
        capabilities = evolve(capabilities, unsorted_groups=False)
    prover = Prover()
    left: dict[str, str] = {}
    while True:
        ledger = Ledger(ranks is not None, left)
        planned = _attempt(policy, facts, capabilities, prover, ledger)
        unshared = ranks.unshared(ledger.offers) if ranks is not None else {}
        if not unshared:
            return planned
        left = {**left, **unshared}


def _attempt(
    policy: Policy, facts: Facts, capabilities: Capabilities, prover: Prover, ledger: Ledger
) -> tuple[Rewrites, Facts]:
    """The rewrites as this rank would make them but for what has been left."""
    done: list[Rewrite] = []
    refused: list[Refused] = []
    known = facts.groups
    for number, statement in enumerate(policy.rewrites):
        unread = unread_pieces(facts)
        own = without_pieces(facts, unread)
        setting = Setting(own, number, capabilities, Names(facts.index), prover, known, ledger)
        outcomes = _outcomes(statement, setting)
        found = [with_pieces(each, facts, unread) for each in outcomes if isinstance(each, Rewrite)]
        mine = _in_order(found, facts)
        refused.extend(each for each in outcomes if isinstance(each, Refused))
        facts = rewritten(facts, mine)
        done.extend(mine)
    return Rewrites(tuple(done), tuple(refused)), facts


def _outcomes(statement: Rewriting, setting: Setting) -> list[Rewrite | Refused]:
    if isinstance(statement, Fuse):
        return _FUSING[statement.collective](statement, setting).outcomes()
    return RoundTrips(setting).outcomes()


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
