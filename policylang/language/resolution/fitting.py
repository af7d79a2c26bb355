"""Semantic checks that need no names: dimensions of figures, tensor types, globs, the required version."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import zip_longest
from typing import assert_never

from attrs import evolve

from policylang.language import syntax
from policylang.language.diagnostics import Diagnostic, Span, diagnose
from policylang.language.globs import NameGlob, name_glob_problem, path_glob_problem
from policylang.language.syntax import COMPARISONS, Predicate, Quantity
from policylang.language.units import ALIASES, DTYPES, NAMES, Dimension
from policylang.language.wording import did_you_mean, nearest

LANGUAGE_VERSION = (0, 2)
"""The version of the language that this package reads: what ``requires policylang`` is held against."""

Report = Callable[[Diagnostic], None]

_CUT = "a stage of `crosses cut`"
_DIMENSIONS: dict[str, tuple[Dimension, ...]] = {
    "bytes": ("bytes",),
    _CUT: ("bytes",),
    "flops": ("flops",),
    "time": ("seconds",),
    "time_per_gib": ("seconds",),
    "saved": ("bytes", "fraction"),
    "recomputed": ("bytes", "fraction"),
    "peak": ("bytes",),
    "recomputed flops": ("flops", "fraction"),
    "recomputed operators": ("number", "fraction"),
    "recomputed time": ("seconds", "fraction"),
    "exposed": ("seconds", "fraction"),
    "step time": ("seconds",),
}
_EXAMPLES: dict[Dimension, str] = {
    "bytes": "`64 MiB`",
    "flops": "`2 GFLOP`",
    "seconds": "`400 us`",
    "fraction": "`20%`",
    "number": "`16`",
}


def dimensions_of(measured: str) -> tuple[Dimension, ...]:
    """What a measure of nodes, or a figure to expect something of, is compared with, the usual one first."""
    return _DIMENSIONS.get(measured, ("number",))


def fit_predicate(predicate: Predicate, report: Report) -> Predicate:
    """The predicate with plain figures given their dimension and types their full name; misfits are reported."""
    match predicate:
        case syntax.Compare():
            return evolve(predicate, value=fit_quantity(predicate.quantity, predicate.value, report))
        case syntax.Match():
            return _fit_match(predicate, report)
        case syntax.CrossesCut():
            return predicate if predicate.size is None else evolve(predicate, size=_fit_stage(predicate.size, report))
        case syntax.Not():
            return evolve(predicate, predicate=fit_predicate(predicate.predicate, report))
        case syntax.And() | syntax.Or():
            return evolve(predicate, parts=tuple(fit_predicate(part, report) for part in predicate.parts))
        case syntax.Is() | syntax.Annotated():
            return predicate
        case _:
            assert_never(predicate)


def _fit_stage(size: Quantity, report: Report) -> Quantity:
    fitted = fit_quantity(_CUT, size, report)
    if fitted.dimension == "bytes" and fitted.value < 1:
        message = "a stage of less than a byte holds nothing"
        report(diagnose("APL210", message, size.span, help="write a size such as `2 GiB`"))
    return fitted


def fit_total(expectation: syntax.ExpectTotal, report: Report) -> syntax.ExpectTotal:
    return evolve(expectation, limit=fit_quantity(expectation.figure, expectation.limit, report))


def fit_quantity(measured: str, value: Quantity, report: Report) -> Quantity:
    """The figure in the dimension of what it is compared with: a plain number of bytes is bytes. Nobody thinks of
    operators in seconds, so a time has a unit, unless it is zero."""
    dimensions = dimensions_of(measured)
    if value.dimension in dimensions:
        return value
    if value.dimension == "number" and dimensions[0] == "seconds" and value.value:
        report(_no_unit(measured, value))
    if value.dimension == "number":
        return evolve(value, dimension=dimensions[0])
    shares = dimensions == ("bytes", "fraction")
    examples = {**_EXAMPLES, "fraction": "`20% of forward`"} if shares else _EXAMPLES
    wanted = " or ".join(NAMES[dimension] for dimension in dimensions)
    subject, relation = (_CUT, "is counted in") if measured == _CUT else (f"`{measured}`", "is compared with")
    message = f"{subject} {relation} {wanted}, not {relation.rpartition(' ')[2]} {NAMES[value.dimension]}"
    help = f"write a figure such as {' or '.join(examples[dimension] for dimension in dimensions)}"
    report(diagnose("APL201", message, value.span, help=help))
    return value


def _no_unit(measured: str, value: Quantity) -> Diagnostic:
    written = value.span.one_line
    help = f"write `{written} us`, `{written} ms` or `{written} s`"
    message = f"`{measured}` is compared with a time, and `{written}` has no unit"
    return diagnose("APL211", message, value.span, help=help, write=[f"{written} {unit}" for unit in ("us", "ms", "s")])


def check_path_glob(glob: str, span: Span, report: Report) -> None:
    """Report a malformed glob; ``span`` is the phrase that ends with it."""
    problem = path_glob_problem(glob)
    if problem:
        report(diagnose("APL112", f"the module path `{glob}` {problem}", _last(glob, span)))


def check_version(requires: syntax.Requires, report: Report) -> None:
    """Report a ``requires`` that this language version does not meet."""
    parts = requires.version.split(".")
    if not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        message, help = f"`{requires.version}` is not a version", "a version is written as `0.2`"
        report(diagnose("APL016", message, _last(requires.version, requires.span), help=help))
        return
    here, wanted = zip(*zip_longest(LANGUAGE_VERSION, map(int, parts), fillvalue=0), strict=True)
    if not COMPARISONS[requires.op](here, wanted):
        own = ".".join(map(str, LANGUAGE_VERSION))
        message = f"the policy requires language version {requires.op} {requires.version}, and this is {own}"
        help = "install a newer policylang" if here < wanted else "adapt the policy, or install an older policylang"
        report(diagnose("APL204", message, requires.span, help=help))


def _fit_match(match: syntax.Match, report: Report) -> syntax.Match:
    if match.property == "module":
        check_path_glob(match.pattern, match.span, report)
        return match
    problem = name_glob_problem(match.pattern)
    if problem:
        report(diagnose("APL112", f"the name `{match.pattern}` {problem}", _last(match.pattern, match.span)))
        return match
    return _fit_dtype(match, report) if match.property == "dtype" else match


def _fit_dtype(match: syntax.Match, report: Report) -> syntax.Match:
    pattern = match.pattern.removeprefix("torch.")
    pattern = ALIASES.get(pattern, pattern)
    if not any(map(NameGlob(pattern).matches, DTYPES)):
        message = f"there is no tensor type `{match.pattern}`"
        near = nearest(pattern, (*DTYPES, *ALIASES))
        report(diagnose("APL115", message, _last(match.pattern, match.span), help=did_you_mean(near), write=near))
    return evolve(match, pattern=pattern)


def _last(text: str, span: Span) -> Span:
    """Where a text stands last in a span."""
    at = span.text.rfind(text)
    return span if at < 0 else Span(span.source, span.start + at, span.start + at + len(text))
