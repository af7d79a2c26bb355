"""Ranks that share a graph compare their plans before anything is compiled and before a process group is made.

Each rank posts the digest of its plan in the store of the default process group: once for every set of ranks that a
group of the graph consists of, and once for the mesh if one was passed. It reads what the other ranks of these sets
posted, and follows the sets that those name, breadth first; so all ranks that hang together over any groups read the
same posts and come to the same verdict. The store is asked for keys, not for a collective: it does not matter which
backend the groups have, and a rank that never comes is noticed.

Where a policy rewrites collectives, the ranks first settle in the same way which rewrites all of them make: while the
plan is being made, and once more for each half of a partition.

A graph without collectives is not compared: whatever its ranks decide, none of them waits for another in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from attrs import define, field, frozen

from policylang import _torch_store
from policylang._torch_graph import group_ranks
from policylang.backends import divergence, heartbeat
from policylang.backends.gathering import PATIENCE, SILENCE
from policylang.backends.meeting import Meeting, keys_of
from policylang.backends.posts import Account, Round, account_of, label_of
from policylang.errors import PolicyDivergenceError, PolicyError, PolicyGraphError
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Policy
from policylang.planning.plan import Plan
from policylang.planning.rewrites.offers import Offer, Ranks

__all__ = ["PATIENCE", "SILENCE", "agree_on_accounts", "agree_on_plan", "comparing", "ranks_of", "stop_others"]


@define(eq=False)
class _Comparison:
    active: bool
    mesh: tuple[int, ...]
    """Its ranks, sorted; empty where none was passed."""
    settled: Sequence[Round] | None
    """What was settled when the same code was compiled before, where ranks are not asked again."""
    accounts: list[Account] = field(factory=list)
    facts: Facts | None = None
    meeting: Meeting | None = None
    """The ranks of the graph that is being planned, or was planned last, and its :attr:`facts`."""

    def meet(self, facts: Facts) -> Meeting | None:
        """The ranks that share a graph; None where nobody can be asked."""
        if self.facts is not facts:
            self.facts = facts
            self.meeting = self._meeting([group.ranks for group in facts.groups.values()], label_of(facts))
        return self.meeting

    def meet_again(self, account: Account) -> Meeting | None:
        """Those of a graph that came out of a cache."""
        self.facts = None
        self.meeting = self._meeting([group_ranks(name) for name in account.groups], account.label)
        return self.meeting

    def _meeting(self, sets: Sequence[tuple[int, ...]], label: str) -> Meeting | None:
        board = heartbeat.board() if self.active else None
        keys = keys_of(board.rank, [*sets, self.mesh]) if board is not None else ()
        return Meeting(board, keys, label) if board is not None and keys else None


_comparison: ContextVar[_Comparison | None] = ContextVar("policylang_comparison", default=None)


@contextmanager
def comparing(agree: bool, mesh: object = None, *, settled: Sequence[Round] | None = None) -> Iterator[list[Account]]:
    """Within, plans are compared between ranks (they are made deep inside torch, which passes nothing on).

    Yields the accounts of the graphs that have collectives, compared or not, for whoever keeps them beside a cache.
    ``settled``: the rounds of such an account, of the same code for another shape, where ranks are not to ``agree``.
    """
    active = agree and heartbeat.board() is not None
    comparison = _Comparison(active, () if mesh is None else _torch_store.mesh_ranks(mesh), settled)
    token = _comparison.set(comparison)
    try:
        yield comparison.accounts
    except PolicyDivergenceError:
        raise  # the others were told, or have come to the same verdict
    except Exception as error:
        if comparison.meeting is not None and comparison.meeting.rounds:  # others may wait to settle more
            said = error.diagnostics[0].message if isinstance(error, PolicyError) else type(error).__name__
            comparison.meeting.fail(said)
        raise
    finally:
        _comparison.reset(token)


def ranks_of(facts: Facts, policy: Policy, session: str) -> Ranks | None:
    """The ranks that share a graph, for a plan that rewrites it; None where they cannot be asked.

    ``session`` tells the graph itself (of ``facts``, as collected) from the halves that are made of it. To be called
    wherever plans are compared, also for a policy that rewrites nothing: other ranks may wait to hear that.

    Raises ``PolicyGraphError`` where the mesh does not contain the graph's groups.
    """
    comparison = _comparison.get()
    if comparison is None or not facts.groups:
        return None
    if not comparison.active:
        return None if comparison.settled is None else _Before(session, comparison.settled)
    meeting = comparison.meet(facts)
    if meeting is None:
        return None
    if not policy.rewrites:
        meeting.close()
        return None
    problems = _outside(facts, comparison.mesh)
    if problems:
        stop_others(facts, problems[0])
        raise PolicyGraphError(problems)
    return _Asked(meeting, session)


@frozen
class _Asked:
    """Ranks that settle now what they rewrite."""

    meeting: Meeting
    session: str

    def unshared(self, offers: Sequence[Offer]) -> Mapping[str, str]:
        return self.meeting.settle(self.session, offers)


@frozen
class _Before:
    """Ranks that settled it when the same code was compiled for the first time: what they left then is left again."""

    session: str
    rounds: Sequence[Round]

    def unshared(self, offers: Sequence[Offer]) -> Mapping[str, str]:
        last = [each.offers for each in self.rounds if each.session == self.session][-1:]
        known = {offer.name for offers in last for offer in offers}
        why = "when this code was first compiled"
        return {offer.name: f"not {why}" for offer in offers if offer.name not in known}


def agree_on_plan(plan: Plan, facts: Facts, errors: Sequence[Diagnostic] = ()) -> None:
    """Return once every rank that shares the graph has the same plan. ``facts``: as collected, before any rewrite.

    ``errors`` are what this rank is about to raise: they are posted, so that the others stop too, and nobody is waited
    for. Raises ``PolicyDivergenceError`` where plans differ or ranks are missing, and ``PolicyGraphError`` where the
    mesh does not contain the graph's groups. Does nothing outside of :func:`comparing`.
    """
    comparison = _comparison.get()
    if comparison is None or not facts.groups:
        return
    meeting = comparison.meet(facts)
    account = account_of(plan, facts, [] if meeting is None else meeting.rounds)
    comparison.accounts.append(account)
    problems = _outside(facts, comparison.mesh)
    if meeting is not None:
        found = [*errors, *problems]
        meeting.agree(account, plan.policy, found[0].message if found else "")
    if problems:
        raise PolicyGraphError(problems)


def stop_others(facts: Facts, error: Diagnostic) -> None:
    """Say, in place of a plan, why this rank has none: the others stop too."""
    comparison = _comparison.get()
    meeting = None if comparison is None or not facts.groups else comparison.meet(facts)
    if meeting is not None:
        meeting.refuse(error.message)


def agree_on_accounts(accounts: Sequence[Account], policy: Policy) -> None:
    """The same for graphs that came out of a cache: their plans were recorded when they were made."""
    comparison = _comparison.get()
    if comparison is None:
        return
    for account in accounts:
        comparison.accounts.append(account)
        meeting = comparison.meet_again(account)
        if meeting is not None:
            meeting.close(account.rounds)
            meeting.agree(account, policy)


def _outside(facts: Facts, mesh: tuple[int, ...]) -> list[Diagnostic]:
    if not mesh:
        return []
    inside = frozenset(mesh)
    groups = (group for group in facts.groups.values() if not inside.issuperset(group.ranks))
    return [divergence.outside_mesh(group.name, group.ranks, mesh) for group in groups]
