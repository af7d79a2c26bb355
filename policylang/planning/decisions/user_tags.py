"""Decisions of the user's own ``torch.utils.checkpoint``, from the tags that it leaves on nodes."""

from __future__ import annotations

from policylang.graph.facts import Facts, Flag
from policylang.language.syntax import Action
from policylang.planning.value_outcome import Decision, Why

_ACTIONS = {action.value: action for action in Action if action is not Action.LEAVE}


def user_decisions(facts: Facts) -> dict[int, Decision]:
    """Owner to what the user's checkpoint says of it, in graph order.

    At the border of two regions torch saves: a value tagged for recomputation that a later region reads to recompute
    its own is the later region's input (``cleanup_recompute_tags`` of torch's partitioners). So does a region's result
    with a backward hook: FSDP's hook gathers the weights that computing the result again would need, and runs only
    when the gradient that depends on the result is there.
    """
    actions = _tagged_owners(facts)
    kept = {action: Decision(action, None, Why.USER, "tagged by the user's checkpoint") for action in Action}
    border = Decision(Action.SAVE, None, Why.USER, "the user's next checkpoint region reads it")
    hooked = Decision(Action.SAVE, None, Why.USER, "a backward hook waits for its gradient")
    result: dict[int, Decision] = {}
    on_border = _border(facts, actions)
    for owner, action in actions.items():
        if facts.flags[owner] & (Flag.SYMBOLIC | Flag.SEED):
            continue  # sizes and seeds are saved, whoever says otherwise
        if owner in on_border:
            result[owner] = border
        else:
            result[owner] = hooked if action.recomputes and _is_hooked_result(facts, actions, owner) else kept[action]
    return result


def _tagged_owners(facts: Facts) -> dict[int, Action]:
    """A tag on any member of a group counts; the owner's own goes before its followers'."""
    actions: dict[int, Action] = {}
    tags, owners = facts.user_tags, facts.owners
    for row in facts.forward:
        tag = tags[row]
        action = None if tag is None else _ACTIONS.get(tag)
        if action is not None:
            actions.setdefault(owners[row], action)
    return dict(sorted(actions.items()))


def _is_hooked_result(facts: Facts, actions: dict[int, Action], owner: int) -> bool:
    """Whether it has a backward hook and no reader of it is recomputed by the user's checkpoint."""
    for row in (owner, *facts.followers.get(owner, ())):
        if facts.flags[row] & Flag.BACKWARD_HOOK:
            readers = (actions.get(facts.owners[user]) for user in facts.users[row])
            return not any(reader is not None and reader.recomputes for reader in readers)
    return False


def _border(facts: Facts, actions: dict[int, Action]) -> set[int]:
    owners, regions = facts.owners, facts.ac_regions
    border: set[int] = set()
    for row in facts.forward:
        reader = actions.get(owners[row])
        region = regions[row]
        if reader is None or not reader.recomputes or region is None:
            continue
        for source in facts.inputs[row]:
            source_region = regions[source]
            action = actions.get(owners[source])
            if action is not None and action.recomputes and source_region is not None and source_region < region:
                border.add(owners[source])
    return border
