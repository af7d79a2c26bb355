"""Plans the scheduling lines of a policy, buckets, then prefetch and delay, then overlap; and reports their errors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import assert_never

from attrs import evolve

from policylang.graph.blocks import BlockTable, blocks_of
from policylang.graph.facts import Facts, Flag, Schedule, StepKind
from policylang.language import diagnostics
from policylang.language.cancellation import check_cancelled
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.globs import PathGlob
from policylang.language.shown import counted, first_lines, format_quantity, listed
from policylang.language.syntax import Bucket, Delay, KeepOrder, NarrowForm, Overlap, Policy, Prefetch, Scheduling
from policylang.operators.names import is_unknown
from policylang.planning import refusals
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.buckets import LIMITED, NO_OTHER, OUTSIDE_BLOCKS
from policylang.planning.edits.other_ranks import Ranks
from policylang.planning.edits.statement_edits import all_refused, plan_edits
from policylang.planning.graph_edit import Edits, Refusal
from policylang.planning.order import moves
from policylang.planning.order.dependencies import ComputeProgress, Segments, dependencies, held_rows, unknown_operators
from policylang.planning.order.moves import MoveRequest, Moves, SelectedCollectives, WholeStepSelections
from policylang.planning.order.overlap import OverlapLines, TooTight
from policylang.planning.order.rematerialised import RematerialisedGraph, rematerialised
from policylang.planning.plan import OrderPlan, SchedulingOutcome
from policylang.planning.refusals import MATCHES_NOTHING, NO_BLOCKS, NOTHING_TO_REWRITE
from policylang.planning.schedule import Ahead, with_host_copies
from policylang.planning.selection import no_match
from policylang.simulation.memory import estimate_peak
from policylang.simulation.node_times import node_times

NOTHING_FITS = "APL334"
NONE_ALIKE = "APL335"
NONE_IN_BLOCKS = "APL336"
NO_COLLECTIVE = "APL371"
NOTHING_MOVES = "APL373"
TOO_TIGHT = "APL374"
CROSSED = "APL376"
TAKEN = "APL377"
INSIDE = "APL378"
NONE_IN_GRAPH = "APL379"

_MOST_LINES = 8
_PER = re.compile(r"\s+per\s+(?:\d+\s+)?blocks?$")


class OrderErrors:
    """The errors of one policy's scheduling lines on one graph, in the order in which they are found."""

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
            message = (
                f"`{statement.span.one_line}` selects `{name}`, which runs an inner graph: collectives in "
                "it cannot be moved"
            )
            help = "select collectives of this graph"
            return diagnose(INSIDE, message, span, help=help, details=_where(facts, others))
        more = f", nor are {len(others) - 1:,} more" if len(others) > 1 else ""
        message = f"`{statement.span.one_line}` is about collectives, and `{name}` is none{more}"
        help = f"narrow it down: `({span.one_line}) and collective`"
        fixes = _narrowed(statement) if rows else ()
        return diagnose(NO_COLLECTIVE, message, span, help=help, fixes=fixes, details=_where(facts, others))

    def _nothing(self, statement: Bucket | Scheduling) -> Diagnostic:
        facts, text, span = self._traced, statement.span.one_line, statement.selector.span
        selections = self._selections.selections(facts)
        inside = Counter(facts.targets[row] for row in range(len(facts)) if _runs_a_graph(facts, row))
        optional = f"if that is intended, write `optional {text}`"
        fix = diagnostics.prefixed(statement.span, "optional")
        if inside:
            calls = listed([f"{name} ({count})" for name, count in sorted(inside.items())], _MOST_LINES)
            message = (
                f"`{text}` finds no collective in this graph: what communicates inside the graphs that {calls} run "
                "cannot be moved"
            )
            details = no_match.part_counts(statement.selector, selections)
            return diagnose(INSIDE, message, span, help=optional, fixes=[fix], details=details)
        if not any(flag & Flag.COLLECTIVE for flag in facts.flags):
            message = f"`{text}` orders collectives, and this graph has none"
            help = f"trace the step as one of several ranks runs it; {optional}"
            return diagnose(NONE_IN_GRAPH, message, statement.span, help=help, fixes=[fix])
        message = f"`{text}` matches nothing in this graph"
        help = no_match.other_origin_hint(statement.selector, selections) + optional
        fixes = [*no_match.would_match(statement.selector, selections), fix]
        details = no_match.part_counts(statement.selector, selections)
        found = diagnose(MATCHES_NOTHING, message, span, help=help, fixes=fixes, details=details)
        include = self._policy.included_by(statement.span)
        return evolve(found, cause=no_match.missing_parts(statement.selector, selections), include=include)

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
                    fixes=[diagnostics.prefixed(statement.span, "optional")],
                )
            )
        elif len(left) == len(selected.taken) and not opposed:
            self.found.append(_nothing_moves(statement, left, facts))

    def _kept(self, selected: Sequence[SelectedCollectives], found: Moves, facts: Facts) -> None:
        """Lines that move what another keeps in order, or that move nothing because of it."""
        keeping = [each for each in reversed(selected) if isinstance(each.statement, KeepOrder)]
        keepers = {row: each.statement for each in keeping for row in each.rows}
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
        globs = no_match.numbered_globs(glob, self._traced)
        if named is None:
            fixes = tuple(diagnostics.put_before(statement.span, f"blocks {each}") for each in globs)
        else:
            fixes = diagnostics.written(no_match.glob_span(named.glob, named.span), globs, near=True)
        message = f"`{statement.span.one_line}` {what}, and no blocks were found in this graph"
        help = no_match.naming_blocks(self._traced, glob)
        self.found.append(diagnose(NO_BLOCKS, message, statement.span, help=help, fixes=fixes))

    def _taken(self, statement: Scheduling, selected: SelectedCollectives) -> Diagnostic:
        lines = [(self._policy.scheduling[by], count) for by, count in selected.takers.items()]
        which = "the only collective" if len(selected.rows) == 1 else f"all {len(selected.rows):,} collectives"
        return diagnose(
            TAKEN,
            f"`{statement.span.one_line}` moves nothing: other lines override it for {which} it selects",
            statement.span,
            help="remove it, or let its selector pick others as well",
            fixes=[diagnostics.removed(statement.span)],
            related=tuple(
                diagnostics.Related(f"`{line.span.one_line}` moves {count}", line.span) for line, count in lines
            ),
        )


