"""The plan of rules that are given as text, by the operators that the graph calls."""

from __future__ import annotations

from policylang.graph.facts import Facts
from policylang.language.resolution.loader import parse_policy
from policylang.language.resolution.operator_names import OperatorTable
from policylang.planning.capabilities import Capabilities
from policylang.planning.plan import Plan
from policylang.planning.planner import plan


def plan_rules(rules: str, facts: Facts, capabilities: Capabilities) -> Plan:
    """Needs no torch. Raises ``ValueError`` for a text that is no policy: rules are written by this room."""
    met = dict.fromkeys(name for name in facts.targets if "." in name)
    loaded = parse_policy(rules, name="tuned.apl", operators=OperatorTable.bundled(met=met))
    if loaded.policy is None:
        raise ValueError("; ".join(each.message for each in loaded.errors))
    return plan(loaded.policy, facts, capabilities)
