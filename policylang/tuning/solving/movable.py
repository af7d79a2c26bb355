"""What may wait on the host between forward and backward, and how much of it is copied while the device computes."""

from __future__ import annotations

from collections.abc import Mapping

from policylang.graph.facts import Facts, Flag, Phase
from policylang.graph.storage import storage_roots
from policylang.language.syntax import Action, Policy
from policylang.planning.decisions.offloading import resolve_offloads
from policylang.planning.decisions.user_tags import user_decisions
from policylang.planning.liveness import Needs
from policylang.planning.value_decision import Decision, Why, offloads
from policylang.simulation.node_times import NodeTimes
from policylang.tuning.solving.choices import Choices

_OFFLOAD = Decision(Action.OFFLOAD, None, Why.RULE)
_RECOMPUTE = Decision(Action.RECOMPUTE, None, Why.RULE)
_SAVE = Decision(Action.SAVE, None, Why.ALWAYS)
_NO_RULES = Policy("tuned", {}, None, (), None, (), ())


def movable_memory(choices: Choices, *, override: bool) -> dict[int, int]:
    """The memory that planning would move where all that may be needed is offloaded: by the row that allocated it, the
    row that is copied."""
    facts, roots = choices.facts, storage_roots(choices.facts)
    tagged = {} if override else user_decisions(facts)
    decisions: list[Decision | None] = [None] * len(facts)
    for row in facts.forward:
        decisions[row] = _RECOMPUTE
    for row in choices.asked:
        owner = facts.owners[row]
        always = facts.flags[owner] & (Flag.SYMBOLIC | Flag.SEED)
        decisions[row] = _SAVE if always else tagged.get(owner, _OFFLOAD)
    moving = tuple(row for row in choices.asked if offloads(decisions[row]))
    staying = tuple(row for row in choices.asked if not offloads(decisions[row]))
    resolve_offloads(_NO_RULES, facts, decisions, Needs(saved=staying, offloaded=moving))
    return {roots[row]: row for row in facts.forward if offloads(decisions[row])}


def hidden_bytes(facts: Facts, times: NodeTimes) -> int:
    """What can be copied each way while the device computes: to the host during the forward, back during the backward.
    Second runs are left out."""
    computes = [0.0, 0.0]
    for row, phase in enumerate(facts.phases):
        if phase in (Phase.FORWARD, Phase.BACKWARD) and not facts.flags[row] & Flag.COLLECTIVE:
            computes[phase == Phase.BACKWARD] += times.seconds[row]
    return int(min(computes) * (times.device.host_bandwidth or 0.0))


def most_moved(facts: Facts, kept: Mapping[int, int], room: int) -> dict[int, int]:
    """Of some memory, each with the row that is copied, what is moved: the largest and of equals the earliest first, as
    far as there is room."""
    taken: dict[int, int] = {}
    for root, row in sorted(kept.items(), key=lambda each: (-facts.bytes[each[1]], each)):
        if facts.bytes[row] <= room:
            room -= facts.bytes[row]
            taken[root] = row
    return taken
