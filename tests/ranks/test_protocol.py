"""Ranks as threads over one store: nobody hangs, what follows is compared rightly, and ranks are written shortly."""

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

import policylang
from policylang.errors import PolicyDivergenceError
from policylang.graph.facts import Facts, Flag, GraphKind, Group
from policylang.language.syntax import Policy
from policylang.planning.capabilities import JOINT
from policylang.planning.planner import plan as make_plan
from policylang.ranks import meeting, rank_account
from policylang.ranks.comparison import TIMEOUT, agree_on_plan, comparing, ranks_of
from policylang.ranks.meeting import MessageStore
from tests.support.drawn import examples
from tests.support.textgraph import GraphBuilder

SAVE, RECOMPUTE = policylang.parse("undecided -> save\n"), policylang.parse("save mm\nundecided -> recompute\n")
SETS = {2: ([(0, 1)],), 4: ([(0, 1, 2, 3)], [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1), (2, 3), (0, 2), (1, 3)])}
QUICK = 0.25
"""Of the seconds between looks, and of a rank's delays: how often each of them looks meanwhile stays as it is."""

WELL, DIFFERS, STOPS, FAILS = "well", "differs", "stops", "fails"
UNCOMPARED, FEWER, ELSEWHERE = "uncompared", "fewer groups", "elsewhere"


class OwnError(Exception):
    """What a rank at fault runs into."""


@frozen
class Episode:
    """One graph that all ranks have."""

    topic: str
    sets: tuple[tuple[int, ...], ...]
    fault: str
    odd: int
    """The rank at fault."""

    @property
    def concerned(self) -> frozenset[int]:
        """The ranks that hang together with it."""
        found, before = frozenset({self.odd}), frozenset[int]()
        while found != before:
            before = found
            found = found.union(*(each for each in self.sets if found & set(each)))
        return found


def facts_for(rank: int, sets: Sequence[tuple[int, ...]]) -> Facts:
    """A product for each of a rank's groups, with what is gathered over it."""
    builder = GraphBuilder()
    whole = {"shape": (4, 4), "dtype": "float32", "bytes": 64, "numel": 16}
    last = builder.add("x", "input", (), **whole)
    groups = {}
    for number, ranks in enumerate(each for each in sets if rank in each):
        name = f"{number}:{len(ranks)}"
        shard = builder.add(f"shard_{number}", "input", (), **whole)
        gather = "_c10d_functional.all_gather_into_tensor.default"
        gathered = builder.add(f"gather_{number}", gather, (shard,), group=name, flags=Flag.COLLECTIVE, **whole)
        last = builder.add(f"mm_{number}", "aten.mm.default", (last, gathered), **whole)
        groups[name] = Group(name, ranks, len(ranks))
    return evolve(builder.facts(GraphKind.FORWARD), groups=groups)


def through(rank: int, episode: Episode) -> None:
    """One rank's way through an episode; raises what it is told."""
    at_fault = rank == episode.odd
    fault = episode.fault if at_fault else WELL
    sets = episode.sets
    if fault == FEWER:
        sets = tuple(each for each in sets if rank not in each or each == next(own for own in sets if rank in own))
    policy = RECOMPUTE if fault == DIFFERS else SAVE
    with comparing(episode.topic + " (another)" * (fault == ELSEWHERE), fault != UNCOMPARED):
        if fault == STOPS:
            raise OwnError
        facts = facts_for(rank, sets)
        ranks_of(facts, policy, "forward")
        if fault == FAILS:
            raise OwnError
        agree_on_plan(make_plan(policy, facts, JOINT))


