"""``expect every S recomputed``, ``expect no S saved``: what became of the nodes of a set."""

from __future__ import annotations

from collections.abc import Sequence

from policylang.graph.facts import Facts
from policylang.graph.rowsets import mask_of
from policylang.language.syntax import ExpectFate
from policylang.planning.decision import Decision, Why
from policylang.planning.expectations.totals import Finding
from policylang.planning.liveness import Needs

_MOST_NAMES = 8
_UNDECIDED = "left to the partitioner"


class Fates:
    """What becomes of each value: by what the backward needs of its group, else by what was decided for it.

    A group (an operator with its ``getitem`` nodes, a collective with its ``wait_tensor``) has one fate: a collective
    is saved when its ``wait_tensor`` is.
    """

    def __init__(self, facts: Facts, decisions: Sequence[Decision | None], needs: Needs) -> None:
        self._facts = facts
        self._decisions = decisions
        rebuilt = [row for row in needs.recomputed if _is_rebuilt(decisions[row])]
        again = frozenset(rebuilt)
        kinds = {
            "recomputed": [row for row in needs.recomputed if row not in again],
            "offloaded": (*needs.offloaded, *rebuilt),
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


def _is_rebuilt(decision: Decision | None) -> bool:
    """A view of an offloaded value: what it looks into was moved."""
    return decision is not None and decision.why is Why.REBUILT


def check_fate(expectation: ExpectFate, rows: Sequence[int], fates: Fates, facts: Facts) -> Finding:
    """``every`` goes by what was decided where the backward needs no such value, ``no`` by what really happens."""
    if expectation.quantifier == "no":
        return _check_none(expectation.fate, rows, fates, facts)
    wrong: list[str] = []
    open_ = False
    for row in rows:
        fate = fates.decided(row)
        if fate == _UNDECIDED:
            open_ = True
        elif fate != expectation.fate:
            wrong.append(f"{facts.names[row]} is {fate}")
    if wrong:
        return Finding("failed", f"{len(wrong)} of {_nodes(len(rows))} not {expectation.fate}", _listed(wrong))
    if open_:
        return Finding("deferred", "it depends on values that are left to PyTorch's partitioner")
    return Finding("held", f"all {_nodes(len(rows))} {expectation.fate}")


def _check_none(wanted: str, rows: Sequence[int], fates: Fates, facts: Facts) -> Finding:
    fate_of = [fates.really(row) for row in rows]
    wrong = [facts.names[row] for row, fate in zip(rows, fate_of, strict=True) if fate == wanted]
    if wrong:
        return Finding("failed", f"{len(wrong)} of {_nodes(len(rows))} {wanted}", _listed(wrong))
    if _UNDECIDED in fate_of:
        return Finding("deferred", "it depends on values that are left to PyTorch's partitioner")
    return Finding("held", f"none of {_nodes(len(rows))} {wanted}")


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _listed(lines: list[str]) -> tuple[str, ...]:
    if len(lines) <= _MOST_NAMES:
        return tuple(lines)
    return (*lines[: _MOST_NAMES - 1], f"… and {len(lines) - _MOST_NAMES + 1} more")
