"""The ``getitem`` nodes of a split: those that nobody reads, and one name on all ranks for each rank's own.

``chunk`` is traced with a ``getitem`` for every part, of which a rank may take one. The others are no readers of the
tuple, and go with it. The one that is taken is another node on every rank.
"""

from __future__ import annotations

from collections.abc import Collection

from attrs import evolve

from policylang.graph.facts import Facts, Flag
from policylang.operators.names import GETITEM
from policylang.planning.graph_edit import Edit


def common_names(facts: Facts) -> list[str]:
    """The names of all nodes as every rank has them.

    Where a rank takes its own piece of a split and nobody another one, the piece is another ``getitem`` on every rank.
    Pieces that nobody reads may stand beside it.
    """
    names, users, targets = list(facts.names), facts.users, facts.targets
    for row, readers in enumerate(users):
        if not facts.flags[row] & Flag.VIEW:
            continue
        pieces = [user for user in readers if targets[user] == GETITEM]
        if len(readers) - sum(not users[piece] for piece in pieces) <= 1:
            for piece in pieces:
                names[piece] = f"a piece of {names[row]}"
    return names


def unread_pieces(facts: Facts) -> frozenset[int]:
    """Their rows; a piece of such a piece is one as well."""
    found: set[int] = set()
    for row in range(len(facts) - 1, -1, -1):
        if facts.targets[row] == GETITEM and all(user in found for user in facts.users[row]):
            found.add(row)
    return frozenset(found)


def without_pieces(facts: Facts, unread: Collection[int]) -> Facts:
    """The facts as edits are to be planned on: the pieces read nothing and are nothing."""
    if not unread:
        return facts
    targets, inputs = list(facts.targets), list(facts.inputs)
    users, arguments = list(facts.users), list(facts.arguments)
    for row in unread:
        for source in facts.inputs[row]:
            users[source] = tuple(user for user in users[source] if user not in unread)
        targets[row], inputs[row], arguments[row] = "", (), ()
    return evolve(facts, targets=targets, inputs=inputs, users=users, arguments=arguments)


def with_pieces(edit: Edit, facts: Facts, unread: Collection[int]) -> Edit:
    """The edit with the pieces of what it removes removed, too."""
    if not unread:
        return edit
    dead = {facts.index[name] for name in edit.dead}
    pending = list(dead)
    while pending:
        more = [user for user in facts.users[pending.pop()] if user in unread and user not in dead]
        dead.update(more)
        pending += more
    return evolve(edit, dead=tuple(facts.names[row] for row in sorted(dead)))
