"""What may wait on the host between forward and backward, and how much of it is copied while the device computes."""

from __future__ import annotations

from collections.abc import Mapping

from policylang.graph.facts import Facts, Flag, Phase, storage_roots
from policylang.language.syntax import Action, Policy
from policylang.planning.decisions.decide import user_decisions
from policylang.planning.decisions.offloading import resolve_offloads
from policylang.planning.liveness import SavedForBackward
from policylang.planning.value_outcome import Decision, Why, offloads
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
    resolve_offloads(_NO_RULES, facts, decisions, SavedForBackward.of(saved=staying, offloaded=moving))
    needing_more = {roots[row] for row in choices.asked if _needs_more(choices, choices.same_as[row])}
    found = {roots[row]: row for row in facts.forward if offloads(decisions[row])}
    return {root: row for root, row in found.items() if root not in needing_more}


def _needs_more(choices: Choices, row: int) -> bool:
    """Whether a view is made again of what is copied and of something else, which would have to be kept for that."""
    facts = choices.facts
    if storage_roots(facts)[row] == row:
        return False
    others = (each for each in facts.inputs[row][1:] if facts.forward_mask[each])
    return any(not facts.flags[each] & Flag.SYMBOLIC for each in others)


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
    far as there is room. The pieces of an operator share its decision, and go together."""
    together: dict[int, list[int]] = {}
    for root, row in kept.items():
        together.setdefault(facts.owners[row], []).append(root)
    sizes = {owner: sum(facts.bytes[kept[root]] for root in roots) for owner, roots in together.items()}
    taken: dict[int, int] = {}
    for owner in sorted(together, key=lambda owner: (-sizes[owner], owner)):
        if sizes[owner] <= room:
            room -= sizes[owner]
            taken.update((root, kept[root]) for root in together[owner])
    return taken
