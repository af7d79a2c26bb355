"""fit"""

from __future__ import annotations

import re
from itertools import zip_longest

from attrs import evolve

from policylang.language import syntax
from policylang.language.diagnostics import diagnose
from policylang.language.predicates import Report, _last, fit_quantity
from policylang.language.syntax import COMPARISONS

LANGUAGE_VERSION = (0, 2)
"""The version of the language that this package reads: what ``requires policylang`` is held against."""


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


def fit_total(expectation: syntax.ExpectTotal, report: Report) -> syntax.ExpectTotal:
    return evolve(expectation, limit=fit_quantity(expectation.figure, expectation.limit, report))
