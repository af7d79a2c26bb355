"""What became of each ``fuse`` and ``collapse`` line: how often it was carried out, and why it was not elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from policylang.language.syntax import Policy
from policylang.planning.edits.data import FusedGroup, Refused, Rewrite, Rewrites
from policylang.report.data import LeftAlone, RewriteReport

_MOST_REASONS = 4
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
            left=()
            if half
            else tuple(LeftAlone(each.collectives, each.reason, each.detail) for each in refused[index]),
        )
        for index, statement in enumerate(policy.rewrites)
        if done[index] or not half
    )


def rewrite_lines(report: RewriteReport) -> list[str]:
    """As a person reads it: what was done, then what was left and why."""
    source = report.source.replace("\\", "/").rsplit("/", 1)[-1]
    where = f" in the {report.half}" if report.half else ""
    lines = [f"{source} {report.text}{where}: {_what(report)}"]
    lines += [f"  {note}" for note in report.notes]
    reasons = Counter(left.reason for left in report.left)
    for reason, count in reasons.most_common(_MOST_REASONS):
        first = next(left for left in report.left if left.reason == reason)
        more = f" and {count - 1} more" if count > 1 else ""
        lines.append(f"  left: {' → '.join(first.collectives)}{more}: {reason}")
    if len(reasons) > _MOST_REASONS:
        rest = sum(reasons.values()) - sum(count for _, count in reasons.most_common(_MOST_REASONS))
        lines.append(f"  left: {rest} more, for {len(reasons) - _MOST_REASONS} other reasons")
    return lines


def _what(report: RewriteReport) -> str:
    if not report.done:
        return "nothing to rewrite" if not report.left else "nothing rewritten"
    fewer = f"{report.gone:,} {'collective' if report.gone == 1 else 'collectives'} fewer"
    how = "proven" if report.proven else "checked"
    return f"{report.done:,} rewritten, {fewer}, each {how} on {report.ranks} ranks"


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
