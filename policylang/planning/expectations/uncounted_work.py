"""Expectations about FLOPs and times where an operator has no FLOP formula: they hold whatever that costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policylang.graph.facts import Facts, uncounted_operators
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.syntax import Expectation, ExpectTotal
from policylang.language.wording import counted, first_lines, joined
from policylang.simulation.node_times import NodeTimes

UNCOUNTED, UNTIMED = "APL332", "APL333"
_REGISTER = "register their formulas with `torch.utils.flop_counter.register_flop_formula` where the graph is made"
_MOST_NAMES = 8
_MOST_NAMED = 3


def uncounted_in(
    expectations: Sequence[Expectation], facts: Facts, recomputed: Sequence[int], times: NodeTimes | None
) -> Iterator[Diagnostic]:
    """A warning for each expectation about FLOPs, if among the recomputed rows are calls that no formula counts; for
    each about the time of a step, if any row is one."""
    whole = range(len(facts))
    for each in expectations:
        if not isinstance(each, ExpectTotal):
            continue
        if each.figure == "recomputed flops":
            yield from _warned(each, facts, recomputed)
        elif each.of_time and times is not None:
            yield from _warned(each, facts, recomputed if each.figure == "recomputed time" else whole)


def _warned(expectation: ExpectTotal, facts: Facts, rows: Sequence[int]) -> Iterator[Diagnostic]:
    missing = uncounted_operators(facts, rows)
    if not missing:
        return
    calls = counted(sum(missing.values()), "call")
    names = [f"`{name}`" for name in missing]
    shown = joined(names) if len(names) <= _MOST_NAMED else f"{names[0]} and {len(names) - 1} others"
    found = [row for row in rows if facts.uncounted[row]]
    places = (f"{facts.names[row]} ({facts.targets[row]}) in {facts.modules[row] or 'no module'}" for row in found)
    details = first_lines(tuple(places), _MOST_NAMES)
    text, again = expectation.span.one_line, " that are recomputed" if expectation.figure.startswith("recomp") else ""
    if expectation.of_time:
        message = f"`{text}` prices {calls} of {shown}{again} by their bytes alone: no FLOP formula is known"
        yield diagnose(UNTIMED, message, span=expectation.span, help=_REGISTER, details=details)
        return
    help = f"{_REGISTER}, or expect of these operators what becomes of them, as `expect no … recomputed` does"
    message = f"`{text}` does not count {calls} of {shown}{again}: no FLOP formula is known"
    yield diagnose(UNCOUNTED, message, span=expectation.span, help=help, details=details)
