"""One run over everything that wants a GPU: what is measured is kept, what is not is named, and the time is a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from benchmarks import gpu

SCRIPT = gpu.ROOT / "scripts" / "gpu"


def part(name: str, code: str, minutes: float = 1.0) -> gpu.Part:
    return gpu.Part(
        name, (sys.executable, "-c", f"import sys, time, json; path = sys.argv[1]\n{code}"), minutes, gpu.read_json
    )


def wrote(rows: list[dict[str, Any]]) -> str:
    return f"open(path, 'w').write(json.dumps({{'machine': 'told once', 'rows': {rows!r}}}))"


def test_each_part_ends_by_itself_and_leaves_what_it_measured() -> None:
    agrees = [{"contender": "policylang", "audit": "agrees"}]
    kept: list[list[str]] = []
    accounts = gpu.run_all(
        [
            part("whole", wrote(agrees)),
            part("cut short", wrote(agrees) + "\nsys.stdout.flush(); time.sleep(60)", minutes=0.5 / 60),
            part("broken", "sys.exit(3)"),
            part("no memory", wrote([{"contender": "eager", "failed": "out of memory"}])),
            part("otherwise", wrote([{"contender": "policylang", "audit": "mm_3 is not saved"}])),
        ],
        minutes=5,
        write=lambda found: kept.append([each["part"] for each in found]),
    )
    assert [each["outcome"] for each in accounts] == ["done", "out of time", "failed", "done", "done"]
    assert accounts[0]["rows"] == accounts[1]["rows"] == agrees
    assert "machine" not in accounts[0]
    assert accounts[2]["exit"] == 3
    assert kept[0] == ["whole"]
    assert len(kept[-1]) == 5
    assert gpu.failures(accounts) == [
        "cut short: out of time",
        "broken: failed",
        "no memory: eager: out of memory",
        "otherwise: policylang: mm_3 is not saved",
    ]


def test_the_limit_is_that_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 0.3)
    start = time.monotonic()
    sleeps = part("long", "time.sleep(60)")
    never = evolve(sleeps, cannot="torch is too old for it")
    accounts = gpu.run_all([sleeps, never, sleeps], minutes=0.5 / 60, write=lambda _: None)
    assert [each["outcome"] for each in accounts] == ["out of time", "left out", "not started"]
    assert accounts[1]["reason"] == "torch is too old for it"
    assert gpu.failures(accounts) == ["long: out of time", "long: not started"]
    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_how_each_test_ended_and_what_it_recorded(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(record_property): record_property('allocated_ratio', 0.9)\n"
        "def test_bad(): assert 1 == 2, 'one is not two'\n"
        "@pytest.mark.skip(reason='needs four GPUs')\n"
        "def test_left(): pass\n"
    )
    path = tmp_path / "junit.xml"
    command = (*gpu.parts("cpu", "")[0].command, str(path))
    arguments = [str(tmp_path) if each == "tests/gpu" else each for each in command]
    subprocess.run(arguments, cwd=tmp_path, capture_output=True)
    rows = {row["test"].rpartition("::")[2]: row for row in gpu.read_tests(path)["tests"]}
    assert rows["test_good"]["outcome"] == "passed"
    assert rows["test_good"]["allocated_ratio"] == "0.9"
    assert rows["test_left"]["outcome"] == "skipped"
    assert "needs four GPUs" in rows["test_left"]["message"]
    assert [
        line.rpartition("::")[2]
        for line in gpu.failures([{"part": "tests", "outcome": "done", **gpu.read_tests(path)}])
    ] == ["test_bad: AssertionError: one is not two"]


def test_every_benchmark_that_knows_a_device_is_a_part_of_the_run() -> None:
    folder = gpu.ROOT / "benchmarks"
    with_device = {path.stem for path in folder.glob("*.py") if '"--device"' in path.read_text()} - {"gpu"}
    commands = [part.command for part in gpu.parts("cuda", "llama3_sac.apl")]
    assert {
        word.removeprefix("benchmarks.") for command in commands for word in command if "benchmarks." in word
    } == with_device
    assert all(command[command.index("--device") + 1] == "cuda" for command in commands[1:])
    shapes = [command[command.index("--shape") + 1] for command in commands if "benchmarks.training_step" in command]
    assert shapes == ["1b", "8b"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_says_so_and_installs_nothing() -> None:
    before = (gpu.ROOT / ".venv-gpu").exists()
    found = subprocess.run([SCRIPT], capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable})
    assert found.returncode == 2
    assert found.stderr == "no GPU: nvidia-smi finds none; `scripts/gpu --device cpu` rehearses the run without one\n"
    assert (gpu.ROOT / ".venv-gpu").exists() == before


@pytest.mark.slow
def test_a_rehearsal_without_a_gpu_runs_every_part(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    arguments = ["--device", "cpu", "--minutes", "30", "--json", str(path)]
    found = subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable}
    )
    results = json.loads(path.read_text())
    assert found.returncode == 0, found.stdout + found.stderr
    assert results["machine"]["torch"] == torch.__version__
    steps = {each["part"]: each["rows"] for each in results["parts"] if each["part"].startswith("training_step")}
    assert len(steps) == 2
    for rows in steps.values():
        ours = next(row for row in rows if row["contender"].startswith("policylang"))
        assert ours["audit"] == "agrees"
        assert {"eager SAC by hand", "memory budget 0.5"} <= {row["contender"].partition(",")[0] for row in rows}
