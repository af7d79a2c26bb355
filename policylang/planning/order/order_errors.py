"""Errors of scheduling lines on a graph, and their fixes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import assert_never

from attrs import evolve

from policylang.graph.facts import Facts, Flag
from policylang.language.diagnostics import (
    Diagnostic,
    Fix,
    Related,
    Span,
    diagnose,
    prefixed,
    put_before,
    removed,
    written,
)
from policylang.language.shown import counted, first_lines, format_quantity, listed
from policylang.language.syntax import Bucket, Delay, KeepOrder, Overlap, Policy, Prefetch, Scheduling
from policylang.operators.names import is_unknown
from policylang.planning.edits.buckets import LIMITED, NO_OTHER, OUTSIDE_BLOCKS
from policylang.planning.edits.statement_edits import all_refused
from policylang.planning.graph_edit import Edits, Refusal
from policylang.planning.order.moves import Moves
from policylang.planning.order.overlap import TooTight
from policylang.planning.order.segments import Segments
from policylang.planning.order.selected_collectives import SelectedCollectives, WholeStepSelections
from policylang.planning.refusals import MATCHES_NOTHING, NOTHING_TO_REWRITE
from policylang.planning.selection.no_match import (
    glob_span,
    missing_parts,
    naming_blocks,
    numbered_globs,
    other_origin_hint,
    part_counts,
    would_match,
)

NOTHING_FITS = "APL334"
NONE_ALIKE = "APL335"
NONE_IN_BLOCKS = "APL336"
NO_COLLECTIVE = "APL371"
NOTHING_MOVES = "APL373"
TOO_TIGHT = "APL374"
NO_BLOCKS = "APL375"
CROSSED = "APL376"
TAKEN = "APL377"
INSIDE = "APL378"
NONE_IN_GRAPH = "APL379"

_MOST_LINES = 8
_PER = re.compile(r"\s+per\s+(?:\d+\s+)?blocks?$")


class OrderErrors:
    """Those of one policy on one graph, in the order in which they are found."""

    def __init__(self, policy: Policy, traced: Facts, selections: WholeStepSelections) -> None:
        self.found: list[Diagnostic] = []
        self._policy = policy
        self._traced = traced
        self._selections = selections
        self._no_blocks_reported = False

    # --- what is selected ---

    def selection(self, statement: Bucket | Scheduling, rows: Collection[int], others: Sequence[int]) -> bool:
        """Check that a selector denotes collectives, and nothing else."""
        if others:
            self.found.append(self._no_collective(statement, rows, others))
        elif not rows and not statement.optional:
            self.found.append(self._nothing(statement))
        return bool(rows) and not others

    def _no_collective(
        self, statement: Bucket | Scheduling, rows: Collection[int], others: Sequence[int]
    ) -> Diagnostic:
        facts, span, name = self._traced, statement.selector.span, self._traced.names[others[0]]
        if all(_runs_a_graph(facts, row) for row in others):
            return diagnose(
                INSIDE,
                f"`{statement.span.one_line}` picks `{name}`, which runs an inner graph: collectives in "
                "it cannot be moved",
                span,
                help="pick collectives of this graph",
                details=_where(facts, others),
            )
        more = f", nor are {len(others) - 1:,} more" if len(others) > 1 else ""
        return diagnose(
            NO_COLLECTIVE,
            f"`{statement.span.one_line}` is about collectives, and `{name}` is none{more}",
            span,
            help=f"narrow it down: `({span.one_line}) and collective`",
            fixes=_narrowed(statement) if rows else (),
            details=_where(facts, others),
        )

    def _nothing(self, statement: Bucket | Scheduling) -> Diagnostic:
        facts, text, span = self._traced, statement.span.one_line, statement.selector.span
        selections = self._selections.selections(facts)
        inside = Counter(facts.targets[row] for row in range(len(facts)) if _runs_a_graph(facts, row))
        optional = f"if that is as it should be, write `optional {text}`"
        fix = prefixed(statement.span, "optional")
        if inside:
            calls = listed([f"{name} ({count})" for name, count in sorted(inside.items())], _MOST_LINES)
            return diagnose(
                INSIDE,
                f"`{text}` finds no collective in this graph: what communicates inside the graphs that {calls} run "
                "cannot be moved",
                span,
                help=optional,
                fixes=[fix],
                details=part_counts(statement.selector, selections),
            )
        if not any(flag & Flag.COLLECTIVE for flag in facts.flags):
            return diagnose(
                NONE_IN_GRAPH,
                f"`{text}` orders collectives, and this graph has none",
                statement.span,
                help=f"trace the step as one of several ranks runs it; {optional}",
                fixes=[fix],
            )
        found = diagnose(
            MATCHES_NOTHING,
            f"`{text}` matches nothing in this graph",
            span,
            help=other_origin_hint(statement.selector, selections) + optional,
            fixes=[*would_match(statement.selector, selections), fix],
            details=part_counts(statement.selector, selections),
        )
        include = self._policy.included_by(statement.span)
        return evolve(found, cause=missing_parts(statement.selector, selections), include=include)

    def bucket(self, number: int, statement: Bucket, edits: Edits, kept: Mapping[int, KeepOrder]) -> None:
        """A bucket that selects what it must not, what a line keeps in order, or that joins nothing."""
        rows, others = self._selections.collectives(self._traced, statement.selector)
        if not self.selection(statement, rows, others):
            return
        mine = edits.of(number)
        if (held := next((row for row in rows if row in kept), None)) is not None:
            self.found.append(_crossed(statement, kept[held], f"`{self._traced.names[held]}` is in both"))
        elif statement.optional:
            return
        elif statement.blocks is not None and not _has_blocks(self._selections.segments(self._traced)):
            self._no_blocks(statement, "joins collectives by blocks")
        elif not mine.done:
            self.found.append(_nothing_joined(statement, mine.refused, self._traced))

    # --- what is moved ---

    def moves(self, selected: Sequence[SelectedCollectives], found: Moves, segments: Segments, facts: Facts) -> None:
        """Lines that move nothing, because others move all they select, there are no blocks, or everything stays; and
        lines that ask for opposite orders."""
        for number, each in enumerate(selected):
            statement = each.statement
            if not each.rows or statement.optional:
                continue
            if not each.taken:
                self.found.append(self._taken(statement, each))
                continue
            match statement:
                case KeepOrder() | Overlap():
                    pass
                case Prefetch() | Delay():
                    self._moves_blocks(number, statement, each, found, segments, facts)
                case _:
                    assert_never(statement)
        self._kept(selected, found, facts)
        pairs: dict[tuple[int, int], tuple[int, int]] = {}
        for one, other in found.crossed:
            pairs.setdefault((one.statement, other.statement), (one.row, other.row))
        for (ahead, delayed), (needing, needed) in pairs.items():
            line = selected[delayed]
            # A delay that moves others reports why those that prefetched collectives need stay.
            if not line.statement.optional and len(found.left[delayed]) == len(line.taken):
                why = f"`{facts.names[needing]}` needs what `{facts.names[needed]}` brings"
                self.found.append(_crossed(selected[ahead].statement, line.statement, why))

    def _moves_blocks(
        self,
        number: int,
        statement: Prefetch | Delay,
        selected: SelectedCollectives,
        found: Moves,
        segments: Segments,
        facts: Facts,
    ) -> None:
        most = max(Counter(segments.direction).values(), default=0)
        left = found.left.get(number, {})
        opposed = found.behind_kept.get(number) or any(request.statement == number for _, request in found.crossed)
        if not _has_blocks(segments):
            self._no_blocks(statement, "counts blocks")
        elif statement.blocks >= most:
            self.found.append(
                diagnose(
                    NO_BLOCKS,
                    f"`{statement.span.one_line}` counts {counted(statement.blocks, 'block')}, and neither direction "
                    f"of this graph has more than {most:,}",
                    statement.span,
                    help=f"count fewer, or write `optional {statement.span.one_line}`",
                    fixes=[prefixed(statement.span, "optional")],
                )
            )
        elif len(left) == len(selected.taken) and not opposed:
            self.found.append(_nothing_moves(statement, left, facts))

    def _kept(self, selected: Sequence[SelectedCollectives], found: Moves, facts: Facts) -> None:
        """Lines that move what another keeps in order, or that move nothing because of it."""
        keepers = {
            row: each.statement
            for each in reversed(selected)
            for row in each.rows
            if isinstance(each.statement, KeepOrder)
        }
        for number, behind in found.behind_kept.items():
            each = selected[number]
            row = next((row for row, keeper in behind.items() if row == keeper), None)
            if row is not None:
                why = f"`{facts.names[row]}` is in both"
            elif each.statement.optional or len(found.left[number]) < len(each.taken):
                continue
            else:
                row = next(iter(behind))
                why = f"`{facts.names[row]}` would have to cross `{facts.names[behind[row]]}`"
            self.found.append(_crossed(each.statement, keepers[behind[row]], why))

    def limits(self, too_tight: Iterable[TooTight]) -> None:
        for each in too_tight:
            asked = format_quantity(float(each.limit.value), each.limit.dimension)
            which = f"{asked} in flight" if each.limit is each.statement.in_flight else f"{asked} of the peak"
            least = "no limit of its kind is enough, so leave it out"
            if each.least is not None:
                least = f"the smallest limit with which something moves is {format_quantity(each.least, 'bytes')}"
            message = f"`{each.statement.span.one_line}` moves nothing within {which}"
            self.found.append(diagnose(TOO_TIGHT, message, each.limit.span, help=least))

    # --- blocks ---

    def _no_blocks(self, statement: Bucket | Scheduling, what: str) -> None:
        if self._no_blocks_reported:
            return
        self._no_blocks_reported = True
        named = self._policy.blocks
        glob = "layers.*" if named is None else named.glob
        globs = numbered_globs(glob, self._traced)
        if named is None:
            fixes = tuple(put_before(statement.span, f"blocks {each}") for each in globs)
        else:
            fixes = written(glob_span(named.glob, named.span), globs, near=True)
        self.found.append(
            diagnose(
                NO_BLOCKS,
                f"`{statement.span.one_line}` {what}, and no blocks were found in this graph",
                statement.span,
                help=naming_blocks(self._traced, glob),
                fixes=fixes,
            )
        )

    def _taken(self, statement: Scheduling, selected: SelectedCollectives) -> Diagnostic:
        lines = [(self._policy.scheduling[by], count) for by, count in selected.takers.items()]
        which = "the only collective" if len(selected.rows) == 1 else f"all {len(selected.rows):,} collectives"
        return diagnose(
            TAKEN,
            f"`{statement.span.one_line}` moves nothing: other lines override it for {which} it picks",
            statement.span,
            help="remove it, or let its selector pick others as well",
            fixes=[removed(statement.span)],
            related=tuple(Related(f"`{line.span.one_line}` moves {count}", line.span) for line, count in lines),
        )


def _nothing_joined(statement: Bucket, refused: Sequence[Refusal], facts: Facts) -> Diagnostic:
    """A ``bucket`` line that makes no bucket. ``facts``: of the graph on which the first bucket line was planned."""
    text, span, count = statement.span.one_line, statement.span, counted(len(refused), "collective")
    reasons = {each.reason for each in refused}
    optional = f"where that is as it should be, write `optional {text}`"
    each_refused = first_lines([f"{' → '.join(each.collectives)}: {each.reason}" for each in refused], _MOST_LINES)
    if not refused:
        message = f"`{text}` finds nothing to join in this graph"
        return diagnose(NOTHING_TO_REWRITE, message, span, help=optional, fixes=[prefixed(statement.span, "optional")])
    if not reasons.isdisjoint(LIMITED) and statement.size is not None:
        rows = [facts.index.get(each.collectives[0]) for each in refused]  # None for one that an earlier line has made
        larger = (max(facts.bytes[each] for each in (row, *facts.inputs[row])) for row in rows if row is not None)
        sizes = sorted(size for size in larger if size > 0)[:2]
        smallest = " and ".join(format_quantity(size, "bytes") for size in sizes)
        limit = format_quantity(statement.size.value, "bytes")
        return diagnose(
            NOTHING_FITS,
            f"`{text}` joins nothing: no two of its {count} that can be one fit into {limit}",
            span,
            help=f"write a larger size, or leave it out of a line with `per block`; the smallest take {smallest}",
            details=each_refused,
        )
    if reasons == {OUTSIDE_BLOCKS}:
        return diagnose(
            NONE_IN_BLOCKS,
            f"`{text}` joins nothing: none of its {count} belongs to a block",
            span,
            help="name the blocks with a `blocks` line, or write a size instead, `up to 256 MiB`",
            details=each_refused,
        )
    if reasons <= {NO_OTHER, OUTSIDE_BLOCKS}:
        kinds = Counter(each.detail for each in refused if each.reason == NO_OTHER)
        within = "" if statement.blocks is None else " of one stretch of blocks"
        return diagnose(
            NONE_ALIKE,
            f"`{text}` joins nothing: no two of its {count}{within} are of one kind, dtype and process group",
            span,
            help=optional,
            fixes=[prefixed(statement.span, "optional")],
            details=first_lines([f"{kind}: {number:,}" for kind, number in kinds.items()], _MOST_LINES),
        )
    return all_refused(statement, refused)


def _nothing_moves(statement: Scheduling, left: dict[int, str], facts: Facts) -> Diagnostic:
    rows = sorted(left)
    first = f"`{facts.names[rows[0]]}`" if len(rows) == 1 else f"`{facts.names[rows[0]]}` first"
    return diagnose(
        NOTHING_MOVES,
        f"`{statement.span.one_line}` moves none of {counted(len(rows), 'collective')}, {first}: {left[rows[0]]}",
        statement.span,
        help=f"leave it out, or write `optional {statement.span.one_line}`",
        fixes=[removed(statement.span), prefixed(statement.span, "optional")],
        details=first_lines([f"{facts.names[row]}: {left[row]}" for row in rows], _MOST_LINES),
    )


def _crossed(one: Bucket | Scheduling, other: Scheduling, why: str) -> Diagnostic:
    return diagnose(
        CROSSED,
        f"`{one.span.one_line}` and `{other.span.one_line}` ask for opposite orders: {why}",
        one.span,
        help="take the collective out of one of them",
        related=(Related(f"`{other.span.one_line}` is the other", other.span),),
    )


def _narrowed(statement: Bucket | Scheduling) -> tuple[Fix, ...]:
    """The fix that leaves the collectives of a selector; a `per` behind it is the line's own."""
    span = statement.selector.span
    own = _PER.search(span.text) if isinstance(statement, Bucket) and statement.blocks is not None else None
    end = span.end if own is None else span.start + own.start()
    text = span.source.text[span.start : end]
    return written(Span(span.source, span.start, end), [f"(({text}) and collective)"])


def _has_blocks(segments: Segments) -> bool:
    return any(block >= 0 for block in segments.block)


def _runs_a_graph(facts: Facts, row: int) -> bool:
    target = facts.targets[row]
    return target.startswith("higher_order.") and is_unknown(target, 0)


def _where(facts: Facts, rows: Sequence[int]) -> tuple[str, ...]:
    return first_lines([f"{facts.names[row]} ({facts.targets[row]})" for row in rows], _MOST_LINES)
