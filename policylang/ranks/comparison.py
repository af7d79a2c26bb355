"""Opens a comparison of ranks, and finds the current one: the entry point for everything that plans.

Plans are made deep inside torch, which passes nothing on. So the starter (a backend, ``apply``, a block in a
checkpoint) opens a comparison, and the planner finds it. For one graph the steps are, in order: the settings, the
agreed rewrites, the plan, and its collectives. A graph without collectives is not compared: none waits for another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from attrs import define, evolve, field, frozen

from policylang.errors import PolicyDivergenceError, PolicyError, PolicyGraphError
from policylang.graph.facts import Facts
from policylang.language.syntax import Policy
from policylang.planning.edits.other_ranks import Proposal, Ranks
from policylang.planning.plan import Plan
from policylang.ranks import differences, meeting, rank_account
from policylang.ranks.meeting import SWITCH, Meeting, MessageStore, StoreFailure
from policylang.ranks.rank_account import address_of, in_order
from policylang.torch_compat import distributed
from policylang.torch_compat.graphs import group_ranks

TIMEOUT = "POLICYLANG_AGREE_TIMEOUT"
"""The seconds that a rank is waited for."""

AgreedAccounts = list[rank_account.RankAccount]
"""The graphs that were agreed on for one piece of code."""
Groups = Mapping[str, Sequence[int]]
"""By the name of a process group."""


@define(eq=False)
class RankComparison:
    """One rank's comparison with the others while it compiles or changes a graph."""

    topic: str
    agree: bool
    mesh: Any
    known: AgreedAccounts | None
    settings: Callable[[], Sequence[str]]
    around: Groups
    """Over which collectives run that are in no graph, whenever this rank runs."""
    store: MessageStore | None
    accounts: list[rank_account.RankAccount] = field(factory=list)
    """Accounts of all graphs with collectives, compared or not, to be stored beside a cache."""
    facts: Facts | None = None
    """The facts of the graph that is being planned."""
    collectives: Sequence[rank_account.CollectiveCall] = ()
    account: rank_account.RankAccount | None = None
    before: rank_account.RankAccount | None = None
    """The account of the same code with other sizes, on which the ranks have agreed."""
    meeting: Meeting | None = None
    members: frozenset[int] = frozenset()
    """The ranks that share groups of the graphs with this one."""

    @property
    def asks(self) -> bool:
        return self.agree and meeting.is_on() and self.store is not None

    # --- one graph ---

    def begin(self, facts: Facts, policy: Policy) -> None:
        """A graph is planned, or taken further. Raises ``PolicyGraphError`` where the mesh lacks one of its groups."""
        if self.account is None or self.facts is not facts:
            self.close()
            inside = () if self.mesh is None else distributed.mesh_ranks(self.mesh)
            outside = [group for group in facts.groups.values() if not set(inside).issuperset(group.ranks)]
            if self.mesh is not None and outside:
                found = [differences.outside_mesh(group.name, group.ranks, inside) for group in outside]
                raise PolicyGraphError(found)
            self.facts, self.collectives = facts, rank_account.collectives_of(rank_account.GraphRun("", facts))
            groups = {name: group.ranks for name, group in facts.groups.items()}
            self._open(rank_account.account_of(facts, self.collectives), groups, policy)

    def _open(self, account: rank_account.RankAccount, groups: Groups, policy: Policy) -> None:
        self.close()
        self.account, self.before = account, None
        self.accounts.append(account)
        self.members |= {rank for each in (*groups.values(), *self.around.values()) for rank in each}
        if self.store is None:
            return
        if not self.asks:
            reason = f"`{SWITCH}=0`" if self.agree else "`agree=False`"
            with suppress(StoreFailure):
                self.store.be_absent(address_of(self.topic), account.operators, reason)
            return
        alike = [each for each in self.known or () if each.static == account.static]
        self.before = next((each for each in alike if each.signature == account.signature), None)
        if self.before is None and alike and all(each.inputs != account.inputs for each in alike):
            raise self._refused_alone(account)  # a new shape, which nobody else may have met
        if self.before is None:
            self._meet(account, groups, policy)

    def _refused_alone(self, account: rank_account.RankAccount) -> PolicyDivergenceError:
        assert self.store is not None
        found = differences.compiled_otherwise(self.store.rank, self._label(account))
        with suppress(StoreFailure):
            self.store.be_absent("", "", found.message)
        return PolicyDivergenceError([found])

    def _meet(self, account: rank_account.RankAccount, groups: Groups, policy: Policy) -> None:
        """Meet the ranks that share the graph, if there are any, and compare the settings."""
        assert self.store is not None
        every, lines = {**groups, **self.around}, list[str]()
        if self.mesh is not None:
            if policy.stage is None:  # the graphs of other stages are others
                every |= distributed.mesh_groups(self.mesh)
            names, shape, ranks = distributed.mesh_order(self.mesh)
            dims = ", ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))
            lines.append(f"mesh of {dims} over ranks {in_order(ranks)}")
        shared = {name: ranks for name, ranks in every.items() if len(ranks) > 1 and self.store.rank in ranks}
        if not shared:
            return
        try:
            timeout = float(os.environ[TIMEOUT])
        except (KeyError, ValueError):  # as long as its process groups would wait
            timeout = distributed.shortest_timeout(shared)
        label = self._label(account)
        self.meeting = Meeting(self.store, self.topic, shared, account.operators, label, policy, timeout)
        self.meeting.compare(rank_account.settings_step([*lines, *self.settings()]))

    def _label(self, account: rank_account.RankAccount) -> str:
        return f"{account.label} ({self.topic})"

    def close(self) -> None:
        meeting, self.meeting = self.meeting, None
        if meeting is not None:
            meeting.leave()

    # --- steps ---

    def ranks(self, session: str) -> Ranks | None:
        asked = self.before is not None or self.meeting is not None
        return _AskedRanks(self, self.account, session) if asked and self.account is not None else None

    def compare(self, step: rank_account.ComparedStep) -> None:
        assert self.account is not None
        self.account.steps.append(step)
        if self.meeting is not None:
            self.meeting.compare(step)

    def launch(self, step: rank_account.ComparedStep, launched: str, policy: Policy) -> None:
        """The last step of a graph that is compiled."""
        account, before = self.account, self.before
        assert account is not None
        account.launched[:] = [launched]
        if before is not None and self.store is not None:
            if before.launched == [launched]:
                return
            if before.operators == account.operators:  # nothing but sizes can have made the difference
                raise self._refused_alone(account)
            self._meet(account, _groups_of(account), policy)
            for step in account.steps:
                if self.meeting is not None and not step.session:
                    self.meeting.compare(step)
        self.compare(step)
        if self.meeting is not None and self.known is not None:
            self.known.append(evolve(account, steps=account.rounds))  # a plan's step would keep its facts alive

    def compare_cached(self, account: rank_account.RankAccount, policy: Policy) -> None:
        """All steps of a graph from a cache, as they were when it was compiled."""
        self.facts = None
        self._open(evolve(account, steps=[], launched=[]), _groups_of(account), policy)
        for at, step in enumerate(account.steps):
            if step.session:
                self._settle_again(step, account.steps[at + 1 : at + 2])
            elif step.name == rank_account.COLLECTIVES:
                self.launch(step, account.launched[0], policy)
            else:
                self.compare(step)

    def _settle_again(self, round: rank_account.ComparedStep, following: Sequence[rank_account.ComparedStep]) -> None:
        """Raises where the ranks settle now on less than the cached graph has."""
        ranks = self.ranks(round.session)
        unshared = ranks.unshared(round.content().offers) if ranks is not None else {}
        settled_more = any(each.session == round.session for each in following)
        if unshared and not settled_more and self.store is not None:
            name = next(iter(unshared))
            found = differences.settled_before(self.store.rank, name, unshared[name])
            if self.meeting is not None:
                with suppress(StoreFailure):
                    self.meeting.tell(found)
            raise PolicyDivergenceError([found])

    # --- what others hear ---

    def stop(self, error: BaseException) -> None:
        """This rank goes no further; the others hear why."""
        if isinstance(error, PolicyDivergenceError):  # the others have the same result
            self.meeting = None
            return
        said = error.diagnostics[0].message if isinstance(error, PolicyError) else f"{type(error).__name__}: {error}"
        said = said.partition("\n")[0].rstrip(": ")
        meeting, self.meeting = self.meeting, None
        if self.store is None or not self.asks:
            return
        with suppress(StoreFailure):  # of a store that is gone, and with it all who could read
            if meeting is not None:
                meeting.tell(differences.stopped(self.store.rank, said))
            else:
                self.store.be_absent(address_of(self.topic), "", said)

    def why_gone(self) -> Callable[[], PolicyDivergenceError | None]:
        """For a compiled graph whose collective fails: why another rank does not take part, if it has sent that."""
        found, keys = self.store, () if self.meeting is None else self.meeting.keys
        if found is None:
            return lambda: None
        members = self.members - {found.rank}

        def why() -> PolicyDivergenceError | None:
            with suppress(StoreFailure):
                end = found.end_of(keys)
                if end is not None:
                    return PolicyDivergenceError([end.diagnostic])
                for rank in sorted(members):
                    status = found.status(rank)
                    if status.kind == "stopped":
                        found.history.told.add(status.absences[-1].id)
                        return PolicyDivergenceError([differences.stopped(rank, status.text)])
            return None

        return why


