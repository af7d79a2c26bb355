"""Inductor's caches under a policy: a second process hits, a changed word misses, and groups of ours go along."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import policylang
from policylang.backends import caching, runtime
from policylang.backends.runtime import RankOrder
from policylang.torch_compat import distributed
from tests.support.cache_process import Halves, Job, compile_and_train
from tests.support.fused_process import compile_and_train as train_fused
from tests.support.process import python
from tests.support.sharded import fake_ranks
from tests.support.versions import needs_groups_in_any_order

POLICY = "recompute everything\nsave aten.mm\nsave aten.bmm\n"
SAME_RULES = "# a comment moves every line\n\nrecompute  everything\nsave aten.mm\nsave aten.bmm\n"
ONE_WORD_OTHER = "recompute everything\nsave aten.mm\nrecompute aten.bmm\n"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of its own; torch reads the variable at every use."""
    folder = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder
        torch._dynamo.reset()


@pytest.fixture(scope="module")
def cold(cache: Path) -> dict[str, Any]:
    return compile_and_train(Job(POLICY))


@pytest.fixture(scope="module")
def warm(cold: dict[str, Any]) -> list[dict[str, Any]]:
    """On the caches that the first one filled."""
    jobs = [Job(SAME_RULES), Job(POLICY, whole=False), Job(ONE_WORD_OTHER), Job(POLICY, lose_records=True), Job(POLICY)]
    return [compile_and_train(job) for job in jobs]


def in_another_process(program: str, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    done = python("-m", f"tests.support.{program}", *arguments, timeout=500, PYTHONHASHSEED="4321", **environment)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_another_process_with_another_hash_seed_finds_the_same(warm, cache, tmp_path) -> None:
    jobs = [Job(SAME_RULES), Job(POLICY, whole=False), Job(POLICY, lose_records=True), Job(POLICY)]
    assert elsewhere(jobs, tmp_path, cache) == [*warm[:2], *warm[3:]]


def elsewhere(jobs: Sequence[Job], folder: Path, cache: Path) -> list[dict[str, Any]]:
    files = [folder / f"{number}.json" for number in range(len(jobs))]
    for file, job in zip(files, jobs, strict=True):
        file.write_text(json.dumps(job._asdict()), encoding="utf-8")
    return in_another_process("cache_process", *map(str, files), TORCHINDUCTOR_CACHE_DIR=str(cache))


@pytest.mark.slow
def test_a_form_is_part_of_the_key_and_of_what_is_kept(cache: Path, tmp_path: Path) -> None:
    job, other = (Job(f"recompute everything\nsave mm as {form}\n", whole=False) for form in ("bfloat16", "float16"))
    torch._dynamo.reset()
    cold, changed, again = map(compile_and_train, (job, other, job))
    assert [(each["aot hits"], each["aot misses"]) for each in (cold, changed, again)] == [(0, 1), (0, 1), (1, 0)]
    assert again["gradient"] == cold["gradient"]
    found = elsewhere([job, other], tmp_path, cache)
    assert [(each["aot hits"], each["from cache"]) for each in found] == [(1, [True])] * 2
    for figure in ("gradient", "bytes", "saved"):
        assert [each[figure] for each in found] == [cold[figure], changed[figure]]
    torch.manual_seed(0)
    made = torch.ones(8, 8) @ Halves(whole=False).first.weight.detach().t()
    by_hand = (torch.ones(8, 8) @ made.bfloat16().float().t()).t() @ torch.ones(8, 8)
    assert cold["gradient"] == pytest.approx(by_hand.sum().item(), rel=1e-6)
    assert changed["gradient"] != pytest.approx(cold["gradient"], rel=1e-6)


def test_the_first_compilation_misses_and_is_recorded(cold: dict[str, Any], cache: Path) -> None:
    assert (cold["aot hits"], cold["aot misses"]) == (0, 2)
    assert cold["saved"] == [["mm"], ["bmm"]]
    assert cold["from cache"] == [False, False]
    assert len(list((cache / "policylang").rglob("*.json"))) == 2


def test_the_same_policy_hits_both_caches_and_reports_what_was_decided(cold, warm) -> None:
    again = warm[0]
    assert again["code"] == cold["code"], "the sources were edited while the test ran, and they are in the key"
    assert (again["aot hits"], again["aot misses"]) == (2, 0)
    assert (again["fx hits"], again["fx misses"]) == (cold["fx misses"], 0)
    assert again["from cache"] == [True, True]
    assert again["gradient"] == cold["gradient"]
    for figure in ("saved", "bytes", "matched"):
        assert again[figure] == cold[figure]
    assert cold["lines"] == ["<policy>:1", "<policy>:2", "<policy>:3"]
    assert again["lines"] == ["<policy>:3", "<policy>:4", "<policy>:5"]


def test_a_rule_that_matches_nothing_is_told_from_a_cache(warm: list[dict[str, Any]]) -> None:
    half = warm[1]
    assert half["aot hits"] == 1
    assert half["from cache"] == [True]
    assert half["errors"] == ["APL301: `save aten.bmm` matches nothing in this graph"]
    assert half["gradient"] is None


def test_one_word_misses(warm: list[dict[str, Any]]) -> None:
    other = warm[2]
    assert (other["aot hits"], other["aot misses"]) == (0, 2)
    assert other["fx hits"] == 0


def test_a_lost_record_costs_a_compilation_and_no_check(cold: dict[str, Any], warm: list[dict[str, Any]]) -> None:
    lost, after = warm[3:]
    assert lost["aot hits"] == 2
    assert lost["from cache"] == [False, False]
    for figure in ("saved", "bytes", "matched", "gradient"):
        assert lost[figure] == cold[figure]
    assert after["from cache"] == [True, True]


FUSED = "save everything\nfuse all_gather chains\n"


@pytest.fixture
def fused_cache(tmp_path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        yield tmp_path


@needs_groups_in_any_order
@pytest.mark.slow
@pytest.mark.parametrize("process", ["this one", "another", "an evaluation"])
def test_what_has_no_groups_yet_makes_those_of_the_graph_that_it_finds(fused_cache: Path, process: str) -> None:
    gradients = process != "an evaluation"
    cold = train_fused(FUSED, gradients)
    assert (cold["saved"] is not None) == gradients
    assert cold["from cache"] == [False]
    ((name, ranks),) = cold["made"]
    assert sorted(ranks) == list(range(8))
    assert not [known for known in distributed.known_groups() if known.name == name]
    warm = in_another_process("fused_process", FUSED)[-1] if process == "another" else train_fused(FUSED, gradients)
    assert warm["code"] == cold["code"], "the sources were edited while the test ran, and they are in the key"
    assert warm["from cache"] == [True]
    assert warm["hits"] == 1
    assert warm["made"] == [[name, ranks]]
    assert (warm["rewrites"], warm["saved"]) == (cold["rewrites"], cold["saved"])


def test_a_mesh_that_is_laid_out_otherwise_has_another_key() -> None:
    """Its groups may be called the same; their ranks are in no graph."""
    fusing = policylang.parse(FUSED)
    keys = []
    for ranks in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]):
        with fake_ranks(4):
            DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("dp", "tp"))
            before = caching.groups_key(fusing)
            runtime.ensure_groups([RankOrder((0, 2, 1, 3), "fake")])
            assert caching.groups_key(fusing) == before, "what a first graph made is no matter to a second one"
            keys.append(before)
    assert keys[0] == keys[2] != keys[1]
    assert caching.groups_key(policylang.parse("save everything")) == ""
