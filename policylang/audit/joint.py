"""Audits the two halves of a joint graph: as they are split, and once more when values are moved to the host.

What crosses is what the forward returns beyond its own outputs; what is recomputed is every forward operator that
stands in the backward. A replayed random operator stands there without its name, inside a wrapper that starts from a
kept state of the generator. States are handed over by position alone: two like dropouts whose states were exchanged
would run, and draw each other's numbers. So each wrapper, in either half, is also known by what it reads and by who
reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import fx

from policylang.audit.against_plan import (
    NOT_CONNECTED,
    OFFLOADED_UNPLANNED,
    Expected,
    Wording,
    moves_otherwise,
    reads_otherwise,
    runs_otherwise,
    summary,
)
from policylang.audit.graph_reader import is_copy, is_random_state, read
from policylang.audit.outcome import Audit, Found
from policylang.graph.facts import Facts, Flag
from policylang.language.diagnostics import Diagnostic
from policylang.operators.calls import function, piece_of_draw
from policylang.operators.names import RUNS_WITH_RANDOM_STATE
from policylang.planning.liveness import Needs
from policylang.planning.plan import Plan

_WORDING = Wording(
    "{node} {found}; the plan says {expected}",
    "the graph was changed after it was planned, or torch's extraction is not the one policylang knows",
    {OFFLOADED_UNPLANNED: "{node} is a copy between device and host that nobody planned"},
)
_KEPT_UNKNOWN = "the forward keeps `{}` for the backward, which the graph that was planned does not have"


def read_halves(plan: Plan, needs: Needs, forward: fx.Graph, backward: fx.Graph, *, num_fwd_outputs: int) -> Found:
    """Read two halves while their nodes have the names of the joint graph that was planned."""
    facts = plan.facts
    index = facts.index
    taken = {node.name: (number, node) for number, node in enumerate(backward.find_nodes(op="placeholder"))}
    handed: dict[fx.Node, fx.Node] = {}
    places: dict[int, tuple[int, int]] = {}
    unknown: list[str] = []
    kept = list(enumerate(_returned(forward)))[num_fwd_outputs:]
    for number, value in kept:
        if is_random_state(value):
            continue
        if isinstance(value, fx.Node) and value.name in index and value.name in taken:
            place, node = taken[value.name]
            handed[node] = value
            places[index[value.name]] = number, place
        else:
            unknown.append(str(value))
    replays = _replays(facts, needs, (value for _, value in kept), forward, backward)
    found = read(facts, forward, backward, handed=handed, replays=replays)
    found.random_states += sum(node.name not in index for node in forward.find_nodes(op="placeholder"))
    found.kept_unknown, found.places = unknown, places
    return found


def audit(plan: Plan, needs: Needs, found: Found) -> Audit:
    """Compare a partition with what its plan came to.

    ``plan`` is the plan as it stood when the graph was split and ``needs`` what follows from it
    (:func:`policylang.planning.liveness.backward_needs`). Differences are returned, not raised. What is offloaded still
    crosses as a value of the device here; :func:`audit_copies` looks at its copies.
    """
    to_host = frozenset(needs.offloaded)
    saved = [row for row in found.saved if row not in to_host]
    crosses = to_host.union(needs.saved)
    expected = Expected(crosses, crosses, needs.recomputed, needs.recomputed)
    differences = (
        *runs_otherwise(_WORDING, plan, expected, found.saved, found),
        *reads_otherwise(_WORDING, found),
        *(Diagnostic(NOT_CONNECTED, _KEPT_UNKNOWN.format(name)) for name in found.kept_unknown),
    )
    return summary(
        plan,
        found,
        differences,
        saved=saved,
        offloaded=[row for row in found.saved if row in to_host],
    )


def audit_copies(
    plan: Plan, needs: Needs, split: Found, forward: fx.Graph, backward: fx.Graph
) -> tuple[Diagnostic, ...]:
    """What of the copies between device and host in two halves, as they will run, is not as planned.

    ``split`` is what was read as they were split: nodes that were rewritten since have other names, outputs and
    inputs the same places.
    """
    outputs, inputs = _returned(forward), backward.find_nodes(op="placeholder")
    places = {row: split.places[row] for row in needs.offloaded if row in split.places}
    sent = {inputs[taken]: outputs[number] for number, taken in places.values()}
    handed = {place: value for place, value in sent.items() if isinstance(value, fx.Node)}
    if not places and not any(map(is_copy, chain(forward.nodes, backward.nodes))):
        return ()
    found = read(plan.facts, forward, backward, handed=handed)
    by_host = {copy.host: copy for copy in found.copies}
    moved = {}
    for row, (number, _) in places.items():
        copy = by_host.pop(str(outputs[number]), None)
        # a rewritten half may have the value from another node
        moved[row] = copy if copy is None or copy.row in (row, -1) else None
    unplanned = (*by_host, *found.unsent)
    return (*moves_otherwise(_WORDING, plan, found, moved, unplanned), *reads_otherwise(_WORDING, found))


def _returned(graph: fx.Graph) -> Sequence[Any]:
    values = graph.output_node().args[0]
    return values if isinstance(values, list | tuple) else (values,)


# --- random operators ----------------------------------------------------------------------------------------------


def _replays(
    facts: Facts, needs: Needs, kept: Iterable[Any], forward: fx.Graph, backward: fx.Graph
) -> dict[fx.Node, int]:
    """The wrappers of the backward that start where that of their row did in the forward, and those; with the row.

    Rows are in graph order, as states are numbered.
    """
    flags, names = facts.flags, facts.names
    by_name = {node.name for node in backward.nodes if node.op == "call_function"}
    random = [row for row in needs.recomputed if flags[row] & Flag.RANDOM and names[row] not in by_name]
    first = dict(enumerate(state.args[0] for state in filter(is_random_state, kept)))
    first.update((_number(node), node) for node in forward.nodes if function(node) in RUNS_WITH_RANDOM_STATE)
    found: dict[fx.Node, int] = {}
    for again in backward.nodes:
        if function(again) not in RUNS_WITH_RANDOM_STATE:
            continue
        number = _number(again)
        if not (number < len(random) and number in first):
            continue
        if all(_is(facts, random[number], wrapper) for wrapper in (first[number], again)):
            found[first[number]] = found[again] = random[number]
    return found


def _number(wrapper: fx.Node) -> int:
    """Of the state that a wrapper is handed: an input of the graph, whose name ends with it."""
    state = wrapper.kwargs.get("rng_state", wrapper.args[0])
    number = state.name.rpartition("_")[2] if isinstance(state, fx.Node) else ""
    return int(number) if number.isdigit() else 0


def _is(facts: Facts, row: int, wrapper: fx.Node) -> bool:
    """Whether a wrapper is this row's: the operator, and every neighbour that has kept its name."""
    index = facts.index
    called = wrapper.args[1 if function(wrapper) == RUNS_WITH_RANDOM_STATE[0] else 0]
    read = {index[source.name] for source in wrapper.all_input_nodes if source.name in index}
    results = [user for user in wrapper.users if piece_of_draw(user) == 1] or [wrapper]
    readers = [index[user.name] for result in results for user in result.users if user.name in index]
    return (
        str(called) == facts.targets[row]
        and read <= set(facts.inputs[row])
        and all(row in facts.inputs[reader] for reader in readers)
    )