def _nothing_joined(statement: Bucket, refused: Sequence[Refusal], facts: Facts) -> Diagnostic:
    """A ``bucket`` line that makes no bucket. ``facts``: of the graph on which the first bucket line was planned."""
    text, span, count = statement.span.one_line, statement.span, counted(len(refused), "collective")
    reasons = {each.reason for each in refused}
    optional = f"if that is intended, write `optional {text}`"
    each_refused = first_lines([f"{' → '.join(each.collectives)}: {each.reason}" for each in refused], _MOST_LINES)
    if not refused:
        message = f"`{text}` finds nothing to join in this graph"
        fix = diagnostics.prefixed(statement.span, "optional")
        return diagnose(NOTHING_TO_REWRITE, message, span, help=optional, fixes=[fix])
    if not reasons.isdisjoint(LIMITED) and statement.size is not None:
        rows = [facts.index.get(each.collectives[0]) for each in refused]  # None for one that an earlier line has made
        larger = (max(facts.bytes[each] for each in (row, *facts.inputs[row])) for row in rows if row is not None)
        sizes = sorted(size for size in larger if size > 0)[:2]
        smallest = " and ".join(format_quantity(size, "bytes") for size in sizes)
        limit = format_quantity(statement.size.value, "bytes")
        message = f"`{text}` joins nothing: no two of its {count} that can be one fit into {limit}"
        help = f"write a larger size, or leave it out of a line with `per block`; the smallest take {smallest}"
        return diagnose(NOTHING_FITS, message, span, help=help, details=each_refused)
    if reasons == {OUTSIDE_BLOCKS}:
        message = f"`{text}` joins nothing: none of its {count} belongs to a block"
        help = "name the blocks with a `blocks` line, or write a size instead, `up to 256 MiB`"
        return diagnose(NONE_IN_BLOCKS, message, span, help=help, details=each_refused)
    if reasons <= {NO_OTHER, OUTSIDE_BLOCKS}:
        kinds = Counter(each.detail for each in refused if each.reason == NO_OTHER)
        within = "" if statement.blocks is None else " of one stretch of blocks"
        message = f"`{text}` joins nothing: no two of its {count}{within} are of one kind, dtype and process group"
        fixes = [diagnostics.prefixed(statement.span, "optional")]
        details = first_lines([f"{kind}: {number:,}" for kind, number in kinds.items()], _MOST_LINES)
        return diagnose(NONE_ALIKE, message, span, help=optional, fixes=fixes, details=details)
    return all_refused(statement, refused)


