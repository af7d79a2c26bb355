"""Parser callbacks that build the statements about the order of collectives (see ``tree.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve
from lark import v_args

from policylang.language import syntax
from policylang.language.diagnostics import Span, inserted
from policylang.language.lexer import Lexeme
from policylang.language.predicates import integer
from policylang.language.selectors import SelectorRules, SpannedSelector
from policylang.language.syntax import Quantity, Scope
from policylang.language.walk import walk


@v_args(inline=True)
class OrderRules(SelectorRules):
    """The rules of the grammar from ``bucket`` to ``within_peak``."""

    def bucket(self, *words: Any) -> syntax.Bucket:
        word, rest, optional = opened(words)
        selector: SpannedSelector = rest[0]
        loose, blocks = word.origin.loose, None
        if loose and loose[-1][1].end == selector.span.end and loose[-1][0] in (Scope.BLOCK, *_numbers(loose)):
            blocks = 1 if (per := loose.pop()[0]) is Scope.BLOCK else int(per)  # type: ignore[arg-type]
        size: Quantity | None = rest[1] if len(rest) > 1 else None
        end = selector.span if size is None else size.span
        span = word.span.to(end)
        if blocks is None and (taken := _taken_at_end(selector)) is not None:
            message = f"`per {taken.value}` counts within the selector here, and says nothing of a bucket"
            help = f"write `({selector.span.one_line})`, and behind it what goes into one bucket"
            word.report("APL014", message, selector.span, help=help)
        elif blocks is None and size is None and not loose:
            help = "write `per block`, `per 2 blocks`, or a size such as `up to 256 MiB`, behind it"
            said = evolve(inserted(span, "per block"), is_choice=True)
            message = "this does not say how much goes into one bucket"
            word.report("APL116", message, span, help=help, mends=[said])
        return syntax.Bucket(selector.selector, blocks, size, optional, span)

    def prefetch(self, *words: Any) -> syntax.Prefetch:
        word, (selector, number, _, ahead), optional = opened(words)
        if ahead != "ahead":
            message = f"a prefetch is so many blocks `ahead`, not `{ahead}`"
            ahead.report("APL010", message, help="write `ahead`", write=["ahead"])
        return syntax.Prefetch(selector.selector, _distance(number), optional, word.span.to(ahead.span))

    def delay(self, *words: Any) -> syntax.Delay:
        word, (selector, number, block), optional = opened(words)
        return syntax.Delay(selector.selector, _distance(number), optional, word.span.to(block.span))

    def overlap(self, *words: Any) -> syntax.Overlap:
        word, (selector, *limits), optional = opened(words)
        found = dict(limits)
        end = limits[-1][1] if limits else selector
        in_flight, peak = found.get("in flight"), found.get("peak")
        return syntax.Overlap(selector.selector, in_flight, peak, optional, word.span.to(end.span))

    def keep_order(self, *words: Any) -> syntax.KeepOrder:
        word, (_of, selector), optional = opened(words)
        return syntax.KeepOrder(selector.selector, optional, word.span.to(selector.span))

    def up_to(self, word: Lexeme, size: Quantity) -> Quantity:
        return _bytes(size, word.span.to(size.span), word, "a bucket has a size in bytes", "up to 256 MiB")

    def in_flight(self, word: Lexeme, size: Quantity, end: Lexeme) -> tuple[str, Quantity]:
        span = word.span.to(end.span)
        return "in flight", _bytes(size, span, word, "what is in flight is limited in bytes", "up to 2 GiB in flight")

    def within_peak(self, word: Lexeme, size: Quantity, _of: Lexeme, peak: Lexeme) -> tuple[str, Quantity]:
        if peak != "peak":
            message = f"a schedule stays within so much of `peak`, not of `{peak}`"
            peak.report("APL010", message, help="write `peak`", write=["peak"])
        span = word.span.to(peak.span)
        if size.dimension == "fraction":
            return "peak", evolve(size, span=span)
        return "peak", _bytes(size, span, word, "a peak is limited in bytes, or per cent", "within 1 GiB of peak")


def _distance(number: Lexeme) -> int:
    """How many blocks ahead or later. None moves nothing, which is reported, and read as 1."""
    blocks = integer(number)
    if not blocks:
        message = "a distance of 0 blocks moves nothing"
        number.report("APL205", message, help="write `1`, or leave the line out", write=["1"])
    return blocks or 1


def _taken_at_end(selector: SpannedSelector) -> Scope | None:
    """The `per` at the end of a selector, outside parentheses, that a position has taken."""
    positions = (part for part in walk(selector.selector) if isinstance(part, syntax.Ordinal))
    return next((each.scope for each in positions if each.scope and each.span.end == selector.span.end), None)


def _numbers(loose: Sequence[tuple[Scope | int, Span]]) -> list[int]:
    return [value for value, _ in loose if not isinstance(value, Scope)]


def _bytes(size: Quantity, span: Span, word: Lexeme, message: str, example: str) -> Quantity:
    if size.dimension != "bytes" and not word.origin.problems:
        word.report("APL116", message, size.span, help=f"such as `{example}`")
    return evolve(size, span=span)


def opened(words: Sequence[Any]) -> tuple[Lexeme, Sequence[Any], bool]:
    """The first word of a statement, those after its verb, and whether it may find nothing."""
    optional = words[0].type == "OPTIONAL"
    return words[0], words[1 + optional :], optional
