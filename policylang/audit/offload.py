"""The proof that a partition moves what was planned, and without a race: read off the two halves as they will run.

What the forward returns as a copy on the host has to come in as one, and to be back on the device before anything
reads it. Where values cross is read off the halves as they were split, when nodes had the names of the joint graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attrs import frozen
from torch import fx

from policylang.audit.host_copies import Moved, races, read_moves
from policylang.audit.joint import NOT_FREED, OFFLOADED_UNPLANNED, difference, returned
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic
from policylang.planning.plan import Plan
from policylang.planning.storage import storage_roots


@frozen
class Place:
    """Where a value crosses from the forward to the backward."""

    row: int
    returned: int
    """Its number among the outputs of the forward."""
    taken: int
    """Its number among the inputs of the backward."""


def places(facts: Facts, rows: Iterable[int], forward: fx.Graph, backward: fx.Graph, *, after: int) -> list[Place]:
    """Where the values of some rows cross. Outputs of the forward before ``after`` are the caller's."""
    values = list(enumerate(returned(forward)))[after:]
    sent = {value.name: at for at, value in values if isinstance(value, fx.Node)}
    taken = {node.name: at for at, node in enumerate(backward.find_nodes(op="placeholder"))}
    return [Place(row, sent[name], taken[name]) for row in rows if (name := facts.names[row]) in sent]


def wrongly_moved(
    plan: Plan, crossing: Sequence[Place], forward: fx.Graph, backward: fx.Graph
) -> tuple[Diagnostic, ...]:
    """What of the copies between device and host in two halves is not as planned: of the values that are offloaded and
    cross at these places, and of any other. One pass over each."""
    out, back = read_moves(forward.nodes), read_moves(backward.nodes)
    if not crossing and not out.copies and not back.copies:
        return ()
    outputs, inputs = returned(forward), backward.find_nodes(op="placeholder")
    found = list(races((*out.races, *back.races)))
    for place in crossing:
        host = outputs[place.returned]
        value = out.hosts.get(host) if isinstance(host, fx.Node) else None
        if value is None or not _is_its_own(plan, place, value):
            found.append(difference(NOT_FREED, plan, place.row, "was not moved to the host"))
        found.extend(races(_wrong_readers(inputs[place.taken], back)))
    sent = {outputs[place.returned] for place in crossing}
    found.extend(_unplanned(node for node in out.hosts if node not in sent))
    arrived = {inputs[place.taken] for place in crossing}
    found.extend(_unplanned(node for node, host in back.back.items() if host not in arrived))
    found.extend(_held_all_the_same(plan, crossing, outputs))
    return tuple(found)


def _unplanned(nodes: Iterable[fx.Node]) -> Iterator[Diagnostic]:
    for node in nodes:
        yield Diagnostic(OFFLOADED_UNPLANNED, f"`{node.name}` is a copy between device and host that nobody planned")


def _is_its_own(plan: Plan, place: Place, value: fx.Node) -> bool:
    """Whether a value is the one that was planned to be moved; a rewritten half may have it from another node."""
    return plan.facts.index.get(value.name, place.row) == place.row


def _wrong_readers(host: fx.Node, back: Moved) -> list[str]:
    """Who reads a copy on the host other than to bring it back; the copy itself where nobody does."""
    wrong = [user.name for user in host.users if user not in back.copies]
    fetched = any(back.back.get(user) is host and user.users for user in host.users)
    return wrong if fetched or wrong else [host.name]


def _held_all_the_same(plan: Plan, crossing: Sequence[Place], outputs: Sequence[Any]) -> Iterator[Diagnostic]:
    """Values whose memory the forward returns beside the copy: to the caller, or as another saved value."""
    facts, roots = plan.facts, storage_roots(plan.facts)
    alive = {
        roots[row]
        for value in outputs
        if isinstance(value, fx.Node) and (row := facts.index.get(value.name)) is not None
    }
    for place in crossing:
        if roots[place.row] in alive:
            yield difference(NOT_FREED, plan, place.row, "was offloaded and is held on the device all the same")