def _nothing_moves(statement: Scheduling, left: dict[int, str], facts: Facts) -> Diagnostic:
    rows = sorted(left)
    first = f"`{facts.names[rows[0]]}`" if len(rows) == 1 else f"`{facts.names[rows[0]]}` first"
    message = f"`{statement.span.one_line}` moves none of {counted(len(rows), 'collective')}, {first}: {left[rows[0]]}"
    help = f"leave it out, or write `optional {statement.span.one_line}`"
    fixes = [diagnostics.removed(statement.span), diagnostics.prefixed(statement.span, "optional")]
    details = first_lines([f"{facts.names[row]}: {left[row]}" for row in rows], _MOST_LINES)
    return diagnose(NOTHING_MOVES, message, statement.span, help=help, fixes=fixes, details=details)


def _crossed(one: Bucket | Scheduling, other: Scheduling, why: str) -> Diagnostic:
    message = f"`{one.span.one_line}` and `{other.span.one_line}` ask for opposite orders: {why}"
    related = (diagnostics.Related(f"`{other.span.one_line}` is the other", other.span),)
    return diagnose(CROSSED, message, one.span, help="take the collective out of one of them", related=related)


def _narrowed(statement: Bucket | Scheduling) -> tuple[diagnostics.Fix, ...]:
    """The fix that leaves the collectives of a selector; a `per` behind it is the line's own."""
    span = statement.selector.span
    own = _PER.search(span.text) if isinstance(statement, Bucket) and statement.blocks is not None else None
    end = span.end if own is None else span.start + own.start()
    text = span.source.text[span.start : end]
    return diagnostics.written(diagnostics.Span(span.source, span.start, end), [f"(({text}) and collective)"])


def _has_blocks(segments: Segments) -> bool:
    return any(block >= 0 for block in segments.block)


def _runs_a_graph(facts: Facts, row: int) -> bool:
    target = facts.targets[row]
    return target.startswith("higher_order.") and is_unknown(target, 0)


def _where(facts: Facts, rows: Sequence[int]) -> tuple[str, ...]:
    return first_lines([f"{facts.names[row]} ({facts.targets[row]})" for row in rows], _MOST_LINES)


_FIRST = int(StepKind.FIRST_RUN)


def cannot_order(policy: Policy, capabilities: Capabilities) -> list[Diagnostic]:
    """The scheduling lines of a policy, refused if the path applies none."""
    if capabilities.orders:
        return []
    of_weights = Prefetch if capabilities.orders_weights else ()
    lines = [each for each in (*policy.buckets, *policy.scheduling) if not isinstance(each, of_weights)]
    return [refusals.cannot_order(statement, capabilities) for statement in lines if not statement.optional]