def run(world: int, episodes: Sequence[Episode], seed: int) -> list[list[str]]:
    """By rank, what came of each episode: empty where it was well."""
    store, own = dist.HashStore(), threading.local()
    found: list[list[str]] = [[] for _ in range(world)]

    def rank_in_a_thread(rank: int) -> None:
        own.store = MessageStore(rank, lambda: store, threads=True)
        pauses = random.Random(f"{seed} {rank}")
        for episode in episodes:
            time.sleep(QUICK * pauses.choice((0.0, 0.0, 0.01, 0.3)))
            try:
                through(rank, episode)
            except PolicyDivergenceError as error:
                found[rank].append(error.diagnostics[0].code)
            except OwnError:
                found[rank].append("its own")
            else:
                found[rank].append("")

    with (
        mock.patch.object(meeting, "message_store", side_effect=lambda: own.store),
        mock.patch.object(meeting, "_LOOK", QUICK * meeting._LOOK),
    ):
        threads = [threading.Thread(target=rank_in_a_thread, args=(rank,), daemon=True) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads), f"hangs after {found}"
    return found


TOLD = {
    DIFFERS: {"APL601", "APL603"}, STOPS: {"APL605"}, FAILS: {"APL605"}, UNCOMPARED: {"APL612"}, FEWER: {"APL602"},
    ELSEWHERE: {"APL607"},
}  # fmt: skip


def expected(rank: int, episode: Episode) -> set[str]:
    if episode.fault == WELL or rank not in episode.concerned:
        return {""}
    if rank == episode.odd and episode.fault in (STOPS, FAILS):
        return {"its own"}
    if rank == episode.odd and episode.fault == UNCOMPARED:
        return {""}
    if episode.fault == FEWER and sum(rank in each for each in episode.sets) < 2 and rank == episode.odd:
        return {""}
    return TOLD[episode.fault]


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[Episode]]:
    world = draw(st.sampled_from((2, 4)))
    fault = st.sampled_from((WELL, WELL, DIFFERS, STOPS, FAILS, UNCOMPARED, FEWER, ELSEWHERE))

    def episode() -> Episode:
        sets, kind = draw(st.sampled_from(SETS[world])), draw(fault)
        if kind == FEWER and len(sets) < 4:
            kind = WELL  # every rank has one group
        topic = draw(st.sampled_from(("forward (model.py:1)", "apply")))
        return Episode(topic, tuple(sets), kind, draw(st.integers(0, world - 1)))

    return world, [episode() for _ in range(draw(st.integers(1, 6)))]


@given(programs(), st.integers(0, 999))
@settings(max_examples=examples(5, 25))
def test_every_fault_is_told_to_whom_it_concerns_and_to_nobody_later(program, seed) -> None:
    world, episodes = program
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(TIMEOUT, "20")
        found = run(world, [*episodes, evolve(episodes[-1], fault=WELL)], seed)
    for number, episode in enumerate((*episodes, evolve(episodes[-1], fault=WELL))):
        for rank in range(world):
            assert found[rank][number] in expected(rank, episode), (number, rank, episode, found)


def test_ranks_that_are_alike_read_each_other_only_where_their_groups_are_new() -> None:
    episode = Episode("apply", tuple(SETS[4][3]), WELL, 0)
    own, read = MessageStore.read_all, list[str]()

    def read_all(self: MessageStore, keys: Sequence[str]) -> object:
        found = own(self, keys)
        read.extend(keys if found is not None else ())
        return found

    with mock.patch.object(MessageStore, "read_all", read_all), mock.patch.object(meeting, "_LOOK", 100.0):
        assert run(4, [episode] * 3, 0) == [[""] * 3] * 4
    assert len(read) == 4 * 3, "in one step of the first comparison, each those of the other three"


