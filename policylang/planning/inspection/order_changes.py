"""How the order of collectives differs between two plans on one graph."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from policylang.graph.facts import Facts, storage_roots
from policylang.graph.schedule import Schedule, StepKind
from policylang.planning.graph_edit import Edit
from policylang.planning.inspection.communication import collective_rows
from policylang.planning.order.as_run import run
from policylang.planning.plan import Plan
from policylang.simulation.in_flight import in_flight
from policylang.simulation.streams import streams_of

_LAST_RUN = int(StepKind.SECOND_RUN)
Place = tuple[str, str]
"""The node that computes next when a collective starts, and when it has been awaited."""


@frozen
class OrderFigures:
    """The collectives of one plan."""

    collectives: int
    buckets: int
    in_flight_bytes: int
    """Started and not awaited, where that is most."""


@frozen
class OrderChanges:
    """Collectives by the names that they have without any bucket, in the order of the graph."""

    old: OrderFigures
    new: OrderFigures
    joined: tuple[str, ...]
    """Those that are in a bucket now, and were in none or in one with others."""
    parted: tuple[str, ...]
    """Those that were in a bucket, and are alone now."""
    starts: tuple[str, ...]
    """Of all others, those that start elsewhere."""
    awaited: tuple[str, ...]
    """Of all others, those that are awaited elsewhere."""

    @property
    def same(self) -> bool:
        return not (self.joined or self.parted or self.starts or self.awaited)


@frozen
class _Ordered:
    figures: OrderFigures
    buckets: Mapping[str, tuple[str, ...]]
    """Member to all members."""
    places: Mapping[str, Place]


def order_changes(old: Plan, new: Plan) -> OrderChanges | None:
    """None where neither policy schedules anything. Linear in nodes and edges."""
    if old.order is None and new.order is None:
        return None
    before, after = _ordered(old), _ordered(new)
    names = list(dict.fromkeys((*before.places, *after.places)))
    joined = tuple(name for name in names if name in after.buckets and after.buckets[name] != before.buckets.get(name))
    parted = tuple(name for name in names if name in before.buckets and name not in after.buckets)
    others = {*joined, *parted}
    alike = [name for name in names if name in before.places and name in after.places and name not in others]
    moved = [(name, before.places[name], after.places[name]) for name in alike]
    return OrderChanges(
        old=before.figures,
        new=after.figures,
        joined=joined,
        parted=parted,
        starts=tuple(name for name, was, now in moved if was[0] != now[0]),
        awaited=tuple(name for name, was, now in moved if was[1] != now[1]),
    )


def _ordered(plan: Plan) -> _Ordered:
    done: tuple[Edit, ...] = ()
    if plan.order is None:
        ran = run(plan.facts, plan.schedule)
        facts, schedule = ran.facts, ran.schedule
    else:
        facts, schedule, done = plan.order.facts, plan.order.schedule, plan.order.edits.done
    places = places_of(facts, schedule)
    buckets: dict[str, tuple[str, ...]] = {}
    for edit in done:
        made = [node.name for node in edit.nodes if node.name in places]
        for member in edit.collectives:
            buckets[member] = edit.collectives
            if made:
                places[member] = places[made[0]]
        for name in made:
            del places[name]
    sent = in_flight(facts, schedule)
    figures = OrderFigures(len(collective_rows(facts, schedule)), len(done), max(sent, default=0))
    return _Ordered(figures, buckets, places)


def places_of(facts: Facts, schedule: Schedule) -> dict[str, Place]:
    """From the end on, so that the node that computes next is known."""
    streams, roots, names = streams_of(facts), storage_roots(facts), facts.names
    starts: dict[str, str] = {}
    awaited: dict[str, str] = {}
    coming = ""
    for kind, row in zip(reversed(schedule.kinds), reversed(schedule.rows), strict=True):
        if kind > _LAST_RUN:
            continue
        if row in streams.started:
            starts[names[row]] = coming
        elif roots[row] == row:
            coming = names[row]
        for each in streams.awaited.get(row, ()):
            awaited[names[each]] = coming
    return {name: (starts[name], awaited.get(name, "")) for name in reversed(starts)}
