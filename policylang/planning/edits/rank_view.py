"""What every rank has alike of a graph and its rewrites: names and sizes, not the ranks of its own groups."""

from __future__ import annotations

from collections.abc import Iterator

from policylang.graph.facts import Facts, Flag
from policylang.operators.names import GETITEM
from policylang.planning.edits.data import FusedGroup, Rewrite, Rewrites

_VIEW = int(Flag.VIEW)


def words_of(rewrites: Rewrites) -> Iterator[str]:
    """What is rewritten."""
    for rewrite in rewrites.done:
        yield from rewrite_words(rewrite)


def rewrite_words(rewrite: Rewrite) -> Iterator[str]:
    yield f"{rewrite.statement} {rewrite.kind} {rewrite.source} {rewrite.collectives}"
    if rewrite.kind != "round_trip":  # a rank's own part of a split is another `getitem` on every rank
        yield f"{rewrite.before} {rewrite.replaced} {rewrite.dead} {rewrite.restrided}"
    for node in rewrite.nodes:
        arguments = () if node.per_rank else [_alike(value) for value in node.arguments]
        yield f"{node.name} {node.target} {node.shape} {node.stride} {node.dtype} {arguments}"


def common_names(facts: Facts) -> list[str]:
    """The names of all nodes as every rank has them.

    Where a rank takes its own piece of a split and nobody another one, the piece is another ``getitem`` on every rank.
    Pieces that nobody reads may stand beside it.
    """
    names, users, targets = list(facts.names), facts.users, facts.targets
    for row, readers in enumerate(users):
        if not facts.flags[row] & _VIEW:
            continue
        pieces = [user for user in readers if targets[user] == GETITEM]
        if len(readers) - sum(not users[piece] for piece in pieces) <= 1:
            for piece in pieces:
                names[piece] = f"a piece of {names[row]}"
    return names


def _alike(value: object) -> object:
    return len(value.ranks) if isinstance(value, FusedGroup) else value
