"""What a graph really moves to the host and back, read off its nodes: no mark is trusted.

A value is moved where the chain ``offload``, ``wait``, ``reload``, ``wait`` leads from it to who reads it, each
``wait`` holding what its copy is made from. Anything else that one of these operators is part of is a copy that nobody
awaits, or that is awaited by the wrong one: a race.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import field, frozen
from torch import fx

from policylang.audit.joint import RACE
from policylang.language.diagnostics import Diagnostic
from policylang.operators.categories import describe

_OFFLOAD, _RELOAD, _WAIT = (f"policylang.{name}.default" for name in ("offload", "reload", "wait"))
_MOVES = frozenset({_OFFLOAD, _RELOAD, _WAIT})


@frozen(eq=False)
class Moved:
    """The copies of one graph."""

    hosts: dict[fx.Node, fx.Node] = field(factory=dict)
    """What hands a copy on the host out, to the value that it is a copy of."""
    back: dict[fx.Node, fx.Node] = field(factory=dict)
    """What hands a copy that came back out, to what it came from: the copy on the host."""
    copies: frozenset[fx.Node] = frozenset()
    """Every node of one of the operators."""
    races: tuple[str, ...] = ()
    """The names of nodes that start a copy or take one without the order that makes it safe."""


def read_moves(nodes: Iterable[fx.Node]) -> Moved:
    """The copies among the nodes of a graph. One pass."""
    copies = {node: name for node in nodes if node.op == "call_function" and (name := _operator(node)) in _MOVES}
    found = Moved(copies=frozenset(copies))
    races: list[str] = []
    for node, name in copies.items():
        if name == _WAIT:
            ticket, source = node.args[:2]
            started = copies.get(ticket) if isinstance(ticket, fx.Node) else None
            right = isinstance(source, fx.Node) and isinstance(ticket, fx.Node) and ticket.args[:1] == (source,)
            if not right or started not in (_OFFLOAD, _RELOAD):
                races.append(node.name)
            else:
                (found.hosts if started == _OFFLOAD else found.back)[node] = source
        elif not node.users or any(copies.get(user) != _WAIT for user in node.users):
            races.append(node.name)
    return Moved(found.hosts, found.back, found.copies, tuple(races))


def races(names: Iterable[str]) -> Iterator[Diagnostic]:
    """An error for each node that takes part in one."""
    for name in names:
        yield Diagnostic(RACE, f"`{name}` is part of a copy to the host or back that is not awaited as it has to be")


def _operator(node: fx.Node) -> str:
    return describe(node.target).name
