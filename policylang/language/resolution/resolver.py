"""From statements to a policy: every name looked up, every figure fitted, every statement in its place.

Everything found wrong is reported, not the first thing only; a policy comes out where nothing was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from attrs import define, evolve, field

from policylang.language.codes import diagnose, is_error
from policylang.language.diagnostics import Diagnostic, Related
from policylang.language.resolution.fitting import check_path_glob, check_version, fit_total
from policylang.language.resolution.includes import PlacedStatement
from policylang.language.resolution.names import Definitions
from policylang.language.resolution.operator_names import OperatorTable
from policylang.language.source import Source
from policylang.language.syntax import (
    Blocks,
    Collapse,
    Expectation,
    ExpectCount,
    ExpectFate,
    ExpectTotal,
    Fuse,
    Let,
    Policy,
    PolicyName,
    Requires,
    Rewriting,
    Rule,
    Statement,
    Undecided,
)


def resolve(
    statements: Sequence[PlacedStatement], source: Source, operators: OperatorTable
) -> tuple[Policy, tuple[Diagnostic, ...]]:
    """The policy that the statements make, and what is wrong with it. With an error among that, the policy is not
    to be used: what could not be looked up is missing from it."""
    resolver = _Resolver(source, Definitions.of(statements, operators))
    for placed in statements:
        resolver.take(placed)
    return resolver.finish(statements)


@define
class _Resolver:
    source: Source
    names: Definitions
    diagnostics: list[Diagnostic] = field(factory=list)
    rules: list[Rule] = field(factory=list)
    rewrites: list[Rewriting] = field(factory=list)
    expectations: list[Expectation] = field(factory=list)
    once: dict[type, Statement] = field(factory=dict)

    def take(self, placed: PlacedStatement) -> None:
        statement = placed.statement
        if isinstance(statement, PolicyName):
            self._policy_name(statement, placed)
        elif isinstance(statement, Requires):
            check_version(statement, self.diagnostics.append)
        elif isinstance(statement, Let):
            self.names.define(statement, placed.bundled)
        elif isinstance(statement, Blocks | Undecided):
            self._only_once(statement)
        elif isinstance(statement, Rule):
            self.rules.append(evolve(statement, selector=self.names.resolve(statement.selector)))
        elif isinstance(statement, Fuse | Collapse):
            self.rewrites.append(statement)
        elif isinstance(statement, ExpectTotal):
            self.expectations.append(fit_total(statement, self.diagnostics.append))
        elif isinstance(statement, ExpectCount | ExpectFate):
            self.expectations.append(evolve(statement, selector=self.names.resolve(statement.selector)))

    def finish(self, statements: Sequence[PlacedStatement]) -> tuple[Policy, tuple[Diagnostic, ...]]:
        name, blocks, undecided = (self.once.get(kind) for kind in (PolicyName, Blocks, Undecided))
        policy = Policy(
            name=name.name if isinstance(name, PolicyName) else _name_of(self.source),
            lets=self.names.lets,
            blocks=blocks if isinstance(blocks, Blocks) else None,
            rules=tuple(self.rules),
            undecided=undecided if isinstance(undecided, Undecided) else None,
            rewrites=tuple(self.rewrites),
            expectations=tuple(self.expectations),
        )
        decides = bool(self.rules or self.rewrites or self.expectations or undecided)
        self.diagnostics.extend(self.names.finish(library=not decides))
        if not (decides or self.names.lets or any(map(is_error, self.diagnostics))):
            spans = [placed.statement.span for placed in statements if not placed.depth]
            message = "the policy decides nothing: it has no rule"
            self.diagnostics.append(diagnose("APL207", message, spans[0] if spans else None))
        return policy, tuple(self.diagnostics)

    def _policy_name(self, statement: PolicyName, placed: PlacedStatement) -> None:
        if placed.index:
            message = "`policy` has to be the first statement"
            self.diagnostics.append(diagnose("APL202", message, statement.span))
        elif not placed.depth:
            self.once[PolicyName] = statement

    def _only_once(self, statement: Blocks | Undecided) -> None:
        word = "blocks" if isinstance(statement, Blocks) else "undecided"
        earlier = self.once.get(type(statement))
        if earlier is not None:
            related = (Related("said here before", earlier.span),)
            message = f"a policy says `{word}` once"
            self.diagnostics.append(diagnose("APL203", message, statement.span, related=related))
            return
        self.once[type(statement)] = statement
        if isinstance(statement, Blocks):
            check_path_glob(statement.glob, statement.span, self.diagnostics.append)


def _name_of(source: Source) -> str:
    return PurePath(source.name.strip("<>")).stem or "policy"
