"""What the scheduling lines of a policy came to on one graph, as plain data of its report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from policylang.planning.inspection.communication import CollectiveEntry, LineInOrder, StepInOrder
    from policylang.planning.plan import Plan


@frozen
class ScheduledLine:
    """The account of one ``bucket``, ``prefetch``, ``delay``, ``overlap`` or ``keep order of`` line."""

    source: str
    """``file:line``."""
    text: str
    """The line as it is written."""
    matched: int
    """How many collectives it picks."""
    moved: int
    """Of a ``bucket`` line, how many became one with others; of any other, how many start earlier or are awaited later
    because of it."""
    buckets: int = 0
    """How many a ``bucket`` line made of them."""
    left: dict[str, tuple[str, ...]] = field(factory=dict)
    """Why collectives were left where they are, and which."""


@frozen
class CollectiveAccount:
    """One collective of the graph as it is planned."""

    name: str
    """Its node."""
    operator: str
    """``all_gather_into_tensor``."""
    group: str
    """Its mesh dimension where one is known, else the name of its process group."""
    block: str
    """Empty outside every block."""
    bytes: int
    """The more of what it is given and what it gives."""
    members: int = 1
    """How many collectives of the graph as traced it stands for."""
    seconds: float | None = None
    """How long it is on its way; None without a device."""
    exposed: float | None = None
    """Seconds for which computation waits for it."""
    exposed_by: str | None = None
    """What keeps it exposed: ``data``, ``limit``, ``group`` or ``order``; None where it is hidden."""


@frozen
class StepTotals:
    """A graph as it runs in one order."""

    collectives: int
    """How many run."""
    peak: int
    """Bytes alive at most."""
    in_flight: int
    """Bytes of the collectives that are started and not awaited, where they are most."""
    step: float | None = None
    """Seconds; None without a device."""
    exposed: float | None = None
    """Of these, in which computation waits for a collective or a copy."""


@frozen
class OrderAccount:
    """The order of one graph: the whole step as it is planned, or what was carried out on a half of it."""

    traced: StepTotals
    """Without any scheduling line."""
    planned: StepTotals
    half: str = ""
    """``forward`` or ``backward`` for what was planned after the graph was split, and carried out on that half."""
    lines: tuple[ScheduledLine, ...] = ()
    """In the order of planning: buckets, then the others."""
    collectives: tuple[CollectiveAccount, ...] = ()
    """In the order in which they start."""
    bound: float | None = None
    """Seconds that no order can hide."""
    barriers: dict[str, int] = field(factory=dict)
    """Operators that nothing was moved across because nobody knows what they do, and how many calls."""


def order_account(plan: Plan, half: str = "") -> OrderAccount | None:
    """The account of a plan's order; None where the policy has no scheduling lines, the path carries none out, or
    there is nothing to order."""
    from policylang.planning.inspection.communication import communication  # few policies ask for what it imports

    found = communication(plan)
    if found is None or not found.traced.collectives:
        return None
    return OrderAccount(
        traced=_totals(found.traced),
        planned=_totals(found.planned),
        half=half,
        lines=tuple(_line(line) for line in found.lines),
        collectives=tuple(_collectives(found.collectives)),
        bound=found.bound,
        barriers=dict(found.barriers),
    )


def _totals(step: StepInOrder) -> StepTotals:
    lanes = step.lanes
    return StepTotals(
        collectives=len(step.collectives),
        peak=step.peak.bytes,
        in_flight=step.in_flight,
        step=None if lanes is None else lanes.step,
        exposed=None if lanes is None else lanes.exposed,
    )


def _line(line: LineInOrder) -> ScheduledLine:
    return ScheduledLine(
        source=line.source,
        text=line.text,
        matched=len(line.matched),
        moved=len(line.moved),
        buckets=sum(len(bucket.names) for bucket in line.buckets),
        left=dict(line.left),
    )


def _collectives(entries: Sequence[CollectiveEntry]) -> list[CollectiveAccount]:
    return [
        CollectiveAccount(
            name=each.name,
            operator=each.operator,
            group=each.group,
            block=each.block,
            bytes=each.bytes,
            members=each.members,
            seconds=None if each.run is None else each.run.end - each.run.start,
            exposed=None if each.run is None else each.run.exposed,
            exposed_by=None if each.run is None or each.run.exposed_by is None else each.run.exposed_by.value,
        )
        for each in entries
    ]
