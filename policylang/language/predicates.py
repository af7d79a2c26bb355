"""Predicates and figures: what the tree becomes, their canonical text, and the checks that need no names."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, assert_never, get_args, get_type_hints

from attrs import evolve
from lark import Transformer, v_args

from policylang.language import shown, syntax
from policylang.language.diagnostics import Diagnostic, Span, diagnose, written
from policylang.language.globs import NameGlob, name_glob_problem, path_glob_problem
from policylang.language.lexer import Lexeme, word_kind
from policylang.language.syntax import And, Annotated, Compare, CrossesCut, Is, Match, Not, Or, Predicate, Quantity

MEASURES: tuple[str, ...] = get_args(get_type_hints(Compare)["quantity"])
PROPERTIES: tuple[str, ...] = get_args(get_type_hints(Match)["property"])
FLAGS: tuple[str, ...] = get_args(get_type_hints(Is)["name"])
IS_KINDS = tuple(flag.removeprefix("is ") for flag in FLAGS if flag.startswith("is "))
CUT = "crosses cut per 2 GiB"
"""The one predicate that takes a figure, as it is shown to who seems to be looking for it."""
ANNOTATED = "annotated NAME"
"""The one that takes a name, likewise."""
_SHOWN = {"crosses cut": CUT, "annotated": ANNOTATED}

_BARE_UNITS = {prefix: (f"{prefix}iB", f"{prefix}B") for prefix in "KMGT"}
"""Units that a prefix alone may mean; operations are never counted in a bare ``G``."""
_UNITS_ELSEWHERE = {
    **dict.fromkeys(("sec", "secs", "second", "seconds", "S"), "s"),
    **dict.fromkeys(("msec", "msecs", "millis", "millisecond", "milliseconds", "MS"), "ms"),
    **dict.fromkeys(("usec", "usecs", "micros", "microsecond", "microseconds", "US", "mus"), "us"),
    **dict.fromkeys(("nsec", "nsecs", "nanos", "nanosecond", "nanoseconds", "NS"), "ns"),
}
_UNITS_ARE = f"the units are {', '.join(unit for unit in shown.UNITS if unit.isascii() and not unit.endswith('FLOPs'))}"
_ELSEWHERE = {
    **dict.fromkeys(("size", "memory", "mem", "nbytes", "byte", "mb", "gb", "storage"), "bytes"),
    **dict.fromkeys(("name", "path", "fqn", "scope", "layer", "block", "modules"), "module"),
    **dict.fromkeys(("elements", "element_count", "length", "len"), "numel"),
    **dict.fromkeys(("dim", "dims", "rank"), "ndim"),
    **dict.fromkeys(("type", "precision"), "dtype"),
    **dict.fromkeys(("flop", "compute", "cost", "work"), "flops"),
    **dict.fromkeys(("seconds", "duration", "runtime", "run_time", "latency", "ms", "us", "elapsed"), "time"),
    **dict.fromkeys(("seconds_per_gib", "time_per_byte", "seconds_per_byte", "price", "density"), "time_per_gib"),
    **dict.fromkeys(("consumers", "readers", "uses", "fanout"), "users"),
    **dict.fromkeys(("world_size", "ranks", "group"), "group_size"),
}
"""Names of the properties in other tools."""
_OPERATORS = ("op", "operator", "target", "function", "kind", "ops")

_INDEXED = re.compile(r"(\w+)\[(-?\d{1,4})\]")
_NUMBER = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][0-9]+)?)([A-Za-zµμ]*)")
_MAX_DIGITS = 15
_LEAST_PERCENT = 1e-9


def integer(word: Lexeme, digits: str | None = None) -> int:
    """The whole number that a word writes; a number nobody can mean is reported and read as 1."""
    text = (str(word) if digits is None else digits).replace("_", "")
    if len(text) > _MAX_DIGITS:
        word.report("APL016", f"the number `{text[:20]}…` is too large")
        return 1
    return int(text)


def position(word: Lexeme) -> int:
    """The number of an ordinal: 2 of ``2nd``, of ``every 2nd`` and of a plain ``2``; it starts at 1."""
    value = integer(word, "".join(re.findall(r"[0-9]", str(word))))
    if value < 1:
        word.report("APL205", "positions and counts start at 1")
        return 1
    return value


def share_of(number: Lexeme, span: Span) -> Fraction:
    """The share that a per cent figure means, exactly: 29% of a hundred blocks are 29 of them. ``span`` is of the
    figure with its sign. A figure out of range is reported and read as all of it."""
    text = str(number).replace("_", "")
    match = _NUMBER.fullmatch(text)
    if match is None or match.group(2) or len(text) > _MAX_DIGITS:
        number.report("APL016", f"`{text[:20]}` is not a share", span, help="a share is written as `25%`")
        return Fraction(1)
    if not _LEAST_PERCENT <= float(text) <= 100:
        number.report("APL205", "a share of the blocks is more than 0% and at most 100%", span)
        return Fraction(1)
    return Fraction(text) / 100


def quoted(word: Lexeme) -> str:
    """The text of a word, without its quotes if it is a quoted one."""
    return str(word)[1:-1] if word.type in ("STRING", "BUNDLED") else str(word)


spanned = v_args(wrapper=lambda build, _, words, __: build(words[0].span.to(words[-1].span), *words))
"""Calls the methods of a class of grammar rules with the span of their words, and with the words."""


@spanned
class PredicateRules(Transformer):  # type: ignore[type-arg]
    """The rules of the grammar from ``predicate`` down."""

    def predicate(self, span: Span, *parts: Any) -> Predicate:
        return Or(parts[::2], span=span)

    def conjunction(self, span: Span, *parts: Any) -> Predicate:
        return And(parts[::2], span=span)

    def negation(self, _span: Span, *words: Any) -> Predicate:
        predicate: Predicate = words[-1]
        for word in reversed(words[:-1]):
            predicate = Not(predicate, span=word.span.to(predicate.span))
        return predicate

    def grouped(self, span: Span, _opened: Lexeme, predicate: Predicate, _closed: Lexeme) -> Predicate:
        return evolve(predicate, span=span)

    def quantity(self, span: Span, number: Lexeme, unit: Lexeme | None = None) -> Quantity:
        match = _NUMBER.fullmatch(str(number))
        if match is None or len(match.group(1)) > 60:
            number.report("APL016", f"`{str(number)[:40]}` is not a number")
            return Quantity(0.0, "number", span=span)
        digits, name = match.groups()
        plain = Quantity(float(digits), "number", span=span)
        if unit is not None and name:
            help = "a figure has one unit: leave out the other"
            unit.report("APL010", f"`{unit}` cannot follow `{number}`", help=help)
            return plain
        name = name or str(unit or "")
        if plain.value > 1e30:
            number.report("APL016", f"the number `{number}` is too large")
        if not name:
            return plain
        if name in shown.UNITS:
            return Quantity(*shown.read_quantity(digits, name), span=span)
        own = (_UNITS_ELSEWHERE[name],) if name in _UNITS_ELSEWHERE else _BARE_UNITS.get(name.upper(), ())
        meant = own or shown.nearest(name, shown.UNITS)
        place, before = (span, f"{digits} ") if unit is None else (unit.span, "")
        fixes = written(place, [f"{before}{each}" for each in meant], near=True)
        help = shown.did_you_mean(meant) or _UNITS_ARE
        number.report("APL113", f"there is no unit `{name}`", place, help=help, fixes=fixes)
        return plain

    def compare(self, span: Span, subject: Lexeme, sign: Lexeme, value: Quantity) -> Predicate:
        name, index = _subject(subject)
        if name in PROPERTIES:
            message = f"`{name}` is compared with a name or a glob, not with a number"
            subject.report("APL206", message, value.span)
        elif name in MEASURES and (name == "shape") != (index is not None):
            if name == "shape":
                message, help = "`shape` is not one number", "write `shape[0]` for the size of the first dimension"
            else:
                message, help = f"`{name}` is one number and has no index", f"write `{name}`"
            subject.report("APL206", message, help=help, write=["shape[0]" if name == "shape" else name])
        elif name not in MEASURES:
            _unknown_property(subject)
        return Compare(name, str(sign), value, index, span=span)  # type: ignore[arg-type]

    def match(self, span: Span, subject: Lexeme, sign: Lexeme, value: Lexeme) -> Predicate:
        name, _ = _subject(subject)
        if name in MEASURES:
            message = f"`{subject}` is compared with a number, and `{value}` is none"
            subject.report("APL206", message, value.span)
        elif name not in PROPERTIES:
            _unknown_property(subject)
        elif sign not in ("==", "!="):
            message = f"`{name}` is compared with `==` or `!=` alone"
            subject.report("APL206", message, sign.span, write=["==", "!="])
        return Match(name, str(sign), quoted(value), span=span)  # type: ignore[arg-type]

    def is_kind(self, span: Span, word: Lexeme, *rest: Lexeme) -> Predicate:
        predicate = self.flag(span, word, rest[-1])
        return Not(predicate, span=span) if len(rest) == 2 else predicate

    def flag(self, span: Span, first: Lexeme, second: Lexeme) -> Predicate:
        if first == "annotated":
            return self.annotated(span, first, second)
        text = f"{first} {second}"
        if text not in FLAGS:
            _unknown_flag(text, span, first)
        return Is(text, span=span)  # type: ignore[arg-type]

    def annotated(self, span: Span, first: Lexeme, name: Lexeme) -> Predicate:
        if first != "annotated":
            _unknown_flag(f"{first} {name}", span, first)
        return Annotated(quoted(name), span=span)

    def crosses_cut(self, span: Span, first: Lexeme, second: Lexeme, _per: Lexeme, size: Any) -> Predicate:
        if first != "crosses":
            _unknown_flag(f"{first} {second}", first.span.to(second.span), first)
        if isinstance(size, Lexeme) and size != "auto":
            help = "write `auto`, or a size such as `2 GiB`"
            size.report("APL116", f"stages cannot be cut per `{size}`", help=help, write=["auto"])
        return CrossesCut(None if isinstance(size, Lexeme) else size, span=span)


def _unknown_flag(text: str, span: Span, at: Lexeme) -> None:
    kind = text.split()[-1].removesuffix("s")
    near: tuple[str, ...] = (f"from {kind}",)
    if f"from {kind}" not in FLAGS:
        near = shown.nearest(text, (*FLAGS, "crosses cut")) or shown.nearest(text.split()[0], ["annotated"])
    help = shown.did_you_mean(_SHOWN.get(word, word) for word in near)
    fixes = written(span, filter(None, (_in_place(word, span) for word in near)), near=True)
    at.report("APL114", f"nodes have no property `{text}`", span, help=help, fixes=fixes)


def _in_place(flag: str, span: Span) -> str | None:
    """A flag as it is written in place of another one; None if it takes more."""
    if flag == "crosses cut":
        return flag if span.source.text[span.end :].lstrip(" \t").startswith("per") else CUT
    if span.text.split()[1:2] == ["not"]:
        return flag.replace("is ", "is not ", 1) if flag.startswith("is ") else None
    return flag if flag in FLAGS else None


def _subject(word: Lexeme) -> tuple[str, int | None]:
    indexed = _INDEXED.fullmatch(str(word))
    return (indexed.group(1), int(indexed.group(2))) if indexed else (str(word), None)


def _unknown_property(subject: Lexeme) -> None:
    known, name, message = (*MEASURES, *PROPERTIES), subject.lower(), f"nodes have no property `{subject}`"
    if name in _OPERATORS:
        help = "an operator replaces a property: `save mm`, or joined with `and`"
        subject.report("APL114", message, help=help)
    else:
        subject.misnamed("APL114", message, known, f"the properties are {', '.join(known)}", _ELSEWHERE.get(name))


_GLOB_KINDS = frozenset({"NAME", "PATH", "INT", "NUMBER"})
_VALUE_KINDS = frozenset({"NAME", "PATH"})


def format_glob(glob: str) -> str:
    """A module path as it can be read back: in quotes where it is a word of the language."""
    return glob if word_kind(glob) in _GLOB_KINDS else f'"{glob}"'


def quantity_text(quantity: Quantity) -> str:
    return shown.write_quantity(quantity.value, quantity.dimension)


def format_predicate(predicate: Predicate) -> str:
    """The canonical text of a predicate."""
    match predicate:
        case Or():
            return " or ".join(_grouped(part, Or) for part in predicate.parts)
        case And():
            return " and ".join(_grouped(part, Or, And) for part in predicate.parts)
        case Not():
            return f"not {_grouped(predicate.predicate, Or, And)}"
        case Is():
            return predicate.name
        case CrossesCut():
            return f"crosses cut per {'auto' if predicate.size is None else quantity_text(predicate.size)}"
        case Annotated():
            return f"annotated {_name_text(predicate.name)}"
        case Match():
            return f"{predicate.property} {predicate.op} {_name_text(predicate.pattern)}"
        case Compare():
            index = "" if predicate.index is None else f"[{predicate.index}]"
            return f"{predicate.quantity}{index} {predicate.op} {quantity_text(predicate.value)}"
        case _:
            assert_never(predicate)


def _name_text(text: str) -> str:
    return text if word_kind(text) in _VALUE_KINDS else f'"{text}"'


def _grouped(predicate: Predicate, *looser: type) -> str:
    text = format_predicate(predicate)
    return f"({text})" if isinstance(predicate, looser) else text


Report = Callable[[Diagnostic], None]

_CUT = "a stage of `crosses cut`"
_DIMENSIONS: dict[str, tuple[shown.Dimension, ...]] = {
    "bytes": ("bytes",),
    _CUT: ("bytes",),
    "flops": ("flops",),
    "time": ("seconds",),
    "time_per_gib": ("seconds",),
    "saved": ("bytes", "fraction"),
    "recomputed": ("bytes", "fraction"),
    **dict.fromkeys(("peak", "peak per stage", "host memory", "host memory per host"), ("bytes",)),
    "recomputed flops": ("flops", "fraction"),
    "recomputed operators": ("number", "fraction"),
    "recomputed time": ("seconds", "fraction"),
    "exposed": ("seconds", "fraction"),
    "step time": ("seconds",),
}
_EXAMPLE_FIGURES: dict[shown.Dimension, str] = {
    "bytes": "`64 MiB`",
    "flops": "`2 GFLOP`",
    "seconds": "`400 us`",
    "fraction": "`20%`",
    "number": "`16`",
}


def dimensions_of(measured: str) -> tuple[shown.Dimension, ...]:
    """The dimensions that a measure or figure can be compared with, the usual one first."""
    return _DIMENSIONS.get(measured, ("number",))


def fit_predicate(predicate: Predicate, report: Report) -> Predicate:
    """The predicate with plain figures given their dimension and types their full name; misfits are reported."""
    match predicate:
        case syntax.Compare():
            return evolve(predicate, value=fit_quantity(predicate.quantity, predicate.value, report))
        case syntax.Match():
            return _fit_match(predicate, report)
        case syntax.Is() | syntax.Annotated():
            return predicate
        case syntax.CrossesCut():
            if predicate.size is None:
                return predicate
            size = fit_quantity(_CUT, predicate.size, report)
            if size.dimension == "bytes" and size.value < 1:
                message = "a stage of less than a byte holds nothing"
                report(diagnose("APL210", message, size.span, help="write a size such as `2 GiB`"))
            return evolve(predicate, size=size)
        case syntax.Not():
            return evolve(predicate, predicate=fit_predicate(predicate.predicate, report))
        case syntax.And() | syntax.Or():
            return evolve(predicate, parts=tuple(fit_predicate(part, report) for part in predicate.parts))
        case _:
            assert_never(predicate)


def fit_quantity(measured: str, value: Quantity, report: Report) -> Quantity:
    """The figure in the dimension of what it is compared with: a plain number of bytes is bytes. Nobody thinks of
    operators in seconds, so a time has a unit, unless it is zero."""
    dimensions = dimensions_of(measured)
    if value.dimension in dimensions:
        return value
    if value.dimension == "number" and dimensions[0] == "seconds" and value.value:
        written = [f"{value.span.one_line} {unit}" for unit in ("us", "ms", "s")]
        message = f"`{measured}` is compared with a time, and `{value.span.one_line}` has no unit"
        help = "write `{}`, `{}` or `{}`".format(*written)
        report(diagnose("APL211", message, value.span, help=help, write=written))
    if value.dimension == "number":
        return evolve(value, dimension=dimensions[0])
    shares = dimensions == ("bytes", "fraction")
    examples = {**_EXAMPLE_FIGURES, "fraction": "`20% of forward`"} if shares else _EXAMPLE_FIGURES
    wanted = " or ".join(shown.DIMENSION_NAMES[dimension] for dimension in dimensions)
    subject, relation = (_CUT, "is counted in") if measured == _CUT else (f"`{measured}`", "is compared with")
    named = shown.DIMENSION_NAMES[value.dimension]
    message = f"{subject} {relation} {wanted}, not {relation.rpartition(' ')[2]} {named}"
    help = f"write a figure such as {' or '.join(examples[dimension] for dimension in dimensions)}"
    report(diagnose("APL201", message, value.span, help=help))
    return value


def check_path_glob(glob: str, span: Span, report: Report) -> None:
    """Report a malformed glob; ``span`` is the phrase that ends with it."""
    if problem := path_glob_problem(glob):
        report(diagnose("APL112", f"the module path `{glob}` {problem}", last_text(glob, span)))


def _fit_match(match: syntax.Match, report: Report) -> syntax.Match:
    span = last_text(match.pattern, match.span)
    if match.property == "module":
        check_path_glob(match.pattern, match.span, report)
    elif problem := name_glob_problem(match.pattern):
        report(diagnose("APL112", f"the name `{match.pattern}` {problem}", span))
    elif match.property == "dtype":
        pattern = match.pattern.removeprefix("torch.")
        pattern = shown.ALIASES.get(pattern, pattern)
        if not any(map(NameGlob(pattern).matches, shown.DTYPES)):
            near = shown.nearest(pattern, (*shown.DTYPES, *shown.ALIASES))
            message = f"there is no tensor type `{match.pattern}`"
            report(diagnose("APL115", message, span, help=shown.did_you_mean(near), write=near))
        return evolve(match, pattern=pattern)
    return match


def last_text(text: str, span: Span) -> Span:
    """The last occurrence of a text in a span."""
    at = span.text.rfind(text)
    return span if at < 0 else Span(span.source, span.start + at, span.start + at + len(text))
