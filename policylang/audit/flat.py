"""Audits a rematerialised flat graph: forward and backward in one.

Which nodes are second runs stands on them; everything else is followed through edges and positions.
"""

from __future__ import annotations

from attrs import evolve
from torch import fx

from policylang.audit.against_plan import (
    OFFLOADED_UNPLANNED,
    Expected,
    Wording,
    moves_otherwise,
    reads_otherwise,
    runs_otherwise,
    summary,
)
from policylang.audit.graph_reader import read
from policylang.audit.outcome import Audit
from policylang.graph.facts import Phase, storage_roots
from policylang.planning.plan import Plan
from policylang.planning.value_decision import offloads, recomputes, saves

_WORDING = Wording(
    "{node} {found}, which is not what was planned",
    "another pass changed the graph, or this is a bug in policylang",
    {OFFLOADED_UNPLANNED: "{node} was offloaded, which is not what was planned"},
)


def audit_flat(plan: Plan, graph: fx.Graph) -> Audit:
    """Compare a rematerialised flat graph with the plan it was made for. Differences are returned, not raised.

    A value crosses where a backward node, or a copy, reads the forward's own, and is then saved; except that one
    decided ``recompute`` may be read as it is where a later part of the forward, or the caller, holds it anyway.
    A value that a backward node reads through its copies to the host and back is offloaded.
    """
    facts, decisions, roots = plan.facts, plan.decisions, storage_roots(plan.facts)
    found = read(facts, graph)
    again = {row for row in facts.forward if recomputes(decisions[row])}

    def is_kept(row: int) -> bool:
        return row not in again or found.held.get(roots[row], -1) <= found.crossing[row]

    saved = list(filter(is_kept, found.saved))
    on_host = {copy.row: copy for copy in found.copies if copy.fetched}
    planned = {row: copy for row, copy in on_host.items() if row >= 0 and offloads(decisions[row])}
    expected = Expected(
        may_save={row for row in facts.forward if row not in again and not offloads(decisions[row])},
        must_save={row for row in facts.forward if _saves(plan, row) and row not in on_host},
        may_recompute=again,
    )
    unplanned = (copy.value for row, copy in on_host.items() if row not in planned)
    differences = (
        *runs_otherwise(_WORDING, plan, expected, saved, found),
        *reads_otherwise(_WORDING, found),
        *moves_otherwise(_WORDING, plan, evolve(found, saved=saved), planned, unplanned),
    )
    return summary(
        plan,
        found,
        differences,
        saved=saved,
        offloaded=sorted(row for row in on_host if row >= 0),
    )


def _saves(plan: Plan, row: int) -> bool:
    """Whether a value is decided to be saved, and the backward of the plan reads it."""
    facts = plan.facts
    return saves(plan.decisions[row]) and any(facts.phases[user] == Phase.BACKWARD for user in facts.users[row])
