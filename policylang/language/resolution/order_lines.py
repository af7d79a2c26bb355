"""Checks of the statements about the order of collectives that need no graph: lines that say one thing twice, limits
of nothing, and selectors that can pick no collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import assert_never

from attrs import define, field

from policylang.language.diagnostics import Diagnostic, Related, diagnose, removed
from policylang.language.resolution.doubtful import doubtful_selectors
from policylang.language.syntax import (
    Bucket,
    ChainOf,
    Delay,
    Difference,
    Everything,
    Feeding,
    InBlock,
    InModule,
    KeepOrder,
    Let,
    Operator,
    Ordinal,
    Overlap,
    Prefetch,
    Reference,
    Scheduling,
    Selector,
    Union,
)

SAID_TWICE = "APL213"
LIMIT_OF_NOTHING = "APL214"
NO_COLLECTIVE = "APL215"

_COMPUTES = frozenset(("aten", "prims", "rngprims", "inductor_prims", "quantized", "builtin"))
"""Namespaces whose operators send nothing; a higher-order operator may, in the graph that it runs."""
_COLLECTIVES = ("collective", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_WRITTEN = {Bucket: "bucket", Prefetch: "prefetch", Delay: "delay", Overlap: "overlap", KeepOrder: "keep order"}

Matches = Callable[[str | None, str, str | None], tuple[str, ...]]
"""From the parts of an operator's name to the full names that fit, as an operator table knows them."""


@define
class OrderLines:
    """The scheduling lines of one policy, statement by statement."""

    matches: Matches
    _said: dict[tuple[type, Selector], Bucket | Scheduling] = field(factory=dict)

    def check(self, statement: Bucket | Scheduling, lets: Mapping[str, Let]) -> Iterator[Diagnostic]:
        """What is wrong with a line whose names are looked up, beside those that came before it."""
        earlier = self._said.setdefault((type(statement), statement.selector), statement)
        word = _WRITTEN[type(statement)]
        if earlier is not statement:
            message = f"`{word}` is said twice of the same collectives"
            related = (Related("said here before", earlier.span),)
            help, mends = "leave one of the two lines out", [removed(statement.span, "remove the second line")]
            yield diagnose(SAID_TWICE, message, statement.span, help=help, related=related, mends=mends)
        yield from _of_nothing(statement)
        others = list(self._others(statement.selector, lets))
        for each in others:
            written = each.span.one_line
            message = f"`{written}` is no collective, and `{word}` is said of collectives alone"
            if isinstance(each, Everything | Reference):
                message = f"`{written}` is more than collectives, and `{word}` is said of them alone"
            help = "write `collective`, or one of `all_gather`, `reduce_scatter`, `all_reduce` and `all_to_all`"
            yield diagnose(NO_COLLECTIVE, message, each.span, help=help, write=_COLLECTIVES)
        if not others:
            yield from doubtful_selectors(statement)

    def _others(self, selector: Selector, lets: Mapping[str, Let]) -> Iterator[Selector]:
        """The words of a selector that pick, whatever the graph, something else than collectives. What `where`, a chain
        or an `and` leaves of a selector is not known."""
        pending = [(selector, selector)]
        seen: set[str] = set()
        while pending:
            current, named = pending.pop()
            inner: tuple[Selector, ...] = ()
            if isinstance(current, Union):
                inner = current.parts
            elif isinstance(current, InModule | InBlock | Ordinal | ChainOf):
                inner = (current.selector,)
            elif isinstance(current, Difference | Feeding):
                inner = (current.left,)
            elif isinstance(current, Reference) and current.name not in seen:
                seen.add(current.name)
                pending.append((lets[current.name].selector, current))
            elif isinstance(current, Everything) or (isinstance(current, Operator) and self._computes(current)):
                yield named if isinstance(named, Reference) else current
            pending.extend((part, named if isinstance(named, Reference) else part) for part in reversed(inner))

    def _computes(self, operator: Operator) -> bool:
        found = self.matches(operator.namespace, operator.name, operator.overload)
        return bool(found) and all(name.partition(".")[0] in _COMPUTES for name in found)


def _of_nothing(statement: Bucket | Scheduling) -> Iterator[Diagnostic]:
    """A limit of less than a byte. A peak that may not rise at all is a limit like others."""
    match statement:
        case Bucket():
            limit, what, such = statement.size, "in one bucket", "256 MiB"
        case Overlap():
            limit, what, such = statement.in_flight, "in flight", "2 GiB in flight"
        case Prefetch() | Delay() | KeepOrder():
            return
        case _:
            assert_never(statement)
    if limit is not None and limit.dimension == "bytes" and limit.value < 1:
        message = f"with less than a byte {what}, this line does nothing"
        yield diagnose(LIMIT_OF_NOTHING, message, limit.span, help=f"write a size such as `up to {such}`")
