"""How ranks differ, and what is said then: the one place where these sentences are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from policylang.language.codes import diagnose
from policylang.language.diagnostics import Diagnostic
from policylang.ranks.accounts import COLLECTIVES, PLAN, Content, Row
from policylang.ranks.messages import Absence, Entry, Key, Status, named, spell

DECIDED = "APL601"
GRAPHS = "APL602"
POLICIES = "APL603"
MISSING = "APL604"
STOPPED = "APL605"
MESH = "APL606"
WAITING = "APL607"
SETTLED = "APL608"
DIFFERENT_COLLECTIVES = "APL609"
SETTINGS_DIFFER = "APL610"
ALONE = "APL611"
UNCOMPARED = "APL612"

_SAME_FILE = "give every rank the same policy file"
_SAME_TRACE = "what is traced may not depend on the rank"
_SWITCH = "`agree=False`, or `POLICYLANG_AGREE=0` for the whole program, leaves the ranks uncompared"

Found = tuple[Diagnostic, dict[str, int]]
"""What is said, and by the digest of a policy the rule that it is about."""


def first_pair(entries: Mapping[int, Entry]) -> tuple[int, int] | None:
    """Two ranks that differ, the same two whoever asks; None where all are alike.

    First those that differ in what all have alike, then those that differ over a group that they share.
    """
    first = min(entries)
    digest = entries[first].digest, entries[first].stage
    other = next((rank for rank in sorted(entries) if (entries[rank].digest, entries[rank].stage) != digest), None)
    if other is not None:
        return first, other
    for rank in sorted(entries):
        for number, share in enumerate(entries[rank].shares):
            for member in share.ranks:
                if share not in entries[member].shares[number : number + 1]:
                    return min(rank, member), max(rank, member)
    return None


def between(stage: str, entries: Mapping[int, Entry], contents: Mapping[int, Content]) -> Found:
    """``contents``: what is behind the digests of two ranks."""
    left, right = pair = min(contents), max(contents)
    if entries[left].stage != entries[right].stage:
        return out_of_step(entries[left], right, entries[right]), {}
    one, two = contents[left], contents[right]
    parties = _parties(entries, pair)
    if stage == PLAN:
        return _plans(entries, pair, one, two, parties)
    lines = _lines(left, right, *_first_unlike(one.lines, two.lines))
    if stage == COLLECTIVES:
        found = _unlike_collectives(pair, one, two)
        if found is not None:
            message, details = found
            help = "compile with the same settings of torch on every rank; the plans are the same"
            return diagnose(DIFFERENT_COLLECTIVES, message, help=help, details=(*details, *lines, *parties)), {}
    message = f"ranks {left} and {right} have different settings, which change what is run"
    help = "set them alike on every rank, and pass the same mesh"
    return diagnose(SETTINGS_DIFFER, message, help=help, details=(*lines, *parties)), {}


def _plans(
    entries: Mapping[int, Entry], pair: tuple[int, int], one: Content, two: Content, parties: tuple[str, ...]
) -> Found:
    left, right = pair
    rewrites = _lines(left, right, *_first_unlike(one.rewrites, two.rewrites))
    for ours, theirs in zip_longest(one.rows, two.rows):
        if ours is None or theirs is None or ours.operator != theirs.operator:
            message = f"ranks {left} and {right} have different graphs: {_has(left, ours)}, and {_has(right, theirs)}"
            help = _SAME_TRACE
            if rewrites:
                help = f"{_SAME_FILE} and the same mesh: the graphs differ in what is rewritten"
            return diagnose(GRAPHS, message, help=help, details=(*rewrites, *parties)), {}
    found = _unlike_collectives(pair, one, two)
    if found is not None:
        message, details = found
        return diagnose(DIFFERENT_COLLECTIVES, message, help=_SAME_TRACE, details=(*details, *parties)), {}
    decided = next(((a, b) for a, b in zip(one.rows, two.rows, strict=True) if a.did != b.did), None)
    if decided is not None:
        ours, theirs = decided
        message = f"ranks decided differently about `{ours.node}`: rank {left} {ours.did}, rank {right} {theirs.did}"
        details = (_decision(left, ours), _decision(right, theirs), *rewrites, *parties)
        help = f"{_SAME_FILE}, and let no rule depend on a size that differs between ranks"
        rules = {
            entries[rank].policy: row.rule for rank, row in ((right, theirs), (left, ours)) if row.rule is not None
        }
        return diagnose(DECIDED, message, help=help, details=details), rules
    if one.policy != two.policy:
        here, there = _first_unlike(one.policy.splitlines(), two.policy.splitlines())
        details = (*_lines(left, right, here, there), *rewrites, *parties)
        message = f"ranks {left} and {right} have different policies, which come to the same on this graph"
        return diagnose(POLICIES, message, help=_SAME_FILE, details=details), {}
    message = f"ranks {left} and {right} rewrite the collectives of this graph differently"
    help = f"{_SAME_FILE} and the same mesh, over groups that lie alike"
    return diagnose(DECIDED, message, help=help, details=(*rewrites, *parties)), {}


def _unlike_collectives(pair: tuple[int, int], one: Content, two: Content) -> tuple[str, tuple[str, ...]] | None:
    """The first collective in which two graphs differ."""
    left, right = pair
    here, there = ([row for row in each.rows if row.collective] for each in (one, two))
    numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for at, (ours, theirs) in enumerate(zip_longest(here, there), 1):
        details = (_runs(left, ours), _runs(right, theirs))
        a, b = (None if row is None else row.collective for row in (ours, theirs))
        if a is None or b is None:
            more, which = (left, a) if a is not None else (right, b)
            assert which is not None
            where = f" in the {which.when}" if which.when else ""
            return f"rank {more} runs collective {at}{where}, `{which.node}`, and the other has no further one", details
        shared = left in theirs.group and right in ours.group
        if (a.when, a.operator) != (b.when, b.operator) or (shared and str(a) != str(b)):
            return f"ranks {left} and {right} run different collectives at place {at}: {a} and {b}", details
        places = [number.setdefault(each.group, len(number)) for number, each in zip(numbers, (a, b), strict=True)]
        one_sided = (right in ours.group) != (left in theirs.group)
        if one_sided or places[0] != places[1] or (shared and (a.group, ours.group) != (b.group, theirs.group)):
            return f"ranks {left} and {right} run `{a.node}` (collective {at}) over different process groups", details
    return None


def missing(mine: Entry, why: Mapping[int, str]) -> Diagnostic:
    """``why``: by rank that has not come, a phrase."""
    ranks = named(list(why))
    message = f"{ranks} did not say what is planned for a graph that rank {mine.rank} shares: {mine.label}"
    details = tuple(f"rank {rank} {reason}" for rank, reason in why.items())
    return diagnose(MISSING, message, help=f"look for the error of {ranks} first; {_SWITCH}", details=details)


def store_gone(error: Exception) -> Diagnostic:
    first = str(error).partition("\n")[0]
    message = "the store of the default process group cannot be reached any more, so the ranks cannot be compared"
    help = "the process that held it has ended: without `torchrun` that is rank 0"
    return diagnose(MISSING, message, help=help, details=(first,) if first else ())


def stopped(rank: int, error: str) -> Diagnostic:
    message = f"rank {rank}, which shares this graph, stopped: {error}"
    return diagnose(STOPPED, message, help=f"mend the error of rank {rank}")


def absent(mine: Entry, absence: Absence) -> Diagnostic:
    """A rank takes no part in what this rank waits to compare with it."""
    rank = absence.rank
    if absence.stopped:
        return stopped(rank, absence.reason)
    message = f"rank {mine.rank} compares {mine.label} with the ranks that share it, and rank {rank} does not"
    details = (f"rank {rank} has {absence.reason}",)
    return diagnose(UNCOMPARED, message, help="set it on every rank alike, or on none", details=details)


def not_shared(entry: Entry, key: Key, other: Entry) -> Diagnostic:
    """``other`` shares a graph over ``key``, and the graph of ``entry`` does not."""
    message = (
        f"ranks {other.rank} and {entry.rank} have different graphs: rank {other.rank} compares with ranks "
        f"{spell(key.ranks)}, and the graph of rank {entry.rank} has no collective over these"
    )
    details = (_scope(other), _scope(entry))
    help = f"pass the same mesh on every rank, and trace the same graphs in the same order; {_SWITCH}"
    return diagnose(GRAPHS, message, help=help, details=details)


def out_of_step(mine: Entry, rank: int, other: Entry) -> Diagnostic:
    """One of the two has its graph from a cache, with other steps than are taken now."""
    message = f"rank {mine.rank} is at the {mine.stage}, and rank {rank} at the {other.stage}"
    help = "clear the compile caches of all ranks, or give every rank the cache of the same run"
    details = (f"rank {mine.rank} has {mine.label}", f"rank {rank} has {other.label}")
    return diagnose(SETTLED, message, help=help, details=details)


def settled_before(rank: int, offer: str, why: str) -> Diagnostic:
    """``rank`` has the graph from a cache, with a rewrite that not all ranks would make now."""
    message = f"rank {rank} took this graph from a cache with a rewrite that not all ranks make now: {why}"
    help = "clear the compile caches of all ranks, or give every rank the cache of the same run"
    return diagnose(SETTLED, message, help=help, details=(f"the rewrite is `{offer}`",))


def waiting(mine: Entry, key: Key, rank: int, others: Mapping[int, Status]) -> Diagnostic:
    """``others``: ranks that wait, and in the end for this one."""
    message = f"rank {mine.rank} waits for rank {rank} over another graph than rank {rank} waits over, and so for ever"
    details = (
        f"rank {mine.rank} has {mine.label}, and waits among ranks {spell(key.ranks)}",
        *(f"rank {each} has {status.text}" for each, status in sorted(others.items())),
    )
    help = f"compile and trace the same graphs in the same order on every rank; {_SWITCH}"
    return diagnose(WAITING, message, help=help, details=details)


def compiled_otherwise(rank: int, label: str) -> Diagnostic:
    """A graph that no other rank was asked about runs other collectives than those that were agreed on."""
    message = f"rank {rank} compiled this code again, alone, and comes to other collectives than the ranks agreed on"
    help = (
        "decide by name in place of size (`where bytes > …`); where all ranks meet the new size together, compile for "
        "it with a backend of its own, which compares again"
    )
    return diagnose(ALONE, message, help=help, details=(f"it has {label}",))


def outside_mesh(group: str, ranks: Sequence[int], mesh: Sequence[int]) -> Diagnostic:
    return diagnose(
        MESH,
        f"the mesh does not contain the graph's groups: `{group}` runs over ranks {spell(sorted(ranks))}, and the mesh "
        f"has ranks {spell(mesh)}",
        help="pass the mesh that the model was sharded over, on every rank",
    )


def _parties(entries: Mapping[int, Entry], pair: tuple[int, int]) -> tuple[str, ...]:
    """Who is with whom; the lowest rank's first. Where all are with all, the two that differ over a group."""
    by_digest: dict[str, list[int]] = {}
    for rank in sorted(entries):
        by_digest.setdefault(entries[rank].digest, []).append(rank)
    if len(by_digest) == 1:
        return tuple(f"rank {rank}: {entries[rank].label}" for rank in pair)
    return tuple(
        f"{named(ranks)}: {entries[ranks[0]].label}, {entries[ranks[0]].stage} {digest[:12]}"
        for digest, ranks in by_digest.items()
    )


