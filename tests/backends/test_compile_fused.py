"""A compiled graph that names groups of policylang's own is taken from Inductor's caches by a process without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import policylang
from policylang.backends import caching, runtime
from policylang.backends.runtime import RankOrder
from policylang.torch_compat import distributed
from tests.support.fused_process import compile_and_train
from tests.support.sharded import fake_ranks
from tests.support.versions import needs_groups_in_any_order

POLICY = "save everything\nfuse all_gather chains\n"
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        yield tmp_path


@needs_groups_in_any_order
@pytest.mark.parametrize("process", ["this one", pytest.param("another", marks=pytest.mark.slow), "an evaluation"])
def test_what_has_no_groups_yet_makes_those_of_the_graph_that_it_finds(cache: Path, process: str) -> None:
    gradients = process != "an evaluation"
    cold = compile_and_train(POLICY, gradients)
    assert (cold["saved"] is not None) == gradients
    assert cold["from cache"] == [False]
    ((name, ranks),) = cold["made"]
    assert sorted(ranks) == list(range(8))
    assert not [known for known in distributed.known_groups() if known.name == name]
    warm = in_another_process() if process == "another" else compile_and_train(POLICY, gradients)
    assert warm["code"] == cold["code"], "the sources were edited while the test ran, and they are in the key"
    assert warm["from cache"] == [True]
    assert warm["hits"] == 1
    assert warm["made"] == [[name, ranks]]
    assert (warm["rewrites"], warm["saved"]) == (cold["rewrites"], cold["saved"])


def in_another_process() -> dict[str, Any]:
    environment = {**os.environ, "PYTHONHASHSEED": "4321"}
    command = [sys.executable, "-m", "tests.support.fused_process", POLICY]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_mesh_that_is_laid_out_otherwise_has_another_key() -> None:
    """Its groups may be called the same; their ranks are in no graph."""
    fusing = policylang.parse(POLICY)
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
