"""Shares of the blocks that come to no block on a graph: half of one, rounded down."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import floor

from policylang.language.diagnostics import Diagnostic, Fix, Span, diagnose, prefixed, written
from policylang.language.selectors import own_words
from policylang.language.syntax import Expectation, InBlock, Policy, Statement
from policylang.language.walk import selectors_of, with_lets
from policylang.language.wording import counted
from policylang.planning.selection.selectors import Selections

SHARE_OF_NONE = "APL369"
_SHARE = re.compile(r"\b(?:first|last)\s+\S+(?:\s*%)?\s+of\s+blocks?$")


def empty_shares(policy: Policy, selections: Selections) -> Iterator[Diagnostic]:
    """An error for each statement that speaks of such a share; a line that is ``optional`` may."""
    count = len(selections.blocks.names)
    for statement in policy.statements:
        if not isinstance(statement, Expectation) and statement.optional:
            continue
        for part in with_lets(policy, *selectors_of([statement])):
            if not isinstance(part, InBlock) or (share := part.which.share) is None or floor(share * count):
                continue
            words = own_words(part).partition(" ")[2]
            has = f"has {counted(count, 'block')}, and a share is rounded down" if count else "has no blocks"
            yield diagnose(
                SHARE_OF_NONE,
                f"`{words}` of `{statement.span.one_line}` is no block: this graph {has}",
                span=next(selectors_of([statement])).span,
                help=_help(statement, part, count),
                mends=_mends(statement, part, count),
            )
            break


def _mends(statement: Statement, part: InBlock, count: int) -> list[Fix]:
    share = _SHARE.search(part.span.text)
    found: list[Fix] = []
    if count and share is not None and statement.span.start <= part.span.start < statement.span.end:
        span = Span(part.span.source, part.span.start + share.start(), part.span.end)
        found.extend(written(span, [f"{part.which.kind} block"]))
    return [*found, prefixed(statement.span, "optional")] if not isinstance(statement, Expectation) else found


def _help(statement: Statement, part: InBlock, count: int) -> str | None:
    if count:
        return f"write `{part.which.kind} block` for one of them"
    may_be = not isinstance(statement, Expectation)
    return f"if that is as it should be, write `optional {statement.span.one_line}`" if may_be else None
