"""Resolves statements to a policy: every name looked up, every figure fitted, every statement in its place.

Everything found wrong is reported, not the first thing only; a policy comes out where nothing was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, TypeVar, assert_never

from attrs import define, evolve, field

from policylang.language import syntax
from policylang.language.codes import diagnose, is_error
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import meant_devices, read_device
from policylang.language.diagnostics import Diagnostic, Mend, Related, moved, removed, written
from policylang.language.interruption.wanted import check_cancelled
from policylang.language.resolution.doubtful import doubtful_selectors
from policylang.language.resolution.fitting import check_path_glob, check_version, fit_total
from policylang.language.resolution.includes import PlacedStatement
from policylang.language.resolution.names import Definitions
from policylang.language.resolution.operator_names import OperatorTable
from policylang.language.resolution.order_lines import OrderLines
from policylang.language.source import Source, Span
from policylang.language.syntax import Policy, Rule, Statement

_Ordering = TypeVar("_Ordering", bound=syntax.Bucket | syntax.Scheduling)


def resolve(
    statements: Sequence[PlacedStatement], source: Source, operators: OperatorTable
) -> tuple[Policy, tuple[Diagnostic, ...]]:
    """The policy that the statements make, and what is wrong with it. With an error among that, the policy is not
    to be used: what could not be looked up is missing from it."""
    resolver = _Resolver(source, Definitions.of(statements, operators))
    for placed in statements:
        check_cancelled()
        resolver.take(placed)
    return resolver.finish(statements)


@define
class _Resolver:
    source: Source
    names: Definitions
    diagnostics: list[Diagnostic] = field(factory=list)
    rules: list[Rule] = field(factory=list)
    rewrites: list[syntax.Rewriting] = field(factory=list)
    scheduling: list[syntax.Scheduling] = field(factory=list)
    expectations: list[syntax.Expectation] = field(factory=list)
    order: OrderLines = field(init=False)
    once: dict[type, Statement] = field(factory=dict)
    device: DeviceProfile | None = None
    first: Span | None = None
    """Of the first statement of the loaded file."""

    def __attrs_post_init__(self) -> None:
        self.order = OrderLines(self.names.operators.matches)

    def take(self, placed: PlacedStatement) -> None:
        statement = placed.statement
        if not placed.depth:
            self.first = self.first or statement.span
        if isinstance(statement, syntax.PolicyName):
            self._policy_name(statement, placed)
        elif isinstance(statement, syntax.Requires):
            check_version(statement, self.diagnostics.append)
        elif isinstance(statement, syntax.Device):
            self._device(statement, placed)
        elif isinstance(statement, syntax.Let):
            self.names.define(statement, placed.bundled)
        elif isinstance(statement, syntax.Blocks | syntax.Undecided):
            self._only_once(statement)
        elif isinstance(statement, Rule):
            rule = evolve(statement, selector=self.names.resolve(statement.selector))
            self.rules.append(rule)
            self.diagnostics.extend(doubtful_selectors(rule))
        elif isinstance(statement, syntax.Bucket):
            self.rewrites.append(self._ordering(statement))
        elif isinstance(statement, syntax.Rewriting):
            self.rewrites.append(statement)
        elif isinstance(statement, syntax.Scheduling):
            self.scheduling.append(self._ordering(statement))
        elif isinstance(statement, syntax.ExpectTotal):
            self.expectations.append(fit_total(statement, self.diagnostics.append))
        elif isinstance(statement, syntax.ExpectCount | syntax.ExpectFate):
            self.expectations.append(evolve(statement, selector=self.names.resolve(statement.selector)))
        elif not isinstance(statement, syntax.Include):  # what it brings is in its place
            assert_never(statement)

    def _ordering(self, statement: _Ordering) -> _Ordering:
        statement = evolve(statement, selector=self.names.resolve(statement.selector))
        self.diagnostics.extend(self.order.check(statement, self.names.lets))
        return statement

    def finish(self, statements: Sequence[PlacedStatement]) -> tuple[Policy, tuple[Diagnostic, ...]]:
        name: Any = self.once.get(syntax.PolicyName)
        blocks: Any = self.once.get(syntax.Blocks)
        undecided: Any = self.once.get(syntax.Undecided)
        rules, rewrites, expectations = tuple(self.rules), tuple(self.rewrites), tuple(self.expectations)
        name = _name_of(self.source) if name is None else name.name
        policy = Policy(
            *(name, self.names.lets, blocks, rules, undecided, rewrites, expectations, self.device),
            scheduling=tuple(self.scheduling),
            includes=_includes(statements),
        )
        decides = bool(rules or rewrites or self.scheduling or expectations or undecided)
        self.diagnostics.extend(self.names.finish(library=not decides))
        if not (decides or self.names.lets or any(map(is_error, self.diagnostics))):
            spans = [placed.statement.span for placed in statements if not placed.depth]
            self._report("APL207", "the policy decides nothing: it has no rule", spans[0] if spans else None)
        return policy, tuple(self.diagnostics)

    def _policy_name(self, statement: syntax.PolicyName, placed: PlacedStatement) -> None:
        if placed.index:
            mends = [removed(statement.span)]
            if self.first is not None and syntax.PolicyName not in self.once and not placed.depth:
                mends.insert(0, moved(statement.span, self.first, "move it to the top"))
            self._report("APL202", "`policy` has to be the first statement", statement.span, mends=mends)
        elif not placed.depth:
            self.once[syntax.PolicyName] = statement

    def _device(self, statement: syntax.Device, placed: PlacedStatement) -> None:
        """A policy and what it includes have one device; that several files name the same one is no mistake."""
        found = read_device(statement.target, placed.folder)
        if isinstance(found, Diagnostic):
            named = Related("named here", statement.span)
            if found.span is not None:
                self.diagnostics.append(evolve(found, related=(*found.related, named)))
                return
            span = statement.span
            target = Span(span.source, span.start + len(span.text.rstrip().rsplit(None, 1)[0]) + 1, span.end)
            mends = written(target, meant_devices(statement.target), near=True)
            self.diagnostics.append(evolve(found, span=span, mends=mends))
            return
        earlier = self.once.setdefault(syntax.Device, statement)
        if self.device is not None and self.device.canonical != found.canonical:
            message = f"a policy has one device, and this is `{found.name}` beside `{self.device.name}`"
            if found.name == self.device.name:
                message = f"a policy has one device, and there are two profiles that are called `{found.name}`"
            related = Related(f"`{self.device.name}` is named here", earlier.span)
            self._report("APL212", message, statement.span, related, mends=[removed(statement.span)])
        self.device = self.device or found

    def _only_once(self, statement: syntax.Blocks | syntax.Undecided) -> None:
        earlier = self.once.get(type(statement))
        if earlier is not None:
            word = "blocks" if isinstance(statement, syntax.Blocks) else "undecided"
            related = Related("said here before", earlier.span)
            mends = [removed(statement.span)]
            self._report("APL203", f"a policy says `{word}` once", statement.span, related, mends=mends)
            return
        self.once[type(statement)] = statement
        if isinstance(statement, syntax.Blocks):
            check_path_glob(statement.glob, statement.span, self.diagnostics.append)

    def _report(
        self, code: str, message: str, span: Span | None, *related: Related, mends: Sequence[Mend] = ()
    ) -> None:
        self.diagnostics.append(diagnose(code, message, span, related=related, mends=mends))


def _includes(statements: Sequence[PlacedStatement]) -> dict[str, Span]:
    """Of each included file by its name, the include in the loaded file that brings it first."""
    found: dict[str, Span] = {}
    for placed in statements:
        if placed.include is not None:
            found.setdefault(placed.statement.span.source.name, placed.include)
    return found


def _name_of(source: Source) -> str:
    return PurePath(source.name.strip("<>")).stem or "policy"
