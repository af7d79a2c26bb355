"""Which rules and scheduling lines the tests have exercised: one is covered once it has matched a node in some test, a
bucket once it is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from attrs import define, field

from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.files import find_policy, policy_files, read_source
from policylang.language.parser import parse_file
from policylang.language.syntax import Bucket, Rewriting, Rule, Scheduling
from policylang.planning.plan import Plan

UNCOVERED = "APL514"

_Line = Rule | Bucket | Scheduling
_Key = tuple[str, int]
"""The text of a rule's file, and where in it the rule starts: a file is the same by whatever path it is included."""


@define(eq=False)
class Coverage:
    _covered: set[_Key] = field(factory=set)

    def add(self, plan: Plan) -> None:
        """Count the rules and scheduling lines of a plan that matched."""
        self._covered.update(_key(outcome.rule) for outcome in plan.rules if outcome.matched)
        if (order := plan.order) is not None:
            made = {edit.statement for edit in order.edits.done}
            self._covered.update(_key(line) for at, line in enumerate(plan.policy.rewrites) if at in made)
            self._covered.update(_key(outcome.statement) for outcome in order.outcomes if outcome.matched)

    def of(self, paths: Sequence[str]) -> tuple[int, tuple[Diagnostic, ...]]:
        """How many such lines some policies have, and an error for each that no plan covered."""
        rules = 0
        found: list[Diagnostic] = []
        for each in _rules(paths):
            if isinstance(each, Diagnostic):
                found.append(each)
                continue
            rules += 1
            if _key(each) not in self._covered:
                help = "write one with a graph on which it matches"
                found.append(diagnose(UNCOVERED, f"no test exercises `{each.span.one_line}`", each.span, help=help))
        return rules, tuple(found)


def _rules(paths: Iterable[str]) -> Iterable[_Line | Diagnostic]:
    """The rules and scheduling lines that stand in some files themselves, and what kept files from being read."""
    for name in (file for path in paths for file in policy_files(path)):
        file, shown = find_policy(name)
        source = read_source(Path(file), shown)
        if isinstance(source, Diagnostic):
            yield source.found_in(shown)
            continue
        parsed, problems = parse_file(source)
        yield from problems
        yield from (statement for statement in parsed.statements if isinstance(statement, _Line))


def _key(rule: Rewriting | _Line) -> _Key:
    return rule.span.source.text, rule.span.start
