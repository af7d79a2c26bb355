"""The trees of a few sentences, written out: planning is tested without the parser."""

from __future__ import annotations

from policylang.graph.facts import Facts
from policylang.language import syntax as s
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Action
from policylang.planning.capabilities import Capabilities
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from tests.support.trees import policy_of, span

PATH = "the joint-graph partitioner"
JOINT = Capabilities(PATH, replays_random=True, undecided_auto=True)

everything = s.Everything(span("everything"))


def op(text: str) -> s.Operator:
    """``mm``, ``aten.mm`` or ``aten.mm.default``."""
    parts = text.split(".")
    if len(parts) == 1:
        return s.Operator(None, parts[0], None, span(text))
    return s.Operator(parts[0], parts[1], parts[2] if len(parts) > 2 else None, span(text))


def in_module(selector: s.Selector, glob: str) -> s.InModule:
    return s.InModule(selector, glob, False, span(f"{selector.span.text} in {glob}"))


def where(selector: s.Selector, predicate: s.Predicate) -> s.Where:
    return s.Where(selector, predicate, span(f"{selector.span.text} where {predicate.span.text}"))


def compare(quantity: str, op: str, value: float, text: str, index: int | None = None) -> s.Compare:
    return s.Compare(quantity, op, s.Quantity(value, "number", span(text)), index, span(text))


def is_(name: str) -> s.Is:
    return s.Is(name, span(name))


def rule(action: Action, selector: s.Selector, line: int = 1, *, optional: bool = False, override: bool = False):
    prefix = ("optional " if optional else "") + ("override " if override else "")
    text = f"{prefix}{action.name.lower()} {selector.span.text}"
    return s.Rule(action, selector, optional, override, span(text, line))


def save(selector: s.Selector, line: int = 1, **more: bool) -> s.Rule:
    return rule(Action.SAVE, selector, line, **more)


def recompute(selector: s.Selector, line: int = 1, **more: bool) -> s.Rule:
    return rule(Action.RECOMPUTE, selector, line, **more)


def planned(facts: Facts, *rules: s.Rule, capabilities: Capabilities = JOINT, **more) -> Plan:
    return plan(policy_of(*rules, **more), facts, capabilities)


def actions(made: Plan) -> dict[str, str]:
    """Node name to what was decided, ``save``, ``recompute``, ``auto``, for every forward value."""
    return {
        made.facts.names[row]: "auto" if decision.action is None else decision.action.name.lower()
        for row, decision in enumerate(made.decisions)
        if decision is not None
    }


def only(found: tuple[Diagnostic, ...], code: str) -> Diagnostic:
    """The one diagnostic of a plan, which must have this code."""
    assert [diagnostic.code for diagnostic in found] == [code], [diagnostic.message for diagnostic in found]
    return found[0]


def names(facts: Facts, rows) -> list[str]:
    return [facts.names[row] for row in rows]
