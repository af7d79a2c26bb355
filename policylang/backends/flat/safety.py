"""Checks a flat graph before it is rematerialised: a refusal leaves the graph untouched.

Planning refuses by rule and by name what its facts show to be unsafe. This is the second lock: it knows where each copy
will stand, and looks at the operators themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.fx as fx

from policylang.backends.surgery.edits import first_difference
from policylang.errors import PolicyGraphError, PolicyMatchError
from policylang.graph.facts import Facts
from policylang.graph.reading.memory import GraphMemory
from policylang.graph.schedule import StepKind
from policylang.language.diagnostics import diagnose
from policylang.planning.plan import Plan
from policylang.planning.refusals import UNSAFE

GRAPH_CHANGED = "APL381"


def check_same_graph(nodes: Sequence[fx.Node], facts: Facts) -> None:
    """Raise PolicyGraphError where the graph is not the one that ``facts`` describe."""
    difference = first_difference(nodes, facts)
    if difference is None:
        return
    at, found, planned = difference
    names = f"node {at} was `{planned or 'nothing more'}` and is `{found or 'nothing more'}`"
    message = f"the graph changed after it was planned: {names}"
    help = "plan again after the last pass that changes the graph"
    raise PolicyGraphError([diagnose(GRAPH_CHANGED, message, help=help)])


def check(plan: Plan, nodes: Sequence[fx.Node], memory: GraphMemory) -> None:
    """Raise PolicyMatchError for every copy that would not compute what the forward computed."""
    found = []
    for row, reason in _unsafe(plan, nodes, memory):
        rule = plan.rule_of(row)
        who, span = (f"`{rule.text}`", rule.span) if rule is not None else ("the policy", None)
        message = f"{who} cannot recompute `{plan.facts.names[row]}`: {reason}"
        found.append(diagnose(UNSAFE, message, span, help="save it, or make the rule `optional`"))
    if found:
        raise PolicyMatchError(found)


def _unsafe(plan: Plan, nodes: Sequence[fx.Node], memory: GraphMemory) -> Iterator[tuple[int, str]]:
    seen: set[int] = set()
    for (kind, row, _), anchor in zip(plan.schedule, plan.schedule.next_first_runs(), strict=True):
        if kind == StepKind.SECOND_RUN and row not in seen:
            reason = _reason(nodes[row], row, plan.facts, memory, anchor)
            if reason is not None:
                seen.add(row)
                yield row, reason


def _reason(node: fx.Node, row: int, facts: Facts, memory: GraphMemory, anchor: int) -> str | None:
    if row in memory.written:
        return "it writes to memory that outlives it, which a second run would do again"
    if node.kwargs.get("generator") is not None:
        return "it draws from a generator of its own, whose state is not kept"
    if memory.roots[row] in memory.loose:
        return "it is written to while others read it, so a second run would give another value"
    if memory.reads_no_bytes[row]:
        return None
    left_out = memory.statistics.get(row, ())
    ignored = {node.args[at] for at in left_out}
    unit = memory.units[row]
    for read, read_node in zip(facts.inputs[row], node.all_input_nodes, strict=True):
        if read_node in ignored or (unit >= 0 and memory.units[read] == unit):
            continue
        writer = memory.written_between(read, row, anchor)
        if writer is not None:
            return f"it reads memory that `{facts.names[writer]}` changes before the backward asks for it"
    return None