def plan_order(
    policy: Policy,
    facts: Facts,
    schedule: Schedule,
    capabilities: Capabilities,
    *,
    ranks: Ranks | None = None,
    device: DeviceProfile | None = None,
    blocks: BlockTable | None = None,
) -> OrderPlan | None:
    """Plan the scheduling lines on a graph whose values are decided; None for a policy without any.

    ``facts`` and ``schedule`` are of the graph as its decisions leave it; ``blocks`` are its blocks as the policy names
    them, if known. Lines that do not fit the graph are reported in ``OrderPlan.diagnostics``, never raised. Linear but
    for the order itself, which is O((nodes + edges) log nodes).
    """
    if not policy.orders:
        return None
    graph = rematerialised(facts, schedule)
    traced = graph.facts
    if blocks is None:
        blocks = blocks_of(facts, None if policy.blocks is None else PathGlob(policy.blocks.glob))
    labelled = {name: blocks.block_of[old] for name, old in zip(traced.names, graph.origin, strict=True)}
    recomputed = [traced.names[row] for row in graph.recomputed]
    check_cancelled()
    traced_times = None if device is None else node_times(traced, device)
    selections = WholeStepSelections(policy, labelled, blocks.names, recomputed, traced_times)
    errors = OrderErrors(policy, traced, selections)
    kept_by: dict[int, KeepOrder] = {}
    selected_names: list[list[str]] = []
    for scheduling in policy.scheduling:
        rows, others = selections.collectives(traced, scheduling.selector)
        errors.selection(scheduling, rows, others)
        if isinstance(scheduling, KeepOrder):
            kept_by.update(dict.fromkeys(rows, scheduling))
        selected_names.append([traced.names[row] for row in rows])
    check_cancelled()
    held = frozenset(traced.names[row] for row in held_rows(traced, kept_by))
    edits, edited = plan_edits(policy, traced, capabilities, ranks, selections.rows, held)
    check_cancelled()
    times = None if device is None else node_times(edited, device)
    check_cancelled()
    for number, statement in enumerate(policy.rewrites):
        if isinstance(statement, Bucket):
            errors.bucket(number, statement, edits, kept_by)
    selected = moves.assigned(policy, [moves.after_edits(names, edits, edited) for names in selected_names])
    kept = {row for each in selected if isinstance(each.statement, KeepOrder) for row in each.rows}
    before = dependencies(edited, kept)
    segments = selections.segments(edited)
    check_cancelled()
    prefetches, delays = _requests(selected, Prefetch), _requests(selected, Delay)
    unknown = frozenset(unknown_operators(edited))
    found = moves.move_collectives(edited, before, segments, prefetches, delays, kept, unknown)
    check_cancelled()
    order, too_tight = found.order, list[TooTight]()
    line, block_of = policy.prefetch_offloaded, selections.selections(edited).blocks.block_of
    ahead = None if line is None else Ahead(line.blocks, block_of)
    scheduled = partial(_scheduled, graph, edits, edited, ahead)
    if times is not None:
        overlap = OverlapLines(
            edited, before, times, selected, scheduled, lambda: estimate_peak(traced, graph.schedule).bytes
        )
        order = overlap.order(order)
        too_tight = overlap.too_tight
        for number, each in enumerate(selected):
            if isinstance(each.statement, Overlap):
                too_large = {row: why for row, why in overlap.too_large.items() if row in each.taken}
                found.left.setdefault(number, {}).update(too_large)
    check_cancelled()
    outcomes = _outcomes(edited, selected, found, order)
    errors.moves(selected, found, segments, edited)
    errors.limits(too_tight)
    return OrderPlan(
        traced=traced,
        traced_schedule=graph.schedule,
        edits=edits,
        facts=edited,
        schedule=scheduled(order),
        outcomes=outcomes,
        diagnostics=tuple(errors.found),
        times=times,
        traced_times=traced_times,
        barriers=before.barriers,
        block_of=block_of,
        block_names=blocks.names,
    )


def _scheduled(
    graph: RematerialisedGraph, edits: Edits, facts: Facts, ahead: Ahead | None, order: Sequence[int]
) -> Schedule:
    """The steps of the calls in some order, with the copies to the host and back between them."""
    traced, schedule = graph.facts, graph.schedule
    if not edits and all(one < other for one, other in pairwise(order)):
        return schedule
    region_of = {traced.names[row]: region for kind, row, region in schedule if kind == _FIRST}
    regions: dict[int, int] = {}
    region = max(region_of.values(), default=0)
    for row in range(len(facts) - 1, -1, -1):  # a new node has the region of the next old one
        if facts.ops[row] == "call_function":
            region = regions[row] = region_of.get(facts.names[row], region)
    instead = {old: new for edit in edits.done for old, new in edit.replaced}
    copied: dict[int, NarrowForm | None] = {}
    for row, form in schedule.moved.items():
        name = traced.names[row]
        while name in instead:
            name = instead[name]
        copied[facts.index[name]] = form
    steps = with_host_copies(facts, [(_FIRST, row, regions[row]) for row in order], copied, ahead)
    return Schedule.of(steps, moved=copied)


def _outcomes(
    facts: Facts, selected: Sequence[SelectedCollectives], found: Moves, order: Sequence[int]
) -> tuple[SchedulingOutcome, ...]:
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    before, between, after = (ComputeProgress(facts, each) for each in (calls, found.order, order))
    names, outcomes = facts.names, []
    for number, each in enumerate(selected):
        match each.statement:
            case KeepOrder():
                shifted = []
            case Overlap():
                shifted = [row for row in each.taken if after.shifted(row, between)]
            case Prefetch() | Delay():
                shifted = [row for row in each.taken if between.shifted(row, before)]
            case _:
                assert_never(each.statement)
        matched, moved = (tuple(names[row] for row in rows) for rows in (each.rows, shifted))
        left = {names[row]: why for row, why in found.left.get(number, {}).items()}
        outcomes.append(SchedulingOutcome(statement=each.statement, matched=matched, moved=moved, left=left))
    return tuple(outcomes)


def _requests(selected: Sequence[SelectedCollectives], kind: type[Prefetch] | type[Delay]) -> list[MoveRequest]:
    asked = ((number, each, each.statement) for number, each in enumerate(selected))
    mine = ((number, each, line) for number, each, line in asked if isinstance(line, kind))
    return [MoveRequest(row, number, line.blocks) for number, each, line in mine for row in each.taken]
