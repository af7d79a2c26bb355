"""The lines of a tuned policy beside its rules: ``chunk``, FSDP's words, narrower copies, the order of collectives.

The tuner decides what is saved and recomputed on a graph as traced. Here the same budget is tuned again under other
conditions: on the graph as slices leave it, with gathered weights as FSDP keeps them, with collectives at a share of
their time, since an order hides most of it. Lines are then written around the rules, and each text is planned and
simulated as a whole. What is tuned without these lines is among the texts, so they never make a step longer.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import islice
from math import inf

from attrs import evolve, frozen

from policylang.graph.blocks import Chains, blocks_of
from policylang.graph.facts import Facts, Flag, GraphKind
from policylang.language.diagnostics import Severity
from policylang.language.loader import parse_policy
from policylang.operators.names import is_all_gather
from policylang.planning.capabilities import Capabilities
from policylang.planning.inspection.costly import costly_lines
from policylang.simulation.node_times import NodeTimes, node_times, operator_name
from policylang.tuning.evaluation import (
    Allowed,
    Besides,
    Budget,
    Candidate,
    Evaluation,
    Infeasible,
    Tuned,
    edited,
)
from policylang.tuning.tuned_policy import at_most
from policylang.tuning.tuner import Detail, Tuner, undominated

GATHERED_AGAIN = "include <fsdp>\n"
SMALLEST = f"recompute everything in block\noptional save (topk, sort, argsort) in block\n{GATHERED_AGAIN}"
"""Recomputing everything but the values that steer others, which recomputation might choose otherwise."""
_AHEAD = "prefetch (all_gather where from parameter) 1 block ahead\n"
_BUCKETS = "include <fsdp_overlap>\n"
_SLICES, _OF_MODULE = (8, 32), 4
"""Numbers of slices that are tried, of the loss and of a module in each block."""
_FORMS, _NARROWS = ("bfloat16", "float8_e4m3fn per row"), r" as (bfloat|float8)"
_CHEAPER = ((0.1, 0.97), (0.1, 1.0), (1.0, 0.97))
"""The share of their time that collectives count with, and the share of the budget for rules: who computes less may
send more, and weights that are gathered ahead need memory."""
_NODES = 10_000
"""Nodes, in whole graphs, that are tuned with cheaper collectives; one graph at least."""
_WORTH = 0.01
"""The share of the step, or of the memory, that a line has to take off if it changes bits."""
_EXPOSED = 0.002
"""The share of the step that nothing is ordered for."""
_ROUNDS = 4
_MIB = 1 << 20


@frozen
class _Base:
    """A graph that is tuned: as the lines ``before`` the rules leave it."""

    before: str
    tuner: Tuner
    found: Tuned | Infeasible

    @property
    def best(self) -> Candidate:
        return self.found.smallest if isinstance(self.found, Infeasible) else self.found.chosen


class Variants:
    """The policies for one budget, of one graph on one device."""

    def __init__(
        self,
        facts: Facts,
        times: NodeTimes,
        capabilities: Capabilities,
        budget: Budget,
        besides: Besides,
        allowed: Allowed,
        *,
        device_line: str,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """``device_line``: the statement that names the device; empty if a policy cannot name it."""
        self.facts, self.times, self.capabilities = facts, times, capabilities
        self.budget, self.besides, self.allowed = budget, besides, allowed
        self.device_line, self._say = device_line, progress or (lambda _: None)
        self._timed = budget.figure == "recompute time"
        there = weights_there(facts) if capabilities.block_by_block else None
        self._tuned_facts, self._by_fsdp = there or facts, there is not None
        """In eager FSDP decides about gathers: the tuner is shown the weights as if they were there."""
        self._whole = Evaluation(facts, times, capabilities, ordered=True)
        self._exact = self._whole.of
        self._tuners: dict[str, Tuner] = {}
        self._detail: Detail = "all"

    def figures_at(self, limit: float) -> Tuned | Infeasible:
        """:meth:`best` for another limit, without what only a text needs. What was tuned and planned is shared."""
        other = copy(self)
        other.budget, other._detail = evolve(self.budget, limit=limit), "figures"
        return other.best()

    def fits_at_all(self) -> bool:
        """The policy that recomputes everything does."""
        return self._fits(self._exact(SMALLEST))

    def best(self, *, table: bool = False) -> Tuned | Infeasible:
        """The policy of the shortest step within the budget; of the least memory within a budget of time."""
        plain = base = self._base("", table=table)
        if self.budget.limit == inf:
            return plain.found
        if self.allowed.chunk and self.capabilities.rewrites and self.facts.kind in (GraphKind.FLAT, GraphKind.JOINT):
            base = self._cut(plain)
        found = list(self._written(base))
        if (
            base is not plain
            and isinstance(plain.found, Tuned)
            and (whole := self._exact(plain.best.rules)) is not None
        ):
            found.append(whole)  # an order may hide what slices spare
        if self.allowed.order and self.capabilities.orders and not self._timed:
            found += self._ordered(base, found)
        ranked = sorted(dict.fromkeys(found), key=lambda each: (self._cost(each), self.memory(each), each.rules))
        return self._answer(
            base, self._clean(ranked) if ranked and self._detail != "figures" else next(iter(ranked), None)
        )

    def memory(self, each: Candidate) -> int:
        """The memory that the budget is about."""
        return self.besides.memory(each, self.budget)

    def _cost(self, each: Candidate) -> float:
        cost = self.memory(each) if self._timed else each.step
        return cost * (1 + _WORTH) if re.search(_NARROWS, each.rules) else cost

    def _fits(self, each: Candidate | None) -> bool:
        return each is not None and (self._timed or self.memory(each) <= self.budget.limit)

    def _tuner(self, facts: Facts, collectives: float = 1.0) -> Tuner:
        """``collectives``: what they take, as a share of their time."""
        times = node_times(facts, self.times.device)
        if collectives != 1:
            each_takes = zip(times.seconds, facts.flags, strict=True)
            seconds = [collectives * each if flag & Flag.COLLECTIVE else each for each, flag in each_takes]
            times = evolve(times, seconds=seconds)
        offload, progress = self.allowed.offload, self._say
        return Tuner(facts, times, self.capabilities, besides=self.besides, offload=offload, progress=progress)

    def _base(self, before: str, *, table: bool = False, detail: Detail | None = None) -> _Base:
        tuner = self._tuners[before] = self._tuners.get(before) or self._tuner(
            edited(self._tuned_facts, before, self.capabilities)
        )
        if self._by_fsdp and self.budget.limit < inf:
            detail = "patterns"  # it is tuned again, beside FSDP's own
        return _Base(before, tuner, tuner.tuned(self.budget, table=table, detail=detail or self._detail))

    def _answer(self, base: _Base, chosen: Candidate | None) -> Tuned | Infeasible:
        """The result of a base with its lines, and ``chosen`` in place of the tuner's own choice."""
        found = base.found
        if chosen is None:
            smallest = self._exact(SMALLEST) if self._by_fsdp else None
            smallest = smallest or evolve(base.best, rules=base.before + base.best.rules)
            return Infeasible(self.budget, self.besides, smallest)
        if isinstance(found, Infeasible) or self._by_fsdp:
            forward = sum(self.times.seconds[row] for row in self.facts.forward)
            return Tuned(self.budget, self.besides, chosen, None, None, (chosen,), None, forward)
        own, less, more = base.before + found.chosen.rules, None, None
        table = [evolve(each, rules=base.before + each.rules) for each in found.table]
        if chosen.rules == own:
            less, more = (each and evolve(each, rules=base.before + each.rules) for each in (found.less, found.more))
            table = [chosen if each.rules == own else each for each in table]
        else:
            table = undominated((*(each for each in table if each.rules != own), chosen), self.memory)
        if chosen not in table:
            table = sorted((*table, chosen), key=self.memory)
        is_bound = (chosen.saved, chosen.recompute) == (found.chosen.saved, found.chosen.recompute)
        bound = found.bound if is_bound else None
        return evolve(found, chosen=chosen, less=less, more=more, bound=bound, table=tuple(table))

    # --- whole texts ---

    def _clean(self, ranked: Sequence[Candidate]) -> Candidate:
        """The fastest without a warning of ``check``, if it costs hardly more than the fastest, whose warned lines
        may be left out for it; else that one, with its warnings allowed: its lines save time within the budget."""
        first, lines, warned = ranked[0], ranked[0].rules.splitlines(keepends=True), self._warned(ranked[0])
        mended = self._exact("".join(line for at, line in enumerate(lines, 1) if at not in warned))
        for each in (*ranked, *([mended] if mended is not None and self._fits(mended) else [])):
            if self._cost(each) <= (1 + _WORTH) * self._cost(first) and not self._warned(each):
                return each
        for at, codes in warned.items():
            lines[at - 1] = f"{lines[at - 1].rstrip()}  # allow: {', '.join(sorted(codes))}\n"
        return evolve(first, rules="".join(lines))

    def _warned(self, each: Candidate) -> dict[int, set[str]]:
        """The codes of the warnings of ``check``, by line; those of an included file at its include."""
        made, found = self._whole.planned(each.rules), dict[int, set[str]]()
        assert made is not None, "a candidate is a policy against which nothing is to be said"
        for said in costly_lines(made, self.capabilities):
            span = said.include or said.span
            if said.severity is not Severity.NOTE and span is not None:
                found.setdefault(span.line, set()).add(said.code)
        return found

    def _written(self, base: _Base) -> Iterator[Candidate]:
        """The texts without an order that fit."""
        before, facts = base.before, base.tuner.facts
        if self._by_fsdp:
            sent = {operator_name(facts.targets[row]) for row in facts.forward if facts.has(row, Flag.COLLECTIVE)}
            ends = [GATHERED_AGAIN]  # communication of the backward's own may cost more than the tuner saw
            ends += [f"save {', '.join(sorted(sent))} in block\n{GATHERED_AGAIN}"] if sent else []
            yield from self._within(base.tuner, lambda rules: [before + rules + end for end in ends])
        elif not isinstance(base.found, Infeasible):
            yield from filter(self._fits, [self._exact(before + base.best.rules)])
        if self.allowed.lossy and not self._timed:
            for form in _FORMS:
                self._say(f"tuning with copies in {form}")
                yield from self._within(base.tuner, partial(self._narrowed, before, form))

    def _within(self, tuner: Tuner, written: Callable[[str], list[str]]) -> Iterator[Candidate]:
        """Texts that take more or less memory than the rules in them: tuned for as much as then fits."""
        limit = room = int(self.budget.limit)
        last: Detail = "figures" if self._detail == "figures" else "rules"
        detail: Detail = "patterns" if self._by_fsdp else last  # further rules hardly change FSDP's share
        for _ in range(_ROUNDS + self._by_fsdp):
            found = tuner.tuned(evolve(self.budget, limit=room), detail=detail)
            rules = found.smallest if isinstance(found, Infeasible) else found.chosen
            exact = [each for each in map(self._exact, written(rules.rules.rstrip("\n") + "\n")) if each is not None]
            fitting = list(filter(self._fits, exact))
            if detail == "patterns" and (fitting or not exact):
                detail = last
                continue
            yield from fitting
            spare = limit - min(map(self.memory, exact), default=limit)
            if not exact or isinstance(found, Infeasible) or (spare >= 0 and (self._by_fsdp or not rules.price)):
                return
            wanted = self.memory(rules) + spare
            if spare >= 0 and wanted <= (1 + _WORTH) * room:
                return
            room = wanted if spare >= 0 else min(wanted, round(0.98 * room))

    def _narrowed(self, before: str, form: str, rules: str) -> list[str]:
        """The texts that narrow more and more of what the rules save: first the line that frees the most bytes for the
        time of its conversions. What a narrower form does not make narrower has none."""
        whole, lines = self._exact(before + rules), (before + rules).splitlines()
        if whole is None:
            return []

        def text(narrow: Collection[int]) -> str:
            return "".join(f"{each} as {form}\n" if at in narrow else f"{each}\n" for at, each in enumerate(lines))

        worth: dict[int, float] = {}
        for at, line in enumerate(lines):
            if re.match(r"(override )?save ", line) and (one := self._exact(text([at]))) is not None:
                worth[at] = (self.memory(whole) - self.memory(one)) / max(one.step - whole.step, 1e-9)
        ranked = sorted(worth, key=lambda at: (-worth[at], at))
        return [text(ranked[: count + 1]) for count in range(len(ranked))]

    # --- slices ---

    def _cut(self, base: _Base) -> _Base:
        """The base, cut into slices where that frees memory, for as long as it pays."""
        for line in self._chunks():
            worst, infeasible = base.best, isinstance(base.found, Infeasible)
            if not infeasible and not self._timed and worst.price <= _WORTH * worst.step:
                break
            kept = [each for each in base.before.splitlines(keepends=True) if each[:11] != line[:11]]
            before = "".join(kept) + line
            if edited(self._tuned_facts, line, self.capabilities) is self._tuned_facts:
                continue  # it cuts nothing
            trial = self._exact(self._without_refused(before + worst.rules))
            if trial is None or self.memory(trial) > (1 - _WORTH) * self.memory(worst):
                continue
            self._say(f"tuning with `{line.strip()}`")
            other = self._base(before, detail="figures")
            cost = self.memory if infeasible else self._cost
            if isinstance(other.found, Tuned) > (not infeasible) or (
                isinstance(other.found, Tuned) is not infeasible and cost(other.best) < (1 - _WORTH) * cost(worst)
            ):
                base = other
        return self._base(base.before) if base.before else base

    def _without_refused(self, text: str) -> str:
        """A text without the lines that there is something to say against, such as rules for what slices replace."""
        against = self._whole.planned_or_refused(text)
        at_fault = {each.span.line for each in against if each.span} if isinstance(against, list) else ()
        return "".join(line for at, line in enumerate(text.splitlines(keepends=True), 1) if at not in at_fault)

    def _chunks(self) -> Iterator[str]:
        """The lines that may lower a peak: of the loss, and of each module that multiplies and treats rows apart."""
        yield from (f"chunk loss into {count}\n" for count in _SLICES)
        facts, blocks = self.facts, blocks_of(self.facts, None)
        products, mixes = Counter[str](), set[str]()
        for row in facts.forward:
            block, within = blocks.block_of[row], facts.modules[row]
            if block >= 0 and within.startswith(before := f"{blocks.names[block]}."):
                child = within.removeprefix(before).partition(".")[0]
                products[child] += facts.flops[row] > 0
                if "attention" in facts.targets[row]:
                    mixes.add(child)
        for child, count in products.items():
            line = f"chunk module {child} in block into {_OF_MODULE}\n"
            may_be = count > len(blocks.names) and child not in mixes
            if may_be and parse_policy(line).policy is not None:  # Swin's `blocks` is a word of the language
                yield line

    # --- order ---

    def _ordered(self, base: _Base, found: list[Candidate]) -> list[Candidate]:
        """Texts with an order that fit. A text is left out if it computes for longer than another's whole step."""
        if all(each.exposed <= _EXPOSED * each.step for each in found):
            return []
        facts, tried = base.tuner.facts, list(found)
        tuners: dict[float, Tuner] = {1.0: base.tuner}
        for price, share in islice(_CHEAPER, max(_NODES // len(facts), 1)):
            self._say(f"tuning with collectives at {price:g} of their time")
            tuner = tuners.get(price) or tuners.setdefault(price, self._tuner(facts, price))
            tuned = tuner.tuned(evolve(self.budget, limit=share * self.budget.limit), detail="rules")
            if isinstance(tuned, Tuned) and (made := self._exact(base.before + tuned.chosen.rules)) is not None:
                tried.append(made)
        self._say("ordering collectives")
        ordered = list[Candidate]()
        least = min((each.step for each in tried if self._fits(each)), default=inf)
        for each in sorted(dict.fromkeys(tried), key=lambda each: each.step - each.exposed):
            if each.step - each.exposed < least:
                ordered += self._orders(each, ("", _AHEAD))
                least = min((each.step for each in ordered), default=least)
        if ordered:
            best = min(ordered, key=lambda each: each.step)
            rules = next(each for each in tried if best.rules.startswith(each.rules))
            ordered += self._orders(rules, (_BUCKETS,))
        return ordered

    def _orders(self, each: Candidate, lines: tuple[str, ...]) -> Iterator[Candidate]:
        """A text with lines that order its collectives, and with ``overlap`` below them in what the budget leaves."""
        within = "5%"
        if self.budget.figure == "peak":
            limit = int(self.budget.limit * (1 - self.besides.reserve)) - self.besides.optimizer
            within = at_most(max(limit - each.peak, _MIB), 0)
        overlap = f"overlap collective within {within} of peak\n" if self.device_line else ""
        rules = f"{each.rules}\n{self.device_line}"
        for line in lines:
            made = self._exact(rules + line) if line else each
            if made is None or not self._fits(made):
                continue
            yield from [made] if line else []
            both = self._exact(rules + line + overlap) if overlap else None
            if both is not None and self._fits(both):
                yield both


def weights_there(facts: Facts) -> Facts | None:
    """The facts with gathered weights as views of their parameters; None where none is gathered."""
    chains, flags = Chains(facts), array("i", facts.flags)
    own = chains.from_parameter_mask
    gathers = [row for row in facts.forward if own[row] and is_all_gather(facts.targets[row])]
    for row in {*gathers, *chains.before(gathers)}:
        flags[row] = flags[row] & ~Flag.COLLECTIVE | Flag.VIEW
    return evolve(facts, flags=flags) if gathers else None
