"""What a policy cannot decide otherwise: what is safe, what always holds, and what the user has tagged."""

from __future__ import annotations

from collections.abc import Collection

from policylang.graph.blocks import BlockTable
from policylang.graph.facts import Facts, Flag
from policylang.planning.capabilities import Capabilities
from policylang.planning.checkpoints import around_blocks
from policylang.planning.decisions.decide import routing_owners, user_decisions, why_unsafe

STAYS, MUST_RUN = 1, 2
"""An owner that is not run again, and one that is wherever the backward comes down to it."""


def fixed_owners(
    facts: Facts, capabilities: Capabilities, keep: Collection[int], override: bool, blocks: BlockTable | None
) -> tuple[bytearray, frozenset[int]]:
    """By owner :data:`STAYS`, :data:`MUST_RUN` or 0, and the owners that the user's tags move to the host.

    A path that runs one block at a time knows no tags: the policy's checkpoints take the place of the user's own. It
    decides nothing outside ``blocks``, and nothing of their outputs.
    """
    owners, fixed = facts.owners, bytearray(len(facts))
    by_block = capabilities.block_by_block
    tagged = {} if override or by_block else user_decisions(facts)
    moved: set[int] = set()
    for owner in (*(owners[row] for row in keep), *routing_owners(facts)):
        fixed[owner] = STAYS
    if by_block and blocks is not None:
        around = around_blocks(facts, blocks)
        for row in (*around.outside, *around.block_outputs):
            fixed[owners[row]] = STAYS
    for owner, decision in tagged.items():
        action = decision.action
        assert action is not None
        fixed[owner] = MUST_RUN if action.recomputes else STAYS
        if action.offloads:
            moved.add(owner)
    for row in facts.forward:
        owner = owners[row]
        if facts.flags[owner] & (Flag.SYMBOLIC | Flag.SEED) or (
            owner == row and fixed[row] != STAYS and why_unsafe(facts, row, capabilities) is not None
        ):
            fixed[owner] = STAYS
    return fixed, frozenset(moved)
