"""One number for a plan: equal plans have equal digests in every process and on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from policylang.graph.facts import Facts, Flag
from policylang.language.syntax import Policy
from policylang.planning.plan import Decision
from policylang.planning.rewrites.data import FusedGroup, Rewrite, Rewrites
from policylang.planning.storage import GETITEM

_CHUNK = 1 << 14
NO_REWRITES = Rewrites()
_VIEW = int(Flag.VIEW)


def plan_digest(
    policy: Policy, facts: Facts, decisions: Sequence[Decision | None], rewrites: Rewrites = NO_REWRITES
) -> str:
    """Hex SHA-256 over the policy's resolved text, the node names, the operators, the decisions and the rewrites.

    Of a rewrite, what every rank has alike: names and sizes, not the ranks of its own group.
    """
    digest = hashlib.sha256()
    _feed(digest, [policy_text(policy)])
    _feed(digest, common_names(facts))
    _feed(digest, facts.targets)
    words: dict[int, str] = {}  # decisions are few shared objects, so each is spelled once
    _feed(digest, (words.get(id(d)) or words.setdefault(id(d), _word(d)) for d in decisions))
    if rewrites.done or rewrites.refused:
        _feed(digest, rewrite_words(rewrites))
    return digest.hexdigest()


def rewrite_words(rewrites: Rewrites) -> Iterator[str]:
    """What is rewritten and what is not, as far as every rank has it alike."""
    for rewrite in rewrites.done:
        yield from _rewrite_words(rewrite)
    for refused in rewrites.refused:  # a reason may name a group, which is called otherwise on every rank
        yield f"{refused.statement} {refused.collectives} stay"


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


def policy_text(policy: Policy) -> str:
    """The canonical text; for a tree built by hand, which has none, its fields (spans take no part in a repr)."""
    if policy.canonical:
        return policy.canonical
    return repr((policy.lets, policy.blocks, policy.rules, policy.undecided, policy.rewrites, policy.expectations))


def _word(decision: Decision | None) -> str:
    if decision is None:
        return "-"
    action = "auto" if decision.action is None else decision.action.name
    return f"{action} {decision.rule} {decision.why.name}"


def _rewrite_words(rewrite: Rewrite) -> Iterator[str]:
    yield f"{rewrite.statement} {rewrite.kind} {rewrite.source} {rewrite.collectives}"
    if rewrite.kind != "round_trip":  # a rank's own part of a split is another `getitem` on every rank
        yield f"{rewrite.before} {rewrite.replaced} {rewrite.dead} {rewrite.restrided}"
    if rewrite.group is not None and rewrite.proof.assumed:  # ranks of which it does not hold find other distances
        yield f"{[rank - rewrite.group.ranks[0] for rank in rewrite.group.ranks]}"
    for node in rewrite.nodes:
        arguments = () if node.per_rank else [_alike(value) for value in node.arguments]
        yield f"{node.name} {node.target} {node.shape} {node.stride} {node.dtype} {arguments}"


def _alike(value: object) -> object:
    return len(value.ranks) if isinstance(value, FusedGroup) else value


def _feed(digest: hashlib._Hash, words: Iterable[str]) -> None:
    """Add a column. Neither names nor operators hold a NUL, so words and columns cannot run together."""
    pending = iter(words)
    while chunk := list(islice(pending, _CHUNK)):
        digest.update("\0".join(chunk).encode("utf-8", "surrogatepass") + b"\0")
    digest.update(b"\0\0")
