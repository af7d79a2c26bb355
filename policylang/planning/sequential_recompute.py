"""The saved and recomputed values of a block that a checkpoint runs again as a whole, operator by operator, in eager.

Nothing is left out on the way: what is not saved runs, whether or not the backward asks for its value, up to the last
operator that leaves something for the backward. What a rule saves is therefore kept wherever a second run would reach
it, and nowhere else: behind that point no one reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import evolve

from policylang.graph.facts import Facts, Flag
from policylang.graph.storage import storage_roots
from policylang.planning.liveness import Needs, may_be_kept
from policylang.planning.value_decision import Decision, is_open, recomputes

_NOTHING: Mapping[int, int] = {}


def needs_when_rerun(
    facts: Facts,
    decisions: Sequence[Decision | None],
    reach: int,
    unchanged: Collection[int] = (),
    inner: Mapping[int, int] = _NOTHING,
) -> Needs:
    """``reach``: the first row that a second run does not reach; ``unchanged``: those that give their argument as it
    is, and have nothing of their own to keep; ``inner``: those that run inside an operator, and that operator's row.

    What runs inside an operator runs again with it, and is not held by itself: where the operator is saved, it is in
    neither list. A saved view is kept with the memory it looks into; a view of an input costs nothing and is simply
    taken again.
    """
    roots = storage_roots(facts)
    saved: dict[int, None] = {}
    recomputed: list[int] = []
    for row in facts.forward:
        if row >= reach:
            break
        decision = decisions[inner.get(row, row)]
        again = decision is None or is_open(decision) or recomputes(decision)
        if row in inner and not again:
            continue
        if again or (row in unchanged and roots[row] not in saved):
            recomputed.append(row)
        elif facts.ops[roots[row]] == "call_function" and may_be_kept(facts, row):
            saved[row] = None
    return Needs(saved=tuple(saved), recomputed=tuple(recomputed))


def kept_rows(facts: Facts, needs: Needs) -> frozenset[int]:
    """Of the saved rows, those whose value has to be held: not the views of another saved value, which are taken again.

    A row that writes in place belongs to its memory's first row, and is held with it.
    """
    roots = storage_roots(facts)
    saved = frozenset(needs.saved)
    return frozenset(
        row for row in needs.saved if roots[row] == row or roots[row] not in saved or not facts.flags[row] & Flag.VIEW
    )


def with_returned(needs: Needs, facts: Facts) -> Needs:
    """With what the block returns, which the next one's checkpoint holds as its input."""
    returned = tuple(row for row in facts.forward if facts.flags[row] & Flag.FORWARD_OUTPUT)
    return evolve(needs, saved=(*needs.saved, *returned))
