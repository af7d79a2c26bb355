"""What somebody wants explained, by its name: a node, a glob over names, a module, a line. The command and the editor
answer from here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

from policylang.graph.facts import Facts, Phase
from policylang.language.diagnostics import Span
from policylang.language.globs import NameGlob, PathGlob, is_magic, path_glob_problem
from policylang.language.wording import did_you_mean, listed, nearest
from policylang.planning.capabilities import Capabilities
from policylang.planning.inspection.collective_places import collective_asked, placed
from policylang.planning.inspection.communication import bucket_statements, communication
from policylang.planning.inspection.line_worth import weighed
from policylang.planning.plan import Plan
from policylang.planning.selection.empty_matches import nearest_paths
from policylang.report.explanation import explain_node, explain_nodes, explain_rule
from policylang.report.order.explained import CollectiveExplanation, explain_line

_MOST_NAMES = 4
_FORWARD = "rules decide about the forward's operators alone"


class Explained(Protocol):
    """``str()`` of it is the text of ``policylang explain``."""

    def to_dict(self) -> dict[str, Any]: ...


class NothingToExplain(Exception):
    """A name that stands for nothing that rules decide about. The first argument says so, the second what to do."""


def explain_named(plan: Plan, asked: str) -> Sequence[Explained]:
    """What rules decide of a node, and, of a collective under scheduling lines, what these do; of several nodes a line
    each. Raises :class:`NothingToExplain`."""
    ordered = communication(plan)
    collective = None if ordered is None else collective_asked(ordered, asked)
    if ordered is not None and collective is not None:
        row = plan.facts.index.get(asked)
        decided = [explain_node(plan, row)] if row is not None and plan.decisions[row] is not None else []
        return [*decided, CollectiveExplanation(placed(ordered, collective))]
    rows = _rows(plan, asked)
    return [explain_node(plan, *rows) if asked in plan.facts.index else explain_nodes(plan, asked, rows)]


def explained_statements(plan: Plan) -> tuple[list[Span], list[Span]]:
    """The statements that can be explained: the rules, and the lines that order collectives where they do."""
    lines = [plan.policy.rewrites[at].span for at in bucket_statements(plan.policy)]
    lines += [each.span for each in plan.policy.scheduling]
    return [rule.span for rule in plan.policy.rules], [] if communication(plan) is None else lines


def explain_statement(plan: Plan, span: Span, capabilities: Capabilities) -> Explained:
    """Of one of :func:`explained_statements`."""
    rules, lines = explained_statements(plan)
    ordered = communication(plan)
    if ordered is not None and span in lines:
        at = lines.index(span)
        return explain_line(weighed(ordered, plan, capabilities, at), at)
    return explain_rule(plan, rules.index(span))


def _rows(plan: Plan, asked: str) -> list[int]:
    """The rows that rules range over of the node of a name, else of those whose names a glob matches, else of those in
    a module."""
    facts = plan.facts
    if asked in facts.index:
        return [_row(plan, asked)]
    found: list[int] = []
    if is_magic(asked) and "." not in asked:
        matches = NameGlob(asked).matches
        found = [row for row, name in enumerate(facts.names) if matches(name)]
    if not found and path_glob_problem(asked) is None:
        covers = cache(PathGlob(asked).covers)
        found = [row for row in range(len(facts)) if covers(facts.modules[row] or facts.modules[facts.owners[row]])]
    decided = [row for row in found if plan.decisions[row] is not None]
    if not decided:
        raise _no_node(facts, asked, found)
    return decided


def _no_node(facts: Facts, asked: str, found: Sequence[int]) -> NothingToExplain:
    if found:
        names = listed([facts.names[row] for row in found], _MOST_NAMES)
        return NothingToExplain(f"no rule ranges over what `{asked}` names: {names}", _FORWARD)
    near = nearest(asked, (facts.names[each] for each in facts.forward))
    if "." in asked or not near:
        near = (*near, *nearest_paths(asked, facts, count=2))[:3]
    mend = did_you_mean(near) or "node names are those of the graph, such as mm_3: `policylang show GRAPH --module …`"
    return NothingToExplain(f"the graph has no node `{asked}`", mend)


def _row(plan: Plan, name: str) -> int:
    """The row of a node that rules range over."""
    facts = plan.facts
    row = facts.index[name]
    if plan.decisions[row] is None:
        kinds = {Phase.INPUT: "a graph input", Phase.BACKWARD: "a backward node", Phase.OUTPUT: "the output"}
        what = kinds.get(Phase(facts.phases[row]), "not a call")
        raise NothingToExplain(f"no rule ranges over `{name}`, which is {what}", _FORWARD)
    return row
