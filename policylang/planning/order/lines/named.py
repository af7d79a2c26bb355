"""The collectives that each scheduling statement names, before and after some of them have become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag
from policylang.language.syntax import Delay, KeepOrder, Overlap, Policy, Prefetch, Scheduling
from policylang.planning.graph_edit import Edits


@frozen
class Picked:
    """Of one statement."""

    statement: Scheduling
    rows: tuple[int, ...]
    """In the graph as its buckets leave it, in order."""
    taken: tuple[int, ...] = ()
    """Those of them that are this statement's to move: of those that several name, the last one's."""
    takers: Mapping[int, int] = field(factory=dict)
    """Later statement to how many of them it has taken."""


def after_edits(names: Sequence[str], edits: Edits, facts: Facts) -> tuple[int, ...]:
    """The rows, once edits are carried out, of some collectives: those that have become one are that one."""
    became: dict[str, list[str]] = {}
    for edit in edits.done:
        made = [node.name for node in edit.nodes if node.name in facts.index]
        starts = [name for name in made if facts.flags[facts.index[name]] & Flag.COLLECTIVE]
        for name in edit.collectives:
            became.setdefault(name, []).extend(starts)
    found: dict[int, None] = {}
    pending = list(reversed(names))
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in facts.index:
            found[facts.index[name]] = None
        pending.extend(became.get(name, ()))
    return tuple(sorted(found))


def shared_out(policy: Policy, rows: Sequence[tuple[int, ...]]) -> list[Picked]:
    """What each statement of ``Policy.scheduling`` moves of what it names.

    Of two prefetches that name a collective the later one moves it, and of two delays. ``overlap`` moves what none of
    them names and no ``keep order of`` holds.
    """
    statements = policy.scheduling
    owner: dict[tuple[type, int], int] = {}
    for number, statement in enumerate(statements):
        for row in rows[number]:
            owner[type(statement), row] = number
    found = []
    for number, statement in enumerate(statements):
        takers: dict[int, int] = {}
        taken = []
        for row in rows[number]:
            by = owner[type(statement), row]
            if isinstance(statement, Overlap):
                others = (owner.get((kind, row), number) for kind in (Prefetch, Delay, KeepOrder))
                by = next((each for each in others if each != number), number)
            if by == number or isinstance(statement, KeepOrder):
                taken.append(row)
            else:
                takers[by] = takers.get(by, 0) + 1
        found.append(Picked(statement, rows[number], tuple(taken), takers))
    return found