def _first_unlike(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    return next(((a, b) for a, b in zip_longest(ours, theirs, fillvalue="") if a != b), ("", ""))


def _lines(left: int, right: int, ours: str, theirs: str) -> tuple[str, ...]:
    if not (ours or theirs):
        return ()
    return tuple(
        f"rank {rank} has `{line}`" if line else f"rank {rank} has nothing there"
        for rank, line in ((left, ours), (right, theirs))
    )


def _has(rank: int, row: Row | None) -> str:
    operator = "" if row is None else row.operator or "an input or output"
    return f"rank {rank} has `{row.node}` ({operator})" if row else f"rank {rank} has no further node"


def _runs(rank: int, row: Row | None) -> str:
    if row is None or row.collective is None:
        return f"rank {rank} runs no further collective"
    one = row.collective
    return f"rank {rank} runs `{one.node}`, {one}, over group `{one.group}` of ranks {_ordered(row.group)}"


def _ordered(ranks: Sequence[int]) -> str:
    return spell(ranks) if list(ranks) == sorted(ranks) else ", ".join(map(str, ranks))


def _decision(rank: int, row: Row) -> str:
    by = f": {row.by}" if row.by else ""
    return f"rank {rank} {row.did}{by}"


def _scope(entry: Entry) -> str:
    sets = "; ".join(spell(key.ranks) for key in entry.keys)
    return f"rank {entry.rank} has {entry.label}, with collectives over ranks {sets}"
