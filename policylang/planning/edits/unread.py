"""Pieces of a tuple that nobody reads: ``chunk`` is traced with a ``getitem`` for every part, of which a rank may take
one. They are no readers of the tuple, and go with it."""

from __future__ import annotations

from collections.abc import Collection

from attrs import evolve

from policylang.graph.facts import Facts
from policylang.operators.names import GETITEM
from policylang.planning.edits.data import Rewrite


def unread_pieces(facts: Facts) -> frozenset[int]:
    """Their rows; a piece of such a piece is one as well."""
    found: set[int] = set()
    for row in range(len(facts) - 1, -1, -1):
        if facts.targets[row] == GETITEM and all(user in found for user in facts.users[row]):
            found.add(row)
    return frozenset(found)


def without_pieces(facts: Facts, unread: Collection[int]) -> Facts:
    """The facts as rewrites are to be planned on: the pieces read nothing and are nothing."""
    if not unread:
        return facts
    targets, inputs, users, arguments = (
        list(facts.targets),
        list(facts.inputs),
        list(facts.users),
        list(facts.arguments),
    )
    for row in unread:
        for source in facts.inputs[row]:
            users[source] = tuple(user for user in users[source] if user not in unread)
        targets[row], inputs[row], arguments[row] = "", (), ()
    return evolve(facts, targets=targets, inputs=inputs, users=users, arguments=arguments)


def with_pieces(rewrite: Rewrite, facts: Facts, unread: Collection[int]) -> Rewrite:
    """The rewrite with the pieces of what it removes removed, too."""
    if not unread:
        return rewrite
    dead = {facts.index[name] for name in rewrite.dead}
    pending = list(dead)
    while pending:
        more = [user for user in facts.users[pending.pop()] if user in unread and user not in dead]
        dead.update(more)
        pending += more
    return evolve(rewrite, dead=tuple(facts.names[row] for row in sorted(dead)))