def _groups_of(account: rank_account.RankAccount) -> Groups:
    return {name: group_ranks(name) for name in account.groups}


@frozen
class _AskedRanks:
    """The ranks that share a graph, as a plan asks them what all of them rewrite."""

    comparison: RankComparison
    account: rank_account.RankAccount
    session: str

    def unshared(self, offers: Sequence[Proposal]) -> Mapping[str, str]:
        before, meeting = self.comparison.before, self.comparison.meeting
        if before is not None:
            # nobody is asked: rewrites rejected when the same code was compiled before are rejected now
            last = [each.content().offers for each in before.rounds if each.session == self.session][-1:]
            known = {offer.name for offers in last for offer in offers}
            return {each.name: "not when this code was first compiled" for each in offers if each.name not in known}
        assert meeting is not None
        if not meeting.alike:  # an error in a moment; until then nothing is rewritten
            return {offer.name: "not under the policies of all ranks" for offer in offers}
        step = rank_account.offers_step(self.session, offers)
        self.account.steps.append(step)
        return meeting.settle(step)


_comparison: ContextVar[RankComparison | None] = ContextVar("policylang_comparison", default=None)


@contextmanager
def comparing(
    topic: str,
    agree: bool = True,
    *,
    mesh: object = None,
    known: AgreedAccounts | None = None,
    settings: Callable[[], Sequence[str]] = tuple,
    around: Groups = MappingProxyType({}),
) -> Iterator[RankComparison]:
    """Within, ranks compare what they plan, if they have ``agree``.

    ``topic``: what is planned, the same words on every rank. ``known``: agreements for the same code, which stay
    binding when it is recompiled for other sizes; new ones are added. ``settings``: lines that have to be the same on
    every rank. ``around``: groups of collectives that are in no graph, FSDP's for one.
    """
    comparison = RankComparison(topic, agree, mesh, known, settings, around, meeting.message_store())
    token = _comparison.set(comparison)
    try:
        yield comparison
        comparison.close()
    except BaseException as error:  # ``KeyboardInterrupt``, too: the others would wait
        comparison.stop(error)
        raise
    finally:
        _comparison.reset(token)


