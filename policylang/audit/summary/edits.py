"""The account of each ``fuse`` and ``collapse`` line: how often it was carried out, and why not elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from policylang.audit.summary.data import LeftAlone, RewriteReport
from policylang.language.syntax import Policy
from policylang.planning.graph_edit import Edit, Edits

_ROUNDING = "sums are taken in another order: equal up to rounding, not bitwise"


def rewrite_reports(policy: Policy, edits: Edits, half: str = "") -> tuple[RewriteReport, ...]:
    """One account a line. ``half``: of which half of a partition; there, lines that did nothing more are left out."""
    found = []
    for index, statement in enumerate(policy.rewrites):
        mine = edits.of(index)
        if half and not mine.done:
            continue
        left = () if half else mine.refused
        found.append(
            RewriteReport(
                source=statement.span.location,
                text=statement.span.one_line,
                half=half,
                done=len(mine.done),
                gone=sum(edit.fewer_collectives for edit in mine.done),
                ranks=max((edit.proof.ranks for edit in mine.done), default=0),
                proven=not any(edit.proof.assumed for edit in mine.done),
                notes=_notes(mine.done),
                left=tuple(LeftAlone(each.collectives, each.reason, each.detail) for each in left),
            )
        )
    return tuple(found)


def _notes(done: Sequence[Edit]) -> tuple[str, ...]:
    """Each once, in the order of their first appearance."""
    said: list[str] = []
    for edit in done:
        assumed = edit.proof.assumed and f"taken for granted: {edit.proof.assumed}"
        said += (edit.note, assumed, "" if edit.proof.exact else _ROUNDING)
    return tuple(dict.fromkeys(filter(None, said)))
