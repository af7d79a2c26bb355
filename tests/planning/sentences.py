"""Plans of a policy's text on a graph by hand, and what is read off them."""

from __future__ import annotations

from collections.abc import Iterable

import policylang
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic
from policylang.planning.capabilities import Capabilities
from policylang.planning.plan import Plan
from policylang.planning.planner import plan

PATH = "the joint-graph partitioner"
JOINT = Capabilities(PATH, replays_random=True, undecided="auto")


def planned(facts: Facts, rules: str, capabilities: Capabilities = JOINT) -> Plan:
    return plan(policylang.parse(rules), facts, capabilities)


def actions(made: Plan) -> dict[str, str]:
    """Node name to what was decided, ``save``, ``recompute``, ``auto``, for every forward value."""
    return {
        made.facts.names[row]: "auto" if decision.action is None else decision.action.name.lower()
        for row, decision in enumerate(made.decisions)
        if decision is not None
    }


def only(found: tuple[Diagnostic, ...], code: str) -> Diagnostic:
    """The one diagnostic of a plan, which must have this code."""
    assert [diagnostic.code for diagnostic in found] == [code], [diagnostic.message for diagnostic in found]
    return found[0]


def names(facts: Facts, rows: Iterable[int]) -> list[str]:
    return [facts.names[row] for row in rows]
