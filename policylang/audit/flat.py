"""The proof for a flat graph: what really crosses from forward to backward and what really runs twice, held against
the plan.

Reads the graph alone: which nodes are copies stands on them, everything else is followed through its edges. Nothing
that the backend noted down is taken on trust.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import field, frozen
from torch import fx

from policylang.audit.host_copies import Moved, races, read_moves
from policylang.audit.joint import (
    NOT_CONNECTED,
    NOT_FREED,
    NOT_SAVED,
    OFFLOADED_UNPLANNED,
    RECOMPUTED_UNPLANNED,
    SAVED_UNPLANNED,
    Audit,
)
from policylang.graph import marks
from policylang.graph.facts import Facts, Flag, Phase
from policylang.language.diagnostics import Diagnostic
from policylang.operators.categories import argument, describe, nodes_in
from policylang.planning.liveness import Needs, with_cost
from policylang.planning.plan import Plan, Why, offloads
from policylang.planning.storage import storage_roots

EFFECT_REPEATED = "APL406"
RANDOM_AGAIN = "APL407"

_REPLAY = "higher_order.run_with_rng_state"
_KEEP = "higher_order.run_and_save_rng_state"


@frozen(eq=False)
class _Read:
    """The graph that came out, node by node. ``rows`` are those of the facts, -1 for a node they do not have."""

    nodes: list[fx.Node]
    rows: list[int]
    copies: list[bool]
    backward: list[bool]
    position: dict[fx.Node, int]
    moved: Moved
    unknown: list[str] = field(factory=list)


def audit_flat(plan: Plan, graph: fx.Graph) -> Audit:
    """Compare a rematerialised flat graph with the plan it was made for. Differences are returned, not raised.

    A value crosses where a backward node, or a copy, reads the forward's own, and is then saved; except that one
    decided ``recompute`` may be read as it is where a later part of the forward, or the caller, holds it anyway.
    ``auto_saved`` are those that no rule decided: they stayed as they were. A value that a backward node reads through
    its copies to the host and back is offloaded.
    """
    facts = plan.facts
    read = _read(graph, facts)
    crossing = _crossing(read, facts)
    held = _held_until(read, facts)
    roots = storage_roots(facts)
    saved = sorted(
        row for row, at in crossing.items() if not (_recomputes(plan, row) and held.get(roots[row], -1) > at)
    )
    symbolic = [row for row in saved if facts.flags[row] & Flag.SYMBOLIC]
    tensors = [row for row in saved if not facts.flags[row] & Flag.SYMBOLIC]
    again = [read.rows[at] for at in range(len(read.nodes)) if read.copies[at]]
    auto = [row for row in tensors if (decision := plan.decisions[row]) is None or decision.why is Why.UNDECIDED]
    moved = _moved_rows(read)
    blocks = len(plan.block_names)
    cost = with_cost(Needs(saved=tuple(tensors), recomputed=tuple(again)), facts, plan.block_of, blocks)
    return Audit(
        saved=_names(facts, tensors),
        saved_bytes=cost.saved_bytes,
        recomputed=_names(facts, sorted(set(again))),
        recomputed_bytes=cost.recomputed_bytes,
        recomputed_flops=cost.recomputed_flops,
        forward_flops=cost.forward_flops,
        auto_saved=_names(facts, auto),
        auto_saved_bytes=with_cost(Needs(saved=tuple(auto)), facts, (), 0).saved_bytes,
        auto_recomputed=(),
        inputs=_names(facts, _inputs_read(read, facts)),
        symbolic=_names(facts, symbolic),
        random_states=sum(describe(node.target).name == _KEEP for node in read.nodes if node.op == "call_function"),
        saved_bytes_by_block=cost.saved_bytes_by_block,
        recomputed_flops_by_block=cost.recomputed_flops_by_block,
        offloaded=_names(facts, sorted(moved)),
        offloaded_bytes=sum(facts.bytes[row] for row in moved),
        differences=(
            *_unplanned(plan, tensors, again, crossing, moved),
            *_wrong_copies(plan, read),
            *_wrongly_moved(plan, read, moved, tensors),
        ),
    )


def _names(facts: Facts, rows: Sequence[int]) -> tuple[str, ...]:
    return tuple(facts.names[row] for row in rows)


def _read(graph: fx.Graph, facts: Facts) -> _Read:
    nodes = list(graph.nodes)
    moved = read_moves(nodes)
    rows, copies, backward, unknown = [], [], [], []
    index = facts.index
    for node in nodes:
        if node in moved.copies:
            rows.append(-1)
            copies.append(False)
            backward.append(_reads_host(node, moved))
            continue
        found = marks.custom(node.meta)
        origin, drawn = found.get(marks.RECOMPUTED), found.get(marks.RANDOM_STATE)
        row = index.get(node.name if origin is None else origin, -1)
        if row < 0 and drawn is not None:
            row = index.get(drawn, -1)
        if row < 0 and node.op == "call_function":
            unknown.append(node.name)
        rows.append(row)
        copies.append(origin is not None and node.op == "call_function")
        backward.append(origin is not None or (row >= 0 and facts.phases[row] == Phase.BACKWARD))
    return _Read(nodes, rows, copies, backward, {node: at for at, node in enumerate(nodes)}, moved, unknown)


def _reads_host(node: fx.Node, moved: Moved) -> bool:
    """Whether a copy is one that comes back, which is work of the backward."""
    return node in moved.back or (node not in moved.hosts and any(user in moved.back for user in node.users))


def _moved_rows(read: _Read) -> dict[int, fx.Node]:
    """The rows that some backward node reads through the host, each with what hands out its copy there."""
    found: dict[int, fx.Node] = {}
    for back, host in read.moved.back.items():
        if host in read.moved.hosts and back.users:
            found[_row_of(read, read.moved.hosts[host])] = host
    return found


def _row_of(read: _Read, node: fx.Node) -> int:
    return read.rows[read.position[node]]


def _is_state(node: fx.Node) -> bool:
    """The generator's state of a random operator that keeps it; its own result has the same mark."""
    return len(node.args) == 2 and node.args[1] == 0 and _wraps(node.args[0])


