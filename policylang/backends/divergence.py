"""What is said when ranks do not agree: the one place where these sentences are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from policylang.backends.posts import (
    Entry,
    Key,
    Taken,
    first_difference,
    policy_lines_that_differ,
    rewrites_that_differ,
    spell,
)
from policylang.errors import PolicyDivergenceError
from policylang.language.codes import diagnose
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Policy

DECIDED = "APL601"
GRAPHS = "APL602"
POLICIES = "APL603"
MISSING = "APL604"
STOPPED = "APL605"
MESH = "APL606"
WAITING = "APL607"
SETTLED = "APL608"

_SWITCH = "`agree=False`, or `POLICYLANG_AGREE=0` for the whole program, leaves the ranks uncompared"


def differing(
    mine: Entry, entries: Mapping[int, Entry], accounts: Mapping[int, bytes], policy: Policy
) -> PolicyDivergenceError:
    """``accounts``: of the two ranks that are shown, as far as they came."""
    parties = _parties(entries)
    if len(accounts) < 2:
        message = "ranks that share this graph have different plans for it"
        return _error(diagnose(DECIDED, message, help="give every rank the same policy file", details=parties))
    (left, one), (right, two) = sorted(accounts.items())
    found = first_difference(one, two)
    rewritten = rewrites_that_differ(one, two)
    if any(rewritten):
        parties = (_line(left, rewritten[0]), _line(right, rewritten[1]), *parties)
    if found is None and any(rewritten):
        message = f"ranks {left} and {right} rewrite the collectives of this graph differently"
        help = "give every rank the same policy file and the same mesh, over groups that lie alike"
        return _error(diagnose(DECIDED, message, help=help, details=parties))
    if found is None:
        here, there = policy_lines_that_differ(one, two)
        details = (_line(left, here), _line(right, there), *parties)
        message = f"ranks {left} and {right} have different policies, which come to the same on this graph"
        return _error(diagnose(POLICIES, message, help="give every rank the same policy file", details=details))
    ours, theirs = found
    if ours is None or theirs is None or (ours.node, ours.operator) != (theirs.node, theirs.operator):
        message = f"ranks {left} and {right} have different graphs: {_has(left, ours)}, and {_has(right, theirs)} there"
        help = "what is traced may not depend on the rank"
        if any(rewritten):
            help = "give every rank the same policy file and the same mesh: the graphs differ in what is rewritten"
        return _error(diagnose(GRAPHS, message, help=help, details=parties))
    shown = ours if entries[left].digest == mine.digest else theirs
    own = shown.rule is not None and mine.digest in (entries[left].digest, entries[right].digest)
    span = policy.rules[shown.rule].span if own and shown.rule is not None else None
    message = f"ranks decided differently about `{ours.node}`: rank {left} {ours.did}, rank {right} {theirs.did}"
    details = (_decision(left, ours), _decision(right, theirs), *parties)
    help = "give every rank the same policy file, and let no rule depend on a size that differs between ranks"
    return _error(diagnose(DECIDED, message, span, help=help, details=details))


def missing(key: Key, why: Mapping[int, str]) -> PolicyDivergenceError:
    """``why``: by rank, a phrase."""
    ranks = _ranks(list(why))
    message = f"{ranks} did not say what is planned for a graph that ranks {spell(key.ranks)} share"
    details = tuple(f"rank {rank} {reason}" for rank, reason in why.items())
    return _error(diagnose(MISSING, message, help=f"look for the error of {ranks} first; {_SWITCH}", details=details))


def store_gone(error: Exception) -> PolicyDivergenceError:
    first = str(error).partition("\n")[0]
    message = "the store of the default process group cannot be reached any more, so the ranks cannot be compared"
    help = "the process that held it has ended: without `torchrun` that is rank 0"
    return _error(diagnose(MISSING, message, help=help, details=(first,) if first else ()))


def stopped(rank: int, error: str) -> PolicyDivergenceError:
    message = f"rank {rank}, which shares this graph, stopped: {error}"
    return _error(diagnose(STOPPED, message, help=f"mend the error of rank {rank}; {_SWITCH}"))


def not_shared(entry: Entry, key: Key, other: Entry) -> PolicyDivergenceError:
    """``other`` shares a graph over ``key``, and the graph of ``entry`` does not."""
    message = (
        f"ranks {other.rank} and {entry.rank} have different graphs: rank {other.rank} compares with ranks "
        f"{spell(key.ranks)}, and the graph of rank {entry.rank} has no collective over these"
    )
    details = (_scope(other), _scope(entry))
    help = f"pass the same mesh on every rank, and trace the same graphs in the same order; {_SWITCH}"
    return _error(diagnose(GRAPHS, message, help=help, details=details))


def settled_before(rank: int, offer: str, why: str) -> PolicyDivergenceError:
    """``rank`` has the graph from a cache, with a rewrite that not all ranks would make now."""
    message = f"rank {rank} took this graph from a cache with a rewrite that not all ranks make now: {why}"
    help = "clear the compile caches of all ranks, or give every rank the cache of the same run"
    return _error(diagnose(SETTLED, message, help=help, details=(f"the rewrite is `{offer}`",)))


def waiting(mine: Entry, key: Key, rank: int, label: str) -> PolicyDivergenceError:
    message = f"rank {rank} waits for the plan of another graph than this one, and so do the ranks wait for each other"
    details = (f"rank {mine.rank} has {mine.label}, and waits for rank {rank} among {spell(key.ranks)}", label)
    help = f"trace the same graphs in the same order on every rank; {_SWITCH}"
    return _error(diagnose(WAITING, message, help=help, details=details))


def outside_mesh(group: str, ranks: Sequence[int], mesh: Sequence[int]) -> Diagnostic:
    return diagnose(
        MESH,
        f"the mesh does not contain the graph's groups: `{group}` runs over ranks {spell(sorted(ranks))}, and the mesh "
        f"has ranks {spell(mesh)}",
        help="pass the mesh that the model was sharded over, on every rank",
    )


def _parties(entries: Mapping[int, Entry]) -> tuple[str, ...]:
    """Who is with whom; the lowest rank's first."""
    by_digest: dict[str, list[int]] = {}
    for rank in sorted(entries):
        by_digest.setdefault(entries[rank].digest, []).append(rank)
    return tuple(
        f"{_ranks(ranks)}: {entries[ranks[0]].label}, plan {digest[:12]}" for digest, ranks in by_digest.items()
    )


def _has(rank: int, taken: Taken | None) -> str:
    return f"rank {rank} has `{taken.node}` ({_operator(taken)})" if taken else f"rank {rank} has no further node"


def _operator(taken: Taken) -> str:
    return taken.operator or "an input or output"


def _decision(rank: int, taken: Taken) -> str:
    by = f": {taken.by}" if taken.by else ""
    return f"rank {rank} {taken.did}{by}"


def _line(rank: int, line: str) -> str:
    return f"rank {rank} has `{line}`" if line else f"rank {rank} has nothing there"


def _scope(entry: Entry) -> str:
    sets = "; ".join(spell(key.ranks) for key in entry.keys)
    return f"rank {entry.rank} has {entry.label}, with collectives over ranks {sets}"


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank {listed[0]}" if len(listed) == 1 else f"ranks {spell(listed)}"


def _error(diagnostic: Diagnostic) -> PolicyDivergenceError:
    return PolicyDivergenceError([diagnostic])
