"""What the bundled policies come to on a graph: points to hold a tuned policy against."""

from __future__ import annotations

from collections.abc import Callable

from policylang.graph.facts import Facts
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import is_error
from policylang.language.files import bundled_names
from policylang.language.loader import load_policy
from policylang.language.operators import OperatorTable
from policylang.planning.capabilities import Capabilities
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.planner import plan
from policylang.simulation.node_times import node_times
from policylang.tuning.evaluation import candidate_of
from policylang.tuning.trade_off import Candidate


def bundled_candidates(
    facts: Facts, device: DeviceProfile, capabilities: Capabilities, progress: Callable[[str], None] | None = None
) -> tuple[tuple[str, Candidate], ...]:
    """Each that fits the graph, by name. What a policy leaves to PyTorch's partitioner counts as saved."""
    times = node_times(facts, device)
    operators = OperatorTable.bundled(met=dict.fromkeys(name for name in facts.targets if "." in name))
    found = []
    for name in bundled_names():
        if progress is not None:
            progress(f"planning {name}")
        loaded = load_policy(name, operators=operators)
        made = None if loaded.policy is None else plan(loaded.policy, facts, capabilities, device=device)
        if made is None or not made.rules or any(map(is_error, made.diagnostics)) or made.edits.done:
            continue  # of an edited graph the times are not those of this one
        rules = "\n".join(outcome.rule.text for outcome in made.rules)
        found.append((name, candidate_of(rules, made, saved_and_recomputed(made), times)))
    return tuple(found)
