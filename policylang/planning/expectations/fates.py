"""Expectations about the fate of a set of nodes: ``expect every S recomputed``, ``expect no S saved``."""

from __future__ import annotations

from collections.abc import Sequence

from policylang.graph.facts import Facts
from policylang.graph.rowsets import mask_of
from policylang.language.syntax import ExpectFate
from policylang.language.wording import counted, first_lines
from policylang.planning.expectations.totals import LEFT_OPEN, Finding
from policylang.planning.liveness import Needs
from policylang.planning.value_decision import Decision, Why

_MOST_NAMES = 8
_UNDECIDED = "left to the partitioner"


class Fates:
    """The fate of each value: by what the backward needs of its group, else by what was decided for it.

    A group (an operator with its ``getitem`` nodes, a collective with its ``wait_tensor``) has one fate: a collective
    is saved when its ``wait_tensor`` is.
    """

    def __init__(self, facts: Facts, decisions: Sequence[Decision | None], needs: Needs) -> None:
        self._facts = facts
        self._decisions = decisions
        views: dict[bool, list[int]] = {False: [], True: []}  # whether a row is rebuilt from an offloaded value
        for row in needs.recomputed:
            decision = decisions[row]
            views[decision is not None and decision.why is Why.REBUILT].append(row)
        kinds = {
            "recomputed": views[False],
            "offloaded": (*needs.offloaded, *views[True]),
            "saved": (*needs.saved, *needs.symbolic),
            _UNDECIDED: needs.undecided,
        }
        owners = facts.owners
        self._needed = {fate: mask_of((owners[row] for row in rows), len(facts)) for fate, rows in kinds.items()}
        self._contingent = mask_of((owners[row] for row in needs.contingent), len(facts))

    def really(self, row: int) -> str | None:
        """``saved``, ``recomputed``, ``offloaded`` or left open; None for a value that the backward does not need."""
        owner = self._facts.owners[row]
        for fate, mask in self._needed.items():
            if mask[owner]:
                return fate
        return _UNDECIDED if self._contingent[owner] else None

    def decided(self, row: int) -> str:
        """The same, where a value that the backward does not (for sure) need has the fate that was decided for it."""
        fate = self.really(row)
        if fate is not None and not (fate == _UNDECIDED and self._contingent[self._facts.owners[row]]):
            return fate
        decision = self._decisions[self._facts.owners[row]]
        action = None if decision is None else decision.action
        if action is None:
            return _UNDECIDED if fate == _UNDECIDED else "not needed by the backward"
        return "recomputed" if action.recomputes else "offloaded" if action.offloads else "saved"


def check_fate(expectation: ExpectFate, rows: Sequence[int], fates: Fates, facts: Facts) -> Finding:
    """``every`` goes by what was decided where the backward needs no such value, ``no`` by what really happens."""
    every, wanted, nodes = expectation.quantifier == "every", expectation.fate, counted(len(rows), "node")
    found = [(row, fates.decided(row) if every else fates.really(row)) for row in rows]
    if every:
        wrong = [f"{facts.names[row]} is {fate}" for row, fate in found if fate not in (wanted, _UNDECIDED)]
    else:
        wrong = [facts.names[row] for row, fate in found if fate == wanted]
    if wrong:
        not_so = f"not {wanted}" if every else wanted
        return Finding("failed", f"{len(wrong):,} of {nodes} {not_so}", first_lines(wrong, _MOST_NAMES))
    if any(fate == _UNDECIDED for _, fate in found):
        return LEFT_OPEN
    return Finding("held", f"{'all' if every else 'none of'} {nodes} {wanted}")
