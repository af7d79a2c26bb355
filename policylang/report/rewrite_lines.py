"""The report of each line that edits the graph: how often it was carried out, and why it was not elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from policylang.language.syntax import Policy
from policylang.planning.edits.graph_edit import Edit, Edits
from policylang.report.data import LeftAlone, RewriteReport

_MOST_REASONS = 4
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
                text=" ".join(statement.span.text.split()),
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


def _notes(done: Sequence[Edit]) -> tuple[str, ...]:
    """Each once, in the order of their first appearance."""
    said: list[str] = []
    for edit in done:
        assumed = edit.proof.assumed and f"taken for granted: {edit.proof.assumed}"
        said += (edit.note, assumed, "" if edit.proof.exact else _ROUNDING)
    return tuple(dict.fromkeys(filter(None, said)))
