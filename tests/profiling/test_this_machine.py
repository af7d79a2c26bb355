"""Real measurements of this machine, small ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from policylang.language.devices.reading import read_device
from policylang.profiling.trials import (
    STREAM,
    DeviceClock,
    Operands,
    Trial,
    functions,
    fused,
    host_copies,
    measure,
    products,
    shares,
    streams,
)

CPU = torch.device("cpu")


def small(trials: list[Trial]) -> list[Trial]:
    """The least size of each."""
    return list({(each.name, each.key, each.ladder): each for each in reversed(trials)}.values())


def test_every_trial_runs_here_and_takes_some_time() -> None:
    operands = Operands(CPU)
    trials = [
        *(each for each in products(operands) if each.key != "float16"),  # some processors have none
        *(each for each in streams(operands) if each.key != STREAM or each.work <= 2**22),
        *host_copies(operands),
        *shares(operands, torch.float32),
        *functions(operands),
    ]
    found = measure(small(trials), DeviceClock(CPU), budget=1e-6)
    assert found.rounds == 1
    assert found.refused == {}
    assert all(0 < timing.seconds < 10 for timing in found.of.values())


@pytest.mark.slow
def test_the_command_on_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    command = [sys.executable, "-m", "policylang", "profile", "-o", str(path), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += ["--compiled", "--seconds", "5"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "Traceback" not in ran.stderr
    device = read_device(path)
    assert 0 < device.pointwise <= 1
    assert 1e8 < device.compute["float32"].at(1e9) < 1e15


@pytest.mark.slow
def test_fused_chains_compute_what_they_compute_in_eager() -> None:
    trials = list(fused(Operands(CPU)))
    for eager, compiled in zip(trials[::2], trials[1::2], strict=True):
        torch.testing.assert_close(eager.prepare()(), compiled.prepare()())


@pytest.mark.slow
def test_under_torchrun_the_collectives_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "policylang", "profile", "-o", str(path), "--device", "cpu", "--seconds", "6"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert "deprecated" not in ran.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["node.table", "node.toml"]
    assert ran.stdout.count("GFLOP/s in float32") == 1  # the first rank speaks
    device = read_device(path)
    (network,) = device.networks
    assert network.ranks is None
    assert network.bandwidth
    measured = {each.collective: each for each in network.times}
    assert {"all_gather_into_tensor", "all_reduce", "all_to_all_single"} <= set(measured)
    for each in measured.values():
        assert each.ranks == 2
        assert all(seconds > 0 for _, seconds in each.points)
        assert each.points[0][0] == 2**20

    # What one rank cannot do, all say, and none waits for another
    ran = subprocess.run(
        [*command[:-5], str(tmp_path / "nowhere" / "node.toml")], capture_output=True, text=True, env=environment
    )
    assert ran.returncode != 0
    assert "cannot write" in ran.stderr
