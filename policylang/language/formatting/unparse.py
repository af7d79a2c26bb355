"""Canonical text: one form for all texts that mean the same, with no more parentheses than it takes to read it back.

``parse(format_selector(x)) == x`` for every selector, which the tests hold it to. Of a whole policy the canonical text
is what digests and cache keys are made of, so it holds everything that can change a decision and nothing else.
"""

from __future__ import annotations

import json
import re
from typing import assert_never

from policylang.language import syntax
from policylang.language.devices.profile import DeviceProfile
from policylang.language.grammar import is_policy_name
from policylang.language.predicates import format_glob, format_quantity
from policylang.language.selectors import _ATOM, _PHRASE, _format, _picked, format_selector
from policylang.language.syntax import (
    Expectation,
    Let,
    Policy,
    Rewriting,
    Rule,
    Scheduling,
)
from policylang.language.walk import names_in

_BARE = re.compile(r"\w[\w.+-]*")


def format_rule(rule: Rule) -> str:
    """The canonical text of a rule: ``optional save mm``."""
    modifiers = [word for word, said in (("optional", rule.optional), ("override", rule.override)) if said]
    limit = [] if rule.budget is None else [f"up to {format_quantity(rule.budget)} per rank"]
    return " ".join((*modifiers, rule.action.word, format_selector(rule.selector), *limit))


def format_policy(policy: Policy) -> str:
    """The canonical text of a resolved policy: names that are used, includes in place, no comments."""
    lines = [f"policy {policy.name}"] if is_policy_name(policy.name) else []
    if policy.blocks is not None:
        lines.append(f"blocks {format_glob(policy.blocks.glob)}")
    if policy.device is not None:
        lines.extend(_device_lines(policy.device))
    if policy.undecided is not None:
        lines.append(f"undecided -> {policy.undecided.fate}")
    lines.extend(f"let {let.name} = {format_selector(let.selector)}" for let in _used_lets(policy))
    lines.extend(format_rule(rule) for rule in policy.rules)
    lines.extend(map(format_rewrite, policy.rewrites))
    lines.extend(map(format_scheduling, policy.scheduling))
    lines.extend(map(format_expectation, policy.expectations))
    return "\n".join(lines) + "\n"


def _device_lines(device: DeviceProfile) -> list[str]:
    """By the name that the profile has, wherever its file lies, and with its figures: those decide."""
    name = device.name if _BARE.fullmatch(device.name) else '"' + re.sub(r'["\n]', " ", device.name) + '"'
    figures = json.loads(device.canonical)
    return [f"device {name}", *(f"# {key}: {json.dumps(each)}" for key, each in figures.items())]


def format_expectation(expectation: Expectation) -> str:
    """The canonical text of an expectation."""
    match expectation:
        case syntax.ExpectTotal():
            per = " per block" if expectation.per_block else ""
            of = " of forward" if expectation.of_forward else ""
            return f"expect {expectation.figure}{per} {expectation.op} {format_quantity(expectation.limit)}{of}"
        case syntax.ExpectFate():
            return f"expect {expectation.quantifier} {_picked(expectation.selector)} {expectation.fate}"
        case syntax.ExpectCount():
            inner, scope = _format(expectation.selector), expectation.scope
            if scope is None:
                return f"expect {expectation.bound} {expectation.n} {inner.text}"
            counted = inner.at(_ATOM) if inner.level < _PHRASE or inner.unscoped else inner
            return f"expect {expectation.bound} {expectation.n} {counted.text} per {scope.value}"
        case _:
            assert_never(expectation)


def format_rewrite(statement: Rewriting) -> str:
    """The canonical text of a rewrite: ``fuse all_gather chains over dp, tp``."""
    optional = "optional " if statement.optional else ""
    match statement:
        case syntax.Collapse():
            return f"{optional}collapse round_trips"
        case syntax.Bucket():
            per = {None: "", 1: " per block"}.get(statement.blocks, f" per {statement.blocks} blocks")
            limit = "" if statement.size is None else f" up to {format_quantity(statement.size)}"
            return f"{optional}bucket {_picked(statement.selector)}{per}{limit}"
        case syntax.Fuse():
            over = f" over {', '.join(statement.dims)}" if statement.dims else ""
            return f"{optional}fuse {statement.collective} chains{over}"
        case _:
            assert_never(statement)


def format_scheduling(statement: Scheduling) -> str:
    """The canonical text of a scheduling statement: ``prefetch all_gather 1 block ahead``."""
    optional, picked = "optional " if statement.optional else "", _picked(statement.selector)
    match statement:
        case syntax.KeepOrder():
            return f"{optional}keep order of {picked}"
        case syntax.Overlap():
            in_flight, peak = statement.in_flight, statement.peak
            limits = "" if in_flight is None else f" up to {format_quantity(in_flight)} in flight"
            limits += "" if peak is None else f" within {format_quantity(peak)} of peak"
            return f"{optional}overlap {picked}{limits}"
        case syntax.Prefetch():
            return f"{optional}prefetch {picked} {_blocks(statement)} ahead"
        case syntax.Delay():
            return f"{optional}delay {picked} {_blocks(statement)}"
        case _:
            assert_never(statement)


def _blocks(statement: syntax.Prefetch | syntax.Delay) -> str:
    return "1 block" if statement.blocks == 1 else f"{statement.blocks} blocks"


def _used_lets(policy: Policy) -> list[Let]:
    """The names that the statements reach, in the order of definition."""
    used = names_in(policy, policy.statements)
    return [let for name, let in policy.lets.items() if name in used]
