"""The account of each ``fuse`` and ``collapse`` line: how often it was carried out, and why not elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from policylang.audit.summary.data import LeftAlone, RewriteReport
from policylang.language.syntax import Policy
from policylang.planning.edits.data import FusedGroup, Refused, Rewrite, Rewrites

_ROUNDING = "sums are taken in another order: equal up to rounding, not bitwise"


def rewrite_reports(policy: Policy, rewrites: Rewrites, half: str = "") -> tuple[RewriteReport, ...]:
    """One account a line. ``half``: of which half of a partition; there, lines that did nothing more are left out."""
    done: list[list[Rewrite]] = [[] for _ in policy.rewrites]
    refused: list[list[Refused]] = [[] for _ in policy.rewrites]
    for rewrite in rewrites.done:
        done[rewrite.statement].append(rewrite)
    for left in rewrites.refused:
        refused[left.statement].append(left)
    return tuple(
        RewriteReport(
            source=statement.span.location,
            text=" ".join(statement.span.text.split()),
            half=half,
            done=len(done[index]),
            gone=sum(map(_gone, done[index])),
            ranks=max((rewrite.proof.ranks for rewrite in done[index]), default=0),
            proven=not any(rewrite.proof.assumed for rewrite in done[index]),
            notes=_notes(done[index]),
            left=() if half else _left(refused[index]),
        )
        for index, statement in enumerate(policy.rewrites)
        if done[index] or not half
    )


def _gone(rewrite: Rewrite) -> int:
    dead = frozenset(rewrite.dead)
    made = sum(any(isinstance(value, FusedGroup) for value in node.arguments) for node in rewrite.nodes)
    return sum(name in dead for name in rewrite.collectives) - made


def _left(refused: Sequence[Refused]) -> tuple[LeftAlone, ...]:
    return tuple(LeftAlone(each.collectives, each.reason, each.detail) for each in refused)


def _notes(done: Sequence[Rewrite]) -> tuple[str, ...]:
    """Each once, in the order of their first appearance."""
    said: list[str] = []
    for rewrite in done:
        assumed = rewrite.proof.assumed and f"taken for granted: {rewrite.proof.assumed}"
        said += (rewrite.note, assumed, "" if rewrite.proof.exact else _ROUNDING)
    return tuple(dict.fromkeys(filter(None, said)))
