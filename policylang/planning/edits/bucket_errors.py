"""What is wrong with a ``bucket`` line that puts nothing together: what to write instead depends on why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, diagnose, prefixed
from policylang.language.syntax import Bucket
from policylang.language.wording import counted, figure, first_lines
from policylang.planning import refusals
from policylang.planning.edits.bucketing.buckets import ALONE, LIMITED, OUTSIDE
from policylang.planning.edits.statement_edits import all_refused
from policylang.planning.graph_edit import Refusal

NOTHING_FITS = "APL334"
NONE_ALIKE = "APL335"
NONE_IN_BLOCKS = "APL336"
_MOST_LINES = 8


def nothing_joined(statement: Bucket, refused: Sequence[Refusal], facts: Facts) -> Diagnostic:
    """Of a ``bucket`` line that makes no bucket. ``facts``: of the graph on which the first of them was planned."""
    text, count = statement.span.one_line, counted(len(refused), "collective")
    reasons = {each.reason for each in refused}
    optional = f"where that is as it should be, write `optional {text}`"
    if not refused:
        return diagnose(
            refusals.NOTHING_TO_REWRITE,
            f"`{text}` finds nothing to put together in this graph",
            span=statement.span,
            help=optional,
            mends=[prefixed(statement.span, "optional")],
        )
    if not reasons.isdisjoint(LIMITED) and statement.size is not None:
        sizes = sorted(size for each in refused if (size := _bytes(each, facts)))[:2]
        smallest = " and ".join(figure(size, "bytes") for size in sizes)
        limit = figure(statement.size.value, "bytes")
        return diagnose(
            NOTHING_FITS,
            f"`{text}` puts nothing together: no two of its {count} that can be one fit into {limit}",
            span=statement.span,
            help=f"write a larger size, or leave it out of a line that says `per block`; the smallest take {smallest}",
            details=_listed(refused),
        )
    if reasons == {OUTSIDE}:
        return diagnose(
            NONE_IN_BLOCKS,
            f"`{text}` puts nothing together: none of its {count} belongs to a block",
            span=statement.span,
            help="say with `blocks` which modules are blocks, or write a size in place of them, `up to 256 MiB`",
            details=_listed(refused),
        )
    if reasons <= {ALONE, OUTSIDE}:
        kinds = Counter(each.detail for each in refused if each.reason == ALONE)
        within = "" if statement.blocks is None else " of one stretch of blocks"
        return diagnose(
            NONE_ALIKE,
            f"`{text}` puts nothing together: no two of its {count}{within} are of one kind, dtype and process group",
            span=statement.span,
            help=optional,
            mends=[prefixed(statement.span, "optional")],
            details=first_lines([f"{kind}: {number:,}" for kind, number in kinds.items()], _MOST_LINES),
        )
    return all_refused(statement, refused)


def _bytes(refusal: Refusal, facts: Facts) -> int:
    """Of what a collective is given or gives, whichever is more; 0 of one that an earlier line has made."""
    row = facts.index.get(refusal.collectives[0])
    return 0 if row is None else max(facts.bytes[row], *(facts.bytes[source] for source in facts.inputs[row]), 0)


def _listed(refused: Sequence[Refusal]) -> tuple[str, ...]:
    return first_lines([f"{' → '.join(each.collectives)}: {each.reason}" for each in refused], _MOST_LINES)
