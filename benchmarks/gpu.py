"""Everything here that wants a GPU, in one run within a time limit, into one results file.

    ./scripts/gpu                        # what a person types: finds torch, brings along what is missing, runs this
    python -m benchmarks.gpu --json results.json --minutes 10

First ``tests/gpu``, then each benchmark that measures on a device: a training step at 1B and at 8B shapes beside eager
selective checkpointing and ``activation_memory_budget`` (peak allocated and reserved, step time, the audit),
offloading, replay in eager, recomputation on a flat graph, and the gathers of 128 ranks. Each part is a process of its
own with a share of the minutes. One that fails, or that the time is not enough for, is named in the file and in the
exit status; what it had measured by then is kept. The benchmarks that know no device (``plan_cost``, ``cli``,
``ranks``) measure the processor and are not part of it.

``--device cpu`` is a rehearsal at tiny shapes, for a machine without a GPU: it shows that every part runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import torch
from attrs import frozen

from benchmarks.common import machine, table, write_results

ROOT = Path(__file__).parent.parent
BENCHMARK = (sys.executable, "-m")
LEAST_SECONDS = 10.0
"""With less time left than it takes to import torch, a part is not started."""


@frozen
class Part:
    """A command that leaves a file."""

    name: str
    command: tuple[str, ...]
    """Followed by the path of the file it is to write."""
    minutes: float
    """At most, of the time that is left when it starts."""
    read: Callable[[Path], dict[str, Any]]
    cannot: str = ""
    """Why this torch cannot run it."""


def read_json(path: Path) -> dict[str, Any]:
    """A benchmark's own results; the machine is told once for all."""
    found: dict[str, Any] = json.loads(path.read_text())
    found.pop("machine", None)
    return found


def read_tests(path: Path) -> dict[str, Any]:
    """Of pytest's JUnit file: how each test ended, and what it recorded."""
    rows = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        endings = [child for child in case if child.tag in ("failure", "error", "skipped")]
        row: dict[str, Any] = {
            "test": f"{case.get('classname', '').removeprefix('tests.gpu.')}::{case.get('name')}",
            "outcome": endings[0].tag if endings else "passed",
            "s": float(case.get("time", 0)),
        }
        if endings:
            row["message"] = (endings[0].get("message") or "").splitlines()[0][:300]
        row |= {each.get("name", ""): each.get("value") for each in case.iter("property")}
        rows.append(row)
    return {"tests": rows}


def parts(device: str, policy: str) -> list[Part]:
    """In the order of what is wanted most, so that a short time leaves out the rest."""
    tiny = device == "cpu"

    def benchmark(name: str, minutes: float, *options: str, cannot: str = "") -> Part:
        module, _, label = name.partition(", ")
        command = (*BENCHMARK, f"benchmarks.{module}", *options, "--device", device, "--json")
        return Part(f"{module} {label}".strip(), command, minutes, read_json, cannot)

    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
    no_meshes = "before torch 2.12, a part of a device mesh cannot be taken while a graph is traced" if old else ""

    step = ("--policy", policy, "--steps", "2" if tiny else "5")
    small, large = ("tiny", "tiny") if tiny else ("1b", "8b")
    return [
        Part(
            "tests/gpu",
            (
                *BENCHMARK,
                "pytest",
                "tests/gpu",
                "-q",
                "-p",
                "no:cacheprovider",
                "-o",
                "junit_family=xunit1",
                "--junitxml",
            ),
            3.0,
            read_tests,
        ),
        benchmark("training_step, 1b inductor", 3.5, *step, "--shape", small, "--inner", "inductor"),
        benchmark("training_step, 8b aot_eager", 3.5, *step, "--shape", large, "--inner", "aot_eager"),
        benchmark("offload", 1.5, "--shape", small, "--steps", "2" if tiny else "7"),
        benchmark("eager", 1.0, *(("--layers", "1", "--repeats", "1") if tiny else ())),
        benchmark(
            "flat_graph", 1.5, "--layers", *(("2", "--peak-layers", "1", "--length", "64") if tiny else ("2", "8"))
        ),
        benchmark("llama3_8b_128_ranks", 1.5, "--layers", "1" if tiny else "2", cannot=no_meshes),
    ]


