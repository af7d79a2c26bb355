"""What is wrong between the scheduling lines of a policy and a graph."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

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
from policylang.language.syntax import Bucket, Delay, KeepOrder, Policy, Prefetch, Scheduling
from policylang.language.wording import counted, figure, first_lines, listed
from policylang.operators.unknown_effects import is_unknown
from policylang.planning.edits.bucket_errors import nothing_joined
from policylang.planning.graph_edit import Edits
from policylang.planning.order.lines.denoted import Picks
from policylang.planning.order.lines.limited import TooTight
from policylang.planning.order.lines.moves import Moves
from policylang.planning.order.lines.named import Picked
from policylang.planning.order.stages import Stages
from policylang.planning.refusals import MATCHES_NOTHING
from policylang.planning.schedule.order_plan import SchedulingOutcome
from policylang.planning.selection.empty_matches import (
    missing_parts,
    other_origin_hint,
    part_counts,
)
from policylang.planning.selection.what_would_match import glob_span, naming_blocks, numbered_globs, would_match

NO_COLLECTIVE = "APL371"
NOTHING_MOVES = "APL373"
TOO_TIGHT = "APL374"
NO_BLOCKS = "APL375"
CROSSED = "APL376"
TAKEN = "APL377"
INSIDE = "APL378"
NONE_IN_GRAPH = "APL379"

_MOST_NAMES = 8
_PER = re.compile(r"\s+per\s+(?:\d+\s+)?blocks?$")


class OrderErrors:
    """Those of one policy on one graph, in the order in which they are found."""

    def __init__(self, policy: Policy, traced: Facts, picks: Picks) -> None:
        self.found: list[Diagnostic] = []
        self._policy = policy
        self._traced = traced
        self._picks = picks
        self._no_blocks_said = False

    # --- what is picked ---

    def selection(self, statement: Bucket | Scheduling, rows: Collection[int], others: Sequence[int]) -> bool:
        """Whether a selector picks collectives, and nothing but collectives."""
        if others:
            self.found.append(self._no_collective(statement, rows, others))
        elif not rows and not statement.optional:
            self.found.append(self._nothing(statement))
        return bool(rows) and not others

    def _no_collective(
        self, statement: Bucket | Scheduling, rows: Collection[int], others: Sequence[int]
    ) -> Diagnostic:
        facts = self._traced
        more = f", nor are {len(others) - 1:,} more" if len(others) > 1 else ""
        inside = [row for row in others if _runs_a_graph(facts, row)]
        if inside and len(inside) == len(others):
            return diagnose(
                INSIDE,
                f"`{_text(statement)}` picks `{facts.names[inside[0]]}`, which runs a graph of its own: what "
                "communicates in there cannot be moved",
                statement.selector.span,
                help="pick collectives of this graph",
                details=_where(facts, inside),
            )
        return diagnose(
            NO_COLLECTIVE,
            f"`{_text(statement)}` is about collectives, and `{facts.names[others[0]]}` is none{more}",
            statement.selector.span,
            help=f"narrow it down: `({statement.selector.span.one_line}) and collective`",
            mends=_narrowed(statement) if rows else (),
            details=_where(facts, others),
        )

    def _nothing(self, statement: Bucket | Scheduling) -> Diagnostic:
        facts, text = self._traced, _text(statement)
        selections = self._picks.selections(facts)
        inside = Counter(facts.targets[row] for row in range(len(facts)) if _runs_a_graph(facts, row))
        optional = f"if that is as it should be, write `optional {text}`"
        if inside:
            calls = listed([f"{name} ({count})" for name, count in sorted(inside.items())], _MOST_NAMES)
            return diagnose(
                INSIDE,
                f"`{text}` finds no collective in this graph: what communicates inside the graphs that {calls} run "
                "cannot be moved",
                statement.selector.span,
                help=optional,
                mends=[prefixed(statement.span, "optional")],
                details=part_counts(statement.selector, selections),
            )
        if not any(flag & Flag.COLLECTIVE for flag in facts.flags):
            return diagnose(
                NONE_IN_GRAPH,
                f"`{text}` orders collectives, and this graph has none",
                statement.span,
                help=f"trace the step as one of several ranks runs it; {optional}",
                mends=[prefixed(statement.span, "optional")],
            )
        found = diagnose(
            MATCHES_NOTHING,
            f"`{text}` matches nothing in this graph",
            statement.selector.span,
            help=other_origin_hint(statement.selector, selections) + optional,
            mends=[*would_match(statement.selector, selections), prefixed(statement.span, "optional")],
            details=part_counts(statement.selector, selections),
        )
        include = self._policy.included_by(statement.span)
        return evolve(found, cause=missing_parts(statement.selector, selections), include=include)

    def bucket(self, number: int, statement: Bucket, edits: Edits, kept: Mapping[int, KeepOrder]) -> None:
        """A bucket that picks what it must not, what a line keeps in order, or that joins nothing."""
        rows, others = self._picks.collectives(self._traced, statement.selector)
        if not self.selection(statement, rows, others):
            return
        if (held := next((row for row in rows if row in kept), None)) is not None:
            self.found.append(_crossed(statement, kept[held], f"`{self._traced.names[held]}` is in both"))
            return
        if statement.blocks is not None and not self._has_blocks(self._picks.stages(self._traced)):
            if not statement.optional:
                self._no_blocks(statement, "joins collectives by blocks")
            return
        mine = edits.of(number)
        if not mine.done and not statement.optional:
            self.found.append(nothing_joined(statement, mine.refused, self._traced))

    # --- what is moved ---

    def statement(
        self, number: int, picked: Picked, outcome: SchedulingOutcome, found: Moves, stages: Stages, facts: Facts
    ) -> None:
        """A line that moves nothing: others move all it names, there are no blocks, or everything stays."""
        statement = picked.statement
        if not picked.rows or statement.optional:
            return
        if not picked.taken:
            self.found.append(self._taken(statement, picked))
            return
        if not isinstance(statement, Prefetch | Delay):
            return
        if not self._has_blocks(stages):
            self._no_blocks(statement, "counts blocks")
            return
        most = _most_blocks(stages)
        if statement.blocks >= most:
            self.found.append(_too_many_blocks(statement, most))
            return
        left = found.left.get(number, {})
        opposed = found.behind_kept.get(number) or any(wish.statement == number for _, wish in found.crossed)
        if len(left) == len(picked.taken) and not opposed:
            self.found.append(_nothing_moves(statement, left, facts))

    def crossings(self, picked: Sequence[Picked], found: Moves, facts: Facts) -> None:
        """Delays that can move nothing because prefetched collectives need what they name. One that moves others says
        of these why they stay."""
        said: set[tuple[int, int]] = set()
        for one, other in found.crossed:
            pair, line = (one.statement, other.statement), picked[other.statement]
            if pair in said or line.statement.optional or len(found.left[other.statement]) < len(line.taken):
                continue
            said.add(pair)
            why = f"`{facts.names[one.row]}` needs what `{facts.names[other.row]}` brings"
            self.found.append(_crossed(picked[one.statement].statement, line.statement, why))

    def kept(self, picked: Sequence[Picked], found: Moves, facts: Facts) -> None:
        """Lines that move what another holds, or that can move nothing because of it."""
        keepers = {
            row: each.statement
            for each in reversed(picked)
            for row in each.rows
            if isinstance(each.statement, KeepOrder)
        }
        for number, behind in found.behind_kept.items():
            each = picked[number]
            itself = next((row for row, keeper in behind.items() if row == keeper), None)
            if itself is None and (each.statement.optional or len(found.left[number]) < len(each.taken)):
                continue
            row = itself if itself is not None else next(iter(behind))
            keeper = behind[row]
            why = f"`{facts.names[row]}` is in both"
            if row != keeper:
                why = f"`{facts.names[row]}` would have to cross `{facts.names[keeper]}`"
            self.found.append(_crossed(each.statement, keepers[keeper], why))

    def limits(self, too_tight: Iterable[TooTight]) -> None:
        for each in too_tight:
            asked = figure(float(each.limit.value), each.limit.dimension)
            which = f"{asked} in flight" if each.limit is each.statement.in_flight else f"{asked} of the peak"
            least = "no limit of its kind is enough, so leave it out"
            if each.least is not None:
                least = f"the smallest limit with which something moves is {figure(each.least, 'bytes')}"
            message = f"`{_text(each.statement)}` moves nothing within {which}"
            self.found.append(diagnose(TOO_TIGHT, message, each.limit.span, help=least))

    # --- blocks ---

    def _has_blocks(self, stages: Stages) -> bool:
        return any(block >= 0 for block in stages.block)

    def _no_blocks(self, statement: Bucket | Scheduling, what: str) -> None:
        if self._no_blocks_said:
            return
        self._no_blocks_said = True
        named = self._policy.blocks
        help = naming_blocks(self._traced, "layers.*" if named is None else named.glob)
        self.found.append(
            diagnose(
                NO_BLOCKS,
                f"`{_text(statement)}` {what}, and no blocks were found in this graph",
                statement.span,
                help=help,
                mends=self._named_blocks(statement),
            )
        )

    def _named_blocks(self, statement: Bucket | Scheduling) -> tuple[Fix, ...]:
        named = self._policy.blocks
        globs = numbered_globs("layers.*" if named is None else named.glob, self._traced)
        if named is not None:
            return written(glob_span(named.glob, named.span), globs, near=True)
        return tuple(put_before(statement.span, f"blocks {glob}") for glob in globs)

    def _taken(self, statement: Scheduling, picked: Picked) -> Diagnostic:
        lines = [(self._policy.scheduling[by], count) for by, count in picked.takers.items()]
        which = "the only collective" if len(picked.rows) == 1 else f"all {len(picked.rows):,} collectives"
        return diagnose(
            TAKEN,
            f"`{_text(statement)}` moves nothing: other lines take over {which} it picks",
            statement.span,
            help="remove it, or let its selector pick others as well",
            mends=[removed(statement.span)],
            related=tuple(Related(f"`{_text(line)}` takes over {count}", line.span) for line, count in lines),
        )


def _nothing_moves(statement: Scheduling, left: dict[int, str], facts: Facts) -> Diagnostic:
    rows = sorted(left)
    first = f"`{facts.names[rows[0]]}`" if len(rows) == 1 else f"`{facts.names[rows[0]]}` first"
    return diagnose(
        NOTHING_MOVES,
        f"`{_text(statement)}` moves none of {counted(len(rows), 'collective')}, {first}: {left[rows[0]]}",
        statement.span,
        help=f"leave it out, or write `optional {_text(statement)}`",
        mends=[removed(statement.span), prefixed(statement.span, "optional")],
        details=first_lines([f"{facts.names[row]}: {left[row]}" for row in rows], _MOST_NAMES),
    )


def _too_many_blocks(statement: Prefetch | Delay, most: int) -> Diagnostic:
    return diagnose(
        NO_BLOCKS,
        f"`{_text(statement)}` counts {counted(statement.blocks, 'block')}, and no half of this graph has more than "
        f"{most:,}",
        statement.span,
        help=f"count fewer, or write `optional {_text(statement)}`",
        mends=[prefixed(statement.span, "optional")],
    )


def _most_blocks(stages: Stages) -> int:
    """The stages of the half that has most."""
    return max(Counter(stages.direction).values(), default=0)


def _crossed(one: Bucket | Scheduling, other: Scheduling, why: str) -> Diagnostic:
    return diagnose(
        CROSSED,
        f"`{_text(one)}` and `{_text(other)}` ask for opposite orders: {why}",
        one.span,
        help="take the collective out of one of them",
        related=(Related(f"`{_text(other)}` is the other", other.span),),
    )


def _narrowed(statement: Bucket | Scheduling) -> tuple[Fix, ...]:
    """The mend that leaves the collectives of a selector; a `per` behind it is the line's own."""
    span = statement.selector.span
    own = _PER.search(span.text) if isinstance(statement, Bucket) and statement.blocks is not None else None
    end = span.end if own is None else span.start + own.start()
    text = span.source.text[span.start : end]
    return written(Span(span.source, span.start, end), [f"(({text}) and collective)"])


def _runs_a_graph(facts: Facts, row: int) -> bool:
    target = facts.targets[row]
    return target.startswith("higher_order.") and is_unknown(target, 0)


def _where(facts: Facts, rows: Sequence[int]) -> tuple[str, ...]:
    return first_lines([f"{facts.names[row]} ({facts.targets[row]})" for row in rows], _MOST_NAMES)


def _text(statement: Bucket | Scheduling) -> str:
    return statement.span.one_line