def tell_stopped(topic: str, error: BaseException) -> None:
    """Tell other ranks of an error before there is anything to compare."""
    RankComparison(topic, True, None, None, tuple, {}, meeting.message_store()).stop(error)


def is_compared(facts: Facts) -> bool:
    """Ranks compare this graph here, or would."""
    return _comparison_of(facts) is not None


def _comparison_of(facts: Facts) -> RankComparison | None:
    comparison = _comparison.get()
    shares = any(len(group.ranks) > 1 for group in facts.groups.values())
    return comparison if comparison is not None and (shares or comparison.around) else None


def ranks_of(facts: Facts, policy: Policy, session: str) -> Ranks | None:
    """The ranks that share a graph, for a plan that rewrites it; None where they cannot be asked.

    ``session`` distinguishes the graph itself (of ``facts``, as collected) from its forward and backward graph. Call it
    wherever a plan is made, also under a policy without rewrites: the comparison begins here.

    Raises ``PolicyGraphError`` where the mesh does not contain the graph's groups, and ``PolicyDivergenceError``.
    """
    comparison = _comparison_of(facts)
    if comparison is None:
        return None
    comparison.begin(facts, policy)
    return comparison.ranks(session) if policy.rewrites else None


def agree_on_plan(plan: Plan) -> None:
    """Return once every rank that shares the graph has the same plan. Raises ``PolicyDivergenceError`` where plans
    differ or ranks are missing. Does nothing outside of :func:`comparing`."""
    comparison = _comparison_of(plan.before)
    if comparison is not None:
        comparison.begin(plan.before, plan.policy)
        comparison.compare(rank_account.plan_step(plan, comparison.collectives))


def agree_on_collectives(plan: Plan, runs: Sequence[rank_account.GraphRun], settings: Sequence[str] = ()) -> None:
    """Return once every rank that shares a graph is about to run the same collectives. ``runs``: what was made of it;
    ``settings``: what else may be why they differ. A graph on which ranks have agreed before is compared with what it
    was then, and nobody is asked."""
    comparison = _comparison_of(plan.before)
    if comparison is not None:
        comparison.begin(plan.before, plan.policy)
        comparison.launch(*rank_account.collectives_step(runs, settings), plan.policy)


def agree_on_cached(accounts: Sequence[rank_account.RankAccount], policy: Policy) -> None:
    """:func:`agree_on_collectives` for graphs out of a cache, from the accounts in their sidecars."""
    comparison = _comparison.get()
    if comparison is not None:
        for account in accounts:
            comparison.compare_cached(account, policy)