def test_threads_with_groups_of_their_own_never_meet() -> None:
    """Each rank compares three models in the threads of a pool, in an order of its own; the topics are the same."""
    store = dist.HashStore()

    def compare(ours: MessageStore, facts: Facts, policy: Policy) -> None:
        own.store = ours
        with comparing("apply"):
            ranks_of(facts, policy, "forward")
            agree_on_plan(make_plan(policy, facts, JOINT))

    def models(rank: int, number: int) -> None:
        pauses, facts = random.Random(f"{rank} {number}"), facts_for(rank, [(0, 1)])
        names = tuple(f"{number}" if name else "" for name in facts.group_names)
        facts = evolve(facts, group_names=names, groups={f"{number}": Group(f"{number}", (0, 1), 2)})
        for policy in (SAVE, RECOMPUTE)[number % 2 :] * 4:
            time.sleep(QUICK * pauses.choice((0.0, 0.1, 1.0)))
            pools[rank].submit(compare, stores[rank], facts, policy).result(60)

    own = threading.local()
    stores = [MessageStore(rank, lambda: store) for rank in range(2)]
    pools = [ThreadPoolExecutor(3) for _ in range(2)]
    with (
        mock.patch.object(meeting, "message_store", side_effect=lambda: own.store),
        mock.patch.object(meeting, "_LOOK", QUICK * meeting._LOOK),
        ThreadPoolExecutor(6) as drivers,
    ):
        for each in [drivers.submit(models, rank, number) for rank in range(2) for number in range(3)]:
            each.result()
    assert store.num_keys() == 2, "what is left is who has joined"


def test_a_store_that_is_gone_is_said() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    gone = MessageStore(1, lambda: client)
    with (
        mock.patch.object(meeting, "message_store", return_value=gone),
        pytest.raises(PolicyDivergenceError, match="is gone, so the ranks cannot compare") as told,
        comparing("apply"),
    ):
        ranks_of(facts_for(1, [(0, 1)]), SAVE, "forward")
    assert told.value.diagnostics[0].code == "APL604"


@pytest.mark.parametrize("text", ["gAOVCg==", "[]", "[" * 100_000, " " * (rank_account.LONGEST + 1)])
def test_what_no_rank_has_written_is_said(text: str) -> None:
    store = dist.HashStore()
    store.set(f"{meeting.PREFIX}/status/1", text)
    ours = MessageStore(0, lambda: store)
    with (
        mock.patch.object(meeting, "message_store", return_value=ours),
        pytest.raises(PolicyDivergenceError, match="has a foreign entry") as told,
        comparing("apply"),
    ):
        ranks_of(facts_for(0, [(0, 1)]), SAVE, "forward")
    assert told.value.diagnostics[0].code == "APL621"


RANKS = st.sets(st.integers(0, 300), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
KEY = rank_account.MeetingKey("ab", "tp", "0,1", 2)
ABSENCE = rank_account.Absence("x.1", 1, "ab", 3, "", "says \ud800 `it`")


@given(RANKS, RANKS)
def test_other_ranks_are_written_otherwise(ranks: tuple[int, ...], others: tuple[int, ...]) -> None:
    assert (rank_account.ranges(ranks) == rank_account.ranges(others)) == (ranks == others)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [(range(1024), "0-1023"), (range(3, 128, 8), "3-123/8"), ((0, 1), "0,1"), ((0, 1, 2, 9, 20), "0-2,9,20")],
)
def test_regular_ranks_are_short(ranks: range, text: str) -> None:
    assert rank_account.ranges(tuple(ranks)) == text


@pytest.mark.parametrize(
    "value",
    [
        rank_account.RankMessage(0, "plan", "00", (KEY,), absences=(ABSENCE,)),
        rank_account.RankStatus("waiting", "a graph", (ABSENCE,), (KEY,), KEY.message(0, 1)),
        rank_account.EndOfComparison("APL601", "so", None, ("a", "b"), {"digest": 3}, keys=(KEY,)),
    ],
)
def test_what_is_written_is_read(value: object) -> None:
    assert rank_account.unpack(type(value), rank_account.pack(value)) == value


@pytest.mark.parametrize(
    "text", ["", "gAOVCg==", "null", "[]", "[" * 100_000, '["0"]', rank_account.pack(KEY), b"\xff\xfe"]
)
def test_what_nobody_has_written_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # whatever it says: the store names the place
        rank_account.unpack(rank_account.RankMessage, text)
