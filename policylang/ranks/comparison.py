"""Where a graph is about to run under a policy, and ranks compare it: the way in for everything that plans.

Plans are made deep inside torch, which passes nothing on. So whoever starts (a backend, ``apply``, a block in a
checkpoint) opens a comparison, and whoever plans finds it. For one graph the steps are, in order: the settings, what
the ranks settle about rewrites, the plan, and the collectives that come of it. A graph without collectives is not
compared: whatever its ranks decide, none of them waits for another in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from attrs import define, evolve, field, frozen

from policylang.errors import PolicyDivergenceError, PolicyError, PolicyGraphError
from policylang.graph.facts import Facts
from policylang.language.syntax import Policy
from policylang.planning.edits.offers import Offer, Ranks
from policylang.planning.plan import Plan
from policylang.ranks import board as boards
from policylang.ranks import differences, gathering
from policylang.ranks.accounts import (
    COLLECTIVES,
    Account,
    Round,
    Run,
    Stage,
    account_of,
    collectives_stage,
    plan_stage,
    settings_stage,
)
from policylang.ranks.board import SWITCH, Board
from policylang.ranks.meeting import ALONE, Meeting, abouts_of
from policylang.ranks.messages import End, Status, Topic, spell
from policylang.torch_compat import process_groups, store
from policylang.torch_compat.reading import group_ranks

__all__ = ["agree_on_accounts", "agree_on_collectives", "agree_on_plan", "comparing", "is_compared", "ranks_of"]

Known = list[Account]
"""The graphs that were agreed on for one piece of code."""


@define(eq=False)
class Comparison:
    """What one rank compares with the others while it compiles a graph, or changes one."""

    topic: Topic
    agree: bool
    mesh: Any
    known: Known | None
    settings: Callable[[], Sequence[str]]
    around: Sequence[tuple[int, ...]]
    """Ranks that run collectives together which are in no graph, whenever this one runs."""
    board: Board | None
    accounts: list[Account] = field(factory=list)
    """Of the graphs that have collectives, compared or not, for whoever keeps them beside a cache."""
    facts: Facts | None = None
    """Of the graph that is being planned."""
    account: Account | None = None
    before: Account | None = None
    """Of the same code but for sizes, on which the ranks have agreed: nobody is asked again."""
    meeting: Meeting | None = None
    members: frozenset[int] = frozenset()
    """The ranks that share groups of the graphs with this one."""

    @property
    def asks(self) -> bool:
        """Whether this rank compares at all."""
        return self.agree and boards.is_on() and self.board is not None

    # --- one graph ---

    def begin(self, facts: Facts, policy: Policy) -> None:
        """A graph is about to be planned, or taken further."""
        if self.account is None or self.facts is not facts:
            self.facts = facts
            sets = [group.ranks for group in facts.groups.values()]
            self._open(account_of(facts), sets, policy, self._outside(facts))

    def _open(
        self, account: Account, sets: Sequence[tuple[int, ...]], policy: Policy, outside: PolicyGraphError | None
    ) -> None:
        self._close()
        self.account, self.before = account, None
        self.accounts.append(account)
        self.members |= {rank for each in (*sets, *self.around) for rank in each}
        if outside is not None and not self.asks:
            raise outside
        if self.board is None:
            return
        if not self.asks:
            about, entered = abouts_of(self.topic, account.operators)[1], self.board.memory.enter(self.topic)
            self._be_absent(about, entered, f"`{SWITCH}=0`" if self.agree else "`agree=False`")
            return
        alike = [each for each in self.known or () if each.static == account.static]
        self.before = next((each for each in alike if each.signature == account.signature), None)
        if self.before is None and alike and all(each.inputs != account.inputs for each in alike):
            raise self._refused_alone(account)  # a new shape, which nobody else may have met
        if self.before is None:
            self._meet(account, sets, policy, outside)

    def _refused_alone(self, account: Account) -> PolicyDivergenceError:
        assert self.board is not None
        found = differences.compiled_otherwise(self.board.rank, self._label(account))
        self._be_absent(ALONE, 0, found.message, stopped=True)
        return PolicyDivergenceError([found])

    def _meet(
        self,
        account: Account,
        sets: Sequence[tuple[int, ...]],
        policy: Policy,
        outside: PolicyGraphError | None = None,
    ) -> None:
        assert self.board is not None
        mesh = () if self.mesh is None else process_groups.mesh_ranks(self.mesh)
        shared = [each for each in (*sets, *self.around, mesh) if len(each) > 1 and self.board.rank in each]
        if not shared:
            return
        patience = gathering.patience(store.patience(account.groups))
        label = self._label(account)
        self.meeting = Meeting(self.board, self.topic, shared, account.operators, label, policy, patience)
        if outside is not None:
            raise outside
        self.meeting.compare(settings_stage([*self._mesh_lines(), *self.settings()]))

    def _label(self, account: Account) -> str:
        return f"{account.label} ({self.topic.text})"

    def _close(self) -> None:
        if self.meeting is not None:
            self.meeting.leave()
            self.meeting = None

    def _outside(self, facts: Facts) -> PolicyGraphError | None:
        if self.mesh is None:
            return None
        inside = process_groups.mesh_ranks(self.mesh)
        groups = [group for group in facts.groups.values() if not set(inside).issuperset(group.ranks)]
        found = [differences.outside_mesh(group.name, group.ranks, inside) for group in groups]
        return PolicyGraphError(found) if found else None

    def _mesh_lines(self) -> list[str]:
        if self.mesh is None:
            return []
        names, shape, ranks = process_groups.mesh_order(self.mesh)
        dims = ", ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))
        order = spell(ranks) if list(ranks) == sorted(ranks) else ", ".join(map(str, ranks))
        return [f"mesh of {dims} over ranks {order}"]

    # --- steps ---

    def ranks(self, session: str) -> Ranks | None:
        asked = self.before is not None or self.meeting is not None
        return _Settling(self, self.account, session) if asked and self.account is not None else None

    def compare(self, stage: Stage) -> None:
        assert self.account is not None
        self.account.steps.append(stage)
        if self.meeting is not None:
            self.meeting.compare(stage)

    def launch(self, stage: Stage, launched: str, policy: Policy) -> None:
        """The last step of a graph that is compiled."""
        account, before = self.account, self.before
        assert account is not None
        account.launched[:] = [launched]
        if before is not None and self.board is not None:
            if before.launched == [launched]:
                return
            if before.operators == account.operators:  # nothing but sizes can have made the difference
                raise self._refused_alone(account)
            self._meet(account, [group_ranks(name) for name in account.groups], policy)
            if self.meeting is not None:
                for step in account.steps:
                    if isinstance(step, Stage):
                        self.meeting.compare(step)
        self.compare(stage)
        if self.meeting is not None and self.known is not None:
            self.known.append(evolve(account, steps=list(account.rounds)))  # a plan's step would keep its facts alive

    def replay(self, account: Account, policy: Policy) -> None:
        """All steps of a graph that came out of a cache, as they were when it was compiled."""
        self.facts = None
        self._open(evolve(account, steps=[], launched=[]), [group_ranks(name) for name in account.groups], policy, None)
        for at, step in enumerate(account.steps):
            if isinstance(step, Round):
                self._settle_again(step, account.steps[at + 1 : at + 2])
            elif step.name == COLLECTIVES:
                self.launch(step, account.launched[0], policy)
            else:
                self.compare(step)

    def _settle_again(self, offered: Round, following: Sequence[Stage | Round]) -> None:
        """Raises where the ranks settle now on less than the cached graph has."""
        ranks = self.ranks(offered.session)
        unshared = ranks.unshared(offered.offers) if ranks is not None else {}
        settled_more = any(isinstance(each, Round) and each.session == offered.session for each in following)
        if unshared and not settled_more and self.board is not None:
            name = next(iter(unshared))
            found = differences.settled_before(self.board.rank, name, unshared[name])
            if self.meeting is not None:
                self.meeting.end(End(0, found))
            raise PolicyDivergenceError([found])

    # --- what others hear ---

    def stop(self, error: Exception) -> None:
        """This rank goes no further; the others hear why."""
        if isinstance(error, PolicyDivergenceError) or not self.asks or self.board is None:
            return  # the others have come to the same
        said = error.diagnostics[0].message if isinstance(error, PolicyError) else f"{type(error).__name__}: {error}"
        said = said.partition("\n")[0]
        with suppress(RuntimeError):  # of a store that is gone, and with it all who could read
            if self.meeting is not None:
                self.meeting.end(End(0, differences.stopped(self.board.rank, said)))
            else:
                self._be_absent(self.topic.address, self.board.memory.enter(self.topic), said, stopped=True)

    def _be_absent(self, about: str, entered: int, reason: str, stopped: bool = False) -> None:
        """Say that this rank takes no part in what others may compare."""
        assert self.board is not None
        absences = self.board.memory.note_own(self.board.rank, about, entered, reason, stopped)
        with suppress(RuntimeError):
            self.board.say(Status("stopped" if stopped else "uncompared", reason, absences))

    def why_gone(self) -> Callable[[], PolicyDivergenceError | None]:
        """For a compiled graph whose collective fails: why another rank does not take part, if it has said so."""
        board, keys = self.board, () if self.meeting is None else self.meeting.keys
        members = self.members - {board.rank} if board is not None else frozenset()

        def why() -> PolicyDivergenceError | None:
            if board is None:
                return None
            with suppress(RuntimeError):
                end = board.end_of(keys, math.inf)
                if end is not None:
                    return PolicyDivergenceError([end.diagnostic])
                for rank in sorted(members):
                    status = board.status(rank)
                    if status.kind == "stopped":
                        board.memory.note(status.absences[-1])
                        return PolicyDivergenceError([differences.stopped(rank, status.text)])
            return None

        return why


@frozen
class _Settling:
    """The ranks that share a graph, as a plan asks them what all of them rewrite."""

    comparison: Comparison
    account: Account
    session: str

    def unshared(self, offers: Sequence[Offer]) -> Mapping[str, str]:
        before, meeting = self.comparison.before, self.comparison.meeting
        if before is not None:
            # nobody is asked: what was left when the same code was compiled before is left again
            last = [each.offers for each in before.rounds if each.session == self.session][-1:]
            known = {offer.name for offers in last for offer in offers}
            return {each.name: "not when this code was first compiled" for each in offers if each.name not in known}
        assert meeting is not None
        if not meeting.alike:  # an error in a moment; until then nothing is rewritten
            return {offer.name: "not under the policies of all ranks" for offer in offers}
        offered = Round(self.session, tuple(offers))
        self.account.steps.append(offered)
        return meeting.settle(offered)


_comparison: ContextVar[Comparison | None] = ContextVar("policylang_comparison", default=None)


@contextmanager
def comparing(
    topic: str,
    agree: bool = True,
    *,
    mesh: object = None,
    known: Known | None = None,
    settings: Callable[[], Sequence[str]] = tuple,
    around: Sequence[tuple[int, ...]] = (),
) -> Iterator[Comparison]:
    """Within, ranks compare what they plan, the ones with ``agree`` that is.

    ``topic``: what is planned, the same words on every rank. ``known``: what was agreed on for the same code, and is
    held to where it is compiled again for other sizes; new agreements are added. ``settings``: lines that have to be
    the same on every rank. ``around``: ranks that run collectives together which are in no graph, FSDP's for one.
    """
    comparison = Comparison(Topic(topic), agree, mesh, known, settings, around, boards.board())
    token = _comparison.set(comparison)
    try:
        yield comparison
    except Exception as error:
        comparison.stop(error)
        raise
    finally:
        comparison._close()
        _comparison.reset(token)


def is_compared(facts: Facts) -> bool:
    """Whether a graph is one that ranks compare here, or would."""
    comparison = _comparison.get()
    shares = any(len(group.ranks) > 1 for group in facts.groups.values())
    return comparison is not None and (shares or bool(comparison.around))


def ranks_of(facts: Facts, policy: Policy, session: str) -> Ranks | None:
    """The ranks that share a graph, for a plan that rewrites it; None where they cannot be asked.

    ``session`` tells the graph itself (of ``facts``, as collected) from the halves that are made of it. To be called
    wherever a plan is made, also under a policy that rewrites nothing: the comparison begins here.

    Raises ``PolicyGraphError`` where the mesh does not contain the graph's groups, and ``PolicyDivergenceError``.
    """
    comparison = _comparison.get()
    if comparison is None or not is_compared(facts):
        return None
    comparison.begin(facts, policy)
    return comparison.ranks(session) if policy.rewrites else None


def agree_on_plan(plan: Plan, facts: Facts) -> None:
    """Return once every rank that shares the graph has the same plan. ``facts``: as collected, before any rewrite.

    Raises ``PolicyDivergenceError`` where plans differ or ranks are missing. Does nothing outside of
    :func:`comparing`.
    """
    comparison = _comparison.get()
    if comparison is not None and is_compared(facts):
        comparison.begin(facts, plan.policy)
        comparison.compare(plan_stage(plan))


def agree_on_collectives(plan: Plan, runs: Sequence[Run], settings: Sequence[str] = ()) -> None:
    """Return once every rank that shares a graph is about to run the same collectives. ``runs``: what was made of it;
    ``settings``: what else may be why they differ.

    A graph on which ranks have agreed before is compared with what it was then, and nobody is asked.
    """
    comparison = _comparison.get()
    if comparison is not None and is_compared(plan.before):
        comparison.begin(plan.before, plan.policy)
        comparison.launch(*collectives_stage(runs, settings), plan.policy)


def agree_on_accounts(accounts: Sequence[Account], policy: Policy) -> None:
    """The same for graphs that came out of a cache: their plans were recorded when they were made."""
    comparison = _comparison.get()
    if comparison is None:
        return
    for account in accounts:
        comparison.replay(account, policy)
