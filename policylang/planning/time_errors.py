"""Policies that speak of time: what they say of it, and what stands in the way of an answer on a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from policylang.language.devices.lookup import bundled_devices
from policylang.language.diagnostics import Diagnostic, Span, diagnose, put_before
from policylang.language.predicates import format_predicate
from policylang.language.syntax import TIMES, Compare, Expectation, ExpectTotal, Overlap, Policy, Rule, Statement
from policylang.language.walk import tests_of
from policylang.language.wording import counted, first_lines

if TYPE_CHECKING:
    from policylang.simulation.node_times import NodeTimes

NO_DEVICE = "APL370"
_MOST_NAMES = 8


def times_asked(policy: Policy) -> Iterator[tuple[str, Span]]:
    """What the policy says of time, in words and where: tests of its statements, and expectations about it."""
    for statement in policy.statements:
        if isinstance(statement, Overlap) or (isinstance(statement, ExpectTotal) and statement.of_time):
            yield statement.span.one_line, statement.span
        yield from ((format_predicate(test), test.span) for test in _timed_tests(policy, statement))


def decides_by_time(policy: Policy) -> bool:
    """Whether a rule does, or the order of collectives."""
    timed = any(True for _ in _timed_tests(policy, *policy.deciding))
    return timed or any(isinstance(each, Overlap) for each in policy.scheduling)


def speaks_of_time(statement: Rule | Expectation, policy: Policy) -> bool:
    """Whether a sentence does, or a name that it uses."""
    timed = isinstance(statement, ExpectTotal) and statement.of_time
    return timed or any(True for _ in _timed_tests(policy, statement))


def time_errors(policy: Policy, times: NodeTimes | None, *, asked_for: bool, copies: bool) -> Iterator[Diagnostic]:
    """Why times that are asked for are not known: nobody named a device, or its profile lacks a figure.

    ``asked_for``: whether somebody named the device for this plan, who then wants to see times. ``copies``: whether
    the plan moves values to the host.
    """
    from policylang.simulation.missing_figures import lacking  # digests are of audits too, which know no simulation

    asked = list(dict.fromkeys(times_asked(policy)))
    if times is None:
        if asked:
            yield _no_device(policy, asked)
    elif (asked or asked_for) and (found := lacking(times, asked[0][1] if asked else None, copies=copies)):
        yield found


def _timed_tests(policy: Policy, *statements: Statement) -> Iterator[Compare]:
    for test in tests_of(policy, *statements):
        if isinstance(test, Compare) and test.quantity in TIMES:
            yield test


def _no_device(policy: Policy, asked: list[tuple[str, Span]]) -> Diagnostic:
    (words, span), *others = asked
    own = [each.span for each in policy.statements if policy.included_by(each.span) is None]
    first = min(own, key=lambda each: each.start, default=span)
    more = f", as {counted(len(others), 'other phrase is', 'other phrases are')}" if others else ""
    return diagnose(
        NO_DEVICE,
        f"`{words}` is about time{more}, and no device says how long anything takes",
        span,
        help="write `device h100-sxm` into the policy, or plan it with `--device h100-sxm`, in Python with `device=`; "
        f'bundled are {", ".join(bundled_devices())}, and a profile of your own is `device "cluster.toml"`',
        details=first_lines([f"{where.location}: {phrase}" for phrase, where in others], _MOST_NAMES),
        mends=[put_before(first, f"device {name}") for name in bundled_devices()],
    )
