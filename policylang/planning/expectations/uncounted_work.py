"""Expectations about recomputed FLOPs where what is recomputed has no FLOP formula: they hold whatever that costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policylang.graph.facts import Facts, uncounted_operators
from policylang.language.codes import diagnose
from policylang.language.diagnostics import Diagnostic
from policylang.language.figures import counted, first_lines, joined
from policylang.language.syntax import Expectation, ExpectTotal

UNCOUNTED = "APL332"
_MOST_NAMES = 8
_MOST_NAMED = 3


def uncounted_in(expectations: Sequence[Expectation], facts: Facts, recomputed: Sequence[int]) -> Iterator[Diagnostic]:
    """A warning for each expectation about FLOPs, if among the recomputed rows are calls that no formula counts."""
    missing = uncounted_operators(facts, recomputed)
    if not missing:
        return
    calls = sum(missing.values())
    names = [f"`{name}`" for name in missing]
    shown = joined(names) if len(names) <= _MOST_NAMED else f"{names[0]} and {len(names) - 1} others"
    rows = [row for row in recomputed if facts.uncounted[row]]
    places = (f"{facts.names[row]} ({facts.targets[row]}) in {facts.modules[row] or 'no module'}" for row in rows)
    details = first_lines(tuple(places), _MOST_NAMES)
    for each in expectations:
        if isinstance(each, ExpectTotal) and each.figure == "recomputed flops":
            yield diagnose(
                UNCOUNTED,
                f"`{each.span.one_line}` does not count {counted(calls, 'call')} of {shown} that are recomputed: "
                "no FLOP formula is known",
                span=each.span,
                help="register their formulas with `torch.utils.flop_counter.register_flop_formula` where the graph is "
                "made, or expect of these operators what becomes of them, as `expect no … recomputed` does",
                details=details,
            )