def run(part: Part, folder: Path, seconds: float) -> dict[str, Any]:
    """What became of a part: ``outcome`` is ``done``, ``failed`` or ``out of time``, beside what it measured."""
    path = folder / "results"
    path.unlink(missing_ok=True)
    print(f"\n== {part.name}, at most {seconds:.0f} s", flush=True)
    start = time.perf_counter()
    process = subprocess.Popen((*part.command, str(path)), cwd=ROOT, start_new_session=True)
    try:
        code = process.wait(seconds)
        outcome = "done" if code == 0 else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its workers too: they hold memory of the device
        code, outcome = process.wait(), "out of time"
    found = {"part": part.name, "outcome": outcome, "exit": code, "s": time.perf_counter() - start}
    try:
        return {**found, **part.read(path)}
    except (OSError, ValueError, ElementTree.ParseError):
        return found  # it ended before it wrote anything


def run_all(
    chosen: Sequence[Part], minutes: float, write: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Each part's account. ``write`` is called after each, so that an interrupted run leaves what it has."""
    deadline = time.monotonic() + 60 * minutes
    accounts: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        for part in chosen:
            left = deadline - time.monotonic()
            if part.cannot:
                accounts.append({"part": part.name, "outcome": "left out", "reason": part.cannot, "s": 0.0})
            elif left < LEAST_SECONDS:
                accounts.append({"part": part.name, "outcome": "not started", "s": 0.0})
            else:
                accounts.append(run(part, Path(folder), min(60 * part.minutes, left)))
            write(accounts)
    return accounts


def failures(accounts: Sequence[dict[str, Any]]) -> list[str]:
    """What a person has to look at, a line each."""
    found = [f"{each['part']}: {each['outcome']}" for each in accounts if each["outcome"] not in ("done", "left out")]
    for each in accounts:
        for row in each.get("rows", []):
            if "failed" in row:
                found.append(f"{each['part']}: {row['contender']}: {row['failed']}")
            elif row.get("audit") not in (None, "agrees"):
                found.append(f"{each['part']}: {row['contender']}: {row['audit']}")
        for row in each.get("tests", []):
            if row["outcome"] in ("failure", "error"):
                found.append(f"{row['test']}: {row['message']}")
    return found


def default_path(device: str) -> Path:
    """Named for what the figures were taken on: ``gpu_h100-80gb-hbm3_torch-2.11.0.json``."""
    what = machine()
    words = (what["gpu"] or device).lower().replace("nvidia", "").split()
    version = what["torch"].partition("+")[0]
    return ROOT / "benchmarks" / "results" / f"gpu_{'-'.join(words)}_torch-{version}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9.5, help="of the whole run, what starts and ends it included")
    parser.add_argument("--policy", default="llama3_sac.apl")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="parts whose name has one of these words")
    parser.add_argument("--json", type=Path, help="default: a file in benchmarks/results named for the GPU and torch")
    options = parser.parse_args(arguments)
    chosen = [
        part
        for part in parts(options.device, options.policy)
        if options.only is None or not set(options.only).isdisjoint(part.name.split())
    ]
    if not chosen:
        parser.error("no part has such a name: " + ", ".join(part.name for part in parts("cuda", "")))
    path = options.json or default_path(options.device)

    def write(accounts: list[dict[str, Any]]) -> None:
        write_results(path, {"benchmark": "gpu", "policy": options.policy, "parts": accounts})

    accounts = run_all(chosen, options.minutes, write)
    print("\n" + table([{key: each.get(key) for key in ("part", "outcome", "s", "reason")} for each in accounts]))
    wrong = failures(accounts)
    for line in wrong:
        print(line)
    print(f"\nwritten to {path}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
