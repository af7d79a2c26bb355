"""Clocks: of the processor for a CPU, of events on the stream for a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from attrs import define, field

from policylang.profiling.trials import Run, Trial

SAMPLE, SAMPLES = 1.5e-3, 3
"""Seconds that the runs of one sample take together, long beside what a clock costs; and of how many the least counts,
since whatever else a machine does only adds."""
MOST_RUNS = 4000


@define
class DeviceClock:
    """Times trials on a device, each after a run that is not counted.

    On a CPU with one thread it is the thread's own processor time, which others that use the machine leave alone; with
    several it is time at the wall. On a GPU two events on the stream, around runs that follow each other.
    """

    device: torch.device
    _runs: dict[str, int] = field(factory=dict, repr=False)

    def now(self) -> float:
        return time.monotonic()

    def seconds(self, trial: Trial) -> float:
        run = trial.prepare()
        sample = self._on_stream if self.device.type == "cuda" else _of_processor
        name = f"{trial.name} {trial.work}"
        run()  # compiles, chooses kernels, fills caches
        if name not in self._runs:
            once = min(sample(run, 1) for _ in range(SAMPLES))
            self._runs[name] = max(1, min(MOST_RUNS, round(SAMPLE / max(once, 1e-7))))
            if self._runs[name] == 1:
                return once
        return min(sample(run, self._runs[name]) for _ in range(SAMPLES))

    def _on_stream(self, run: Run, runs: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        start.record()
        for _ in range(runs):
            run()
        end.record()
        torch.cuda.synchronize(self.device)
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3 / runs


def _of_processor(run: Run, runs: int) -> float:
    clock: Callable[[], float] = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(runs):
        run()
    return (clock() - start) / runs
