"""The diagnostics of ranks that differ or do not come: the one place where these sentences are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.ranks import rank_account
from policylang.ranks.rank_account import (
    Absence,
    CollectiveCall,
    ComparedNode,
    MeetingKey,
    RankMessage,
    RankStatus,
    StepContent,
)

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
ORDERED = "APL620"
UNREADABLE = "APL621"

_SAME_FILE = "give every rank the same policy file"
_SAME_TRACE = "what is traced may not depend on the rank"
_SWITCH = "`agree=False`, or `POLICYLANG_AGREE=0` for the whole program, leaves the ranks uncompared"

Pair = tuple[int, int]
Found = tuple[Diagnostic, dict[str, int]]
"""The diagnostic, and by the digest of a policy the rule that it is about."""


def first_pair(messages: Mapping[int, RankMessage]) -> Pair | None:
    """Two ranks that differ, the same two whoever asks; None where all are alike. First those that differ in what all
    have alike, then those that differ over a group that they share."""
    first = min(messages)
    digest = messages[first].digest, messages[first].subject
    other = next((rank for rank in sorted(messages) if (messages[rank].digest, messages[rank].subject) != digest), None)
    if other is not None:
        return first, other
    firsts: dict[MeetingKey, dict[tuple[str, ...], int]] = {}
    for rank in sorted(messages):
        for key in messages[rank].keys:
            firsts.setdefault(key, {}).setdefault(messages[rank].over(key), rank)
    pairs = (sorted(each.values())[:2] for each in firsts.values() if len(each) > 1)
    return min(((first, second) for first, second in pairs), default=None)


def between(subject: str, messages: Mapping[int, RankMessage], contents: Mapping[int, StepContent]) -> Found:
    """``contents``: what is behind the digests of two ranks."""
    left, right = pair = min(contents), max(contents)
    if messages[left].subject != messages[right].subject:
        return out_of_step(messages[left], right, messages[right]), {}
    one, two = contents[left], contents[right]
    if subject == rank_account.PLAN:
        return _unlike_plans(pair, one, two, messages)
    parties = _parties(messages, pair)
    lines = _first_unlike(pair, one.lines, two.lines)
    if subject == rank_account.COLLECTIVES:
        found = _unlike_collectives(pair, one, two)
        if found is not None:
            message, details = found
            help = "compile with the same settings of torch on every rank; the plans are the same"
            return diagnose(DIFFERENT_COLLECTIVES, message, help=help, details=(*details, *lines, *parties)), {}
    message = f"ranks {left} and {right} have different settings, which change what is run"
    help = "set them alike on every rank, and pass the same mesh"
    return diagnose(SETTINGS_DIFFER, message, help=help, details=(*lines, *parties)), {}


def _unlike_plans(pair: Pair, one: StepContent, two: StepContent, messages: Mapping[int, RankMessage]) -> Found:
    left, right = pair
    parties = _parties(messages, pair)
    rewrites = _first_unlike(pair, one.rewrites, two.rewrites)
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
        # the lines of a policy's canonical text that name the device and its figures
        texts = (each.policy.splitlines() for each in (one, two))
        by_device = [[line for line in text if line.startswith(("device ", "# "))] for text in texts]
        devices = _first_unlike(pair, *by_device)
        both = zip(pair, decided, strict=True)
        decisions = [f"rank {rank} {row.did}{f': {row.by}' if row.by else ''}" for rank, row in both]
        details = (*decisions, *devices, *rewrites, *parties)
        help = f"{_SAME_FILE}, and let no rule depend on a size that differs between ranks"
        by_rank = ((right, theirs), (left, ours))
        rules = {messages[rank].policy: row.rule for rank, row in by_rank if row.rule is not None}
        return diagnose(DECIDED, message, help=help, details=details), rules
    if one.recomputed != two.recomputed:
        at = next(at for at, pair in enumerate(zip_longest(one.recomputed, two.recomputed)) if pair[0] != pair[1])
        message = f"ranks {left} and {right} recompute different collectives, at place {at + 1} of these"
        details = (*_first_unlike(pair, one.recomputed, two.recomputed), *parties)
        return diagnose(DIFFERENT_COLLECTIVES, message, help=_SAME_TRACE, details=details), {}
    if one.order != two.order:
        return _unlike_orders(pair, one, two, (*rewrites, *parties)), {}
    if one.policy != two.policy:
        details = (*_first_unlike(pair, one.policy.splitlines(), two.policy.splitlines()), *rewrites, *parties)
        come_to = "start its collectives in one order" if one.order else "decide the same on this graph"
        message = f"ranks {left} and {right} have different policies, which {come_to}"
        return diagnose(POLICIES, message, help=_SAME_FILE, details=details), {}
    if one.device != two.device:
        message = f"ranks {left} and {right} use different device profiles, which decide the same on this graph"
        details = (*_first_unlike(pair, one.device, two.device), *parties)
        return diagnose(POLICIES, message, help="give every rank the same device profile", details=details), {}
    message = f"ranks {left} and {right} rewrite the collectives of this graph differently"
    help = f"{_SAME_FILE} and the same mesh, over groups that lie alike"
    return diagnose(DECIDED, message, help=help, details=(*rewrites, *parties)), {}


def _unlike_orders(pair: Pair, one: StepContent, two: StepContent, others: Sequence[str]) -> Diagnostic:
    """The first collective that two ranks would start at another place, and why, as far as the policy shows."""
    left, right = pair
    pairs = enumerate(zip_longest(one.order, two.order, fillvalue="nothing more"), 1)
    at, unlike = next((at, each) for at, each in pairs if each[0] != each[1])
    ours, theirs = ("a wait" if step == "wait" else step for step in unlike)
    message = (
        f"ranks {left} and {right} run the collectives of this graph in different orders: "
        f"at place {at} rank {left} has {ours}, and rank {right} {theirs}"
    )
    lines = _first_unlike(pair, one.policy.splitlines(), two.policy.splitlines())
    figures = _first_unlike(pair, one.device, two.device)
    help = f"{_SAME_FILE} and the same device profile: times that steer an order are those of the device"
    return diagnose(ORDERED, message, help=help, details=(*lines, *figures, *others))


def _unlike_collectives(pair: Pair, one: StepContent, two: StepContent) -> tuple[str, tuple[str, ...]] | None:
    """The first collective in which two graphs differ."""
    left, right = pair
    here, there = ([row.collective for row in each.rows if row.collective] for each in (one, two))
    numbers: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for at, (a, b) in enumerate(zip_longest(here, there), 1):
        details = (_runs(left, a), _runs(right, b))
        if a is None or b is None:
            more, which = (left, a) if a is not None else (right, b)
            assert which is not None
            where = f" in the {which.when}" if which.when else ""
            return f"rank {more} runs collective {at}{where}, `{which.node}`, and the other has no further one", details
        shared = left in b.ranks and right in a.ranks
        if (a.when, a.operator) != (b.when, b.operator) or (shared and str(a) != str(b)):
            return f"ranks {left} and {right} run different collectives at place {at}: {a} and {b}", details
        places = [number.setdefault(each.group, len(number)) for number, each in zip(numbers, (a, b), strict=True)]
        one_sided = (right in a.ranks) != (left in b.ranks)
        if one_sided or places[0] != places[1] or (shared and (a.group, a.ranks) != (b.group, b.ranks)):
            return f"ranks {left} and {right} run `{a.node}` (collective {at}) over different process groups", details
    return None


def missing(mine: RankMessage, why: Mapping[int, str]) -> Diagnostic:
    """``why``: by rank that has not come, a phrase."""
    ranks = rank_account.named(list(why))
    message = f"{ranks} sent no plan for a graph that rank {mine.rank} shares: {mine.label}"
    details = tuple(f"rank {rank} {reason}" for rank, reason in why.items())
    return diagnose(MISSING, message, help=f"look for the error of {ranks} first; {_SWITCH}", details=details)


def store_gone(error: Exception) -> Diagnostic:
    first = str(error).partition("\n")[0]
    message = "the store of the default process group is gone, so the ranks cannot compare"
    help = "the process that hosts it has ended: without `torchrun` that is rank 0"
    return diagnose(MISSING, message, help=help, details=(first,) if first else ())


def unreadable(key: str, why: str) -> Diagnostic:
    message = f"the store of the default process group has a foreign entry under `{key}`"
    help = "install the same version of policylang on every rank, and let nothing else write keys that begin so"
    return diagnose(UNREADABLE, message, help=help, details=(why.partition("\n")[0][:200],))


def stopped(rank: int, error: str) -> Diagnostic:
    message = f"rank {rank}, which shares this graph, stopped: {error}"
    return diagnose(STOPPED, message, help=f"fix the error of rank {rank}")


def absent(mine: RankMessage, absence: Absence) -> Diagnostic:
    """A rank takes no part in what this rank waits to compare with it."""
    rank = absence.rank
    if absence.stopped:
        return stopped(rank, absence.reason)
    message = f"rank {mine.rank} compares {mine.label} with the ranks that share it, and rank {rank} does not"
    details = (f"rank {rank} has {absence.reason}",)
    return diagnose(UNCOMPARED, message, help="set it on every rank alike, or on none", details=details)


def not_shared(mine: RankMessage, key: MeetingKey, other: RankMessage) -> Diagnostic:
    message = (
        f"ranks {other.rank} and {mine.rank} have different graphs: rank {other.rank} compares over {_over(key)}, and "
        f"the graph of rank {mine.rank} has no collective over it"
    )
    both = ((each, "; ".join(map(_over, each.keys))) for each in (other, mine))
    details = tuple(f"rank {each.rank} has {each.label}, with collectives over {groups}" for each, groups in both)
    help = f"pass the same mesh on every rank, and trace the same graphs in the same order; {_SWITCH}"
    return diagnose(GRAPHS, message, help=help, details=details)


def out_of_step(mine: RankMessage, rank: int, other: RankMessage) -> Diagnostic:
    """One of the two has its graph from a cache, with other steps than are taken now."""
    message = f"rank {mine.rank} is at the {mine.subject}, and rank {rank} at the {other.subject}"
    help = "clear the compile caches of all ranks, or give every rank the cache of the same run"
    details = (f"rank {mine.rank} has {mine.label}", f"rank {rank} has {other.label}")
    return diagnose(SETTLED, message, help=help, details=details)


def settled_before(rank: int, offer: str, why: str) -> Diagnostic:
    """``rank`` has the graph from a cache, with a rewrite that not all ranks would make now."""
    message = f"rank {rank} took this graph from a cache with a rewrite that not all ranks make now: {why}"
    help = "clear the compile caches of all ranks, or give every rank the cache of the same run"
    return diagnose(SETTLED, message, help=help, details=(f"the rewrite is `{offer}`",))


def waiting(mine: RankMessage, key: MeetingKey, rank: int, others: Mapping[int, RankStatus]) -> Diagnostic:
    """``others``: ranks that wait, and in the end for this one."""
    message = f"rank {mine.rank} and rank {rank} wait for each other over different graphs, and would wait forever"
    details = (
        f"rank {mine.rank} has {mine.label}, and waits over {_over(key)}",
        *(f"rank {each} has {status.text}" for each, status in sorted(others.items())),
    )
    help = f"compile and trace the same graphs in the same order on every rank; {_SWITCH}"
    return diagnose(WAITING, message, help=help, details=details)


def compiled_otherwise(rank: int, label: str) -> Diagnostic:
    """A graph that no other rank was asked about runs other collectives than those that were agreed on."""
    message = f"rank {rank} recompiled this code alone, and its collectives differ from those the ranks agreed on"
    help = (
        "select by name instead of by size (`where bytes > …`); if all ranks meet the new size together, compile it "
        "with a separate backend, which compares the ranks"
    )
    return diagnose(ALONE, message, help=help, details=(f"it has {label}",))


def outside_mesh(group: str, ranks: Sequence[int], mesh: Sequence[int]) -> Diagnostic:
    mine, inside = rank_account.ranges(sorted(ranks)), rank_account.ranges(mesh)
    message = "the mesh does not contain the graph's groups"
    help = "pass the mesh that the model was sharded over, on every rank"
    return diagnose(MESH, f"{message}: `{group}` runs over ranks {mine}, and the mesh has ranks {inside}", help=help)


def _parties(messages: Mapping[int, RankMessage], pair: Pair) -> tuple[str, ...]:
    """Who is with whom; the lowest rank's first. Where all are with all, the two that differ over a group."""
    by_digest: dict[str, list[int]] = {}
    for rank in sorted(messages):
        by_digest.setdefault(messages[rank].digest, []).append(rank)
    if len(by_digest) == 1:
        return tuple(f"rank {rank}: {messages[rank].label}" for rank in pair)
    parties = ((rank_account.named(ranks), messages[ranks[0]], digest[:12]) for digest, ranks in by_digest.items())
    return tuple(f"{ranks}: {first.label}, {first.subject} {digest}" for ranks, first, digest in parties)


def _first_unlike(pair: Pair, ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, ...]:
    """The first lines in which two ranks differ, one a rank; empty where all are alike."""
    lines = next((both for both in zip_longest(ours, theirs, fillvalue="") if both[0] != both[1]), ())
    both = zip(pair, lines, strict=False)
    return tuple(f"rank {rank} has {f'`{line}`' if line else 'nothing there'}" for rank, line in both)


def _has(rank: int, row: ComparedNode | None) -> str:
    operator = "" if row is None else row.operator or "an input or output"
    return f"rank {rank} has `{row.node}` ({operator})" if row else f"rank {rank} has no further node"


def _runs(rank: int, call: CollectiveCall | None) -> str:
    if call is None:
        return f"rank {rank} runs no further collective"
    ranks = rank_account.in_order(call.ranks)
    return f"rank {rank} runs `{call.node}`, {call}, over group `{call.group}` of ranks {ranks}"


def _over(key: MeetingKey) -> str:
    return f"group `{key.group}` of ranks {key.members}"
