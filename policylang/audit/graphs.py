"""Audits the result of each path: forward and backward graph, rematerialised flat graph, memory of an eager block."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from attrs import define, evolve, field
from torch import Tensor, fx

from policylang.audit import outcome
from policylang.graph import marks
from policylang.graph.facts import MOVING, Facts, Flag, Phase
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.syntax import NarrowForm
from policylang.operators.calls import argument, describe, function, nodes_in, piece_of_draw
from policylang.operators.names import (
    HOST_COPY_WAIT,
    NARROW,
    OFFLOAD,
    RELOAD,
    RUNS_WITH_RANDOM_STATE,
    SAVES_RANDOM_STATE,
    SCALES,
    WIDEN,
)
from policylang.planning.liveness import SavedForBackward
from policylang.planning.plan import Plan
from policylang.planning.schedule import kept_rows
from policylang.planning.value_outcome import moves, recomputes, saves
from policylang.torch_compat.eager import held_bytes

_RANDOM, _WRITES, _SYMBOLIC = int(Flag.RANDOM), int(Flag.WRITES), int(Flag.SYMBOLIC)
_EFFECTS = int(Flag.WRITES | Flag.EFFECTFUL | Flag.COLLECTIVE)
_ORDERED = int(Flag.RANDOM | Flag.READS_MUTATED) | _EFFECTS
"""Effects that graph edges do not order, and node positions do."""
_NO_NODES: Mapping[fx.Node, Any] = {}


def is_random_state(value: Any) -> bool:
    return piece_of_draw(value) == 0


def is_copy(node: fx.Node) -> bool:
    """The node starts or awaits a copy between device and host, or narrows or widens a value."""
    return node.op == "call_function" and describe(node.target).name in MOVING


def read(
    facts: Facts,
    graph: fx.Graph,
    backward: fx.Graph | None = None,
    *,
    handed: Mapping[fx.Node, fx.Node] = _NO_NODES,
    replays: Mapping[fx.Node, int] = _NO_NODES,
) -> outcome.Found:
    """Read what runs in a flat graph, or in a forward and its backward. ``handed``: by backward input, the forward
    output it receives. ``replays``: the nodes of random operators that the two graphs have under other names."""
    nodes = list(graph.nodes)
    if backward is not None:  # what the forward returns is held until the end
        nodes = [*nodes[:-1], *backward.nodes, nodes[-1]]
    return _GraphReader(facts, nodes, backward, handed, dict(replays)).read()


@define(eq=False)
class _GraphReader:
    facts: Facts
    nodes: list[fx.Node]
    half: fx.Graph | None
    handed: Mapping[fx.Node, fx.Node]
    replays: dict[fx.Node, int]
    """A call that draws from a kept state, to the node whose first run kept it."""
    found: outcome.Found = field(factory=outcome.Found)
    position: dict[fx.Node, int] = field(factory=dict)
    rows: array[int] = field(factory=lambda: array("i"))
    """By position, nodes of the plan; -1 for nodes it does not have, copies and random states."""
    second: bytearray = field(factory=bytearray)
    """By position, 1 for a recomputed node."""
    late: bytearray = field(factory=bytearray)
    """By position, 1 for a backward node."""
    copies: dict[fx.Node, str] = field(factory=dict)
    hosts: dict[fx.Node, fx.Node] = field(factory=dict)
    """By the node that gives a copy on the host, the node that started it."""
    back: dict[fx.Node, fx.Node] = field(factory=dict)
    """By the node that gives a copy back on the device, or widens it, the copy on the host, or the narrow value."""
    scales: list[fx.Node] = field(factory=list)
    in_region: set[int] = field(factory=set)
    latest: int = 0
    drawn: set[int] = field(factory=set)
    """Random operators of the forward."""
    unclaimed: bool = False
    """The forward has a wrapped random operator that no wrapper of the backward replays."""

    def read(self) -> outcome.Found:
        found, phases, flags = self.found, self.facts.phases, self.facts.flags
        self.copies = {node: describe(node.target).name for node in self.nodes if is_copy(node)}
        self._pair_copies()
        for at, node in enumerate(self.nodes):
            found.order.append(node.name)
            self.position[node] = at
            self._identify(node)
        for at, node in enumerate(self.nodes):
            self._follow_edges(at, node)
            if self.second[at]:
                self._second_run(node, self.rows[at])
            elif node.op == "call_function" and self.rows[at] >= 0:
                self._first_run(at, node, self.rows[at])
        crossing = sorted(found.crossing)
        found.saved = [row for row in crossing if phases[row] != Phase.INPUT and not flags[row] & _SYMBOLIC]
        found.begins = self.late.find(1) if 1 in self.late else len(self.nodes)
        self._host_copies()
        return found

    def _identify(self, node: fx.Node) -> None:
        phases, in_half, origin = self.facts.phases, node.graph is self.half, self._origin(node)
        if node in self.copies or is_random_state(node):
            row = -1
        elif piece_of_draw(node) == 1:
            row = self._row(node.args[0])
        else:
            row = self._row(node)
            if row < 0 and node.op == "call_function" and (self.half is None or describe(node.target).flags & _EFFECTS):
                self.found.unknown.append(node.name)
        self.found.random_states += function(node) == SAVES_RANDOM_STATE
        if function(node) in RUNS_WITH_RANDOM_STATE and is_random_state(node.args[0]):
            self.replays[node] = self._row(node.args[0].args[0])
        is_replay = function(node) in (SAVES_RANDOM_STATE, *RUNS_WITH_RANDOM_STATE)
        self.unclaimed |= is_replay and not in_half and node not in self.replays
        is_backward = row >= 0 and self.half is None and phases[row] == Phase.BACKWARD
        again = origin is not None or (in_half and row >= 0 and phases[row] == Phase.FORWARD)
        self.rows.append(row)
        self.second.append(again and node.op == "call_function")
        comes_back = node in self.back or self.copies.get(node) == RELOAD
        self.late.append(in_half or origin is not None or is_backward or comes_back)

    def _origin(self, node: fx.Node) -> str | None:
        """The node that a recomputed node of a flat graph repeats."""
        return marks.custom(node.meta).get(marks.RECOMPUTED) if self.half is None else None

    def _row(self, node: fx.Node) -> int:
        return self.replays.get(node, self.facts.index.get(self._origin(node) or node.name, -1))

    def _follow_edges(self, at: int, node: fx.Node) -> None:
        found, rows, roots = self.found, self.rows, self.facts.storage_roots
        for source in node.all_input_nodes if node not in self.handed else (self.handed[node],):
            where = self.position[source]
            if where > at:
                found.early.append((node.name, source.name))
            if rows[where] < 0 or self.late[where]:
                continue
            if self.late[at]:
                found.crossing[rows[where]] = at
            else:
                found.held[roots[rows[where]]] = at

    def _first_run(self, at: int, node: fx.Node, row: int) -> None:
        flags = self.facts.flags[row]
        if not self.late[at]:
            self.in_region = set()
            if flags & _RANDOM:
                self.drawn.add(row)
            if flags & _WRITES:
                self.found.written[self.facts.storage_roots[row]] = at
        # the graph that recomputes orders its nodes differently
        if flags & _ORDERED and self.facts.owners[row] == row and node.graph is not self.half:
            if row < self.latest:
                self.found.swapped[self.facts.names[row]] = self.facts.names[self.latest]
            self.latest = max(self.latest, row)

    def _second_run(self, node: fx.Node, row: int) -> None:
        found, called = self.found, describe(node.target)
        found.recomputed.append(row)
        if row in self.in_region:
            found.twice.append(row)
        self.in_region.add(row)
        draws = self.facts.flags[row] & _RANDOM and (called.flags & _RANDOM or function(node) in RUNS_WITH_RANDOM_STATE)
        has_first_run = self.half is None or self.unclaimed or row in self.drawn
        if draws and has_first_run and self.replays.get(node) != row:
            found.redrawn.append(row)
        targets = nodes_in(argument(node, called.written)) if called.written else ()
        if any(not self.second[self.position[target]] for target in targets):
            found.rewritten.append(row)

    # --- copies between device and host ---------------------------------------------------------------------------

    def _pair_copies(self) -> None:
        """A value is moved if the chain ``offload``, ``wait``, ``reload``, ``wait`` leads from it to its readers, each
        ``wait`` holding the source of its copy. Any other use of these operators is a race. A narrowed value
        goes from ``narrow`` to ``widen``, with its scales."""
        copies, races, handed = self.copies, self.found.races, self.handed
        for node, name in copies.items():
            if name == SCALES:
                self.scales.append(node)
            elif name == NARROW:
                self.hosts[node] = node
            elif name == WIDEN:
                place, scale = node.args[:2]
                narrow = handed.get(place, place)
                if copies.get(narrow) != NARROW or narrow.args[1] is not handed.get(scale, scale):
                    self.found.unscaled.append(node.name)
                else:
                    self.back[node] = place
            elif name != HOST_COPY_WAIT:
                if not node.users or any(copies.get(user) != HOST_COPY_WAIT for user in node.users):
                    races.append(node.name)
            else:
                start, source = node.args[:2]
                kind = copies.get(start) if isinstance(start, fx.Node) else None
                if kind not in (OFFLOAD, RELOAD) or not isinstance(source, fx.Node) or start.args[0] is not source:
                    races.append(node.name)
                elif kind == OFFLOAD:
                    self.hosts[node] = start
                else:
                    self.back[node] = source
        fetched = {source for node, source in self.back.items() if node.users}.union(
            scale
            for node in self.back
            if node.users and len(node.args) > 1 and isinstance(scale := node.args[1], fx.Node)
        )
        mine = {*self.hosts, *self.scales}
        for place in (*mine, *(place for place, sent in handed.items() if sent in mine)):
            wrong = [user.name for user in place.users if user not in copies and user.op != "output"]
            is_sent = any(user.op == "output" for user in place.users)
            races.extend(wrong if wrong or is_sent or place in fetched else [place.name])

    def _host_copies(self) -> None:
        found, handed = self.found, self.handed
        origin = {node: handed.get(source, source) for node, source in self.back.items()}
        found.unsent.extend(node.name for node, host in origin.items() if host not in self.hosts)
        fetched = {host for node, host in origin.items() if node.users}
        widened: dict[fx.Node, set[str]] = {}
        for node, host in origin.items():
            if self.copies[node] == WIDEN:
                widened.setdefault(host, set()).add(_dtype(node))
        for host, start in self.hosts.items():
            value = start.all_input_nodes[0]
            steps = self.position[start], self.position[host]
            row = self.rows[self.position[value]]
            form = NarrowForm(_dtype(host), host.args[1] is not None) if self.copies[host] == NARROW else None
            types = frozenset(widened.get(host, ()))
            found.copies.append(outcome.HostCopy(row, value.name, host.name, *steps, host in fetched, form, types))


def _dtype(node: fx.Node) -> str:
    """The type that a node narrows or widens to."""
    return str(node.args[2]).removeprefix("torch.")


_OF_HALVES = outcome.Wording(
    "{node} {found}; planned: {expected}",
    "the graph was changed after it was planned, or torch's extraction is not the one policylang knows",
    {outcome.OFFLOADED_UNPLANNED: "{node} is a copy between device and host that nobody planned"},
)
_KEPT_UNKNOWN = "the forward keeps `{}` for the backward, which the graph that was planned does not have"


def read_halves(
    plan: Plan, needs: SavedForBackward, forward: fx.Graph, backward: fx.Graph, *, num_fwd_outputs: int
) -> outcome.Found:
    """Read the forward and the backward graph while their nodes have the names of the planned joint graph."""
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


def audit(plan: Plan, needs: SavedForBackward, found: outcome.Found) -> outcome.Audit:
    """Compare a partition with its plan. ``plan`` is the plan at the time of the split and ``needs`` what it saves
    (:func:`policylang.planning.liveness.backward_needs`). Differences are returned, not raised. Offloaded values still
    cross as device values here; :func:`audit_copies` checks their copies."""
    to_host = frozenset(needs.offloaded)
    saved = [row for row in found.saved if row not in to_host]
    crosses = to_host.union(needs.saved)
    expected = outcome.Expected(crosses, crosses, needs.recomputed, needs.recomputed)
    runs = outcome.runs_otherwise(_OF_HALVES, plan, expected, found.saved, found)
    unknown = (Diagnostic(outcome.NOT_CONNECTED, _KEPT_UNKNOWN.format(name)) for name in found.kept_unknown)
    differences = (*runs, *outcome.reads_otherwise(_OF_HALVES, found), *unknown)
    moved = [row for row in found.saved if row in to_host]
    return outcome.summary(plan, found, differences, saved=saved, offloaded=moved)


def audit_copies(
    plan: Plan, needs: SavedForBackward, split: outcome.Found, forward: fx.Graph, backward: fx.Graph
) -> tuple[Diagnostic, ...]:
    """Differences between the planned and the actual copies between device and host, in the graphs as they will run.
    ``split`` was read then: rewritten nodes have other names, but outputs and inputs keep their places."""
    outputs, inputs = _returned(forward), backward.find_nodes(op="placeholder")
    places = {row: split.places[row] for row in needs.moved if row in split.places}
    scaled = {row: split.places[row] for row in places if (by := plan.decisions[row]) and by.form and by.form.per_row}
    before = [sorted(place[half] for place in scaled.values()) for half in (0, 1)]  # scales follow their values
    places = {
        row: (number + bisect_left(before[0], number), taken + bisect_left(before[1], taken))
        for row, (number, taken) in places.items()
    }
    beside = [(number + 1, taken + 1) for row, (number, taken) in places.items() if row in scaled]
    sent = {inputs[taken]: outputs[number] for number, taken in (*places.values(), *beside)}
    handed = {place: value for place, value in sent.items() if isinstance(value, fx.Node)}
    if not places and not any(map(is_copy, chain(forward.nodes, backward.nodes))):
        return ()
    found = read(plan.facts, forward, backward, handed=handed)
    by_host = {copy.host: copy for copy in found.copies}
    moved = {}
    for row, (number, _) in places.items():
        copy = by_host.pop(str(outputs[number]), None)
        # a rewritten graph may have the value from another node
        moved[row] = copy if copy is None or copy.row in (row, -1) else None
    unplanned = (*by_host, *found.unsent)
    copies = outcome.moves_otherwise(_OF_HALVES, plan, found, moved, unplanned)
    return (*copies, *outcome.reads_otherwise(_OF_HALVES, found))


def _returned(graph: fx.Graph) -> Sequence[Any]:
    values = graph.output_node().args[0]
    return values if isinstance(values, list | tuple) else (values,)


# --- random operators ----------------------------------------------------------------------------------------------


def _replays(
    facts: Facts, needs: SavedForBackward, kept: Iterable[Any], forward: fx.Graph, backward: fx.Graph
) -> dict[fx.Node, int]:
    """The wrappers of the backward that start where that of their node did in the forward, and those; with the node.
    Nodes are in graph order, as states are numbered."""
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
    """The number at the end of the name of the generator state that a wrapper receives."""
    state = wrapper.kwargs.get("rng_state", wrapper.args[0])
    number = state.name.rpartition("_")[2] if isinstance(state, fx.Node) else ""
    return int(number) if number.isdigit() else 0


def _is(facts: Facts, row: int, wrapper: fx.Node) -> bool:
    """A wrapper belongs to a node: it calls the same operator, and every neighbour that kept its name agrees."""
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


_OF_FLAT = outcome.Wording(
    "{node} {found}, which is not what was planned",
    "another pass changed the graph, or this is a bug in policylang",
    {outcome.OFFLOADED_UNPLANNED: "{node} was offloaded, which is not what was planned"},
)


def audit_flat(plan: Plan, graph: fx.Graph) -> outcome.Audit:
    """Compare a rematerialised flat graph with the plan it was made for. Differences are returned, not raised.

    A value crosses where a backward node, or a copy, reads the forward's own, and is then saved; except that one
    decided ``recompute`` may be read as it is where a later part of the forward, or the caller, holds it anyway.
    A value that a backward node reads through its copies to the host and back is offloaded.
    """
    facts, decisions, roots = plan.facts, plan.decisions, plan.facts.storage_roots
    found = read(facts, graph)
    again = {row for row in facts.forward if recomputes(decisions[row])}

    held = found.held
    saved = [row for row in found.saved if row not in again or held.get(roots[row], -1) <= found.crossing[row]]
    late = (row for row, phase in enumerate(facts.phases) if phase == Phase.BACKWARD)
    read_late = {source for row in late for source in facts.inputs[row]}
    on_host = {copy.row: copy for copy in found.copies if copy.fetched}
    planned = {row: copy for row, copy in on_host.items() if row >= 0 and moves(decisions[row])}
    may_save = {row for row in facts.forward if row not in again and not moves(decisions[row])}
    must_save = {row for row in may_save if row in read_late and saves(decisions[row]) and row not in on_host}
    expected = outcome.Expected(may_save, must_save=must_save, may_recompute=again)
    unplanned = (copy.value for row, copy in on_host.items() if row not in planned)
    runs = outcome.runs_otherwise(_OF_FLAT, plan, expected, saved, found)
    copies = outcome.moves_otherwise(_OF_FLAT, plan, evolve(found, saved=saved), planned, unplanned)
    differences = (*runs, *outcome.reads_otherwise(_OF_FLAT, found), *copies)
    here = {row for row in planned if (by := decisions[row]) is not None and by.outcome.on_device}
    away = sorted(row for row in on_host if row >= 0 and row not in here)
    return outcome.summary(plan, found, differences, saved=sorted({*saved, *here}), offloaded=away)


def _other_types(plan: Plan, held: Mapping[int, Sequence[Tensor]]) -> Iterator[Diagnostic]:
    """A difference for each narrowed value that no tensor of its operator has the type of."""
    for row, form in plan.schedule.forms.items():
        types = [str(tensor.dtype).removeprefix("torch.") for tensor in held.get(plan.facts.owners[row], ())]
        if types and form.dtype not in types:
            yield _OF_EAGER.of_row(outcome.OTHER_FORM, plan, row, f"is held as {', '.join(types)}")


OTHER_BYTES = "APL409"
_OF_EAGER = outcome.Wording(
    "{node} {found}",
    "this is a bug in policylang",
    {
        outcome.SAVED_UNPLANNED: "{node} is held, and the plan does not save it",
        outcome.NOT_SAVED: "{node} is not held, and the plan saves it",
    },
    is_brief=True,
)


def audit_eager(
    plan: Plan, needs: SavedForBackward, held: Mapping[int, Sequence[Tensor]], outside: Iterable[Tensor]
) -> outcome.Audit:
    """Compare one call of a block with its plan.

    Args:
        needs: what follows from the plan (:func:`policylang.planning.liveness.saved_and_recomputed`).
        held: by node of the operator, the plain tensors that the checkpoint holds.
        outside: those of the block's parameters, buffers and inputs, which are alive anyway.
    """
    facts = plan.facts
    roots, moved = facts.storage_roots, {facts.storage_roots[row] for row in needs.offloaded}
    planned = {facts.owners[row] for row in kept_rows(facts, (*needs.saved, *needs.offloaded))}
    found = outcome.Found(saved=sorted({facts.owners[row] for row in held}))
    must = {row for row in planned if plan.checkpoints is None or row < plan.checkpoints.reach[0]}
    runs = outcome.runs_otherwise(_OF_EAGER, plan, outcome.Expected(planned, must), found.saved, found)
    wrong = (*runs, *_other_types(plan, held))
    # the recomputation is still to come, and so are copies to the host: they are taken as planned
    found = evolve(found, recomputed=list(needs.recomputed))
    audit = outcome.summary(plan, found, wrong, saved=needs.saved, offloaded=needs.offloaded)
    stays = (tensors for row, tensors in held.items() if roots[row] not in moved)
    measured = held_bytes((tensor for tensors in stays for tensor in tensors), outside)
    if measured != audit.saved_bytes:
        said = f"the checkpoint holds {measured:,} bytes, and the plan has {audit.saved_bytes:,}"
        why = "a kernel allocates more memory than its result fills, or memory that it shares with another value"
        wrong = (*wrong, diagnose(OTHER_BYTES, said, help=why))
    return evolve(audit, saved_bytes=measured, differences=wrong)