def _wraps(node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and describe(node.target).name == _KEEP


def _crossing(read: _Read, facts: Facts) -> dict[int, int]:
    """Forward rows that the backward reads, and the last position at which it does."""
    crossing: dict[int, int] = {}
    for at, node in enumerate(read.nodes):
        if not read.backward[at]:
            continue
        for source in node.all_input_nodes:
            where = read.position[source]
            row = read.rows[where]
            if row >= 0 and not read.backward[where] and facts.forward_mask[row] and not _is_state(source):
                crossing[row] = at
    return crossing


def _held_until(read: _Read, facts: Facts) -> dict[int, int]:
    """By the row that allocated some memory: the last position of the forward, or of the output, that reads it."""
    roots = storage_roots(facts)
    held: dict[int, int] = {}
    for at in range(len(read.nodes) - 1, -1, -1):
        if read.backward[at]:
            continue
        for source in read.nodes[at].all_input_nodes:
            where = read.position[source]
            if read.rows[where] >= 0 and not read.backward[where]:
                held.setdefault(roots[read.rows[where]], at)
    return held


def _inputs_read(read: _Read, facts: Facts) -> list[int]:
    found: set[int] = set()
    for at, node in enumerate(read.nodes):
        if read.backward[at]:
            rows = (read.rows[read.position[source]] for source in node.all_input_nodes)
            found.update(row for row in rows if row >= 0 and facts.phases[row] == Phase.INPUT)
    return sorted(found)


def _unplanned(
    plan: Plan, saved: Sequence[int], again: Sequence[int], crossing: dict[int, int], moved: Mapping[int, fx.Node]
) -> Iterator[Diagnostic]:
    facts = plan.facts
    ran_again = set(again)
    for row in saved:
        if _recomputes(plan, row) or offloads(plan.decisions[row]):
            yield _difference(SAVED_UNPLANNED, plan, row, "was saved")
    for row in sorted(ran_again):
        if not _recomputes(plan, row):
            yield _difference(RECOMPUTED_UNPLANNED, plan, row, "was recomputed")
    for row in facts.forward:
        decision = plan.decisions[row]
        if decision is None or decision.action is None or not decision.action.saves:
            continue
        if row in crossing or row in moved:
            continue
        if any(facts.phases[user] == Phase.BACKWARD for user in facts.users[row]):
            yield _difference(NOT_SAVED, plan, row, "was not saved")


def _recomputes(plan: Plan, row: int) -> bool:
    decision = plan.decisions[row]
    return decision is not None and decision.action is not None and decision.action.recomputes


def _wrongly_moved(plan: Plan, read: _Read, moved: Mapping[int, fx.Node], saved: Sequence[int]) -> Iterator[Diagnostic]:
    """Copies that come at the wrong time, or free nothing; and values that nobody asked to be moved."""
    facts, roots = plan.facts, storage_roots(plan.facts)
    yield from races(read.moved.races)
    alive = {roots[row] for row in saved}
    held = _held_until(read, facts)
    begins = next((at for at, backward in enumerate(read.backward) if backward), len(read.nodes))
    for row, host in moved.items():
        if row < 0 or not offloads(plan.decisions[row]):
            name = read.moved.hosts[host].name
            yield Diagnostic(OFFLOADED_UNPLANNED, f"`{name}` was offloaded, which is not what was planned")
        elif roots[row] in alive or held.get(roots[row], -1) > begins or read.position[host] > begins:
            yield _difference(NOT_FREED, plan, row, "was offloaded and is held on the device all the same")


def _wrong_copies(plan: Plan, read: _Read) -> Iterator[Diagnostic]:
    """Copies that would do something a second time, or draw other numbers; and nodes nobody knows."""
    facts = plan.facts
    for at, node in enumerate(read.nodes):
        if not read.copies[at]:
            continue
        row, operator = read.rows[at], describe(node.target)
        if operator.flags & Flag.RANDOM and facts.flags[row] & Flag.RANDOM:
            yield _difference(RANDOM_AGAIN, plan, row, "draws new random numbers")
        written = nodes_in(argument(node, operator.written)) if operator.written else []
        if any(not read.copies[read.position[target]] for target in written):
            yield _difference(EFFECT_REPEATED, plan, row, "writes a second time")
    for name in read.unknown:
        yield Diagnostic(
            NOT_CONNECTED, f"the graph has a node `{name}`, which the graph that was planned does not have"
        )


def _difference(code: str, plan: Plan, row: int, happened: str) -> Diagnostic:
    facts, decision = plan.facts, plan.decisions[row]
    where = f" in {facts.modules[row]}" if facts.modules[row] else ""
    rule = plan.policy.rules[decision.rule] if decision is not None and decision.rule is not None else None
    return Diagnostic(
        code,
        f"`{facts.names[row]}` ({facts.targets[row]}){where} {happened}, which is not what was planned",
        span=None if rule is None else rule.span,
        help="another pass changed the graph, or this is a bug in policylang",
    )
